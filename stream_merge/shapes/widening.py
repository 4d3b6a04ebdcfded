"""Type widening: which wider type a column can get, exactly, by the rules of Delta 4.4."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pyspark.sql import SparkSession
from pyspark.sql.types import (
    ArrayType,
    ByteType,
    DataType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StructField,
    StructType,
)

from stream_merge.model import names
from stream_merge.model.table_ref import TableRef
from stream_merge.spark import columns
from stream_merge.spark.versions import ALTERS_SEVERAL_COLUMNS, WIDENS_BEYOND_INTEGERS

PROPERTY = "delta.enableTypeWidening"
COST = (
    "delta-rs and polars cannot read a table with type widening, until ALTER TABLE … DROP FEATURE typeWidening rewrites"
    " it; the driver goes on merging it"
)
_INTEGERS: tuple[type[DataType], ...] = (ByteType, ShortType, IntegerType, LongType)
_INTEGERS_OF_INT32: set[type[DataType]] = {ByteType, ShortType, IntegerType}
"""Parquet stores all of them as INT32."""
_WHOLE_DIGITS: dict[type[DataType], int] = {ByteType: 10, ShortType: 10, IntegerType: 10, LongType: 20}
"""Digits before the point that Delta needs in a decimal to widen integers to it: as Parquet stores these."""
_MOST_DIGITS = 38


@dataclass(frozen=True, kw_only=True, slots=True)
class TypeChange:
    """A column, or a field inside of one, that gets another type."""

    path: tuple[str, ...]
    """Top-level column first; `element`, `key` and `value` are what arrays and maps hold."""
    before: DataType
    after: DataType

    def __str__(self) -> str:
        return f"{'.'.join(self.path)} {self.before.simpleString()} -> {self.after.simpleString()}"


def wider(source: DataType, stored: DataType) -> DataType | None:
    """The stored type with each part widened that cannot hold the source's values; None where Delta cannot.

    Struct fields that only one of the two has stay as they are, or are left out.
    """
    if isinstance(source, StructType) and isinstance(stored, StructType):
        return _wider_struct(source, stored)
    if isinstance(source, ArrayType) and isinstance(stored, ArrayType):
        element = wider(source.elementType, stored.elementType)
        return None if element is None else ArrayType(element, stored.containsNull)
    if isinstance(source, MapType) and isinstance(stored, MapType):
        key, value = wider(source.keyType, stored.keyType), wider(source.valueType, stored.valueType)
        return None if key is None or value is None else MapType(key, value, stored.valueContainsNull)
    return stored if columns.holds(source, stored) else _wider_scalar(source, stored)


def alterable(source: DataType, stored: DataType) -> DataType | None:
    """The type of `wider`, if Delta makes all its changes on this Spark."""
    wanted = wider(source, stored)
    if wanted is None or WIDENS_BEYOND_INTEGERS:
        return wanted
    grown = all({type(change.before), type(change.after)} <= _INTEGERS_OF_INT32 for change in changes(stored, wanted))
    return wanted if grown else None


def widest(one: DataType, other: DataType) -> DataType | None:
    """The least type that holds the values of both exactly; None where there is none.

    Structs have the fields of the other one: `columns.merged` adds those that only the first has.
    """
    return wider(one, other) or wider(other, one)


def changes(stored: DataType, wanted: DataType, *path: str) -> Iterator[TypeChange]:
    """The changes by which the stored type holds the wanted one's values, where both have a part."""
    parts = columns.common_parts(wanted, stored)
    if parts is not None:
        for part, ours, theirs in parts:
            yield from changes(theirs, ours, *path, part)
    elif not columns.holds(wanted, stored):
        yield TypeChange(path=path, before=stored, after=wanted)


def pending(wanted: Iterable[TypeChange], schema: StructType) -> list[TypeChange]:
    """The changes that a table with this schema lacks."""
    return [change for change in wanted if not _is_made(change, schema)]


def _is_made(change: TypeChange, schema: StructType) -> bool:
    dtype: DataType = schema
    for part in change.path:
        if isinstance(dtype, StructType):
            if part not in dtype.names:
                return False
            dtype = dtype[part].dataType
        elif isinstance(dtype, ArrayType):
            dtype = dtype.elementType
        elif isinstance(dtype, MapType):
            dtype = dtype.keyType if part == "key" else dtype.valueType
    return columns.holds(change.after, dtype)


def statements(target: TableRef, wanted: Sequence[TypeChange], properties: Mapping[str, str]) -> list[str]:
    """The SQL that makes the changes in a table with these properties."""
    if not wanted:
        return []
    single = [f"{'.'.join(map(names.quote, change.path))} TYPE {change.after.simpleString()}" for change in wanted]
    lists = [", ".join(single)] if ALTERS_SEVERAL_COLUMNS else single
    enable = [] if properties.get(PROPERTY, "").lower() == "true" else [enabling(target)]
    return [*enable, *(f"ALTER TABLE {target.sql} ALTER COLUMN {listed}" for listed in lists)]


def enabling(target: TableRef) -> str:
    """The SQL that enables type widening."""
    return f"ALTER TABLE {target.sql} SET TBLPROPERTIES ({names.sql_string(PROPERTY)} = 'true')"


def obstacles(
    wanted: Iterable[TypeChange], schema: StructType, properties: Mapping[str, str], session: SparkSession
) -> Iterator[str]:
    """Why Delta would refuse the changes, which it reports only after type widening was switched on.

    It refuses a change of what an expression reads, of a field in it, and of what contains it (Delta 4.4).
    """
    checks = {
        f"the CHECK constraint {key.removeprefix('delta.constraints.')!r}": value
        for key, value in properties.items()
        if key.startswith("delta.constraints.")
    }
    generated = {
        f"the generated column {field.name!r}": str(field.metadata[names.GENERATED_FROM])
        for field in schema.fields
        if names.GENERATED_FROM in field.metadata
    }
    reading = {what: columns.columns_read(session, text) for what, text in {**checks, **generated}.items()}
    for path in dict.fromkeys(change.path for change in wanted):
        using = [what for what, read in reading.items() if any(_overlap(path, other) for other in read)]
        if using:
            yield (
                f"[COLUMN_NOT_WIDENABLE] column {'.'.join(path)!r} cannot be widened while {' and '.join(using)} uses"
                " it; drop that, let the sink widen the column, and add it again"
            )


def _overlap(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether one path leads to the other."""
    return all(mine.lower() == theirs.lower() for mine, theirs in zip(one, other, strict=False))


def _wider_struct(source: StructType, stored: StructType) -> StructType | None:
    theirs = {field.name.lower(): field.dataType for field in source.fields}
    fields = []
    for field in stored.fields:
        dtype = wider(theirs.get(field.name.lower(), field.dataType), field.dataType)
        if dtype is None:
            return None
        fields.append(StructField(field.name, dtype, field.nullable, field.metadata))
    return StructType(fields)


def _wider_scalar(source: DataType, stored: DataType) -> DataType | None:
    """The least type that Delta can make of the stored one and that holds the values of both."""
    one, other = type(source), type(stored)
    if one in _INTEGERS and other in _INTEGERS:
        return source
    if isinstance(source, DecimalType) or isinstance(stored, DecimalType):
        return _wider_decimal(source, stored)
    exact_in_double = (ByteType, ShortType, IntegerType, FloatType, DoubleType)
    return DoubleType() if one in exact_in_double and other in exact_in_double else None


def _wider_decimal(source: DataType, stored: DataType) -> DataType | None:
    digits = [_digits(source), _digits(stored)]
    if None in digits:
        return None
    whole, scale = (max(part) for part in zip(*(one for one in digits if one), strict=True))
    return DecimalType(whole + scale, scale) if whole + scale <= _MOST_DIGITS else None


def _digits(dtype: DataType) -> tuple[int, int] | None:
    """Digits before and after the point."""
    if isinstance(dtype, DecimalType):
        return dtype.precision - dtype.scale, dtype.scale
    whole = _WHOLE_DIGITS.get(type(dtype))
    return None if whole is None else (whole, 0)
