"""Two writers on one table: real Delta conflicts, placed exactly between a snapshot and its commit."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from delta.exceptions import ConcurrentAppendException
from delta_log_files import Action, action_of, commits_of, lines_of
from engines import under_test
from log_faults import LogFaults
from prometheus_client import CollectorRegistry
from pyspark import InheritableThread
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from stream_merge import CommitConflictError, ConfigError, MergeMetrics, MergeResult, MergeSink, RetryPolicy
from stream_merge.engines.driver.merger import DriverMerger
from stream_merge.engines.spark.merger import SparkMerger
from stream_merge.merge import commit, steps
from stream_merge.merge.call import BatchCall
from stream_merge.model.results import FATES
from stream_merge.model.table_ref import TableRef
from stream_merge.tables import spark_table
from stream_merge.testing import batch, change_rows, run, target_rows

pytestmark = pytest.mark.engines("auto", "spark", "rewrite")

EVENT = "id bigint, lsn bigint, name string, op string"
LOG = "/table/_delta_log"


class Killed(Exception):  # noqa: N818
    """Stands for the end of a process."""


class Waits(list[float]):
    """Notes the waits of a sink, and really waits a little."""

    def __call__(self, seconds: float) -> None:
        self.append(seconds)
        time.sleep(0.05)


def writer(target: str, app_id: str, **settings: Any) -> MergeSink:
    """A sink that never waits long."""
    settings = {"sequence_by": "lsn", "except_column_list": ["op"], **settings}
    sink = MergeSink(target=target, keys=["id"], apply_as_deletes="op = 'd'", app_id=app_id, **settings)
    return under_test(sink, sleep=Waits())


@pytest.fixture
def events(spark: SparkSession) -> Callable[..., DataFrame]:
    """A batch from literal events."""
    return lambda *rows: batch(spark, EVENT, *rows)


def fates(result: MergeResult) -> dict[str, int]:
    """The fates that events had."""
    counts = {fate: getattr(result.events, fate) for fate in FATES}
    assert sum(counts.values()) == result.events.received
    return {fate: n for fate, n in counts.items() if n}


def committed(target: str) -> list[list[tuple[str, Action]]]:
    """The actions of each commit, oldest first, as they are in the log."""
    _, commits = commits_of(Path(target.removeprefix("faulty:")))
    return [[action_of(line) for line in lines_of(text)] for text in commits.values()]


def operations(target: str) -> list[str]:
    """What was committed, oldest first."""
    return [action["operation"] for commit in committed(target) for kind, action in commit if kind == "commitInfo"]


def newest(target: str) -> int:
    """The newest version."""
    return len(committed(target)) - 1


# -- conflicts that are retried -----------------------------------------------------------------


@pytest.mark.smoke
def test_a_merge_that_loses_against_another_merge_is_tried_again(spark, events, log_faults, faulty_table):
    """The loser starts anew on a fresh table: rows, ledger and metrics are as if it had run once."""
    registry = CollectorRegistry()
    evaluated = spark.sparkContext.accumulator(0)

    @F.udf("string", useArrow=False)
    def counted(name: str) -> str:
        evaluated.add(1)
        return name

    mine = writer(faulty_table, "mine", metrics=MergeMetrics(registry=registry))
    other = writer(faulty_table, "other")
    run(mine, events((1, 1, "ann", "u"), (2, 1, "bob", "u")), 0)
    source = events((1, 5, "ann 5", "u"), (2, 0, "late", "u"), (4, 5, "dan", "u"))
    source = source.withColumn("name", counted("name"))

    log_faults.overtake(
        LOG,
        lambda: run(mine, source, 1),
        lambda: run(other, events((1, 4, "ann 4", "u"), (3, 4, "cid", "u")), 0),
    )

    result = mine.last_result
    assert target_rows(spark, faulty_table) == [(1, 5, "ann 5"), (2, 1, "bob"), (3, 4, "cid"), (4, 5, "dan")]
    assert (result.outcome, result.attempts, dict(result.conflicts)) == (
        "committed",
        2,
        {"ConcurrentAppendException": 1},
    )
    assert fates(result) == {"unaffected": 1, "inserted": 1, "updated": 1}
    assert result.version == newest(faulty_table)
    assert evaluated.value == 3
    assert len(mine._calls.sleep) == 1
    assert 0.05 <= result.seconds["backoff"] < 5
    sink = {"query": "direct", "target": "table"}
    assert {
        name: registry.get_sample_value(f"stream_merge_{name}", {**sink, **labels})
        for name, labels in {
            "attempts_total": {},
            "conflicts_total": {"conflict": "ConcurrentAppendException"},
            "batches_total": {"outcome": "committed"},
            "events_received_total": {},
            "target_rows_inserted_total": {},
            "target_rows_updated_total": {},
            "backoff_seconds_total": {},
        }.items()
    } == {
        "attempts_total": 3.0,
        "conflicts_total": 1.0,
        "batches_total": 2.0,
        "events_received_total": 5.0,
        "target_rows_inserted_total": 3.0,
        "target_rows_updated_total": 1.0,
        "backoff_seconds_total": mine._calls.sleep[0],
    }


def test_a_merge_that_loses_against_optimize_is_tried_again(spark, events, log_faults, faulty_table, caplog):
    """OPTIMIZE removes the files that the merge was about to rewrite."""
    sink = writer(faulty_table, "mine")
    run(sink, events((1, 1, "ann", "u")), 0)
    run(sink, events((2, 1, "bob", "u")), 1)

    with caplog.at_level(logging.WARNING, logger="stream_merge"):
        log_faults.overtake(
            LOG,
            lambda: run(sink, events((1, 2, "", "d"), (2, 2, "bob 2", "u")), 2),
            lambda: spark.sql(f"OPTIMIZE delta.`{faulty_table}`").collect(),
        )

    result = sink.last_result
    assert operations(faulty_table) == ["CREATE TABLE", "MERGE", "MERGE", "OPTIMIZE", "MERGE"]
    assert target_rows(spark, faulty_table) == [(2, 2, "bob 2")]
    assert change_rows(spark, faulty_table, "id", "name", since=3) == [
        (4, "delete", 1, "ann"),
        (4, "update_postimage", 2, "bob 2"),
        (4, "update_preimage", 2, "bob"),
    ]
    assert (result.attempts, dict(result.conflicts)) == (2, {"ConcurrentAppendException": 1})
    assert fates(result) == {"updated": 1, "deleted": 1}
    warnings = [record for record in caplog.records if record.event == "commit_conflict"]
    assert [(r.target, r.batch_id, r.conflict, r.attempt) for r in warnings] == [
        (faulty_table, 2, "ConcurrentAppendException", 1)
    ]


def test_a_column_that_appears_during_the_merge_is_kept(spark, events, log_faults, faulty_table):
    """The second attempt sees the new schema: a `DeltaTable` built before would be refused."""
    sink = writer(faulty_table, "mine")
    run(sink, events((1, 1, "ann", "u"), (2, 1, "bob", "u")), 0)

    def add_column() -> None:
        spark.sql(f"ALTER TABLE delta.`{faulty_table}` ADD COLUMNS (city string)")
        spark.sql(f"UPDATE delta.`{faulty_table}` SET city = 'Bonn'")

    log_faults.overtake(LOG, lambda: run(sink, events((1, 2, "ann 2", "u"), (3, 1, "cid", "u")), 1), add_column)

    assert target_rows(spark, faulty_table) == [(1, 2, "ann 2", "Bonn"), (2, 1, "bob", "Bonn"), (3, 1, "cid", None)]
    assert sink.last_result.attempts == 2
    assert dict(sink.last_result.conflicts) == {"MetadataChangedException": 1}


def test_an_exhausted_policy_fails_the_batch_and_leaves_the_table_alone(spark, events, log_faults, faulty_table):
    """The caller gets the last conflict; the batch can be delivered again."""
    registry = CollectorRegistry()
    mine = writer(faulty_table, "mine", retry=RetryPolicy(attempts=1), metrics=MergeMetrics(registry=registry))
    other = writer(faulty_table, "other")
    run(mine, events((1, 1, "ann", "u")), 0)

    with pytest.raises(CommitConflictError) as caught:
        log_faults.overtake(
            LOG, lambda: run(mine, events((1, 3, "mine", "u")), 1), lambda: run(other, events((1, 2, "other", "u")), 0)
        )

    error = caught.value
    assert (error.target, error.batch_id, error.conflict) == (faulty_table, 1, "ConcurrentAppendException")
    assert error.attempts == 1
    assert error.seconds > 0
    assert error.__notes__ == [f"gave up after 1 attempt(s) in {error.seconds:.1f} s"]
    assert type(error.__cause__).__name__ == "ConcurrentAppendException"
    assert target_rows(spark, faulty_table) == [(1, 2, "other")]
    sink = {"query": "direct", "target": "table"}
    assert registry.get_sample_value("stream_merge_batches_total", {**sink, "outcome": "failed"}) == 1
    assert registry.get_sample_value("stream_merge_retries_exhausted_total", sink) == 1
    assert mine.last_result.batch_id == 0

    assert run(mine, events((1, 3, "mine", "u")), 1).outcome == "committed"
    assert target_rows(spark, faulty_table) == [(1, 3, "mine")]


@pytest.mark.engines("auto")
def test_two_writers_at_full_speed_lose_no_event(spark, events, tmp_table):
    """Both change the same key in one JVM until they have met; needs no injected fault."""
    retry = RetryPolicy(attempts=30)
    writers = [writer(tmp_table, name, engine="spark", retry=retry) for name in ("left", "right")]
    run(writers[0], events((0, 0, "start", "u")), 0)
    results: list[MergeResult] = []
    failures: list[BaseException] = []
    rounds = 6

    def deliver(number: int, start: threading.Barrier, batch_id: int) -> None:
        try:
            start.wait(60)
            lsn = 10 * batch_id + number
            results.append(run(writers[number], events((0, lsn, f"{lsn}", "u"), (lsn, lsn, "own", "u")), batch_id))
        except BaseException as err:
            failures.append(err)

    for batch_id in range(1, rounds + 1):
        start = threading.Barrier(2)
        threads = [InheritableThread(target=deliver, args=(number, start, batch_id)) for number in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        if any(result.conflicts for result in results):
            break

    assert failures == []
    assert any(result.conflicts for result in results), f"no conflict in {rounds} rounds"
    assert {result.outcome for result in results} == {"committed"}
    assert sum(result.events.inserted for result in results) == len(results)
    lsn = max(result.batch_id for result in results) * 10 + 1
    rows = {row[0]: row[1] for row in target_rows(spark, tmp_table, "id", "lsn")}
    assert rows.pop(0) == lsn
    assert sorted(rows) == sorted(10 * r.batch_id + n for r in results[::2] for n in (0, 1))


# -- deletes that race upserts ------------------------------------------------------------------


def test_a_delete_remembered_between_two_attempts_refuses_the_event(spark, events, log_faults, faulty_table):
    """Every attempt reads the tombstones afresh."""
    mine, other = writer(faulty_table, "mine"), writer(faulty_table, "other")
    run(mine, events((1, 1, "ann", "u")), 0)

    log_faults.overtake(
        LOG,
        lambda: run(mine, events((9, 5, "ghost", "u"), (2, 5, "bob", "u")), 1),
        lambda: run(other, events((9, 7, "", "d"), (3, 1, "cid", "u")), 0),
    )

    assert target_rows(spark, faulty_table) == [(1, 1, "ann"), (2, 5, "bob"), (3, 1, "cid")]
    assert mine.last_result.attempts == 2
    assert fates(mine.last_result) == {"stale": 1, "inserted": 1}
    assert all(row[2] != 9 for row in change_rows(spark, faulty_table, "id"))


def test_a_delete_that_races_an_older_upsert_wins_by_a_second_commit(spark, events, log_faults, faulty_table):
    """A delete of an absent key adds no data, so Delta sees no conflict: the re-check does."""
    mine, other = writer(faulty_table, "mine"), writer(faulty_table, "other")
    run(mine, events((1, 1, "ann", "u")), 0)

    log_faults.overtake(
        LOG,
        lambda: run(mine, events((9, 5, "ghost", "u"), (2, 5, "bob", "u")), 1),
        lambda: run(other, events((9, 7, "", "d")), 0),
    )

    result = mine.last_result
    assert target_rows(spark, faulty_table) == [(1, 1, "ann"), (2, 5, "bob")]
    assert (result.outcome, result.attempts, dict(result.conflicts)) == ("committed", 1, {})
    assert fates(result) == {"stale": 1, "inserted": 1}
    assert result.seconds["recheck"] > 0
    assert change_rows(spark, faulty_table, "id", since=result.version) == [
        (result.version, "insert", 2),
        (result.version, "insert", 9),
        (result.version + 1, "delete", 9),
    ]
    assert recorded(faulty_table) == {"mine/target": 1, "mine/recheck": 1}

    replayed = run(mine, events((9, 5, "ghost", "u"), (2, 5, "bob", "u")), 1)
    assert replayed.outcome == "skipped_duplicate"
    assert newest(faulty_table) == result.version + 1
    assert run(other, events((9, 6, "still older", "u")), 1).events.stale == 1
    assert run(other, events((9, 8, "newer", "u")), 2).events.inserted == 1


def test_a_batch_is_done_though_nobody_can_tell_what_its_repaired_rows_were_counted_as(
    spark, events, log_faults, faulty_table, monkeypatch
):
    """Of a table with wider types delta-rs cannot read the feed; batch and repair are committed by then."""
    mine, other = writer(faulty_table, "mine"), writer(faulty_table, "other")
    run(mine, events((1, 1, "ann", "u")), 0)

    def unreadable(*_: object) -> None:
        msg = "External error: Transaction failed: Unsupported table features required: [TypeWidening]"
        raise RuntimeError(msg)

    for merger in (SparkMerger, DriverMerger):
        monkeypatch.setattr(merger, "counted_as", unreadable)

    log_faults.overtake(
        LOG,
        lambda: run(mine, events((9, 5, "ghost", "u"), (2, 5, "bob", "u")), 1),
        lambda: run(other, events((9, 7, "", "d")), 0),
    )

    assert (mine.last_result.outcome, fates(mine.last_result)) == ("committed", {"stale": 1, "inserted": 1})
    assert target_rows(spark, faulty_table) == [(1, 1, "ann"), (2, 5, "bob")]


def test_a_repair_that_loses_every_attempt_says_that_the_batch_is_committed(
    spark, events, log_faults, faulty_table, monkeypatch
):
    mine, other = writer(faulty_table, "mine", retry=RetryPolicy(attempts=1)), writer(faulty_table, "other")
    run(mine, events((1, 1, "ann", "u")), 0)

    def lost(*_: object) -> None:
        msg = "somebody was faster"
        raise ConcurrentAppendException(msg, "")

    for merger in (SparkMerger, DriverMerger):
        monkeypatch.setattr(merger, "repair", lost)

    with pytest.raises(CommitConflictError) as caught:
        log_faults.overtake(
            LOG,
            lambda: run(mine, events((9, 5, "ghost", "u"), (2, 5, "bob", "u")), 1),
            lambda: run(other, events((9, 7, "", "d")), 0),
        )

    assert "the batch is committed; run it again to remove rows that later deletes refuse" in str(caught.value)
    monkeypatch.undo()
    assert run(mine, events((9, 5, "ghost", "u"), (2, 5, "bob", "u")), 1).outcome == "skipped_duplicate"
    assert target_rows(spark, faulty_table) == [(1, 1, "ann"), (2, 5, "bob")]


def test_a_row_newer_than_the_delete_survives_the_recheck(spark, events, log_faults, faulty_table):
    """The repair deletes only rows whose stored sequence is older than the tombstone."""
    mine, other = writer(faulty_table, "mine"), writer(faulty_table, "other")
    run(mine, events((1, 1, "ann", "u")), 0)

    log_faults.overtake(
        LOG,
        lambda: run(mine, events((9, 8, "newer", "u")), 1),
        lambda: run(other, events((9, 7, "", "d")), 0),
    )

    assert target_rows(spark, faulty_table) == [(1, 1, "ann"), (9, 8, "newer")]
    assert fates(mine.last_result) == {"inserted": 1}


def test_an_update_that_a_dead_writers_delete_refuses_is_undone(spark, events, log_faults, faulty_table, killed):
    """The other writer dies after it has remembered the delete: the event that was an update is stale."""
    mine, other = writer(faulty_table, "mine"), writer(faulty_table, "other")
    run(mine, events((1, 1, "ann", "u"), (9, 1, "old", "u")), 0)

    def remember_and_die() -> None:
        with killed("other", before="commit"):
            run(other, events((9, 7, "", "d")), 0)

    log_faults.overtake(LOG, lambda: run(mine, events((9, 5, "ghost", "u"), (1, 5, "ann 5", "u")), 1), remember_and_die)

    assert target_rows(spark, faulty_table) == [(1, 5, "ann 5")]
    assert fates(mine.last_result) == {"stale": 1, "updated": 1}
    assert run(other, events((9, 7, "", "d")), 0).outcome == "no_change"


def test_a_batch_found_applied_is_still_rechecked(spark, events, log_faults, faulty_table, killed):
    """A crash between commit and re-check must not leave the ghost: the next delivery removes it."""
    mine, other = writer(faulty_table, "mine"), writer(faulty_table, "other")
    run(mine, events((1, 1, "ann", "u")), 0)
    source = events((9, 5, "ghost", "u"), (2, 5, "bob", "u"))
    with killed("mine", before="recheck"):
        log_faults.overtake(LOG, lambda: run(mine, source, 1), lambda: run(other, events((9, 7, "", "d")), 0))
    assert (9, 5, "ghost") in target_rows(spark, faulty_table)

    result = run(mine, source, 1)

    assert (result.outcome, fates(result)) == ("skipped_duplicate", {})
    assert target_rows(spark, faulty_table) == [(1, 1, "ann"), (2, 5, "bob")]
    assert recorded(faulty_table) == {"mine/target": 1, "mine/recheck": 1}


@pytest.mark.parametrize("beside", [(), ((2, 5, "bob", "u"),)], ids=["every event refused", "one event refused"])
def test_a_batch_that_a_twin_applied_meanwhile_is_rechecked(spark, events, log_faults, faulty_table, beside):
    """A twin in another process merged the batch without knowing the delete, and died before its re-check."""
    mine, other = writer(faulty_table, "mine"), writer(faulty_table, "other")
    run(mine, events((1, 1, "ann", "u")), 0)
    source = events((9, 5, "ghost", "u"), *beside)

    def delete_and_let_a_twin_commit() -> None:
        run(other, events((9, 7, "", "d")), 0)
        twin = source.drop("op").write.format("delta").mode("append")
        twin.option("txnAppId", "mine/target").option("txnVersion", "1").save(faulty_table)

    log_faults.overtake(LOG, lambda: run(mine, source, 1), delete_and_let_a_twin_commit)

    result = mine.last_result
    assert (result.outcome, fates(result)) == ("skipped_duplicate", {})
    assert target_rows(spark, faulty_table, "id") == [(1,), *[(row[0],) for row in beside]]


# -- two writers and one missing table ----------------------------------------------------------


@pytest.fixture
def at_once(log_faults: LogFaults) -> Callable[..., None]:
    """Start two calls; the second one meets the first one's table after its folder and before its first commit."""

    def both(log: str, first: Callable[[], object], second: Callable[[], object]) -> None:
        overtaking: list[Future[object]] = []
        with ThreadPoolExecutor(1) as pool:

            def start_the_other_and_go_on() -> None:
                overtaking.append(pool.submit(second))
                time.sleep(1)

            log_faults.overtake(log, first, start_the_other_and_go_on)
            overtaking[0].result(timeout=90)

    return both


@pytest.mark.smoke
def test_two_writers_create_one_missing_table(spark, events, at_once, faulty_table):
    """One creates it, the other goes on; the same for tombstones and quarantine."""
    mine, other = writer(faulty_table, "mine"), writer(faulty_table, "other")

    at_once(
        LOG,
        lambda: run(mine, events((1, 1, "mine", "u"), (5, 1, "", "d"), (None, 1, "mine", "u")), 0),
        lambda: run(other, events((2, 1, "other", "u"), (6, 1, "", "d"), (None, 1, "other", "u")), 0),
    )

    assert target_rows(spark, faulty_table) == [(1, 1, "mine"), (2, 1, "other")]
    assert fates(mine.last_result) == {"quarantined": 1, "unaffected": 1, "inserted": 1}
    assert fates(other.last_result) == {"quarantined": 1, "unaffected": 1, "inserted": 1}
    assert operations(faulty_table).count("CREATE TABLE") == 1
    assert target_rows(spark, sibling(faulty_table, "tombstones"), "id") == [(5,), (6,)]
    assert len(target_rows(spark, sibling(faulty_table, "quarantine"))) == 2


@pytest.mark.parametrize("kind", ["tombstones", "quarantine"])
def test_two_writers_create_one_missing_side_table(spark, events, at_once, faulty_table, kind):
    mine, other = writer(faulty_table, "mine"), writer(faulty_table, "other")
    run(mine, events((1, 1, "ann", "u")), 0)

    at_once(
        f"/__stream_merge_{kind}_table/_delta_log",
        lambda: run(mine, events((5, 1, "", "d"), (None, 1, "mine", "u")), 1),
        lambda: run(other, events((6, 1, "", "d"), (None, 1, "other", "u")), 0),
    )

    assert len(target_rows(spark, sibling(faulty_table, kind))) == 2
    assert fates(mine.last_result) == fates(other.last_result) == {"quarantined": 1, "unaffected": 1}


def test_two_writers_create_one_missing_catalog_table(spark, events, at_once, faulty_table):
    """A catalog knows the table only after its first commit."""
    spark.sql(f"CREATE DATABASE two_writers LOCATION '{faulty_table}.db'")
    try:
        mine, other = writer("two_writers.orders", "mine"), writer("two_writers.orders", "other")

        at_once(
            "/orders/_delta_log",
            lambda: run(mine, events((1, 1, "mine", "u")), 0),
            lambda: run(other, events((2, 1, "other", "u")), 0),
        )

        assert target_rows(spark, "two_writers.orders") == [(1, 1, "mine"), (2, 1, "other")]
    finally:
        spark.sql("DROP DATABASE two_writers CASCADE")


def test_a_table_that_appears_between_two_looks_is_there(spark, tmp_table, monkeypatch):
    """The first look sees no log, the next one files of another writer, who has made the table by the last one.

    A catalog is asked once, by name.
    """
    look, looks = spark_table.delta_table, []

    def too_early_at_first(session, target):
        looks.append(target)
        return look(session, TableRef(f"{target}_not_there_yet") if len(looks) == 1 else target)

    spark.sql(f"CREATE TABLE delta.`{tmp_table}` (id bigint) USING delta")
    monkeypatch.setattr(spark_table, "delta_table", too_early_at_first)
    monkeypatch.setattr(spark_table, "path_is_occupied", lambda *_: True)
    found = spark_table.find(spark, TableRef(tmp_table))

    assert found is not None
    assert found.version == 0
    assert looks == [tmp_table, tmp_table]


def test_two_writers_prepare_one_existing_table(spark, events, log_faults, faulty_table):
    """The change feed and the sequence column are added once; rows from before are older than any event."""
    spark.sql(f"CREATE TABLE delta.`{faulty_table}` (id bigint, name string) USING delta")
    spark.sql(f"INSERT INTO delta.`{faulty_table}` VALUES (1, 'before'), (2, 'before')")
    apart = {"except_column_list": ["op", "lsn"]}
    mine, other = writer(faulty_table, "mine", **apart), writer(faulty_table, "other", **apart)

    log_faults.overtake(
        LOG,
        lambda: run(mine, events((1, 1, "mine", "u")), 0),
        lambda: run(other, events((2, 1, "other", "u")), 0),
    )

    assert target_rows(spark, faulty_table) == [(1, "mine"), (2, "other")]
    assert spark.read.format("delta").load(faulty_table).columns == ["id", "name", "__stream_merge_sequence"]
    assert fates(mine.last_result) == fates(other.last_result) == {"updated": 1}


# -- identities ---------------------------------------------------------------------------------


def test_two_sinks_under_one_identity_are_refused_while_both_run(spark, events, log_faults, faulty_table):
    """One of them would skip the other's batches without a word."""
    mine, clone = writer(faulty_table, "mine"), writer(faulty_table, "mine")
    named = writer(faulty_table, "other")
    run(mine, events((1, 1, "ann", "u")), 0)

    def clash() -> None:
        before = newest(faulty_table)
        with pytest.raises(ConfigError) as caught:
            run(clone, events((7, 7, "clone", "u")), 1)
        assert str(caught.value) == (
            f"[DUPLICATE_IDENTITY] another sink is merging into {faulty_table!r} under the same identity 'mine'; give"
            " each sink of a query its own name="
        )
        assert newest(faulty_table) == before
        run(named, events((3, 1, "cid", "u")), 0)

    log_faults.overtake(LOG, lambda: run(mine, events((2, 2, "bob", "u")), 1), clash)

    assert target_rows(spark, faulty_table) == [(1, 1, "ann"), (2, 2, "bob"), (3, 1, "cid")]
    assert run(clone, events((2, 2, "bob", "u")), 1).outcome == "skipped_duplicate"


# -- helpers ------------------------------------------------------------------------------------


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Let the calls of one writer die before a step."""

    @contextmanager
    def dying(app_id: str, *, before: str) -> Iterator[None]:
        owner = commit if before == "commit" else steps
        step = getattr(owner, before)

        def killed_or_not(call: BatchCall, *args: Any) -> Any:
            if call.caller.identity == app_id:
                raise Killed
            return step(call, *args)

        died = False
        with monkeypatch.context() as patch:
            patch.setattr(owner, before, killed_or_not)
            try:
                yield
            except Killed:
                died = True
        assert died

    return dying


def recorded(target: str) -> dict[str, int]:
    """Application ids in a table's log and the highest batch id of each."""
    txns = [(txn["version"], txn["appId"]) for commit in committed(target) for kind, txn in commit if kind == "txn"]
    return {app_id: version for version, app_id in sorted(txns)}


def sibling(target: str, kind: str) -> str:
    """Where a table's tombstones or quarantined events lie."""
    parent, _, table = target.rpartition("/")
    return f"{parent}/__stream_merge_{kind}_{table}"
