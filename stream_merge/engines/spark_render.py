"""Clauses of a merge as Spark executes them: columns over the event (`s`) and the row (`t`)."""

from __future__ import annotations

from collections.abc import Iterable

from delta.tables import DeltaMergeBuilder
from pyspark.sql import Column
from pyspark.sql import functions as F

from stream_merge import columns, names
from stream_merge.layout import Layout
from stream_merge.shapes.clauses import (
    Always,
    And,
    Assignments,
    Changed,
    Clause,
    Condition,
    Delete,
    IsDelete,
    Newer,
    Not,
    Or,
    SamePosition,
    SameSequence,
    Update,
)


def with_clauses(builder: DeltaMergeBuilder, clauses: Iterable[Clause], layout: Layout) -> DeltaMergeBuilder:
    """Add the clauses in their order; Delta takes the first that holds."""
    for clause in clauses:
        when = None if clause.when == Always() else condition(clause.when, layout)
        if isinstance(clause, Delete):
            builder = builder.whenMatchedDelete(when)
        elif isinstance(clause, Update):
            builder = builder.whenMatchedUpdate(when, _assigned(clause.values, layout))
        else:
            values = _assigned(clause.values, layout)
            if when is None:
                builder = builder.whenNotMatchedInsert(values=values)
            else:
                builder = builder.whenNotMatchedInsert(when, values)
    return builder


def condition(wanted: Condition, layout: Layout) -> Column:
    """The condition as a column that is never NULL; built once per layout, each operation is a call to the JVM."""
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
        case Not(inner):
            return ~condition(inner, layout)
        case And(conditions):
            return columns.all_of(condition(one, layout) for one in conditions)
        case Or(conditions):
            return columns.any_of(condition(one, layout) for one in conditions)


def _assigned(values: Assignments, layout: Layout) -> dict[str, str | Column]:
    return layout.once(
        f"spark {sorted(values.items())!r}",
        lambda: {names.quote(name): columns.column(value, "s") for name, value in values.items()},
    )


def _same_position(components: int, layout: Layout) -> Column:
    event, row = columns.column(names.SEQUENCE_COLUMN, "s"), layout.target_sequence("t")
    leading = [field.name for field in layout.sequence_fields[:components]]
    return columns.all_of(event[name].eqNullSafe(row[name]) for name in leading)


def _changed(layout: Layout) -> Column:
    new = layout.new_columns
    return columns.any_of(
        F.lit(True)
        if any(name == c.source_name or name.startswith(f"{c.source_name}.") for name in new)
        else columns.differs(columns.column(c.name, "s"), columns.column(c.name, "t"), c.dtype)
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
