"""Finds the rows of a batch's keys in data files, with their positions: DuckDB joins the files' key columns."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyroaring import BitMap64
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    MapType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from stream_merge.model.snapshot import name_in_files
from stream_merge.spark.versions import arrow_type
from stream_merge.tables.files import partitions
from stream_merge.tables.files.footers import Footer
from stream_merge.tables.log import handle
from stream_merge.tables.log.live_files import Add

EVENT, FILE, POSITION = "__stream_merge_event", "__stream_merge_file", "__stream_merge_position"
OWN_COLUMNS = frozenset({"filename", "file_row_number", "file_index"})
"""What DuckDB (1.5) calls its own columns, in any case; a table's columns must not be called so."""
_UTC, _LOCAL = pa.timestamp("us", tz="UTC"), pa.timestamp("us")
_EVENTS = "__stream_merge_events"
_LEAST_ROWS, _MOST_ROWS, _ENCODED_BYTES = 512, 65_536, 16 << 20
"""Rows read at a time: as many as take so many encoded bytes, by the footers."""
_WHOLE_ROWS = 4_096
"""At most so many of complete files: what a dictionary holds once may be far longer in memory."""
_SETTINGS = {
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "temp_directory": "''",
    "preserve_insertion_order": "false",
    "TimeZone": "'UTC'",
    "arrow_large_buffer_size": "false",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A live file that may hold keys of the batch."""

    path: str
    """Decoded, relative to the table."""
    footer: Footer
    partition: Mapping[str, str | None]
    """`partitionValues` of its `add`."""
    add: Add

    @property
    def encoded_bytes(self) -> float:
        """Bytes of its rows before compression."""
        return self.footer.row_bytes * self.footer.rows


def find(
    root: Path,
    candidates: Sequence[Candidate],
    events: pa.Table,
    keys: Sequence[str],
    schema: StructType,
    *,
    columns: Collection[str] | None = None,
    others: bool = False,
    room_for: Callable[[int], object],
) -> pa.Table:
    """The rows of the events' keys, live or not, in no order: `EVENT`, `FILE`, `POSITION` and the wanted columns.

    `EVENT` is a row number in events, NULL for `others`; `FILE` a number among the candidates; `POSITION` a row number
    in the file. No key of the events is NULL. `room_for` gets the bytes of the rows read so far, and raises where there
    is no memory for them.
    """
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for number, candidate in enumerate(candidates):
        groups[(candidate.footer.types, *sorted(candidate.partition.items()))].append(number)
    numbers = [pa.field(name, pa.int64()) for name in (EVENT, FILE, POSITION)]
    read_as = StructType([field for field in schema.fields if columns is None or field.name in columns])
    wanted = pa.schema([*numbers, *(pa.field(field.name, arrow_type(field.dataType)) for field in read_as.fields)])
    parts = [wanted.empty_table()]
    with _connections.cursor() as con:
        for group in groups.values():
            first = candidates[group[0]]
            stored = _stored_fields(schema, first)
            parted = [field for field in schema.fields if name_in_files(field) in first.partition]
            wanted_keys, events_of = _in_partition(events, [field for field in parted if field.name in keys], first)
            # A key that the files lack is NULL in all their rows.
            has_keys = {field.name for field in (*stored, *parted)}.issuperset(keys)
            if not others and not (wanted_keys.num_rows and has_keys):
                continue
            paths = [os.fspath(root / candidates[number].path) for number in group]
            values, on = _key_columns(wanted_keys, [field for field in stored if field.name in keys], first.footer)
            on = on if has_keys else ["FALSE"]
            con.register(_EVENTS, pa.table({EVENT: events_of, **values}))
            read = [field for field in stored if field in read_as.fields]
            query = con.sql(_query(paths, read, on, others=others))
            at_a_time = _rows_at_a_time([candidates[number] for number in group])
            rows = _read(query.to_arrow_reader(at_a_time), sum(table.nbytes for table in parts), room_for)
            at = pc.index_in(rows[FILE], value_set=pa.array(paths, rows[FILE].type))
            rows = rows.set_column(1, FILE, pa.array(group, pa.int64()).take(at))
            parts.append(_with_columns(rows, read, read_as, first).cast(wanted))
    return pa.concat_tables(parts).combine_chunks()


def _rows_at_a_time(files: Sequence[Candidate]) -> int:
    widest = max(1.0, *(one.footer.row_bytes for one in files))
    return int(min(max(_ENCODED_BYTES / widest, _LEAST_ROWS), _MOST_ROWS))


def _read(reader: pa.RecordBatchReader, before: int, room_for: Callable[[int], object]) -> pa.Table:
    """The rows of a query, a few at a time while there is room for them and for the bytes of those before."""
    batches = []
    for batch in reader:
        batches.append(batch)
        before += batch.nbytes
        room_for(before)
    return pa.Table.from_batches(batches, reader.schema)


def live_rows(root: Path, candidate: Candidate, dead: BitMap64, schema: StructType) -> Iterator[pa.Table]:
    """The rows of a file that are not deleted, in order and a few at a time, with all columns of the table."""
    stored = _stored_fields(schema, candidate)
    names = [name_in_files(field) for field in stored]
    # A dot in a name would mean a field of a struct there.
    chosen = None if any("." in name for name in names) else names
    live = np.ones(candidate.footer.rows, dtype=bool)
    live[np.fromiter(dead, np.int64, len(dead))] = False
    first = 0
    with pq.ParquetFile(root / candidate.path, memory_map=True, coerce_int96_timestamp_unit="us") as file:
        for batch in file.iter_batches(
            min(_rows_at_a_time([candidate]), _WHOLE_ROWS), columns=chosen, use_threads=False
        ):
            keep = live[first : first + batch.num_rows]
            first += batch.num_rows
            columns = (pa.chunked_array([batch.column(name)]) for name in names)
            read = dict(zip((field.name for field in stored), columns, strict=True))
            rows = pa.table(_columns(read, schema, candidate, batch.num_rows))
            yield rows if keep.all() else rows.filter(keep)  # Arrow (26) cannot filter views, as delta-rs writes them


def _stored_fields(schema: StructType, file: Candidate) -> list[StructField]:
    """The columns that are read from a file: it has them, and they are not partition columns."""
    there = {name for name, _ in file.footer.types} - file.partition.keys()
    return [field for field in schema.fields if name_in_files(field) in there]


def _in_partition(events: pa.Table, parted: Sequence[StructField], file: Candidate) -> tuple[pa.Table, pa.Array]:
    """The events whose keys may be in a partition, and their row numbers."""
    numbers = pa.arange(0, events.num_rows)
    keep: Any = None
    for field in parted:
        value = partitions.typed(file.partition[name_in_files(field)], field.dataType)
        same = pc.fill_null(pc.equal(events[field.name], value), False)
        keep = same if keep is None else pc.and_(keep, same)
    if keep is None:
        return events, numbers
    return events.filter(keep), numbers.filter(keep.combine_chunks() if isinstance(keep, pa.ChunkedArray) else keep)


def _key_columns(
    events: pa.Table, keys: Sequence[StructField], footer: Footer
) -> tuple[dict[str, pa.ChunkedArray], list[str]]:
    """The keys of the events as they are joined, and the conditions of the join."""
    columns, on, types = {}, [], dict(footer.types)
    for i, field in enumerate(keys):
        stored, values = f"t.{handle.quote(name_in_files(field))}", events[field.name]
        if isinstance(field.dataType, TimestampType | TimestampNTZType):
            # As the file has them, with a zone or none. Not as numbers: the last time that there is has none in DuckDB.
            has_zone = types[name_in_files(field)].tz is not None
            values = values.cast(arrow_type(field.dataType)).cast(pa.int64()).cast(_UTC if has_zone else _LOCAL)
        columns[f"k{i}"] = values
        if isinstance(field.dataType, BinaryType):
            # As an expression, which DuckDB (1.5) does not look up in a file's bloom filter: there it hashes other
            # bytes, and misses the value.
            stored = f"({stored} || ''::BLOB)"
        on.append(f"{stored} = e.k{i}")
    return columns, on or ["TRUE"]


def _query(paths: Sequence[str], fields: Sequence[StructField], on: Sequence[str], *, others: bool) -> str:
    """The rows of files that an event is joined to, with `others` all."""
    selected = "".join(f", t.{handle.quote(name_in_files(field))} AS c{i}" for i, field in enumerate(fields))
    files = ", ".join(handle.text(path) for path in paths)
    join = "LEFT JOIN" if others else "JOIN"
    return (
        f"SELECT e.{EVENT}, t.filename AS {FILE}, t.file_row_number AS {POSITION}{selected}"
        f" FROM read_parquet([{files}], file_row_number = true, filename = true, hive_partitioning = false) AS t"
        f" {join} {_EVENTS} AS e ON {' AND '.join(on)}"
    )


def _with_columns(rows: pa.Table, fields: Sequence[StructField], schema: StructType, file: Candidate) -> pa.Table:
    """All columns of the table: as read (`c0`, `c1`, …), as the partition says, or NULL."""
    made = {name: rows[name] for name in (EVENT, FILE, POSITION)}
    read = {field.name: rows[f"c{i}"] for i, field in enumerate(fields)}
    return pa.table({**made, **_columns(read, schema, file, rows.num_rows)})


def _columns(
    read: Mapping[str, pa.ChunkedArray], schema: StructType, file: Candidate, rows: int
) -> dict[str, pa.ChunkedArray]:
    made = {}
    for field in schema.fields:
        dtype, name = arrow_type(field.dataType), name_in_files(field)
        if field.name in read:
            chunks = [conformed(chunk, field.dataType) for chunk in read[field.name].chunks]
            made[field.name] = pa.chunked_array(chunks, dtype)
        elif name in file.partition:
            made[field.name] = pa.repeat(partitions.typed(file.partition[name], field.dataType), rows)
        else:
            made[field.name] = pa.nulls(rows, dtype)
    return made


class _Connections:
    """One database in memory per process, which caches what is read of files."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._root: duckdb.DuckDBPyConnection | None = None
        self._process = 0

    def cursor(self) -> duckdb.DuckDBPyConnection:
        with self._lock:
            if self._root is None or self._process != os.getpid():
                self._root = duckdb.connect(":memory:")
                self._process = os.getpid()
                for name, value in _SETTINGS.items():
                    self._root.execute(f"SET {name} = {value}")
            return self._root.cursor()


_connections = _Connections()


def odd_names(names: Iterable[str]) -> list[str]:
    """The names of a table that are reserved by DuckDB."""
    return [name for name in names if name.lower() in OWN_COLUMNS]


_INSTANT = pa.timestamp("us", tz="UTC")


def conformed(values: pa.Array, dtype: DataType) -> pa.Array:
    """Values of a file in the table's type; `footers.is_readable` has ruled out any loss."""
    wanted = arrow_type(dtype)
    if values.type == wanted and not _is_renamed(dtype):
        return values
    if isinstance(dtype, StructType):
        return _struct(values, dtype, wanted)
    if isinstance(dtype, MapType):
        keys, items = conformed(_span(values, values.keys), dtype.keyType), _span(values, values.items)
        return pa.Array.from_buffers(
            wanted,
            len(values),
            _list_buffers(values),
            children=[
                pa.StructArray.from_arrays(
                    [keys, conformed(items, dtype.valueType)], fields=[wanted.key_field, wanted.item_field]
                )
            ],
        )
    if isinstance(dtype, ArrayType):
        elements = conformed(_span(values, values.values), dtype.elementType)
        return pa.Array.from_buffers(wanted, len(values), _list_buffers(values), children=[elements])
    if isinstance(dtype, TimestampType) and values.type == pa.timestamp("us"):
        return values.view(pa.int64()).view(_INSTANT)  # instants, as INT96 has them: nothing to convert
    return values.cast(wanted)


def _is_renamed(dtype: DataType) -> bool:
    """Whether a field inside has another name in files: two of them may have each other's."""
    if isinstance(dtype, StructType):
        return any(name_in_files(field) != field.name or _is_renamed(field.dataType) for field in dtype.fields)
    if isinstance(dtype, MapType):
        return _is_renamed(dtype.keyType) or _is_renamed(dtype.valueType)
    return isinstance(dtype, ArrayType) and _is_renamed(dtype.elementType)


def _struct(values: pa.StructArray, dtype: StructType, wanted: pa.StructType) -> pa.Array:
    numbers = {values.type.field(i).name: i for i in range(values.type.num_fields)}
    children = []
    for field in dtype.fields:
        at = numbers.get(name_in_files(field))
        if at is None:
            children.append(pa.nulls(len(values), arrow_type(field.dataType)))
        else:
            children.append(conformed(values.field(at), field.dataType))
    mask = values.is_null() if values.null_count else None
    return pa.StructArray.from_arrays(children, fields=list(wanted), mask=mask)


def _list_buffers(values: pa.Array) -> list[pa.Buffer | None]:
    """Validity and offsets of lists or maps, from 0 on; large lists have wider ones."""
    offsets = pc.subtract(values.offsets, values.offsets[0]).cast(pa.int32())
    validity = pc.is_valid(values).buffers()[1] if values.null_count else None
    return [validity, offsets.buffers()[1]]


def _span(values: pa.Array, children: pa.Array) -> pa.Array:
    """The children of the lists or maps in a slice."""
    if not len(values):
        return children.slice(0, 0)
    start, end = values.offsets[0].as_py(), values.offsets[-1].as_py()
    return children.slice(start, end - start)
