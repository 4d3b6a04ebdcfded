"""Whether delta-rs may merge a batch: only where it is proven. Read from log and batch, never tried out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from stream_merge.model import names
from stream_merge.model.results import Refusal
from stream_merge.model.snapshot import HIVE_NULL, TableSnapshot
from stream_merge.shapes.arrow_text import is_legible
from stream_merge.shapes.key_bounds import KeyBounds
from stream_merge.shapes.layout import Layout
from stream_merge.shapes.sequence import leaves
from stream_merge.spark.columns import CHAR_VARCHAR_METADATA
from stream_merge.tables.delta_rs import data_files
from stream_merge.tables.delta_rs.table import NativeTable, Protocol
from stream_merge.tables.delta_rs.touched_files import touched_files

Place = Literal["key", "sequence", "payload", "nested", "carried", "partition"]
"""What a value is to a merge; `nested`: inside another type of the payload, `carried`: of a column without events."""

_EVERYWHERE: frozenset[Place] = frozenset(get_args(Place))
_IN_FILES = _EVERYWHERE - {"partition"}
PROVEN: Mapping[type[DataType], frozenset[Place]] = {
    BooleanType: _EVERYWHERE,
    ByteType: _EVERYWHERE,
    ShortType: _EVERYWHERE,
    IntegerType: _EVERYWHERE,
    LongType: _EVERYWHERE,
    DateType: _EVERYWHERE,
    StringType: _EVERYWHERE,
    DecimalType: _IN_FILES,
    TimestampType: _IN_FILES,
    TimestampNTZType: _IN_FILES,
    BinaryType: _IN_FILES,
    # Arrow compares floats inside another type bit by bit, and DataFusion compares no maps.
    FloatType: frozenset({"payload", "carried"}),
    DoubleType: frozenset({"payload", "carried"}),
    ArrayType: frozenset({"payload", "nested", "carried"}),
    StructType: frozenset({"payload", "nested", "carried"}),
    MapType: frozenset({"carried"}),
}
"""For which types and where delta-rs 1.6 writes what Spark would; tests/contract/test_whitelist.py tries each entry.

As partition values delta-rs shifts timestamps by the session's offset, writes -1.25 as `-1.-25` and binary as escapes.
"""
_AS: Mapping[Place, str] = {
    "key": "is {} as a key",
    "sequence": "is {} as a sequence",
    "payload": "is {}",
    "nested": "holds {} inside another type",
    "carried": "is or holds {}",
    "partition": "is {} as a partition column",
}

_KNOWN_FEATURES = frozenset(
    {
        "appendOnly",
        "changeDataFeed",
        "checkConstraints",
        "columnMapping",
        "deletionVectors",
        "invariants",
        "timestampNtz",
        "v2Checkpoint",
        # Named by tables whose columns may or may not use them; the columns are looked at.
        "allowColumnDefaults",
        "generatedColumns",
        "identityColumns",
    }
)
"""Table features that delta-rs 1.6 writes correctly; all others belong to Spark."""

_COMPUTED_BY_SPARK = {
    names.GENERATED_FROM: "is generated",
    "delta.identity.start": "is an identity column",
    "CURRENT_DEFAULT": "has a default",
    CHAR_VARCHAR_METADATA: "is char(n) or varchar(n), whose length only Spark checks",
}
_FLOAT_DIGITS = 15
_LONG_DIGITS = 18
"""delta-rs 1.6 writes a decimal's statistics through a float or a long: with more digits they miss the file's rows."""
_ODD_PLACE = re.compile(r"[\[\]^|@\\]")
"""delta-rs 1.6 makes a host name of a table's path when it appends: these a host may not have, and a path keeps."""
_ODD_NAME = re.compile(r"[\"`\\\x00-\x1f]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ineligible:
    """Why a batch goes to Spark."""

    reason: Refusal
    """For metrics."""
    detail: str
    """For people."""


def of_table(table: NativeTable | None, snapshot: TableSnapshot, what: str) -> Ineligible | None:
    """Whether delta-rs can write this table."""
    if table is None:
        return Ineligible(reason="storage", detail=f"{what} is not where delta-rs can read it")
    odd = _ODD_PLACE.search(table.location)
    if odd is not None:
        return Ineligible(
            reason="storage", detail=f"{what} lies in a path with {odd.group()!r}, at which delta-rs panics"
        )
    return _of_protocol(table.protocol, what) or _of_fields(snapshot, what)


def of_files(
    table: NativeTable, snapshot: TableSnapshot, what: str, bounds: KeyBounds | None = None
) -> Ineligible | None:
    """Whether delta-rs reads the table's files as Spark does, and finds them again when it removes them.

    Cost: files of whose dates and times the log does not say enough are looked into, once each.

    Args:
        table: up to date.
        snapshot: of it.
        what: the table, for people.
        bounds: of the keys to merge: only files that may hold them are rewritten. None: any file may be read.
    """
    # A time that was misread may equal a key of the batch although the log's statistics rule that out.
    all_count = bounds is None or any(isinstance(bound.field.dataType, TimestampType) for bound in bounds.columns)
    files = table.files() if bounds is None or all_count else touched_files(table, bounds)
    path = data_files.misnamed(files)
    if path is not None:
        detail = f"file {path!r} of {what} has a path that delta-rs would write otherwise when it removes the file"
        return Ineligible(reason="column", detail=detail)
    try:
        problem = table.times.misread(files, snapshot.schema)
    except Exception as err:
        detail = f"delta-rs could not look into a file of {what} ({type(err).__name__}: {err})"
        return Ineligible(reason="storage", detail=detail)
    return None if problem is None else Ineligible(reason="column", detail=f"{problem} ({what})")


def of_events(events: pa.Table, partition_columns: Sequence[str]) -> Ineligible | None:
    """Whether delta-rs can carry the very values of a batch."""
    if not is_legible(events):
        return Ineligible(reason="column", detail="the batch holds text that is not valid UTF-8")
    found = data_files.times(chunk for column in events.columns for chunk in column.chunks)
    dates = (values for values in found if pa.types.is_date32(values.type))
    if any(data_files.exceeds(values, data_files.DAYS) for values in dates):
        return Ineligible(reason="column", detail="the batch holds dates beyond those that delta-rs can spell")
    texts = {field.name for field in events.schema if pa.types.is_string(field.type)}
    for name in texts.intersection(partition_columns):
        # Delta takes an empty partition value for NULL; delta-rs 1.6 reads it back as an empty text.
        if pc.any(pc.equal(events[name], "")).as_py():
            return Ineligible(reason="column", detail=f"partition column {name!r} holds an empty text")
        if pc.any(pc.equal(events[name], HIVE_NULL)).as_py():
            return Ineligible(reason="column", detail=f"partition column {name!r} holds what Spark keeps as NULL")
    return None


def of_batch(layout: Layout) -> Ineligible | None:
    """Whether delta-rs can carry and compare the batch's columns; looked at once per layout."""
    return layout.once("ineligible", lambda: _of_layout(layout))


def _of_layout(layout: Layout) -> Ineligible | None:
    if layout.is_whole:
        return Ineligible(reason="shape", detail="snapshots are compared with their table by Spark alone")
    if layout.whole is not None:
        return Ineligible(reason="shape", detail="the shape's clauses are SQL, which only Spark executes")
    if layout.new_columns:
        return Ineligible(reason="schema_change", detail=f"column(s) {list(layout.new_columns)!r} are new")
    for stored in layout.stored:
        refused = _of_column(stored.name, stored.dtype, "payload")
        if refused:
            return refused
        if stored.lacks_fields:
            detail = f"column {stored.name!r} of the events lacks fields of the target's, which only Spark keeps"
            return Ineligible(reason="column", detail=detail)
    return _of_keys(layout)


def of_log(layout: Layout, log: NativeTable, snapshot: TableSnapshot) -> Ineligible | None:
    """Whether delta-rs can keep the remembered deletes, of which it sees keys and sequences only."""
    refused = layout.once("ineligible_keys", lambda: _of_keys(layout))
    refused = refused or of_table(log, snapshot, "the tombstone table")
    return refused or of_files(log, snapshot, "the tombstone table")


def of_columns(schema: StructType, keys: Sequence[str]) -> Ineligible | None:
    """Whether delta-rs can carry and compare all columns of a table, as far as the table itself tells."""
    for field in schema.fields:
        place: Place = "key" if field.name in keys else "payload"
        refused = _of_column(field.name, field.dataType, place)
        if refused:
            return refused
    return None


def _of_keys(layout: Layout) -> Ineligible | None:
    for field in layout.key_fields:
        refused = _of_column(field.name, field.dataType, "key")
        if refused:
            return refused
    for _, field in leaves(layout.sequence_type):
        refused = _of_column(field.name, field.dataType, "sequence")
        if refused:
            return refused
    return None


def _of_column(name: str, dtype: DataType, place: Place) -> Ineligible | None:
    problem = _of_name(name) or _of_type(dtype, place)
    return Ineligible(reason="column", detail=f"column {name!r} {problem}") if problem else None


def _of_protocol(protocol: Protocol, what: str) -> Ineligible | None:
    unknown = sorted(protocol.features - _KNOWN_FEATURES)
    if unknown:
        return Ineligible(reason="table_feature", detail=f"{what} uses {', '.join(unknown)}")
    return None


def _of_fields(snapshot: TableSnapshot, what: str) -> Ineligible | None:
    for field in snapshot.schema.fields:
        for key, meaning in _COMPUTED_BY_SPARK.items():
            if key in field.metadata:
                return Ineligible(reason="column", detail=f"column {field.name!r} of {what} {meaning}")
        places: list[Place] = ["carried"]
        if field.name in snapshot.partition_columns:
            places.append("partition")
        for place in places:
            problem = _of_name(field.name) or _of_type(field.dataType, place)
            if problem:
                return Ineligible(reason="column", detail=f"column {field.name!r} of {what} {problem}")
    return None


def _of_name(name: str) -> str | None:
    return "has a quote, backslash or control character in its name" if _ODD_NAME.search(name) else None


def _of_type(dtype: DataType, place: Place) -> str | None:
    """Why delta-rs is not proven for values of this type at this place; None where it is."""
    is_plain = not isinstance(dtype, StringType) or dtype.simpleString() == "string"  # other collations order otherwise
    if place not in PROVEN.get(type(dtype), frozenset()) or not is_plain:
        return f"{_AS[place].format(dtype.simpleString())}, for which delta-rs is not proven"
    if isinstance(dtype, DecimalType) and dtype.precision > (_FLOAT_DIGITS if dtype.scale else _LONG_DIGITS):
        return "is or holds a decimal whose statistics delta-rs would write wrongly"
    inside: Place = "carried" if place == "carried" else "nested"
    if isinstance(dtype, ArrayType):
        return _of_type(dtype.elementType, inside)
    if isinstance(dtype, MapType):
        return _of_type(dtype.keyType, inside) or _of_type(dtype.valueType, inside)
    if isinstance(dtype, StructType):
        found = (_of_name(f.name) or _of_type(f.dataType, inside) for f in dtype.fields)
        return next((problem for problem in found if problem), None)
    return None
