"""One call of a sink: what all of its steps share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pyspark.sql import SparkSession

from stream_merge.metrics.instruments import MergeMetrics
from stream_merge.microbatch.clock import PhaseClock
from stream_merge.model.settings import MergeSpec
from stream_merge.spark.identity import Caller
from stream_merge.tables.reader import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchCall:
    """Lives as long as the call."""

    spec: MergeSpec
    """What the sink was told."""
    batch_id: int
    caller: Caller
    """Who calls, and what its batch ids belong to."""
    clock: PhaseClock
    session: SparkSession
    """The sink's own."""
    store: Store
    """Reads the sink's tables."""
    metrics: MergeMetrics
    sleep: Callable[[float], None]
    """Waits so many seconds between two attempts."""
