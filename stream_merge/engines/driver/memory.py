"""How much memory a merge in the driver takes."""

from __future__ import annotations

from collections.abc import Sequence

from stream_merge.engines.costs import Work
from stream_merge.engines.memory import Promise
from stream_merge.tables.merge_on_read.table import Touched
from stream_merge.tables.whitelist import Ineligible

BASE_BYTES = 256 << 20
"""What DuckDB's readers and Arrow hold, however little they read."""
COPIES_OF_EVENTS, COPIES_OF_ROWS = 3, 4
"""Events and rows as they are read, before and after the clauses, and in the files that are made of them."""


def memory_before(
    work: Work, touched: Sequence[Touched], event_bytes: int | None, *, rewriting: int = 0, is_whole: bool = False
) -> int:
    """Bytes that a merge may take, before the rows of its keys are looked for: one row for each event.

    Args:
        work: of the merge.
        touched: the files that may hold rows of its keys.
        event_bytes: of its events; None where they are not there yet.
        rewriting: bytes of rows that are in memory at once while files are rewritten.
        is_whole: whether all rows of the files are read, a copy of the whole table beside them.
    """
    files = [one.candidate.footer for one in touched]
    rows = sum(file.rows for file in files)
    width = sum(file.row_bytes * file.rows for file in files) / rows if rows else work.row_bytes
    row_bytes = int(width * (rows if is_whole else min(work.events, rows)))
    return memory_needed(int(width * work.events) if event_bytes is None else event_bytes, row_bytes + rewriting)


def refusal_of_memory(promise: Promise, wanted: int) -> Ineligible | None:
    """Have so many bytes promised in all; or why they are not."""
    allowed = promise.cover(wanted)
    if allowed is None:
        return None
    megabytes = f"{wanted / 1e6:,.0f} MB of the driver's memory, of {allowed / 1e6:,.0f} MB allowed"
    return Ineligible(reason="memory", detail=f"the merge might need {megabytes}")


def memory_needed(event_bytes: int, row_bytes: int) -> int:
    """Bytes that a merge takes, by those of its events and of the rows of their keys."""
    return BASE_BYTES + COPIES_OF_EVENTS * event_bytes + COPIES_OF_ROWS * row_bytes
