"""Results of a call of the sink: every event has one fate, every second one phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

Outcome = Literal["committed", "skipped_duplicate", "no_change", "empty"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

FATES = ("quarantined", "collapsed", "stale", "unaffected", "inserted", "updated", "deleted")
"""Every received event has exactly one of these."""

UNDECODABLE = "undecodable"
REASONS = ("null_key", "null_sequence", "unavailable_value", UNDECODABLE)
"""Why an event is quarantined; one event can have several."""

CONFLICTS = (
    "ConcurrentWriteException",
    "ConcurrentAppendException",
    "ConcurrentDeleteReadException",
    "ConcurrentDeleteDeleteException",
    "MetadataChangedException",
    "ProtocolChangedException",
    "ConcurrentTransactionException",
    "DeltaConcurrentModificationException",
)
"""Delta's classes of lost optimistic commits (delta-spark 4.4.0, `delta.exceptions`); the last is their base."""

Mode = Literal["mark", "rewrite"]
ENGINES = ("driver", "spark")
"""Who runs a merge."""

TARGET_FAILED = "target_failed"
UNKNOWN_ROUTE = "unknown_route"
ROUTING_REASONS = (TARGET_FAILED, UNKNOWN_ROUTE)
"""Why `MergeSinks` quarantines events: their sink could not merge them, or there is no sink for them."""

Refusal = Literal["storage", "table_feature", "column", "shape", "filter", "schema_change", "memory", "cost", "failed"]
REFUSALS: tuple[Refusal, ...] = get_args(Refusal)
"""Why a batch under `engine='auto'` was merged by Spark, not in the driver."""

Phase = Literal[
    "read", "prepare", "quarantine", "tombstones", "plan", "merge", "recheck", "backoff", "maintenance", "other"
]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""Phases of a call; they add up to it. `read`: before the sink has the events, in a Kafka job fetching and decoding, in
`MergeSinks` the evaluation of the source."""

MaintenanceOutcome = Literal["done", "nothing", "no_memory", "lost", "failed"]
MAINTENANCE_OUTCOMES: tuple[MaintenanceOutcome, ...] = get_args(MaintenanceOutcome)
"""Result of a maintenance run: files were compacted or deleted; none was worth it; the driver lacks memory for a
compaction; another writer was faster; it failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MaintenanceRun:
    """One maintenance run on the target's files."""

    outcome: MaintenanceOutcome
    removed_files: int = 0
    """Data files that were compacted, or rewritten without removed rows."""
    added_files: int = 0
    """Data files written in their place."""
    vacuumed: bool = False
    """Whether files that the table no longer needs were deleted."""
    detail: str = ""
    """Why not, where it was not done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadDebt:
    """What merges in the driver cost readers of the target, until files are compacted."""

    rows: int
    """Rows in the target's files, deleted ones included, as far as the log has numbers."""
    deleted_rows: int
    """Those of them that are marked as deleted."""
    awaiting_files: int
    """Files that a compaction would rewrite now: small ones, and those that have lost many rows."""

    @property
    def deleted_share(self) -> float:
        """Share of deleted rows, 0 to 1."""
        return self.deleted_rows / self.rows if self.rows else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Tidied:
    """Maintenance of the files that an engine's merges leave, and their read debt."""

    maintenance: MaintenanceRun | None = None
    """None where nothing was due."""
    debt: ReadDebt | None = None
    """None where it is unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EventCounts:
    """The ledger of one micro-batch: `received` is the sum of the fates, exactly."""

    received: int = 0
    """Events in the batch."""
    quarantined: int = 0
    """Broke the contract; written to the quarantine table."""
    collapsed: int = 0
    """Older than another event of the same key in the same batch."""
    stale: int = 0
    """Refused because a remembered delete is newer, or undone for that reason by the re-check."""
    unaffected: int = 0
    """Deletes of absent keys, upserts that change nothing, and events older than the row (a scan would tell)."""
    inserted: int = 0
    """Made a new row."""
    updated: int = 0
    """Changed a row."""
    deleted: int = 0
    """Removed a row."""
    ties: int = 0
    """Outside the sum: same key, same sequence, but another operation or other stored columns than the one before."""
    with_unknown_fields: int = 0
    """Outside the sum: records of files with fields that the given schema lacks, which are left out."""

    def __post_init__(self) -> None:
        accounted = sum(getattr(self, fate) for fate in FATES)
        if accounted != self.received:
            msg = f"ledger does not add up: received={self.received}, fates sum to {accounted} in {self!r}"
            raise ValueError(msg)


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeResult:
    """The result of the last call of a sink."""

    target: str
    """Label of the sink, as in metrics."""
    query: str
    """Query name, else query id, else "direct"."""
    batch_id: int
    outcome: Outcome
    """`committed`; `skipped_duplicate`: this batch id was applied before; `no_change`: no row changed; `empty`."""
    engine: str
    """Which engine ran the merge, or would have."""
    version: int | None
    """Version of the target that this call's merge committed; None when it committed none."""
    attempts: int
    """Merge attempts, the first one included; 0 when none was needed."""
    conflicts: Mapping[str, int]
    """Lost optimistic commits by class."""
    plan: str
    """Why this engine and shape, in one sentence."""
    events: EventCounts
    mode: Mode | None = None
    """How the driver removed rows from their files: `mark` by deletion vectors, `rewrite` by writing the files again;
    None on Spark."""
    refusal: Refusal | None = None
    """Why the driver did not merge; None when it did, or was not to."""
    reasons: Mapping[str, int] = field(default_factory=dict)
    """Quarantined events by reason; one event can have several."""
    metrics: Mapping[str, int] = field(default_factory=dict)
    """Raw SQL metrics of Delta's MERGE, by Delta's own names; empty when no merge ran."""
    seconds: Mapping[Phase, float] = field(default_factory=dict)
    """Wall time by phase; adds up to the call."""
    maintenance: MaintenanceRun | None = None
    """The maintenance run at the end of the call; None where none was due."""
    read_debt: ReadDebt | None = None
    """What readers pay for merges in the driver; None where this call was none."""

    @property
    def duration_seconds(self) -> float:
        """Wall time of the whole call."""
        return sum(self.seconds.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedBatch:
    """The time that a call spent before it raised."""

    target: str
    query: str
    batch_id: int
    error: str
    """Class name of the error."""
    seconds: Mapping[Phase, float]

    @property
    def duration_seconds(self) -> float:
        """Wall time of the whole call."""
        return sum(self.seconds.values())
