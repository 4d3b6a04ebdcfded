"""The merge's conditions in the SQL of delta-rs (DataFusion): the same meaning as the Spark engine's columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import Any

from pyspark.sql.types import (
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from stream_merge import names
from stream_merge.config import MergeSpec
from stream_merge.layout import Layout
from stream_merge.plan import KeyBounds

_CHAINED = 40
"""Conditions in one chain: with as many chains, the merge of a table of 1,600 columns is nowhere deeper than this."""
_LAST_MICROSECOND = 253_402_300_799_999_999
"""Of the year 9999."""
DELETE = f's."{names.DELETE_COLUMN}"'


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
    """A bound of a key (see `plan.KeyBounds`: microseconds, days, or text) as a literal of its type."""
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


def newer(layout: Layout) -> str:
    """Whether the event is newer than the row; a row whose sequence holds a NULL is older than any event."""
    return _lexicographic(_sequence_pairs(layout))


def newer_version(layout: Layout, spec: MergeSpec) -> str:
    """As `newer`, for an event that says more than the row as it is, from the same place of the source's log."""
    if spec.skip_unchanged:
        return f"({newer(layout)} AND {_changed(layout)})"
    if spec.position_components is None:
        return newer(layout)
    leading = " AND ".join(
        f"{source} = {stored}" for source, stored in _sequence_pairs(layout)[: spec.position_components]
    )
    return f"({newer(layout)} AND (({leading}) IS NOT TRUE OR {_changed(layout)}))"


def redelivered(layout: Layout) -> str:
    """Whether the event has the row's sequence and changes a column of it."""
    same = " AND ".join(f"{source} = {stored}" for source, stored in _sequence_pairs(layout))
    return f"(({same}) AND {_changed(layout)})"


def _changed(layout: Layout) -> str:
    differing = [_differs(column("s", c.name), column("t", c.name), c.dtype) for c in layout.stored]
    # One long chain is a tree as deep as it is long, and what DataFusion does to it grows with the square of that.
    chains = (differing[start : start + _CHAINED] for start in range(0, len(differing), _CHAINED))
    return _any(_any(chain) for chain in chains)


def _any(conditions: Iterable[str]) -> str:
    return f"({' OR '.join(conditions)})"


def assignments(layout: Layout) -> dict[str, str]:
    """What an upsert writes."""
    written = [c.name for c in layout.stored]
    if layout.sequence_columns is None:
        written.append(names.SEQUENCE_COLUMN)
    return {quote(name): column("s", name) for name in written}


def sequence_paths(layout: Layout) -> list[tuple[str, ...]]:
    """The scalar components of `__stream_merge_sequence`, in the order in which they are compared."""
    return [(names.SEQUENCE_COLUMN, *path) for path in _scalars(layout.sequence_type)]


def _sequence_pairs(layout: Layout) -> list[tuple[str, str]]:
    pairs = []
    for path in _scalars(layout.sequence_type):
        stored: tuple[str, ...] = (names.SEQUENCE_COLUMN, *path)
        if layout.sequence_columns is not None:
            position = [f.name for f in layout.sequence_fields].index(path[0])
            stored = (layout.sequence_columns[position], *path[1:])
        pairs.append((column("s", names.SEQUENCE_COLUMN, *path), column("t", *stored)))
    return pairs


def _scalars(dtype: StructType) -> Iterator[tuple[str, ...]]:
    for field in dtype.fields:
        if isinstance(field.dataType, StructType):
            yield from ((field.name, *rest) for rest in _scalars(field.dataType))
        else:
            yield (field.name,)


def _lexicographic(pairs: list[tuple[str, str]]) -> str:
    decided = []
    for i, (source, stored) in enumerate(pairs):
        same = [f"{one} = {other}" for one, other in pairs[:i]]
        decided.append(f"({' AND '.join([*same, f'({stored} IS NULL OR {source} > {stored})'])})")
    # Side by side, not one inside the other: DataFusion's parser gives up after a dozen levels.
    return f"({' OR '.join(decided)})"


def _differs(one: str, other: str, dtype: DataType) -> str:
    """Not Spark's `<=>`; the parentheses matter, DataFusion binds OR wrongly without them."""
    if isinstance(dtype, FloatType | DoubleType):
        return f"({_canonical_float(one)} IS DISTINCT FROM {_canonical_float(other)})"
    return f"({one} IS DISTINCT FROM {other})"


def _canonical_float(value: str) -> str:
    """One NaN, one zero: Arrow compares floats bit by bit."""
    return f"(CASE WHEN isnan({value}) THEN CAST('NaN' AS DOUBLE) ELSE CAST({value} AS DOUBLE) + CAST(0 AS DOUBLE) END)"
