"""When a process should be restarted, and when its queries are ready."""

from __future__ import annotations

import pytest
from py4j.protocol import Py4JError

from stream_merge.metrics import health as module
from stream_merge.metrics.health import ENDED, RUNS, Health, _Followed
from stream_merge.spark.streaming import Look


def look(*, waits: bool = False, progress: str | None = None, seconds: float = 0.0) -> Look:
    return Look(run_id="r", name="orders", is_waiting=waits, progress=progress, trigger_seconds=seconds)


def test_a_first_trigger_of_half_an_hour_is_a_start() -> None:
    query = _Followed()
    for now in range(0, 1800, 2):
        query.update(look(), now)

    assert query.state(1800) == "starting"


def test_a_query_without_events_is_ready() -> None:
    query = _Followed()
    query.update(look(waits=True), 0)

    assert query.state(2) == "ready"


def test_a_trigger_that_is_longer_than_the_newest_ones_explain_is_not_ready() -> None:
    query = _Followed()
    query.update(look(progress="t1", seconds=200), 0)
    query.update(look(progress="t1", seconds=200), 590)

    assert query.state(600) == "ready"
    assert query.state(601) == "in one trigger for 601 s"
    query.update(look(progress="t2", seconds=1), 700)
    assert query.state(700) == "ready"


def test_short_triggers_may_be_followed_by_one_of_five_minutes() -> None:
    query = _Followed()
    query.update(look(progress="t1", seconds=0.2), 0)

    assert query.state(300) == "ready"
    assert query.state(301) == "in one trigger for 301 s"


class Context:
    _jsc = object()


class Session:
    sparkContext = Context()  # noqa: N815, as Spark calls it


def followed(monkeypatch: pytest.MonkeyPatch, health: Health, states: dict[str, str], *looks: Look) -> Health:
    """After one look, in this thread."""
    monkeypatch.setattr(module, "look_at_queries", lambda _: list(looks))
    monkeypatch.setattr(module.threading.Thread, "start", lambda _: None)
    health.follow(Session(), lambda: states)  # type: ignore[arg-type]
    over = iter([False, True])
    monkeypatch.setattr(health._over, "wait", lambda _: next(over))
    health._run(Session())  # type: ignore[arg-type]
    return health


def test_each_query_of_a_job_has_to_be_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    states = {"orders": RUNS, "items": "waiting for another attempt", "old": ENDED}
    health = followed(monkeypatch, Health(), states, look(waits=True))

    assert health.ready() == (False, "orders: ready\nitems: waiting for another attempt\nold: ended")
    states["items"] = ENDED
    assert health.ready()[0]
    states["items"] = "failed"
    assert not health.ready()[0]
    assert health.problem() is None  # the others go on: a restart would interrupt them


def test_a_jvm_without_an_answer_is_a_reason_for_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    health = followed(monkeypatch, Health(now=lambda: now[0]), {"orders": RUNS}, look(waits=True))
    now[0] = 300
    assert health.problem() is None
    now[0] = 301

    assert health.problem() == "the JVM has not answered for 301 s"
    assert health.ready() == (False, "the JVM has not answered for 301 s")


def test_a_jvm_that_is_gone_is_a_reason_for_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(_: object) -> list[Look]:
        msg = "no answer"
        raise Py4JError(msg)

    health = Health()
    over = iter([False, True])
    monkeypatch.setattr(health._over, "wait", lambda _: next(over))
    monkeypatch.setattr(module, "look_at_queries", gone)
    monkeypatch.setattr(module, "_answers", lambda _: False)
    health._run(Session())  # type: ignore[arg-type]

    assert health.problem() == "Spark has ended"


def test_a_session_that_was_stopped_is_a_reason_for_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    health = Health()
    over = iter([False, True])
    monkeypatch.setattr(health._over, "wait", lambda _: next(over))
    monkeypatch.setattr(Context, "_jsc", None)
    health._run(Session())  # type: ignore[arg-type]

    assert health.problem() == "Spark has ended"
