"""A table of the sink's own in the driver: its rows, appends to it, and rewrites as one file."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import pyarrow as pa
import pyarrow.compute as pc

from stream_merge.model.logs import tell
from stream_merge.shapes.key_bounds import KeyBounds
from stream_merge.spark.versions import arrow_type
from stream_merge.tables.files import commit, vectors
from stream_merge.tables.files.data_file import write_data_file
from stream_merge.tables.files.find import Candidate, find, live_rows
from stream_merge.tables.files.table import DeadRows, TableFiles, file_sizes, table_files
from stream_merge.tables.log.handle import LogHandle
from stream_merge.tables.log.live_files import decoded

log = logging.getLogger(__name__)

MOST_KEPT_ROWS = 100_000
"""Tables of up to so many rows are cached: reading many small files costs more."""
_MOST_CHUNKS = 64
_EVERY_FILE = KeyBounds()

_cached: WeakKeyDictionary[LogHandle, tuple[tuple[int, int], pa.Table]] = WeakKeyDictionary()
"""All rows of small tables, with `LogHandle.times_opened` and the version."""


def rows(handle: LogHandle) -> pa.Table:
    """All rows at the handle's version; those of a small table are cached."""
    cached = _cached.get(handle)
    if cached is None or cached[0] != _at(handle):
        cached = (_at(handle), _read(handle))
        _cached.pop(handle, None)
        if cached[1].num_rows <= MOST_KEPT_ROWS:
            _cached[handle] = cached
    return cached[1]


def rows_with_keys(handle: LogHandle, events: pa.Table, keys: Sequence[str], bounds: KeyBounds) -> pa.Table:
    """The rows that have the keys of events; of a small table perhaps others, too."""
    counts = handle.files()["num_records"]
    if not counts.null_count and (pc.sum(counts).as_py() or 0) <= MOST_KEPT_ROWS:
        return rows(handle)
    table, touched = _touched(handle, bounds)
    schema, dead = handle.snapshot().schema, DeadRows(table, touched)
    with table.folder.holding(file_sizes(touched)):
        matched = find(table.folder.root, touched, events.select(keys), keys, schema, room_for=lambda _: None)
        return matched.filter(dead.live(matched)).select(schema.names)


def append(handle: LogHandle, new: pa.Table, *, transaction: tuple[str, int] | None, user_metadata: str | None) -> None:
    """Append rows on the handle's very version; any other commit meanwhile makes it lose."""
    (opened, before), cached = _at(handle), _cached.get(handle)
    parameters = {"mode": "Append", "partitionBy": "[]"}
    _commit(
        handle, new, [], operation="WRITE", parameters=parameters, transaction=transaction, user_metadata=user_metadata
    )
    if cached is None or cached[0] != (opened, before) or _at(handle) != (opened, before + 1):
        return
    try:
        both = pa.concat_tables([cached[1], new.select(cached[1].column_names).cast(cached[1].schema)])
        _cached[handle] = (_at(handle), both.combine_chunks() if both[0].num_chunks > _MOST_CHUNKS else both)
    except (pa.ArrowException, KeyError):  # the append has landed; the rows are read again when they are wanted
        tell(log.warning, "rows_not_kept", table=handle.location, exc_info=True)


def rewrite(handle: LogHandle, left: pa.Table | None = None) -> None:
    """Replace all files by one with these rows, or in a commit that changes no data with all of them (None).

    Any other commit on the handle's version makes it lose.
    """
    _, touched = _touched(handle, _EVERY_FILE)
    new, changes_data = (rows(handle), False) if left is None else (left, True)
    removes = [commit.removed(one.add, _now(), changes_data=changes_data) for one in touched]
    _commit(handle, new, removes, operation="OPTIMIZE", parameters={"predicate": "[]"}, changes_data=changes_data)


def _commit(
    handle: LogHandle,
    new: pa.Table,
    removes: Sequence[Mapping[str, Any]],
    *,
    operation: str,
    parameters: Mapping[str, str],
    transaction: tuple[str, int] | None = None,
    user_metadata: str | None = None,
    changes_data: bool = True,
) -> None:
    snapshot, now_ms = handle.snapshot(), _now()
    table = table_files(handle, snapshot)
    new = new.select(snapshot.schema.names)
    adds: list[Mapping[str, Any]] = []
    if new.num_rows:
        add = write_data_file(
            table.folder.root, new, snapshot.schema, partition={}, properties=snapshot.properties, now_ms=now_ms
        )
        adds.append({**add, "dataChange": changes_data})
    written = [decoded(add["path"]) for add in adds]
    made = commit.Commit(
        version=snapshot.version + 1,
        now_ms=now_ms,
        user_metadata=user_metadata,
        operation=operation,
        is_blind_append=not removes,
        metrics={"numFiles": len(adds), "numOutputRows": new.num_rows, "numRemovedFiles": len(removes)},
        transaction=transaction,
        parameters=parameters,
        removes=removes,
        adds=adds,
        in_commit_timestamp=commit.timestamp_after(snapshot, table.folder.log, now_ms),
    )
    table.folder.send(written)
    table.commit(handle, made, written)


def _read(handle: LogHandle) -> pa.Table:
    table, touched = _touched(handle, _EVERY_FILE)
    schema, root = handle.snapshot().schema, table.folder.root
    nothing = pa.schema([(field.name, arrow_type(field.dataType)) for field in schema.fields]).empty_table()
    with table.folder.holding({**file_sizes(touched), **vectors.vector_files(one.add for one in touched)}):
        parts = [part for one in touched for part in live_rows(root, one, vectors.deleted_rows(one.add, root), schema)]
    return pa.concat_tables([nothing, *parts])


def _touched(handle: LogHandle, bounds: KeyBounds) -> tuple[TableFiles, Sequence[Candidate]]:
    snapshot = handle.snapshot()
    table = table_files(handle, snapshot)
    return table, table.touched(handle, snapshot, bounds)


def _at(handle: LogHandle) -> tuple[int, int]:
    return handle.times_opened, handle.version


def _now() -> int:
    return int(time.time() * 1000)
