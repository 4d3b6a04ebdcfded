"""Whether a batch surely changes a row: its greatest sequence compared with the greatest one in the table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ByteType,
    DataType,
    DateType,
    IntegerType,
    LongType,
    ShortType,
    TimestampType,
)

from stream_merge.model import names
from stream_merge.shapes.layout import Layout
from stream_merge.spark import columns

_TIMES_ARE_CUT_BY = 1_000
"""Microseconds: statistics of times end at milliseconds, and the greatest may be cut, too (Delta protocol)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GreatestSequence:
    """Leading components of a sequence, as whole numbers: times in microseconds, dates in days."""

    components: tuple[int, ...]
    is_empty: bool = False
    """Whether there is no row."""

    def is_beyond(self, stored: GreatestSequence | None, position_components: int | None) -> bool:
        """Whether this sequence is greater than all in a table, and not only another delivery of its row.

        Args:
            stored: of the table; None where it is unknown.
            position_components: how many leading components are the event's position in its log; None: all.
        """
        if stored is None:
            return False
        if stored.is_empty:
            return True
        count = min(len(self.components), len(stored.components))
        if position_components is not None:
            count = min(count, position_components)
        return self.components[:count] > stored.components[:count]


def aggregates(layout: Layout, upserts: Column) -> list[Column]:
    """Aggregates for `observed`: the greatest sequence of the rows where `upserts` holds."""
    greatest = F.max(F.when(upserts, columns.column(names.SEQUENCE_COLUMN)))
    return [
        _whole_number(greatest.getField(name), dtype).alias(f"greatest_{name}") for name, dtype in _comparable(layout)
    ]


def observed(layout: Layout, values: Mapping[str, Any]) -> GreatestSequence | None:
    """The greatest sequence from the values of `aggregates`; None where no upsert was counted."""
    return _comparing(layout, [values[f"greatest_{name}"] for name, _ in _comparable(layout)])


def in_driver(events: pa.Table, layout: Layout) -> GreatestSequence | None:
    """The greatest sequence of the upserts among events in the driver (`Rows.arrow`)."""
    upserts = events.filter(pc.invert(events[names.DELETE_COLUMN]))
    sequence = upserts[names.SEQUENCE_COLUMN].combine_chunks()
    components: list[int | None] = []
    for name, _ in _comparable(layout):
        component = sequence.field(name)
        greatest = pc.max(component)
        components.append(_as_int(greatest))
        sequence = sequence.filter(pc.fill_null(pc.equal(component, greatest), False))
    return _comparing(layout, components)


def stored(files: pa.Table, layout: Layout) -> GreatestSequence | None:
    """An upper bound of a table's sequences from its data files' statistics; None where they are not enough."""
    if not files.num_rows:
        return GreatestSequence(components=(), is_empty=True)
    components: list[int | None] = []
    for i, (name, dtype) in enumerate(_comparable(layout)):
        if layout.sequence_columns is not None and i >= len(layout.sequence_columns):
            break
        stored_as = f"{names.SEQUENCE_COLUMN}.{name}" if layout.sequence_columns is None else layout.sequence_columns[i]
        greatest = _greatest(files, stored_as)
        if greatest is None:
            break
        components.append(greatest + (_TIMES_ARE_CUT_BY if isinstance(dtype, TimestampType) else 0))
    return _comparing(layout, components)


def _greatest(files: pa.Table, column: str) -> int | None:
    """A column's greatest value by the statistics of all files; None where one has none."""
    wanted = [f"{statistic}.{column}" for statistic in ("max", "null_count")]
    if any(files.column_names.count(name) != 1 for name in (*wanted, "num_records")):
        return None  # also of a column whose flattened name is another's, too
    greatest, nulls = (files[name] for name in wanted)
    only_nulls = pc.fill_null(pc.equal(nulls, files["num_records"]), False)
    if not pc.all(pc.or_(greatest.is_valid(), only_nulls)).as_py():
        return None
    return _as_int(pc.max(greatest))


def _comparing(layout: Layout, values: list[int | None]) -> GreatestSequence | None:
    known = tuple(value for value in takewhile(lambda value: value is not None, values) if value is not None)
    return GreatestSequence(components=known) if known else None


def _comparable(layout: Layout) -> list[tuple[str, DataType]]:
    """The leading components that are whole numbers, as their statistics; text may be cut, floats have no order."""
    types = (ByteType, ShortType, IntegerType, LongType, DateType, TimestampType)
    fields = takewhile(lambda field: isinstance(field.dataType, types), layout.sequence_fields)
    return [(field.name, field.dataType) for field in fields]


def _whole_number(value: Column, dtype: DataType) -> Column:
    if isinstance(dtype, TimestampType):
        return F.unix_micros(value)
    return F.unix_date(value) if isinstance(dtype, DateType) else value


def _as_int(value: pa.Scalar) -> int | None:
    if pa.types.is_timestamp(value.type):
        value = value.cast(pa.timestamp("us", tz=value.type.tz)).cast(pa.int64())
    elif pa.types.is_date32(value.type):
        value = value.cast(pa.int32())
    number = value.as_py()
    return None if number is None else int(number)
