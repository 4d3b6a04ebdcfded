"""Which engine has a job: by what each of them says, whatever engines there are. Needs no Spark: the job is not run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from stream_merge import ConfigError
from stream_merge.engines import choose
from stream_merge.engines.base import Choice, Execution, MergeJob, Way
from stream_merge.engines.costs import SHAPES, CostModel, Work
from stream_merge.model.results import Refusal
from stream_merge.tables.files.eligibility import Ineligible


class Given:
    """An engine that says what it was told to say."""

    def __init__(self, name: str, *, in_driver: bool, obstacle: str | None = None, gives_up: str | None = None) -> None:
        self.name = name
        self.in_driver = in_driver
        self._obstacle = obstacle
        self._gives_up = gives_up

    def way(self, job: MergeJob) -> Way:
        return "rewrite" if self.in_driver else "spark"

    def obstacle(self, job: MergeJob) -> Ineligible | None:
        return None if self._obstacle is None else Ineligible(reason="column", detail=self._obstacle)

    def start(self, job: MergeJob, why: str, refusal: Refusal | None) -> Execution | Ineligible:
        if self._gives_up is not None:
            return Ineligible(reason="memory", detail=self._gives_up)
        return Execution(
            choice=Choice(engine=self.name, why=why, refusal=refusal),
            merger=cast(Any, None),
            tombstones=None,
            in_driver=self.in_driver,
            only_spark=not self.in_driver,
        )


SPARK = Given("spark", in_driver=False)
WORK = Work(events=10, bytes=1_000_000, cores=2)


class Costs(CostModel):
    """Engines that take what they are said to take."""

    def __init__(self, **seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def seconds(self, engine: str, work: Work) -> float:
        return self._seconds[engine]


def started(
    monkeypatch: pytest.MonkeyPatch,
    *engines: Given,
    asked: str = "auto",
    work: Work = WORK,
    costs: CostModel | None = None,
) -> Execution:
    monkeypatch.setattr(choose, "ENGINES", engines)
    spec = SimpleNamespace(engine=asked, target="shop.orders", label="orders")
    job = cast(MergeJob, SimpleNamespace(spec=spec, work=work, costs=costs or CostModel()))
    return choose.start(job, choose.rank(job))


def test_the_cheapest_engine_has_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Given("driver", in_driver=True)
    small = started(monkeypatch, SPARK, driver).choice
    assert (small.engine, small.refusal) == ("driver", None)
    assert small.why.startswith("10 events, 1.0 MB in files that may hold their keys: spark about 1.0")

    large = started(monkeypatch, SPARK, driver, work=Work(events=10, bytes=1 << 40, cores=200)).choice
    assert (large.engine, large.refusal) == ("spark", "cost")


def test_the_next_engine_has_what_one_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it says so at once or after a look at files, memory and values."""
    unfit = Given("driver", in_driver=True, obstacle="column 'a' is a map")
    found = started(monkeypatch, unfit, SPARK).choice
    assert (found.engine, found.why, found.refusal) == ("spark", "column 'a' is a map", "column")

    found = started(monkeypatch, Given("driver", in_driver=True, gives_up="no memory"), SPARK).choice
    assert (found.engine, found.why, found.refusal) == ("spark", "no memory", "memory")


@pytest.mark.parametrize(("seconds", "refusal"), [(5.0, "cost"), (0.5, "column")])
def test_an_obstacle_is_a_reason_for_spark_where_the_job_would_go_there_else(
    monkeypatch: pytest.MonkeyPatch, seconds: float, refusal: Refusal
) -> None:
    unfit = Given("driver", in_driver=True, obstacle="column 'a' is a map" if refusal == "column" else None)

    found = started(monkeypatch, unfit, SPARK, costs=Costs(rewrite=seconds, spark=1.0)).choice

    assert (found.engine, found.refusal) == ("spark", refusal)
    assert ("about 1.00 s" in found.why) == (refusal != "column")


@pytest.mark.parametrize(
    ("engines", "reason"),
    [
        ((Given("driver", in_driver=True, obstacle="column 'a' is a map"), SPARK), "column 'a' is a map"),
        ((Given("driver", in_driver=True, gives_up="no memory"), SPARK), "no memory"),
        ((SPARK,), "there is no such engine"),
    ],
)
def test_an_engine_that_was_asked_for_is_never_replaced(
    monkeypatch: pytest.MonkeyPatch, engines: tuple[Given, ...], reason: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        started(monkeypatch, *engines, asked="driver")
    assert raised.value.code == "DRIVER_NOT_POSSIBLE"
    assert f"engine='driver' cannot merge this batch: {reason}; use engine='auto' or 'spark'" in str(raised.value)


def test_an_engine_can_be_taken_out_of_the_tuple(monkeypatch: pytest.MonkeyPatch) -> None:
    for asked in ("auto", "spark"):
        found = started(monkeypatch, SPARK, asked=asked)
        assert (found.choice.engine, found.choice.refusal, found.only_spark) == ("spark", None, True)


def test_spark_takes_over_what_fails_in_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not where the engine was asked for, and not what Spark itself does alone."""
    driver, lost = Given("driver", in_driver=True), RuntimeError("out of luck")
    given_back: list[str] = []
    spec = SimpleNamespace(engine="auto", target="shop.orders", label="orders")
    monkeypatch.setattr(choose, "ENGINES", (driver, SPARK))
    monkeypatch.setattr(choose, "replace", lambda job, **_: job)
    job = cast(MergeJob, SimpleNamespace(spec=spec, work=WORK, costs=CostModel()))
    failed = Execution(
        choice=Choice(engine="driver", why="cheaper"),
        merger=cast(Any, None),
        tombstones=None,
        in_driver=True,
        only_spark=False,
        release=lambda: given_back.append("memory"),
    )

    found = choose.take_over(job, failed, lost)
    assert found is not None
    assert str(found.choice) == "spark: the driver failed (out of luck), nothing was committed"
    assert (found.choice.refusal, given_back) == ("failed", ["memory"])
    assert choose.take_over(job, found, lost) is None
    spec.engine = "driver"
    assert choose.take_over(job, failed, lost) is None


def test_what_an_engine_leaves_to_do_afterwards_is_part_of_its_cost() -> None:
    """The mean over its merges: most have nothing to do, one in so many has much. It fades while another one merges."""
    costs, work = CostModel(), Work(events=1_000, bytes=1 << 20, cores=2)
    before = costs.seconds("mark", work)
    for number in range(32):
        costs.learn_maintenance("mark", 0.8 if number % 8 == 0 else 0.0)

    assert costs.seconds("mark", work) == pytest.approx(before + 0.1)
    for _ in range(100):
        costs.learn("rewrite", work, SHAPES["rewrite"].seconds(work))
    assert costs.seconds("mark", work) == pytest.approx(before, abs=0.01)
