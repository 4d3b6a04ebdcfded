"""Which columns of the rows of its keys a merge has to read: those that its clauses look at or leave as they are."""

from __future__ import annotations

from collections.abc import Iterable

from pyspark.sql.types import StructType

from stream_merge.model import names
from stream_merge.shapes.clauses import (
    Always,
    And,
    Changed,
    Clause,
    Condition,
    Insert,
    IsDelete,
    Newer,
    Not,
    Or,
    SamePosition,
    SameSequence,
    Update,
)
from stream_merge.shapes.layout import Layout


def needed(clauses: Iterable[Clause], layout: Layout, schema: StructType) -> frozenset[str] | None:
    """Names of the columns that do, where nobody asks for rows as they were; None where all have to be read.

    An event of its row's own sequence is compared with the row in all columns. There are hardly ever such, so these
    columns are not among those that are needed: `decide.decide` raises `conditions.NotReadError` when it comes to one.

    Args:
        clauses: of the merge.
        layout: of the batch.
        schema: of the target.
    """
    found = set(layout.keys)  # read in any case, and rows without a column could not be counted
    for clause in clauses:
        if isinstance(clause, Insert):
            continue
        looked_at = _looked_at(clause.when, layout)
        if looked_at is None:
            return None
        found |= looked_at
        if isinstance(clause, Update):
            found |= {field.name for field in schema.fields} - clause.values.keys()
    return frozenset(found)


def _looked_at(condition: Condition, layout: Layout) -> frozenset[str] | None:
    match condition:
        case Always() | IsDelete():
            return frozenset()
        case Newer() | SameSequence() | SamePosition():
            kept = layout.sequence_columns
            return frozenset((names.SEQUENCE_COLUMN,) if kept is None else kept)
        case Not(inner):
            return _looked_at(inner, layout)
        case And((SameSequence() as same, Changed())):
            return _looked_at(same, layout)
        case And(parts) | Or(parts):
            each = [_looked_at(part, layout) for part in parts]
            return None if None in each else frozenset().union(*filter(None, each))
        case _:
            return None
