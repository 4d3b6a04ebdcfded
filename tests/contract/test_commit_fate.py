"""Commits whose answer is lost, refused or late: the table is asked, nothing is guessed.

The faults are real: a log store under Delta writes the commit and throws, or throws and writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from engines import under_test
from prometheus_client import CollectorRegistry
from pyspark.sql import DataFrame, SparkSession

from stream_merge import CommitStateUnknownError, ConfigError, MergeFailedError, MergeMetrics, MergeResult, MergeSink
from stream_merge.merge import calls, commit_outcome
from stream_merge.merge.call import BatchCall
from stream_merge.metrics.catalogue import DELTA_MERGE_METRICS
from stream_merge.model.results import FATES
from stream_merge.model.table_ref import TableRef
from stream_merge.testing import batch, change_rows, run, table_version, target_rows

EVENT = "id bigint, lsn bigint, name string, op string"
LOG = "/table/_delta_log"
TOMBSTONE_LOG = "/__stream_merge_tombstones_table/_delta_log"


def writer(target: str, app_id: str | None, registry: CollectorRegistry | None = None, **settings: Any) -> MergeSink:
    sink = MergeSink(
        target=target,
        keys=["id"],
        sequence_by="lsn",
        apply_as_deletes="op = 'd'",
        except_column_list=["op"],
        app_id=app_id,
        metrics=MergeMetrics(registry=registry or CollectorRegistry()),
        **settings,
    )
    return under_test(sink, sleep=lambda _: None)


@pytest.fixture
def events(spark: SparkSession) -> Callable[..., DataFrame]:
    """A batch from literal events."""
    return lambda *rows: batch(spark, EVENT, *rows)


def fates(result: MergeResult) -> dict[str, int]:
    return {name: n for name in FATES if (n := getattr(result.events, name))}


def sample(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"stream_merge_{name}", {"query": "direct", "target": "table", **labels})


def record_transaction(spark: SparkSession, target: str, app_id: str, batch_id: int) -> None:
    """What a twin of this process leaves behind: a commit with the same application id, here without rows."""
    schema = spark.read.format("delta").load(target).schema
    nothing: Any = spark.createDataFrame([], schema).write.format("delta").mode("append")
    nothing.option("txnAppId", app_id).option("txnVersion", str(batch_id)).save(target)


@pytest.mark.parametrize("app_id", ["mine", None], ids=["with transaction id", "by token only"])
def test_a_commit_whose_answer_was_lost_is_found_and_counted_once(spark, events, log_faults, faulty_table, app_id):
    """The commit carries a token that no other call uses; its history says what it did."""
    registry = CollectorRegistry()
    sink = writer(faulty_table, app_id, registry)
    run(sink, events((1, 1, "ann", "u"), (2, 1, "bob", "u")), 0)
    log_faults.lose_answer(LOG)

    result = run(sink, events((1, 2, "ann 2", "u"), (2, 2, "", "d"), (3, 1, "cid", "u")), 1)

    assert not log_faults.is_armed
    assert (result.outcome, result.attempts, dict(result.conflicts)) == ("committed", 1, {})
    assert fates(result) == {"inserted": 1, "updated": 1, "deleted": 1}
    assert result.version == table_version(spark, faulty_table) == 2
    assert target_rows(spark, faulty_table) == [(1, 2, "ann 2"), (3, 1, "cid")]
    assert change_rows(spark, faulty_table, "id", since=2) == [
        (2, "delete", 2),
        (2, "insert", 3),
        (2, "update_postimage", 1),
        (2, "update_preimage", 1),
    ]
    assert set(result.metrics) < set(DELTA_MERGE_METRICS)
    assert (result.metrics["operationNumSourceRows"], result.metrics["numTargetRowsInserted"]) == (3, 1)
    assert sample(registry, "batches_total", outcome="committed") == 2
    assert sample(registry, "target_rows_inserted_total") == 3
    assert sample(registry, "source_rows_total") == 5
    assert sample(registry, "attempts_total") == 2
    assert sample(registry, "unknown_delta_metrics_total") == 0
    assert sample(registry, "last_committed_version") == 2


def test_a_commit_that_adds_a_column_and_is_put_twice_is_known_again(spark, log_faults, faulty_table):
    """Delta takes it for another one's change of the schema, before it looks at transactions."""
    sink = writer(faulty_table, "mine", schema_evolution=True)
    run(sink, batch(spark, EVENT, (1, 1, "ann", "u")), 0)
    log_faults.put_twice(LOG)

    result = run(sink, batch(spark, f"{EVENT}, more int", (1, 2, "ann 2", "u", 5), (2, 1, "bob", "u", 6)), 1)

    assert not log_faults.is_armed
    assert (result.outcome, result.version) == ("committed", table_version(spark, faulty_table))
    assert fates(result) == {"inserted": 1, "updated": 1}
    assert target_rows(spark, faulty_table, "id", "more") == [(1, 5), (2, 6)]


def test_events_of_a_batch_that_fails_behind_its_commit_are_counted_once(spark, events, faulty_table, monkeypatch):
    """Delivered again it is applied already, and counts nothing."""
    registry = CollectorRegistry()
    sink = writer(faulty_table, "mine", registry)
    run(sink, events((1, 1, "ann", "u")), 0)
    source = events((1, 2, "ann 2", "u"), (2, 1, "bob", "u"), (None, 1, "nobody", "u"))

    def full(*_: object) -> None:
        msg = "java.io.IOException: No space left on device"
        raise RuntimeError(msg)

    monkeypatch.setattr(calls, "note_target", full)
    with pytest.raises(ConfigError) as caught:
        run(sink, source, 1)
    monkeypatch.undo()

    assert f"batch 1 is in {faulty_table!r}, but a later step failed: " in str(caught.value)
    assert run(sink, source, 1).outcome == "skipped_duplicate"
    assert sample(registry, "events_received_total") == 4
    assert [sample(registry, "events_total", fate=fate) for fate in ("inserted", "updated", "quarantined")] == [2, 1, 1]
    assert sample(registry, "quarantined_events_total", reason="null_key") == 1
    assert [sample(registry, "batches_total", outcome=one) for one in ("committed", "failed", "skipped_duplicate")] == [
        *(1, 1, 1)
    ]


def test_an_event_that_a_late_delete_undid_is_none_that_was_merged(
    spark, events, log_faults, faulty_table, monkeypatch
):
    """Also where the call fails behind its second commit."""
    registry = CollectorRegistry()
    mine, other = writer(faulty_table, "mine", registry), writer(faulty_table, "other")
    run(mine, events((1, 1, "ann", "u")), 0)

    def full_for_mine(call: BatchCall, _: object) -> None:
        if call.caller.identity == "mine":
            msg = "java.io.IOException: No space left on device"
            raise RuntimeError(msg)

    monkeypatch.setattr(calls, "note_target", full_for_mine)
    with pytest.raises(ConfigError, match="but a later step failed"):
        log_faults.overtake(
            "/table/_delta_log",
            lambda: run(mine, events((9, 5, "ghost", "u"), (2, 5, "bob", "u")), 1),
            lambda: run(other, events((9, 7, "", "d")), 0),
        )

    assert target_rows(spark, faulty_table) == [(1, 1, "ann"), (2, 5, "bob")]
    assert [sample(registry, "events_total", fate=fate) for fate in ("inserted", "stale")] == [2, 1]


def test_a_lost_commit_is_found_below_later_commits(spark, events, log_faults, faulty_table, monkeypatch):
    """Another writer may commit before the table is asked."""
    mine, other = writer(faulty_table, "mine"), writer(faulty_table, "other")
    run(mine, events((1, 1, "ann", "u")), 0)
    ask = commit_outcome.landed

    def late(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(commit_outcome, "landed", ask)
        run(other, events((3, 1, "cid", "u")), 0)
        return ask(*args, **kwargs)

    monkeypatch.setattr(commit_outcome, "landed", late)
    log_faults.lose_answer(LOG)

    result = run(mine, events((2, 1, "bob", "u")), 1)

    assert (result.outcome, result.version) == ("committed", 2)
    assert fates(result) == {"inserted": 1}
    assert table_version(spark, faulty_table) == 3


def test_a_commit_that_failed_before_it_was_written_fails_the_batch(spark, events, log_faults, faulty_table):
    """The target is unchanged, no further attempt is made, and the same batch can be delivered again."""
    registry = CollectorRegistry()
    sink = writer(faulty_table, "mine", registry)
    run(sink, events((1, 1, "ann", "u")), 0)
    log_faults.refuse_commit(LOG)

    with pytest.raises(MergeFailedError) as caught:
        run(sink, events((1, 2, "ann 2", "u")), 1)

    assert str(caught.value) == (
        f"[MERGE_FAILED] merging batch 1 into {faulty_table!r} failed, nothing was committed:"
        " IOException: injected: the disk is full"
    )
    assert (caught.value.target, caught.value.batch_id) == (faulty_table, 1)
    assert target_rows(spark, faulty_table) == [(1, 1, "ann")]
    assert table_version(spark, faulty_table) == 1
    assert sample(registry, "attempts_total") == 2
    assert sample(registry, "batches_total", outcome="failed") == 1
    assert run(sink, events((1, 2, "ann 2", "u")), 1).outcome == "committed"


def test_a_table_that_cannot_be_read_leaves_the_state_unknown(spark, events, log_faults, faulty_table):
    """No blind second attempt; once the table can be read, the next delivery sees that the batch is there."""
    registry = CollectorRegistry()
    sink = writer(faulty_table, "mine", registry)
    run(sink, events((1, 1, "ann", "u")), 0)
    log_faults.lose_answer_and_table(LOG)

    with pytest.raises(CommitStateUnknownError) as caught:
        run(sink, events((2, 1, "bob", "u")), 1)

    error = caught.value
    assert error.code == "COMMIT_STATE_UNKNOWN"
    assert f"batch 1 failed while committing to {faulty_table!r}, and the table cannot be read" in str(error)
    assert (error.target, error.batch_id) == (faulty_table, 1)
    assert error.__notes__ == ["reading the table failed with: IOException: injected: the storage does not answer"]
    assert "the answer to the commit was lost" in str(error.__cause__)
    assert sample(registry, "attempts_total") == 2
    assert sample(registry, "batches_total", outcome="failed") == 1

    log_faults.disarm()
    assert run(sink, events((2, 1, "bob", "u")), 1).outcome == "skipped_duplicate"
    assert target_rows(spark, faulty_table) == [(1, 1, "ann"), (2, 1, "bob")]
    assert change_rows(spark, faulty_table, "id") == [(1, "insert", 1), (2, "insert", 2)]


def test_a_batch_that_a_twin_committed_meanwhile_is_a_duplicate(spark, events, log_faults, faulty_table):
    """`ConcurrentTransactionException`: the recorded id has reached this batch, so it is applied."""
    registry = CollectorRegistry()
    sink = writer(faulty_table, "mine", registry)
    run(sink, events((1, 1, "ann", "u")), 0)

    log_faults.overtake(
        LOG,
        lambda: run(sink, events((2, 1, "bob", "u")), 1),
        lambda: record_transaction(spark, faulty_table, "mine/target", 1),
    )

    result = sink.last_result
    assert (result.outcome, result.attempts, result.version, fates(result)) == ("skipped_duplicate", 1, None, {})
    assert table_version(spark, faulty_table) == 2
    assert target_rows(spark, faulty_table) == [(1, 1, "ann")]
    assert sample(registry, "events_received_total") == 1


def test_a_twin_that_is_behind_only_costs_another_attempt(spark, events, log_faults, faulty_table):
    """The recorded id is below this batch: nothing of it is applied."""
    sink = writer(faulty_table, "mine")
    run(sink, events((1, 1, "ann", "u")), 0)

    log_faults.overtake(
        LOG,
        lambda: run(sink, events((2, 1, "bob", "u")), 5),
        lambda: record_transaction(spark, faulty_table, "mine/target", 4),
    )

    result = sink.last_result
    assert (result.outcome, result.attempts) == ("committed", 2)
    assert dict(result.conflicts) == {"ConcurrentTransactionException": 1}
    assert target_rows(spark, faulty_table) == [(1, 1, "ann"), (2, 1, "bob")]


def test_a_lost_answer_of_the_tombstones_is_not_written_twice(spark, events, log_faults, faulty_table):
    """The batch fails before the target is touched; the next delivery finds the entry by its transaction id."""
    sink = writer(faulty_table, "mine")
    run(sink, events((1, 1, "ann", "u"), (2, 1, "bob", "u")), 0)
    run(sink, events((1, 2, "", "d")), 1)
    log_faults.lose_answer(TOMBSTONE_LOG)

    with pytest.raises(MergeFailedError, match="the answer to the commit was lost"):
        run(sink, events((2, 2, "", "d")), 2)

    assert target_rows(spark, faulty_table) == [(2, 1, "bob")]
    assert fates(run(sink, events((2, 2, "", "d")), 2)) == {"deleted": 1}
    assert target_rows(spark, TableRef(faulty_table).tombstones, "id") == [(1,), (2,)]


def test_a_table_whose_creation_lost_its_answer_is_used(spark, events, log_faults, faulty_table):
    log_faults.lose_answer(LOG)

    result = run(writer(faulty_table, "mine"), events((1, 1, "ann", "u")), 0)

    assert not log_faults.is_armed
    assert fates(result) == {"inserted": 1}


def test_a_table_that_cannot_be_created_is_one_sentence(events, log_faults, faulty_table):
    log_faults.refuse_commit(LOG)

    with pytest.raises(ConfigError) as caught:
        run(writer(faulty_table, "mine"), events((1, 1, "ann", "u")), 0)

    assert str(caught.value) == (
        f"[WRITE_FAILED] table {faulty_table!r} cannot be created: IOException: injected: the disk is full"
    )
