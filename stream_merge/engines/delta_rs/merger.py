"""The same merge by delta-rs, in the driver, on the Arrow form of the batch: no Spark job, tenths of a second."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from stream_merge.engines.base import CommitTag, MergeReport
from stream_merge.engines.delta_rs import render
from stream_merge.engines.in_driver import DriverMerger, NoLongerEligibleError
from stream_merge.model import names
from stream_merge.model.settings import MergeSpec
from stream_merge.model.snapshot import is_applied
from stream_merge.shapes import shape_of
from stream_merge.shapes.clauses import Clause, Delete, Newer
from stream_merge.shapes.key_bounds import KeyBounds
from stream_merge.shapes.layout import Layout
from stream_merge.tables.delta_rs import sql
from stream_merge.tables.delta_rs.eligibility import of_files, of_table
from stream_merge.tables.delta_rs.table import NativeTable
from stream_merge.tables.tombstones.delta_rs import NativeHits


class DeltaRsMerger(DriverMerger):
    """Works on one batch through delta-rs.

    delta-rs writes transaction ids but neither checks nor orders them (1.6), so the id is read from
    the very version that the merge is based on, and any commit in between makes the merge lose.

    Args:
        spec: what the sink was told.
        target: the table.
        layout: how the batch's columns map onto the target.
        events: `Rows.arrow` of the batch, one row per key.
        bounds: least and greatest keys.
        chosen_at: version of the target for which delta-rs was found eligible.
    """

    def __init__(
        self,
        *,
        spec: MergeSpec,
        target: NativeTable,
        layout: Layout,
        events: pa.Table,
        bounds: KeyBounds,
        chosen_at: int,
    ) -> None:
        super().__init__(target=target, layout=layout)
        self._events = events
        self._bounds = bounds
        self._spec = spec
        self._chosen_at = chosen_at

    def merge(self, hits: NativeHits | None, tag: CommitTag) -> MergeReport:
        """One merge in one commit: delete, update or insert each event, unless the row is newer."""
        events = self._events if hits is None else hits.live(self._events)
        layout = self._layout
        any_delete = bool(pc.any(events[names.DELETE_COLUMN]).as_py())
        any_upsert = not bool(pc.all(events[names.DELETE_COLUMN]).as_py())
        wanted = shape_of(self._spec).clauses(layout, self._spec, deletes=any_delete, upserts=any_upsert)
        return self._commit(events, wanted, tag)

    def repair(self, late: NativeHits, tag: CommitTag) -> MergeReport:
        """One merge that only deletes."""
        older = Delete(when=Newer())  # the tombstone than the row
        return self._commit(late.refused_entries(), [older], tag)

    def _expect_still_eligible(self) -> None:
        """What other writers have done to the table since the engine was chosen may be not for delta-rs."""
        snapshot = self._table.snapshot()
        refused = of_table(self._table, snapshot, "the target")
        refused = refused or of_files(self._table, snapshot, "the target", self._bounds)
        if refused is not None:
            raise NoLongerEligibleError(refused.detail)

    def _commit(self, source: pa.Table, clauses: Sequence[Clause], tag: CommitTag) -> MergeReport:
        table = self._table
        table.refresh()
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
