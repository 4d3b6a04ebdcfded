"""`InsertOnly`: events whose key the table lacks become rows; a row is never changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stream_merge.model.settings import MergeSpec
from stream_merge.shapes.base import Shape, assignments
from stream_merge.shapes.clauses import Always, Clause, Insert
from stream_merge.shapes.layout import Layout


class InsertOnly(Shape):
    """The first event of a key stays, in whatever batch others come: duplicates are left out.

    Of several events of a key in one batch the latest by `sequence_by` is inserted; without one the order of the
    stored columns decides, so that a replay picks the same. Nothing is updated, deleted or remembered, and the
    sequence is not stored with the row. A batch whose keys are all there commits nothing.

    Delta (4.4) merges this with one scan and adds files without touching any.
    """

    name = "insert-only"
    remembers_deletes = False
    keeps_sequence = False
    only_inserts = True

    def __repr__(self) -> str:
        return "InsertOnly()"

    def problems(self, spec: MergeSpec) -> Iterable[str]:
        """Settings about deletes."""
        if spec.apply_as_deletes is not None and not spec.source_columns:
            yield "[CONFLICTING_SETTINGS] apply_as_deletes has no effect with shape=InsertOnly(); remove one of them"
        if spec.tombstone_retention_seconds is not None:
            yield "[CONFLICTING_SETTINGS] retention_seconds has no effect with shape=InsertOnly(); remove it"

    def clauses(self, layout: Layout, spec: MergeSpec, *, deletes: bool, upserts: bool) -> Sequence[Clause]:
        """An insert of every key that the table lacks."""
        return [Insert(when=Always(), values=assignments(layout))] if upserts else []
