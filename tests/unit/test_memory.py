"""Merges that run side by side in one process share its memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stream_merge.engines import memory
from stream_merge.engines.memory import Reservations, free_memory_bytes


@pytest.fixture
def reservations(monkeypatch: pytest.MonkeyPatch) -> Reservations:
    """1,000 bytes are free, of which merges may have 400."""
    monkeypatch.setattr(memory, "free_memory_bytes", lambda: 1_000)
    return Reservations()


def test_what_one_merge_was_promised_another_cannot_have(reservations: Reservations):
    assert reservations.take(300, None) is None
    assert reservations.take(101, None) == 100
    assert reservations.take(100, None) is None
    assert reservations.take(1, None) == 0

    reservations.give_back(300)
    assert reservations.take(300, None) is None


def test_a_ceiling_of_its_own_holds_whatever_others_take(reservations: Reservations):
    assert reservations.take(400, None) is None
    assert reservations.take(500, 500) is None
    assert reservations.take(501, 500) == 500


def test_free_memory_is_that_of_this_machine():
    assert 64 << 20 < free_memory_bytes() < 1 << 50


def test_a_limit_of_the_process_counts():
    """Beyond it delta-rs would be ended in the middle of a merge, however much the machine has."""
    script = """
import resource
from stream_merge.engines.memory import free_memory_bytes
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, resource.getrlimit(resource.RLIMIT_AS)[1]))
held = bytearray(1 << 30)
print(free_memory_bytes())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert 0 < int(done.stdout) < 3 << 30


@pytest.mark.parametrize(
    "names",
    [
        ("", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
    ids=["v2", "v1"],
)
def test_files_that_a_container_has_read_are_free_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, str, str, str]
):
    """They count as used until somebody wants the memory."""
    folder, limit, used, cached = names
    group = tmp_path / folder
    group.mkdir(exist_ok=True)
    for name, text in ((limit, "1000"), (used, "900"), ("memory.stat", f"anon 100\n{cached} 700\nslab 50")):
        (group / name).write_text(f"{text}\n")
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)

    assert free_memory_bytes() == 800
    (group / "memory.stat").unlink()
    assert free_memory_bytes() == 100
    (group / limit).write_text("max\n")
    assert free_memory_bytes() > 1000
