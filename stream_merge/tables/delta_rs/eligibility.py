"""Whether delta-rs may merge a batch: only where it is proven. Read from log and batch, never tried out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession
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

from stream_merge.model.snapshot import HIVE_NULL, TableSnapshot
from stream_merge.shapes.arrow_text import is_legible
from stream_merge.shapes.key_bounds import KeyBounds
from stream_merge.shapes.layout import Layout
from stream_merge.tables.delta_rs import data_files
from stream_merge.tables.delta_rs.data_files import holds_days
from stream_merge.tables.delta_rs.protocol import Protocol
from stream_merge.tables.delta_rs.table import NativeTable
from stream_merge.tables.delta_rs.touched_files import touched_files
from stream_merge.tables.whitelist import (
    CONSTRAINT,
    ENFORCED_BY_SPARK,
    EVERYWHERE,
    IN_FILES,
    Ineligible,
    Place,
    Whitelist,
    columns_of,
    keys_of,
    of_mapping,
    of_readers,
    of_shape,
    of_structs,
    recorded_columns,
    with_inner,
)

CALENDAR_CONF = "spark.sql.parquet.datetimeRebaseModeInRead"
"""CORRECTED unless told otherwise, EXCEPTION on Spark 3.5."""
PROVEN: Mapping[type[DataType], frozenset[Place]] = {
    BooleanType: EVERYWHERE,
    ByteType: EVERYWHERE,
    ShortType: EVERYWHERE,
    IntegerType: EVERYWHERE,
    LongType: EVERYWHERE,
    DateType: EVERYWHERE,
    StringType: EVERYWHERE,
    DecimalType: IN_FILES,
    TimestampType: IN_FILES,
    TimestampNTZType: IN_FILES,
    BinaryType: IN_FILES,
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

_OBEYED: Mapping[str, tuple[str, ...]] = {
    "delta.appendonly": ("true", "false"),
    "delta.enablechangedatafeed": ("true", "false"),
    "delta.columnmapping.mode": ("none", "name"),
}
"""Properties, in lower case, by which delta-rs 1.6 merges otherwise, or not at all; and how it reads them."""
_FLOAT_DIGITS = 15
_LONG_DIGITS = 18
"""delta-rs 1.6 writes a decimal's statistics through a float or a long: with more digits they miss the file's rows."""
_ODD_PLACE = re.compile(r"[\[\]^|@\\]")
"""delta-rs 1.6 makes a host name of a table's path when it appends: these a host may not have, and a path keeps."""
_ODD_NAME = re.compile(r"[\"`\\\x00-\x1f]")


def of_table(table: NativeTable | None, snapshot: TableSnapshot, what: str) -> Ineligible | None:
    """Whether delta-rs can write this table."""
    if table is None:
        return Ineligible(reason="storage", detail=f"{what} is not where delta-rs can read it")
    return (
        of_place(table.location, what)
        or _of_protocol(table.protocol, what)
        or of_mapping(snapshot, what)
        or of_readers(snapshot, what)
        or _of_spelling(snapshot, what)
        or _of_constraints(snapshot, what)
        or _of_fields(snapshot, what)
    )


def of_place(location: str, what: str) -> Ineligible | None:
    """Whether delta-rs can write to a table that lies there, or will."""
    inside_store = location.partition("://")[2].partition("/")[2]
    odd = _ODD_PLACE.search(inside_store or location)
    if odd is None:
        return None
    return Ineligible(reason="storage", detail=f"{what} lies in a path with {odd.group()!r}, at which delta-rs panics")


def of_files(
    table: NativeTable, snapshot: TableSnapshot, what: str, bounds: KeyBounds | None = None
) -> Ineligible | None:
    """Whether delta-rs reads the table's files as Spark does, and finds them again when it removes them.

    Cost: the footer of each file that this handle has not written, and a look into each of whose dates and times the
    log does not say enough; once.

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
        problem = table.columns.misread(files, snapshot) or table.times.misread(files, snapshot.schema)
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
    refused = of_shape(layout)
    if layout.is_whole:
        refused = Ineligible(reason="shape", detail="delta-rs does not compare snapshots with their table")
    if refused is None and layout.new_columns:
        refused = Ineligible(reason="schema_change", detail=f"column(s) {list(layout.new_columns)!r} are new")
    return refused or of_structs(layout) or _of_columns(columns_of(layout))


def of_log(layout: Layout, log: NativeTable, snapshot: TableSnapshot) -> Ineligible | None:
    """Whether delta-rs can keep the remembered deletes, of which it sees keys and sequences only."""
    refused = of_keys(layout) or of_table(log, snapshot, "the tombstone table")
    return refused or of_files(log, snapshot, "the tombstone table")


def of_keys(layout: Layout) -> Ineligible | None:
    """Whether delta-rs can carry keys and sequences, which are all that a tombstone has of an event."""
    return layout.once("ineligible_keys", lambda: _of_columns(keys_of(layout)))


def of_calendar(session: SparkSession, schema: StructType) -> Ineligible | None:
    """Files of delta-rs name no version of Spark: by a conf Spark takes old dates in them for another calendar's."""
    mode = str(session.conf.get(CALENDAR_CONF)).upper()
    if mode == "CORRECTED" or not holds_days(schema):
        return None
    return Ineligible(
        reason="column",
        detail=f"with {CALENDAR_CONF}={mode} Spark reads dates before 1582 in files of delta-rs wrongly, or not at all",
    )


def of_recorded(snapshot: TableSnapshot) -> Ineligible | None:
    """Whether delta-rs can carry and compare all columns of a table, as far as the table itself tells."""
    return _of_columns(recorded_columns(snapshot))


def _of_columns(used: Iterable[tuple[str, DataType, Place]]) -> Ineligible | None:
    for name, dtype, place in used:
        problem = _of_name(name) or _WHITELIST.problem(dtype, place)
        if problem:
            return Ineligible(reason="column", detail=f"column {name!r} {problem}")
    return None


def _of_protocol(protocol: Protocol, what: str) -> Ineligible | None:
    unknown = sorted(protocol.features - _KNOWN_FEATURES)
    if unknown:
        return Ineligible(reason="table_feature", detail=f"{what} uses {', '.join(unknown)}")
    return None


def _of_spelling(snapshot: TableSnapshot, what: str) -> Ineligible | None:
    """Delta (4.4) keeps properties as they were written and reads them in any case; delta-rs 1.6 does not."""
    for name, value in sorted(snapshot.properties.items()):
        if value not in _OBEYED.get(name.lower(), (value,)):
            detail = f"{name} = {value!r} of {what} is not spelled as delta-rs reads it"
            return Ineligible(reason="table_feature", detail=detail)
    return None


def _of_constraints(snapshot: TableSnapshot, what: str) -> Ineligible | None:
    """delta-rs 1.6 asks DataFusion, to which 7 / 10 is 0: rows would pass that Spark refuses."""
    for name in snapshot.properties:
        if name.lower().startswith(CONSTRAINT):
            return Ineligible(
                reason="table_feature", detail=f"{name!r} of {what} is a CHECK constraint, judged by Spark"
            )
    return None


def _of_fields(snapshot: TableSnapshot, what: str) -> Ineligible | None:
    for field in snapshot.schema.fields:
        for key, meaning in ENFORCED_BY_SPARK.items():
            if any(key in one.metadata for one in with_inner(field)):
                return Ineligible(reason="column", detail=f"column {field.name!r} of {what} {meaning}")
        places: list[Place] = ["carried"]
        if field.name in snapshot.partition_columns:
            places.append("partition")
        for place in places:
            problem = _of_name(field.name) or _WHITELIST.problem(field.dataType, place)
            if problem:
                return Ineligible(reason="column", detail=f"column {field.name!r} of {what} {problem}")
    return None


def _of_name(name: str) -> str | None:
    return "has a quote, backslash or control character in its name" if _ODD_NAME.search(name) else None


def _of_inside(dtype: DataType) -> str | None:
    if isinstance(dtype, DecimalType) and dtype.precision > (_FLOAT_DIGITS if dtype.scale else _LONG_DIGITS):
        return "is or holds a decimal whose statistics delta-rs would write wrongly"
    fields = dtype.fields if isinstance(dtype, StructType) else []
    return next((problem for problem in (_of_name(field.name) for field in fields) if problem), None)


_WHITELIST = Whitelist(engine="delta-rs", proven=PROVEN, also=_of_inside)
