"""Whether the driver may merge a batch: proven from log, footers and batch before anything is written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

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

from stream_merge.model import locations, names
from stream_merge.model.results import Refusal
from stream_merge.model.snapshot import TableSnapshot, mapping_mode, name_in_files
from stream_merge.shapes.arrow_order import is_legible, leaves
from stream_merge.shapes.clauses import Always, Clause, Delete, DeleteMissing, Insert, Update
from stream_merge.shapes.layout import Layout
from stream_merge.spark.columns import CHAR_VARCHAR_METADATA
from stream_merge.tables.files import features, partitions
from stream_merge.tables.files.find import Candidate, odd_names
from stream_merge.tables.files.footers import GLOB, inner_types
from stream_merge.tables.log.handle import LogHandle

Role = Literal["key", "sequence", "payload", "nested", "carried", "partition"]
"""Role of a column in a merge; `nested`: inside another type of the payload, `carried`: a column without events."""

_EVERYWHERE: frozenset[Role] = frozenset(get_args(Role))
_IN_FILES = _EVERYWHERE - {"partition"}
_NOT_COMPARED: frozenset[Role] = frozenset({"payload", "nested", "carried"})
PROVEN: Mapping[type[DataType], frozenset[Role]] = {
    **dict.fromkeys((BooleanType, ByteType, ShortType, IntegerType, LongType, DateType, StringType), _EVERYWHERE),
    **dict.fromkeys((DecimalType, TimestampType, TimestampNTZType, BinaryType), _IN_FILES),
    # Spark joins -0.0 with 0.0 and NaN with NaN.
    **dict.fromkeys((FloatType, DoubleType, ArrayType, StructType, MapType), _NOT_COMPARED),
}
"""The roles in which the driver does what Spark would with values of a type.

tests/contract/test_whitelist.py merges them at their edges; comparing and writing of all is held to Spark by
test_conditions_as_spark.py and test_data_file_as_spark.py.
"""
_PHRASES: Mapping[Role, str] = {
    "key": "is {} as a key",
    "sequence": "is {} as a sequence",
    "payload": "is {}",
    "nested": "holds {} inside another type",
    "carried": "is or holds {}",
    "partition": "is {} as a partition column",
}
_ENFORCED_BY_SPARK: Mapping[str, str] = {
    names.GENERATED_FROM: "is generated",
    names.IDENTITY: "is an identity column",
    "CURRENT_DEFAULT": "has a default",
    CHAR_VARCHAR_METADATA: "is char(n) or varchar(n), whose length only Spark checks",
    "delta.invariants": "has an invariant",
}
"""Field metadata -> what it means, for columns that only Spark writes correctly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ineligible:
    """Why a batch is left to Spark."""

    reason: Refusal
    """For metrics."""
    detail: str
    """For people."""


def table_obstacle(table: LogHandle | None, snapshot: TableSnapshot, what: str) -> Ineligible | None:
    """Why the driver may not write a table: its location, protocol, properties or columns."""
    if table is None:
        return Ineligible(reason="storage", detail=f"{what} is not where the driver may write")
    is_local = locations.local_path(table.location) is not None
    if not (is_local or locations.is_on_s3(table.location) or locations.is_on_azure(table.location)):
        return Ineligible(reason="storage", detail=f"{what} is neither on a local disk nor on S3 nor on Azure")
    odd = GLOB.search(table.location)
    if is_local and odd is not None:
        detail = f"{what} lies in a path with {odd.group()!r}, which stands for any name"
        return Ineligible(reason="storage", detail=detail)
    protocol = table.protocol
    refused = features.refusal(protocol.reader_version, protocol.writer_version, protocol.features, snapshot.properties)
    if refused is not None:
        return Ineligible(reason="table_feature", detail=f"{what}: {refused}")
    if mapping_mode(snapshot.properties) not in ("none", "name"):
        # By id the names in files are arbitrary: CONVERT TO DELTA of an Iceberg table keeps older ones (Delta 4.4).
        detail = f"{what} finds its columns in files by ids (delta.columnMapping.mode)"
        return Ineligible(reason="table_feature", detail=detail)
    return _fields_obstacle(snapshot, what)


def recorded_obstacle(snapshot: TableSnapshot) -> Ineligible | None:
    """Why the driver may not merge into a table, by the types of its columns, keys and sequence as recorded in it."""
    return _columns_obstacle(_recorded_columns(snapshot))


def layout_obstacle(layout: Layout) -> Ineligible | None:
    """Why the driver may not merge batches of a layout; computed once per layout."""
    return layout.once("layout_obstacle", lambda: _layout_obstacle(layout))


def keys_obstacle(layout: Layout) -> Ineligible | None:
    """Why the driver may not write tombstones of a layout, which have keys and sequences only."""
    return layout.once("keys_obstacle", lambda: _columns_obstacle(_key_columns(layout)))


def clauses_obstacle(clauses: Iterable[Clause]) -> Ineligible | None:
    """Why the driver cannot execute clauses: of rows without an event it deletes all, or none."""
    for clause in clauses:
        is_of_all = isinstance(clause, DeleteMissing) and clause.when == Always()
        if not is_of_all and not isinstance(clause, Delete | Update | Insert):
            detail = "some rows without an event are concerned, by SQL that Spark executes"
            return Ineligible(reason="shape", detail=detail)
    return None


def files_obstacle(files: Sequence[Candidate], what: str) -> Ineligible | None:
    """Why the driver would not read files as Spark reads them."""
    problem = next((one.footer.problem for one in files if one.footer.problem), None)
    return None if problem is None else Ineligible(reason="column", detail=f"{problem} ({what})")


def events_obstacle(events: pa.Table, partition_columns: Sequence[str]) -> Ineligible | None:
    """Why the driver cannot write the very values of a batch."""
    if not is_legible(events):
        return Ineligible(reason="column", detail="the batch holds text that is not valid UTF-8")
    odd = partitions.holds_odd_text(events, [name for name in partition_columns if name in events.column_names])
    if odd is None:
        return None
    return Ineligible(reason="column", detail=f"partition column {odd!r} holds a text that Spark keeps as NULL")


def _layout_obstacle(layout: Layout) -> Ineligible | None:
    if layout.whole is not None:
        return Ineligible(reason="shape", detail="the shape's clauses are SQL, which only Spark executes")
    if layout.new_columns or layout.type_changes:
        changed = [*layout.new_columns, *map(str, layout.type_changes)]
        return Ineligible(reason="schema_change", detail=f"column(s) {changed!r} are new or wider")
    lacking = next((stored.name for stored in layout.stored if stored.lacks_fields), None)
    if lacking is not None:
        detail = f"column {lacking!r} of the events lacks fields of the target's, which only Spark keeps"
        return Ineligible(reason="column", detail=detail)
    return _columns_obstacle(_event_columns(layout))


def _event_columns(layout: Layout) -> Iterator[tuple[str, DataType, Role]]:
    yield from ((stored.name, stored.dtype, "payload") for stored in layout.stored)
    yield from _key_columns(layout)


def _key_columns(layout: Layout) -> Iterator[tuple[str, DataType, Role]]:
    yield from ((field.name, field.dataType, "key") for field in layout.key_fields)
    yield from ((field.name, field.dataType, "sequence") for _, field in leaves(layout.sequence_type))


def _recorded_columns(snapshot: TableSnapshot) -> Iterator[tuple[str, DataType, Role]]:
    """The columns of a table, by the keys and sequence recorded in its properties."""
    keys = _recorded(snapshot.properties.get(names.KEYS_PROPERTY, "[]"))
    sequence = _recorded(snapshot.properties.get(names.SEQUENCE_PROPERTY, "{}"))
    for field in snapshot.schema.fields:
        is_sequence = field.name == names.SEQUENCE_COLUMN
        if not is_sequence:
            yield field.name, field.dataType, "payload"
        if field.name.lower() in keys:
            yield field.name, field.dataType, "key"
        if is_sequence or field.name.lower() in sequence:
            yield from ((leaf.name, leaf.dataType, "sequence") for _, leaf in leaves(StructType([field])))


def _recorded(text: str) -> frozenset[str]:
    """Columns, in lower case, that a recorded property names; a computed sequence names none."""
    definition = json.loads(text)
    columns = definition if isinstance(definition, list) else definition.get("columns", [])
    return frozenset(name.lower() for name in columns)


def _columns_obstacle(columns: Iterable[tuple[str, DataType, Role]]) -> Ineligible | None:
    for name, dtype, role in columns:
        problem = _type_problem(dtype, role)
        if problem:
            return Ineligible(reason="column", detail=f"column {name!r} {problem}")
    return None


def _type_problem(dtype: DataType, role: Role) -> str | None:
    """Why the driver does not support this type in this role; None if it does."""
    # Other collations order otherwise.
    is_plain = not isinstance(dtype, StringType) or dtype.simpleString() == "string"
    if role not in PROVEN.get(type(dtype), frozenset()) or not is_plain:
        return f"{_PHRASES[role].format(dtype.simpleString())}, for which the driver is not proven"
    inside: Role = "carried" if role == "carried" else "nested"
    problems = (_type_problem(part, inside) for part in inner_types(dtype))
    return next((problem for problem in problems if problem), None)


def _fields_obstacle(snapshot: TableSnapshot, what: str) -> Ineligible | None:
    fields = snapshot.schema.fields
    odd = odd_names([*(field.name for field in fields), *map(name_in_files, fields)])
    if odd:
        detail = f"column {odd[0]!r} of {what} has a name that the reader of files uses"
        return Ineligible(reason="column", detail=detail)
    for field in fields:
        for key, meaning in _ENFORCED_BY_SPARK.items():
            if any(key in one.metadata for one in _with_inner(field)):
                return Ineligible(reason="column", detail=f"column {field.name!r} of {what} {meaning}")
        roles: list[Role] = ["carried", *(("partition",) if field.name in snapshot.partition_columns else ())]
        refused = _columns_obstacle((field.name, field.dataType, role) for role in roles)
        if refused is not None:
            return refused
    return None


def _with_inner(field: StructField) -> Iterator[StructField]:
    """The field and all fields nested in its type."""
    yield field
    inner: list[DataType] = [field.dataType]
    while inner:
        dtype = inner.pop()
        if isinstance(dtype, StructType):
            yield from dtype.fields
        inner.extend(inner_types(dtype))
