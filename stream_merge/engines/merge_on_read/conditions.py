"""The clauses' conditions over Arrow: their answers for pairs of an event and the row of its key, as Spark gives them.

Values are compared as Spark 4.2 compares them, at any depth: NaN equals NaN and is greater than any number, 0.0
equals -0.0, texts and binary values compare by their unsigned bytes, maps by their entries in whatever order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import ArrayType, DataType, DecimalType, MapType, StructType

from stream_merge.model import names
from stream_merge.shapes import clauses
from stream_merge.shapes.arrow_order import orderable
from stream_merge.shapes.batch import MOST_BYTES
from stream_merge.shapes.clauses import Condition
from stream_merge.shapes.layout import Layout, StoredColumn
from stream_merge.shapes.sequence import leaves

_ABOUT_ROWS = (clauses.Newer, clauses.SameSequence, clauses.SamePosition, clauses.Changed)
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
"""The same as Arrow has them."""


def holds(condition: Condition, layout: Layout, events: pa.Table, rows: pa.Table | None) -> pa.ChunkedArray:
    """Whether the condition holds: TRUE or FALSE for each pair, as `engines.spark.render.condition` would say.

    Args:
        condition: of a clause.
        layout: how the batch's columns map onto the target.
        events: as of `Rows.arrow`.
        rows: the row of each event's key at the event's place, with the target's columns and types, as Spark reads
            them; None for events without a row.

    Raises:
        AssertionError: only Spark can say, or there is no row to compare with; the choice of engines is to prevent it.
        TypeError: values of a type that is not known to compare as in Spark, or event and row differ in type.
        ValueError: not as many rows as events, or an event lacks its sequence or whether it is a delete.
    """
    if rows is not None and rows.num_rows != events.num_rows:
        msg = f"{events.num_rows} events and {rows.num_rows} rows make no pairs; give the row of each event"
        raise ValueError(msg)
    return pa.chunked_array([_answers(condition, _Pairs(layout, events, rows))], pa.bool_())


def differs(one: pa.Array, other: pa.Array) -> pa.BooleanArray:
    """Whether values at the same place differ: not Spark's `<=>`, maps as `columns.differs` has them; never NULL.

    Requires: no variants, and no strings with a collation, of which Arrow's type says nothing.

    Raises:
        TypeError: a type that is not known to compare as in Spark, or the two differ in type.
        ValueError: not equally long.
    """
    _check_alike("the values", one.type, other.type)
    if len(one) != len(other):
        msg = f"{len(one)} values and {len(other)} make no pairs; give equally long arrays"
        raise ValueError(msg)
    return _differ(one, other)


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Events and their rows, of which some are asked about."""

    layout: Layout
    events: pa.Table
    rows: Any
    """A table, or None for events without a row."""
    asked: pa.BooleanArray | None = None
    """Which of them; None: all. Columns are cut down to these one by one, when they are compared."""

    def event(self, name: str) -> pa.ChunkedArray:
        return self._asked_of(self.events[name])

    def row(self, name: str) -> pa.ChunkedArray:
        return self._asked_of(self.rows[name])

    def among(self, asked: pa.BooleanArray) -> _Pairs:
        """Those of the asked ones for which it is TRUE."""
        if asked.true_count == len(asked):
            return self
        return replace(self, asked=asked if self.asked is None else pc.replace_with_mask(self.asked, self.asked, asked))

    def all(self, answer: bool) -> pa.BooleanArray:
        """One answer for all of them."""
        return pa.repeat(answer, self.events.num_rows if self.asked is None else self.asked.true_count)

    def _asked_of(self, values: pa.ChunkedArray) -> pa.ChunkedArray:
        return values if self.asked is None else values.filter(self.asked)


def _answers(condition: Condition, pairs: _Pairs) -> pa.BooleanArray:  # noqa: PLR0911 - a case per kind of condition
    """A part of a condition is asked for the pairs alone that the parts before it leave open."""
    if pairs.rows is None and isinstance(condition, _ABOUT_ROWS):
        msg = f"{condition!r} compares with a row, and there is none"
        raise AssertionError(msg)
    match condition:
        case clauses.Always():
            return pairs.all(True)
        case clauses.IsDelete():
            deletes = pairs.event(names.DELETE_COLUMN)
            _check_known(deletes, "whether it is a delete")
            return _in_one(deletes)
        case clauses.Not(inner):
            return pc.invert(_answers(inner, pairs))
        case clauses.And(conditions):
            return _joined(conditions, pairs, until=False)
        case clauses.Or(conditions):
            return _joined(conditions, pairs, until=True)
        case clauses.Opaque() | clauses.Holds() | clauses.HasValue():
            msg = f"{condition!r} is for Spark alone"
            raise AssertionError(msg)
        case clauses.Newer():
            return _newer(pairs)
        case clauses.SameSequence():
            return _same(pairs)
        case clauses.SamePosition(components):
            return _same(pairs, components)
        case clauses.Changed():
            return _changed(pairs)


def _joined(conditions: Iterable[Condition], pairs: _Pairs, *, until: bool) -> pa.BooleanArray:
    """FALSE from the first that does not hold on (And), or TRUE from the first that does (Or)."""
    found = pairs.all(not until)
    for one in conditions:
        is_open = pc.invert(found) if until else found
        found = pc.replace_with_mask(found, is_open, _answers(one, pairs.among(is_open)))
    return found


def _newer(pairs: _Pairs) -> pa.BooleanArray:
    newer = pairs.all(False)
    for event, row in reversed(list(_sequences(pairs))):
        newer = pc.or_(_greater(event, row), pc.and_(_equal(event, row), newer))
    return _in_one(newer)


def _same(pairs: _Pairs, components: int | None = None) -> pa.BooleanArray:
    same = pairs.all(True)
    for event, row in _sequences(pairs, components):
        same = pc.and_(same, _equal(event, row))
    return _in_one(same)


def _sequences(pairs: _Pairs, components: int | None = None) -> Iterator[tuple[pa.ChunkedArray, pa.ChunkedArray]]:
    """The scalars of the events' and the rows' sequences, or of so many leading components, in their order."""
    layout = pairs.layout
    if layout.sequence_columns == ():
        msg = "no sequence is kept with the rows of this target"
        raise AssertionError(msg)
    events = pairs.event(names.SEQUENCE_COLUMN)
    for i, component in enumerate(layout.sequence_fields[:components]):
        event = _field(events, component.name)
        if layout.sequence_columns is None:
            row = _field(pairs.row(names.SEQUENCE_COLUMN), component.name)
        else:
            row = pairs.row(layout.sequence_columns[i])
        where = f"component {i + 1} of the sequence"
        _check_known_type(where, component.dataType)
        _check_alike(where, event.type, row.type)
        for (_, *path), _leaf in leaves(StructType([component])):
            known = _field(event, *path)
            _check_known(known, "its sequence")
            yield known, _field(row, *path)


def _field(values: pa.ChunkedArray, *path: str) -> pa.ChunkedArray:
    """A field of structs, NULL where they are; by place, for Arrow takes a name that starts with a point for a path."""
    for name in path:
        values = pc.struct_field(values, [values.type.get_field_index(name)])
    return values


def _greater(event: pa.ChunkedArray, row: pa.ChunkedArray) -> Any:
    """Whether the event's value is greater than the row's, where NULL is the least."""
    if not _is_flat(event.type):
        return pa.array(map(operator.gt, orderable(event), orderable(row)), pa.bool_())
    found = pc.greater(event, row)
    if pa.types.is_floating(event.type):
        found = pc.or_(found, pc.and_not(pc.is_nan(event), pc.is_nan(row)))
    return pc.fill_null(found, True)


def _equal(event: pa.ChunkedArray, row: pa.ChunkedArray) -> Any:
    """Whether the event's value is the row's, which it is not where that is NULL."""
    if not _is_flat(event.type):
        return pa.array(map(operator.eq, orderable(event), orderable(row)), pa.bool_())
    return pc.invert(_flat_differ(event, row))


def _changed(pairs: _Pairs) -> pa.BooleanArray:
    """Flat columns first: they cost little, and nested ones are compared only where all flat ones are the same."""
    stored = pairs.layout.stored
    new = [f"{name}." for name in pairs.layout.new_columns]
    if any(name.startswith(f"{column.source_name}.") for name in new for column in stored):
        return pairs.all(True)
    found = pairs.all(False)
    for column in sorted(stored, key=_is_nested):
        _check_known_type(f"column {column.name!r}", column.dtype)
        if not _is_nested(column):
            event, row = pairs.event(column.name), pairs.row(column.name)
            _check_alike(f"column {column.name!r}", event.type, row.type)
            found = _in_one(pc.or_(found, _flat_differ(event, row)))
        else:
            is_open = pc.invert(found)
            found = pc.replace_with_mask(found, is_open, _nested_differ(column, pairs.among(is_open)))
    return found


def _is_nested(column: StoredColumn) -> bool:
    return isinstance(column.dtype, StructType | ArrayType | MapType)


def _nested_differ(column: StoredColumn, pairs: _Pairs) -> pa.BooleanArray:
    found = []
    for piece in _pieces(pairs.event(column.name), pairs.row(column.name)):
        one, other = (_with_fields_of(column.source_type, values) for values in piece) if column.lacks_fields else piece
        _check_alike(f"column {column.name!r}", one.type, other.type)
        found.append(_differ(one, other))
    return pa.concat_arrays(found)


def _pieces(one: pa.ChunkedArray, other: pa.ChunkedArray) -> list[tuple[pa.Array, pa.Array]]:
    """The same in as few pieces as Arrow can count the bytes of; one at least."""
    if one.nbytes + other.nbytes <= MOST_BYTES:
        return [(_in_one(one), _in_one(other))]
    return [(batch.column(0), batch.column(1)) for batch in pa.table([one, other], ["one", "other"]).to_batches()]


def _with_fields_of(source: DataType, values: pa.Array) -> pa.Array:
    """Structs with the fields alone that the source has: an update leaves the row's others as they are."""
    if not isinstance(source, StructType):
        return values
    in_source = {f.name.lower(): f.dataType for f in source.fields}
    kept = [
        (field.name, _with_fields_of(in_source[field.name.lower()], part))
        for field, part in zip(values.type, values.flatten(), strict=True)
        if field.name.lower() in in_source
    ]
    return pa.StructArray.from_arrays([part for _, part in kept], [name for name, _ in kept], mask=values.is_null())


def _differ(one: pa.Array, other: pa.Array) -> pa.BooleanArray:
    if _is_flat(one.type):
        return _flat_differ(one, other)
    found = pc.xor(one.is_valid(), other.is_valid())
    if pa.types.is_struct(one.type):
        theirs = {field.name: part for field, part in zip(other.type, other.flatten(), strict=True)}
        for field, part in zip(one.type, one.flatten(), strict=True):
            found = pc.or_(found, _differ(part, theirs[field.name]))
        return found
    both = pc.and_(one.is_valid(), other.is_valid())
    inside = _maps_differ if pa.types.is_map(one.type) else _lists_differ
    return pc.replace_with_mask(found, both, inside(one.filter(both), other.filter(both)))


def _flat_differ(one: Any, other: Any) -> Any:
    found = pc.not_equal(one, other)
    if pa.types.is_floating(one.type):
        found = pc.and_not(found, pc.and_(pc.is_nan(one), pc.is_nan(other)))
    if one.null_count or other.null_count:
        found = pc.coalesce(found, pc.xor(pc.is_valid(one), pc.is_valid(other)))
    return found


def _lists_differ(one: pa.ListArray, other: pa.ListArray) -> pa.BooleanArray:
    """Requires: no NULL among the lists themselves."""
    found = pc.not_equal(pc.list_value_length(one), pc.list_value_length(other))
    alike = pc.invert(found)
    one, other = one.filter(alike), other.filter(alike)
    items = _differ(one.flatten(), other.flatten())
    before = pa.concat_arrays([pa.array([0], pa.int64()), pc.cumulative_sum(items.cast(pa.int64()))])
    at_ends = before.take(_offsets(one))
    return pc.replace_with_mask(found, alike, pc.not_equal(at_ends.slice(1), at_ends.slice(0, len(one))))


def _maps_differ(one: pa.MapArray, other: pa.MapArray) -> pa.BooleanArray:
    """Requires: no NULL among the maps themselves. Only those are sorted whose entries differ as they stand."""
    found = _lists_differ(_entries(one), _entries(other))
    one, other = one.filter(found), other.filter(found)
    classes = _classes(pa.concat_arrays([one, other]))
    return pc.replace_with_mask(found, found, pc.not_equal(classes.slice(0, len(one)), classes.slice(len(one))))


def _classes(values: pa.Array) -> pa.Int64Array:
    """A number for each value, NULLs included: the same for equal values, whatever their type."""
    if pa.types.is_struct(values.type):
        found = values.is_valid().cast(pa.int64())
        for part in values.flatten():
            classes = _classes(part)
            found = _numbered(pc.add(pc.multiply(found, pc.add(pc.max(classes), 1)), classes))
        return found
    if not _is_flat(values.type):
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


def _in_one(values: pa.ChunkedArray | pa.Array) -> pa.Array:
    return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values


def _is_flat(dtype: pa.DataType) -> bool:
    return any(is_one(dtype) for is_one in _FLAT)


def _check_known(events: pa.ChunkedArray, what: str) -> None:
    if events.null_count:
        msg = f"{events.null_count} event(s) lack {what}; events that break the contract are not merged"
        raise ValueError(msg)


def _check_alike(where: str, one: pa.DataType, other: pa.DataType) -> None:
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
    return _is_flat(one) and bool(one == other)


def _check_known_type(where: str, dtype: DataType) -> None:
    """Spark's type of a column says more than Arrow's: a variant is a struct there, and strings have no collation."""
    if isinstance(dtype, StructType):
        for field in dtype.fields:
            _check_known_type(f"{where}, field {field.name!r}", field.dataType)
    elif isinstance(dtype, ArrayType):
        _check_known_type(f"{where}, elements", dtype.elementType)
    elif isinstance(dtype, MapType):
        _check_known_type(f"{where}, keys", dtype.keyType)
        _check_known_type(f"{where}, values", dtype.valueType)
    elif not isinstance(dtype, DecimalType) and dtype.simpleString() not in _SCALARS:
        msg = f"{where}: {dtype.simpleString()} is not known to compare as in Spark; let Spark execute this merge"
        raise TypeError(msg)
