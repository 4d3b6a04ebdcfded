"""When a sink looks after its target's files: every so many calls, unless the stream is behind."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from itertools import pairwise

from pyspark.sql import SparkSession

from stream_merge.model.logs import tell
from stream_merge.model.maintenance import Maintenance
from stream_merge.model.results import Upkeep
from stream_merge.model.settings import MergeSpec
from stream_merge.spark.streaming import Trigger, ended_triggers
from stream_merge.tables.upkeep import TableUpkeep, beside

log = logging.getLogger(__name__)

_TRIGGERS = 5
_LEAST_PAUSE = 0.1
"""A stream that waits for less than this share of its triggers' time has more to do than it gets done."""


class UpkeepPlan:
    """Counts the calls of one sink.

    Args:
        spec: of the sink.
        wanted: what to do, and how often.
    """

    def __init__(self, spec: MergeSpec, wanted: Maintenance) -> None:
        self._every = wanted.every
        tombstones = spec.tombstone_target if spec.tombstones else None
        quarantine = spec.quarantine_table if spec.quarantine_target is None else None  # one of the user's is theirs
        self._table = TableUpkeep(spec.target, wanted, beside(tombstones, quarantine))
        self._changed = 0
        self._last_ended = 0.0
        """When the last round was over, in seconds since the epoch."""

    def round(self, session: SparkSession, *, changed: bool, query_id: str | None) -> Upkeep | None:
        """A round at the end of a call, if one is due.

        Args:
            session: the sink's own.
            changed: whether the call has committed to the target.
            query_id: of the streaming query that called; None: none has, and nobody waits.
        """
        self._changed += changed
        if self._changed < self._every:
            return None
        if query_id is not None and self._is_behind(_triggers(session, query_id)):
            return Upkeep(outcome="behind")
        self._changed = 0
        found = self._table.round(session)
        self._last_ended = time.time()
        return found

    def _is_behind(self, triggers: Sequence[Trigger]) -> bool:
        """Whether one trigger has followed the other without a pause, since the last round.

        The triggers of the query, not the calls of the sink: between these lie other tables of the same stream, what
        is decoded for the sink and Spark's own work, none of which is a pause.
        """
        since = [trigger for trigger in triggers if trigger.started > self._last_ended]
        if len(since) < _TRIGGERS:
            return False
        busy = sum(trigger.seconds for trigger in since)
        pauses = sum(after.started - (before.started + before.seconds) for before, after in pairwise(since))
        return pauses < _LEAST_PAUSE * busy


def _triggers(session: SparkSession, query_id: str) -> list[Trigger]:
    """The query's newest; none where Spark does not tell, since the batch that asks is committed and must not fail."""
    try:
        return ended_triggers(session, query_id, most=_TRIGGERS)
    except Exception:
        tell(log.warning, "triggers_unreadable", query_id=query_id, exc_info=True)
        return []
