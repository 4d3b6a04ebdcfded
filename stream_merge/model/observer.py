"""`Observer` of micro-batches: traces and lineage are two of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pyspark.sql.types import StructType

from stream_merge.errors import StreamMergeError
from stream_merge.model.results import MergeResult, Phase


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """One micro-batch of one sink; at its end with a result or an error. Times are nanoseconds since the epoch."""

    query: str
    target: str
    """Label of the sink, as in metrics."""
    batch_id: int
    began_ns: int
    """When the source began to read it."""
    location: str | None = None
    """Path or URI of the target table; None while only its catalog knows it."""
    phases: Sequence[tuple[Phase, int, int]] = ()
    """Phase, begin and end, in order and without gaps; a phase can recur. Empty before the end."""
    result: MergeResult | None = None
    schema: StructType | None = None
    """The target's columns behind the batch; None where no table was read."""
    error: Exception | None = None

    @property
    def error_code(self) -> str:
        """Stable code of the error, such as `TARGET_REPLACED`, else its class. The error's text may quote events."""
        code = self.error.code if isinstance(self.error, StreamMergeError) else None
        return code or type(self.error).__name__


class Observer(Protocol):
    """Called in the thread of each micro-batch. What it raises is logged and fails no batch."""

    def started(self, batch: MicroBatch) -> None:
        """The sink takes a batch."""

    def ended(self, batch: MicroBatch) -> None:
        """The batch is merged, or has failed."""
