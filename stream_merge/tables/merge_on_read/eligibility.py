"""Whether a batch may be merged on read: only where it is proven. Read from log, footers and batch, never tried out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import get_args

import pyarrow as pa
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
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from stream_merge.model import names
from stream_merge.model.snapshot import TableSnapshot, name_in_files
from stream_merge.shapes.arrow_text import is_legible
from stream_merge.shapes.clauses import Clause, Delete, Insert, Update
from stream_merge.shapes.layout import Layout
from stream_merge.shapes.sequence import leaves
from stream_merge.spark import places
from stream_merge.spark.columns import CHAR_VARCHAR_METADATA
from stream_merge.tables.delta_rs.eligibility import Ineligible, Place
from stream_merge.tables.delta_rs.table import NativeTable
from stream_merge.tables.merge_on_read import features, partitions
from stream_merge.tables.merge_on_read.find import odd_names
from stream_merge.tables.merge_on_read.footers import GLOB
from stream_merge.tables.merge_on_read.table import Touched

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
    # Spark joins -0.0 with 0.0 and NaN with NaN.
    FloatType: frozenset({"payload", "nested", "carried"}),
    DoubleType: frozenset({"payload", "nested", "carried"}),
    ArrayType: frozenset({"payload", "nested", "carried"}),
    StructType: frozenset({"payload", "nested", "carried"}),
    MapType: frozenset({"payload", "nested", "carried"}),
}
"""For which types and where merge-on-read does what Spark would.

What delta-rs' list has as well, tests/contract/test_whitelist.py merges at its edges; comparing and writing of all is
held to Spark by test_conditions_as_spark.py and test_data_file_as_spark.py.
"""
_AS: Mapping[Place, str] = {
    "key": "is {} as a key",
    "sequence": "is {} as a sequence",
    "payload": "is {}",
    "nested": "holds {} inside another type",
    "carried": "is or holds {}",
    "partition": "is {} as a partition column",
}
_ENFORCED_BY_SPARK = {
    names.GENERATED_FROM: "is generated",
    "delta.identity.start": "is an identity column",
    "CURRENT_DEFAULT": "has a default",
    "delta.invariants": "has an invariant",
    CHAR_VARCHAR_METADATA: "is char(n) or varchar(n), whose length only Spark checks",
}
_MAPPING = "delta.columnMapping.mode"


def of_table(table: NativeTable | None, snapshot: TableSnapshot, what: str) -> Ineligible | None:
    """Whether merge-on-read may write this table, by where it lies, its protocol, properties and columns."""
    if table is None or places.local_path(table.location) is None:
        return Ineligible(reason="storage", detail=f"{what} is not on a local disk")
    odd = GLOB.search(table.location)
    if odd is not None:
        return Ineligible(
            reason="storage", detail=f"{what} lies in a path with {odd.group()!r}, which stands for any name"
        )
    protocol = table.protocol
    refused = features.refusal(protocol.reader_version, protocol.writer_version, protocol.features, snapshot.properties)
    if refused is not None:
        return Ineligible(reason="table_feature", detail=f"{what}: {refused}")
    if snapshot.properties.get(_MAPPING, "none").lower() not in ("none", "name"):
        return Ineligible(reason="table_feature", detail=f"{what} finds its columns in files by ids ({_MAPPING})")
    return _of_fields(snapshot, what)


def of_layout(layout: Layout) -> Ineligible | None:
    """Whether the batch's columns can be carried and compared; looked at once per layout."""
    return layout.once("ineligible_on_read", lambda: _of_layout(layout))


def of_clauses(clauses: Iterable[Clause]) -> Ineligible | None:
    """Whether the clauses are about rows that an event has, or events without a row."""
    if all(isinstance(clause, Delete | Update | Insert) for clause in clauses):
        return None
    return Ineligible(reason="shape", detail="rows without an event are concerned, which may lie anywhere")


def of_files(touched: Sequence[Touched], what: str) -> Ineligible | None:
    """Whether the files hold the table's columns in a way that is read as Spark reads it."""
    problem = next((one.candidate.footer.problem for one in touched if one.candidate.footer.problem), None)
    return None if problem is None else Ineligible(reason="column", detail=f"{problem} ({what})")


def of_events(events: pa.Table, partition_columns: Sequence[str]) -> Ineligible | None:
    """Whether the very values of a batch can be carried."""
    if not is_legible(events):
        return Ineligible(reason="column", detail="the batch holds text that is not valid UTF-8")
    odd = partitions.holds_odd_text(events, [name for name in partition_columns if name in events.column_names])
    if odd is None:
        return None
    return Ineligible(reason="column", detail=f"partition column {odd!r} holds a text that Spark keeps as NULL")


def _of_layout(layout: Layout) -> Ineligible | None:
    if layout.is_whole:
        return Ineligible(reason="shape", detail="snapshots are compared with their table by Spark alone")
    if layout.whole is not None:
        return Ineligible(reason="shape", detail="the shape's clauses are SQL, which only Spark executes")
    if layout.new_columns or layout.type_changes:
        changed = [*layout.new_columns, *map(str, layout.type_changes)]
        return Ineligible(reason="schema_change", detail=f"column(s) {changed!r} are new or wider")
    for stored in layout.stored:
        if stored.lacks_fields:
            detail = f"column {stored.name!r} of the events lacks fields of the target's, which only Spark keeps"
            return Ineligible(reason="column", detail=detail)
    used: list[tuple[StructField, Place]] = [(stored.field, "payload") for stored in layout.stored]
    used += [(field, "key") for field in layout.key_fields]
    used += [(field, "sequence") for _, field in leaves(layout.sequence_type)]
    return _first(_of_type(field.dataType, place, field.name) for field, place in used)


def _of_fields(snapshot: TableSnapshot, what: str) -> Ineligible | None:
    fields = snapshot.schema.fields
    odd = odd_names([*(field.name for field in fields), *map(name_in_files, fields)])
    if odd:
        return Ineligible(
            reason="column", detail=f"column {odd[0]!r} of {what} has a name that the reader of files uses"
        )
    for field in snapshot.schema.fields:
        for key, meaning in _ENFORCED_BY_SPARK.items():
            if any(key in one.metadata for one in _with_inner(field)):
                return Ineligible(reason="column", detail=f"column {field.name!r} of {what} {meaning}")
        placed: list[Place] = ["carried", *(("partition",) if field.name in snapshot.partition_columns else ())]
        refused = _first(_of_type(field.dataType, place, field.name) for place in placed)
        if refused is not None:
            return refused
    return None


def _with_inner(field: StructField) -> Iterable[StructField]:
    """A field, and all fields inside its type."""
    yield field
    inner: list[DataType] = [field.dataType]
    while inner:
        dtype = inner.pop()
        if isinstance(dtype, StructType):
            yield from dtype.fields
            inner.extend(one.dataType for one in dtype.fields)
        elif isinstance(dtype, ArrayType):
            inner.append(dtype.elementType)
        elif isinstance(dtype, MapType):
            inner.extend((dtype.keyType, dtype.valueType))


def _of_type(dtype: DataType, place: Place, name: str) -> Ineligible | None:
    is_plain = not isinstance(dtype, StringType) or dtype.simpleString() == "string"  # other collations order otherwise
    if place not in PROVEN.get(type(dtype), frozenset()) or not is_plain:
        detail = f"column {name!r} {_AS[place].format(dtype.simpleString())}, for which merge-on-read is not proven"
        return Ineligible(reason="column", detail=detail)
    inside: Place = "carried" if place == "carried" else "nested"
    if isinstance(dtype, ArrayType):
        return _of_type(dtype.elementType, inside, name)
    if isinstance(dtype, MapType):
        return _first(_of_type(one, inside, name) for one in (dtype.keyType, dtype.valueType))
    if isinstance(dtype, StructType):
        return _first(_of_type(field.dataType, inside, name) for field in dtype.fields)
    return None


def _first(found: Iterable[Ineligible | None]) -> Ineligible | None:
    return next((one for one in found if one is not None), None)
