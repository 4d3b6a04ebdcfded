"""What engines get and return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pyspark.sql import SparkSession

from stream_merge.engines.costs import CostModel, Work
from stream_merge.model.results import Mode, Refusal, Tidied
from stream_merge.model.settings import MergeSpec
from stream_merge.model.snapshot import CommitRecord, TableSnapshot
from stream_merge.shapes.batch import Batch
from stream_merge.shapes.layout import Layout
from stream_merge.tables.log.handle import LogHandle
from stream_merge.tables.side.late_events import Hits
from stream_merge.tables.side.tombstones import Tombstones
from stream_merge.tables.table import Tables


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitTag:
    """Marks of a commit, by which it is recognised again."""

    app_id: str | None
    """Application id of the commit's role; None writes no transaction id."""
    batch_id: int
    user_metadata: str
    """JSON for the commit's `userMetadata`, with a token that no other call uses."""
    token: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeReport:
    """What one merge did."""

    already_applied: bool = False
    """The transaction id shows that this batch was applied before; nothing was done."""
    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    version: int | None = None
    """Version that this merge committed; None when it committed none."""
    metrics: Mapping[str, int] = field(default_factory=dict)
    """Raw metrics by Delta's names; an engine leaves out what it does not count."""


class Commits(Protocol):
    """The commits of a table, where one of unknown outcome is searched."""

    def find(self) -> TableSnapshot | None:
        """The target, freshly loaded."""
        ...

    def history(self, *, newer_than: int, up_to: int) -> Sequence[CommitRecord]:
        """Its commits in a range of versions, newest first."""
        ...


class Merger(Commits, Protocol):
    """Merges one evaluated batch into its target. Raises what its library raises."""

    def merge(self, hits: Hits | None, tag: CommitTag) -> MergeReport:
        """Merge what no tombstone refuses, on a freshly loaded table, in one commit."""
        ...

    def repair(self, late: Hits, tag: CommitTag) -> MergeReport:
        """Delete the rows of refused keys whose stored sequence is older than the tombstone's, in one commit."""
        ...

    def counted_as(self, late: Hits, version: int) -> Mapping[str, int]:
        """How many of the refused keys a version's change feed shows as `inserted` and as `updated`."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeJob:
    """All that an engine is chosen by, and built from."""

    session: SparkSession
    spec: MergeSpec
    tables: Tables
    costs: CostModel
    layout: Layout
    batch: Batch
    """Evaluated, with at least one upsert or delete."""
    target: TableSnapshot
    """Prepared, as it was before this batch."""
    now_micros: int
    table: LogHandle | None = None
    """The target's log as the driver reads it; None where it does not."""
    log: LogHandle | None = None
    """The log of the tombstones' table; None where the driver does not read it."""
    log_snapshot: TableSnapshot | None = None
    """The tombstones' table; None where there is none, tombstones are off, or Spark was asked for."""
    work: Work = field(default_factory=lambda: Work(events=0, bytes=0, cores=1))
    inside_at: int | None = None
    """Version of the target in which no row of the batch's keys lies outside of `spec.target_filter`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The engine for one batch."""

    engine: str
    mode: Mode | None = None
    """None on Spark."""
    why: str
    how: str = ""
    """What the engine adds, with a separator."""
    refusal: Refusal | None = None
    """Why the driver does not merge; None when it does, or Spark was asked for."""

    def __str__(self) -> str:
        """The choice in one sentence."""
        return f"{self.engine}{f' ({self.mode})' if self.mode else ''}: {self.why}{self.how}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """An engine at work on one batch: its merger and its tombstones."""

    choice: Choice
    merger: Merger
    tombstones: Tombstones[Any] | None
    """None where tombstones are off."""
    in_driver: bool
    only_spark: bool
    """Whether the driver does nothing of it."""
    tidy: Callable[[], Tidied] | None = None
    """Compacts the files that its merges leave, after the batch, and raises nothing; None where they leave none."""
    release: Callable[[], None] = lambda: None
    """Releases its memory; harmless when repeated."""
