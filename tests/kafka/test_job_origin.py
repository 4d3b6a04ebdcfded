"""Where rows came from: what a commit records lets the next run go on, or say in one sentence why it cannot."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import services
from pyspark.sql import SparkSession
from topic_job import TopicJob, raw

from stream_merge import ConfigError
from stream_merge.jobs.kafka.exit_codes import Verdict
from stream_merge.jobs.kafka.run import Job
from stream_merge.metrics.catalogue import TOPIC_NEWEST
from stream_merge.model.names import TOMBSTONE_TABLE_PREFIX

Make = Callable[..., TopicJob]

PLACEHOLDER = "__debezium_unavailable_value"
FAR = 2**40
"""A position far beyond `max_position_regression`."""


@pytest.fixture
def make(spark: SparkSession, broker: services.Broker, tmp_path: Path) -> Iterator[Make]:
    made: list[TopicJob] = []

    def job(**wanted: Any) -> TopicJob:
        made.append(TopicJob(spark, broker, tmp_path, **wanted))
        return made[-1]

    yield job
    for one in made:
        one.close()


def test_positions_of_topics_from_several_servers_are_not_compared(make: Make) -> None:
    """Each server has a log of its own; what one of them is behind the other is no restored source."""
    job = make()
    other = f"{job.topic}.other"
    job.admin.create_topics({other: {"num_partitions": 1, "replication_factor": 1}}, wait_for_metadata=True)
    both = {"topic": [job.topic, other], "keys": ["source", "id"], "topic_column": "source"}
    job.send(1, job.event("c", 1, "a", lsn=FAR))
    job.producer.send(other, key=raw({"id": 1}), value=job.event("c", 1, "b", lsn=5, ts_ms=1_600_000_000_000)).get(30)
    job.merge(**both)
    job.producer.send(other, key=raw({"id": 1}), value=job.event("u", 1, "c", lsn=6, ts_ms=1_600_000_001_000)).get(30)

    job.merge(**both)

    assert job.rows("source", "name") == [(job.topic, "a"), (other, "c")]
    assert job.metric(TOPIC_NEWEST.name, topic=job.topic) == 1_700_000_000
    assert job.metric(TOPIC_NEWEST.name, topic=other) == 1_600_000_001


def test_a_partition_that_lags_behind_another_is_no_restored_source(make: Make) -> None:
    job = make(partitions=2)
    job.send(1, job.event("c", 1, "ahead", lsn=FAR), partition=1)
    job.merge()
    job.send(2, job.event("r", 2, "behind", lsn=5), partition=0)
    job.merge()
    job.send(1, job.event("u", 1, "restored", lsn=6), partition=1)

    result = job.run()

    assert job.rows() == [(1, "ahead"), (2, "behind")]
    assert f"from position {FAR} to 6; if the source was restored, set 'epoch: 1'" in str(result.failures["rows"])
    counted = [job.metric("stream_merge_batches_total", outcome=outcome) for outcome in ("committed", "failed")]
    assert (counted, job.metric("stream_merge_query_failed")) == ([2, 1], 1)
    assert job.metric("stream_merge_phase_seconds_total", phase="read") > 0


def test_a_new_checkpoint_reads_a_topic_again_without_a_change(make: Make) -> None:
    """Old events are no news, however far below the stored position, until it has come to where the first one was."""
    job = make()
    job.send(1, job.event("c", 1, "old", lsn=5))
    job.send(2, job.event("c", 2, "old", lsn=6))
    job.send(1, job.event("u", 1, "new", lsn=FAR))
    job.merge()
    again = {"checkpoint": f"{job.checkpoint}2", "engine": "spark", "limits": {"max_events_per_batch": 1}}

    job.merge(**again)
    job.send(2, job.event("u", 2, "restored", lsn=7))
    result = job.run(**again)

    assert job.rows() == [(1, "new"), (2, "old")]
    assert "[POSITION_REGRESSED] " in str(result.failures["rows"])


def test_a_run_that_begins_in_the_middle_of_reading_again_goes_on(make: Make) -> None:
    job = make()
    job.send(1, job.event("c", 1, "old", lsn=5))
    job.send(1, job.event("u", 1, "new", lsn=FAR))
    job.merge()
    checkpoint = f"{job.checkpoint}2"
    job.merge(checkpoint=checkpoint, engine="spark", start={0: 0}, limits={"max_events_per_batch": 1})
    newest = max(int(path.name) for path in Path(checkpoint, "commits").iterdir() if path.name.isdigit())
    for log in ("offsets", "commits"):  # as if it had been stopped before its last batch
        for path in Path(checkpoint, log).glob(f"*{newest}*"):
            path.unlink()
    version = max(step.version for step in job.history() if step.version is not None)
    job.spark.sql(f"RESTORE TABLE delta.`{job.target}` TO VERSION AS OF {version - 1}")

    job.merge(checkpoint=checkpoint, engine="spark")

    assert job.rows() == [(1, "new")]


def test_a_topic_made_anew_is_named_also_where_it_is_shorter_than_before(make: Make) -> None:
    """Spark plans no batch then, so that nobody but its own assertion would speak."""
    job = make()
    for key in (1, 2, 3):
        job.send(key, job.event("c", key))
    job.merge()
    job.admin.delete_topics([job.topic])
    services.wait_until(lambda: job.topic not in job.admin.list_topics(), "the topic is gone")
    job.admin.create_topics({job.topic: {"num_partitions": 1, "replication_factor": 1}}, wait_for_metadata=True)
    job.send(4, job.event("c", 4))

    result = job.run()

    assert result.verdict is Verdict.DATA
    assert f"topic {job.topic!r} was re-created" in str(result.failures["rows"])


def test_what_a_query_did_before_its_first_commit_is_accounted_for_by_another_run(make: Make) -> None:
    job = make()
    heartbeat = raw({"ts_ms": 1})
    for _ in range(3):
        job.send(0, heartbeat)
    job.merge()
    job.send(1, job.event("c", 1))

    job.merge()

    recorded = job.accounted()[-1][1]["0"]
    assert (recorded["range"], recorded["uncounted"], sum(recorded["records"].values())) == ([0, 4], 3, 1)
    assert [(step.offsets, step.uncounted) for step in job.history()] == [(0, 0), (4, 3)]


def test_history_shows_what_a_query_has_read_without_a_commit(make: Make) -> None:
    """Here into a table that another job has made: the first batch commits its id alone, the second one nothing."""
    job = make()
    job.send(1, job.event("c", 1))
    job.merge()
    checkpoint = f"{job.checkpoint}2"
    job.merge(checkpoint=checkpoint)
    job.send(1, job.event("u", 1, "late", lsn=1))
    job.merge(checkpoint=checkpoint)

    steps = job.history(checkpoint=checkpoint)

    read = [(s.version is None, [(r.start, r.end) for r in s.ranges.get(job.topic, {}).values()]) for s in steps]
    assert (True, [(1, 2)]) in read
    assert [ranges for is_tail, ranges in read if ranges and not is_tail] == [[(0, 1)], [(0, 1)]]


def test_a_start_has_to_name_every_partition(make: Make) -> None:
    job = make(partitions=2)
    job.send(1, job.event("c", 1))

    result = job.run(start={0: 0})

    assert result.verdict is Verdict.CONFIGURATION
    assert f"has offsets of partitions [0], topic {job.topic!r} has [0, 1]" in str(result.failures["rows"])
    job.merge(start={0: 0, 1: 0})
    assert job.rows() == [(1, "n")]


def test_a_job_with_a_start_is_started_again_and_another_start_is_refused(make: Make) -> None:
    """As by systemd after a crash, with the job file as it was; also where the topic has more partitions by then."""
    job = make()
    job.send(1, job.event("c", 1))
    job.send(2, job.event("c", 2))
    job.merge(start={0: 1})
    job.admin.create_partitions({job.topic: 2})
    job.send(3, job.event("c", 3), partition=0)

    job.merge(start={0: 1})

    assert job.rows() == [(2, "n"), (3, "n")]
    other = job.settings(start={0: 0})
    anew = Job(other, job.spark)
    with pytest.raises(ConfigError, match="began with another one"):
        anew.look_before(other.queries[0], is_first=True, once=True)
    anew.look_before(other.queries[0], is_first=False, once=True)


def test_a_start_holds_where_a_process_ended_before_it_had_planned_a_batch(make: Make) -> None:
    """By then Spark has written the query's id: a checkpoint is there, and says nothing of where it begins."""
    job = make()
    job.send(1, job.event("c", 1))
    job.send(2, job.event("c", 2))
    job.merge(start={0: 1}, checkpoint=f"{job.checkpoint}-other", target=f"{job.target}-other")
    Path(job.checkpoint).mkdir(parents=True)
    shutil.copy(Path(f"{job.checkpoint}-other", "metadata"), job.checkpoint)

    job.merge(start={0: 1})

    assert job.rows() == [(2, "n")]


def test_a_null_value_record_deletes_a_row_of_an_earlier_epoch(make: Make) -> None:
    """Offsets and positions of then do not compare: it stands at the beginning of its own epoch."""
    job = make()
    for n in range(5):
        job.send(1, job.event("u", 1, f"{n}", lsn=FAR + n))
    job.merge()
    anew = {"checkpoint": f"{job.checkpoint}2", "epoch": 1, "start": {0: 5}}
    job.send(1, None)
    job.send(2, job.event("c", 2, lsn=5))
    job.merge(**anew)
    assert job.rows() == [(2, "n")]

    job.send(1, job.event("c", 1, "back", lsn=6))
    del anew["start"]
    job.merge(**anew)

    assert job.rows() == [(1, "back"), (2, "n")]


def test_a_null_value_record_deletes_a_row_from_before_the_first_run(make: Make) -> None:
    job = make()
    rows = job.spark.createDataFrame([(1, 1, "before"), (2, 2, "before")], "id bigint, small smallint, name string")
    rows.write.format("delta").save(job.target)
    job.send(1, None)
    job.send(3, job.event("c", 3))

    job.merge()

    assert job.rows() == [(2, "before"), (3, "n")]


FLAT = {"type": "flattened", "columns": {"id": "bigint", "name": "text"}}
PLAIN = {"type": "json", "columns": {"id": "bigint", "name": "string", "at": "bigint"}}


@pytest.mark.parametrize(
    ("value_format", "row"),
    [
        (FLAT, {"id": 1, "name": "n", "__lsn": 10}),
        ({**PLAIN, "position": "at"}, {"id": 1, "name": "n", "at": 10}),
    ],
    ids=["flattened", "json"],
)
def test_more_partitions_of_a_topic_whose_null_values_are_deletes_ask_for_an_epoch(
    make: Make, value_format: dict[str, Any], row: dict[str, Any]
) -> None:
    """A null-value record in another partition than its row could not be told from an older one."""
    job = make()
    job.send(1, raw(row))
    job.merge(value_format=value_format)
    job.admin.create_partitions({job.topic: 2})
    job.producer = job.new_producer()  # which knows both
    job.send(1, None, partition=1)

    result = job.run(value_format=value_format)

    assert "has 2 partitions, it had 1" in str(result.failures["rows"])
    job.merge(value_format=value_format, epoch=1)
    assert job.rows("id") == []


def test_another_topic_whose_offsets_would_be_compared_is_warned_of(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """Its offsets begin at 0, so that its events of known keys are older than what is stored."""
    job = make()
    other = f"{job.topic}.other"
    job.admin.create_topics({other: {"num_partitions": 1, "replication_factor": 1}}, wait_for_metadata=True)
    for name in "ab":
        job.send(1, raw({"id": 1, "name": name, "at": 1}))
    job.merge(value_format=PLAIN)
    assert "other_topics_by_offset" not in caplog.text
    moved = {"value_format": PLAIN, "topic": [other], "checkpoint": str(job.folder / "checkpoint of other")}
    job.producer.send(other, key=raw({"id": 1}), value=raw({"id": 1, "name": "c", "at": 1})).get(30)

    job.merge(**moved)
    assert "other_topics_by_offset" in caplog.text
    job.merge(**{**moved, "checkpoint": str(job.folder / "checkpoint of epoch 1")}, epoch=1)

    assert job.rows("id", "name") == [(1, "c")]


@pytest.mark.parametrize("forgotten", ["target made anew", "retention"])
def test_a_delete_that_the_sink_does_not_remember_excuses_no_unavailable_value(make: Make, forgotten: str) -> None:
    """An event that such a delete does not refuse is stored, so a value that nobody has is missed."""
    job = make()
    retention = {"tombstone_retention": "1 ms"} if forgotten == "retention" else {}
    job.send(1, job.event("c", 1, lsn=FAR))
    job.send(1, job.event("d", 1, lsn=FAR + 2))
    job.merge(**retention)
    assert (job.folder / f"{TOMBSTONE_TABLE_PREFIX}rows").exists()
    if forgotten == "target made anew":
        (job.folder / "rows").rename(job.folder / "dropped")
    job.send(1, job.event("u", 1, PLACEHOLDER, lsn=FAR + 1))

    anew = {"checkpoint": f"{job.checkpoint}2", "start": {0: 2}} if forgotten == "target made anew" else {}
    (*_, result) = job.merge(**retention, **anew)

    assert result.events.quarantined == 1
    assert job.rows() == []


def test_a_key_column_may_be_spelled_with_other_capitals_in_the_table(make: Make) -> None:
    """As Spark looks names up; values that events leave out and null-value records look for stored rows, too."""
    job = make()
    rows = job.spark.createDataFrame([(1, 1, "stored"), (2, 2, "gone")], "Id bigint, small smallint, name string")
    rows.write.format("delta").save(job.target)
    job.send(1, job.event("u", 1, PLACEHOLDER))
    job.send(2, None)

    job.merge()

    assert job.rows("Id", "name") == [(1, "stored")]


def test_a_null_value_stands_behind_all_that_is_known_wherever_its_batch_begins(make: Make) -> None:
    """An event that comes late is no newer than the stored row: a delete behind both deletes what is newest."""
    job = make()
    ordered = {"type": "json", "columns": {"id": "bigint", "name": "string", "v": "bigint"}, "position": "v"}
    job.send(1, raw({"id": 1, "name": "new", "v": 10}))
    job.merge(value_format=ordered)
    job.send(1, raw({"id": 1, "name": "late", "v": 5}))
    job.send(1, None)

    job.merge(value_format=ordered)

    assert job.rows() == []


BINLOG = {"type": "debezium", "database": "mysql", "columns": {"id": "int", "small": "int", "name": "varchar(9)"}}


def test_a_changed_server_stops_the_query_until_the_epoch_is_raised(make: Make) -> None:
    """Positions are of one server: those of the new one start again, and its changes win by the epoch alone.

    What a batch has of the server before keeps the epoch before.
    """
    job = make()

    def send(key: int, name: str, server: int, file: int, offset: int) -> None:
        place = {"file": f"binlog.{file:06}", "pos": offset, "server_id": server, "connector": "mysql"}
        job.send(key, job.event("u", key, name, lsn=None, **place))

    send(1, "first", 1, 10, 500)
    send(2, "first", 1, 10, 600)
    job.merge(value_format=BINLOG)
    send(2, "last", 1, 11, 4)
    send(3, "last", 1, 11, 5)
    send(4, "last", 1, 11, 6)
    send(1, "new", 2, 3, 100)
    send(2, "new", 2, 3, 200)

    stopped = job.run(value_format=BINLOG)
    before = job.rows()
    job.merge(value_format=BINLOG, epoch=1)
    send(3, "newer", 2, 3, 300)
    job.merge(value_format=BINLOG, epoch=1)

    assert (
        f"[SOURCE_SERVER_CHANGED] topic {job.topic!r}, partition 0, offset 5: server '2' follows '1'; set 'epoch: 1',"
        " or 'on_server_change: ignore' within one binlog"
    ) in str(stopped.failures["rows"])
    assert before == [(1, "first"), (2, "first")]
    frame = job.spark.read.format("delta").load(job.target).selectExpr("id", "name", "__stream_merge_sequence.c1 epoch")
    assert sorted(map(tuple, frame.collect())) == [(1, "new", 1), (2, "new", 1), (3, "newer", 1), (4, "last", 0)]


def test_servers_that_write_one_binlog_in_turn_are_let_be(make: Make) -> None:
    """As in a Galera cluster, or behind a replica of several servers."""
    job = make()
    for number, server in enumerate([1, 2, 1]):
        place = {"file": "binlog.000001", "pos": number, "server_id": server, "connector": "mysql"}
        job.send(1, job.event("u", 1, f"by {server}", lsn=None, **place))

    result = job.run(value_format=BINLOG)
    job.merge(value_format=BINLOG, on_server_change="ignore")

    assert "'start' there, with a new snapshot, or 'on_server_change: ignore' within one binlog" in str(
        result.failures["rows"]
    )
    assert job.rows() == [(1, "by 1")]
