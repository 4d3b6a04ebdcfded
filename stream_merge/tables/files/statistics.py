"""Statistics of a data file for the log, as Delta 4.4 collects them (`StatisticsCollection`).

Readers skip files by them: a bound that is left out costs a reader the file, one that excludes a value costs it a row.
So bounds are left out where readers do not agree: floats that are not finite, years that Python cannot spell.
"""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    NumericType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from stream_merge.model.snapshot import VECTORS_PROPERTY, is_on, mapping_mode

_DEFAULT_COLUMNS = 32
_DEFAULT_PREFIX = 32
_EPOCH = datetime.datetime(1970, 1, 1)
_MICROSECOND = datetime.timedelta(microseconds=1)
_DAYS = tuple((day - _EPOCH.date()).days for day in (datetime.date.min, datetime.date.max))
_MICROSECONDS = tuple((moment - _EPOCH) // _MICROSECOND for moment in (datetime.datetime.min, datetime.datetime.max))
_LAST_ASCII, _LAST_CHARACTER = "\x7f", "\U0010ffff"
_NAME = re.compile(r"\s*(?:`((?:[^`]|``)+)`|([^\s`.,]+))\s*")

_Ends = tuple[str | None, str | None]
_Tree = dict[str, Any]
"""Column to JSON text, or to the tree of a struct's fields."""


def maps_columns(properties: Mapping[str, str]) -> bool:
    """Whether a table's columns have other names in its files (`delta.columnMapping.mode`)."""
    return mapping_mode(properties) != "none"


def stored_name(field: StructField, *, mapped: bool) -> str:
    """The name of a field in data files, in statistics and among partition values."""
    physical = field.metadata.get("delta.columnMapping.physicalName")
    if (physical is None) if mapped else (physical not in (None, field.name)):
        msg = (
            f"column {field.name!r} has the physical name {physical!r} while the table "
            f"{'maps' if mapped else 'does not map'} columns; let Spark write this table"
        )
        raise ValueError(msg)
    return str(physical) if mapped else field.name


def statistics(rows: pa.Table, schema: StructType, properties: Mapping[str, str]) -> str:
    """The `stats` of a file of these rows, as JSON; `schema` has no partition columns."""
    prefix = int(properties.get("delta.dataSkippingStringPrefixLength", _DEFAULT_PREFIX))
    indexed = _indexed(schema, properties)
    columns = {field.name: rows[field.name] for field in indexed.fields}
    least, greatest, nulls = _collected(columns, indexed, prefix=prefix, mapped=maps_columns(properties))
    parts: dict[str, Any] = {"numRecords": str(rows.num_rows)}
    if _has_ends(indexed):
        parts |= {"minValues": least, "maxValues": greatest}
    if _has_leaves(indexed):
        parts["nullCount"] = nulls
    if is_on(properties, VECTORS_PROPERTY):
        parts["tightBounds"] = "true"
    return _json(parts)


def _json(part: str | _Tree) -> str:
    """JSON of a tree; texts are JSON already, since `json` has no decimals."""
    if isinstance(part, str):
        return part
    return "{" + ",".join(f"{_quoted(name)}:{_json(inner)}" for name, inner in part.items()) + "}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


# -- which columns ------------------------------------------------------------------------------


def _indexed(schema: StructType, properties: Mapping[str, str]) -> StructType:
    named = properties.get("delta.dataSkippingStatsColumns")
    if named is not None:
        return _named(schema, _paths(named))
    count = int(properties.get("delta.dataSkippingNumIndexedCols", _DEFAULT_COLUMNS))
    return schema if count < 0 else _first(schema, count)[0]


def _first(schema: StructType, count: int) -> tuple[StructType, int]:
    """The first `count` leaves of a schema, and how many there are."""
    fields: list[StructField] = []
    taken = 0
    for field in schema.fields:
        if taken >= count:
            break
        dtype: DataType = field.dataType
        leaves = 1
        if isinstance(dtype, StructType):
            dtype, leaves = _first(dtype, count - taken)
        fields.append(StructField(field.name, dtype, field.nullable, field.metadata))
        taken += leaves
    return StructType(fields), taken


def _named(schema: StructType, paths: Sequence[Sequence[str]]) -> StructType:
    """The named fields of a schema; a struct stands for all that is in it, unknown names for nothing."""
    fields: list[StructField] = []
    for field in schema.fields:
        rests = [path[1:] for path in paths if path[0] == field.name.lower()]
        if rests and not any(rests):
            fields.append(field)
        elif rests and isinstance(field.dataType, StructType):
            inner = _named(field.dataType, [rest for rest in rests if rest])
            fields.append(StructField(field.name, inner, field.nullable, field.metadata))
    return StructType(fields)


def _paths(text: str) -> list[list[str]]:
    """`a, b.c, `d,e`` as paths in lower case."""
    if not text.strip():
        return []
    paths: list[list[str]] = [[]]
    position = 0
    while match := _NAME.match(text, position):
        quoted, plain = match.groups()
        paths[-1].append((plain or quoted.replace("``", "`")).lower())
        position = match.end()
        if position == len(text):
            return paths
        if text[position] == ",":
            paths.append([])
        elif text[position] != ".":
            break
        position += 1
    msg = f"the table property delta.dataSkippingStatsColumns={text!r} is no list of columns; correct it"
    raise ValueError(msg)


def _is_eligible(dtype: DataType) -> bool:
    """Delta's `SkippingEligibleDataType`: no texts with a collation."""
    if isinstance(dtype, StringType):
        return dtype == StringType()
    return isinstance(dtype, NumericType | DateType | TimestampType | TimestampNTZType)


def _has_ends(dtype: DataType) -> bool:
    return any(_has_ends(f.dataType) for f in dtype.fields) if isinstance(dtype, StructType) else _is_eligible(dtype)


def _has_leaves(dtype: DataType) -> bool:
    return not isinstance(dtype, StructType) or any(_has_leaves(f.dataType) for f in dtype.fields)


# -- what of them -------------------------------------------------------------------------------


def _collected(
    columns: Mapping[str, pa.ChunkedArray], schema: StructType, *, prefix: int, mapped: bool
) -> tuple[_Tree, _Tree, _Tree]:
    """Least values, greatest values, numbers of NULLs; a field of a NULL struct is NULL."""
    least: _Tree = {}
    greatest: _Tree = {}
    nulls: _Tree = {}
    for field in schema.fields:
        values, dtype, name = columns[field.name], field.dataType, stored_name(field, mapped=mapped)
        if isinstance(dtype, StructType):
            inner = dict(zip((part.name for part in values.type), values.flatten(), strict=True))
            parts = _collected(inner, dtype, prefix=prefix, mapped=mapped)
            _put(name, (parts[0], parts[1]) if _has_ends(dtype) else (None, None), least, greatest)
            if _has_leaves(dtype):
                nulls[name] = parts[2]
            continue
        nulls[name] = str(values.null_count)
        if _is_eligible(dtype) and values.null_count < len(values):
            _put(name, _ends(values, dtype, prefix), least, greatest)
    return least, greatest, nulls


def _put(name: str, parts: Iterable[_Tree | str | None], *trees: _Tree) -> None:
    for tree, part in zip(trees, parts, strict=True):
        if part is not None:
            tree[name] = part


def _ends(values: pa.ChunkedArray, dtype: DataType, prefix: int) -> _Ends:
    """The least and the greatest value as JSON, of values that are not all NULL."""
    if isinstance(dtype, FloatType | DoubleType):
        return _ends_of_floats(values)
    if isinstance(dtype, DateType):
        values = values.cast(pa.int32())
    elif isinstance(dtype, TimestampType | TimestampNTZType):
        values = values.cast(pa.int64())
    ends = pc.min_max(values)
    try:
        least, greatest = ends["min"].as_py(), ends["max"].as_py()
    except UnicodeDecodeError:  # Spark casts any bytes to a string
        return None, None
    if isinstance(dtype, StringType):
        cut = _cut_up(greatest, prefix)
        return _quoted(least[:prefix]), None if cut is None else _quoted(cut)
    return _spelled(least, dtype), _spelled(greatest, dtype)


def _spelled(value: Any, dtype: DataType) -> str | None:
    """JSON of a number, or of days or microseconds since 1970.

    Spark cuts microseconds off at both ends, and its readers add a millisecond to the greatest value.
    """
    if isinstance(dtype, NumericType):
        return format(value, "f") if isinstance(dtype, DecimalType) else str(value)
    first, last = _DAYS if isinstance(dtype, DateType) else _MICROSECONDS
    if not first <= value <= last:
        return None
    if isinstance(dtype, DateType):
        return _quoted((_EPOCH + datetime.timedelta(days=value)).date().isoformat())
    text = (_EPOCH + value * _MICROSECOND).isoformat(timespec="milliseconds")
    return _quoted(text + "Z" if isinstance(dtype, TimestampType) else text)


def _ends_of_floats(values: pa.ChunkedArray) -> _Ends:
    """The ends of floats. NaN is greatest for Spark and nothing for others: beside it the greatest is left out.

    Infinite ends are left out: JSON has no number for them, and not every reader knows Spark's text. Zeros have the
    outer sign, as -0.0 is less than 0.0 for some readers. A float has the digits of the double that it equals.
    """
    numbers = values.filter(pc.invert(pc.is_nan(values)))
    ends = pc.min_max(numbers)
    least, greatest = ends["min"].as_py(), ends["max"].as_py()
    if least is None:
        return None, None
    has_nan = len(numbers) < len(values) - values.null_count
    low = repr(least or -0.0) if math.isfinite(least) else None
    return low, repr(greatest or 0.0) if math.isfinite(greatest) and not has_nan else None


def _cut_up(text: str, prefix: int) -> str | None:
    """A text that is not less than this one and about `prefix` UTF-16 units long (`truncateMaxStringAgg`).

    It is the beginning and a character greater, in UTF-8, than the first left out; None if there is none.
    """
    units = end = 0
    while end < len(text) and units < prefix:
        units += 1 + (text[end] > "\uffff")
        end += 1
    while units <= 2 * prefix:
        if end == len(text):
            return text
        following = text[end]
        if following != _LAST_CHARACTER:
            return text[:end] + (_LAST_ASCII if following < _LAST_ASCII else _LAST_CHARACTER) if prefix else None
        units += 1 + (following > "\uffff")
        end += 1
    return None
