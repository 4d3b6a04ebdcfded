"""Which engine merges where a sink may choose: as shipped, Spark or the driver always, or either at random."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import get_args
from unittest import mock

from stream_merge import MergeResult, MergeSink
from stream_merge.engines.costs import CostModel, Way, Work
from stream_merge.tables import create_table

AS_SHIPPED = "auto"
AT_RANDOM = "random"
REWRITE = "rewrite"
PARAMETER = "judged_by"
"""Of tests that run on several."""
WAYS: tuple[Way, ...] = get_args(Way)
ONE_IN_TWO = 0.5


def way(result: MergeResult) -> str:
    """How a batch was merged: "mark" or "rewrite" in the driver, or "spark"."""
    return result.mode or result.engine


def asked(way: str) -> str:
    """The setting `engine` by which a batch is merged in a way and in no other."""
    return "spark" if way == "spark" else "driver"


class Only(CostModel):
    """One engine has each batch that it may have.

    Args:
        way: by which it is known.
    """

    def __init__(self, way: str) -> None:
        super().__init__()
        self._is_spark = way == "spark"

    def seconds(self, engine: Way, work: Work) -> float:
        return 0.0 if (engine == "spark") == self._is_spark else 1.0


class SparkAlways(Only):
    """Spark does all that the driver may be spared."""

    remembers_in_driver = False

    def __init__(self) -> None:
        super().__init__("spark")


class DriverAlways(Only):
    """The driver has each batch that it may have."""

    def __init__(self) -> None:
        super().__init__("driver")


class EitherAtRandom(CostModel):
    """Each batch is anybody's; what is ineligible for an engine stays so."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng

    def seconds(self, engine: Way, work: Work) -> float:
        return self._rng.random()

    @property
    def remembers_in_driver(self) -> bool:  # type: ignore[override]
        return self._rng.random() < ONE_IN_TWO


class _Current:
    judge: Callable[[], CostModel] = CostModel


def under_test(sink: MergeSink, *, sleep: Callable[[float], None] | None = None) -> MergeSink:
    """The sink with the engines of the running test, and its waits."""
    if sleep is not None:
        sink._calls.sleep = sleep
    return with_costs(sink, _Current.judge())


def with_costs(sink: MergeSink, costs: CostModel) -> MergeSink:
    """The sink with another judge of its engines."""
    sink._calls.costs = costs
    return sink


@contextmanager
def judged(how: str, seed: str) -> Iterator[None]:
    """Let sinks that are given to `under_test` choose in this way; chance is one for all of them.

    With "rewrite" tables that sinks create have no deletion vectors.
    """
    rng = random.Random(seed)
    judges: dict[str, Callable[[], CostModel]] = {
        AS_SHIPPED: CostModel,
        "spark": SparkAlways,
        "mark": DriverAlways,
        REWRITE: DriverAlways,
        AT_RANDOM: lambda: EitherAtRandom(rng),
    }
    created = {"delta.enableDeletionVectors": str(how != REWRITE).lower()}
    _Current.judge = staticmethod(judges[how])
    try:
        with mock.patch.dict(create_table.NEW_TARGETS, created):
            yield
    finally:
        _Current.judge = CostModel
