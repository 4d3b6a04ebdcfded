"""Whether a batch of a query may go into a table: it is the query's own table, and the batch is what its id says."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from pyspark.sql import SparkSession

from stream_merge import names
from stream_merge.checkpoint import Checkpoint, Destination
from stream_merge.config import MergeSpec
from stream_merge.errors import ConfigError
from stream_merge.identity import Caller
from stream_merge.logs import tell
from stream_merge.places import local_path
from stream_merge.snapshot import CommitRecord, TableSnapshot

log = logging.getLogger(__name__)

FINGERPRINT = "source"
"""Field of a commit's metadata: `Checkpoint.fingerprint` of its batch."""
_LOOKED_AT_FIRST = 50
"""Versions; where none of them is the batch's, all that the log has."""
_SHOWN = 3

History = Callable[[int, int], Sequence[CommitRecord]]
"""The commits of a table in a range of versions (newer than, up to), newest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """One batch of a streaming query on its way to one table."""

    checkpoint: Checkpoint
    identity: str
    """What its batch ids belong to."""
    query: str
    """Label of the query."""
    target: str
    """As it was given."""
    location: str
    label: str
    """The sink's name."""
    every_batch: bool
    """Whether the sink is called for each batch of its query, and not only for those that have events for it."""
    noted: set[tuple[str, str, bool]] = field(default_factory=set)
    """What the checkpoint was told before, by this sink: identity, location, whether a batch was merged."""

    @property
    def app_id(self) -> str:
        """Application id of the target's commits."""
        return names.transaction_app_id(self.identity, "target")

    def is_applied(self, found: TableSnapshot | None, batch_id: int, history: History) -> bool:
        """Whether the table holds the batch already.

        A stream delivers again only the last batch that it has planned. So the recorded id is the batch's own, with
        the same content, or a lower one.

        Raises:
            ConfigError: the table is not the one that this query has merged into, or the checkpoint is older than it.
        """
        recorded = None if found is None else found.transaction(self.app_id)
        if found is None or recorded is None:
            if batch_id:
                self.expect_same_table(found)
            self.note(None)
            return False
        self.note(found)
        if recorded < batch_id:
            return False
        if recorded > batch_id:
            self._refuse_restored(batch_id, f"the table holds batches of this query up to {recorded}")
        now = self.checkpoint.fingerprint(batch_id)
        then = self._recorded_fingerprint(found, batch_id, history)
        if None not in (now, then) and now != then:
            self._refuse_restored(batch_id, "the table holds another batch of this query under this id")
        return True

    def recorded(self, batch_id: int) -> dict[str, str]:
        """What the target's commit says of the batch's content."""
        fingerprint = self.checkpoint.fingerprint(batch_id)
        return {} if fingerprint is None else {FINGERPRINT: fingerprint}

    def note(self, merged: TableSnapshot | None) -> None:
        """Keep with the checkpoint where its batches go, and with a table, that some of them are there."""
        told = (self.identity, self.location, merged is not None)
        if told in self.noted:
            return
        destination = Destination(
            identity=self.identity,
            location=self.location,
            label=self.label,
            table_id=None if merged is None else merged.table_id,
        )
        try:
            self.checkpoint.note(destination)
        except Exception as err:
            # The batch does not depend on it; without it a lost table may only be told by its transaction ids.
            tell(log.warning, "target_not_noted", target=self.label, error=str(err))
            return
        self.noted.add(told)

    def expect_same_table(self, found: TableSnapshot | None) -> None:
        """Stop where the query has merged batches, and this table has none of their ids.

        Raises:
            ConfigError: the table was dropped, replaced, or is another one; what it lacks would never come.
        """
        known = self.checkpoint.destinations()
        if known is None:
            self._judge_old_checkpoint(found)
            return
        here = [one for one in known if _same_place(one.location, self.location)]
        ids = {one.table_id for one in here if one.is_merged}
        if found is not None and found.table_id in ids:
            if any(one.is_merged and one.identity == self.identity for one in here):
                # Delta lets ids expire where the table says so (delta.setTransactionRetentionDuration).
                tell(log.warning, "merged_before_unknown", **self._facts())
            return  # the same table, perhaps under another name of the sink
        if ids:
            self._refuse(found, f"merged into {self.target!r} (Delta table id {', '.join(sorted(map(str, ids)))})")
        if any(one.identity == self.identity for one in here):
            return  # called before, never with events
        others = [
            one
            for one in known
            if one.is_merged and one.identity == self.identity and (self.every_batch or one.label == self.label)
        ]
        if others:
            self._refuse(found, f"merged into {', '.join(repr(one.location) for one in others[:_SHOWN])}")
        if self.every_batch:
            self._refuse(found, "run batches that were not given to this sink")

    def _judge_old_checkpoint(self, found: TableSnapshot | None) -> None:
        """No sink has noted anything: one of before did not, and committed nothing for batches without a change."""
        if found is not None and names.KEYS_PROPERTY in found.properties:
            tell(log.warning, "merged_before_unknown", **self._facts())
        elif self.every_batch:
            self._refuse(found, "run batches before")

    def _facts(self) -> dict[str, object]:
        return {
            "target": self.label,
            "query": self.query,
            "checkpoint": self.checkpoint.path,
            "remedy": "the table has no transaction id of this query; if it was replaced, start a new checkpoint",
        }

    def _refuse(self, found: TableSnapshot | None, what: str) -> None:
        there = f"there is no table at {self.target!r}" if found is None else f"{self.target!r} holds none of them"
        msg = (
            f"query {self.query!r} has {what} by its checkpoint {self.checkpoint.path!r}, and {there}: the table was"
            " dropped or replaced, or the target was changed, and what those batches held would be missing from it;"
            " bring the table back, or start a new checkpoint, which builds the table from the source again"
        )
        raise ConfigError(msg, target=self.target)

    def _refuse_restored(self, batch_id: int, said: str) -> None:
        lost = "; ".join(self.checkpoint.content(batch_id, most=_SHOWN))
        msg = (
            f"batch {batch_id} of query {self.query!r} for {self.target!r} comes from a checkpoint"
            f" ({self.checkpoint.path!r}) that is older than the table, as after a restored copy: {said}, so its events"
            f" would be skipped ({lost}); bring the newest checkpoint back, or start a new one: events that were merged"
            " before change nothing"
        )
        raise ConfigError(msg, target=self.target, batch_id=batch_id)

    def _recorded_fingerprint(self, found: TableSnapshot, batch_id: int, history: History) -> str | None:
        """What the commit of a batch says of its content; None where it says nothing, or the log has it no longer."""
        for commit in _newest_first(found.version, history):
            ours = commit.ours
            if ours is None or ours.get("identity") != self.identity or ours.get("role") != "target":
                continue
            if ours.get("batch_id") == batch_id:
                fingerprint = ours.get(FINGERPRINT)
                return fingerprint if isinstance(fingerprint, str) else None
        return None


def of_query(
    spec: MergeSpec,
    caller: Caller,
    session: SparkSession,
    location: str,
    noted: set[tuple[str, str, bool]],
    *,
    every_batch: bool = True,
) -> Delivery | None:
    """The way of a caller's batches to a sink's target; None outside of a streaming query."""
    if caller.checkpoint is None or caller.identity is None:
        return None
    return Delivery(
        checkpoint=Checkpoint.in_session(session, caller.checkpoint),
        identity=caller.identity,
        query=caller.query,
        target=spec.target,
        location=location,
        label=spec.label,
        every_batch=every_batch,
        noted=noted,
    )


def expect_same_table(
    checkpoint: Checkpoint, found: TableSnapshot | None, *, name: str | None, label: str, target: str, location: str
) -> None:
    """Before a query starts: stop where it has run batches and the table has none of their ids.

    Args:
        checkpoint: of the query.
        found: the target; None where there is none.
        name: the sink's, where it is part of the identity.
        label: of the query and of the sink.
        target: as it was given.
        location: where it lies.

    Raises:
        ConfigError: the table was dropped, replaced, or is another one.
    """
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
        every_batch=True,
    )
    if found is None or found.transaction(delivery.app_id) is None:
        delivery.expect_same_table(found)


def _newest_first(version: int, history: History) -> Iterator[CommitRecord]:
    middle = max(version - _LOOKED_AT_FIRST, -1)
    yield from history(middle, version)
    if middle >= 0:
        yield from history(-1, middle)


def _same_place(one: str, other: str) -> bool:
    """Whether two locations are one, as far as that can be told from outside."""
    paths = [local_path(location) if names.is_path(location) else None for location in (one, other)]
    if None in paths:
        return one == other
    return len({os.path.realpath(path) for path in paths if path is not None}) == 1
