"""A `foreachBatch` sink that merges change streams into Delta tables."""

from stream_merge.config import RetryPolicy
from stream_merge.errors import (
    CommitConflictError,
    CommitStateUnknownError,
    ConfigError,
    ContractError,
    MergeFailedError,
    StreamMergeError,
)
from stream_merge.metrics import MergeMetrics
from stream_merge.results import EventCounts, MergeResult
from stream_merge.sink import MergeSink

__all__ = [
    "CommitConflictError",
    "CommitStateUnknownError",
    "ConfigError",
    "ContractError",
    "EventCounts",
    "MergeFailedError",
    "MergeMetrics",
    "MergeResult",
    "MergeSink",
    "RetryPolicy",
    "StreamMergeError",
]
