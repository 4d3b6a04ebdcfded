"""What a source tells about a batch beside its events."""

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
"""Of `names.ORIGIN_COLUMN`."""


def _cannot_change() -> None:
    """What a source is asked whose batches are the same whenever they are read."""


Calls = Literal["every", "some", "routed"]
"""For which batches of its query a sink is called: each; perhaps not each, by a function of the user's own; those with
events for it, by `MergeSinks`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AtHand:
    """The events of a batch where they are in the driver already; the frame that comes with them holds the same."""

    events: pa.Table
    """The columns of the source, times in UTC."""
    sequence: tuple[str, ...]
    """Columns that order the events of a key."""
    delete: str
    """Column that tells deletes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Undecodable:
    """What came as events and could not be read as such: received and quarantined, as the ledger has it."""

    rows: DataFrame
    """Of `quarantine.SCHEMA`; committed to the quarantine before the target."""
    events: int
    """How many there are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MostUndecodable:
    """The share of a batch's records that may be undecodable; above it the format is set wrong rather than the data."""

    share: float
    setting: str
    """Where it is set."""

    def is_exceeded(self, undecodable: int, records: int) -> bool:
        """Whether a batch is to be refused; a small one never is."""
        return records >= _SHARE_COUNTS_FROM and undecodable > self.share * records

    def error(self, undecodable: int, records: int, *, target: str, batch_id: int, example: str) -> ContractError:
        """Of a batch that is refused."""
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
    """Passed along with the events of one batch; nothing of it reaches the target's rows."""

    recorded: Mapping[str, Any] = field(default_factory=dict)
    """Kept in the metadata of the target's commit, beside the sink's own fields: where the events came from."""
    at_hand: AtHand | None = None
    """The events once more, for an evaluation without Spark; None where they are not in the driver."""
    query: str = "direct"
    """Label of the caller in metrics, where no streaming query delivers the batch."""
    calls: Calls = "some"
    """For which batches of its query the sink is called."""
    expect_whole: Callable[[], None] = _cannot_change
    """Asked before the events are read and again when they have been, before anything is written; raises where they
    are not all of one state of the source."""
    undecodable: Undecodable | None = None
    """Not among the events; None where there is nothing of the kind."""
    column_defaults: Mapping[str, str | bytes] = field(default_factory=dict)
    """Column -> value that the source gave its rows when it added the column, as Spark casts it to the column's type.
    Where the batch adds the column to the target, the target's rows get it, too."""
    most_undecodable: MostUndecodable | None = None
    """Of the events; None: the source has looked itself, or any number may be."""
    began: float | None = None
    """`time.perf_counter()` when the source began to read the batch; None: with the call."""

    @property
    def undecodable_events(self) -> int:
        """How many of them there are."""
        return 0 if self.undecodable is None else self.undecodable.events
