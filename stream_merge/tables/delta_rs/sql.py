"""The SQL of delta-rs (DataFusion): names, literals and the match of a merge."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from pyspark.sql.types import (
    DataType,
    DateType,
    DecimalType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from stream_merge.model import names
from stream_merge.shapes.key_bounds import KeyBounds
from stream_merge.shapes.layout import Layout

_LAST_MICROSECOND = 253_402_300_799_999_999
"""Of the year 9999."""


def column(frame: str, *path: str) -> str:
    """A column, or a field inside it; every character of a name counts."""
    first, *rest = path
    return f"{frame}.{quote(first)}" + "".join(f"[{text(field)}]" for field in rest)


def quote(name: str) -> str:
    """An identifier."""
    return '"' + name.replace('"', '""') + '"'


def text(value: str) -> str:
    """A string literal."""
    return "'" + value.replace("'", "''") + "'"


def literal(value: Any, dtype: DataType) -> str:
    """A bound of a key (see `key_bounds.KeyBounds`: microseconds, days, or text) as a literal of its type."""
    if isinstance(dtype, StringType):
        return text(value)
    if isinstance(dtype, TimestampType):
        return f"arrow_cast({int(value)}, 'Timestamp(Microsecond, Some(\"UTC\"))')"
    if isinstance(dtype, TimestampNTZType):
        return f"arrow_cast({int(value)}, 'Timestamp(Microsecond, None)')"
    if isinstance(dtype, DateType):
        return f"arrow_cast(arrow_cast({int(value)}, 'Int32'), 'Date32')"
    if isinstance(dtype, DecimalType):
        plain = f"{Decimal(value):f}"  # DataFusion reads no exponent
        return f"arrow_cast({text(plain)}, 'Decimal128({dtype.precision}, {dtype.scale})')"
    return str(int(value))


def bounds(found: KeyBounds, frame: str) -> list[str]:
    """Literal bounds on key columns, for file skipping; none on times beyond the years that delta-rs can spell."""
    return [
        f"({column(frame, field.name)} >= {literal(low, field.dataType)}"
        f" AND {column(frame, field.name)} <= {literal(high, field.dataType)})"
        for field, low, high in zip(found.fields, found.least, found.greatest, strict=True)
        if not isinstance(field.dataType, TimestampType | TimestampNTZType)
        or (low >= -_LAST_MICROSECOND and high <= _LAST_MICROSECOND)
    ]


def matched(layout: Layout, found: KeyBounds) -> str:
    """The merge's ON: same keys, within the bounds."""
    return " AND ".join([*bounds(found, "t"), *(f"{column('t', key)} = {column('s', key)}" for key in layout.keys)])


def sequence_paths(layout: Layout) -> list[tuple[str, ...]]:
    """The scalar components of `__stream_merge_sequence`, in the order in which they are compared."""
    return [(names.SEQUENCE_COLUMN, *path) for path in scalars(layout.sequence_type)]


def scalars(dtype: StructType) -> Iterator[tuple[str, ...]]:
    """The paths to the scalar fields of a struct, in their order."""
    for field in dtype.fields:
        if isinstance(field.dataType, StructType):
            yield from ((field.name, *rest) for rest in scalars(field.dataType))
        else:
            yield (field.name,)
