"""What a job's look at its broker makes of answers and of none. No broker: one look after the other, by hand."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pytest
from kafka.errors import (
    GroupAuthorizationFailedError,
    KafkaConnectionError,
    KafkaError,
    TopicAuthorizationFailedError,
    UnknownBrokerIdError,
)
from prometheus_client import CollectorRegistry
from services import tls

from stream_merge.jobs.kafka.lag import Lookout, Progress
from stream_merge.metrics.instruments import MergeMetrics
from stream_merge.sources.kafka.connection import TopicState


class Broker:
    """Topics with 100 records each, and what it refuses."""

    def __init__(self) -> None:
        self.is_away = False
        self.refuses_topics: dict[str, type[KafkaError]] = {}
        self.refuses_groups: dict[str, type[KafkaError]] = {}
        self.asked: list[list[str]] = []
        self.committed: list[tuple[float, str]] = []
        self.tried: list[tuple[float, str]] = []
        self.seconds = 0.0
        self.is_closed = False
        self.breaks = 0
        """So many questions more end with an error of another kind."""
        self.has_answered = threading.Event()

    def topics(self, names: Sequence[str]) -> dict[str, TopicState]:
        self.asked.append(list(names))
        if self.breaks:
            self.breaks -= 1
            msg = "a mistake in a library"
            raise KeyError(msg)
        if self.is_away:
            raise KafkaConnectionError
        for name in names:
            if name in self.refuses_topics:
                raise self.refuses_topics[name]
        self.has_answered.set()
        return {name: TopicState(topic_id=name, starts={0: 0}, ends={0: 100}) for name in names}

    def commit(self, group: str, offsets: Mapping[tuple[str, int], int]) -> None:
        self.tried.append((self.seconds, group))
        if group in self.refuses_groups:
            raise self.refuses_groups[group]
        self.committed.append((self.seconds, group))

    def close(self) -> None:
        self.is_closed = True
        if self.breaks:
            msg = "a mistake in a library"
            raise KeyError(msg)


class Job:
    """Queries `a`, `b` and `c`, each of a topic of its own, of which they have merged 90 records."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        metrics = MergeMetrics(self.registry)
        self.broker = Broker()
        self.queries = {
            name: Progress(query=name, target=name, topics=(f"of_{name}",), group=f"group_{name}", metrics=metrics)
            for name in "abc"
        }
        self.lookout = Lookout(cast(Any, self.broker), self.queries.values(), now=lambda: self.broker.seconds)
        for name, progress in self.queries.items():
            progress.goes_on_from({f"of_{name}": {0: 90}}, dict)

    def looks_at(self, *seconds: float) -> None:
        """One look at each of these times."""
        for at in seconds:
            self.broker.seconds = at
            self.lookout._look()

    def number(self, metric: str, query: str) -> float | None:
        labels = {"query": query, "target": query, "topic": f"of_{query}"}
        return self.registry.get_sample_value(f"stream_merge_topic_{metric}", labels)


@pytest.fixture
def job() -> Job:
    return Job()


def test_all_topics_are_asked_for_at_once(job: Job) -> None:
    job.looks_at(0, 2)

    assert job.broker.asked == [["of_a", "of_b", "of_c"]] * 2
    assert [job.number("lag_events", query) for query in "abc"] == [10, 10, 10]
    assert [job.queries[query].lag for query in "abc"] == [10, 10, 10]
    assert job.broker.committed == [(0, "group_a"), (0, "group_b"), (0, "group_c")]


@pytest.mark.parametrize("error", [TopicAuthorizationFailedError, UnknownBrokerIdError])
def test_topics_that_are_not_described_take_the_lag_from_their_query_alone(
    job: Job, error: type[KafkaError], caplog: pytest.LogCaptureFixture
) -> None:
    """The broker is there, and what is wrong is said of the query that it concerns: once, not at each look."""
    job.broker.refuses_topics["of_b"] = error
    job.looks_at(0, 2, 4)

    assert [job.number("lag_events", query) for query in "abc"] == [10, None, 10]
    assert [bool(job.number("polled_timestamp_seconds", query)) for query in "abc"] == [True, False, True]
    assert job.broker.committed == [(0, "group_a"), (0, "group_c")]
    assert [record.getMessage().split(" remedy")[0] for record in caplog.records] == [
        f"topics_not_described query=b topics=of_b error={error.__name__}"
    ]


def test_queries_that_have_an_answer_go_on_sharing_one_question(job: Job) -> None:
    """A broker's answers cost; only the query concerned has a question of its own, now and then, until it is answered.

    Each that fails costs a connection.
    """
    job.broker.refuses_topics["of_b"] = TopicAuthorizationFailedError
    job.looks_at(0)
    job.broker.asked.clear()
    job.looks_at(2, 16)
    refused = [names for names in job.broker.asked if names]
    job.broker.refuses_topics.clear()
    job.looks_at(32)
    job.broker.asked.clear()
    job.looks_at(34)

    assert refused == [["of_a", "of_c"], ["of_a", "of_c"], ["of_b"]]
    assert job.number("lag_events", "b") == 10
    assert job.broker.asked == [["of_a", "of_b", "of_c"]]


def test_topics_that_were_described_meanwhile_are_told_of_again(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    answers = ({"of_b": TopicAuthorizationFailedError}, {}, {"of_b": UnknownBrokerIdError})
    for minute, refused in enumerate(answers):
        job.broker.refuses_topics = dict(refused)
        job.looks_at(60 * minute, 60 * minute + 20)

    assert [record.error for record in caplog.records] == [  # type: ignore[attr-defined]
        "TopicAuthorizationFailedError",
        "UnknownBrokerIdError",
    ]


def test_a_broker_that_is_away_is_told_of_once_and_of_no_query(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody waits for one question per query: each takes as long as the broker is given to answer."""
    job.broker.is_away = True
    job.looks_at(0, 20)
    asked = list(job.broker.asked)
    job.broker.is_away = False
    job.looks_at(40)

    assert asked == [["of_a", "of_b", "of_c"], [], []]
    assert [record.getMessage() for record in caplog.records] == [
        "broker_away error=KafkaConnectionError",
        "broker_back seconds=40",
    ]
    assert [job.number("lag_events", query) for query in "abc"] == [10, 10, 10]


def test_a_broker_that_comes_back_without_one_topic_is_back(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    job.broker.is_away = True
    job.looks_at(0)
    job.broker.is_away = False
    job.broker.refuses_topics["of_b"] = UnknownBrokerIdError
    job.looks_at(10)

    assert [record.event for record in caplog.records] == [  # type: ignore[attr-defined]
        "broker_away",
        "broker_back",
        "topics_not_described",
    ]
    assert [job.number("lag_events", query) for query in "abc"] == [10, None, 10]


def test_a_job_whose_only_topics_are_not_described_has_a_broker(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    job.broker.refuses_topics = dict.fromkeys(("of_a", "of_b", "of_c"), TopicAuthorizationFailedError)
    job.looks_at(0, 2)

    assert [(record.event, record.query) for record in caplog.records] == [  # type: ignore[attr-defined]
        ("topics_not_described", query) for query in "abc"
    ]


def test_a_group_that_refuses_its_offsets_is_told_of_once_and_tried_once_a_minute(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    """Without its ACL a job for weeks would fill the log, and the broker's."""
    job.broker.refuses_groups["group_b"] = GroupAuthorizationFailedError
    job.looks_at(*range(0, 121, 2))

    assert [at for at, group in job.broker.tried if group == "group_b"] == [0, 60, 120]
    assert job.number("mirror_failures_total", "b") == 3
    assert [record.getMessage() for record in caplog.records] == [
        "offsets_not_mirrored group=group_b error=GroupAuthorizationFailedError"
    ]
    assert [group for _, group in job.broker.committed] == ["group_a", "group_c"]


def test_a_group_that_took_its_offsets_meanwhile_is_told_of_again(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    refused = {"group_b": GroupAuthorizationFailedError}
    job.broker.refuses_groups = dict(refused)
    job.looks_at(0)
    job.broker.refuses_groups = {}
    job.looks_at(60)
    job.broker.refuses_groups = dict(refused)
    job.queries["b"].ends["of_b", 0] = 95
    job.looks_at(62, 64)

    assert [at for at, group in job.broker.tried if group == "group_b"] == [0, 60, 62]
    assert len(caplog.records) == 2


def test_the_last_look_tries_a_group_again_that_has_refused(job: Job) -> None:
    """What was merged last would not be shown to lag tools for as long as the job is down."""
    job.broker.refuses_groups["group_b"] = GroupAuthorizationFailedError
    job.looks_at(0)
    job.broker.refuses_groups = {}
    job.lookout._over.set()
    job.looks_at(2)

    assert (2, "group_b") in job.broker.committed


def test_what_nobody_expects_does_not_end_the_looking(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The lag would stand still for as long as the job runs, and nothing would say so."""
    monkeypatch.setattr("stream_merge.jobs.kafka.lag.POLL_SECONDS", 0.001)
    job.broker.breaks = 3
    with job.lookout:
        assert job.broker.has_answered.wait(10)

    assert job.number("lag_events", "c") == 10
    assert [record.getMessage() for record in caplog.records] == ["lookout_failed"]
    assert caplog.records[0].exc_info is not None


def test_what_the_last_look_stumbles_over_is_not_the_jobs_result(job: Job) -> None:
    def run() -> None:
        with job.lookout:
            job.broker.breaks = 1_000_000
            msg = "of the job"
            raise ValueError(msg)

    with pytest.raises(ValueError, match="of the job"):
        run()
    assert job.broker.is_closed
    assert not job.lookout._thread.is_alive()


def test_when_a_certificate_expires_is_published_also_when_it_is_renewed(job: Job, tmp_path: Path) -> None:
    """The earliest end in its chain, of every query; a file that is being replaced keeps the last answer."""
    tls.need()
    file = tls.Authority(tmp_path / "authority").certificate("client")
    ends = tls.openssl("x509", "-enddate", "-noout", "-dateopt", "iso_8601", "-in", str(file))
    lookout = Lookout(cast(Any, job.broker), job.queries.values(), certificates={"kafka": str(file)})

    def published() -> list[tuple[float | None, float | None]]:
        lookout._look_at_certificates()
        labels = [{"query": name, "target": name} for name in "abc"]
        name = "stream_merge_certificate_expiry_timestamp_seconds"
        value = job.registry.get_sample_value
        return [tuple(value(name, {**one, "certificate": c}) for c in ("kafka", "metrics")) for one in labels]

    first = published()
    file.write_text("-----BEGIN CERTIFICATE-----")

    own_end = datetime.strptime(ends.strip(), "notAfter=%Y-%m-%d %H:%M:%SZ").replace(tzinfo=UTC).timestamp()
    assert own_end - 60 < (first[0][0] or 0) <= own_end  # its issuer's was made some seconds before
    assert first == [(first[0][0], 0)] * 3
    assert published() == first
