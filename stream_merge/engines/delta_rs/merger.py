"""The same merge by delta-rs, in the driver, on the Arrow form of the batch: no Spark job, tenths of a second."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from stream_merge.engines.base import CommitTag, MergeReport
from stream_merge.engines.delta_rs import render
from stream_merge.engines.in_driver import DriverMerger, NoLongerEligibleError
from stream_merge.model.snapshot import is_applied
from stream_merge.shapes.clauses import Clause
from stream_merge.tables.delta_rs import sql
from stream_merge.tables.delta_rs.eligibility import of_files, of_table


class DeltaRsMerger(DriverMerger):
    """Works on one batch through delta-rs.

    delta-rs writes transaction ids but neither checks nor orders them (1.6), so the id is read from
    the very version that the merge is based on, and any commit in between makes the merge lose.
    """

    def _expect_still_eligible(self) -> None:
        """What other writers have done to the table since the engine was chosen may be not for delta-rs."""
        snapshot = self._table.snapshot()
        refused = of_table(self._table, snapshot, "the target")
        refused = refused or of_files(self._table, snapshot, "the target", self._bounds)
        if refused is not None:
            raise NoLongerEligibleError(refused)

    def _commit(self, source: pa.Table, clauses: Sequence[Clause], tag: CommitTag) -> MergeReport:
        table = self._table
        self._bring_up_to_date(tag.batch_id)
        if is_applied(table.transaction, tag.app_id, tag.batch_id):
            return MergeReport(already_applied=True)
        before = table.version
        if before != self._chosen_at:
            self._expect_still_eligible()
        metrics = table.merge(
            source,
            sql.matched(self._layout, self._bounds),
            lambda merger: render.with_clauses(merger, clauses, self._layout),
            transaction=None if tag.app_id is None else (tag.app_id, tag.batch_id),
            user_metadata=tag.user_metadata,
        )
        return MergeReport(
            inserted=metrics.get("numTargetRowsInserted", 0),
            updated=metrics.get("numTargetRowsUpdated", 0),
            deleted=metrics.get("numTargetRowsDeleted", 0),
            version=table.version if table.version != before else None,
            metrics=metrics,
        )
