"""The changes of a table, as AUTO CDC merges them: the latest event of a key upserts or deletes its row."""

from __future__ import annotations

from collections.abc import Sequence

from stream_merge import names
from stream_merge.config import MergeSpec
from stream_merge.layout import Layout
from stream_merge.shapes.clauses import (
    And,
    Assignments,
    Changed,
    Clause,
    Condition,
    Delete,
    Insert,
    IsDelete,
    Newer,
    Not,
    Or,
    SamePosition,
    SameSequence,
    Update,
)


def clauses(layout: Layout, spec: MergeSpec, *, deletes: bool, upserts: bool) -> Sequence[Clause]:
    """What becomes of the rows that a batch's events meet; of a key's clauses the first that holds counts.

    Args:
        layout: how the batch's columns map onto the target.
        spec: what the sink was told.
        deletes: whether the batch has deletes.
        upserts: whether it has upserts.
    """
    values = assignments(layout)
    updates = {name: value for name, value in values.items() if name not in layout.keys}
    found: list[Clause] = []
    if deletes:
        found.append(Delete(when=DELETES))
    if upserts and updates:
        found.append(Update(when=updating(spec), values=updates))
    if upserts:
        found.append(Insert(when=Not(IsDelete()), values=values))
    return found


DELETES: Condition = And(IsDelete(), Newer())
"""A delete takes the row away unless the row is as new as itself."""


def updating(spec: MergeSpec) -> Condition:
    """Whether an upsert is written over the row of its key.

    One that is newer always is, also where it changes nothing but the sequence: otherwise a stale event could win
    later. What a source is known to repeat (`MergeSpec.skip_unchanged`, `MergeSpec.position_components`) is not.
    One of the row's own sequence is written where it changes a column: of equal ones the later delivered wins.
    """
    newer: Condition = Newer()
    if spec.skip_unchanged:
        newer = And(Newer(), Changed())
    elif spec.position_components is not None:
        newer = And(Newer(), Or(Not(SamePosition(spec.position_components)), Changed()))
    return And(Not(IsDelete()), Or(newer, And(SameSequence(), Changed())))


def assignments(layout: Layout) -> Assignments:
    """What an upsert writes: the whole stored row and, where it is kept apart, the sequence."""
    written = [c.name for c in layout.stored]
    if layout.sequence_columns is None:
        written.append(names.SEQUENCE_COLUMN)
    return {name: name for name in written}
