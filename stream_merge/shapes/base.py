"""`Shape`: what a batch means for a table, and which settings apply to it."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from types import MappingProxyType
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
    """Row counts of a table beside a full copy of it."""

    rows: int
    """Rows of the table that the copy should have: inside the window, and not flagged as missing before."""
    missing: int
    """Those of them whose key the copy lacks."""


class Shape(ABC):
    """What a batch means for a table. Knows no engine; whoever executes it renders its clauses."""

    name: ClassVar[str]
    """Name in command line and job file."""
    remembers_deletes: ClassVar[bool]
    """Whether deletes are remembered (tombstones) by default."""
    keeps_sequence: ClassVar[bool]
    """Whether the sequence is stored with the row, for later events."""
    needs_arguments: ClassVar[bool] = False
    """Whether its name alone does not define it."""
    needs_whole_events: ClassVar[bool] = False
    """Whether its clauses may name any column of the source, stored or not. Without `sequence_by`, several different
    events of a key in one batch are then an error."""
    is_whole: ClassVar[bool] = False
    """Whether a batch is a full copy of the table: each key once; one without events is a copy of an empty table."""
    is_literal: ClassVar[bool] = False
    """Whether the clauses are executed as they stand, also where the row stays as it is."""

    only_inserts: bool = False
    """Whether no row is ever changed or removed."""
    concerns_missing: bool = False
    """Whether rows whose key no event of a batch has are concerned: then every file of the target is read."""
    kept_beside: Mapping[str, str] = MappingProxyType({})
    """Columns of the target that the source does not have -> SQL over the row `t`, whose types they have."""
    within: str | None = None
    """SQL over the row `t`: the part of the table that a batch is a copy of; None: all of it."""
    min_rows: int = 0
    """Fewest events that a batch may have."""

    def over(self, window: str) -> Shape:
        """A copy of the shape with another `within`."""
        shape = copy(self)
        shape.within = window
        return shape

    @property
    def expected(self) -> Condition:
        """Which rows of the table a full copy should have."""
        return Always()

    def objection(self, counts: Copied, *, where: str) -> str | None:
        """Why a full copy must not be merged, in a sentence that names the batch by `where`; None if it may."""
        return None

    def expect_allowed(self, counts: Copied, *, target: str, batch_id: int) -> None:
        """Raise a ContractError for a full copy that must not be merged into the table as it is."""
        problem = self.objection(counts, where=f"snapshot {batch_id} for {target!r}")
        if problem is not None:
            raise ContractError(problem, reasons={}, target=target, batch_id=batch_id)

    def misfits(self, session: SparkSession, layout: Layout, target: StructType) -> Iterable[str]:
        """What of the shape does not fit the columns of source and target; runs no Spark job."""
        return ()

    def handles_marked_events(self, session: SparkSession, mark: str, layout: Layout, target: StructType) -> bool:
        """Whether no event that the source column `mark` marks is written as a row unasked."""
        return False

    @abstractmethod
    def problems(self, spec: MergeSpec) -> Iterable[str]:
        """The settings that cannot work with this shape, a sentence each."""

    @abstractmethod
    def clauses(self, layout: Layout, spec: MergeSpec, *, deletes: bool, upserts: bool) -> Sequence[Clause]:
        """The clauses of a batch that has deletes or upserts; the first one that holds counts."""

    def certain(self, spec: MergeSpec) -> Condition | None:
        """A condition over keys and sequences under which the merge changes the row for sure; None: there is none."""
        return None

    def updating(self, spec: MergeSpec) -> Condition | None:
        """When an event is written over its row; None: never."""
        return None

    def surely_changes(
        self, greatest: GreatestSequence | None, stored: Callable[[], GreatestSequence | None], spec: MergeSpec
    ) -> bool:
        """Whether a batch with upserts changes a row for sure, without reading any row.

        Args:
            greatest: sequence of its upserts, as far as it compares with statistics.
            stored: loads the greatest sequence in the target from the statistics of its files.
            spec: the sink's settings.
        """
        return False


def assignments(layout: Layout) -> Assignments:
    """What an event writes: the stored columns and, where it has a column of its own, the sequence."""
    written = [c.name for c in layout.stored]
    if layout.sequence_columns is None:
        written.append(names.SEQUENCE_COLUMN)
    return {name: name for name in written}


_UNNAMED = "insert-only"
"""Shape of a table without a sequence that records no shape."""


def without_sequence(spec: MergeSpec) -> str:
    """What is recorded with a table without a sequence: the shape; without a name it is insert-only."""
    is_named = spec.shape is not None and spec.shape.name != _UNNAMED
    return json.dumps({"columns": [], **({"shape": spec.shape.name} if spec.shape and is_named else {})})


def filled_as(recorded: str) -> str:
    """The shape in a table's recorded definition."""
    definition = json.loads(recorded)
    return str(definition.get("shape", _UNNAMED if definition == {"columns": []} else "changes"))
