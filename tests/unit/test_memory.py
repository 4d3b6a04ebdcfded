"""Merges that run side by side in one process share its memory."""

from __future__ import annotations

import subprocess
import sys

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
