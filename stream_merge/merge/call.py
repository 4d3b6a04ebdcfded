"""One call of a sink: what all of its steps share, and the values that they pass on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from pyspark.sql import DataFrame, SparkSession

from stream_merge.engines.base import Choice, MergeReport
from stream_merge.engines.costs import CostModel
from stream_merge.merge.clock import Observed, PhaseClock
from stream_merge.merge.commit_tags import CommitTags
from stream_merge.merge.retrying import Retrying
from stream_merge.model.results import MaintenanceRun, ReadDebt, Tidied
from stream_merge.model.settings import MergeSpec
from stream_merge.model.snapshot import CommitRecord, TableSnapshot
from stream_merge.model.source_batch import Intake
from stream_merge.shapes.batch import Batch
from stream_merge.shapes.layout import Layout
from stream_merge.shapes.layouts import Layouts
from stream_merge.spark.streaming import Caller
from stream_merge.tables.applied_batches import Delivery
from stream_merge.tables.last_commit import LastCommit
from stream_merge.tables.maintenance import MaintenancePlan
from stream_merge.tables.side.late_events import Hits
from stream_merge.tables.table import Tables


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchCall:
    """What the steps of one call share."""

    spec: MergeSpec
    batch_id: int
    caller: Caller
    intake: Intake
    """Facts of the source about the batch beside its events."""
    delivery: Delivery | None
    """The batch as its query's checkpoint knows it; None outside of a query."""
    is_first: bool
    """Whether the sink has not merged any batch yet."""
    clock: PhaseClock
    observed: Observed
    now_micros: int
    """Start of the call, microseconds since the epoch."""
    session: SparkSession
    """The sink's private session."""
    source_confs: Mapping[str, str | None]
    """Confs that hold while the events are read, and not for the sink's tables."""
    tables: Tables
    layouts: Layouts
    costs: CostModel
    last_commit: LastCommit
    retrying: Retrying
    tags: CommitTags
    maintenance: MaintenancePlan | None
    """None: never."""
    resources: ExitStack
    """Released when the call is over."""
    register_writer: Callable[[], None]
    """Called before the sink's first write (`locks.enter`)."""

    def history(self, newer_than: int, up_to: int) -> Sequence[CommitRecord]:
        """The target's commits in a range of versions, newest first."""
        return self.tables.target.commits(newer_than=newer_than, up_to=up_to)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A batch that the target does not hold yet."""

    layout: Layout
    target: TableSnapshot | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Applied:
    """A batch that the target holds already, by its transaction id."""

    layout: Layout
    target: TableSnapshot


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """An evaluated batch, and the target that it is for."""

    layout: Layout
    target: TableSnapshot
    batch: Batch
    source: DataFrame
    """Frame that the events came from, with the source's columns."""
    inside_at: int | None = None
    """Version of the target in which no row of the batch's keys lies outside of the user's filter, if checked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Merged:
    """The outcome of a merge for the events of a batch."""

    report: MergeReport
    choice: Choice | None = None
    """None where no engine had to merge."""
    hits: Hits | None = None
    """Tombstones of the batch's keys; None where tombstones are off, or another call has merged."""
    refused: int = 0
    """Events that a tombstone refused before the merge."""
    repaired: Mapping[str, int] = field(default_factory=dict)
    """Rows that the re-check removed, in `total` and by their first fate."""
    repaired_version: int | None = None

    @property
    def is_in_the_target(self) -> bool:
        """Whether the batch is recorded in the target, by this call or by another one."""
        return self.report.already_applied or self.report.version is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """The outcome of a call for its batch."""

    batch: Batch | None = None
    """None where it was not evaluated, or no event could be decoded."""
    target: TableSnapshot | None = None
    """The target before the batch."""
    choice: Choice | None = None
    """None where nothing was left to merge."""
    merged: Merged = field(default_factory=lambda: Merged(report=MergeReport()))
    adds_columns: bool = False
    """Whether its merge may have added columns or fields to the target."""
    was_applied: bool = False
    """Whether the target held the batch before this call."""
    recorded_version: int | None = None
    """Version of the target that has the batch's transaction id alone."""
    tidy: Callable[[], Tidied] | None = None
    """Compacts the files that the engine's merges leave."""
    maintenance: MaintenanceRun | None = None
    """None where none was due."""
    read_debt: ReadDebt | None = None
    """None where the engine leaves none."""

    @property
    def version(self) -> int | None:
        """Version of the target that this call has committed."""
        committed = self.merged.report.version
        return self.recorded_version if committed is None else committed

    @property
    def versions(self) -> list[int]:
        """Versions of the target that this call has committed for the batch."""
        return [version for version in (self.version, self.merged.repaired_version) if version is not None]
