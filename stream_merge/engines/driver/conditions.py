"""The clauses' conditions over Arrow, for pairs of an event and the row of its key.

Values are compared as Spark 4.2 compares them, at any depth: NaN equals NaN and is greater than any number, 0.0 equals
-0.0, texts and binary values compare by their unsigned bytes, maps by their entries in whatever order.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import ArrayType, DataType, MapType, StructType

from stream_merge.engines.driver.values import check_alike, check_known_type, differ, flat_differ, in_one, is_flat
from stream_merge.model import names
from stream_merge.shapes import clauses
from stream_merge.shapes.arrow_order import leaves, orderable
from stream_merge.shapes.batch import MOST_BYTES
from stream_merge.shapes.clauses import Clause, Condition
from stream_merge.shapes.layout import Layout, StoredColumn

_ABOUT_ROWS = (clauses.Newer, clauses.SameSequence, clauses.SamePosition, clauses.Changed)


class NotReadError(LookupError):
    """The condition is about a column of the rows that was not read."""


def holds(condition: Condition, layout: Layout, events: pa.Table, rows: pa.Table | None) -> pa.ChunkedArray:
    """TRUE or FALSE for each pair of an event and its row, as `engines.spark.render.condition` decides.

    `rows` has the row of each event's key at the event's place, in the target's types; None for events without a row.
    Raises `NotReadError` where rows lack a column that counts for some pair.
    """
    if rows is not None and rows.num_rows != events.num_rows:
        msg = f"{events.num_rows} events and {rows.num_rows} rows make no pairs; give the row of each event"
        raise ValueError(msg)
    return pa.chunked_array([_answers(condition, _Pairs(layout, events, rows))], pa.bool_())


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Events and their rows; `asked` selects some."""

    layout: Layout
    events: pa.Table
    rows: Any
    """A table, or None for events without a row."""
    asked: pa.BooleanArray | None = None
    """Which of them; None: all. Columns are cut down to these one by one, when they are compared."""

    def event(self, name: str) -> pa.ChunkedArray:
        return self._selected(self.events[name])

    def row(self, name: str) -> pa.ChunkedArray:
        if name not in self.rows.column_names:
            raise NotReadError(name)
        return self._selected(self.rows[name])

    def among(self, asked: pa.BooleanArray) -> _Pairs:
        """The selected pairs for which it is TRUE."""
        if asked.true_count == len(asked):
            return self
        return replace(self, asked=asked if self.asked is None else pc.replace_with_mask(self.asked, self.asked, asked))

    def all(self, answer: bool) -> pa.BooleanArray:
        """One answer for all pairs."""
        return pa.repeat(answer, self.events.num_rows if self.asked is None else self.asked.true_count)

    def _selected(self, values: pa.ChunkedArray) -> pa.ChunkedArray:
        return values if self.asked is None else values.filter(self.asked)


def _answers(condition: Condition, pairs: _Pairs) -> pa.BooleanArray:  # noqa: PLR0911 - a case per kind of condition
    """Answers of a condition; each part is evaluated only for the pairs that the parts before leave open."""
    if pairs.rows is None and isinstance(condition, _ABOUT_ROWS):
        msg = f"{condition!r} compares with a row, and there is none"
        raise AssertionError(msg)
    match condition:
        case clauses.Always():
            return pairs.all(True)
        case clauses.IsDelete():
            deletes = pairs.event(names.DELETE_COLUMN)
            _check_known(deletes, "whether it is a delete")
            return in_one(deletes)
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
    answers = pairs.all(not until)
    for one in conditions:
        is_open = pc.invert(answers) if until else answers
        answers = pc.replace_with_mask(answers, is_open, _answers(one, pairs.among(is_open)))
    return answers


def _newer(pairs: _Pairs) -> pa.BooleanArray:
    newer = pairs.all(False)
    for event, row in reversed(list(_sequences(pairs))):
        newer = pc.or_(_greater(event, row), pc.and_(_equal(event, row), newer))
    return in_one(newer)


def _same(pairs: _Pairs, components: int | None = None) -> pa.BooleanArray:
    same = pairs.all(True)
    for event, row in _sequences(pairs, components):
        same = pc.and_(same, _equal(event, row))
    return in_one(same)


def _sequences(pairs: _Pairs, components: int | None = None) -> Iterator[tuple[pa.ChunkedArray, pa.ChunkedArray]]:
    """The scalars of the events' and the rows' sequences, or of so many leading components, in order."""
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
        check_known_type(where, component.dataType)
        check_alike(where, event.type, row.type)
        for (_, *path), _leaf in leaves(StructType([component])):
            known = _field(event, *path)
            _check_known(known, "its sequence")
            yield known, _field(row, *path)


def _field(values: pa.ChunkedArray, *path: str) -> pa.ChunkedArray:
    """A field of structs, NULL where they are; by position: Arrow takes a name that starts with a dot for a path."""
    for name in path:
        values = pc.struct_field(values, [values.type.get_field_index(name)])
    return values


def _greater(event: pa.ChunkedArray, row: pa.ChunkedArray) -> Any:
    """Whether the event's value is greater than the row's, where NULL is the least."""
    if not is_flat(event.type):
        return pa.array(map(operator.gt, orderable(event), orderable(row)), pa.bool_())
    greater = pc.greater(event, row)
    if pa.types.is_floating(event.type):
        greater = pc.or_(greater, pc.and_not(pc.is_nan(event), pc.is_nan(row)))
    return pc.fill_null(greater, True)


def _equal(event: pa.ChunkedArray, row: pa.ChunkedArray) -> Any:
    """Whether the event's value is the row's, which it is not where that is NULL."""
    if not is_flat(event.type):
        return pa.array(map(operator.eq, orderable(event), orderable(row)), pa.bool_())
    return pc.invert(flat_differ(event, row))


def _changed(pairs: _Pairs) -> pa.BooleanArray:
    """Flat columns first: they cost little, and nested ones are compared only where all flat ones are the same."""
    stored = pairs.layout.stored
    new = [f"{name}." for name in pairs.layout.new_columns]
    if any(name.startswith(f"{column.source_name}.") for name in new for column in stored):
        return pairs.all(True)
    changed = pairs.all(False)
    for column in sorted(stored, key=_is_nested):
        check_known_type(f"column {column.name!r}", column.dtype)
        if not len(changed) and column.name not in pairs.rows.column_names:
            continue
        if not _is_nested(column):
            event, row = pairs.event(column.name), pairs.row(column.name)
            check_alike(f"column {column.name!r}", event.type, row.type)
            changed = in_one(pc.or_(changed, flat_differ(event, row)))
        else:
            is_open = pc.invert(changed)
            changed = pc.replace_with_mask(changed, is_open, _nested_differ(column, pairs.among(is_open)))
    return changed


def _is_nested(column: StoredColumn) -> bool:
    return isinstance(column.dtype, StructType | ArrayType | MapType)


def _nested_differ(column: StoredColumn, pairs: _Pairs) -> pa.BooleanArray:
    parts = []
    for piece in _pieces(pairs.event(column.name), pairs.row(column.name)):
        one, other = (_with_fields(column.source_type, values) for values in piece) if column.lacks_fields else piece
        check_alike(f"column {column.name!r}", one.type, other.type)
        parts.append(differ(one, other))
    return pa.concat_arrays(parts)


def _pieces(one: pa.ChunkedArray, other: pa.ChunkedArray) -> list[tuple[pa.Array, pa.Array]]:
    """Both columns in as few pieces as Arrow can count the bytes of; at least one."""
    if one.nbytes + other.nbytes <= MOST_BYTES:
        return [(in_one(one), in_one(other))]
    return [(batch.column(0), batch.column(1)) for batch in pa.table([one, other], ["one", "other"]).to_batches()]


def _with_fields(source: DataType, values: pa.Array) -> pa.Array:
    """Structs reduced to the fields that the source has: an update leaves the row's other fields as they are."""
    if not isinstance(source, StructType):
        return values
    in_source = {f.name.lower(): f.dataType for f in source.fields}
    common = [
        (field.name, _with_fields(in_source[field.name.lower()], part))
        for field, part in zip(values.type, values.flatten(), strict=True)
        if field.name.lower() in in_source
    ]
    return pa.StructArray.from_arrays([part for _, part in common], [name for name, _ in common], mask=values.is_null())


def _check_known(events: pa.ChunkedArray, what: str) -> None:
    if events.null_count:
        msg = f"{events.null_count} event(s) lack {what}; events that break the contract are not merged"
        raise ValueError(msg)


def needed(wanted: Iterable[Clause], layout: Layout, schema: StructType) -> frozenset[str] | None:
    """Names of the columns that a merge without a change feed reads; None where it reads all.

    An event with its row's own sequence is compared with the row in all columns. Such events are rare, so these columns
    are left out: `decide.decide` raises `NotReadError` when it meets one.
    """
    columns = set(layout.keys)  # read in any case, and rows without a column could not be counted
    for clause in wanted:
        if isinstance(clause, clauses.Insert):
            continue
        compared = _compared(clause.when, layout)
        if compared is None:
            return None
        columns |= compared
        if isinstance(clause, clauses.Update):
            columns |= {field.name for field in schema.fields} - clause.values.keys()
    return frozenset(columns)


def _compared(condition: Condition, layout: Layout) -> frozenset[str] | None:
    match condition:
        case clauses.Always() | clauses.IsDelete():
            return frozenset()
        case clauses.Newer() | clauses.SameSequence() | clauses.SamePosition():
            columns = layout.sequence_columns
            return frozenset((names.SEQUENCE_COLUMN,) if columns is None else columns)
        case clauses.Not(inner):
            return _compared(inner, layout)
        case clauses.And((clauses.SameSequence() as same, clauses.Changed())):
            return _compared(same, layout)
        case clauses.And(parts) | clauses.Or(parts):
            each = [_compared(part, layout) for part in parts]
            return None if None in each else frozenset().union(*filter(None, each))
        case _:
            return None
