"""Column types that an engine in the driver supports, by role of the column, and reasons to use another engine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from pyspark.sql.types import ArrayType, DataType, MapType, StringType, StructField, StructType

from stream_merge.model import names
from stream_merge.model.results import Refusal
from stream_merge.model.snapshot import TableSnapshot, mapping_mode
from stream_merge.shapes.layout import Layout
from stream_merge.shapes.sequence import leaves
from stream_merge.spark.columns import CHAR_VARCHAR_METADATA

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
CONSTRAINT = "delta.constraints."
"""Prefix, in lower case, of the table properties that hold CHECK constraints in SQL."""

OTHER_READERS: Mapping[str, tuple[str, str]] = {
    "delta.compatibility.symlinkformatmanifest.enabled": ("false", "demands manifests, made by Spark alone"),
    "delta.universalformat.enabledformats": ("", "demands that readers of other formats see each commit"),
}
"""Table properties, in lower case, for which Spark does more than commit -> the value that turns it off, the reason."""


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
        found = (self.problem(part, inside) for part in _parts(dtype))
        return next((problem for problem in found if problem), None)


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
    found = json.loads(text)
    return frozenset(name.lower() for name in (found if isinstance(found, list) else found.get("columns", [])))


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
