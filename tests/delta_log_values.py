"""Values of a Delta table: whether a file's statistics are true of it, and which rows a table has."""

from __future__ import annotations

import math
import re
import struct
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from delta_log_files import (
    Action,
    Snapshot,
    action_of,
    commits_of,
    expect,
    lines_of,
    opened,
    read_vector,
    snapshot_at,
)
from pyroaring import BitMap64

_MILLISECOND = 1000
_SHORTEST_START = 16
"""Characters that are left of a string that is cut off: Spark keeps 32 units of UTF-16, delta-rs 64 bytes."""
_TIME = re.compile(
    r"([+-]?\d{4,})-(\d\d)-(\d\d)(?:[T ](\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?(?:Z|([+-])(\d\d):?(\d\d))?)?$", re.ASCII
)
_ARROW = {
    "string": pa.string(),
    "long": pa.int64(),
    "integer": pa.int32(),
    "short": pa.int16(),
    "byte": pa.int8(),
    "float": pa.float32(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
    "void": pa.null(),
}


def live_rows(root: Path) -> pa.Table:
    """The rows of the newest version, in the columns and types of its schema, in no order.

    Times of partition values without a zone count as UTC. Columns that a file lacks are NULL.
    """
    first, commits = commits_of(root)
    table = snapshot_at(root, first)
    for text in commits.values():
        table.apply([action_of(line) for line in lines_of(text)])
    names = pa.schema([pa.field(f["name"], _arrow(f["type"])) for f in table.fields])
    return pa.concat_tables([names.empty_table(), *(_live(root, table, add) for add in table.live.values())])


def _live(root: Path, table: Snapshot, add: Action) -> pa.Table:
    if not add.get("deletionVector"):
        return rows_of(root, table, add)
    left = BitMap64()
    left.add_range(0, opened(root, add["path"]).metadata.num_rows)
    return rows_of(root, table, add, left - read_vector(root, add["deletionVector"]))


def check_stats(path: str, stats: Action, rows: pa.Table) -> None:
    """Compare a file's statistics with all its rows, those too that a vector removes.

    Bounds contain every value. Tight ones are values of the file, but that strings may be cut off and times are in
    milliseconds: a maximum may lie up to one below the greatest time, and readers add it.
    """
    tight, whole = stats.get("tightBounds", True), _whole(rows)
    for names, count in _leaves(stats.get("nullCount", {})):
        nulls = _column(whole, names).null_count
        right = count == nulls or (not tight and count not in (0, rows.num_rows))
        expect(right, f"nullCount of {'.'.join(names)!r} in {path!r} is {nulls}, not {count}")
    for which in ("minValues", "maxValues"):
        for names, stated in _leaves(stats.get(which, {})):
            column = _column(whole, names)
            if stated is None or column.null_count == len(column):
                continue
            is_min, told = which == "minValues", _parsed(stated, column.type)
            real = (min if is_min else max)(_extremes(column))
            what = f"{which} of {'.'.join(names)!r} in {path!r} is {real}, not {told} ({stated!r})"
            coarse = pa.types.is_timestamp(column.type)
            expect(told <= real if is_min else real < told + _MILLISECOND if coarse else real <= told, what)
            near = abs(told - real) < _MILLISECOND if coarse else _is_tight(told, real, is_min)
            expect(near or not tight, what)


def _is_tight(told: Any, real: Any, is_min: bool) -> bool:
    """Whether a bound is the value, or what is left of it: cut off, with a greater character at a maximum's end."""
    if isinstance(real, str):
        start = told if is_min else told[:-1]
        return told == real or (real.startswith(start) and len(start) >= _SHORTEST_START)
    return bool(told == real)


def _leaves(stats: Action, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in stats.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*above, name))
        else:
            yield (*above, name), value


def _column(values: pa.StructArray, names: tuple[str, ...]) -> pa.Array:
    """A column at any depth, NULL where what is around it is; one that the file lacks is all NULL."""
    for name in names:
        at = values.type.get_field_index(name) if pa.types.is_struct(values.type) else -1
        if at < 0:
            return pa.nulls(len(values))
        values = pc.struct_field(values, at)
    return values


def _extremes(column: pa.Array) -> list[Any]:
    """Least and greatest value, comparable: days of dates, microseconds of times; NaN is greater than all numbers."""
    if pa.types.is_floating(column.type):
        values = column.drop_null()
        numbers = values.filter(pc.invert(pc.is_nan(values)))
        ends = [*pc.min_max(numbers).as_py().values()] if len(numbers) else []
        return [_ordered(x) for x in (*ends, *([math.nan] if len(numbers) < len(values) else []))]
    if pa.types.is_temporal(column.type):
        unit = pa.timestamp("us", column.type.tz) if pa.types.is_timestamp(column.type) else pa.int32()
        column = column.cast(unit).cast(pa.int64())
    if column.type == pa.string_view():
        column = column.cast(pa.string())
    return [*pc.min_max(column).as_py().values()]


def _ordered(value: Any) -> tuple[bool, float]:
    return (True, 0.0) if math.isnan(float(value)) else (False, float(value))


def _parsed(value: Any, kind: pa.DataType) -> Any:
    """A value of the statistics or of a partition, comparable with `_extremes`."""
    if pa.types.is_floating(kind):
        single = pa.types.is_float32(kind)
        return _ordered(struct.unpack("f", struct.pack("f", float(value)))[0] if single else value)
    if pa.types.is_date(kind):
        return _days(value)
    if pa.types.is_timestamp(kind):
        return _microseconds(value)
    if pa.types.is_decimal(kind) or pa.types.is_integer(kind):
        return Decimal(value)
    if pa.types.is_boolean(kind):
        return {"true": True, "false": False}[str(value).lower()]
    expect(kind in (pa.string(), pa.large_string(), pa.string_view()), f"a value of {kind} cannot be told: {value!r}")
    return value


def _days(text: str) -> int:
    return _microseconds(text) // (86_400 * 1_000_000)


def _microseconds(text: str) -> int:
    """Microseconds since 1970 in UTC; `datetime` ends at 9999 (day numbers by Fliegel and Van Flandern)."""
    found = _TIME.match(text)
    if found is None:
        msg = f"neither a date nor a time: {text!r}"
        raise AssertionError(msg)
    year, month, day, hours, minutes, seconds = (int(part or 0) for part in found.group(1, 2, 3, 4, 5, 6))
    shift = (14 - month) // 12
    years, months = year + 4800 - shift, month + 12 * shift - 3
    days = day + (153 * months + 2) // 5 + 365 * years + years // 4 - years // 100 + years // 400 - 2_472_633
    zone = (int(found[9] or 0) * 60 + int(found[10] or 0)) * (-1 if found[8] == "-" else 1)
    whole = (days * 1440 + hours * 60 + minutes - zone) * 60 + seconds
    return whole * 1_000_000 + int((found[7] or "").ljust(6, "0"))


# Rows of a table.


def rows_of(root: Path, table: Snapshot, file: Action, positions: BitMap64 | None = None) -> pa.Table:
    """Rows of a data or change file in the columns of a table: those at some positions, or all of them."""
    whole, columns = _whole(opened(root, file["path"]).read()), {}
    for one in table.fields:
        name, stored = one["name"], _stored_name(one, table.mapping)
        if name in table.metadata["partitionColumns"]:
            columns[name] = _constant(file["partitionValues"].get(stored), _arrow(one["type"]), len(whole))
        else:
            columns[name] = _field(whole, one, table.mapping)
    rows = pa.table(columns)
    return rows if positions is None else rows.take(pa.array(positions.to_array(), pa.uint64()))


def counted(rows: pa.Table) -> Counter[str]:
    """How often each row is there; dates and times as numbers, as those of Python end at 9999."""
    plain = rows.cast(pa.schema([one.with_type(_plain(one.type)) for one in rows.schema]))
    return Counter(map(repr, zip(*(column.to_pylist() for column in plain.columns), strict=True)))


def _plain(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_temporal(kind):
        return pa.int32() if pa.types.is_date(kind) else pa.int64()
    if pa.types.is_struct(kind):
        return pa.struct([one.with_type(_plain(one.type)) for one in kind])
    if pa.types.is_map(kind):
        return pa.map_(_plain(kind.key_type), _plain(kind.item_type))
    return pa.list_(_plain(kind.value_type)) if pa.types.is_list(kind) else kind


def _whole(rows: pa.Table) -> pa.StructArray:
    return rows.to_struct_array().combine_chunks() if rows.num_rows else pa.array([], pa.struct(list(rows.schema)))


def _constant(value: str | None, kind: pa.DataType, count: int) -> pa.Array:
    """A partition value; the empty string stands for NULL."""
    if not value:
        return pa.nulls(count, kind)
    told = float(value) if pa.types.is_floating(kind) else _parsed(value, kind)
    if pa.types.is_decimal(kind):
        return pa.array([told] * count, kind)
    stored = pa.int32() if pa.types.is_date(kind) else pa.int64() if pa.types.is_timestamp(kind) else kind
    return pa.repeat(pa.scalar(int(told) if isinstance(told, Decimal) else told, stored).cast(kind), count)


def _stored_name(one: Action, mapping: str) -> str:
    name: str = one["name"] if mapping == "none" else one["metadata"]["delta.columnMapping.physicalName"]
    return name


def _field(values: pa.StructArray, one: Action, mapping: str) -> pa.Array:
    at = values.type.get_field_index(_stored_name(one, mapping))
    if mapping == "id":
        ids = [(f.metadata or {}).get(b"PARQUET:field_id") for f in values.type]
        told = str(one["metadata"]["delta.columnMapping.id"]).encode()
        at = ids.index(told) if told in ids else -1
    return pa.nulls(len(values), _arrow(one["type"])) if at < 0 else _typed(values.field(at), one["type"], mapping)


def _typed(values: pa.Array, kind: Any, mapping: str) -> pa.Array:
    """Values of a file in a type of the table's schema: renamed, widened, missing fields NULL."""
    of = kind["type"] if isinstance(kind, dict) else None
    if of == "struct":
        columns = [_field(values, one, mapping) for one in kind["fields"]]
        return pa.StructArray.from_arrays(columns, fields=list(_arrow(kind)), mask=values.is_null())
    if of == "array":
        values = values.cast(pa.list_(values.type.value_type))  # delta-rs and others may keep large lists
        inner = _typed(values.values, kind["elementType"], mapping)
        return pa.ListArray.from_arrays(values.offsets, inner, _arrow(kind), mask=values.is_null())
    if of == "map":
        both = (_typed(values.keys, kind["keyType"], mapping), _typed(values.items, kind["valueType"], mapping))
        return pa.MapArray.from_arrays(values.offsets, *both, _arrow(kind), mask=values.is_null())
    return values.cast(_arrow(kind))


def _arrow(kind: Any) -> pa.DataType:
    """Arrow's type for one of the schema string."""
    if isinstance(kind, dict):
        if kind["type"] == "struct":
            return pa.struct([pa.field(f["name"], _arrow(f["type"])) for f in kind["fields"]])
        if kind["type"] == "array":
            return pa.list_(_arrow(kind["elementType"]))
        return pa.map_(_arrow(kind["keyType"]), _arrow(kind["valueType"]))
    if found := re.fullmatch(r"decimal\((\d+),\s*(-?\d+)\)", kind):
        return pa.decimal128(int(found[1]), int(found[2]))
    expect(kind in _ARROW, f"this reader does not know the type {kind!r}")
    return _ARROW[kind]
