"""What engines in the driver do alike: bring the events there, within the memory allowed, and read the target's log."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from stream_merge.engines import tombstones
from stream_merge.engines.base import Choice, CommitTag, Engine, Execution, MergeJob, MergeReport
from stream_merge.engines.memory import Promise
from stream_merge.model import names
from stream_merge.model.results import Refusal
from stream_merge.model.settings import MergeSpec
from stream_merge.model.snapshot import CommitRecord, TableSnapshot, expect_not_replaced
from stream_merge.shapes import shape_of
from stream_merge.shapes.clauses import Clause, Delete, Newer
from stream_merge.shapes.key_bounds import KeyBounds
from stream_merge.shapes.layout import Layout
from stream_merge.spark.errors import exceeds_driver_results
from stream_merge.tables.delta_rs import data_files
from stream_merge.tables.delta_rs.table import NativeTable
from stream_merge.tables.side.judging import Hits
from stream_merge.tables.whitelist import Ineligible


def started(
    job: MergeJob,
    engine: Engine,
    table: NativeTable,
    *,
    why: str,
    refusal: Refusal | None,
    need: Callable[[int | None], int],
    of_events: Callable[[pa.Table, Sequence[str]], Ineligible | None],
    merger: Callable[..., DriverMerger],
) -> Execution | Ineligible:
    """An engine at work on a job, with the memory that it was promised; or why it cannot have the job after all.

    Args:
        job: what is to be merged.
        engine: which was found eligible for the table as it is now.
        table: the job's.
        why: it was chosen.
        refusal: as `Choice.refusal`.
        need: bytes of memory that it may take, by those that the events take; None where they are not there yet.
        of_events: why it cannot carry these events into a table with such partition columns.
        merger: as `DriverMerger`.
    """
    version = table.version
    promise = Promise(job.spec.native_memory_bytes)
    refused = covered(promise, need(None), engine.said)
    if refused is not None:
        return refused
    try:
        events = _events(job)
        if isinstance(events, pa.Table):
            refused = covered(promise, need(events.nbytes), engine.said)
            refused = refused or of_events(events, job.target.partition_columns) or tombstones.obstacle_in(events, job)
        else:
            refused = events
        if refused is not None:
            promise.close()
            return refused
        return Execution(
            choice=Choice(engine=engine.name, why=why, refusal=refusal),
            merger=merger(
                spec=job.spec,
                target=table,
                layout=job.layout,
                events=events,
                bounds=job.batch.bounds,
                prepared_for=job.target.table_id,
                chosen_at=version,
                promise=promise,
            ),
            tombstones=tombstones.by_delta_rs(job, events) if job.spec.tombstones else None,
            in_driver=True,
            only_spark=False,
            release=promise.close,
        )
    except BaseException:
        promise.close()
        raise


def covered(promise: Promise, wanted: int, said: str) -> Ineligible | None:
    """Have that much memory promised in all; or why it is not."""
    allowed = promise.cover(wanted)
    if allowed is None:
        return None
    megabytes = f"{wanted / 1e6:,.0f} MB of the driver's memory, of {allowed / 1e6:,.0f} MB allowed"
    return Ineligible(reason="memory", detail=f"{said} might need {megabytes}")


def _events(job: MergeJob) -> pa.Table | Ineligible:
    try:
        return job.batch.rows.arrow()
    except Exception as err:
        if not exceeds_driver_results(err):
            raise
        return Ineligible(reason="memory", detail="the events exceed spark.driver.maxResultSize")


class NoLongerEligibleError(RuntimeError):
    """The merge must not go on in the driver; nothing was written.

    Args:
        refused: another writer has changed the table, or its rows are larger than thought.
    """

    def __init__(self, refused: Ineligible) -> None:
        super().__init__(refused.detail)
        self.refused = refused


class DriverMerger(ABC):
    """Works on one batch.

    Args:
        spec: what the sink was told.
        target: the table.
        layout: how the batch's columns map onto it.
        events: `Rows.arrow` of the batch, one row per key.
        bounds: least and greatest keys.
        prepared_for: Delta table id of the target when the batch was prepared.
        chosen_at: version of the target for which the engine was found eligible.
        promise: of the memory that it may take.
    """

    def __init__(
        self,
        *,
        spec: MergeSpec,
        target: NativeTable,
        layout: Layout,
        events: pa.Table,
        bounds: KeyBounds,
        prepared_for: str,
        chosen_at: int,
        promise: Promise,
    ) -> None:
        self._spec = spec
        self._table = target
        self._layout = layout
        self._events = events
        self._bounds = bounds
        self._prepared_for = prepared_for
        self._chosen_at = chosen_at
        self._promise = promise
        self._has_tried = False

    def merge(self, hits: Hits | None, tag: CommitTag) -> MergeReport:
        """One merge in one commit: what the shape makes of each event that no tombstone refuses."""
        events = self._events if hits is None else hits.live(self._events)
        any_delete = bool(pc.any(events[names.DELETE_COLUMN]).as_py())
        any_upsert = not bool(pc.all(events[names.DELETE_COLUMN]).as_py())
        wanted = shape_of(self._spec).clauses(self._layout, self._spec, deletes=any_delete, upserts=any_upsert)
        report = self._commit(events, wanted, tag)
        if report.version is None and not report.already_applied and any_delete and self._has_moved():
            return self._commit(events, wanted, tag)
        return report

    def repair(self, late: Hits, tag: CommitTag) -> MergeReport:
        """One merge that only deletes."""
        older = Delete(when=Newer())  # the tombstone than the row
        return self._commit(late.refusing, [older], tag)

    @abstractmethod
    def _commit(self, source: pa.Table, clauses: Sequence[Clause], tag: CommitTag) -> MergeReport:
        """Merge on the newest version of the table, in one commit; any other commit meanwhile makes it lose."""

    def _bring_up_to_date(self, batch_id: int) -> None:
        """Before an attempt. Where a look takes requests, the first one makes do with that at the batch's beginning.

        Raises:
            ConfigError: the table is another one now.
        """
        if self._has_tried:
            self._table.follow()
        else:
            self._table.refresh_if_free()
        self._has_tried = True
        expect_not_replaced(self._prepared_for, self._table.table_id, target=self._spec.target, batch_id=batch_id)

    def _has_moved(self) -> bool:
        """Whether there is a newer version than the one that an attempt has looked at; the handle is then at it.

        Of an attempt that commits nothing no conflict tells. A delete has to have seen what others had merged before
        it was remembered: their look at the remembered deletes may have come before, and then nobody removes the row.
        """
        before = self._table.version
        self._table.follow()
        return self._table.version != before

    def find(self) -> TableSnapshot | None:
        """The target, freshly loaded."""
        self._table.refresh()
        return self._table.snapshot()

    def history(self, *, newer_than: int, up_to: int) -> Sequence[CommitRecord]:
        """Its commits in a range of versions, newest first."""
        return self._table.commits(newer_than, up_to)

    def counted_as(self, late: Hits, version: int) -> Mapping[str, int]:
        """How many of the refused keys a version's change feed shows as inserted and as updated."""
        keys = list(self._layout.keys)
        if self._table.snapshot().maps_columns:
            return {}  # delta-rs 1.6 cannot read their feed; the ledger then takes repaired events from the unaffected
        if data_files.adds_escaped(self._table.commit(version)):
            return {}  # nor does it find change files under paths with escapes
        changed = self._table.changes(version).select([*keys, "_change_type"])
        refused = late.refusing.select(keys)
        schema = pa.schema([*refused.schema, pa.field("_change_type", pa.string())])
        touched = changed.cast(schema).join(refused, keys, join_type="left semi")
        kinds = touched["_change_type"].to_pylist()
        return {"inserted": kinds.count("insert"), "updated": kinds.count("update_postimage")}
