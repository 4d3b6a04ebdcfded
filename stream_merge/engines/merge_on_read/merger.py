"""A merge on read: rows of the batch's keys are marked as deleted where they lie, what becomes of them is appended."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap64

from stream_merge.engines.base import CommitTag, MergeReport
from stream_merge.engines.in_driver import DriverMerger, NoLongerEligibleError, covered
from stream_merge.engines.merge_on_read.conditions import NotReadError
from stream_merge.engines.merge_on_read.decide import Decision, decide
from stream_merge.engines.merge_on_read.memory import memory_needed
from stream_merge.engines.merge_on_read.needed import needed
from stream_merge.model.snapshot import TableSnapshot, is_applied
from stream_merge.shapes import shape_of
from stream_merge.shapes.base import Copied
from stream_merge.shapes.clauses import Clause, DeleteMissing
from stream_merge.spark import columns
from stream_merge.tables.delta_rs.table import NativeTable
from stream_merge.tables.live_files import decoded
from stream_merge.tables.merge_on_read import commit, eligibility, partitions, vectors
from stream_merge.tables.merge_on_read.data_file import CHANGE_TYPE, write_change_file, write_data_file
from stream_merge.tables.merge_on_read.find import FILE, POSITION, find
from stream_merge.tables.merge_on_read.folder import Folder
from stream_merge.tables.merge_on_read.table import Touched, sizes_of, table_of
from stream_merge.tables.side.judging import Hits
from stream_merge.tables.whitelist import Ineligible


class MergeOnReadMerger(DriverMerger):
    """Works on one batch."""

    _repairs = False

    def repair(self, late: Hits, tag: CommitTag) -> MergeReport:
        """As `DriverMerger.repair`, whatever memory it takes: the upserts that it undoes are committed already."""
        self._repairs = True
        return super().repair(late, tag)

    def _commit(self, source: pa.Table, clauses: Sequence[Clause], tag: CommitTag) -> MergeReport:
        started = time.perf_counter()
        native = self._table
        self._bring_up_to_date(tag.batch_id)
        if is_applied(native.transaction, tag.app_id, tag.batch_id):
            return MergeReport(already_applied=True)
        snapshot = native.snapshot()
        refused = None if snapshot.version == self._chosen_at else eligibility.of_table(native, snapshot, "the target")
        refused = refused or self._of_columns(snapshot)
        table = table_of(native, snapshot)
        touched = [] if refused else table.touched(native, snapshot, self._bounds)
        refused = refused or eligibility.of_files(touched, "the target")
        if refused is not None:
            raise NoLongerEligibleError(refused)
        dead = _Vectors(table.folder, touched)
        with table.folder.holding(sizes_of(touched)):
            decision = self._decided(clauses, snapshot, source, dead)
        found = time.perf_counter()
        self._expect_allowed(decision, touched, dead, batch_id=tag.batch_id)
        metrics = _counted(decision, source, touched, native)
        if decision.changes_nothing:
            return MergeReport(metrics={**metrics, "scanTimeMs": int((found - started) * 1000)})
        attempt = _Attempt(table.folder, snapshot, decision, int(time.time() * 1000))
        try:
            metrics |= attempt.write(touched, dead)
        except BaseException:
            attempt.discard()
            raise
        metrics |= {
            "scanTimeMs": int((found - started) * 1000),
            "rewriteTimeMs": int((time.perf_counter() - found) * 1000),
            "executionTimeMs": int((time.perf_counter() - started) * 1000),
        }
        made = attempt.commit(tag, metrics)
        try:
            table.folder.commit(made)
        except commit.ConcurrentWriteException:  # of any other failure nobody knows yet whether it has landed
            attempt.discard()
            raise
        table.live.follow(made.version, list(made.actions()))
        native.committed(made.transaction)
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
        dead: _Vectors,
    ) -> Decision:
        """What changes, over as few columns of the rows as will do."""
        layout, schema, root = self._layout, snapshot.schema, dead.folder.root
        candidates = [one.candidate for one in dead.touched]

        def over(columns: Collection[str] | None) -> Decision:
            rows = find(
                root,
                candidates,
                source,
                layout.keys,
                schema,
                columns=columns,
                others=any(isinstance(clause, DeleteMissing) for clause in clauses),
                room_for=self._room_for,
            )
            return decide(clauses, layout, schema, events=source, rows=rows.filter(dead.spare(rows)))

        columns = None if snapshot.has_feed else needed(clauses, layout, schema)
        with suppress(NotReadError):
            return over(columns)
        return over(None)

    def _expect_allowed(self, decision: Decision, touched: Sequence[Touched], dead: _Vectors, *, batch_id: int) -> None:
        """Whether a copy of the whole table may do to the version that was read what it would.

        Raises:
            ContractError: it must not be merged.
        """
        if not self._spec.is_whole:
            return
        rows = sum(one.candidate.footer.rows - len(dead.of(number)) for number, one in enumerate(touched))
        counts = Copied(rows=rows, missing=decision.missing)
        shape_of(self._spec).expect_allowed(counts, target=self._spec.target, batch_id=batch_id)

    @cached_property
    def _event_bytes(self) -> int:
        """Arrow adds them up chunk by chunk, and rows are read a few at a time."""
        return int(self._events.nbytes)

    def _room_for(self, row_bytes: int) -> None:
        """Have memory promised for so many bytes of rows.

        Raises:
            NoLongerEligibleError: there is none.
        """
        refused = covered(self._promise, memory_needed(self._event_bytes, row_bytes), "merge-on-read")
        if refused is not None and not self._repairs:
            raise NoLongerEligibleError(refused)

    def _of_columns(self, snapshot: TableSnapshot) -> Ineligible | None:
        """Whether the target has the batch's columns as they were when the batch was laid out."""
        types = {field.name: columns.nullable(field.dataType) for field in snapshot.schema.fields}
        other = [c.name for c in self._layout.stored if types.get(c.name) != columns.nullable(c.dtype)]
        if not other:
            return None
        return Ineligible(reason="schema_change", detail=f"column(s) {other!r} of the target have changed meanwhile")


class _Vectors:
    """The deletion vectors of touched files.

    Args:
        folder: of the table.
        touched: the files.
    """

    def __init__(self, folder: Folder, touched: Sequence[Touched]) -> None:
        self.folder = folder
        self.touched = touched
        self._read: dict[int, BitMap64] = {}

    def of(self, number: int) -> BitMap64:
        """Positions of the deleted rows of a file, by its number; not to be changed."""
        found = self._read.get(number)
        if found is None:
            self._bring([number])
            found = self._read[number]
        return found

    def _bring(self, numbers: Iterable[int]) -> None:
        missing = [number for number in numbers if number not in self._read]
        adds = [self.touched[number].add for number in missing]
        with self.folder.holding(vectors.files_of(adds)):
            self._read.update(zip(missing, (vectors.of(add, self.folder.root) for add in adds), strict=True))

    def spare(self, rows: pa.Table) -> pa.Array:
        """Which rows (`find.find`) live."""
        vectored = [number for number, one in enumerate(self.touched) if one.add.get("deletionVector") is not None]
        if rows.num_rows > _MANY_ROWS * max(1, len(vectored)):
            return self._spare_of_many(rows, vectored)
        found = list(_positions(rows))
        self._bring(number for number, _ in found)
        dead = [(number, position) for number, positions in found for position in positions & self.of(number)]
        if not dead:
            return pa.repeat(pa.scalar(True), rows.num_rows)
        gone = set(dead)
        pairs = zip(rows[FILE].to_pylist(), rows[POSITION].to_pylist(), strict=True)
        return pa.array([pair not in gone for pair in pairs], pa.bool_())

    def _spare_of_many(self, rows: pa.Table, vectored: Sequence[int]) -> pa.Array:
        """As `spare`, file by file, of rows that are many in each."""
        self._bring(vectored)
        live = pa.repeat(pa.scalar(True), rows.num_rows)
        file, position = rows[FILE].combine_chunks(), rows[POSITION].combine_chunks()
        for number in vectored:
            dead = pc.is_in(position, value_set=pa.array(self.of(number), pa.int64()))
            live = pc.and_not(live, pc.and_(dead, pc.equal(file, number)))
        return live


_MANY_ROWS = 10_000
"""Of each file with a vector: from there on Arrow is quicker than a loop over all positions."""


class _Attempt:
    """The files and actions of one attempt to commit.

    Args:
        folder: of the table.
        snapshot: of the version that was read.
        decision: what changes.
        now_ms: milliseconds since the epoch.
    """

    def __init__(self, folder: Folder, snapshot: TableSnapshot, decision: Decision, now_ms: int) -> None:
        self._folder = folder
        self._root = folder.root
        self._snapshot = snapshot
        self._decision = decision
        self._now_ms = now_ms
        self._removes: list[Mapping[str, Any]] = []
        self._adds: list[Mapping[str, Any]] = []
        self._changes: list[Mapping[str, Any]] = []
        self._files: list[str] = []

    def write(self, touched: Sequence[Touched], dead: _Vectors) -> dict[str, int]:
        """Write data, changes and deletion vectors; what was written, under Delta's names."""
        marked, emptied = self._mark(touched, dead)
        new = self._append()
        self._folder.send(self._files)
        self._adds += new
        had_vector = [one.add.get("deletionVector") is not None for one in marked]
        return {
            "numTargetFilesAdded": len(new),
            "numTargetBytesAdded": sum(int(add["size"]) for add in new),
            "numTargetFilesRemoved": len(emptied),
            "numTargetBytesRemoved": sum(int(one.add["size"]) for one in emptied),
            "numTargetDeletionVectorsAdded": had_vector.count(False),
            "numTargetDeletionVectorsUpdated": had_vector.count(True),
            "numTargetDeletionVectorsRemoved": sum(one.add.get("deletionVector") is not None for one in emptied),
            "numTargetChangeFilesAdded": len(self._changes),
            "numTargetChangeFileBytes": sum(int(body["size"]) for body in self._changes),
        }

    def commit(self, tag: CommitTag, metrics: Mapping[str, int]) -> commit.Commit:
        """The commit, for the version after the one that was read."""
        before = self._snapshot.version
        return commit.Commit(
            version=before + 1,
            now_ms=self._now_ms,
            user_metadata=tag.user_metadata,
            metrics=_as_history(metrics),
            transaction=None if tag.app_id is None else (tag.app_id, tag.batch_id),
            parameters={"predicate": "[]", "matchedPredicates": "[]", "notMatchedPredicates": "[]"},
            removes=self._removes,
            adds=self._adds,
            changes=self._changes,
            in_commit_timestamp=commit.timestamp_after(self._snapshot, self._folder.log, self._now_ms),
        )

    def discard(self) -> None:
        """Delete what was written for a commit that is known to be lost."""
        self._folder.discard(self._files)

    def _mark(self, touched: Sequence[Touched], dead: _Vectors) -> tuple[list[Touched], list[Touched]]:
        """Remove the files that lose rows; those that keep some are added again with a larger vector.

        Returns: files with a larger vector, and files of which nothing is left.
        """
        grown: dict[str, BitMap64] = {}
        marked: list[Touched] = []
        emptied: list[Touched] = []
        for number, positions in _positions(self._decision.gone):
            one = touched[number]
            self._removes.append(commit.removed(one.add, self._now_ms))
            vector = dead.of(number) | positions
            if len(vector) < one.candidate.footer.rows:
                grown[one.candidate.path] = vector
                marked.append(one)
            else:
                emptied.append(one)
        described = vectors.write(self._root, grown)
        self._files += vectors.files_of({"deletionVector": vector} for vector in described.values())
        for one in marked:
            vector_of = described[one.candidate.path]
            self._adds.append(commit.added_again(one.add, vector_of, one.candidate.footer.rows))
        return marked, emptied

    def _append(self) -> list[Mapping[str, Any]]:
        """Write new rows, and the change feed where the table has one."""
        decision, schema, properties = self._decision, self._snapshot.schema, self._snapshot.properties
        columns = self._snapshot.partition_columns
        new: list[Mapping[str, Any]] = []
        rows = pa.concat_tables([decision.after, decision.inserted])
        for partition, part in partitions.split(rows, schema, columns):
            add = write_data_file(
                self._root, part, schema, partition=partition, properties=properties, now_ms=self._now_ms
            )
            self._files.append(decoded(add["path"]))
            new.append(add)
        if self._snapshot.has_feed:
            for partition, part in partitions.split(_feed(decision), schema, columns):
                change = write_change_file(self._root, part, schema, partition=partition, properties=properties)
                self._files.append(decoded(change["path"]))
                self._changes.append(change)
        return new


def _positions(rows: pa.Table) -> Iterator[tuple[int, BitMap64]]:
    """The positions of rows by the number of their file."""
    found: dict[int, list[int]] = defaultdict(list)
    for number, position in zip(rows[FILE].to_pylist(), rows[POSITION].to_pylist(), strict=True):
        found[number].append(position)
    for number in sorted(found):
        yield number, BitMap64(found[number])


def _feed(decision: Decision) -> pa.Table:
    """The change feed of a merge."""
    return pa.concat_tables(
        [
            rows.append_column(CHANGE_TYPE, pa.repeat(pa.scalar(kind), rows.num_rows))
            for rows, kind in (
                (decision.before, "update_preimage"),
                (decision.after, "update_postimage"),
                (decision.deleted, "delete"),
                (decision.inserted, "insert"),
            )
        ]
    )


def _counted(decision: Decision, events: pa.Table, touched: Sequence[Touched], native: NativeTable) -> dict[str, int]:
    """What a merge did to rows, and what it looked at, under Delta's names."""
    sizes = native.files()["size_bytes"]
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


def _as_history(metrics: Mapping[str, int]) -> dict[str, int]:
    """The metrics of a commit as Delta's MERGE (4.4) writes them into the log: see `metrics_of_history`."""
    found = {name: value for name, value in metrics.items() if name != "operationNumSourceRows"}
    updated = found.get("numTargetDeletionVectorsUpdated", 0)
    for name in ("numTargetDeletionVectorsAdded", "numTargetDeletionVectorsRemoved"):
        found[name] = found.get(name, 0) + updated
    found["numSourceRows"] = metrics["operationNumSourceRows"]
    found["numOutputRows"] = found["numTargetRowsInserted"] + found["numTargetRowsUpdated"]
    return found
