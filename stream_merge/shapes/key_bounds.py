"""The bounds of a batch's keys: the condition by which a merge leaves files unread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyBounds:
    """Least and greatest value of each key column among the events to merge.

    Only key columns may be bounded: the stored row can lie anywhere else, in another partition
    too, and a bound that misses it would insert its key a second time.
    """

    fields: tuple[StructField, ...] = ()
    least: tuple[Any, ...] = ()
    greatest: tuple[Any, ...] = ()

    def condition(self, session: SparkSession, frame: str) -> Column:
        """Literal bounds on the target's key columns: the only thing that lets Delta skip files in a MERGE."""
        return columns.all_of(
            columns.column(field.name, frame).between(
                exact_literal(session, low, field.dataType), exact_literal(session, high, field.dataType)
            )
            for field, low, high in zip(self.fields, self.least, self.greatest, strict=True)
        )


def bound_aggregates(keys: tuple[StructField, ...], counted: Column) -> list[Column]:
    """Aggregates whose values `key_bounds` reads, over the rows where `counted` holds."""
    found: list[Column] = []
    for i, field in enumerate(boundable(keys)):
        value = F.when(counted, columns.column(field.name))
        found.append(_transport(F.min(value), field.dataType).alias(f"least_{i}"))
        found.append(_transport(F.max(value), field.dataType).alias(f"greatest_{i}"))
        if isinstance(field.dataType, StringType):
            found.append(F.bool_and(F.is_valid_utf8(value)).alias(f"legible_{i}"))
    return found


def key_bounds(keys: tuple[StructField, ...], observed: Mapping[str, Any]) -> KeyBounds:
    """The bounds from the observed values of `bound_aggregates`; empty when no row was counted.

    A text column of which a key is not valid UTF-8 has none: neither Python nor a file's statistics can express it.
    """
    bounds: list[tuple[StructField, Any, Any]] = []
    for i, field in enumerate(boundable(keys)):
        least, greatest = observed[f"least_{i}"], observed[f"greatest_{i}"]
        if least is None or greatest is None:
            if observed.get(f"legible_{i}") is not False:
                return KeyBounds()
        elif observed.get(f"legible_{i}", True):
            if isinstance(field.dataType, StringType):
                least, greatest = _below(least), _above(greatest)
            bounds.append((field, least, greatest))
    return KeyBounds(
        fields=tuple(field for field, _, _ in bounds),
        least=tuple(least for _, least, _ in bounds),
        greatest=tuple(greatest for _, _, greatest in bounds),
    )


_REPLACEMENT, _GREATEST = "\ufffd", "\U0010ffff"


def _below(text: str) -> str:
    """A text that is not above the statistics of a file whose greatest key is `text` or more.

    In statistics each byte that is not UTF-8 has become U+FFFD (Delta 4.4), which may put them on the other side of
    keys with characters beyond ASCII.
    """
    at = next((i for i, character in enumerate(text) if character > _REPLACEMENT), None)
    return text if at is None else text[:at] + _REPLACEMENT


def _above(text: str) -> str:
    """A text that is not below the statistics of a file whose least key is `text` or less; see `_below`."""
    at = next((i for i, character in enumerate(text) if not character.isascii()), None)
    return text if at is None else text[:at] + _GREATEST


def boundable(keys: tuple[StructField, ...]) -> tuple[StructField, ...]:
    """The keys whose file statistics order as Spark does; floats (NaN, -0.0), binary and nested types do not.

    Nor does char(n): Spark compares padded values, and files and their statistics may hold others (Delta 4.4).
    """
    return tuple(f for f in keys if _has_usable_statistics(f.dataType) and not columns.is_padded(f))


def _has_usable_statistics(dtype: DataType) -> bool:
    if isinstance(dtype, StringType):
        return dtype.simpleString() == "string"  # other collations order differently
    return isinstance(
        dtype,
        ByteType | ShortType | IntegerType | LongType | DecimalType | DateType | TimestampType | TimestampNTZType,
    )


def _transport(value: Column, dtype: DataType) -> Column:
    """A form that survives the way through Python unchanged; `exact_literal` turns it back.

    Dates and times are numbers: Python knows none beyond the year 9999.
    """
    if isinstance(dtype, TimestampType):
        return F.unix_micros(value)
    if isinstance(dtype, DateType):
        return F.unix_date(value)
    if isinstance(dtype, TimestampNTZType):
        since = value - F.lit("1970-01-01").cast("timestamp_ntz")
        return (since.cast("interval second").cast("decimal(20,6)") * 1_000_000).cast("bigint")
    if isinstance(dtype, DecimalType):
        return value.cast("string")
    return value
