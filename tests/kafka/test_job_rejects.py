"""A thousand payloads that nobody can read, between good ones: each in quarantine once, and nothing else there."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import services
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from topic_job import QUERY, TopicJob, raw

from stream_merge import ContractError, EventCounts
from stream_merge.jobs.kafka.exit_codes import Verdict
from stream_merge.sources.wire.strict_json import MOST_NESTED

MOST_BYTES = 8 * 2**20
OVERSIZED, LARGE = 10 * 2**20, 5 * 2**20
GOOD = 1_200


def event(key: Any, name: Any = "n", *, small: Any = 1, lsn: Any = None, **source: Any) -> dict[str, Any]:
    row = {"id": key, "small": small, "name": name}
    return {"op": "u", "before": None, "after": row, "source": {"lsn": 10 if lsn is None else lsn, **source}}


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


def with_nesting(levels: int) -> bytes:
    """An event whose deepest value stands inside so many arrays and objects."""
    return raw(event(1, extra="here")).replace(b'"here"', nested(levels - 2).encode())


REJECTED: dict[str, tuple[list[bytes], str]] = {
    "not JSON": (
        [raw(event(1))[:end] for end in (1, 5, 20, 60, -1)] + [b"", b"{", raw(event(1, "wörter")) + b"}"],
        r"not JSON at character \d+: ",
    ),
    "wrong types": (
        [
            raw(event("1")),
            raw(event(1.5)),
            raw(event(True)),
            raw(event([1])),
            raw(event(1, 7)),
            raw(event(1, {"a": "b"})),
            raw(event(1, small="2")),
            raw(event(1, small=2.0)),
        ],
        r"column '(id|small|name)': .* is not a valid (bigint|smallint|string)",
    ),
    "no envelope": (
        [
            raw([event(1)]),
            raw("text"),
            raw(7),
            b"null",
            raw({**event(1), "op": "x"}),
            raw({**event(1), "after": None}),
            raw({**event(1), "source": None}),
            raw(event(1, lsn="10")),
        ],
        r"not an object|op is 'x'|has no row in `after`|has no source|source\.lsn is '10'",
    ),
    "not UTF-8": (
        [
            raw(event(1, "here")).replace(b"here", bad)
            for bad in (b"\xff", b"\xc3", b"a\x80b", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\xaf")
        ],
        r"byte \d+ is not UTF-8",
    ),
    "out of range": (
        [
            raw(event(2**63)),
            raw(event(-(2**63) - 1)),
            raw(event(1, small=2**15)),
            raw(event(1, small=-(2**15) - 1)),
            raw(event(10**400)),
            raw(event(1, lsn=2**63)),
            raw(event(1)).replace(b'"id": 1', b'"id": ' + b"9" * 5_000),
        ],
        r"out of range for (bigint|smallint)|is not one of a log|not JSON: Exceeds the limit",
    ),
    "nested too deep": (
        [with_nesting(levels) for levels in (MOST_NESTED + 1, 500, 5_000, 200_000)] + [b"[" * 100_000],
        rf"nested deeper than {MOST_NESTED} levels",
    ),
}


class Rejects:
    """The topic: what was written where, and what must come of it."""

    def __init__(self, job: TopicJob, seed: int) -> None:
        self.job = job
        self.rows: dict[int, str] = {}
        self.bad: dict[tuple[int, int], tuple[str, str, str]] = {}
        rng = random.Random(seed)
        plan: list[tuple[str, bytes | None]] = [("good", None)] * GOOD
        plan += [("oversized", raw(event(1, "x" * OVERSIZED)))] * 20
        kinds = [*REJECTED]
        plan += [(kind, rng.choice(REJECTED[kind][0])) for kind in (kinds[n % len(kinds)] for n in range(980))]
        rng.shuffle(plan)
        # Compressed, because kafka-python computes the checksums of what it sends in Python.
        producer = job.new_producer(compression_type="gzip")
        sent = []
        for n, (kind, value) in enumerate(plan):
            written = self.good(n) if value is None else value
            place = producer.send(job.topic, key=raw({"id": n}), value=written, partition=n % 2)
            sent.append((kind, written, place))
        for kind, value, place in sent:
            if kind != "good":
                at = place.get(60)
                expected = rf"the value has {len(value)} bytes" if kind == "oversized" else REJECTED[kind][1]
                self.bad[at.partition, at.offset] = (kind, digest(value), expected)

    def good(self, n: int) -> bytes:
        """Most are small, some are large, and some are as deep as they may be."""
        name = f"{n}"
        if n % 400 == 7:
            name = "ö" * (LARGE // 6) + name  # escaped by `raw`: six bytes each
        elif n % 50 == 3:
            name = json.dumps({"n": n, "deep": nested(10_000)})
        self.rows[n] = digest(name.encode())
        value = raw(event(n, name, small=(-1) ** n * 2**15 if n % 2 else 2**15 - 1, extra="here", lsn=n + 1))
        return value.replace(b'"here"', nested(MOST_NESTED - 2).encode()) if n % 20 == 5 else value


def digest(value: bytes) -> str:
    return hashlib.sha256(value).hexdigest()


@pytest.fixture(scope="module")
def rejects(
    spark: SparkSession, broker: services.Broker, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> Iterator[Rejects]:
    job = TopicJob(spark, broker, tmp_path_factory.mktemp("rejects"), partitions=2)
    yield Rejects(job, seed)
    job.close()


@pytest.mark.parametrize("events_per_batch", [100_000, 300])
def test_every_bad_payload_is_quarantined_once_and_every_good_one_merged(
    rejects: Rejects, tmp_path: Path, events_per_batch: int
) -> None:
    job = rejects.job
    target = str(tmp_path / "rows")
    limits = {"max_events_per_batch": events_per_batch, "max_value_bytes": MOST_BYTES}

    results = job.merge(target=target, checkpoint=str(tmp_path / "checkpoint"), limits=limits)

    assert (len(results) > 5) == (events_per_batch == 300)
    assert len(rejects.bad) == 1_000
    rows = job.spark.read.format("delta").load(target)
    stored = [(row.id, row.name) for row in rows.select("id", F.sha2(F.col("name"), 256).alias("name")).collect()]
    assert sorted(stored) == sorted(rejects.rows.items())
    kept = job.spark.read.format("delta").load(str(tmp_path / "__stream_merge_quarantine_rows"))
    found = kept.select(
        "topic", "partition", "offset", "reasons", "error", "raw_key", F.sha2("raw_value", 256).alias("value")
    ).collect()
    places = Counter((row.partition, row.offset) for row in found)
    assert places == Counter(dict.fromkeys(rejects.bad, 1))
    wrong = []
    for row in found:
        kind, value, said = rejects.bad[row.partition, row.offset]
        same = (row.topic, row.reasons, row.value) == (job.topic, ["undecodable"], value)
        if not same or not row.raw_key or not re.search(said, row.error):
            wrong.append((kind, row.error))
    assert wrong == []
    assert sum(result.events.received for result in results) == GOOD + 1_000
    assert sum(result.events.quarantined for result in results) == 1_000
    assert len(rejects.rows) == GOOD


def test_a_share_above_the_setting_stops_the_job_before_anything_is_written(rejects: Rejects, tmp_path: Path) -> None:
    limits = {"max_value_bytes": MOST_BYTES, "max_quarantine_share": 0.4}

    result = rejects.job.run(target=str(tmp_path / "rows"), checkpoint=str(tmp_path / "checkpoint"), limits=limits)

    (error,) = result.failures.values()
    assert isinstance(error, ContractError)
    assert result.verdict is Verdict.DATA
    assert "1000 of 2200 records of batch 0" in str(error)
    assert "more than max_quarantine_share (0.4)" in str(error)
    assert not (tmp_path / "rows").exists()
    assert not (tmp_path / "__stream_merge_quarantine_rows").exists()


@pytest.fixture
def job(spark: SparkSession, broker: services.Broker, tmp_path: Path) -> Iterator[TopicJob]:
    job = TopicJob(spark, broker, tmp_path)
    yield job
    job.close()


FATES = ("quarantined", "collapsed", "stale", "unaffected", "inserted", "updated", "deleted")


def test_an_undecodable_record_is_an_event_of_the_ledger(job: TopicJob) -> None:
    """Received and quarantined once, in the result and in every metric; a batch that comes again counts nothing."""
    for key, value in enumerate([b"{", raw({"op": "m"}), b"\xff", job.event("c", 3), job.event("u", 3, "newer"), b""]):
        job.send(key, value)
    (result,) = job.merge()
    for file in Path(job.checkpoint, "commits").glob("*0*"):
        file.unlink()

    (again,) = job.merge()

    assert (again.outcome, again.events, again.reasons) == ("skipped_duplicate", EventCounts(), {})
    assert (result.outcome, result.reasons) == ("committed", {"undecodable": 3})
    assert result.events == EventCounts(received=5, quarantined=3, collapsed=1, inserted=1)
    assert {fate: job.metric("stream_merge_events_total", fate=fate) for fate in FATES} == {
        **dict.fromkeys(FATES, 0),
        **{"quarantined": 3, "collapsed": 1, "inserted": 1},
    }
    assert job.metric("stream_merge_events_received_total") == 5
    assert job.metric("stream_merge_quarantined_events_total", reason="undecodable") == 3
    assert job.spark.read.format("delta").load(job.quarantine).count() == 3


def test_undecodable_records_count_before_the_columns_of_a_row_are_known(job: TopicJob) -> None:
    """A batch of them has a result of its own, and so has one of records that are no events."""
    for value in (b"{", b"[]", raw({"op": "m"}), raw({"op": "m"}), b"}", job.event("c", 1)):
        job.send(1, value)
    limits = {"max_events_per_batch": 2}

    unknown = job.run(value_format={"type": "debezium"}, limits=limits)
    known = job.merge(limits=limits)

    assert [(r.batch_id, r.outcome, r.events, r.reasons) for r in unknown.results[QUERY]] == [
        (0, "no_change", EventCounts(received=2, quarantined=2), {"undecodable": 2}),
        (1, "empty", EventCounts(), {}),
        (2, "no_change", EventCounts(received=2, quarantined=2), {"undecodable": 2}),
    ]
    assert not known
    assert job.metric("stream_merge_quarantined_events_total", reason="undecodable") == 4
    assert job.metric("stream_merge_events_total", fate="quarantined") == 4
    assert job.metric("stream_merge_batches_total", outcome="no_change") == 2
