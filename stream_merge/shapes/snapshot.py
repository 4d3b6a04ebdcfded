"""`Snapshot`: a batch is a full copy of the source, and the table becomes it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from pyspark.sql import Column, SparkSession
from pyspark.sql.types import StructType

from stream_merge.errors import ConfigError
from stream_merge.model import names
from stream_merge.model.settings import MergeSpec
from stream_merge.shapes import clause_analysis
from stream_merge.shapes.base import Copied, Shape, assignments
from stream_merge.shapes.clause_builders import plain_name
from stream_merge.shapes.clauses import (
    Always,
    And,
    Changed,
    Clause,
    Condition,
    DeleteMissing,
    HasValue,
    Holds,
    Insert,
    Not,
    Opaque,
    Or,
    Update,
    UpdateMissing,
)
from stream_merge.shapes.layout import Layout


class Snapshot(Shape):
    """A batch is a full copy of the source, and the table becomes it.

    New keys are inserted, rows that differ in a stored column are updated, all others stay untouched: they have no rows
    in the change feed. Rows whose key the copy lacks are deleted or, with `missing`, flagged. A flagged row is not
    touched again; when its key returns the flag becomes NULL.

    Before anything is written, an error stops a copy that has an event in quarantine, a key twice, fewer rows than
    `min_rows`, or that would remove more than `max_delete_share` of the table, and one that is older than the last one
    merged. No sequence is stored: batches have to come in the order of their ids. Spark executes this shape, or, of
    copies that fit into the driver and without `missing` and `within`, which are SQL, the driver.

    Args:
        delete_missing: whether rows whose key the copy lacks are concerned at all.
        missing: column of the target -> SQL over the row `t`: they are set in place of deleting. The first one is
            the flag: it is NULL as long as the key is there.
        max_delete_share: at most this share (0 to 1) of the rows may be deleted or flagged by one copy.
        min_rows: the copy has at least so many rows; 0 lets an empty one empty the table.
        within: SQL over the row `t`: the part of the table that the copy is of, such as "t.day = '2024-06-01'". Only
            there rows are missing; a row of the copy outside of it is an error.

    Raises:
        ConfigError: with every problem that shows without source and target.
    """

    name = "snapshot"
    remembers_deletes = False
    keeps_sequence = False
    is_whole = True

    def __init__(
        self,
        *,
        delete_missing: bool = True,
        missing: Mapping[str, str] | None = None,
        max_delete_share: float = 0.2,
        min_rows: int = 1,
        within: str | None = None,
    ) -> None:
        self._missing = None if missing is None else dict(missing)
        self._max_delete_share = max_delete_share
        self.concerns_missing = delete_missing
        self.min_rows = min_rows
        self.within = within
        problems = list(self._own_problems())
        if problems:
            raise ConfigError(problems)
        self.kept_beside = {plain_name(name): value for name, value in (self._missing or {}).items()}
        self._flag = next(iter(self.kept_beside), None)  # NULL where a row is not flagged

    def _own_problems(self) -> Iterable[str]:
        share, least = self._max_delete_share, self.min_rows
        if not isinstance(share, int | float) or isinstance(share, bool) or not 0 <= share <= 1:
            yield f"[INVALID_SETTING] max_delete_share={share!r} must be a number from 0 (no row) to 1 (all rows)"
        if not isinstance(least, int) or isinstance(least, bool) or least < 0:
            yield f"[INVALID_SETTING] min_rows={least!r} must be a whole number of rows, 0 or more"
        if self.within is not None and (not isinstance(self.within, str) or not self.within.strip()):
            yield f"[INVALID_SETTING] within={self.within!r} must be SQL text over t, such as \"t.day = '2024-06-01'\""
        if self._missing is not None:
            yield from _flag_problems(self._missing, delete_missing=self.concerns_missing)

    def __repr__(self) -> str:
        given = {
            "delete_missing": (self.concerns_missing, True),
            "missing": (self._missing, None),
            "max_delete_share": (self._max_delete_share, 0.2),
            "min_rows": (self.min_rows, 1),
            "within": (self.within, None),
        }
        return f"Snapshot({', '.join(f'{name}={value!r}' for name, (value, usual) in given.items() if value != usual)})"

    def problems(self, spec: MergeSpec) -> Iterable[str]:
        """Settings without effect where each batch is a full copy."""
        if isinstance(spec.sequence_by, Column) or spec.sequence_by:
            yield (
                "[CONFLICTING_SETTINGS] sequence_by has no effect with shape=Snapshot(…), of which the later one"
                " counts; remove it"
            )
        if spec.apply_as_deletes is not None:
            yield (
                "[CONFLICTING_SETTINGS] apply_as_deletes has no effect with shape=Snapshot(…), which deletes what a"
                " snapshot lacks; remove it, and deleted rows from the snapshot"
            )
        if spec.tombstone_retention_seconds is not None:
            yield "[CONFLICTING_SETTINGS] retention_seconds has no effect with shape=Snapshot(…); remove it"
        sql = "missing" if self._missing is not None else None if self.within is None else "within"
        if spec.engine == "driver" and sql is not None:
            yield (
                f"[CONFLICTING_SETTINGS] engine='driver' does not execute the SQL of {sql} in shape=Snapshot(…); use"
                " 'auto' or 'spark'"
            )
        keys = sorted(set(self.kept_beside).intersection(spec.keys))
        if keys:
            yield f"[CONFLICTING_SETTINGS] missing sets key(s) {keys!r}; use other columns"

    def clauses(self, layout: Layout, spec: MergeSpec, *, deletes: bool, upserts: bool) -> Sequence[Clause]:
        """Update what differs, insert what is new, delete or flag what is missing."""
        values = assignments(layout)
        cleared = {name: Opaque("NULL") for name in self.kept_beside}
        updates = {**{name: value for name, value in values.items() if name not in layout.keys}, **cleared}
        clauses: list[Clause] = [Update(when=self.updating(spec), values=updates)] if updates else []
        clauses.append(Insert(when=Always(), values=values))
        if self._missing is not None:
            flags = {name: Opaque(value) for name, value in self.kept_beside.items()}
            clauses.append(UpdateMissing(when=self.expected, values=flags))
        elif self.concerns_missing:
            clauses.append(DeleteMissing(when=self.expected))
        return clauses

    @property
    def expected(self) -> Condition:
        """Rows of the window that are not flagged."""
        conditions: list[Condition] = []
        if self.within is not None:
            conditions.append(Holds(self.within))
        if self._flag is not None:
            conditions.append(Not(HasValue(self._flag)))
        return And(*conditions) if conditions else Always()

    def objection(self, counts: Copied, *, where: str) -> str | None:
        """More rows would be deleted or flagged than allowed."""
        share = counts.missing / max(counts.rows, 1)
        if not self.concerns_missing or share <= self._max_delete_share:
            return None
        what = "delete" if self._missing is None else "flag"
        window = "" if self.within is None else f" within {self.within!r}"
        needed = math.ceil(share * 100) / 100
        return (
            f"[TOO_MANY_DELETES] {where} would {what} {counts.missing} of {counts.rows} rows{window} ({share:.1%}),"
            f" more than max_delete_share={self._max_delete_share!r}; repair the snapshot or, if it is complete, merge"
            f" it with max_delete_share={needed!r}"
        )

    def misfits(self, session: SparkSession, layout: Layout, target: StructType) -> Iterable[str]:
        """A window or a flag that Spark cannot analyse."""
        return layout.once("misfits", lambda: list(self._misfits(session, layout, target)))

    def _misfits(self, session: SparkSession, layout: Layout, target: StructType) -> Iterable[str]:
        beside = [field for field in layout.beside if field.name not in target.names]
        rows = session.createDataFrame([], StructType([*target.fields, *beside])).alias("t")
        stored = [field for field in layout.target_fields if field not in layout.beside]
        if self.within is not None:
            of_copy = session.createDataFrame([], StructType(stored)).alias("t")
            for frame, whose in ((rows, "the table"), (of_copy, "the snapshot")):
                what, seen = f"within={self.within!r} over {whose}", f"t has {frame.columns!r}"
                problem = clause_analysis.misfit(frame, what, self.within, seen=seen, is_condition=True, is_fixed=True)
                if problem is not None:
                    yield f"[INVALID_EXPRESSION] {problem}"
                    return
        for (name, written), field in zip(self.kept_beside.items(), layout.beside, strict=True):
            what, seen = f"the value {written!r} of {name!r} in missing", f"t has {rows.columns!r}"
            problem = clause_analysis.misfit(rows, what, written, seen=seen, stored_as=field.dataType)
            if problem is not None:
                yield f"[INVALID_EXPRESSION] {problem}"
            elif name == self._flag and clause_analysis.may_be_null(rows, written, field.dataType):
                yield (
                    f"[INVALID_EXPRESSION] {what} may be NULL, and then flags no row; put a column first that is never"
                    " NULL, such as {'deleted_at': 'current_timestamp()'}"
                )

    def updating(self, spec: MergeSpec) -> Condition:
        """A stored column differs, or the row is flagged."""
        return Changed() if self._flag is None else Or(Changed(), HasValue(self._flag))


def _flag_problems(missing: Mapping[str, str], *, delete_missing: bool) -> Iterable[str]:
    if not delete_missing:
        yield "[CONFLICTING_SETTINGS] missing is given, but delete_missing=False keeps such rows; remove one of them"
    if not missing:
        yield "[INVALID_SETTING] missing is empty; name a column to set, or remove it to delete missing rows"
    for name, value in missing.items():
        if not isinstance(name, str) or not name.strip():
            yield f"[INVALID_SETTING] missing holds {name!r}, which is not a column name"
        elif names.is_reserved(plain_name(name)):
            yield f"[RESERVED_COLUMN_NAME] missing sets {name!r}; the prefix {names.RESERVED_PREFIX!r} is reserved"
        elif not isinstance(value, str) or not value.strip():
            yield f"[INVALID_SETTING] missing sets {name!r} to {value!r}; use SQL text, such as 'true'"
