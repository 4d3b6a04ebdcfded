"""Compaction of the small files that the driver's merges leave: a few per call, in a commit that changes no data."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import closing

import pyarrow as pa
import pyarrow.compute as pc

from stream_merge.engines.memory import BASE_BYTES, Promise
from stream_merge.model.logs import tell
from stream_merge.model.results import MaintenanceRun, ReadDebt, Tidied
from stream_merge.model.snapshot import MAINTENANCE_METADATA, TableSnapshot
from stream_merge.spark.errors import reason
from stream_merge.tables.files import commit, vectors
from stream_merge.tables.files.compaction_choice import Stored, rounds
from stream_merge.tables.files.data_file import write_data_file
from stream_merge.tables.files.eligibility import files_obstacle, table_obstacle
from stream_merge.tables.files.find import Candidate, live_rows
from stream_merge.tables.files.table import TableFiles, file_sizes, table_files
from stream_merge.tables.log.handle import LogHandle
from stream_merge.tables.log.live_files import decoded

log = logging.getLogger(__name__)

AUTO_COMPACT_PROPERTY = "delta.autoOptimize.autoCompact"
"""Delta's own property for compaction after a write: "false" switches this one off, too."""


_COPIES = 3
"""Copies of the rows in memory: as read, concatenated, and in the new file."""


def compact(handle: LogHandle, memory_bytes: int | None = None) -> Tidied:
    """One round of compaction within `MOST_BYTES`, and the read debt that remains; failures are logged."""
    started = time.perf_counter()
    try:
        with closing(Promise(memory_bytes)) as promise:
            tidied = _compacted(handle, promise)
    except commit.ConcurrentWriteException:
        tidied = Tidied(maintenance=MaintenanceRun(outcome="lost", detail="another writer was faster"))
    except Exception as err:
        tidied = Tidied(maintenance=MaintenanceRun(outcome="failed", detail=reason(err)))
    if (done := tidied.maintenance) is not None:
        say = log.warning if done.outcome == "failed" else log.info
        taken = round(time.perf_counter() - started, 3)
        tell(say, "files_compacted", table=handle.location, outcome=done.outcome, detail=done.detail, seconds=taken)
    return tidied


def _compacted(handle: LogHandle, promise: Promise) -> Tidied:
    handle.refresh_if_free()
    snapshot = handle.snapshot()
    table = table_files(handle, snapshot)
    stored = list(table.stored(handle, snapshot))
    rows = int(pc.sum(handle.files()["num_records"]).as_py() or 0)
    awaiting = rounds(stored)
    if not awaiting or snapshot.properties.get(AUTO_COMPACT_PROPERTY, "").lower() == "false":
        return Tidied(debt=_debt(rows, stored, awaiting))
    live = table.live.at(handle.version)
    rounds_of = ([table.file(one.path, live[one.path]) for one in picked] for picked in awaiting)
    affordable = (_affordable(table, files, promise) for files in rounds_of)
    number, files = next(((i, files) for i, files in enumerate(affordable) if files), (0, ()))
    if not files:
        return Tidied(maintenance=_no_memory(), debt=_debt(rows, stored, awaiting))
    refused = table_obstacle(handle, snapshot, "the table") or files_obstacle(files, "the table")
    if refused is not None:
        run = MaintenanceRun(outcome="nothing", detail=refused.detail)
        return Tidied(maintenance=run, debt=_debt(rows, stored, awaiting))
    with table.folder.holding({**file_sizes(files), **vectors.vector_files(one.add for one in files)}):
        parts = _rows(table, snapshot, files, promise)
    if len(parts) < min(2, len(files)):
        return Tidied(maintenance=_no_memory(), debt=_debt(rows, stored, awaiting))
    files = files[: len(parts)]
    awaiting = (*awaiting[:number], awaiting[number][len(files) :], *awaiting[number + 1 :])
    made = _written(table, snapshot, files, pa.concat_tables(parts))
    table.commit(handle, made, [decoded(add["path"]) for add in made.adds])
    written = {one.path for one in files}
    left = [file for file in stored if file.path not in written]
    gone = sum(file.deleted for file in stored) - sum(file.deleted for file in left)
    return Tidied(
        maintenance=MaintenanceRun(outcome="done", removed_files=len(files), added_files=len(made.adds)),
        debt=_debt(rows - gone, left, awaiting),
    )


def _affordable(table: TableFiles, files: Sequence[Candidate], promise: Promise) -> Sequence[Candidate]:
    """As many of the files as there is memory for, by their footers; none if only one of several."""
    least = min(2, len(files))
    while len(files) >= least:
        row_bytes = table.expansion * sum(one.encoded_bytes for one in files)
        if promise.cover(BASE_BYTES + int(_COPIES * row_bytes)) is None:
            return files
        files = files[: len(files) // 2]
    return ()


def _rows(
    table: TableFiles, snapshot: TableSnapshot, files: Sequence[Candidate], promise: Promise
) -> Sequence[pa.Table]:
    """The live rows of the files, in order, of as many as there is memory for."""
    tables: list[pa.Table] = []
    total = 0
    for one in files:
        before, parts, root = total, [], table.folder.root
        for part in live_rows(root, one, vectors.deleted_rows(one.add, root), snapshot.schema):
            parts.append(part)
            total += part.nbytes
            table.expands(one, total - before)
            if promise.cover(BASE_BYTES + _COPIES * total) is not None:
                return tables
        tables.append(pa.concat_tables(parts))
    return tables


def _no_memory() -> MaintenanceRun:
    return MaintenanceRun(outcome="no_memory", detail="there is not enough memory for the rows of a round's files")


def _debt(rows: int, stored: Sequence[Stored], awaiting: Sequence[Sequence[Stored]]) -> ReadDebt:
    deleted = sum(file.deleted for file in stored)
    return ReadDebt(rows=rows, deleted_rows=deleted, awaiting_files=sum(map(len, awaiting)))


def _written(table: TableFiles, snapshot: TableSnapshot, files: Sequence[Candidate], rows: pa.Table) -> commit.Commit:
    """The rows of files of one partition in a new file, and the commit that puts it in their place."""
    now_ms = int(time.time() * 1000)
    rows = rows.drop_columns(list(snapshot.partition_columns))
    adds = []
    if rows.num_rows:
        add = write_data_file(
            table.folder.root,
            rows,
            snapshot.schema,
            partition=files[0].partition,
            properties=snapshot.properties,
            now_ms=now_ms,
        )
        written = [decoded(add["path"])]
        try:
            table.folder.send(written)
        except BaseException:
            table.folder.discard(written)
            raise
        adds.append({**add, "dataChange": False})
    return commit.Commit(
        version=snapshot.version + 1,
        now_ms=now_ms,
        user_metadata=MAINTENANCE_METADATA,
        operation="OPTIMIZE",
        metrics={
            "numRemovedFiles": len(files),
            "numRemovedBytes": sum(int(one.add["size"]) for one in files),
            "numAddedFiles": len(adds),
            "numAddedBytes": sum(int(add["size"]) for add in adds),
            "numDeletionVectorsRemoved": sum(one.add.get("deletionVector") is not None for one in files),
        },
        transaction=None,
        parameters={"predicate": "[]", "zOrderBy": "[]", "auto": "true"},
        removes=[commit.removed(one.add, now_ms, changes_data=False) for one in files],
        adds=adds,
        in_commit_timestamp=commit.timestamp_after(snapshot, table.folder.log, now_ms),
    )
