"""What observers of micro-batches see: traces and lineage are two of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pyspark.sql.types import StructType

from stream_merge.errors import StreamMergeError
from stream_merge.model.results import MergeResult, Phase


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """One micro-batch of one sink."""

    query: str
    """Label, as in metrics."""
    target: str
    """Label of the sink, as in metrics."""
    batch_id: int
    began_ns: int
    """When its source began to read, nanoseconds since the epoch."""
    location: str | None
    """Path or URI of the target table; None while only its catalog could tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """How a micro-batch ended: with a result or with an error."""

    ended_ns: int
    """Nanoseconds since the epoch."""
    phases: Sequence[tuple[Phase, int, int]]
    """Phase, begin and end in nanoseconds since the epoch, in order and without gaps; a phase can recur."""
    result: MergeResult | None = None
    schema: StructType | None = None
    """The target's columns behind the batch; None where no table was read."""
    error: Exception | None = None

    @property
    def error_code(self) -> str:
        """Stable code of the error, such as `TARGET_REPLACED`; else its class. Its text may quote what events hold."""
        code = self.error.code if isinstance(self.error, StreamMergeError) else None
        return code or type(self.error).__name__


class Observer(Protocol):
    """Called in the thread of each micro-batch. What it raises is logged and fails no batch."""

    def started(self, batch: MicroBatch) -> None:
        """The sink takes a batch."""

    def ended(self, batch: MicroBatch, end: End) -> None:
        """The batch is merged, or has failed."""
