"""What is known about a batch before the merge: the bounds of its keys, and the engine that follows from it."""

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

from stream_merge import columns
from stream_merge.spark_internals import exact_literal


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
    return found


def key_bounds(keys: tuple[StructField, ...], observed: Mapping[str, Any]) -> KeyBounds:
    """The bounds from the observed values of `bound_aggregates`; empty when no row was counted."""
    fields = boundable(keys)
    least = tuple(observed[f"least_{i}"] for i in range(len(fields)))
    greatest = tuple(observed[f"greatest_{i}"] for i in range(len(fields)))
    if None in least or None in greatest:
        return KeyBounds()
    return KeyBounds(fields=fields, least=least, greatest=greatest)


def boundable(keys: tuple[StructField, ...]) -> tuple[StructField, ...]:
    """The keys whose file statistics order as Spark does; floats (NaN, -0.0), binary and nested types do not."""
    return tuple(field for field in keys if _has_usable_statistics(field.dataType))


def _has_usable_statistics(dtype: DataType) -> bool:
    if isinstance(dtype, StringType):
        return dtype.simpleString() == "string"  # other collations order differently
    return isinstance(
        dtype,
        ByteType | ShortType | IntegerType | LongType | DecimalType | DateType | TimestampType | TimestampNTZType,
    )


def _transport(value: Column, dtype: DataType) -> Column:
    """A form that survives the way through Python unchanged; `exact_literal` turns it back."""
    if isinstance(dtype, TimestampType):
        return F.unix_micros(value)
    if isinstance(dtype, DateType):
        return F.unix_date(value)
    if isinstance(dtype, DecimalType | TimestampNTZType):
        return value.cast("string")
    return value
