"""Merges that run side by side in one process share its memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stream_merge.engines import memory
from stream_merge.engines.memory import Reservations, free_memory_bytes
from stream_merge.spark import memory as groups
from stream_merge.spark.memory import container_limit, heap, shares


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
    monkeypatch.setattr(groups, "CGROUPS", tmp_path)

    assert free_memory_bytes() == 800
    (group / "memory.stat").unlink()
    assert free_memory_bytes() == 100
    (group / limit).write_text("max\n")
    assert free_memory_bytes() > 1000


@pytest.mark.parametrize("name", ["memory.max", "memory/memory.limit_in_bytes", "system.slice/job.service/memory.max"])
@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (1 << 30, "512m"),
        (2 << 30, "512m"),
        (4 << 30, "1536m"),
        (8 << 30, "3584m"),
        (1 << 62, "2048m"),
        ("max", "2048m"),
    ],
)
def test_sparks_heap_follows_from_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, limit: int | str, expected: str
):
    """Of a container (cgroup v2 and v1) or a service of systemd, unless it allows more than the machine has."""
    own = tmp_path / "own"
    own.write_text("4:memory:/elsewhere\n0::/system.slice/job.service\n")
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{limit}\n")
    monkeypatch.setattr(groups, "CGROUPS", tmp_path)
    monkeypatch.setattr(groups, "OWN_GROUP", own)
    monkeypatch.setattr(groups, "_machine", lambda: 64 << 30)
    monkeypatch.setattr("stream_merge.spark.confs.spark_defaults", dict)

    assert heap({}) == expected
    assert heap({"spark.driver.memory": "5g"}) == "5g"
    assert (container_limit() is None) == (expected == "2048m")
    assert shares().startswith("machine 64.0 GiB" if expected == "2048m" else f"limit {int(limit) >> 30}.0 GiB: ")
