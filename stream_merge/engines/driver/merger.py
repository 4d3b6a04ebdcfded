"""The merge in the driver: changed rows leave their files, and their new versions go into new ones."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property

import pyarrow as pa
import pyarrow.compute as pc

from stream_merge.engines.base import CommitTag, MergeReport
from stream_merge.engines.driver.conditions import NotReadError, needed
from stream_merge.engines.driver.decide import Decision, decide
from stream_merge.engines.driver.write import Attempt, rewritten_bytes
from stream_merge.engines.memory import Promise, memory_needed, refusal_of_memory
from stream_merge.model import names
from stream_merge.model.settings import MergeSpec
from stream_merge.model.snapshot import CommitRecord, TableSnapshot, expect_not_replaced, is_applied
from stream_merge.shapes import shape_of
from stream_merge.shapes.base import Copied
from stream_merge.shapes.clauses import Clause, Delete, DeleteMissing, Newer
from stream_merge.shapes.key_bounds import KeyBounds
from stream_merge.shapes.layout import Layout
from stream_merge.spark import columns
from stream_merge.tables.files import eligibility
from stream_merge.tables.files.eligibility import Ineligible
from stream_merge.tables.files.features import merge_mode
from stream_merge.tables.files.find import Candidate, find
from stream_merge.tables.files.table import DeadRows, TableFiles, file_sizes, table_files
from stream_merge.tables.log.handle import LogHandle
from stream_merge.tables.side.late_events import Hits


class NoLongerEligibleError(RuntimeError):
    """The driver must not go on: another writer changed the table, or its rows are too large. Nothing was written."""

    def __init__(self, refused: Ineligible) -> None:
        super().__init__(refused.detail)
        self.refused = refused


@dataclass(kw_only=True, eq=False)
class DriverMerger:
    """Merges one batch."""

    spec: MergeSpec
    target: LogHandle
    layout: Layout
    events: pa.Table
    """`Rows.arrow` of the batch, one row per key."""
    bounds: KeyBounds
    prepared_for: str
    """Delta table id of the target when the batch was prepared."""
    chosen_at: int
    """Version of the target for which the driver was eligible."""
    promise: Promise
    _has_tried: bool = field(default=False, init=False)
    _repairs: bool = field(default=False, init=False)
    _written: dict[int, Mapping[str, pa.Table]] = field(default_factory=dict, init=False)
    """Keys of the rows inserted and updated, by the version that an attempt was to commit."""

    def merge(self, hits: Hits | None, tag: CommitTag) -> MergeReport:
        """One merge in one commit, of the events that no tombstone refuses."""
        events = self.events if hits is None else hits.live(self.events)
        any_delete = bool(pc.any(events[names.DELETE_COLUMN]).as_py())
        any_upsert = not bool(pc.all(events[names.DELETE_COLUMN]).as_py())
        wanted = shape_of(self.spec).clauses(self.layout, self.spec, deletes=any_delete, upserts=any_upsert)
        report = self._commit(events, wanted, tag)
        if report.version is None and not report.already_applied and any_delete and self._has_moved():
            return self._commit(events, wanted, tag)
        return report

    def repair(self, late: Hits, tag: CommitTag) -> MergeReport:
        """One merge that only deletes, whatever memory it takes: the upserts that it undoes are committed already."""
        self._repairs = True
        older = Delete(when=Newer())  # the tombstone than the row
        return self._commit(late.refusing, [older], tag)

    def find(self) -> TableSnapshot | None:
        """The target, freshly loaded."""
        self.target.refresh()
        return self.target.snapshot()

    def history(self, *, newer_than: int, up_to: int) -> Sequence[CommitRecord]:
        """Its commits in a range of versions, newest first."""
        return self.target.commits(newer_than, up_to)

    def counted_as(self, late: Hits, version: int) -> Mapping[str, int]:
        """How many of the refused keys this merger inserted and updated in a version; nothing of another's version."""
        keys = list(self.layout.keys)
        refused = late.refusing.select(keys)
        return {
            kind: rows.cast(refused.schema).join(refused, keys, join_type="left semi").num_rows
            for kind, rows in self._written.get(version, {}).items()
        }

    def _bring_up_to_date(self, batch_id: int) -> None:
        """Refresh the handle; where that takes requests, the first attempt relies on the batch's beginning."""
        if self._has_tried:
            self.target.follow()
        else:
            self.target.refresh_if_free()
        self._has_tried = True
        expect_not_replaced(self.prepared_for, self.target.table_id, target=self.spec.target, batch_id=batch_id)

    def _has_moved(self) -> bool:
        """Whether there is a newer version than the one that an attempt has read; the handle is then at it.

        An attempt that commits nothing has no conflict. A delete must see what others merged before it was remembered:
        they may have read the tombstones before, and then nobody removes the row.
        """
        before = self.target.version
        self.target.follow()
        return self.target.version != before

    def _commit(self, source: pa.Table, clauses: Sequence[Clause], tag: CommitTag) -> MergeReport:
        """Merge on the newest version of the table, in one commit; any other commit meanwhile makes it lose."""
        started = time.perf_counter()
        handle = self.target
        self._bring_up_to_date(tag.batch_id)
        if is_applied(handle.transaction, tag.app_id, tag.batch_id):
            return MergeReport(already_applied=True)
        snapshot = handle.snapshot()
        is_as_chosen = snapshot.version == self.chosen_at
        refused = None if is_as_chosen else eligibility.table_obstacle(handle, snapshot, "the target")
        refused = refused or self._columns_obstacle(snapshot)
        table = table_files(handle, snapshot)
        touched = [] if refused else table.touched(handle, snapshot, self.bounds)
        refused = refused or eligibility.files_obstacle(touched, "the target")
        if refused is not None:
            raise NoLongerEligibleError(refused)
        dead = DeadRows(table, touched)
        with table.folder.holding(file_sizes(touched)):
            decision = self._decided(clauses, snapshot, source, table, dead)
            decided = time.perf_counter()
            scan_ms = int((decided - started) * 1000)
            self._expect_allowed(decision, dead, batch_id=tag.batch_id)
            metrics = _counted(decision, source, touched, handle)
            if decision.changes_nothing:
                return MergeReport(metrics={**metrics, "scanTimeMs": scan_ms})
            mode = merge_mode(handle.protocol.features, snapshot.properties)
            if mode == "rewrite":
                self._room_for(decision.nbytes + rewritten_bytes(table, touched))
            attempt = Attempt(table, snapshot, decision, int(time.time() * 1000))
            try:
                metrics |= attempt.write(mode, dead)
            except BaseException:
                table.folder.discard(attempt.files)
                raise
        metrics |= {
            "scanTimeMs": scan_ms,
            "rewriteTimeMs": int((time.perf_counter() - decided) * 1000),
            "executionTimeMs": int((time.perf_counter() - started) * 1000),
        }
        made = attempt.commit(tag, metrics)
        keys = list(self.layout.keys)
        self._written[made.version] = {
            "inserted": decision.inserted.select(keys),
            "updated": decision.after.select(keys),
        }
        table.commit(handle, made, attempt.files)
        return MergeReport(
            inserted=metrics["numTargetRowsInserted"],
            updated=metrics["numTargetRowsUpdated"],
            deleted=metrics["numTargetRowsDeleted"],
            version=made.version,
            metrics=metrics,
        )

    def _decided(
        self,
        clauses: Sequence[Clause],
        snapshot: TableSnapshot,
        source: pa.Table,
        table: TableFiles,
        dead: DeadRows,
    ) -> Decision:
        """What changes, over as few columns of the rows as possible."""
        layout, schema, root = self.layout, snapshot.schema, table.folder.root

        def over(columns: Collection[str] | None) -> Decision:
            rows = find(
                root,
                dead.touched,
                source,
                layout.keys,
                schema,
                columns=columns,
                others=any(isinstance(clause, DeleteMissing) for clause in clauses),
                room_for=self._room_for,
            )
            return decide(clauses, layout, schema, events=source, rows=rows.filter(dead.live(rows)))

        columns = None if snapshot.has_feed else needed(clauses, layout, schema)
        with suppress(NotReadError):
            return over(columns)
        return over(None)

    def _expect_allowed(self, decision: Decision, dead: DeadRows, *, batch_id: int) -> None:
        """Stop where a full copy must not be merged into the version that was read."""
        if not self.spec.is_whole:
            return
        rows = sum(one.footer.rows - len(dead.positions(number)) for number, one in enumerate(dead.touched))
        counts = Copied(rows=rows, missing=decision.missing)
        shape_of(self.spec).expect_allowed(counts, target=self.spec.target, batch_id=batch_id)

    @cached_property
    def _event_bytes(self) -> int:
        """Bytes of the events: Arrow adds them up chunk by chunk, and `_room_for` needs them often."""
        return int(self.events.nbytes)

    def _room_for(self, row_bytes: int) -> None:
        """Reserve memory for so many bytes of rows."""
        refused = refusal_of_memory(self.promise, memory_needed(self._event_bytes, row_bytes))
        if refused is not None and not self._repairs:
            raise NoLongerEligibleError(refused)

    def _columns_obstacle(self, snapshot: TableSnapshot) -> Ineligible | None:
        """Whether the target still has the batch's columns as when the layout was made."""
        types = {f.name: columns.nullable(f.dataType) for f in snapshot.schema.fields}
        other = [c.name for c in self.layout.stored if types.get(c.name) != columns.nullable(c.dtype)]
        if not other:
            return None
        return Ineligible(reason="schema_change", detail=f"column(s) {other!r} of the target have changed meanwhile")


def _counted(decision: Decision, events: pa.Table, touched: Sequence[Candidate], handle: LogHandle) -> dict[str, int]:
    """Metrics of a merge by Delta's names, but for those of its files."""
    sizes = handle.files()["size_bytes"]
    updated, deleted = decision.after.num_rows, decision.deleted.num_rows
    return {
        "operationNumSourceRows": events.num_rows,
        "numSourceRows": events.num_rows,
        "numTargetRowsInserted": decision.inserted.num_rows,
        "numTargetRowsUpdated": updated,
        "numTargetRowsMatchedUpdated": updated,
        "numTargetRowsDeleted": deleted,
        "numTargetRowsMatchedDeleted": deleted - decision.missing,
        "numTargetRowsNotMatchedBySourceDeleted": decision.missing,
        "numTargetRowsCopied": 0,
        "numTargetFilesBeforeSkipping": len(sizes),
        "numTargetFilesAfterSkipping": len(touched),
        "numTargetBytesBeforeSkipping": int(pc.sum(sizes).as_py() or 0),
        "numTargetBytesAfterSkipping": sum(int(one.add["size"]) for one in touched),
    }
