"""Memory that merges in this process may take, and reservations of it."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Sequence
from pathlib import Path

from stream_merge.engines.costs import Work
from stream_merge.spark.memory import SHARE_OF_FREE_MEMORY, groups
from stream_merge.tables.files.eligibility import Ineligible
from stream_merge.tables.files.find import Candidate


class Reservations:
    """Reservations of the running merges. One object per process: they share its memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = 0

    @property
    def promised(self) -> int:
        """Bytes reserved by running merges."""
        return self._taken

    def allowed(self) -> int:
        """Bytes that could be reserved now; may be negative."""
        return int(SHARE_OF_FREE_MEMORY * free_memory_bytes()) - self._taken

    def take(self, wanted: int, ceiling: int | None) -> int | None:
        """Reserve so many bytes and return None, or return how many are allowed."""
        with self._lock:
            allowed = self.allowed() if ceiling is None else ceiling
            if wanted > allowed:
                return max(0, allowed)
            self._taken += wanted
            return None

    def give_back(self, taken: int) -> None:
        """Release reserved bytes."""
        with self._lock:
            self._taken -= taken


reservations = Reservations()


class Promise:
    """Memory reserved for one merge. `ceiling`: bytes that it may take whatever others do; None: what is free."""

    def __init__(self, ceiling: int | None) -> None:
        self._ceiling = ceiling
        self._taken = 0

    def cover(self, wanted: int) -> int | None:
        """Extend the reservation to so many bytes in all and return None, or return how many were allowed."""
        more = wanted - self._taken
        if more <= 0:
            return None
        ceiling = None if self._ceiling is None else self._ceiling - self._taken
        allowed = reservations.take(more, ceiling)
        if allowed is not None:
            return self._taken + allowed
        self._taken = wanted
        return None

    def close(self) -> None:
        """Release all; harmless when repeated."""
        reservations.give_back(self._taken)
        self._taken = 0


def free_memory_bytes() -> int:
    """Memory that this process may still take: the least of machine, control group and `ulimit`."""
    return min([_free_on_the_machine(), *_free_in_the_groups(), *_free_in_the_limit()])


def _free_on_the_machine() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            available = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(available.split()[1]) * 1024
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _free_in_the_groups() -> list[int]:
    """What the limits of a container or a service leave (cgroup v2 and v1)."""
    free = []
    for folder, limit, used, cached in groups():
        try:
            most, taken = (int((folder / name).read_text("ascii")) for name in (limit, used))
        except (OSError, ValueError):  # no such group, or "max"
            continue
        free.append(max(0, most - taken + _let_go(folder / "memory.stat", cached)))
    return free


def _let_go(stat: Path, cached: str) -> int:
    """Bytes of cached files: they count as used, and are freed when memory is needed."""
    try:
        return int(dict(line.split() for line in stat.read_text("ascii").splitlines())[cached])
    except (OSError, ValueError, KeyError):
        return 0


def _free_in_the_limit() -> list[int]:
    """What `ulimit -v` leaves: an allocation beyond it ends the process in the middle of a merge."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return []
    try:
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    except (OSError, ValueError):
        return []
    return [max(0, limit - pages * os.sysconf("SC_PAGE_SIZE"))]


BASE_BYTES = 256 << 20
"""Memory of DuckDB's readers and Arrow, however little they read."""
COPIES_OF_EVENTS, COPIES_OF_ROWS = 3, 4
"""Copies in memory: as read, before and after the clauses, and in the new files."""


def memory_before(
    work: Work, touched: Sequence[Candidate], event_bytes: int | None, *, rewriting: int = 0, is_whole: bool = False
) -> int:
    """Bytes that a merge may take, estimated before rows are read: one row for each event.

    `event_bytes` is None while the events are not in the driver; `rewriting`: bytes of rows in memory at once while
    files are rewritten; `is_whole`: all rows of the files are read, beside a full copy of the table.
    """
    files = [one.footer for one in touched]
    rows = sum(file.rows for file in files)
    width = sum(file.row_bytes * file.rows for file in files) / rows if rows else work.row_bytes
    row_bytes = int(width * (rows if is_whole else min(work.events, rows)))
    return memory_needed(int(width * work.events) if event_bytes is None else event_bytes, row_bytes + rewriting)


def refusal_of_memory(promise: Promise, wanted: int) -> Ineligible | None:
    """Reserve so many bytes in all; or why they are not available."""
    allowed = promise.cover(wanted)
    if allowed is None:
        return None
    megabytes = f"{wanted / 1e6:,.0f} MB of the driver's memory, of {allowed / 1e6:,.0f} MB allowed"
    return Ineligible(reason="memory", detail=f"the merge might need {megabytes}")


def memory_needed(event_bytes: int, row_bytes: int) -> int:
    """Bytes that a merge takes, by the bytes of its events and of the rows of their keys."""
    return BASE_BYTES + COPIES_OF_EVENTS * event_bytes + COPIES_OF_ROWS * row_bytes
