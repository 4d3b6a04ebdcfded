"""What the sink asks of an engine, and what it gets back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from stream_merge.model.snapshot import CommitRecord, TableSnapshot
from stream_merge.tables.side_commits import SideCommit
from stream_merge.tables.tombstones.hits import Hits


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
    """Where a commit of unknown fate is looked for."""

    def find(self) -> TableSnapshot | None:
        """The target, freshly loaded."""
        ...

    def history(self, *, newer_than: int, up_to: int) -> Sequence[CommitRecord]:
        """Its commits in a range of versions, newest first."""
        ...


H = TypeVar("H", bound=Hits)


class Engine(Commits, Protocol[H]):
    """Works on the target and on its tombstones for one evaluated batch. Raises what its library raises."""

    name: str

    def log_version(self) -> int | None:
        """Newest version of the tombstone log; None while there is none for this target."""
        ...

    def remember(self, commit: SideCommit) -> None:
        """Append the batch's deletes to the tombstone log, which is created before the first one."""
        ...

    def find_hits(self) -> H:
        """Find the tombstones of the batch's keys."""
        ...

    def find_late_hits(self, seen: H) -> H:
        """Find the tombstones of the upserts that were merged: all but those refused before."""
        ...

    def merge(self, hits: H, tag: CommitTag) -> MergeReport:
        """Merge what no tombstone refuses, on a freshly loaded table, in one commit."""
        ...

    def repair(self, late: H, tag: CommitTag) -> MergeReport:
        """Delete the rows of refused keys whose stored sequence is older than the tombstone's, in one commit."""
        ...

    def counted_as(self, late: H, version: int) -> Mapping[str, int]:
        """How many of the refused keys a version's change feed shows as `inserted` and as `updated`."""
        ...

    def forget(self, hits: H, commit: SideCommit) -> None:
        """Mark the tombstones of revived keys as overtaken; only after the target's commit."""
        ...

    def tidy(self) -> None:
        """Drop entries that no longer matter and pack small files, when there are many."""
        ...

    def no_hits(self) -> H:
        """What `find_hits` returns when there is nothing to find."""
        ...
