"""Clauses of a merge as Spark columns over the event (`s`) and the row (`t`)."""

from __future__ import annotations

from collections.abc import Iterable

from delta.tables import DeltaMergeBuilder
from pyspark.sql import Column
from pyspark.sql import functions as F

from stream_merge.model import names
from stream_merge.shapes.clauses import (
    Always,
    And,
    Assignments,
    Changed,
    Clause,
    Condition,
    Delete,
    DeleteMissing,
    HasValue,
    Holds,
    Insert,
    IsDelete,
    Newer,
    Not,
    Opaque,
    Or,
    SamePosition,
    SameSequence,
    Update,
    UpdateMissing,
)
from stream_merge.shapes.layout import Layout, StoredColumn
from stream_merge.spark import columns


def with_clauses(
    builder: DeltaMergeBuilder, clauses: Iterable[Clause], layout: Layout, *, of_missing: Column | None = None
) -> DeltaMergeBuilder:
    """Add the clauses in order; Delta takes the first that holds. `of_missing` restricts those about rows alone."""
    for clause in clauses:
        when = None if clause.when == Always() else condition(clause.when, layout)
        if of_missing is not None and isinstance(clause, DeleteMissing | UpdateMissing):
            when = of_missing if when is None else of_missing & when
        if isinstance(clause, Delete):
            builder = builder.whenMatchedDelete(when)
        elif isinstance(clause, Update):
            builder = builder.whenMatchedUpdate(when, _updated(clause.values, layout))
        elif isinstance(clause, Insert):
            values = _assigned(clause.values, layout)
            if when is None:
                builder = builder.whenNotMatchedInsert(values=values)
            else:
                builder = builder.whenNotMatchedInsert(when, values)
        elif isinstance(clause, DeleteMissing):
            builder = builder.whenNotMatchedBySourceDelete(when)
        else:
            builder = builder.whenNotMatchedBySourceUpdate(when, _assigned(clause.values, layout))
    return builder


def condition(wanted: Condition, layout: Layout) -> Column:
    """The condition as a column that is never NULL; built once per layout, since each operation is a call to the JVM.

    SQL of the user may be NULL; a clause with it then does not hold.
    """
    if isinstance(wanted, Opaque):
        return as_column(wanted)
    return layout.once(f"spark {wanted!r}", lambda: _column(wanted, layout))


def _column(wanted: Condition, layout: Layout) -> Column:  # noqa: PLR0911 - a case per kind of condition
    match wanted:
        case Always():
            return F.lit(True)
        case Newer():
            # A row without a sequence is the oldest: NULL orders first in a struct, and compares as NULL outside.
            event, row = _sequences(layout)
            return F.coalesce(event > row, F.lit(True))
        case SameSequence():
            event, row = _sequences(layout)
            return event.eqNullSafe(row)
        case SamePosition(components):
            return _same_position(components, layout)
        case Changed():
            return _changed(layout)
        case IsDelete():
            return columns.column(names.DELETE_COLUMN, "s")
        case HasValue(name):
            return columns.column(name, "t").isNotNull()
        case Holds(written):
            return F.coalesce(F.expr(written), F.lit(False))
        case Not(inner):
            return ~condition(inner, layout)
        case And(conditions):
            return columns.all_of(condition(one, layout) for one in conditions)
        case Or(conditions):
            return columns.any_of(condition(one, layout) for one in conditions)
        case Opaque():
            return as_column(wanted)


def same_keys(layout: Layout) -> Column:
    """Whether event and row have the same key."""
    pairs = ((key, layout.in_event(key)) for key in layout.keys)
    return columns.all_of(columns.column(row, "t") == columns.column(event, "s") for row, event in pairs)


def as_column(opaque: Opaque) -> Column:
    """A user's expression."""
    return F.expr(opaque.written) if isinstance(opaque.written, str) else opaque.written


def _assigned(values: Assignments, layout: Layout) -> dict[str, str | Column]:
    written = {names.quote(name): as_column(value) for name, value in values.items() if isinstance(value, Opaque)}
    plain = {name: value for name, value in values.items() if not isinstance(value, Opaque)}
    of_event = layout.once(
        f"spark {sorted(plain.items())!r}",
        lambda: {names.quote(name): columns.column(layout.in_event(value), "s") for name, value in plain.items()},
    )
    return {**of_event, **written}


def _updated(values: Assignments, layout: Layout) -> dict[str, str | Column]:
    """Assignments of an update: structs keep the fields of the row that the source's lack."""
    lacking = (c for c in layout.stored if c.lacks_fields and isinstance(values.get(c.name), str))
    return {**_assigned(values, layout), **{names.quote(c.name): _completed(c, layout) for c in lacking}}


def _completed(stored: StoredColumn, layout: Layout) -> Column:
    """The row's new value of a column: the event's, with the fields that it lacks."""
    event, row = columns.column(layout.in_event(stored.name), "s"), columns.column(stored.name, "t")
    return columns.completed(event, row, stored.source_type, stored.dtype)


def _same_position(components: int, layout: Layout) -> Column:
    event, row = columns.column(names.SEQUENCE_COLUMN, "s"), layout.target_sequence("t")
    leading = [field.name for field in layout.sequence_fields[:components]]
    return columns.all_of(event[name].eqNullSafe(row[name]) for name in leading)


def _changed(layout: Layout) -> Column:
    new = layout.new_columns
    return columns.any_of(
        F.lit(True)
        if any(name == c.source_name or name.startswith(f"{c.source_name}.") for name in new)
        else columns.differs(_completed(c, layout), columns.column(c.name, "t"), c.dtype)
        for c in layout.stored
    )


def _sequences(layout: Layout) -> tuple[Column, Column]:
    """The event's and the row's sequence, ready to be compared; a single component as such, which costs less."""
    event, row = columns.column(names.SEQUENCE_COLUMN, "s"), layout.target_sequence("t")
    if len(layout.sequence_fields) > 1:
        return event, row
    component = layout.sequence_fields[0].name
    if layout.sequence_columns is not None:
        return event.getField(component), columns.column(layout.sequence_columns[0], "t")
    return event.getField(component), row.getField(component)
