"""What a source passes along with the events of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import BinaryType, IntegerType, LongType, StringType, StructField, StructType, TimestampType

from stream_merge.errors import ContractError
from stream_merge.model.results import UNDECODABLE

ORIGIN_TYPE = StructType(
    [
        StructField("topic", StringType()),
        StructField("partition", IntegerType()),
        StructField("offset", LongType()),
        StructField("timestamp", TimestampType()),
        StructField("raw_key", BinaryType()),
        StructField("raw_value", BinaryType()),
    ]
)
"""Type of `names.ORIGIN_COLUMN`."""


def _cannot_change() -> None:
    """`expect_whole` of a source whose batches never change."""


Calls = Literal["every", "some", "routed"]
"""For which batches of its query a sink is called: each; some, by a user's function; those with events for it, by
`MergeSinks`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AtHand:
    """The events of a batch that are in the driver already; the frame with them has the same."""

    events: pa.Table
    """The columns of the source, times in UTC."""
    sequence: tuple[str, ...]
    """Columns of the sequence."""
    delete: str
    """Boolean column: deletes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Undecodable:
    """Records that could not be decoded: received and quarantined in the ledger."""

    rows: DataFrame
    """Rows of `quarantine.SCHEMA`; committed before the target."""
    events: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MostUndecodable:
    """The largest share of undecodable records in a batch; above it the format is wrong rather than the data."""

    share: float
    setting: str
    """Name of the setting."""

    def is_exceeded(self, undecodable: int, records: int) -> bool:
        """Whether a batch is refused; a small one never is."""
        return records >= _SHARE_COUNTS_FROM and undecodable > self.share * records

    def error(self, undecodable: int, records: int, *, target: str, batch_id: int, example: str) -> ContractError:
        """The error of a batch that is refused."""
        msg = (
            f"[UNDECODABLE_RECORDS] {undecodable} of {records} records of batch {batch_id} for {target!r} are"
            f" undecodable, more than {self.setting} ({self.share:g}); correct the format or the schema, or raise the"
            f" limit{example}"
        )
        return ContractError(msg, reasons={UNDECODABLE: undecodable}, target=target, batch_id=batch_id)


_SHARE_COUNTS_FROM = 1_000
"""Records of a batch; in smaller ones a few bad records are a large share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Intake:
    """What comes along with the events of one batch; nothing of it is stored in rows."""

    recorded: Mapping[str, Any] = field(default_factory=dict)
    """Written into the metadata of the target's commit: where the events came from."""
    at_hand: AtHand | None = None
    """The events in the driver, for an evaluation without Spark; None where they are not there."""
    query: str = "direct"
    """Label of the caller in metrics, where no streaming query delivers the batch."""
    calls: Calls = "some"
    """For which batches of its query the sink is called."""
    expect_whole: Callable[[], None] = _cannot_change
    """Called before the events are read and again afterwards, before anything is written; raises where they are not all
    of one state of the source."""
    undecodable: Undecodable | None = None
    """Undecodable records, which are not among the events."""
    column_defaults: Mapping[str, str | bytes] = field(default_factory=dict)
    """Column -> value that the source gave its rows when it added the column; where the batch adds the column to the
    target, the target's rows get it, too."""
    most_undecodable: MostUndecodable | None = None
    """Limit for the events; None: the source has checked it, or there is none."""
    began: float | None = None
    """`time.perf_counter()` when the source began to read the batch; None: with the call."""

    @property
    def undecodable_events(self) -> int:
        """Number of undecodable records."""
        return 0 if self.undecodable is None else self.undecodable.events
