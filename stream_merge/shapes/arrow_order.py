"""Order and equality of Arrow values as Spark has them, as Python values that compare accordingly."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

_NULL: tuple[Any, ...] = (0,)


def orderable(values: pa.ChunkedArray | pa.Array) -> list[Any]:
    """Values that compare as in Spark's ascending order and are equal where Spark's `<=>` says so.

    NULL is less than anything; NaN is greater than any number and equals itself; 0.0 equals -0.0;
    text compares by its bytes, which is by code point; structs and arrays compare item by item, a shorter array first;
    maps as their entries in the order of the keys (`columns.canonical`).
    """
    if isinstance(values, pa.ChunkedArray):
        return [item for chunk in values.chunks for item in orderable(chunk)]
    dtype = values.type
    if pa.types.is_struct(dtype):
        parts = [orderable(part) for part in values.flatten()]
        rows: list[Any] = list(zip(*parts, strict=True)) if parts else [()] * len(values)
    elif pa.types.is_list(dtype):
        rows = _lists(values)
    elif pa.types.is_map(dtype):
        rows = _maps(values)
    elif pa.types.is_timestamp(dtype):
        rows = values.cast(pa.int64()).to_pylist()
    elif pa.types.is_date(dtype):
        rows = values.cast(pa.int32()).to_pylist()
    elif pa.types.is_string(dtype):
        rows = values.cast(pa.binary()).to_pylist()  # not every string of Spark's is UTF-8
    elif pa.types.is_floating(dtype):
        rows = [None if value is None else _float(value) for value in values.to_pylist()]
    else:
        rows = values.to_pylist()
    return [(1, row) if valid else _NULL for row, valid in zip(rows, values.is_valid().to_pylist(), strict=True)]


def _lists(values: pa.ListArray) -> list[tuple[Any, ...]]:
    items = orderable(values.flatten())
    found, start = [], 0
    for length in pc.list_value_length(values).to_pylist():
        end = start + (length or 0)
        found.append(tuple(items[start:end]))
        start = end
    return found


def _maps(values: pa.MapArray) -> list[tuple[Any, ...]]:
    entries = list(zip(orderable(values.keys), orderable(values.items), strict=True))
    ends = values.offsets.to_pylist()
    return [tuple(sorted(entries[start:end])) for start, end in pairwise(ends)]


def _float(value: float) -> tuple[int, float]:
    """NaN above all numbers; adding 0.0 makes one zero of two."""
    return (1, 0.0) if math.isnan(value) else (0, value + 0.0)
