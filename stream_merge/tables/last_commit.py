"""Whether the last commit of a sink is still there: it may be overwritten, or an older copy restored."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from pyspark.sql import SparkSession

from stream_merge.errors import ConfigError
from stream_merge.model import locations
from stream_merge.model.logs import tell
from stream_merge.model.settings import MergeSpec
from stream_merge.model.snapshot import TableSnapshot
from stream_merge.spark import log_store
from stream_merge.spark.hadoop_files import read_text
from stream_merge.spark.object_stores import may_lose_commits
from stream_merge.tables.applied_batches import Delivery

log = logging.getLogger(__name__)

_RISK = (
    "on S3 Spark's Delta looks whether a version is there and then writes it: the commit of another process at the same"
    " moment is overwritten, or overwrites ours"
)
_REMEDY = (
    "give all of them a log store whose commits exclude each other{}, or let one process write to the table and say so"
    " with single_writer=True"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Committed:
    table_id: str
    versions: Sequence[int]
    batch_id: int
    tokens: Sequence[str]
    """Each commit carries one of them."""


class LastCommit:
    """The commits of one sink's newest batch, checked before the next one.

    A streaming query's are recorded in its checkpoint, for the next process: with each batch where that is on a disk,
    or where the target's store does not guard commits; else, without `single_writer`, when one is missing.
    """

    def __init__(self, spec: MergeSpec) -> None:
        self._spec = spec
        self._is_guarded: bool | None = None
        self._committed: _Committed | None = None
        self._has_read = False

    def note(
        self,
        target: TableSnapshot,
        versions: Sequence[int],
        delivery: Delivery | None,
        *,
        batch_id: int,
        tokens: Sequence[str],
    ) -> None:
        """Record the commits of a batch; `found` is the table before or after them, each carries one of the tokens."""
        if not versions:
            return
        self._committed = _Committed(
            table_id=target.table_id, versions=tuple(versions), batch_id=batch_id, tokens=tuple(tokens)
        )
        is_at_risk = self._is_guarded is False and not self._spec.single_writer
        if is_at_risk or (delivery is not None and delivery.checkpoint.is_on_disk):
            self._keep(delivery)

    def expect(self, session: SparkSession, target: TableSnapshot | None, delivery: Delivery | None) -> None:
        """Stop where another writer's commit replaced the last one of this sink; warn once where that can happen.

        Cost: a file of a query's checkpoint, once; on S3, where commits do not exclude each other, the commit's file.
        """
        is_guarded = self._guarded(session, target)
        ours = self._remembered(delivery)
        if ours is None or target is None or target.table_id != ours.table_id:
            return  # a table that was dropped or replaced is told from ours by its transaction ids
        if delivery is not None:
            self._expect_not_older(target, ours)
        if is_guarded:
            return
        for version in ours.versions:
            # Not by Delta's snapshot: it has our commit in memory, whatever the file holds by now.
            text = read_text(session, f"{target.location}/_delta_log/{version:020d}.json")
            is_tidied = text is None and target.version >= version  # behind a checkpoint, when it is old
            if not is_tidied and not any(token in (text or "") for token in ours.tokens):
                self._keep(delivery)
                msg = (
                    f"[COMMIT_LOST] version {version} of {self._spec.target!r}, which this sink committed for batch"
                    f" {ours.batch_id}, was overwritten by another writer; stop one of the writers, then start a new"
                    " checkpoint"
                )
                raise ConfigError(msg, target=self._spec.target)

    def _expect_not_older(self, target: TableSnapshot, ours: _Committed) -> None:
        """Stop at an older copy of the table: a backup, or a folder that its name leads to now. RESTORE adds versions.

        On a local disk only: elsewhere a listing may lack what is there.
        """
        newest = max(ours.versions)
        if target.version >= newest or locations.local_path(target.location) is None:
            return
        msg = (
            f"[COMMIT_LOST] target {self._spec.target!r} ({target.location!r}) is at version {target.version}, but"
            f" batch {ours.batch_id} of this query is version {newest}; restore the newer table, or start a new"
            " checkpoint from before it"
        )
        raise ConfigError(msg, target=self._spec.target)

    def _remembered(self, delivery: Delivery | None) -> _Committed | None:
        """The last commits by this process, else by the query's checkpoint."""
        if self._committed is None and delivery is not None and not self._has_read:
            noted = delivery.checkpoint.last_commit(delivery.identity, delivery.location)
            self._committed = None if noted is None else _Committed(**noted)
            self._has_read = True
        return self._committed

    def _keep(self, delivery: Delivery | None) -> None:
        if delivery is not None and self._committed is not None:
            values = asdict(self._committed)
            delivery.checkpoint.keep_last_commit(delivery.identity, delivery.location, values)

    def _guarded(self, session: SparkSession, table: TableSnapshot | None) -> bool:
        """Whether writers exclude each other at the table's location; checked, and logged, once."""
        spec = self._spec
        if self._is_guarded is None:
            target = spec.target.plain if spec.target.path is not None else None
            place = target if table is None else table.location
            if place is None:
                return True  # a catalog's table that is not there yet
            beside_driver = spec.single_writer and spec.engine != "spark"
            self._is_guarded = not may_lose_commits(session, place, beside_driver=beside_driver)
            if not self._is_guarded and not spec.single_writer:
                named = log_store.remedy(place)
                remedy = _REMEDY.format("" if named is None else f" ({named})")
                tell(log.warning, "commits_not_kept_apart", target=spec.label, risk=_RISK, remedy=remedy)
        return self._is_guarded
