"""One call of a sink: what all of its steps share, and what they hand to each other."""

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
from stream_merge.shapes.matching import Layouts
from stream_merge.spark.identity import Caller
from stream_merge.tables.delivery import Delivery
from stream_merge.tables.last_commit import LastCommit
from stream_merge.tables.maintenance import MaintenancePlan
from stream_merge.tables.side.judging import Hits
from stream_merge.tables.table import Tables


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchCall:
    """What the steps of one call share."""

    spec: MergeSpec
    """What the sink was told."""
    batch_id: int
    caller: Caller
    """Who calls, and what its batch ids belong to."""
    intake: Intake
    """What the source tells about the batch beside its events."""
    delivery: Delivery | None
    """The batch as its query's checkpoint knows it; None outside of a query."""
    is_first: bool
    """Whether the sink has not merged any batch before."""
    clock: PhaseClock
    observed: Observed
    """The batch before the sink's observers."""
    now_micros: int
    """When the call began, microseconds since the epoch."""
    session: SparkSession
    """The sink's own."""
    source_confs: Mapping[str, str | None]
    """Confs that hold while the events are read, and not for the sink's tables."""
    tables: Tables
    """The sink's: target, tombstones, quarantine."""
    layouts: Layouts
    """How the sink's batches map onto the target."""
    costs: CostModel
    """What the sink knows of its engines."""
    last_commit: LastCommit
    """Of the sink, with which the batch before ended."""
    retrying: Retrying
    tags: CommitTags
    """Of its commits."""
    maintenance: MaintenancePlan | None
    """When the target is maintained; None: never."""
    resources: ExitStack
    """Given back when the call is over."""
    register_writer: Callable[[], None]
    """To be asked before the sink's first write (`locks.enter`)."""

    def history(self, newer_than: int, up_to: int) -> Sequence[CommitRecord]:
        """The target's commits in a range of versions, newest first."""
        return self.tables.target.commits(newer_than=newer_than, up_to=up_to)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A batch that the target does not hold yet."""

    layout: Layout
    target: TableSnapshot | None
    """None while there is none."""


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
    """What the events came from, with the source's columns."""
    inside_at: int | None = None
    """Version of the target in which no row of the batch's keys lies outside of the user's filter; None where nobody
    has looked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Merged:
    """What became of the events of a batch."""

    report: MergeReport
    """What the merge did."""
    choice: Choice | None = None
    """Which engine merged; None where none had to."""
    hits: Hits | None = None
    """The tombstones of the batch's keys; None where deletes are not remembered, or somebody else has merged."""
    refused: int = 0
    """Events that a tombstone refused before the merge."""
    repaired: Mapping[str, int] = field(default_factory=dict)
    """Rows that the re-check removed, in `total` and by what they had been counted as."""
    repaired_version: int | None = None
    """Version of the target that the re-check has committed."""

    @property
    def is_in_the_target(self) -> bool:
        """Whether the batch is recorded there, by this call or by another one."""
        return self.report.already_applied or self.report.version is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """What became of a batch."""

    batch: Batch | None = None
    """None where it did not have to be evaluated, or no event could be read."""
    target: TableSnapshot | None = None
    """As it was before."""
    choice: Choice | None = None
    """None where nothing was left to merge."""
    merged: Merged = field(default_factory=lambda: Merged(report=MergeReport()))
    adds_columns: bool = False
    """Whether its merge may have added columns or fields to the target."""
    was_applied: bool = False
    """Whether the target held the batch before this call."""
    recorded_version: int | None = None
    """Of the target, that has the batch's transaction id alone."""
    tidy: Callable[[], Tidied] | None = None
    """What the engine that merged does about the files that it leaves."""
    maintenance: MaintenanceRun | None = None
    """Of the target's files, after all else; None where none was due."""
    read_debt: ReadDebt | None = None
    """Of the target, after maintenance; None where the engine leaves none."""

    @property
    def version(self) -> int | None:
        """Version of the target that this call has committed."""
        committed = self.merged.report.version
        return self.recorded_version if committed is None else committed

    @property
    def versions(self) -> list[int]:
        """All of the target that this call has committed for the batch."""
        return [version for version in (self.version, self.merged.repaired_version) if version is not None]
