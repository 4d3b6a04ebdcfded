"""A query under supervision: what it does while its broker is away. No Spark: nothing is started."""

from __future__ import annotations

import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import yaml
from kafka.errors import KafkaConnectionError

from stream_merge.errors import ConfigError
from stream_merge.jobs.kafka import control
from stream_merge.jobs.kafka.query import Supervised
from stream_merge.jobs.kafka.replay import Replayed, Request
from stream_merge.jobs.kafka.settings import QuerySettings, load


@pytest.fixture
def settings(tmp_path: Path) -> QuerySettings:
    file = tmp_path / "job.yaml"
    query = {"name": "orders", "topic": "t", "value_format": {"type": "debezium"}, "keys": "id"}
    query |= {"target": str(tmp_path / "orders"), "checkpoint": str(tmp_path / "checkpoint")}
    file.write_text(yaml.safe_dump({"kafka": {"bootstrap": "localhost:1"}, "queries": [query]}))
    return load(file).queries[0]


class BrokerAway:
    """A job whose broker does not answer."""

    def __init__(self) -> None:
        self.replayed: list[str] = []

    def look_before(self, query: QuerySettings, **_: bool) -> None:
        raise KafkaConnectionError

    def stream(self, query: QuerySettings) -> Any:
        pytest.fail("there is nothing to start")

    def replay(self, query: QuerySettings, request: Request) -> Replayed:
        self.replayed.append(request.id)
        return Replayed(id=request.id)


def waiting(settings: QuerySettings, job: BrokerAway) -> Supervised:
    """A query that has looked for its broker, and waits."""
    query = Supervised(settings, job, SimpleQueue(), once=False)
    while query._not_before == 0:
        query.step()
    assert not query.has_ended
    return query


def test_a_query_that_waits_for_its_broker_can_be_stopped(settings: QuerySettings) -> None:
    query, request = waiting(settings, BrokerAway()), control.stop_request(settings)
    assert request is not None
    request.touch()

    query.step()

    assert (query.has_ended, query.failure, request.exists()) == (True, None, False)


def test_a_stop_during_a_look_at_the_broker_keeps_no_other_query_waiting(settings: QuerySettings) -> None:
    answers = threading.Event()

    class Slow(BrokerAway):
        def look_before(self, query: QuerySettings, **_: bool) -> None:
            answers.wait()

    query, request = Supervised(settings, Slow(), SimpleQueue(), once=False), control.stop_request(settings)
    query.step()
    assert request is not None
    request.touch()

    query.step()

    assert not query.has_ended
    answers.set()
    while not query.has_ended:
        query.step()
    assert (query.failure, request.exists()) == (None, False)


class Ended:
    """A query that Spark has ended, for a reason that names nothing."""

    is_active, has_failed, has_delivered = False, True, True
    failure = RuntimeError("Job aborted.")

    def stop(self) -> None:
        """It has stopped."""


def test_what_a_query_ended_with_is_kept_where_the_job_is_stopped_before_anybody_has_looked(
    settings: QuerySettings,
) -> None:
    query = Supervised(settings, BrokerAway(), SimpleQueue(), once=False)
    query._running = Ended()  # type: ignore[assignment]

    query.step()
    query.stop()

    assert query.failure is Ended.failure


def test_a_query_that_fails_when_it_reports_on_a_recorded_batch_is_started_again(settings: QuerySettings) -> None:
    """As Kafka's source of Spark 4.1 does behind a batch that comes again; `tests/kafka/test_job.py` on it does it."""

    class Reporting(Ended):
        failure = RuntimeError("query 'orders' failed")

    ended, cause = RuntimeError("the query ended"), RuntimeError("java.lang.NullPointerException")
    ended._stackTrace = "org.apache.spark.sql.execution.streaming.runtime.StreamExecution.runStream(…)"  # type: ignore[attr-defined]
    ended._cause = cause  # type: ignore[attr-defined]
    source = "org.apache.spark.sql.kafka010.KafkaMicroBatchStream$.metrics(KafkaMicroBatchStream.scala:520)"
    cause._stackTrace = source  # type: ignore[attr-defined]
    Reporting.failure.__cause__ = ended
    query = Supervised(settings, BrokerAway(), SimpleQueue(), once=False)
    query._running = Reporting()  # type: ignore[assignment]

    query.step()

    assert (query.has_ended, query.failure, query._running) == (False, None, None)
    assert query._not_before > 0


@pytest.mark.parametrize("is_stopped", [False, True], ids=["let run", "stopped meanwhile"])
@pytest.mark.parametrize("is_told", [True, False], ids=["told", "not told"])
def test_what_stands_behind_the_end_of_a_query_is_looked_for_beside_the_others(
    settings: QuerySettings, *, is_told: bool, is_stopped: bool
) -> None:
    answers = threading.Event()

    class Explaining(BrokerAway):
        def look_before(self, query: QuerySettings, **_: bool) -> None:
            answers.wait()
            if is_told:
                msg = "topic 't' is gone"
                raise ConfigError(msg)

    query = Supervised(settings, Explaining(), SimpleQueue(), once=False)
    query._running = Ended()  # type: ignore[assignment]

    query.step()  # comes back while the broker is asked
    query.step()

    assert not query.has_ended
    answers.set()
    if is_stopped:
        query.stop()
    while not query.has_ended:
        query.step()
    assert query.failure is not None
    if is_told:
        assert (str(query.failure), query.failure.__cause__) == ("topic 't' is gone", Ended.failure)
    else:
        assert query.failure is Ended.failure


@pytest.mark.parametrize("kind", ["no text", "not ours to read"])
def test_a_replay_request_that_nobody_can_read_ends_no_query(settings: QuerySettings, kind: str) -> None:
    control.ask_for_replay(settings, Request())
    path = Path(settings.checkpoint).with_name("checkpoint.replay")
    path.unlink()
    if kind == "no text":
        path.write_bytes(b"\xff\xfe")
    else:
        path.mkdir()  # which root, too, can neither read nor remove as a file
    job = BrokerAway()

    waiting(settings, job).step()

    assert (job.replayed, path.exists()) == ([], kind != "no text")


def test_a_replay_whose_answer_cannot_be_written_is_not_repeated_at_once(
    settings: QuerySettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    job, request = BrokerAway(), Request()
    query = waiting(settings, job)
    control.ask_for_replay(settings, request)
    monkeypatch.setattr(control, "answer_replay", full)

    for _ in range(3):
        query.step()
        if query._replaying is not None:
            query._replaying.join()

    assert job.replayed == [request.id]
    assert control.replay_request(settings) == request
