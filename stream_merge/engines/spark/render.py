"""Clauses of a merge as Spark executes them: columns over the event (`s`) and the row (`t`)."""

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
    IsDelete,
    Newer,
    Not,
    Or,
    SamePosition,
    SameSequence,
    Update,
)
from stream_merge.shapes.layout import Layout, StoredColumn
from stream_merge.spark import columns


def with_clauses(builder: DeltaMergeBuilder, clauses: Iterable[Clause], layout: Layout) -> DeltaMergeBuilder:
    """Add the clauses in their order; Delta takes the first that holds."""
    for clause in clauses:
        when = None if clause.when == Always() else condition(clause.when, layout)
        if isinstance(clause, Delete):
            builder = builder.whenMatchedDelete(when)
        elif isinstance(clause, Update):
            builder = builder.whenMatchedUpdate(when, _updated(clause.values, layout))
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


def _updated(values: Assignments, layout: Layout) -> dict[str, str | Column]:
    """As `_assigned`, with the fields of the row that the source's structs lack."""
    completed = {names.quote(c.name): _completed(c) for c in layout.stored if c.lacks_fields and c.name in values}
    return {**_assigned(values, layout), **completed}


def _completed(stored: StoredColumn) -> Column:
    """What an update by the event's column of that name makes of the row's."""
    event, row = columns.column(stored.name, "s"), columns.column(stored.name, "t")
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
        else columns.differs(_completed(c), columns.column(c.name, "t"), c.dtype)
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
