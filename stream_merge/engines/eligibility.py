"""Whether delta-rs may merge a batch: read from the table's protocol, the storage and the batch, never tried out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

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

from stream_merge.columns import CHAR_VARCHAR_METADATA
from stream_merge.engines.delta_rs import NativeTable, Protocol
from stream_merge.layout import Layout
from stream_merge.results import Refusal
from stream_merge.snapshot import TableSnapshot

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
    "delta.generationExpression": "is generated",
    "delta.identity.start": "is an identity column",
    "CURRENT_DEFAULT": "has a default",
    CHAR_VARCHAR_METADATA: "is char(n) or varchar(n), whose length only Spark checks",
}
_PLAIN = (
    BinaryType,
    BooleanType,
    ByteType,
    DateType,
    DecimalType,
    IntegerType,
    LongType,
    ShortType,
    TimestampNTZType,
    TimestampType,
)
_FLOAT_DIGITS = 15
_LONG_DIGITS = 18
"""delta-rs 1.6 writes a decimal's statistics through a float or a long: with more digits they miss the file's rows."""
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
    return _of_protocol(table.protocol, what) or _of_fields(snapshot.schema, what)


def of_batch(layout: Layout) -> Ineligible | None:
    """Whether delta-rs can carry and compare the batch's columns; looked at once per layout."""
    return layout.once("ineligible", lambda: _of_layout(layout))


def _of_layout(layout: Layout) -> Ineligible | None:
    if layout.new_columns:
        return Ineligible(reason="schema_change", detail=f"column(s) {list(layout.new_columns)!r} are new")
    for stored in layout.stored:
        refused = _of_column(stored.name, stored.dtype)
        if refused:
            return refused
    return _of_keys(layout)


def of_log(layout: Layout, log: NativeTable, snapshot: TableSnapshot) -> Ineligible | None:
    """Whether delta-rs can keep the remembered deletes, of which it sees keys and sequences only."""
    refused = layout.once("ineligible_keys", lambda: _of_keys(layout))
    return refused or of_table(log, snapshot, "the tombstone table")


def of_columns(schema: StructType, keys: Sequence[str]) -> Ineligible | None:
    """Whether delta-rs can carry and compare all columns of a table, as far as the table itself tells."""
    for field in schema.fields:
        refused = _of_key(field) if field.name in keys else _of_column(field.name, field.dataType)
        if refused:
            return refused
    return None


def _of_keys(layout: Layout) -> Ineligible | None:
    for field in (*layout.key_fields, *_scalars(layout.sequence_type)):
        refused = _of_key(field)
        if refused:
            return refused
    return None


def _of_column(name: str, dtype: DataType) -> Ineligible | None:
    problem = _of_name(name) or _of_type(dtype)
    return Ineligible(reason="column", detail=f"column {name!r} {problem}") if problem else None


def _of_key(field: StructField) -> Ineligible | None:
    problem = _of_compared(field)
    refused = _of_column(field.name, field.dataType)
    return refused or (Ineligible(reason="column", detail=problem) if problem else None)


def _of_protocol(protocol: Protocol, what: str) -> Ineligible | None:
    unknown = sorted(protocol.features - _KNOWN_FEATURES)
    if unknown:
        return Ineligible(reason="table_feature", detail=f"{what} uses {', '.join(unknown)}")
    return None


def _of_fields(schema: StructType, what: str) -> Ineligible | None:
    for field in schema.fields:
        for key, meaning in _COMPUTED_BY_SPARK.items():
            if key in field.metadata:
                return Ineligible(reason="column", detail=f"column {field.name!r} of {what} {meaning}")
        # Rows that are only copied get new statistics, too.
        if _has_long_decimal(field.dataType):
            return Ineligible(reason="column", detail=f"column {field.name!r} of {what} {_LONG_DECIMAL}")
    return None


_LONG_DECIMAL = "is or holds a decimal whose statistics delta-rs would write wrongly"


def _has_long_decimal(dtype: DataType) -> bool:
    if isinstance(dtype, DecimalType):
        return dtype.precision > (_FLOAT_DIGITS if dtype.scale else _LONG_DIGITS)
    if isinstance(dtype, StructType):
        return any(_has_long_decimal(field.dataType) for field in dtype.fields)
    if isinstance(dtype, ArrayType):
        return _has_long_decimal(dtype.elementType)
    if isinstance(dtype, MapType):
        return _has_long_decimal(dtype.keyType) or _has_long_decimal(dtype.valueType)
    return False


def _of_name(name: str) -> str | None:
    return "has a quote, backslash or control character in its name" if _ODD_NAME.search(name) else None


def _of_type(dtype: DataType, *, nested: bool = False) -> str | None:
    """Why values of this type cannot be carried or compared as Spark does; None when they can."""
    if isinstance(dtype, FloatType | DoubleType):
        return "holds floats inside another type, which Arrow compares bit by bit" if nested else None
    if isinstance(dtype, StringType):
        return None if dtype.simpleString() == "string" else f"has the collation {dtype.simpleString()!r}"
    if isinstance(dtype, _PLAIN):
        return None
    if isinstance(dtype, ArrayType):
        return _of_type(dtype.elementType, nested=True)
    if isinstance(dtype, StructType):
        found = ((_of_name(f.name) or _of_type(f.dataType, nested=True)) for f in dtype.fields)
        return next((problem for problem in found if problem), None)
    return f"is {dtype.simpleString()}, which delta-rs cannot compare"


def _of_compared(field: StructField) -> str | None:
    if _has_long_decimal(field.dataType):
        return f"{field.name!r} {_LONG_DECIMAL}"
    if isinstance(field.dataType, FloatType | DoubleType | ArrayType | StructType):
        return f"{field.name!r} is {field.dataType.simpleString()}, which keys and sequences cannot be on delta-rs"
    return None


def _scalars(dtype: StructType) -> list[StructField]:
    found: list[StructField] = []
    for field in dtype.fields:
        found.extend(_scalars(field.dataType) if isinstance(field.dataType, StructType) else [field])
    return found
