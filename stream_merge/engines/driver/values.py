"""Comparison of values in Arrow as Spark 4.2 compares them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import ArrayType, DataType, DecimalType, MapType, StructType

_NUMBERS = frozenset({"tinyint", "smallint", "int", "bigint", "float", "double"})
_SCALARS = _NUMBERS | {"boolean", "string", "binary", "date", "timestamp", "timestamp_ntz"}
"""Spark's types whose values Arrow compares alike, floats with some care, besides decimals; a collation has a name."""
_FLAT: tuple[Callable[[pa.DataType], bool], ...] = (
    pa.types.is_boolean,
    pa.types.is_signed_integer,
    pa.types.is_float32,
    pa.types.is_float64,
    pa.types.is_decimal128,
    pa.types.is_string,
    pa.types.is_binary,
    pa.types.is_date32,
    pa.types.is_timestamp,
)
"""Their types in Arrow."""


def differ(one: pa.Array, other: pa.Array) -> pa.BooleanArray:
    """Whether values at the same position differ; NULL equals NULL, maps compare as in `columns.differs`.

    Requires: arrays of one type (`check_alike`) and length, without variants and strings with a collation.
    """
    if is_flat(one.type):
        return flat_differ(one, other)
    differing = pc.xor(one.is_valid(), other.is_valid())
    if pa.types.is_struct(one.type):
        theirs = {field.name: part for field, part in zip(other.type, other.flatten(), strict=True)}
        for field, part in zip(one.type, one.flatten(), strict=True):
            differing = pc.or_(differing, differ(part, theirs[field.name]))
        return differing
    both = pc.and_(one.is_valid(), other.is_valid())
    inside = _maps_differ if pa.types.is_map(one.type) else _lists_differ
    return pc.replace_with_mask(differing, both, inside(one.filter(both), other.filter(both)))


def flat_differ(one: Any, other: Any) -> Any:
    """`differ` for flat values, in one piece or in several."""
    differing = pc.not_equal(one, other)
    if pa.types.is_floating(one.type):
        differing = pc.and_not(differing, pc.and_(pc.is_nan(one), pc.is_nan(other)))
    if one.null_count or other.null_count:
        differing = pc.coalesce(differing, pc.xor(pc.is_valid(one), pc.is_valid(other)))
    return differing


def _lists_differ(one: pa.ListArray, other: pa.ListArray) -> pa.BooleanArray:
    """Requires: no NULL among the lists themselves."""
    differing = pc.not_equal(pc.list_value_length(one), pc.list_value_length(other))
    alike = pc.invert(differing)
    one, other = one.filter(alike), other.filter(alike)
    items = differ(one.flatten(), other.flatten())
    before = pa.concat_arrays([pa.array([0], pa.int64()), pc.cumulative_sum(items.cast(pa.int64()))])
    at_ends = before.take(_offsets(one))
    return pc.replace_with_mask(differing, alike, pc.not_equal(at_ends.slice(1), at_ends.slice(0, len(one))))


def _maps_differ(one: pa.MapArray, other: pa.MapArray) -> pa.BooleanArray:
    """Requires: no NULL among the maps themselves. Only those are sorted whose entries differ as they stand."""
    differing = _lists_differ(_entries(one), _entries(other))
    one, other = one.filter(differing), other.filter(differing)
    classes = _classes(pa.concat_arrays([one, other]))
    return pc.replace_with_mask(differing, differing, pc.not_equal(classes.slice(0, len(one)), classes.slice(len(one))))


def _classes(values: pa.Array) -> pa.Int64Array:
    """A number for each value, NULLs included: the same for equal values, whatever their type."""
    if pa.types.is_struct(values.type):
        numbers = values.is_valid().cast(pa.int64())
        for part in values.flatten():
            classes = _classes(part)
            numbers = _numbered(pc.add(pc.multiply(numbers, pc.add(pc.max(classes), 1)), classes))
        return numbers
    if not is_flat(values.type):
        lists = pc.add(_list_classes(values.filter(values.is_valid())), 1)
        return pc.replace_with_mask(pa.repeat(pa.scalar(0, pa.int64()), len(values)), values.is_valid(), lists)
    if pa.types.is_floating(values.type):
        nan, zero = (pa.scalar(value, values.type) for value in (float("nan"), 0.0))
        values = pc.if_else(pc.is_nan(values), nan, pc.add(values, zero))  # one NaN, one zero
    return _numbered(values)


def _list_classes(values: pa.ListArray | pa.MapArray) -> pa.Int64Array:
    """Requires: no NULL among the lists or maps themselves."""
    is_map = pa.types.is_map(values.type)
    lists = _entries(values) if is_map else values
    items = _classes(lists.flatten())
    if is_map:
        # In one number, map before entry: sorting by two takes several times as long.
        first = pc.multiply(pc.list_parent_indices(lists), pc.add(pc.max(items), 1))
        entries = pc.add(first, items)
        items = pc.subtract(entries.take(pc.array_sort_indices(entries)), first)
    return _numbered(pc.binary_join(pa.ListArray.from_arrays(_offsets(lists), items.cast(pa.string())), ","))


def _numbered(values: pa.Array) -> pa.Int64Array:
    return values.dictionary_encode(null_encoding="encode").indices.cast(pa.int64())


def _offsets(lists: pa.ListArray) -> pa.Int32Array:
    """Where each list starts in what `flatten` gives of lists of which none is NULL, and the end of the last one."""
    return pc.subtract(lists.offsets, lists.offsets[0])


def _entries(maps: pa.MapArray) -> pa.ListArray:
    """Requires: no NULL among the maps themselves."""
    entries = pa.StructArray.from_arrays([maps.keys, maps.items], ["key", "value"])
    return pa.ListArray.from_arrays(maps.offsets, entries)


def in_one(values: pa.ChunkedArray | pa.Array) -> pa.Array:
    """In one piece."""
    return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values


def is_flat(dtype: pa.DataType) -> bool:
    """Whether Arrow compares its values itself, with some care for floats."""
    return any(is_one(dtype) for is_one in _FLAT)


def check_alike(where: str, one: pa.DataType, other: pa.DataType) -> None:
    """Raise TypeError unless both are of one type whose values compare as in Spark."""
    if not _are_alike(one, other):
        msg = f"{where}: {one} does not compare with {other} as in Spark; let Spark execute this merge"
        raise TypeError(msg)


def _are_alike(one: pa.DataType, other: pa.DataType) -> bool:
    """Whether both are of one type that is known to compare as in Spark, whatever entries and items are called."""
    if pa.types.is_struct(one) and pa.types.is_struct(other):
        theirs = {field.name: field.type for field in other}
        return sorted(f.name for f in one) == sorted(f.name for f in other) and all(
            _are_alike(field.type, theirs[field.name]) for field in one
        )
    if pa.types.is_list(one) and pa.types.is_list(other):
        return _are_alike(one.value_type, other.value_type)
    if pa.types.is_map(one) and pa.types.is_map(other):
        return _are_alike(one.key_type, other.key_type) and _are_alike(one.item_type, other.item_type)
    if pa.types.is_timestamp(one) and pa.types.is_timestamp(other):
        return bool(one.unit == other.unit) and (one.tz is None) == (other.tz is None)
    return is_flat(one) and bool(one == other)


def check_known_type(where: str, dtype: DataType) -> None:
    """Spark's type of a column says more than Arrow's: a variant is a struct there, and strings have no collation."""
    if isinstance(dtype, StructType):
        for field in dtype.fields:
            check_known_type(f"{where}, field {field.name!r}", field.dataType)
    elif isinstance(dtype, ArrayType):
        check_known_type(f"{where}, elements", dtype.elementType)
    elif isinstance(dtype, MapType):
        check_known_type(f"{where}, keys", dtype.keyType)
        check_known_type(f"{where}, values", dtype.valueType)
    elif not isinstance(dtype, DecimalType) and dtype.simpleString() not in _SCALARS:
        msg = f"{where}: {dtype.simpleString()} is not known to compare as in Spark; let Spark execute this merge"
        raise TypeError(msg)
