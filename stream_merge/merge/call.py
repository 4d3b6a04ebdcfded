"""One call of a sink: what all of its steps share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from pyspark.sql import SparkSession

from stream_merge.engines.costs import CostModel
from stream_merge.merge.clock import Observed, PhaseClock
from stream_merge.merge.commit_tags import CommitTags
from stream_merge.merge.retrying import Retrying
from stream_merge.model.settings import MergeSpec
from stream_merge.model.snapshot import CommitRecord
from stream_merge.model.source_batch import Intake
from stream_merge.shapes.matching import Layouts
from stream_merge.spark.streaming import Caller
from stream_merge.tables.delivery import Delivery
from stream_merge.tables.last_commit import LastCommit
from stream_merge.tables.maintenance import MaintenancePlan
from stream_merge.tables.table import Tables


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchCall:
    """Lives as long as the call."""

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
