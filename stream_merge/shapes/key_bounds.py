"""The bounds of a batch's keys: the condition by which a merge skips files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ByteType,
    DataType,
    DateType,
    DecimalType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructField,
    TimestampNTZType,
    TimestampType,
)

from stream_merge.spark import columns
from stream_merge.spark.jvm import exact_literal

_DAY = 86_400_000_000
"""Microseconds."""
_PROVEN_DAYS = (-25_567, 2_932_895)
"""From 1900-01-01 to 9999-12-30.

Spark pushes a date or time to Parquet as one of `java.sql`, which is another one before 1582 and, in some time zones,
before 1900, and which does not hold all times (Spark 4.2). In a zone east of UTC statistics spell the last day's times
with the year 10000.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyBound:
    """Least and greatest value of one key column among the events to merge.

    Values are microseconds since the epoch for timestamps with and without zone, days for dates, text for decimals.
    """

    field: StructField
    least: Any
    greatest: Any

    @property
    def name(self) -> str:
        """The column."""
        return self.field.name

    def to_column(self, session: SparkSession, frame: str) -> Column:
        """The condition on a frame's column."""
        least, greatest = (exact_literal(session, one, self.field.dataType) for one in (self.least, self.greatest))
        return columns.column(self.name, frame).between(least, greatest)

    def to_arrow(self, like: pa.DataType, *, earlier_by: int = 0) -> tuple[pa.Scalar, pa.Scalar]:
        """Least and greatest value as scalars of an Arrow type; an Arrow error if it cannot hold them.

        Args:
            like: the type.
            earlier_by: microseconds by which the least value of times is moved back.
        """
        is_time = isinstance(self.field.dataType, TimestampType | TimestampNTZType)
        first = self.least - earlier_by if is_time else self.least
        least, greatest = (_arrow(one, self.field.dataType).cast(like) for one in (first, self.greatest))
        return least, greatest


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyBounds:
    """The bounds of all key columns that can be bounded.

    Only key columns may be: the stored row can be in another partition, and a bound that misses it would insert its
    key a second time.
    """

    columns: tuple[KeyBound, ...] = ()

    def condition(self, session: SparkSession, frame: str) -> Column:
        """Literal bounds on the target's key columns: only these let Delta skip files in a MERGE."""
        return columns.all_of(bound.to_column(session, frame) for bound in self.columns)


def _arrow(value: Any, dtype: DataType) -> pa.Scalar:
    if isinstance(dtype, StringType):
        return pa.scalar(value, pa.string())
    if isinstance(dtype, DecimalType):
        return pa.scalar(Decimal(value))
    if isinstance(dtype, TimestampType):
        return pa.scalar(value, pa.timestamp("us", tz="UTC"))
    if isinstance(dtype, TimestampNTZType):
        return pa.scalar(value, pa.timestamp("us"))
    if isinstance(dtype, DateType):
        return pa.scalar(value, pa.int32()).cast(pa.date32())
    return pa.scalar(value, pa.int64())


def bound_aggregates(keys: tuple[StructField, ...], counted: Column) -> list[Column]:
    """Aggregates for `key_bounds`, over the rows where `counted` holds."""
    aggregates: list[Column] = []
    for i, field in enumerate(boundable(keys)):
        value = F.when(counted, columns.column(field.name))
        aggregates.append(as_transported(F.min(value), field.dataType).alias(f"least_{i}"))
        aggregates.append(as_transported(F.max(value), field.dataType).alias(f"greatest_{i}"))
    return aggregates


def key_bounds(keys: tuple[StructField, ...], observed: Mapping[str, Any]) -> KeyBounds:
    """The bounds from the values of `bound_aggregates`; empty when no row was counted.

    A column has a bound only where its literal, the filter that Spark pushes and the statistics of files are proven to
    mean the same: a bound that excludes a stored row lets the merge insert its key a second time.
    """
    bounds: list[KeyBound] = []
    for i, field in enumerate(boundable(keys)):
        least, greatest = observed[f"least_{i}"], observed[f"greatest_{i}"]
        if least is None or greatest is None:
            return KeyBounds()
        ends = _proven(least, greatest, field.dataType)
        if ends is not None:
            bounds.append(KeyBound(field=field, least=ends[0], greatest=ends[1]))
    return KeyBounds(columns=tuple(bounds))


def _proven(least: Any, greatest: Any, dtype: DataType) -> tuple[Any, Any] | None:
    """Proven ends that bound the same keys; None where there are none."""
    if isinstance(dtype, StringType):
        above = _above(greatest)
        return None if above is None else (_ascii(least), above)
    if isinstance(dtype, DateType | TimestampType | TimestampNTZType):
        unit = 1 if isinstance(dtype, DateType) else _DAY
        first, last = _PROVEN_DAYS
        return (least, greatest) if first <= least // unit and greatest // unit <= last else None
    return least, greatest


def _ascii(text: str) -> str:
    """The beginning of a text up to its first character that is not ASCII.

    In statistics, and in Python, each byte that is not UTF-8 is U+FFFD (Delta 4.4): what follows may be ordered
    otherwise.
    """
    return next((text[:at] for at, character in enumerate(text) if not character.isascii()), text)


def _above(text: str) -> str | None:
    """The text if it is ASCII; else an ASCII text greater than all that begin like it; or None."""
    start = _ascii(text)
    if start == text:
        return text
    start = start.rstrip("\x7f")
    return start[:-1] + chr(ord(start[-1]) + 1) if start else None


def boundable(keys: tuple[StructField, ...]) -> tuple[StructField, ...]:
    """The keys whose file statistics order as Spark does; floats (NaN, -0.0), binary and nested types do not.

    Nor does char(n): Spark compares padded values, and files and their statistics may have others (Delta 4.4).
    """
    return tuple(f for f in keys if _has_usable_statistics(f.dataType) and not columns.is_padded(f))


def _has_usable_statistics(dtype: DataType) -> bool:
    if isinstance(dtype, StringType):
        return dtype.simpleString() == "string"  # other collations order differently
    return isinstance(
        dtype,
        ByteType | ShortType | IntegerType | LongType | DecimalType | DateType | TimestampType | TimestampNTZType,
    )


def as_transported(value: Column, dtype: DataType) -> Column:
    """A form that survives Python, which has no year beyond 9999; `exact_literal` turns it back."""
    if isinstance(dtype, TimestampType):
        return F.unix_micros(value)
    if isinstance(dtype, DateType):
        return F.unix_date(value)
    if isinstance(dtype, TimestampNTZType):
        since = value - F.lit("1970-01-01").cast("timestamp_ntz")
        days, hours, minutes = (F.extract(F.lit(part), since).cast("bigint") for part in ("DAY", "HOUR", "MINUTE"))
        seconds: Column = F.extract(F.lit("SECOND"), since)
        # As a decimal Spark 3.5 cannot have it beyond 10^12 seconds.
        return ((days * 24 + hours) * 60 + minutes) * 60_000_000 + (seconds * 1_000_000).cast("bigint")
    if isinstance(dtype, DecimalType):
        return value.cast("string")
    return value
