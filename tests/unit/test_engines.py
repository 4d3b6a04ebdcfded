"""Which engine has a job. Needs no Spark: the job is not run."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stream_merge import ConfigError
from stream_merge.engines import choose
from stream_merge.engines.base import Choice, Execution, MergeJob
from stream_merge.engines.costs import SHAPES, CostModel, Work
from stream_merge.engines.driver import engine as driver
from stream_merge.engines.spark import engine as spark
from stream_merge.model.results import Refusal
from stream_merge.tables.files.eligibility import Ineligible

WORK = Work(events=10, bytes=1_000_000, cores=2)


def execution(engine: str, why: str, refusal: Refusal | None = None, **more: Any) -> Execution:
    in_driver = engine == "driver"
    return Execution(
        choice=Choice(engine=engine, why=why, refusal=refusal),
        merger=cast(Any, None),
        tombstones=None,
        in_driver=in_driver,
        only_spark=not in_driver,
        **more,
    )


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Execution]:
    """Starts the engine of a job: with an obstacle that the logs tell, or one that files, memory or values do."""

    def start(
        *, obstacle: str | None = None, gives_up: str | None = None, asked: str = "auto", work: Work = WORK
    ) -> Execution:
        told = None if obstacle is None else Ineligible(reason="column", detail=obstacle)
        late = None if gives_up is None else Ineligible(reason="memory", detail=gives_up)
        monkeypatch.setattr(driver, "mode", lambda _: "rewrite")
        monkeypatch.setattr(driver, "obstacle", lambda _: told)
        monkeypatch.setattr(driver, "start", lambda _, why: late or execution("driver", why))
        monkeypatch.setattr(spark, "start", lambda _, why, refusal: execution("spark", why, refusal))
        spec = SimpleNamespace(engine=asked, target="shop.orders", label="orders")
        job = cast(MergeJob, SimpleNamespace(spec=spec, work=work, costs=CostModel()))
        return choose.start(job, choose.prefer(job))

    return start


def test_the_cheaper_engine_has_the_job(started: Callable[..., Execution]) -> None:
    small = started().choice
    assert (small.engine, small.refusal) == ("driver", None)
    assert small.why.startswith("10 events, 1.0 MB in files that may hold their keys: driver about 0.0")

    large = started(work=Work(events=10, bytes=1 << 40, cores=200)).choice
    assert (large.engine, large.refusal) == ("spark", "cost")


def test_spark_has_what_the_driver_cannot_merge(started: Callable[..., Execution]) -> None:
    """Whether logs say so, or files, memory and values."""
    told = started(obstacle="column 'a' is a map").choice
    assert (told.engine, told.why, told.refusal) == ("spark", "column 'a' is a map", "column")

    late = started(gives_up="no memory").choice
    assert (late.engine, late.why, late.refusal) == ("spark", "no memory", "memory")


@pytest.mark.parametrize("why", [{"obstacle": "column 'a' is a map"}, {"gives_up": "no memory"}])
def test_an_engine_that_was_asked_for_is_never_replaced(started: Callable[..., Execution], why: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as raised:
        started(asked="driver", **why)
    assert raised.value.code == "DRIVER_NOT_POSSIBLE"
    (reason,) = why.values()
    assert f"engine='driver' cannot merge this batch: {reason}; use 'auto' or 'spark'" in str(raised.value)


def test_spark_that_was_asked_for_has_any_job(started: Callable[..., Execution]) -> None:
    assert str(started(asked="spark").choice) == "spark: asked for"


def test_spark_merges_what_fails_in_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not where the engine was asked for, and not what Spark itself does alone."""
    lost = RuntimeError("out of luck")
    given_back: list[str] = []
    spec = SimpleNamespace(engine="auto", target="shop.orders", label="orders")
    monkeypatch.setattr(spark, "start", lambda _, why, refusal: execution("spark", why, refusal))
    monkeypatch.setattr(choose, "replace", lambda job, **_: job)
    job = cast(MergeJob, SimpleNamespace(spec=spec, work=WORK, costs=CostModel()))
    failed = execution("driver", "cheaper", release=lambda: given_back.append("memory"))

    found = choose.fall_back(job, failed, lost)
    assert found is not None
    assert str(found.choice) == "spark: the driver failed (out of luck), nothing was committed"
    assert (found.choice.refusal, given_back) == ("failed", ["memory"])
    assert choose.fall_back(job, found, lost) is None
    spec.engine = "driver"
    assert choose.fall_back(job, failed, lost) is None


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
