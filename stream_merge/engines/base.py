"""What the sink asks of an engine, and what it gets back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pyspark.sql import Column, DataFrame

from stream_merge.layout import Layout
from stream_merge.plan import KeyBounds


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitTag:
    """What a commit carries so that it can be recognised again."""

    app_id: str | None
    """Application id of the commit's role; None writes no transaction id."""
    batch_id: int
    user_metadata: str
    """JSON for the commit's `userMetadata`, with a token that no other call uses."""
    token: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeRequest:
    """One merge: at most one event per key, all valid, none refused by a tombstone."""

    events: DataFrame
    """Stored columns in the target's names and types, `__stream_merge_sequence`, `__stream_merge_delete`."""
    layout: Layout
    bounds: KeyBounds
    has_upserts: bool
    has_deletes: bool
    schema_evolution: bool
    tag: CommitTag


@dataclass(frozen=True, kw_only=True, slots=True)
class RepairRequest:
    """Remove rows that a delete remembered meanwhile should have kept out."""

    refused: DataFrame
    """Keys with, as `__stream_merge_sequence`, the tombstone's sequence; one row per key."""
    layout: Layout
    bounds: KeyBounds
    tag: CommitTag


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
    """Raw metrics by the engine's names."""


class Engine(Protocol):
    """Executes merges. Raises what Delta raises; the sink translates it."""

    name: str

    def merge(self, request: MergeRequest) -> MergeReport:
        """Run one attempt on a freshly loaded table, in one commit."""
        ...

    def repair(self, request: RepairRequest) -> MergeReport:
        """Delete the rows whose stored sequence is older than the tombstone's, in one commit."""
        ...

    def delete_matched(self, table: str, keys: Sequence[str], source: DataFrame, condition: Column) -> None:
        """Delete rows of a side table (alias `t`) that match the source (alias `s`) by key and condition.

        A lost commit is left for another time.
        """
        ...
