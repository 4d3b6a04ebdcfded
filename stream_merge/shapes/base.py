"""What a shape says: which settings mean something to it, and what becomes of rows and events."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from stream_merge.errors import ContractError
from stream_merge.model import names
from stream_merge.model.settings import MergeSpec
from stream_merge.shapes.clauses import Always, Assignments, Clause, Condition
from stream_merge.shapes.layout import Layout
from stream_merge.shapes.surely_changes import GreatestSequence


@dataclass(frozen=True, kw_only=True, slots=True)
class Copied:
    """A whole copy beside its table."""

    rows: int
    """Of the table that the copy is about: inside the window, and not flagged as missing before."""
    missing: int
    """Of those, whose key the copy does not have."""


class Shape(ABC):
    """What a batch means for a table. Knows no engine; whoever executes it renders its clauses."""

    name: ClassVar[str]
    """As command line and job file have it."""
    remembers_deletes: ClassVar[bool]
    """Whether deletes are remembered (tombstones), where the sink was not told otherwise."""
    keeps_sequence: ClassVar[bool]
    """Whether the sequence of a row is kept with it, for events to come."""
    needs_arguments: ClassVar[bool] = False
    """Whether its name alone does not say what it does."""
    needs_whole_events: ClassVar[bool] = False
    """Whether its clauses may name any column of the source, stored or not. Without `sequence_by`, several different
    events of a key in one batch are then an error: nothing says which of them its clauses are about."""
    is_whole: ClassVar[bool] = False
    """Whether a batch is a copy of the whole table: each key once, nothing left out, and one without events is a copy
    of an empty table."""
    is_literal: ClassVar[bool] = False
    """Whether the clauses are executed as they stand, also where the row stays as it is."""

    @property
    def only_inserts(self) -> bool:
        """Whether no row is ever changed or removed."""
        return False

    @property
    def concerns_missing(self) -> bool:
        """Whether rows whose key no event of a batch has are concerned: then no file of the target is left unread."""
        return False

    @property
    def kept_beside(self) -> Mapping[str, str]:
        """Columns of the target that the source does not have -> SQL over the row `t`, whose types they have."""
        return {}

    @property
    def within(self) -> str | None:
        """SQL over the row `t`: the part of the table that a batch is a copy of; None: all of it."""
        return None

    def over(self, window: str) -> Shape:
        """The same over another part; of shapes that have one."""
        return self

    @property
    def expected(self) -> Condition:
        """Which rows of the table a whole copy should have."""
        return Always()

    @property
    def min_rows(self) -> int:
        """A batch with fewer events must not be merged."""
        return 0

    def objection(self, counts: Copied, *, where: str) -> str | None:
        """Why a whole copy must not be merged, in a sentence; None where nothing speaks against it.

        Args:
            counts: what it would do to the table.
            where: which batch it is, and for what table.
        """
        return None

    def expect_allowed(self, counts: Copied, *, target: str, batch_id: int) -> None:
        """Stop a whole copy that must not be merged into the table as it is.

        Args:
            counts: what it would do to the table.
            target: as the sink was told.
            batch_id: of the copy.

        Raises:
            ContractError: with the objection.
        """
        problem = self.objection(counts, where=f"snapshot {batch_id} for {target!r}")
        if problem is not None:
            raise ContractError(problem, reasons={}, target=target, batch_id=batch_id)

    def misfits(self, session: SparkSession, layout: Layout, target: StructType) -> Iterable[str]:
        """What of the shape does not fit the columns of source and target, a sentence each; runs no Spark job."""
        return ()

    def handles_marked_events(self, session: SparkSession, mark: str, layout: Layout, target: StructType) -> bool:
        """Whether no event that a column of the source marks is written as a row unasked."""
        return False

    @abstractmethod
    def problems(self, spec: MergeSpec) -> Iterable[str]:
        """What of the settings cannot work with this shape, a sentence each."""

    @abstractmethod
    def clauses(self, layout: Layout, spec: MergeSpec, *, deletes: bool, upserts: bool) -> Sequence[Clause]:
        """What becomes of the rows and events that a batch brings together; the first clause that holds counts.

        Args:
            layout: how the batch's columns map onto the target.
            spec: what the sink was told.
            deletes: whether the batch has deletes.
            upserts: whether it has upserts.
        """

    @abstractmethod
    def certain(self, spec: MergeSpec) -> Condition | None:
        """Where it holds for an event and its row, the merge changes that row; cheap to answer: keys and sequences."""

    @abstractmethod
    def updating(self, spec: MergeSpec) -> Condition | None:
        """Whether an event is written over its row; None where none ever is."""

    @abstractmethod
    def surely_changes(
        self, greatest: GreatestSequence | None, stored: Callable[[], GreatestSequence | None], spec: MergeSpec
    ) -> bool:
        """Whether a batch with upserts changes a row for sure, told without looking at any row.

        Args:
            greatest: sequence of its upserts, as far as it compares with statistics.
            stored: looks up the greatest sequence in the target by the statistics of its files.
            spec: what the sink was told.
        """


def assignments(layout: Layout) -> Assignments:
    """What an event writes: the whole stored row and, where it is kept apart, the sequence."""
    written = [c.name for c in layout.stored]
    if layout.sequence_columns is None:
        written.append(names.SEQUENCE_COLUMN)
    return {name: name for name in written}


_UNNAMED = "insert-only"
"""The shape of tables without a sequence that record none."""


def without_sequence(spec: MergeSpec) -> str:
    """What is recorded with a table whose rows have no sequence: the shape; without a name it is insert-only."""
    is_named = spec.shape is not None and spec.shape.name != _UNNAMED
    return json.dumps({"columns": [], **({"shape": spec.shape.name} if spec.shape and is_named else {})})


def filled_as(recorded: str) -> str:
    """The shape of a table by the definition that is recorded with it."""
    found = json.loads(recorded)
    return str(found.get("shape", _UNNAMED if found == {"columns": []} else "changes"))
