"""When a sink looks after its target's files: every so many calls, unless the stream is behind."""

from __future__ import annotations

import time
from collections import deque
from itertools import pairwise

from pyspark.sql import SparkSession

from stream_merge.model.maintenance import Maintenance
from stream_merge.model.results import Upkeep
from stream_merge.tables.upkeep import TableUpkeep

_CALLS = 5
_LEAST_PAUSE = 0.1
"""A stream that waits for less than this share of its calls' time has more to do than it gets done."""


class UpkeepPlan:
    """Counts the calls of one sink.

    Args:
        target: as the sink was told.
        wanted: what to do, and how often.
    """

    def __init__(self, target: str, wanted: Maintenance) -> None:
        self._every = wanted.every
        self._table = TableUpkeep(target, wanted)
        self._changed = 0
        self._calls: deque[tuple[float, float]] = deque(maxlen=_CALLS)
        """Start and end of the last calls, without their upkeep, in seconds of a clock of its own."""

    def round(self, session: SparkSession, *, started: float, changed: bool, in_query: bool) -> Upkeep | None:
        """A round at the end of a call, if one is due.

        Args:
            session: the sink's own.
            started: when the call began, by `time.perf_counter`.
            changed: whether the call has committed to the target.
            in_query: whether a streaming query called.
        """
        self._calls.append((started, time.perf_counter()))
        self._changed += changed
        if self._changed < self._every:
            return None
        if in_query and self._is_behind():
            return Upkeep(outcome="behind")
        self._changed = 0
        found = self._table.round(session)
        self._calls.clear()  # the pause before the next call was this round
        return found

    def _is_behind(self) -> bool:
        """Whether one call has followed the other without a pause."""
        if len(self._calls) < _CALLS:
            return False
        calls = list(self._calls)
        busy = sum(end - start for start, end in calls)
        pauses = sum(after[0] - before[1] for before, after in pairwise(calls))
        return pauses < _LEAST_PAUSE * busy
