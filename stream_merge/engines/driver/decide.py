"""Decides what becomes of matched rows and of events without a row: the first clause that holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from stream_merge.engines.driver.conditions import holds
from stream_merge.shapes.clauses import (
    Always,
    Assignments,
    Clause,
    Condition,
    Delete,
    DeleteMissing,
    Insert,
    Opaque,
    Update,
)
from stream_merge.shapes.layout import Layout
from stream_merge.spark.versions import arrow_type
from stream_merge.tables.files.find import EVENT, FILE, POSITION

_NUMBERS = (EVENT, FILE, POSITION)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What a merge changes. Tables have the target's columns; rows of `before` and `after` belong together."""

    gone: pa.Table
    """`FILE` and `POSITION` of the rows that are updated or deleted."""
    before: pa.Table
    after: pa.Table
    deleted: pa.Table
    inserted: pa.Table
    missing: int = 0
    """How many of the deleted rows have no event."""

    @property
    def changes_nothing(self) -> bool:
        """Whether the table stays as it is."""
        return not self.gone.num_rows and not self.inserted.num_rows

    @property
    def nbytes(self) -> int:
        """Bytes of all its rows."""
        return sum(int(rows.nbytes) for rows in (self.before, self.after, self.deleted, self.inserted))


def decide(
    clauses: Sequence[Clause], layout: Layout, schema: StructType, *, events: pa.Table, rows: pa.Table
) -> Decision:
    """Apply clauses to the events, one per key, and the live rows of their keys (`find.find`).

    Rows have all columns, or those that are `needed`: then `Decision.before` and `deleted` have those alone. With
    `DeleteMissing` they include all other live rows, whose event is NULL. Raises `NotReadError` if a column is missing.
    """
    lacking = rows.filter(rows[EVENT].is_null())
    rows = rows.filter(rows[EVENT].is_valid()) if lacking.num_rows else rows
    matched = rows[EVENT]
    with_row = events.take(matched)
    stored = rows.drop_columns(list(_NUMBERS))
    updated, deleted = [], []
    before, after = [], []
    of_pairs = [clause for clause in clauses if not isinstance(clause, Insert | DeleteMissing)]
    for clause, taken in _first_that_holds(of_pairs, layout, with_row, stored):
        if isinstance(clause, Delete):
            deleted.append(taken)
        elif isinstance(clause, Update):
            updated.append(taken)
            before.append(stored.take(taken))
            after.append(_assigned(clause.values, with_row.take(taken), before[-1], schema))
        else:
            raise _only_spark(clause)
    alone = events.filter(pc.invert(pc.is_in(pa.arange(0, events.num_rows), value_set=pc.unique(matched))))
    inserted = [
        _assigned(clause.values, alone.take(taken), None, schema)
        for clause, taken in _first_that_holds([c for c in clauses if isinstance(c, Insert)], layout, alone, None)
        if isinstance(clause, Insert)
    ]
    places = [rows.select([FILE, POSITION]).take(one) for one in (*updated, *deleted)]
    gone = [stored.take(one) for one in deleted]
    if any(_deletes_missing(clause) for clause in clauses):
        places.append(lacking.select([FILE, POSITION]))
        gone.append(lacking.drop_columns(list(_NUMBERS)))
    nothing = pa.schema([pa.field(field.name, arrow_type(field.dataType)) for field in schema.fields]).empty_table()
    return Decision(
        gone=pa.concat_tables([rows.select([FILE, POSITION]).slice(0, 0), *places]),
        before=pa.concat_tables([stored.slice(0, 0), *before]),
        after=pa.concat_tables([nothing, *after]),
        deleted=pa.concat_tables([stored.slice(0, 0), *gone]),
        inserted=pa.concat_tables([nothing, *inserted]),
        missing=lacking.num_rows,
    )


def _deletes_missing(clause: Clause) -> bool:
    """Whether the clause deletes all rows without an event."""
    if isinstance(clause, DeleteMissing) and clause.when != Always():
        raise _only_spark(clause.when)
    return isinstance(clause, DeleteMissing)


def _first_that_holds(
    clauses: Iterable[Clause], layout: Layout, events: pa.Table, rows: pa.Table | None
) -> Iterable[tuple[Clause, pa.Array]]:
    """Each clause with the row numbers for which it is the first that holds."""
    left = pa.arange(0, events.num_rows)
    for clause in clauses:
        if not len(left):
            return
        those = events.take(left)
        true = _true(clause.when, layout, those, None if rows is None else rows.take(left))
        yield clause, left.filter(true)
        left = left.filter(pc.invert(true))


def _true(when: Condition, layout: Layout, events: pa.Table, rows: pa.Table | None) -> pa.Array:
    if when == Always():
        return pa.repeat(pa.scalar(True), events.num_rows)
    answers: Any = holds(when, layout, events, rows)
    return answers.combine_chunks() if isinstance(answers, pa.ChunkedArray) else answers


def _assigned(values: Assignments, events: pa.Table, rows: pa.Table | None, schema: StructType) -> pa.Table:
    """Rows of the target: assigned columns from the events, others as they were, or NULL where there was no row."""
    columns, fields = [], []
    for field in schema.fields:
        dtype, value = arrow_type(field.dataType), values.get(field.name)
        if isinstance(value, Opaque):
            raise _only_spark(value)
        if value is not None:
            column = events[value]
            column = column if column.type == dtype else column.cast(dtype)
        else:
            column = pa.nulls(events.num_rows, dtype) if rows is None else rows[field.name]
        columns.append(column)
        fields.append(pa.field(field.name, dtype))
    return pa.table(columns, schema=pa.schema(fields))


def _only_spark(what: object) -> AssertionError:
    """Error for what eligibility rules out."""
    return AssertionError(f"{what!r} is for Spark alone")
