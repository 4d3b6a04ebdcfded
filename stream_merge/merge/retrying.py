"""The attempts of one batch: repeated when another writer was faster, and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from stream_merge.errors import CommitConflictError
from stream_merge.merge.clock import PhaseClock
from stream_merge.metrics.instruments import MergeMetrics
from stream_merge.model.results import EventCounts
from stream_merge.model.settings import RetryPolicy
from stream_merge.tables import backoff

T = TypeVar("T")
Ledger = tuple[EventCounts, Mapping[str, int]]
"""Fates of a batch's events, and quarantined events by reason."""


@dataclass(kw_only=True, eq=False)
class Retrying:
    """The attempts of one batch: of the merge and of the commits to side tables."""

    policy: RetryPolicy
    clock: PhaseClock
    metrics: MergeMetrics
    query: str
    target: str
    sleep: Callable[[float], None]
    merges: int = 0
    """Attempts of the merge."""
    conflicts: Counter[str] = field(default_factory=Counter)
    """Lost commits by Delta's class."""
    landed: bool = False
    """Whether the target is known to hold what the call had to merge; False also where nobody knows yet."""
    _ledger: Callable[[], Ledger] | None = None

    def has_landed(self, ledger: Callable[[], Ledger]) -> None:
        """Record that the target holds what the call had to merge; the ledger is computed if the call fails later."""
        self.landed, self._ledger = True, ledger

    def count_landed(self) -> None:
        """Count the events of a batch whose call fails after its commit: delivered again, it counts as applied."""
        if self._ledger is not None:
            self.metrics.observe_events(self.query, self.target, *self._ledger())

    def run(self, attempt: Callable[[int], T]) -> T:
        """Run an attempt, which gets its number, until it wins or the policy is exhausted."""
        try:
            return backoff.run(attempt, self.policy, sleep=self._wait, on_conflict=self._lost)
        except CommitConflictError:
            self.metrics.exhausted(self.query, self.target)
            raise

    def count_merge(self, number: int) -> None:
        """Count an attempt of the merge."""
        self.merges = number
        self.metrics.attempt(self.query, self.target)

    def _lost(self, error: CommitConflictError) -> None:
        self.conflicts[error.conflict] += 1
        self.metrics.conflict(self.query, self.target, error.conflict)

    def _wait(self, seconds: float) -> None:
        with self.clock.phase("backoff"):
            self.sleep(seconds)
        self.metrics.backoff(self.query, self.target, seconds)
