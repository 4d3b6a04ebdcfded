"""`Changes`: the latest event of a key upserts or deletes its row, as in AUTO CDC."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from pyspark.sql import Column

from stream_merge.model.settings import MergeSpec
from stream_merge.shapes.base import Shape, assignments
from stream_merge.shapes.clauses import (
    And,
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
from stream_merge.shapes.layout import Layout
from stream_merge.shapes.surely_changes import GreatestSequence

DELETES: Condition = And(IsDelete(), Newer())
"""When a delete removes the row."""


class Changes(Shape):
    """Upserts and deletes by key, the latest wins: Spark's AUTO CDC (SCD type 1)."""

    name = "changes"
    remembers_deletes = True
    keeps_sequence = True

    def __repr__(self) -> str:
        return "Changes()"

    def problems(self, spec: MergeSpec) -> Iterable[str]:
        """A missing sequence."""
        if not isinstance(spec.sequence_by, Column) and not spec.sequence_by:
            yield "[MISSING_SETTING] sequence_by is empty; name at least one column"

    def clauses(self, layout: Layout, spec: MergeSpec, *, deletes: bool, upserts: bool) -> Sequence[Clause]:
        """Delete, update, insert."""
        values = assignments(layout)
        updates = {name: value for name, value in values.items() if name not in layout.keys}
        return [
            *([Delete(when=DELETES)] if deletes else []),
            *([Update(when=self.updating(spec), values=updates)] if upserts and updates else []),
            *([Insert(when=Not(IsDelete()), values=values)] if upserts else []),
        ]

    def certain(self, spec: MergeSpec) -> Condition:
        """A newer event; of a source that repeats itself a newer delete."""
        repeats = spec.skip_unchanged or spec.position_components is not None
        return DELETES if repeats else Newer()

    def updating(self, spec: MergeSpec) -> Condition:
        """A newer upsert, also one that changes nothing but the sequence: else a stale event could win later.

        Not one that a source is known to repeat (`MergeSpec.skip_unchanged`, `MergeSpec.position_components`). One of
        the row's own sequence is written where it changes a column: of equal ones the later delivered wins.
        """
        newer: Condition = Newer()
        if spec.skip_unchanged:
            newer = And(Newer(), Changed())
        elif spec.position_components is not None:
            newer = And(Newer(), Or(Not(SamePosition(spec.position_components)), Changed()))
        return And(Not(IsDelete()), Or(newer, And(SameSequence(), Changed())))

    def surely_changes(
        self, greatest: GreatestSequence | None, stored: Callable[[], GreatestSequence | None], spec: MergeSpec
    ) -> bool:
        """An upsert is newer than all that is stored."""
        if greatest is None or spec.skip_unchanged:
            return False
        return greatest.is_beyond(stored(), spec.position_components)
