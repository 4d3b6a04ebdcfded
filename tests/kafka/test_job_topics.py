"""Offsets without a record: on compacted and transactional topics a job accounts for what a plain consumer sees."""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import services
from kafka import KafkaProducer
from pyspark.sql import SparkSession
from topic_job import QUERY, TopicJob, raw

from stream_merge import ConfigError, MergeResult
from stream_merge.jobs.kafka import run
from stream_merge.jobs.kafka.check import check
from stream_merge.jobs.kafka.run import Job
from stream_merge.model.table_ref import TableRef
from stream_merge.sources.envelopes.base import Kind
from stream_merge.sources.kafka.connection import Cluster
from stream_merge.spark.confs import WHOLE_READS

HEARTBEAT = {"ts_ms": 1}
Make = Callable[..., TopicJob]


@pytest.fixture
def make(spark: SparkSession, broker: services.Broker, tmp_path: Path) -> Iterator[Make]:
    made = []

    def topic(**more: Any) -> TopicJob:
        made.append(TopicJob(spark, broker, tmp_path, **more))
        return made[-1]

    yield topic
    for job in made:
        job.close()


def kind_of(value: bytes | None) -> Kind | None:
    """What the job must take a record for; None: a null-value record, which may be a delete or redundant."""
    if value is None:
        return None
    try:
        payload = json.loads(value)
    except ValueError:
        return Kind.UNDECODABLE
    if "op" not in payload:
        return Kind.FILTERED
    return Kind.DELETE if payload["op"] == "d" else Kind.UPSERT


Delivered = dict[tuple[int, int], tuple[bytes | None, bytes | None]]


def expect_accounts(job: TopicJob, results: list[MergeResult], delivered: Delivered) -> None:
    """Each commit and partition, and all of them together, equal what a consumer of the topic got.

    end - start = gaps + redundant + filtered + received, of which the undecodable ones are a part
    """
    received = {result.batch_id: result.events.received for result in results}
    ends = {str(place.partition): 0 for place in job.places}
    gaps, last_batch = 0, -1
    for batch_id, partitions in job.accounted():
        taken = 0
        for partition, found in partitions.items():
            start, end = found["range"]
            assert start == ends[partition]
            ends[partition] = end
            there = [value for (p, at), (_, value) in delivered.items() if f"{p}" == partition and start <= at < end]
            seen, records = Counter(map(kind_of, there)), Counter(found["records"])
            assert records.total() == len(there)
            assert (records["undecodable"], records["filtered"]) == (seen[Kind.UNDECODABLE], seen[Kind.FILTERED])
            assert sum(found.get("filtered", {}).values()) == seen[Kind.FILTERED]
            assert records["upsert"] == seen[Kind.UPSERT]
            assert records["delete"] + records["redundant"] == seen[Kind.DELETE] + seen[None]
            taken += records["upsert"] + records["delete"] + records["undecodable"]
            gaps += end - start - len(there)
        assert taken == sum(received[batch] for batch in range(last_batch + 1, batch_id + 1))
        last_batch = batch_id
    assert last_batch == results[-1].batch_id
    assert ends == {str(partition): end for partition, end in job.ends().items()}
    steps = job.history()
    assert sum(step.offsets for step in steps) == sum(ends.values())
    assert sum((step.records for step in steps), Counter[str]()).total() == len(delivered)
    assert sum(ends.values()) - len(delivered) == gaps
    assert job.metric("stream_merge_topic_gaps_total", topic=job.topic) == gaps
    assert job.metric("stream_merge_topic_unexpected_gaps_total", topic=job.topic) == 0


class Workload:
    """Random events, and the rows that they leave behind; a key stays in its partition."""

    def __init__(self, job: TopicJob, seed: int) -> None:
        self.job = job
        self.rng = random.Random(seed)
        self.rows: dict[int, str] = {}
        self.closed = 0

    def records(self, number: int) -> list[tuple[int, bytes | None]]:
        """Key and value; nothing is written yet."""
        found: list[tuple[int, bytes | None]] = []
        for n in range(number):
            key, chance = self.rng.randrange(40), self.rng.random()
            if chance < 0.05:
                found.append((key + 100, raw(HEARTBEAT)))
            elif chance < 0.1:
                found.append((key + 200, b'{"op":'))
            elif chance < 0.3:
                found += [(key, self.job.event("d", key)), (key, None)]
            else:
                found.append((key, self.job.event("u", key, f"{key} {n} {self.rng.random()}")))
        return found

    def send(self, producer: KafkaProducer, records: list[tuple[int, bytes | None]], **more: Any) -> None:
        for key, value in records:
            partition = key % len(self.job.places)
            producer.send(self.job.topic, key=raw({"id": key}), value=value, partition=partition, **more)

    def happened(self, records: list[tuple[int, bytes | None]]) -> None:
        """They count."""
        for key, value in records:
            kind = kind_of(value)
            if kind is Kind.UPSERT and value is not None:
                self.rows[key] = json.loads(value)["after"]["name"]
            elif kind is Kind.DELETE or kind is None:
                self.rows.pop(key, None)

    def close(self, name: str, **more: Any) -> None:
        """One more row in each partition, so that the last batch changes something and is recorded."""
        for partition in range(len(self.job.places)):
            self.closed += 1
            key = 1_000 + self.closed
            self.job.send(key, self.job.event("u", key, name), partition=partition, **more)
            self.rows[key] = name


def test_of_a_transactional_topic_only_committed_records_become_rows(make: Make, seed: int) -> None:
    """Transactions of two producers overlap, and some are aborted; markers and aborted records are gaps."""
    job = make(partitions=2)
    work = Workload(job, seed)
    producers = [job.new_producer(transactional_id=f"{job.topic}-{n}") for n in range(2)]
    for producer in producers:
        producer.init_transactions()
    results: list[MergeResult] = []
    for _ in range(2):
        for _ in range(12):
            written = [work.records(work.rng.randrange(1, 8)) for _ in producers]
            aborted = [work.rng.random() < 0.4 for _ in producers]
            for producer, records in zip(producers, written, strict=True):
                producer.begin_transaction()
                work.send(producer, records)
                producer.flush()
            for producer, records, is_aborted in zip(producers, written, aborted, strict=True):
                producer.abort_transaction() if is_aborted else producer.commit_transaction()
                if not is_aborted:
                    work.happened(records)
            outside = work.records(2)
            work.send(job.producer, outside)
            job.producer.flush()
            work.happened(outside)
        work.close("last")
        results += job.merge(limits={"max_events_per_batch": 90}, transactional=True)

        assert job.rows() == sorted(work.rows.items(), key=repr)
    assert len(results) > 3
    delivered = job.delivered()
    expect_accounts(job, results, delivered)
    assert sum(job.ends().values()) - len(delivered) > 50


def test_an_open_transaction_is_waited_for(make: Make) -> None:
    """What stands behind its first record is merged when it has ended."""
    job = make()
    job.send(1, job.event("c", 1))
    producer = job.new_producer(transactional_id=job.topic)
    producer.init_transactions()
    producer.begin_transaction()
    producer.send(job.topic, key=raw({"id": 2}), value=job.event("c", 2), partition=0).get(30)
    job.send(3, job.event("c", 3))

    results = job.merge(transactional=True)

    assert job.rows("id") == [(1,)]
    producer.commit_transaction()
    results += job.merge(transactional=True)
    assert job.rows("id") == [(1,), (2,), (3,)]
    expect_accounts(job, results, job.delivered())


HOUR = 3_600_000


def test_of_a_compacted_topic_the_newest_records_make_the_table(make: Make, seed: int) -> None:
    """What is left of a key may be a null-value record alone, for a row that was merged long before."""
    configs = {"cleanup.policy": "compact", "segment.ms": str(HOUR // 2), "min.cleanable.dirty.ratio": "0"}
    job = make(partitions=2, configs=configs)
    work = Workload(job, seed)
    results: list[MergeResult] = []
    delivered: Delivered = {}
    at = int(time.time() * 1000) - 240 * HOUR
    for _ in range(2):
        merged = job.ends()
        for _ in range(8):
            # A segment ends where the time of its records has moved on by more than `segment.ms`.
            at += HOUR
            records = work.records(30)
            work.send(job.producer, records, timestamp_ms=at)
            job.producer.flush()
            work.happened(records)
        work.close("last", timestamp_ms=at + HOUR)  # the cleaner leaves the newest segment alone
        services.wait_until(lambda: is_compacted(job), "no key was there twice")
        delivered |= {place: found for place, found in job.delivered().items() if place[1] >= merged[place[0]]}
        results += job.merge(limits={"max_events_per_batch": 150})

        assert job.rows() == sorted(work.rows.items(), key=repr)
    expect_accounts(job, results, delivered)
    assert sum(job.ends().values()) - len(delivered) > 200
    assert any(partition["records"].get("delete") for _, found in job.accounted() for partition in found.values())


def is_compacted(job: TopicJob) -> bool:
    keys = Counter((partition, key) for (partition, _), (key, _) in job.delivered().items())
    return max(keys.values()) == 1


def test_a_lost_table_is_told_by_check_and_stops_the_job(make: Make):
    """A new one would lack what the checkpoint has as done; nothing of it is made."""
    job = make()
    job.send(1, job.event("c", 1))
    job.merge()
    shutil.rmtree(job.target)
    job.send(2, job.event("c", 2))

    told = [finding.said for finding in check(job.settings(), jars_in=None) if finding.is_problem]
    stopped = job.run().failures[QUERY]

    assert isinstance(stopped, ConfigError)
    assert told == [str(stopped)]
    assert re.search(r"query 'rows' has merged into '.*rows' \(Delta table id .*there is no table", str(stopped))
    assert not Path(job.target).exists()


@pytest.mark.parametrize("other", ["spark_catalog.default.Twice_Named", "a path"])
def test_two_names_of_one_table_that_is_not_there_yet_are_one_target(
    make: Make, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """Needs a catalog: equal keys of two topics would overwrite each other for as long as the process lives."""
    job = make()
    job.send(1, job.event("c", 1))
    settings = job.settings(target="twice_named")
    (one,) = settings.queries
    place = f"{job.spark.catalog.getDatabase('default').locationUri}/twice_named"
    target = TableRef(place if other == "a path" else other)
    again = {"name": "other", "target": target, "checkpoint": f"{job.checkpoint}2"}
    both = settings.model_copy(update={"queries": (one, one.model_copy(update=again))})

    # The catalog of tests is in memory.
    monkeypatch.setattr(sys.modules[run.__module__], "refuse_forgetful_catalog", lambda *_: None)
    result = run(both, job.spark, once=True)

    (failure,) = result.failures.values()  # of the one that has looked last
    assert "[DUPLICATE_SETTING] queries " in str(failure)
    assert job.spark.read.format("delta").load(place).count() == 1
    job.spark.sql("DROP TABLE IF EXISTS twice_named")
    shutil.rmtree(place.removeprefix("file:"), ignore_errors=True)


def test_a_job_reads_its_tables_whole_whatever_its_session_ignores(make: Make) -> None:
    """Rows that are looked up for what events leave out would be taken for absent."""
    job = make()
    session, settings = job.spark.newSession(), job.settings()
    for conf in WHOLE_READS:
        session.conf.set(conf, "true")

    stream = Job(settings, session).stream(settings.queries[0])

    assert {conf: stream.events.sparkSession.conf.get(conf) for conf in WHOLE_READS} == WHOLE_READS
    assert {session.conf.get(conf) for conf in WHOLE_READS} == {"true"}


def test_a_broker_that_is_there_answers_a_question_about_no_topic(make: Make) -> None:
    """By which a job tells a broker that is away from one that does not describe a topic."""
    job = make()
    job.send(1, job.event("c", 1))
    cluster = Cluster(job.settings().kafka.connection())

    assert cluster.topics(()) == {}
    assert list(cluster.topics([job.topic, "not-there"])) == [job.topic]
    cluster.close()
