"""A `foreachBatch` sink that merges change streams into Delta tables."""

from stream_merge.errors import (
    CommitConflictError,
    CommitStateUnknownError,
    ConfigError,
    ContractError,
    MergeFailedError,
    RoutedMergeError,
    StreamMergeError,
)
from stream_merge.metrics.instruments import MergeMetrics
from stream_merge.model.results import EventCounts, MergeResult
from stream_merge.model.settings import Create, Driver, Maintenance, RetryPolicy, Tombstones
from stream_merge.router import MergeSinks
from stream_merge.sink import MergeSink
from stream_merge.sources.files import read_files

__all__ = [
    "CommitConflictError",
    "CommitStateUnknownError",
    "ConfigError",
    "ContractError",
    "Create",
    "Driver",
    "EventCounts",
    "Maintenance",
    "MergeFailedError",
    "MergeMetrics",
    "MergeResult",
    "MergeSink",
    "MergeSinks",
    "RetryPolicy",
    "RoutedMergeError",
    "StreamMergeError",
    "Tombstones",
    "read_files",
]
