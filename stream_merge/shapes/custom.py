"""`Clauses`: a MERGE with clauses of the user's own, executed as Delta does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from stream_merge.errors import ConfigError
from stream_merge.model.settings import MergeSpec
from stream_merge.shapes import clause_analysis
from stream_merge.shapes.base import Shape
from stream_merge.shapes.clause_builders import (
    Then,
    list_problems,
    plain_name,
    when_matched,
    when_not_matched,
    when_not_matched_by_source,
)
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
    UpdateMissing,
)
from stream_merge.shapes.layout import Layout

__all__ = ["Clauses", "when_matched", "when_not_matched", "when_not_matched_by_source"]


class Clauses(Shape):
    """A MERGE in the user's own words: `WHEN MATCHED`, `WHEN NOT MATCHED` and `WHEN NOT MATCHED BY SOURCE`.

    Conditions and values are Spark's SQL over the event `s`, with all columns of the source, stored or not, and the row
    `t`. The first clause of its kind that holds counts, and it does what Delta does, updates that change nothing
    included. Rows and events meet by `keys`.

    One event of a key is merged per batch. With `sequence_by` that is the latest; the sequence is not stored with the
    row, so events that come late, in a later batch, are for the clauses to refuse (`s.lsn > t.lsn`). Without it,
    several different events of a key are an error before anything is written.

    With a clause about rows that no event matches, a batch stands for the whole table: one with quarantined events
    is an error before anything is written, and one without any event changes nothing.

    Args:
        clauses: at least one; of a kind only the last may lack a condition.

    Raises:
        ConfigError: with every problem that shows without source and target.
    """

    name = "clauses"
    remembers_deletes = False
    keeps_sequence = False
    needs_arguments = True
    needs_whole_events = True
    is_literal = True

    def __init__(self, clauses: Sequence[Then]) -> None:
        listed = [clauses] if isinstance(clauses, Then) else list(clauses)
        problems = list_problems(listed)
        if problems:
            raise ConfigError(problems)
        self._clauses: tuple[Then, ...] = tuple(listed)
        self.only_inserts = all(clause.action == "insert" for clause in listed)
        self.concerns_missing = any(clause.kind == "not_matched_by_source" for clause in listed)

    def __repr__(self) -> str:
        return f"Clauses([{', '.join(map(repr, self._clauses))}])"

    def problems(self, spec: MergeSpec) -> Iterable[str]:
        """Settings that the clauses replace, and an engine that cannot execute them."""
        if spec.apply_as_deletes is not None and not spec.source_columns:
            yield (
                "[CONFLICTING_SETTINGS] apply_as_deletes has no effect with shape=Clauses(…); remove it and add a"
                " clause, such as when_matched(\"s.op = 'd'\").delete()"
            )
        if spec.tombstone_retention_seconds is not None:
            yield "[CONFLICTING_SETTINGS] retention_seconds has no effect with shape=Clauses(…); remove it"
        if spec.engine == "driver":
            yield (
                "[CONFLICTING_SETTINGS] engine='driver' does not execute the SQL of shape=Clauses(…); use 'auto' or"
                " 'spark'"
            )

    def clauses(self, layout: Layout, spec: MergeSpec, *, deletes: bool, upserts: bool) -> Sequence[Clause]:
        """The clauses as given, whatever the batch holds."""
        return [_clause(clause, layout) for clause in self._clauses]

    def misfits(self, session: SparkSession, layout: Layout, target: StructType) -> Iterable[str]:
        """Unknown columns, and conditions and values that Delta does not take."""
        return layout.once("misfits", lambda: clause_analysis.misfits(session, self._clauses, layout, target))

    def handles_marked_events(self, session: SparkSession, mark: str, layout: Layout, target: StructType) -> bool:
        """Whether no clause writes a marked event unless it asks for the mark."""
        return layout.once(
            f"handles {mark}",
            lambda: clause_analysis.handles_marked_events(session, self._clauses, mark, layout, target),
        )


def _clause(clause: Then, layout: Layout) -> Clause:
    when: Condition = Always() if clause.condition is None else Opaque(clause.condition)
    is_missing = clause.kind == "not_matched_by_source"
    if clause.action == "delete":
        return DeleteMissing(when=when) if is_missing else Delete(when=when)
    if clause.values is not None:
        values: Assignments = {plain_name(name): Opaque(value) for name, value in clause.values.items()}
    else:
        left_out = {clause_analysis.stored(name, layout) for name in clause.except_}
        values = {c.name: c.name for c in layout.stored if c.name not in left_out}
    if is_missing:
        return UpdateMissing(when=when, values=values)
    return Insert(when=when, values=values) if clause.action == "insert" else Update(when=when, values=values)
