"""How the events of a batch get into the target: by one engine, by Spark where delta-rs fails, again where it lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pyspark.sql import SparkSession

from stream_merge.engines.base import CommitTag, Engine, MergeReport
from stream_merge.engines.selection import Selector
from stream_merge.engines.spark.commit import SparkCommits, record
from stream_merge.errors import MergeFailedError, StreamMergeError
from stream_merge.microbatch import landed
from stream_merge.microbatch.call import BatchCall
from stream_merge.microbatch.commit import Committing
from stream_merge.model import names
from stream_merge.model.logs import tell
from stream_merge.model.snapshot import TableSnapshot
from stream_merge.shapes.batch import Batch
from stream_merge.spark.errors import reason
from stream_merge.tables.side_commits import SideCommit
from stream_merge.tables.tombstones.hits import Hits

T = TypeVar("T")

log = logging.getLogger(__name__)


class Merging:
    """Remembered deletes, merge, re-check and forgotten tombstones of a batch that has events to merge.

    Args:
        batch: evaluated, with at least one upsert or delete.
        target: prepared, as it was before this batch.
        engine: the chosen one.
        already_applied: whether the target's transaction id shows the batch; then only the re-check is left to do.
    """

    def __init__(
        self,
        call: BatchCall,
        *,
        batch: Batch,
        target: TableSnapshot,
        engine: Engine[Any],
        selector: Selector,
        committing: Committing,
        already_applied: bool,
    ) -> None:
        self._spec = call.spec
        self._batch = batch
        self._target = target
        self._engine = engine
        self._selector = selector
        self._committing = committing
        self._clock = call.clock
        self._store = call.store
        self._session = call.session
        self._batch_id = call.batch_id
        self._hits: Hits | None = None
        self._refused_by_merge = 0
        self.already_applied = already_applied
        self.report: MergeReport | None = None
        """What the merge did; None before it."""
        self.merged_by: str | None = None
        """The engine that merged."""
        self.repaired: dict[str, int] = {}
        """Rows that the re-check removed, in `total` and by what they had been counted as."""

    # -- steps, in order ---------------------------------------------------------------------

    def remember_deletes(self) -> None:
        """Add the batch's deletes to the tombstones, before the target shows their effect."""
        if not (self._batch.deletes and self._spec.tombstones):
            return
        with self._clock.phase("tombstones"):
            commit = self._beside("tombstones-add")
            self._on_either_engine(lambda: self._engine.remember(commit))

    def merge(self) -> None:
        """Merge what no tombstone refuses, in one commit; each attempt reads tombstones and table afresh."""
        self.report = self._committing.run(self._attempt)
        if self.report.already_applied:
            # Whoever applied it may have seen fewer tombstones than this attempt: all upserts are checked again.
            self.already_applied = True
            self._drop_hits()

    def recheck(self) -> None:
        """Undo upserts that a delete refuses which another writer remembered while this batch merged."""
        if not (self._batch.upserts and self._spec.tombstones):
            return
        with self._clock.phase("recheck"):
            if not self.already_applied:
                version = self._on_either_engine(self._log_version)
                if version == (self._hits or self._engine.no_hits()).version:
                    return
            late = self._on_either_engine(lambda: self._engine.find_late_hits(self._hits or self._engine.no_hits()))
            if late.refused:
                self._repair(late)
            if self.already_applied:
                self._hits = late
            else:
                late.release()

    def forget_revived(self) -> None:
        """Mark the tombstones that this batch's upserts have overtaken, and tidy the log now and then."""
        if not self._spec.tombstones:
            return
        with self._clock.phase("tombstones"):
            revived = self._hits is not None and self._hits.revived > 0
            if revived:
                self._on_either_engine(self._forget)
            if self._batch.deletes or revived:
                self._tidy()

    def release(self) -> None:
        """Free what was materialised; what has been counted stays."""
        if self._hits is not None:
            self._hits.release()

    @property
    def refused(self) -> int:
        """Events that a tombstone refused before the merge."""
        return self._refused_by_merge if self._hits is None else self._hits.refused

    # -- how ---------------------------------------------------------------------------------

    def _attempt(self, number: int) -> MergeReport:
        self._committing.count_attempt(number)
        with self._clock.phase("tombstones"):
            hits = self._on_either_engine(self._fresh_hits)
        if self._batch.upserts + self._batch.deletes == hits.refused:
            # After a lost attempt the winner may have been a twin of this call that knew of no refusal.
            return MergeReport(already_applied=number > 1 and self._is_recorded())
        tag = self._tag("target")
        with self._clock.phase("merge"):
            started = time.perf_counter()
            try:
                report = self._engine.merge(hits, tag)
            except Exception as err:
                return self._decided(err, tag)
            self.merged_by = self._engine.name
            if report.version is not None:
                self._selector.learn(time.perf_counter() - started)
            return report

    def _on_either_engine(self, action: Callable[[], T]) -> T:
        """Do something with the remembered deletes; where delta-rs cannot, Spark does it and the rest of the batch."""
        try:
            return action()
        except MergeFailedError as err:
            if not self._selector.fall_back(err):
                raise
        except StreamMergeError:
            raise
        except Exception as err:
            if not self._selector.fall_back(err):
                msg = f"reading or writing the remembered deletes of {self._spec.target!r} failed: {reason(err)}"
                raise MergeFailedError(msg, target=self._spec.target, batch_id=self._batch_id) from err
        if self.report is not None:
            self._refused_by_merge = self.refused
        self._drop_hits()
        self._engine = self._selector.engine()
        return action()

    def _decided(self, err: Exception, tag: CommitTag) -> MergeReport:
        """What became of an attempt that raised; one that failed natively and did not land is tried on Spark, once."""
        try:
            return self._fate(err, tag)
        except MergeFailedError:
            if self._selector.name != "native" or not self._selector.fall_back(err):
                raise
        self._drop_hits()
        self._engine = self._selector.engine()
        hits, tag = self._fresh_hits(), self._tag("target")
        try:
            return self._engine.merge(hits, tag)
        except Exception as again:
            return self._fate(again, tag)

    def _fate(self, err: Exception, tag: CommitTag) -> MergeReport:
        return landed.decide(err, self._engine, self._spec.target, tag, since=self._target.version)

    def _fresh_hits(self) -> Hits:
        """The tombstones that concern the batch, looked for again when the log has moved on."""
        if not self._spec.tombstones:
            none: Hits = self._engine.no_hits()
            return none
        if self._hits is None or self._engine.log_version() != self._hits.version:
            self._drop_hits()
            self._hits = self._engine.find_hits()
        found: Hits = self._hits
        return found

    def _log_version(self) -> int | None:
        return self._engine.log_version()

    def _drop_hits(self) -> None:
        if self._hits is not None:
            self._hits.release()
            self._hits = None

    def _repair(self, late: Hits) -> None:
        tag = self._tag("recheck")

        def attempt(_: int) -> MergeReport:
            try:
                return self._engine.repair(late, tag)
            except Exception as err:
                return self._fate(err, tag)

        repair = self._committing.run(attempt)
        if repair.deleted and self.report is not None:
            self.repaired = self._fates_of(late, self.report, repair.deleted)

    def _fates_of(self, late: Hits, report: MergeReport, deleted: int) -> dict[str, int]:
        """What the repaired events had been counted as, from the change feed of the merge."""
        found: Mapping[str, int] = {}
        if report.version is not None and self._spec.change_data_feed:
            found = self._engine.counted_as(late, report.version)
        return {**found, "total": deleted}

    def _forget(self) -> None:
        if self._hits is None:  # the other engine found them
            self._hits = self._engine.find_hits()
        if self._hits.revived:
            self._engine.forget(self._hits, self._beside("tombstones-forget"))

    def _tidy(self) -> None:
        """Housekeeping of the log: the batch is done without it, and the next one tries again."""
        try:
            self._engine.tidy()
        except Exception as err:
            tell(log.warning, "tombstones_not_tidied", target=self._spec.label, error=reason(err))

    def _tag(self, role: names.Role) -> CommitTag:
        return self._committing.tag(role, engine=self._engine.name, plan=self._selector.why)

    def _beside(self, role: names.Role) -> SideCommit:
        return self._committing.beside(role, table_id=self._target.table_id)

    def _is_recorded(self) -> bool:
        return self._committing.is_recorded(self._store.find(self._session, self._spec.target) or self._target)


def record_first(session: SparkSession, target: str, committing: Committing, since: int) -> int | None:
    """Commit a batch's transaction id alone; Delta's version, or None where a twin of this call was faster."""
    commits = SparkCommits(session, target)
    tag = committing.tag("target", engine="spark", plan="no row changed; the query's first batch at this table")

    def attempt(_: int) -> MergeReport:
        try:
            return record(session, target, tag)
        except Exception as err:
            return landed.decide(err, commits, target, tag, since=since)

    return committing.run(attempt).version
