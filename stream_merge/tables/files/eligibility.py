"""Whether a batch may be merged on read: only where it is proven. Read from log, footers and batch, never tried out."""

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
from stream_merge.shapes.arrow_order import is_legible
from stream_merge.shapes.clauses import Always, Clause, Delete, DeleteMissing, Insert, Update
from stream_merge.shapes.layout import Layout
from stream_merge.shapes.sequence import leaves
from stream_merge.spark.columns import CHAR_VARCHAR_METADATA
from stream_merge.tables.files import features, partitions
from stream_merge.tables.files.find import Candidate, odd_names
from stream_merge.tables.files.footers import GLOB
from stream_merge.tables.log.handle import LogHandle

Place = Literal["key", "sequence", "payload", "nested", "carried", "partition"]
"""Role of a column in a merge; `nested`: inside another type of the payload, `carried`: a column without events."""

EVERYWHERE: frozenset[Place] = frozenset(get_args(Place))
IN_FILES = EVERYWHERE - {"partition"}
_AS: Mapping[Place, str] = {
    "key": "is {} as a key",
    "sequence": "is {} as a sequence",
    "payload": "is {}",
    "nested": "holds {} inside another type",
    "carried": "is or holds {}",
    "partition": "is {} as a partition column",
}
COMPUTED_BY_SPARK: Mapping[str, str] = {
    names.GENERATED_FROM: "is generated",
    names.IDENTITY: "is an identity column",
    "CURRENT_DEFAULT": "has a default",
    CHAR_VARCHAR_METADATA: "is char(n) or varchar(n), whose length only Spark checks",
}
"""Field metadata -> what it means, for columns whose values Spark computes."""
ENFORCED_BY_SPARK: Mapping[str, str] = {**COMPUTED_BY_SPARK, "delta.invariants": "has an invariant"}
"""Field metadata -> what it means, for columns that only Spark writes correctly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ineligible:
    """Why a batch goes to another engine."""

    reason: Refusal
    """For metrics."""
    detail: str
    """For people."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Whitelist:
    """Column types that one engine supports."""

    engine: str
    """For people."""
    proven: Mapping[type[DataType], frozenset[Place]]

    def problem(self, dtype: DataType, place: Place) -> str | None:
        """Why the engine does not support this type in this role; None if it does."""
        # Other collations order otherwise.
        is_plain = not isinstance(dtype, StringType) or dtype.simpleString() == "string"
        if place not in self.proven.get(type(dtype), frozenset()) or not is_plain:
            return f"{_AS[place].format(dtype.simpleString())}, for which {self.engine} is not proven"
        inside: Place = "carried" if place == "carried" else "nested"
        problems = (self.problem(part, inside) for part in _parts(dtype))
        return next((problem for problem in problems if problem), None)


def of_mapping(snapshot: TableSnapshot, what: str) -> Ineligible | None:
    """Refuse a table whose files do not have its columns under their physical names.

    With mapping by id the names in files are arbitrary: a table converted from Iceberg keeps files written before a
    column was renamed (`CONVERT TO DELTA iceberg`, Delta 4.4).
    """
    if mapping_mode(snapshot.properties) in ("none", "name"):
        return None
    detail = f"{what} finds its columns in files by ids (delta.columnMapping.mode)"
    return Ineligible(reason="table_feature", detail=detail)


def of_shape(layout: Layout) -> Ineligible | None:
    """Refuse a shape whose clauses only Spark can execute."""
    if layout.whole is not None:
        return Ineligible(reason="shape", detail="the shape's clauses are SQL, which only Spark executes")
    return None


def of_structs(layout: Layout) -> Ineligible | None:
    """Refuse structs in the events that lack fields of the target's, which an update keeps."""
    lacking = next((stored.name for stored in layout.stored if stored.lacks_fields), None)
    if lacking is None:
        return None
    detail = f"column {lacking!r} of the events lacks fields of the target's, which only Spark keeps"
    return Ineligible(reason="column", detail=detail)


def keys_of(layout: Layout) -> Iterator[tuple[str, DataType, Place]]:
    """Name, type and role of the key and sequence columns."""
    yield from ((field.name, field.dataType, "key") for field in layout.key_fields)
    yield from ((field.name, field.dataType, "sequence") for _, field in leaves(layout.sequence_type))


def columns_of(layout: Layout) -> Iterator[tuple[str, DataType, Place]]:
    """Name, type and role of all columns of the events."""
    yield from ((stored.name, stored.dtype, "payload") for stored in layout.stored)
    yield from keys_of(layout)


def recorded_columns(snapshot: TableSnapshot) -> Iterator[tuple[str, DataType, Place]]:
    """Name, type and role of a table's columns, by the keys and sequence recorded in its properties."""
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


def _parts(dtype: DataType) -> list[DataType]:
    if isinstance(dtype, ArrayType):
        return [dtype.elementType]
    if isinstance(dtype, MapType):
        return [dtype.keyType, dtype.valueType]
    return [field.dataType for field in dtype.fields] if isinstance(dtype, StructType) else []


def with_inner(field: StructField) -> Iterable[StructField]:
    """The field and all fields nested in its type."""
    yield field
    inner: list[DataType] = [field.dataType]
    while inner:
        dtype = inner.pop()
        if isinstance(dtype, StructType):
            yield from dtype.fields
        inner.extend(_parts(dtype))


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
_WHITELIST = Whitelist(engine="merge-on-read", proven=PROVEN)


def of_table(table: LogHandle | None, snapshot: TableSnapshot, what: str) -> Ineligible | None:
    """Whether merge-on-read may write this table, by where it lies, its protocol, properties and columns."""
    if table is None:
        return Ineligible(reason="storage", detail=f"{what} is not where the driver may write")
    is_local = locations.local_path(table.location) is not None
    if not (is_local or locations.is_on_s3(table.location) or locations.is_on_azure(table.location)):
        return Ineligible(reason="storage", detail=f"{what} is neither on a local disk nor on S3 nor on Azure")
    odd = GLOB.search(table.location)
    if is_local and odd is not None:
        return Ineligible(
            reason="storage", detail=f"{what} lies in a path with {odd.group()!r}, which stands for any name"
        )
    protocol = table.protocol
    refused = features.refusal(protocol.reader_version, protocol.writer_version, protocol.features, snapshot.properties)
    if refused is not None:
        return Ineligible(reason="table_feature", detail=f"{what}: {refused}")
    return of_mapping(snapshot, what) or _of_fields(snapshot, what)


def of_recorded(snapshot: TableSnapshot) -> Ineligible | None:
    """Whether all columns of a table can be carried and compared, as far as the table itself tells."""
    return _of_columns(recorded_columns(snapshot))


def of_layout(layout: Layout) -> Ineligible | None:
    """Whether the batch's columns can be carried and compared; looked at once per layout."""
    return layout.once("ineligible_on_read", lambda: _of_layout(layout))


def of_keys(layout: Layout) -> Ineligible | None:
    """Whether keys and sequences can be carried and compared, which are all that a tombstone has of an event."""
    return layout.once("ineligible_keys", lambda: _of_columns(keys_of(layout)))


def of_clauses(clauses: Iterable[Clause]) -> Ineligible | None:
    """Whether no clause needs SQL: of rows without an event all are deleted, or none."""
    for clause in clauses:
        is_whole = isinstance(clause, DeleteMissing) and clause.when == Always()
        if not is_whole and not isinstance(clause, Delete | Update | Insert):
            return Ineligible(
                reason="shape", detail="some rows without an event are concerned, by SQL that Spark executes"
            )
    return None


def of_files(touched: Sequence[Candidate], what: str) -> Ineligible | None:
    """Whether the files hold the table's columns in a way that is read as Spark reads it."""
    problem = next((one.footer.problem for one in touched if one.footer.problem), None)
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
    refused = of_shape(layout)
    if refused is None and (layout.new_columns or layout.type_changes):
        changed = [*layout.new_columns, *map(str, layout.type_changes)]
        refused = Ineligible(reason="schema_change", detail=f"column(s) {changed!r} are new or wider")
    return refused or of_structs(layout) or _of_columns(columns_of(layout))


def _of_columns(used: Iterable[tuple[str, DataType, Place]]) -> Ineligible | None:
    for name, dtype, place in used:
        problem = _WHITELIST.problem(dtype, place)
        if problem:
            return Ineligible(reason="column", detail=f"column {name!r} {problem}")
    return None


def _of_fields(snapshot: TableSnapshot, what: str) -> Ineligible | None:
    fields = snapshot.schema.fields
    odd = odd_names([*(field.name for field in fields), *map(name_in_files, fields)])
    if odd:
        return Ineligible(
            reason="column", detail=f"column {odd[0]!r} of {what} has a name that the reader of files uses"
        )
    for field in snapshot.schema.fields:
        for key, meaning in ENFORCED_BY_SPARK.items():
            if any(key in one.metadata for one in with_inner(field)):
                return Ineligible(reason="column", detail=f"column {field.name!r} of {what} {meaning}")
        placed: list[Place] = ["carried", *(("partition",) if field.name in snapshot.partition_columns else ())]
        refused = _of_columns((field.name, field.dataType, place) for place in placed)
        if refused is not None:
            return refused
    return None
