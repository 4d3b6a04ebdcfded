"""A table that only grows: events whose key it does not have yet become rows, and a row is never touched again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from stream_merge.model.settings import MergeSpec
from stream_merge.shapes.base import Shape, assignments
from stream_merge.shapes.clauses import Always, Clause, Insert
from stream_merge.shapes.layout import Layout
from stream_merge.shapes.surely_changes import GreatestSequence


class InsertOnly(Shape):
    """The first event of a key stays, in whatever batch others come: duplicates are left out.

    Of several events of a key in one batch the latest by `sequence_by` is inserted; without one the order of the
    stored columns decides, so that a replay picks the same. Nothing is updated, deleted or remembered, and the
    sequence is not kept with the row. A batch whose keys are all there commits nothing.

    Delta (4.4) merges this with one scan and adds files without touching any.
    """

    name = "insert-only"
    remembers_deletes = False
    keeps_sequence = False

    def __repr__(self) -> str:
        """As it is written."""
        return "InsertOnly()"

    @property
    def only_inserts(self) -> bool:
        """It is what it is for."""
        return True

    def problems(self, spec: MergeSpec) -> Iterable[str]:
        """Settings about deletes mean nothing where there are none."""
        if spec.apply_as_deletes is not None and not spec.source_columns:
            yield "[CONFLICTING_SETTINGS] apply_as_deletes has no effect with shape=InsertOnly(); remove one of them"
        if spec.tombstone_retention_seconds is not None:
            yield "[CONFLICTING_SETTINGS] retention_seconds has no effect with shape=InsertOnly(); remove it"

    def clauses(self, layout: Layout, spec: MergeSpec, *, deletes: bool, upserts: bool) -> Sequence[Clause]:
        """Insert, and nothing else."""
        return [Insert(when=Always(), values=assignments(layout))] if upserts else []

    def certain(self, spec: MergeSpec) -> None:
        """No row is changed by an event of its key."""

    def updating(self, spec: MergeSpec) -> None:
        """Nothing is updated."""

    def surely_changes(
        self, greatest: GreatestSequence | None, stored: Callable[[], GreatestSequence | None], spec: MergeSpec
    ) -> bool:
        """Nobody knows without a look at the keys."""
        return False
