"""Clauses of a merge as delta-rs executes them: SQL of DataFusion over the event (`s`) and the row (`t`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pyspark.sql.types import DataType, DoubleType, FloatType, StructType

from stream_merge.model import names
from stream_merge.shapes.clauses import (
    Always,
    And,
    Assignments,
    Changed,
    Clause,
    Condition,
    Delete,
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
)
from stream_merge.shapes.layout import Layout
from stream_merge.shapes.sequence import leaves
from stream_merge.tables.delta_rs import sql
from stream_merge.tables.delta_rs.table import Merger

_CHAINED = 40
"""Conditions in one chain: with as many chains, the merge of a table of 1,600 columns is nowhere deeper than this."""


def with_clauses(merger: Merger, clauses: Iterable[Clause], layout: Layout) -> Merger:
    """Add the clauses in their order; delta-rs takes the first that holds."""
    for clause in clauses:
        when = None if clause.when == Always() else condition(clause.when, layout)
        if isinstance(clause, Delete):
            merger = merger.when_matched_delete(when)
        elif isinstance(clause, Update):
            merger = merger.when_matched_update(dict(_assigned(clause.values)), when)
        elif isinstance(clause, Insert):
            merger = merger.when_not_matched_insert(dict(_assigned(clause.values)), when)
        else:
            raise _only_spark(clause)
    return merger


def condition(wanted: Condition, layout: Layout) -> str:  # noqa: PLR0911 - a case per kind of condition
    """The condition as SQL that is never NULL, in parentheses where it needs them."""
    match wanted:
        case Always():
            return "TRUE"
        case Newer():
            return _lexicographic(_sequence_pairs(layout))
        case SameSequence():
            return _same(_sequence_pairs(layout))
        case SamePosition(components):
            return _same(_sequence_pairs(layout, components))
        case Changed():
            return _changed(layout)
        case IsDelete():
            return sql.column("s", names.DELETE_COLUMN)
        case Not(inner):
            return f"(NOT {condition(inner, layout)})"
        case And(conditions):
            return f"({' AND '.join(condition(one, layout) for one in conditions)})"
        case Or(conditions):
            return _any(condition(one, layout) for one in conditions)
        case Opaque() | Holds() | HasValue():
            raise _only_spark(wanted)


def _assigned(values: Assignments) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Opaque):
            raise _only_spark(value)
        found[sql.quote(name)] = sql.column("s", value)
    return found


def _only_spark(what: object) -> AssertionError:
    """`eligibility.of_batch` keeps them away from here."""
    return AssertionError(f"{what!r} is for Spark alone")


def _sequence_pairs(layout: Layout, components: int | None = None) -> list[tuple[str, str]]:
    """The scalars of the event's and the row's sequence, in the order in which they are compared.

    Args:
        layout: how the sequence is stored.
        components: of so many leading components; None: of all.
    """
    pairs = []
    for path, _ in leaves(StructType(list(layout.sequence_fields[:components]))):
        stored: tuple[str, ...] = (names.SEQUENCE_COLUMN, *path)
        if layout.sequence_columns is not None:
            position = [f.name for f in layout.sequence_fields].index(path[0])
            stored = (layout.sequence_columns[position], *path[1:])
        pairs.append((sql.column("s", names.SEQUENCE_COLUMN, *path), sql.column("t", *stored)))
    return pairs


def _lexicographic(pairs: list[tuple[str, str]]) -> str:
    """Whether the first is greater; no component of it is NULL, and a NULL of the other is less than any value."""
    decided = []
    for i, (event, row) in enumerate(pairs):
        same = [f"{one} = {other}" for one, other in pairs[:i]]
        decided.append(f"({' AND '.join([*same, f'({row} IS NULL OR {event} > {row})'])})")
    # Side by side, not one inside the other: DataFusion's parser gives up after a dozen levels.
    return f"({' OR '.join(decided)})"


def _same(pairs: list[tuple[str, str]]) -> str:
    return f"(({' AND '.join(f'{event} = {row}' for event, row in pairs)}) IS TRUE)"


def _changed(layout: Layout) -> str:
    differing = [_differs(sql.column("s", c.name), sql.column("t", c.name), c.dtype) for c in layout.stored]
    # One long chain is a tree as deep as it is long, and what DataFusion does to it grows with the square of that.
    chains = (differing[start : start + _CHAINED] for start in range(0, len(differing), _CHAINED))
    return _any(_any(chain) for chain in chains)


def _any(conditions: Iterable[str]) -> str:
    return f"({' OR '.join(conditions)})"


def _differs(one: str, other: str, dtype: DataType) -> str:
    """Not Spark's `<=>`; the parentheses matter, DataFusion binds OR wrongly without them."""
    if isinstance(dtype, FloatType | DoubleType):
        return f"({_canonical_float(one)} IS DISTINCT FROM {_canonical_float(other)})"
    return f"({one} IS DISTINCT FROM {other})"


def _canonical_float(value: str) -> str:
    """One NaN, one zero: Arrow compares floats bit by bit."""
    return f"(CASE WHEN isnan({value}) THEN CAST('NaN' AS DOUBLE) ELSE CAST({value} AS DOUBLE) + CAST(0 AS DOUBLE) END)"
