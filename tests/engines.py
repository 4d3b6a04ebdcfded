"""Which engine merges where a sink may choose: as shipped, Spark always, or either at random from batch to batch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from stream_merge import MergeSink
from stream_merge.engines import ENGINES
from stream_merge.engines.costs import CostModel, Work

AS_SHIPPED = "auto"
AT_RANDOM = "random"
ON_READ = "merge_on_read"
PARAMETER = "judged_by"
"""Of tests that run on several."""
NAMES = tuple(engine.name for engine in ENGINES)
"""Of all engines."""
ONE_IN_TWO = 0.5


class Only(CostModel):
    """One engine has each batch that it may have."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def seconds(self, engine: str, work: Work) -> float:
        return 0.0 if engine == self._name else 1.0


class SparkAlways(Only):
    """Spark does all that delta-rs may be spared."""

    remembers_natively = False

    def __init__(self) -> None:
        super().__init__("spark")


class OnReadAlways(Only):
    """Merge-on-read has each batch that it may have."""

    def __init__(self) -> None:
        super().__init__("merge_on_read")


class EitherAtRandom(CostModel):
    """Each batch is anybody's; what is ineligible for an engine stays so."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng

    def seconds(self, engine: str, work: Work) -> float:
        return self._rng.random()

    @property
    def remembers_natively(self) -> bool:  # type: ignore[override]
        return self._rng.random() < ONE_IN_TWO


class _Current:
    judge: Callable[[], CostModel] = CostModel


def under_test(sink: MergeSink, *, sleep: Callable[[float], None] | None = None) -> MergeSink:
    """The sink with the engines of the running test, and its waits."""
    return sink._under(costs=_Current.judge(), sleep=sleep)


@contextmanager
def judged(how: str, seed: str) -> Iterator[None]:
    """Let sinks that are given to `under_test` choose in this way; chance is one for all of them."""
    rng = random.Random(seed)
    judges: dict[str, Callable[[], CostModel]] = {
        AS_SHIPPED: CostModel,
        "spark": SparkAlways,
        ON_READ: OnReadAlways,
        AT_RANDOM: lambda: EitherAtRandom(rng),
    }
    _Current.judge = staticmethod(judges[how])
    try:
        yield
    finally:
        _Current.judge = CostModel
