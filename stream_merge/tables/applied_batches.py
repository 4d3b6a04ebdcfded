"""Whether a batch of a query belongs into a table: it is the query's table, and the batch is what its id says."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from pyspark.sql import SparkSession

from stream_merge.errors import ConfigError
from stream_merge.model import names
from stream_merge.model.logs import tell
from stream_merge.model.settings import MergeSpec
from stream_merge.model.snapshot import FINGERPRINT, History, TableSnapshot, is_other, recorded_fingerprint
from stream_merge.model.source_batch import Calls
from stream_merge.model.table_ref import TableRef
from stream_merge.spark.checkpoint import Checkpoint, Destination
from stream_merge.spark.errors import reason
from stream_merge.spark.streaming import Caller

log = logging.getLogger(__name__)

Noted = tuple[str, str, str | None]
"""Identity, location and, once a batch was merged, the Delta table id."""

_SHOWN = 3
_SECOND_SINK = "; a new second sink of the query needs its own name="


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """One batch of a streaming query and its target."""

    checkpoint: Checkpoint
    identity: str
    """Owner of its batch ids."""
    query: str
    target: str
    location: str
    label: str
    calls: Calls
    noted: set[Noted] = field(default_factory=set)
    """What this sink has recorded in the checkpoint."""

    @property
    def app_id(self) -> str:
        """Application id of the target's commits."""
        return names.transaction_app_id(self.identity, "target")

    def is_applied(self, target: TableSnapshot | None, batch_id: int, history: History) -> bool:
        """Whether the table holds the batch already; stops where it is another table, or newer than the checkpoint.

        A stream delivers again only the last batch that it has planned. So the recorded id is the batch's own, with the
        same content, or a lower one.
        """
        recorded = None if target is None else target.transaction(self.app_id)
        if target is None or recorded is None:
            if batch_id:
                self.expect_same_table(target)
            self.note(None)
            return False
        self._expect_not_replaced(target)
        self.note(target)
        wanted = {"identity": self.identity, "role": "target", "batch_id": batch_id}
        self._expect_own(
            "the table", recorded, batch_id, lambda: recorded_fingerprint(target.version, history, **wanted)
        )
        return recorded == batch_id

    def recorded(self, batch_id: int) -> dict[str, str]:
        """What the target's commit records of the batch's content; without it a replay is known by its id alone."""
        content = _fingerprint(self.checkpoint, batch_id, self.label)
        return {} if content is None else {FINGERPRINT: content}

    def note(self, merged: TableSnapshot | None) -> None:
        """Record in the checkpoint where its batches go, and with a table, that some of them are there."""
        noted = self._told(merged)
        if noted in self.noted:
            return
        self.checkpoint.note(
            Destination(
                identity=self.identity,
                location=self.location,
                label=self.label,
                table_id=None if merged is None else merged.table_id,
            )
        )
        self.noted.add(noted)

    def _told(self, merged: TableSnapshot | None) -> Noted:
        return self.identity, self.location, None if merged is None else merged.table_id

    def judge(self, recorded: int, batch_id: int, then: Callable[[], str | None]) -> None:
        """`Judge` of side commits: stops where a side table recorded another batch under this id, or a later one."""
        self._expect_own("a table beside it", recorded, batch_id, then)

    def _expect_own(self, where: str, recorded: int, batch_id: int, then: Callable[[], str | None]) -> None:
        if recorded > batch_id:
            self._refuse_restored(batch_id, f"{where} holds batches of this query up to {recorded}")
        if recorded == batch_id and is_other(_fingerprint(self.checkpoint, batch_id, self.label), then()):
            self._refuse_restored(batch_id, f"{where} holds another batch of this query under this id")

    def expect_same_table(self, target: TableSnapshot | None) -> None:
        """Stop where the query has merged batches and this table has none of their ids: it would stay incomplete."""
        query_id = self.checkpoint.query_id()
        noted = self.checkpoint.destinations() or []
        known = [one for one in noted if query_id in one.identity.split("/")]
        if not known:
            self._judge_old_checkpoint(target)
            return
        here = [one for one in known if TableRef(one.location).canonical == TableRef(self.location).canonical]
        ids = {one.table_id for one in here if one.table_id is not None}
        if target is not None and target.table_id in ids:
            if any(one.is_merged and one.identity == self.identity for one in here):
                # Delta lets ids expire where the table says so (delta.setTransactionRetentionDuration).
                tell(log.warning, "merged_before_unknown", **self._facts())
            return  # the same table, perhaps under another name of the sink
        if ids:
            self._refuse(target, self._merged_into(ids))
        ours = [one for one in known if one.identity == self.identity]
        others = [one for one in ours if one.is_merged and (self.calls != "routed" or one.label == self.label)]
        if others:
            places = ", ".join(repr(one.location) for one in others[:_SHOWN])
            self._refuse(target, f"merged into {places}", hint=_SECOND_SINK if self.calls == "some" else "")
        if self.calls == "every" and not ours:
            self._refuse(target, "run batches that were not given to this sink")

    def _expect_not_replaced(self, target: TableSnapshot) -> None:
        """Stop where the table has the ids of the query's batches and another table's rows.

        CREATE OR REPLACE TABLE goes on with the log, transaction ids included, and makes a new table id (Delta 4.4); an
        overwrite keeps it. Cost: the checkpoint is read once for each table.
        """
        if self._told(target) in self.noted:
            return
        here = (
            one.table_id
            for one in self.checkpoint.destinations() or []
            if one.identity == self.identity and TableRef(one.location).canonical == TableRef(self.location).canonical
        )
        ids = {table_id for table_id in here if table_id is not None}
        if ids and target.table_id not in ids:
            self._refuse(target, self._merged_into(ids))

    def _merged_into(self, ids: set[str]) -> str:
        return f"merged into {self.target!r} (Delta table id {', '.join(sorted(ids))})"

    def _judge_old_checkpoint(self, target: TableSnapshot | None) -> None:
        """Judge a checkpoint without notes, as older versions left it where batches had no change.

        A query whose batches another function has merged until now has none either, but its table has rows.
        """
        is_theirs = target is not None and (names.KEYS_PROPERTY in target.properties or target.files != 0)
        if self.calls == "every" and not is_theirs:
            self._refuse(target, "run batches before")
        if self.calls != "routed":
            tell(log.warning, "merged_before_unknown", **self._facts())

    def _facts(self) -> dict[str, object]:
        return {
            "target": self.label,
            "query": self.query,
            "checkpoint": self.checkpoint.path,
            "remedy": "the table has no transaction id of this query; if it was replaced, start a new checkpoint",
        }

    def _refuse(self, target: TableSnapshot | None, what: str, hint: str = "") -> None:
        there = f"there is no table at {self.target!r}" if target is None else f"{self.target!r} holds none of them"
        msg = (
            f"[TARGET_REPLACED] query {self.query!r} has {what} by its checkpoint {self.checkpoint.path!r}, but"
            f" {there}; restore the table, or start a new checkpoint, which rebuilds the table from the source{hint}"
        )
        raise ConfigError(msg, target=self.target)

    def _refuse_restored(self, batch_id: int, evidence: str) -> None:
        lost = "; ".join(self.checkpoint.content(batch_id, most=_SHOWN))
        msg = (
            f"[CHECKPOINT_NOT_USABLE] checkpoint {self.checkpoint.path!r} is older than the table: {evidence}, so batch"
            f" {batch_id} of query {self.query!r} for {self.target!r} ({lost}) would be skipped; restore the newest"
            " checkpoint, or start a new one"
        )
        raise ConfigError(msg, target=self.target, batch_id=batch_id)


def fingerprint(caller: Caller, batch_id: int, session: SparkSession) -> str | None:
    """`Checkpoint.fingerprint` of a caller's batch; None outside of a streaming query, and for ids of another kind."""
    if caller.checkpoint is None or caller.batch_id not in (None, batch_id):
        return None
    return _fingerprint(Checkpoint.in_session(session, caller.checkpoint), batch_id, caller.query)


def _fingerprint(checkpoint: Checkpoint, batch_id: int, label: str) -> str | None:
    """`Checkpoint.fingerprint`; None where it cannot be read: a replay is then recognised by its id alone."""
    try:
        return checkpoint.fingerprint(batch_id)
    except Exception as err:
        tell(log.warning, "batch_without_fingerprint", target=label, batch_id=batch_id, error=reason(err))
        return None


def query_delivery(
    spec: MergeSpec,
    caller: Caller,
    batch_id: int,
    session: SparkSession,
    *,
    location: str,
    noted: set[Noted],
    calls: Calls,
) -> Delivery | None:
    """The delivery of a caller's batch; None outside of a streaming query, and for ids of another kind.

    A user's own function may number what it makes of a batch: such ids only have to grow.
    """
    if caller.checkpoint is None or caller.identity is None or caller.batch_id not in (None, batch_id):
        return None
    return Delivery(
        checkpoint=Checkpoint.in_session(session, caller.checkpoint),
        identity=caller.identity,
        query=caller.query,
        target=spec.target,
        location=location,
        label=spec.label,
        calls=calls,
        noted=noted,
    )


def expect_same_table(
    checkpoint: Checkpoint, table: TableSnapshot | None, *, name: str | None, label: str, target: str, location: str
) -> None:
    """Check before a query starts: stop where it has run batches and the table has none of their ids."""
    identity = names.identity(query_id=checkpoint.query_id(), app_id=None, name=name)
    if identity is None or checkpoint.newest_batch("commits") is None:
        return
    delivery = Delivery(
        checkpoint=checkpoint,
        identity=identity,
        query=label,
        target=target,
        location=location,
        label=label,
        calls="every",
    )
    if table is None or table.transaction(delivery.app_id) is None:
        delivery.expect_same_table(table)
