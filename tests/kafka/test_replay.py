"""Quarantined records run again once the job file can read them, once, and never over newer rows."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import services
from pyspark.sql import SparkSession
from topic_job import TopicJob

from stream_merge import ConfigError
from stream_merge.jobs.kafka import control
from stream_merge.jobs.kafka.lineage import Lineage
from stream_merge.jobs.kafka.ordering import Placing
from stream_merge.jobs.kafka.replay import Replayed, Request, replay
from stream_merge.jobs.kafka.run import Job
from stream_merge.tables import locks
from stream_merge.tables.side.replay_claims import Claims
from stream_merge.testing import change_rows, target_rows


@pytest.fixture
def job(spark: SparkSession, broker: services.Broker, tmp_path: Path) -> Iterator[TopicJob]:
    job = TopicJob(spark, broker, tmp_path)
    yield job
    job.close()


def run_again(job: TopicJob, request: Request | None = None, **changes: Any) -> Replayed:
    return replay(job.spark.newSession(), job.settings(**changes).queries[0], request or Request())


def marked(job: TopicJob) -> list[tuple[Any, ...]]:
    """Offset, and whether it is done with."""
    return [(offset, at is not None) for offset, at in target_rows(job.spark, job.quarantine, "offset", "replayed_at")]


def test_what_the_job_file_can_read_by_now_is_merged_once(job: TopicJob) -> None:
    """A limit was too low: the records lie in quarantine until it is raised; what is newer by then stays."""
    limits = {"limits": {"max_value_bytes": 200}}
    job.send(1, job.event("c", 1, "short"))
    long = "x" * 300
    first, second = (job.send(key, job.event("c", key, long)) for key in (2, 3))
    hopeless = job.send(4, b"{")
    job.send(3, job.event("u", 3, "newer"))
    job.merge(**limits)
    assert job.rows() == [(1, "short"), (3, "newer")]

    answer = run_again(job)

    assert job.rows() == [(1, "short"), (2, long), (3, "newer")]
    assert (answer.records, answer.merged, answer.changed, answer.still) == (3, 2, 1, 1)
    assert marked(job) == [(first, True), (second, True), (hopeless, False)]
    again = run_again(job)
    assert (again.records, again.marked, again.version) == (1, 0, None)
    assert [kind for _, kind, key, *_ in change_rows(job.spark, job.target, "id") if key == 2] == ["insert"]
    assert [step.replayed for step in job.history()] == [None, None, 2]


@pytest.mark.parametrize("killed", ["end", "_merge"], ids=["behind the merge", "before the merge"])
def test_a_replay_that_is_killed_merges_its_records_once(
    job: TopicJob, monkeypatch: pytest.MonkeyPatch, killed: str
) -> None:
    """Before the job goes on; by clauses that would count them twice."""
    shape = {"clauses": [{"when": "matched", "then": "update", "set": {"name": "t.name || s.name"}}]}
    shape["clauses"].append({"when": "not_matched", "then": "insert", "set": {"id": "s.id", "name": "s.name"}})

    def die(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    job.send(1, job.event("c", 1, "short"))
    job.send(1, job.event("u", 1, "x" * 300))
    job.merge(limits={"max_value_bytes": 200}, shape=shape)
    request = Request()
    with monkeypatch.context() as dying:
        dying.setattr(Claims, "end", die)
        if killed == "_merge":
            dying.setattr(sys.modules[replay.__module__], "_merge", die)
        with pytest.raises(KeyboardInterrupt):
            run_again(job, request, shape=shape)
    before = job.rows()
    job.send(2, job.event("c", 2))
    job.merge(limits={"max_value_bytes": 200}, shape=shape)

    answer = run_again(job, request, shape=shape)

    assert before == [(1, "short" if killed == "_merge" else "short" + "x" * 300)]
    assert job.rows() == [(1, "short" + "x" * 300), (2, "n")]
    # With the limit of before the record could not be read when the job started: it was open again.
    assert (answer.records, marked(job)) == (int(killed == "_merge"), [(1, True)])


def test_records_older_than_the_remembered_deletes_are_refused_unless_forced(job: TopicJob) -> None:
    job.send(1, job.event("c", 1, "x" * 300), timestamp_ms=1_700_000_000_000)
    job.send(2, job.event("c", 2))
    job.merge(limits={"max_value_bytes": 200})
    retention = {"tombstone_retention": "1 h"}

    refused = run_again(job, **retention)
    forced = run_again(job, Request(force=True), **retention)

    assert (refused.too_old, refused.marked) == (1, 0)
    assert "--force" in refused.said()
    assert (forced.too_old, forced.marked) == (0, 1)


def test_records_from_before_the_epoch_are_left_alone_unless_forced(job: TopicJob) -> None:
    """Their positions are those of another source, and would win over what it brings now."""
    job.send(1, job.event("c", 1, "x" * 300, lsn=10**9))
    job.send(2, job.event("c", 2))
    job.merge(limits={"max_value_bytes": 200})
    job.send(1, job.event("c", 1, "now", lsn=5))
    job.merge(epoch=1)
    late = job.send(3, job.event("c", 3, "x" * 300, lsn=6))
    job.merge(epoch=1, limits={"max_value_bytes": 200})

    answer = run_again(job, epoch=1)

    assert (answer.records, answer.too_old, answer.marked) == (2, 1, 1)
    assert "1 older than tombstone_retention or than the epoch" in answer.said()
    assert [(key, name[:3]) for key, name in job.rows()] == [(1, "now"), (2, "n"), (3, "xxx")]
    assert marked(job) == [(0, False), (late, True)]
    assert run_again(job, Request(force=True), epoch=1).marked == 1


def test_a_value_that_nobody_had_comes_from_the_row_that_is_there_by_now(job: TopicJob) -> None:
    """And one that still has no source stays as the single row that it is."""
    placeholder = "__debezium_unavailable_value"
    supplied = job.send(1, job.event("u", 1, placeholder, lsn=2_000))
    lacking = job.send(2, job.event("u", 2, placeholder, lsn=2_001))
    job.merge()
    job.send(1, job.event("c", 1, "late", lsn=1_999))
    job.merge()

    answer = run_again(job)

    assert job.rows() == [(1, "late")]
    assert (answer.records, answer.marked, answer.still) == (2, 1, 1)
    assert marked(job) == [(supplied, True), (lacking, False)]


def test_what_a_null_value_record_deleted_does_not_come_back(job: TopicJob) -> None:
    """Key 1 was known before the record that nobody could read, key 2 was not: its null value found nothing."""
    job.send(1, job.event("c", 1))
    job.send(3, job.event("c", 3))
    unread = [job.send(key, job.event(op, key, "x" * 300)) for op, key in (("u", 1), ("c", 2), ("u", 3))]
    job.send(1, None)
    job.send(2, None)
    job.merge(limits={"max_value_bytes": 200})
    before = job.rows()

    answer = run_again(job)

    assert before == [(3, "n")]
    assert job.rows() == [(3, "x" * 300)]
    assert (answer.records, answer.merged, answer.changed, answer.marked) == (3, 3, 1, 3)
    assert marked(job) == [(offset, True) for offset in unread]


def test_what_a_null_value_record_deleted_again_does_not_come_back(job: TopicJob) -> None:
    """The delete that is remembered of the key is older than the record that nobody could read."""
    job.send(1, job.event("c", 1, "first"))
    job.merge()
    job.send(1, None)
    job.merge()
    unread = job.send(1, job.event("c", 1, "x" * 300))
    job.merge(limits={"max_value_bytes": 200})
    job.send(1, None)
    job.merge(limits={"max_value_bytes": 200})

    answer = run_again(job)

    assert (answer.changed, job.rows(), marked(job)) == (0, [], [(unread, True)])


@pytest.mark.parametrize("has_other_topics", [False, True])
def test_a_row_that_a_snapshot_has_read_since_stays(
    job: TopicJob, monkeypatch: pytest.MonkeyPatch, has_other_topics: bool
) -> None:
    """It stands behind the newest change that was known, which the one in quarantine was not.

    Unless rows of the epoch came from other topics: offsets tell nothing of what came before then.
    """
    job.send(1, job.event("c", 1, "first", lsn=50))
    job.merge()
    unread = [job.send(key, job.event("u", key, "x" * 300, lsn=100)) for key in (1, 2, 3)]
    for key in (1, 2):
        job.send(key, job.event("r", key, "read", lsn=90, snapshot="incremental"))
    job.send(3, job.event("u", 3, "newer", lsn=110))
    job.merge(limits={"max_value_bytes": 200})

    if has_other_topics:
        monkeypatch.setattr(Lineage, "placing_of_others", Placing.AS_TOLD)
    answer = run_again(job)

    won = ("x" * 300, 2) if has_other_topics else ("read", 0)
    assert job.rows() == [(1, won[0]), (2, won[0]), (3, "newer")]
    assert (answer.changed, marked(job)) == (won[1], [(offset, True) for offset in unread])


def test_what_a_delete_of_another_topic_may_have_followed_stays_unless_forced(
    job: TopicJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the log the event is newer than the delete; by offsets it is not, and those of two topics do not compare."""
    job.send(1, job.event("c", 1, "first", lsn=50))
    job.merge()
    unread = job.send(1, job.event("u", 1, "x" * 300, lsn=200))
    job.send(1, job.event("d", 1, lsn=100))
    job.merge(limits={"max_value_bytes": 200})
    monkeypatch.setattr(Lineage, "placing_of_others", Placing.AS_TOLD)

    answer = run_again(job)

    assert (answer.unsure, answer.marked, job.rows(), marked(job)) == (1, 0, [], [(unread, False)])
    assert run_again(job, Request(force=True)).changed == 1
    assert job.rows() == [(1, "x" * 300)]


@pytest.mark.parametrize("in_one_batch", [True, False])
def test_a_row_that_a_snapshot_has_confirmed_since_stays(job: TopicJob, in_one_batch: bool) -> None:
    """A read that equals the row is written where a record of its key that nobody could read precedes it."""
    for key in (1, 2, 3):
        job.send(key, job.event("c", key, "first", lsn=50))
    job.merge()
    lost = {"pad": "x" * 300}
    unread = [job.send(key, job.event(op, key, "x" * 300, lsn=100, **lost)) for op, key in (("u", 1), ("d", 2))]
    if not in_one_batch:
        job.merge(limits={"max_value_bytes": 200})
    for key in (1, 2, 3):
        job.send(key, job.event("r", key, "first", lsn=90, snapshot="incremental"))
    job.merge(limits={"max_value_bytes": 200})

    answer = run_again(job)

    assert job.rows() == [(1, "first"), (2, "first"), (3, "first")]
    assert (answer.changed, marked(job)) == (0, [(offset, True) for offset in unread])


def test_before_any_change_a_row_that_a_snapshot_has_confirmed_since_stays(job: TopicJob) -> None:
    """What nobody could read may be the first change; reads that come after its replay stand behind it, too."""
    job.send(1, job.event("r", 1, "first", lsn=90, snapshot="true"))
    job.merge()
    unread = job.send(1, job.event("u", 1, "x" * 300, lsn=100))
    job.merge(limits={"max_value_bytes": 200})
    job.send(1, job.event("r", 1, "first", lsn=120, snapshot="incremental"))
    job.merge(limits={"max_value_bytes": 200})

    answer = run_again(job)

    assert (answer.changed, job.rows(), marked(job)) == (0, [(1, "first")], [(unread, True)])
    job.send(1, job.event("r", 1, "later", lsn=130, snapshot="incremental"))
    job.merge()
    assert job.rows() == [(1, "later")]


def test_what_may_be_older_than_an_event_that_was_skipped_stays_unless_forced(job: TopicJob) -> None:
    """Under `unchanged: skip` a row does not tell what confirmed it."""
    skips = {"unchanged": "skip"}
    for key in (1, 3):
        job.send(key, job.event("c", key, "first", lsn=50))
    job.merge(**skips)
    unread = [job.send(key, job.event("u", key, "x" * 300, lsn=100)) for key in (1, 2, 3)]
    job.send(1, job.event("u", 1, "first", lsn=110))
    job.send(3, job.event("u", 3, "newer", lsn=110))
    job.merge(limits={"max_value_bytes": 200}, **skips)

    answer = run_again(job, **skips)

    assert (answer.unsure, answer.changed, answer.marked) == (1, 1, 2)
    assert "1 may be older than their rows" in answer.said()
    assert job.rows() == [(1, "first"), (2, "x" * 300), (3, "newer")]
    assert marked(job) == list(zip(unread, (False, True, True), strict=True))
    assert run_again(job, Request(force=True), **skips).changed == 1
    assert job.rows()[0] == (1, "x" * 300)


def test_a_job_that_runs_is_asked_and_one_that_does_not_is_not(job: TopicJob) -> None:
    query = job.settings().queries[0]
    with control.held(query) as is_ours, control.held(query) as is_ours_twice:
        assert (is_ours, is_ours_twice) == (True, False)
        request = Request(reason="undecodable", offset=7)
        control.ask_for_replay(query, request)
        assert control.replay_request(query) == request
        assert control.replay_answer(query, request) is None
        control.answer_replay(query, Replayed(id=request.id, records=1))
    assert control.replay_request(query) is None
    assert control.replay_answer(query, request) == Replayed(id=request.id, records=1)
    assert control.replay_answer(query, Request()) is None


def test_a_request_that_another_one_has_replaced_is_asked_again(job: TopicJob, tmp_path: Path) -> None:
    """The answer to the first one does not take the second one away; what cannot be read is removed, not raised."""
    query = job.settings().queries[0]
    first, second = Request(offset=1), Request(offset=2)
    control.ask_for_replay(query, first)
    control.ask_for_replay(query, second)
    control.answer_replay(query, Replayed(id=first.id))

    assert [control.replay_is_asked(query, one) for one in (first, second)] == [False, True]
    assert control.replay_request(query) == second
    control.answer_replay(query, Replayed(id=second.id))
    asked = Path(f"{job.checkpoint}.replay")
    for text in ("", '{"id": "1", "of_a_later_version": true}'):
        asked.write_text(text)
        assert control.replay_request(query) is None
        assert not asked.exists()


def test_a_job_that_runs_with_another_job_file_is_not_taken_for_the_new_one(job: TopicJob) -> None:
    """It would read the records as before, and nobody would know why that does not help."""
    job.send(1, job.event("c", 1, "x" * 300))
    job.merge(limits={"max_value_bytes": 200})
    running = Job(job.settings(limits={"max_value_bytes": 200}), job.spark)
    (now,), (then,) = job.settings().queries, job.settings(limits={"max_value_bytes": 200}).queries

    refused = running.replay(then, Request(settings=now.digest()))
    answer = running.replay(then, Request(settings=then.digest()))

    assert "[JOB_FILE_CHANGED]" in refused.said()
    assert (answer.error, answer.still) == (None, 1)


def test_a_run_beside_another_one_is_refused_and_leaves_its_stop_request_alone(job: TopicJob) -> None:
    query = job.settings().queries[0]
    with control.held(query):
        ((_, asked),) = control.request_stop(job.settings())
        refused = job.run().failures["rows"]

    assert isinstance(refused, ConfigError)
    assert "is already running in another process" in str(refused)
    assert asked.exists()
    with locks.locked(job.folder / "__stream_merge_lock_rows", "query 'copied'"):
        beside = job.run(checkpoint=f"{job.checkpoint}2").failures["rows"]
    assert isinstance(beside, ConfigError)
    assert f"process {os.getpid()} (query 'copied') is writing to {job.target!r}" in str(beside)
    assert asked.exists()
    job.merge()
    assert not asked.exists()
