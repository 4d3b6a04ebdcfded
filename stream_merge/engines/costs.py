"""What a merge would cost on each engine: estimates that the job's own batches correct."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

Way = Literal["mark", "rewrite", "spark"]
"""What a merge's time is estimated by: the driver's mode, or Spark."""

DRIVER_EVENTS = 100_000
DRIVER_BYTES = 16 << 20
"""Up to these sizes a batch is evaluated in the driver."""


_ROW_BYTES = 256
"""Bytes of a row where a table's number of rows is unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Size of a merge, as far as it is known before."""

    events: int
    bytes: int
    """Bytes of the files within the bounds of the keys."""
    rows: int = 0
    """Rows in them; 0 if unknown."""
    cores: int
    """Task slots of the cluster."""

    @property
    def row_bytes(self) -> float:
        """Average bytes of a row in the files."""
        return max(self.bytes / self.rows, 1) if self.rows else _ROW_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """How an engine's time grows, on a core of speed 1."""

    fixed: float
    per_event: float
    per_byte: float
    spreads: bool
    """Whether the work is shared among the cluster's cores."""

    def seconds(self, work: Work) -> float:
        """Estimate before the corrections of `CostModel`."""
        growing = work.events * self.per_event + work.bytes * self.per_byte
        return self.fixed + (growing / max(1, work.cores) if self.spreads else growing)


SHAPES: dict[Way, Shape] = {
    "mark": Shape(fixed=0.05, per_event=6e-6, per_byte=1e-9, spreads=False),
    "rewrite": Shape(fixed=0.05, per_event=6e-6, per_byte=7e-9, spreads=False),
    "spark": Shape(fixed=1.0, per_event=1e-5, per_byte=6e-8, spreads=True),
}
"""Only the proportions matter: how fast the machine is, a job learns from its first batches.

Fitted to merges of 1,000 to 1 M events into 20 k to 20 M rows on 2 cores (Spark 4.2).
"""

_DELETION_VECTORS_FIXED = 1.1
_REWRITE_SHARE = 0.45
"""Share of a Spark merge's time per byte that goes into rewriting unchanged rows, which deletion vectors spare."""


def favours_deletion_vectors(work: Work) -> bool:
    """Whether a Spark merge is cheaper when it marks rows as deleted than when it writes their files again."""
    rewriting = work.bytes * SHAPES["spark"].per_byte * _REWRITE_SHARE / max(1, work.cores)
    return rewriting > _DELETION_VECTORS_FIXED


_WEIGHT = 0.3
"""Share of the newest batch in what a job has learnt."""
_FADING = 0.05
"""How fast an engine that is not used comes to be judged like the other one."""
_LIMITS = (0.02, 50.0)
_ROUNDS = 64
"""The mean of maintenance is over about so many merges: most of them have none to do, a few much."""


class CostModel:
    """Estimates of one sink, corrected by how long its merges took."""

    remembers_in_driver: bool = True
    """Whether the driver, where it can, writes the tombstones of a batch that Spark merges."""

    def __init__(self) -> None:
        self.last_events: int | None = None
        """Size of the batch before, received events; None at first."""
        self._warm: set[Way] = set()
        self._factors: dict[Way, float] = {}
        self._maintenance: dict[Way, float] = {}
        """Mean seconds per merge that an engine needs for the files that its merges leave."""
        self._rounds: Counter[Way] = Counter()

    def expect(self, events: int) -> None:
        """Set the size of the batch before, if there was none yet."""
        if self.last_events is None:
            self.last_events = events

    def seconds(self, engine: Way, work: Work) -> float:
        """Estimated seconds of a merge; an engine not yet used is as much off as the other one."""
        factor = self._factors.get(engine)
        if factor is None:
            factor = next(iter(self._factors.values()), 1.0)
        return factor * SHAPES[engine].seconds(work) + self._maintenance.get(engine, 0.0)

    def learn(self, engine: Way, work: Work, seconds: float) -> None:
        """Record how long a merge took."""
        if engine not in self._warm:
            self._warm.add(engine)  # the first merge of an engine pays for its start
            return
        low, high = _LIMITS
        observed = min(high, max(low, seconds / SHAPES[engine].seconds(work)))
        before = self._factors.get(engine, observed)
        self._factors[engine] = before ** (1 - _WEIGHT) * observed**_WEIGHT
        for other in self._factors.keys() - {engine}:
            # What was learnt long ago fades, so that an engine gets another chance.
            self._factors[other] = self._factors[other] ** (1 - _FADING) * self._factors[engine] ** _FADING
        for other in self._maintenance.keys() - {engine}:
            self._maintenance[other] *= 1 - _FADING

    def learn_maintenance(self, engine: Way, seconds: float) -> None:
        """Record how long compaction took after an engine's merge."""
        self._rounds[engine] += 1
        before = self._maintenance.get(engine, 0.0)
        self._maintenance[engine] = before + (seconds - before) / min(self._rounds[engine], _ROUNDS)
