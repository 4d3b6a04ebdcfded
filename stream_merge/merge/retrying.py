"""The attempts of one batch: tried again when another writer was faster, waited for, and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TypeVar

from stream_merge.errors import CommitConflictError
from stream_merge.merge.clock import PhaseClock
from stream_merge.metrics.instruments import MergeMetrics
from stream_merge.model.results import EventCounts
from stream_merge.model.settings import RetryPolicy
from stream_merge.tables import retry

T = TypeVar("T")
Ledger = tuple[EventCounts, Mapping[str, int]]
"""The fates of a batch's events, and why some were quarantined."""


class Retrying:
    """The attempts of one batch: of the merge and of the commits to side tables."""

    def __init__(
        self,
        policy: RetryPolicy,
        *,
        clock: PhaseClock,
        metrics: MergeMetrics,
        query: str,
        target: str,
        sleep: Callable[[float], None],
    ) -> None:
        self._policy = policy
        self._clock = clock
        self._metrics = metrics
        self._query = query
        self._target = target
        self._sleep = sleep
        self.merges = 0
        """Retrying of the merge."""
        self.conflicts: Counter[str] = Counter()
        """Lost commits by Delta's class."""
        self.landed = False
        """Whether the target is known to hold what the call had to merge; False also where nobody knows yet."""
        self._ledger: Callable[[], Ledger] | None = None

    def has_landed(self, ledger: Callable[[], Ledger]) -> None:
        """The target holds what the call had to merge; what became of the events is asked where the call fails."""
        self.landed, self._ledger = True, ledger

    def count_landed(self) -> None:
        """Count the events of a batch whose call fails behind its commit: delivered again, it counts as applied."""
        if self._ledger is not None:
            self._metrics.observe_events(self._query, self._target, *self._ledger())

    def run(self, attempt: Callable[[int], T]) -> T:
        """Run an attempt, which gets its number, until it wins or the policy is exhausted."""
        try:
            return retry.run(attempt, self._policy, sleep=self._wait, on_conflict=self._lost)
        except CommitConflictError:
            self._metrics.exhausted(self._query, self._target)
            raise

    def count_merge(self, number: int) -> None:
        """Count an attempt of the merge."""
        self.merges = number
        self._metrics.attempt(self._query, self._target)

    def _lost(self, error: CommitConflictError) -> None:
        self.conflicts[error.conflict] += 1
        self._metrics.conflict(self._query, self._target, error.conflict)

    def _wait(self, seconds: float) -> None:
        with self._clock.phase("backoff"):
            self._sleep(seconds)
        self._metrics.backoff(self._query, self._target, seconds)
