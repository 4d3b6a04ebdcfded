"""Which commit carries which transaction id, what a batch id belongs to, and that neither leaks."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import scenario
from disk import on_disk, with_scheme
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from traces import USER_METADATA_CONF, commits, transactions, user_metadata

from stream_merge import ConfigError, MergeFailedError, MergeSink
from stream_merge.merge import commit as committing
from stream_merge.model.locations import is_on_s3
from stream_merge.model.results import EventCounts
from stream_merge.model.table_ref import TableRef
from stream_merge.tables import spark_table
from stream_merge.testing import assert_replay_stable, run, target_rows

APP_ID_CONF = "spark.databricks.delta.write.txnAppId"
BATCH_ID_CONF = "spark.databricks.delta.write.txnVersion"
LAST_COMMIT_CONF = "spark.databricks.delta.lastCommitVersionInSession"

WAIT_SECONDS = 120


def sibling(table: str, kind: str) -> Path:
    return on_disk(table).parent / f"__stream_merge_{kind}_{on_disk(table).name}"


def confs(session: SparkSession) -> dict[str, str]:
    return {row.key: row.value for row in session.sql("SET").collect()}


def table_id(table: str) -> str:
    return next(a["metaData"]["id"] for a in commits(table)[0] if "metaData" in a)


def deliver(spark: SparkSession, sink: MergeSink, values: str, batch_id: int) -> str:
    return run(sink, scenario.events(spark, values), batch_id).outcome


@pytest.fixture
def source(tmp_path: Path) -> Callable[..., Path]:
    """Adds batches to the folder that a query of the test reads."""

    def add(*batches: str) -> Path:
        scenario.write_files(tmp_path / "source", batches)
        return tmp_path / "source"

    return add


def test_every_commit_of_a_batch_has_an_id_of_its_own(spark: SparkSession, tmp_table: str):
    """`<identity>/<role>`; a quarantine outlives a dropped target, so its ids carry the target's table id."""
    sink = scenario.sink(tmp_table, app_id="orders")
    deliver(spark, sink, scenario.BATCHES[0], 0)
    scenario.race(spark, tmp_table)
    deliver(spark, sink, scenario.BATCHES[1], 1)

    assert transactions(tmp_table) == [
        [],
        [("orders/target", 0)],
        [("orders/target", 1)],
        [("orders/recheck", 1)],
    ]
    tombstones = transactions(sibling(tmp_table, "tombstones"))
    forgotten = [[(f"orders/tombstones-forget/{table_id(tmp_table)}", 1)]]
    if is_on_s3(tmp_table) and tombstones[-1:] != forgotten:
        forgotten = []  # delta-rs has kept them for its next commit there
    assert tombstones == [
        [],
        [(f"orders/tombstones-add/{table_id(tmp_table)}", 0)],
        [(f"orders/tombstones-add/{table_id(tmp_table)}", 1)],
        [(f"rival/tombstones-add/{table_id(tmp_table)}", 0)],
        *forgotten,
    ]
    assert transactions(sibling(tmp_table, "quarantine")) == [
        [],
        [(f"orders/quarantine/{table_id(tmp_table)}", 1)],
    ]


def test_preparing_an_existing_table_carries_no_id(spark: SparkSession, tmp_table: str):
    """Delta would take the batch's merge for a repetition of the ALTER TABLE."""
    scenario.events(spark, "(1, 10, 'c', 'one')").select("id", "name").write.format("delta").save(tmp_table)
    sink = scenario.sink(tmp_table, app_id="orders", column_list=["id", "name"])

    assert deliver(spark, sink, "(1, 20, 'u', 'uno')", 0) == "committed"
    *before, last = transactions(tmp_table)
    assert before == [[], [], []]
    assert last == [("orders/target", 0)]


def test_outside_a_query_and_without_an_application_id_nothing_is_recorded(spark: SparkSession, tmp_table: str):
    """Nobody could tell whose batch id it is; sequences alone make a repeated call converge."""
    sink = scenario.sink(tmp_table)

    assert [deliver(spark, sink, scenario.BATCHES[n], n) for n in (0, 1)] == ["committed", "committed"]
    rows = target_rows(spark, tmp_table)
    assert deliver(spark, sink, scenario.BATCHES[1], 1) == "no_change"
    assert target_rows(spark, tmp_table) == rows
    for table in (tmp_table, sibling(tmp_table, "tombstones"), sibling(tmp_table, "quarantine")):
        assert [ids for ids in transactions(table) if ids] == []


def test_ids_that_the_user_set_for_own_writes_are_not_used_by_the_sink(spark: SparkSession, tmp_table: str):
    """Delta would drop the second append to the remembered deletes as a repetition of the first."""
    spark.conf.set(APP_ID_CONF, "mine")
    spark.conf.set(BATCH_ID_CONF, "7")
    try:
        before = confs(spark)
        sink = scenario.sink(tmp_table)
        for batch_id, values in enumerate(["(1, 10, 'd', null)", "(2, 10, 'd', null)"]):
            deliver(spark, sink, values, batch_id)
        deliver(spark, sink, "(1, 9, 'c', 'ghost'), (2, 9, 'c', 'ghost'), (3, 9, 'c', 'three')", 2)
        assert confs(spark) == before
    finally:
        spark.conf.unset(APP_ID_CONF)
        spark.conf.unset(BATCH_ID_CONF)

    assert target_rows(spark, tmp_table) == [(3, 9, "three")]
    assert [ids for ids in transactions(tmp_table) + transactions(sibling(tmp_table, "tombstones")) if ids] == []


def test_a_batch_id_not_above_the_recorded_one_is_skipped(spark: SparkSession, tmp_table: str):
    """Batch ids of an identity must grow; a skipped duplicate counts nothing, whatever its events are."""
    sink = scenario.sink(tmp_table, app_id="orders")
    assert deliver(spark, sink, "(1, 10, 'c', 'one')", 7) == "committed"

    for batch_id in (7, 3):
        assert deliver(spark, sink, "(1, 20, 'u', 'uno'), (null, 20, 'c', null)", batch_id) == "skipped_duplicate"
        assert sink.last_result.events == EventCounts()
        assert sink.last_result.reasons == {}
        assert sink.last_result.version is None
    assert target_rows(spark, tmp_table) == [(1, 10, "one")]
    assert not sibling(tmp_table, "quarantine").exists()

    assert deliver(spark, sink, "(1, 20, 'u', 'uno')", 8) == "committed"
    assert target_rows(spark, tmp_table) == [(1, 20, "uno")]


def as_identifier(table: str) -> str:
    return f"delta.`{table}`"


def with_slash(table: str) -> str:
    return f"{table}/"


@pytest.mark.parametrize("spelled", [with_slash, with_scheme, as_identifier])
def test_the_spelling_of_the_target_is_no_part_of_the_identity(
    spark: SparkSession, tmp_table: str, spelled: Callable[[str], str]
):
    """A sink that names the same table otherwise still knows which batches it has applied."""
    deliver(spark, scenario.sink(tmp_table, app_id="orders"), "(1, 10, 'c', 'one')", 0)

    otherwise = scenario.sink(spelled(tmp_table), app_id="orders")

    assert deliver(spark, otherwise, "(1, 10, 'c', 'one')", 0) == "skipped_duplicate"


def test_a_restarted_query_keeps_its_identity_and_a_new_checkpoint_has_another(
    spark: SparkSession, tmp_path: Path, tmp_table: str, source: Callable[..., Path]
):
    """The query id lives in the checkpoint; batch ids of a new one restart at 0 and are not taken for applied."""
    outcomes: list[str] = []

    def run_query(checkpoint: str) -> str:
        sink = scenario.sink(tmp_table)

        def each(batch_df: DataFrame, batch_id: int) -> None:
            outcomes.append(run(sink, batch_df, batch_id).outcome)

        return scenario.stream(spark, tmp_path / "source", tmp_path / checkpoint, each)

    source("(1, 10, 'c', 'one')")
    first = run_query("checkpoint")
    source("(1, 20, 'u', 'uno')")
    restarted = run_query("checkpoint")
    source("(1, 30, 'u', 'un')", "(1, 40, 'u', 'eins')")
    (tmp_path / "source" / "0000.json").unlink()
    (tmp_path / "source" / "0001.json").unlink()
    other = run_query("another checkpoint")

    assert first == restarted
    assert first != other
    assert outcomes == ["committed", "committed", "committed", "committed"]
    assert transactions(tmp_table) == [
        [],
        [(f"{first}/target", 0)],
        [(f"{first}/target", 1)],
        [(f"{other}/target", 0)],
        [(f"{other}/target", 1)],
    ]
    assert target_rows(spark, tmp_table) == [(1, 40, "eins")]


def test_an_application_id_does_not_outweigh_a_new_checkpoint(spark: SparkSession, tmp_path: Path, tmp_table: str):
    """Inside a query it is only a part of the identity: batch 0 of a new checkpoint is not batch 0 of the old."""
    ids = []
    for checkpoint, values in (("one", "(1, 10, 'c', 'one')"), ("two", "(1, 20, 'u', 'two')")):
        sink = scenario.sink(tmp_table, app_id="orders")
        folder = tmp_path / f"source {checkpoint}"
        scenario.write_files(folder, [values])
        ids.append(scenario.stream(spark, folder, tmp_path / checkpoint, sink))

    assert target_rows(spark, tmp_table) == [(1, 20, "two")]
    assert transactions(tmp_table)[1:] == [[(f"orders/{query}/target", 0)] for query in ids]


def test_a_name_is_part_of_the_identity_only_when_it_was_given(
    spark: SparkSession, tmp_path: Path, tmp_table: str, source: Callable[..., Path]
):
    """Two sinks of one query merge into one table only under names of their own."""
    named, unnamed = scenario.sink(tmp_table, engine="spark", name="named"), scenario.sink(tmp_table, engine="spark")
    outcomes: list[str] = []

    def each(batch_df: DataFrame, batch_id: int) -> None:
        outcomes.extend(run(sink, batch_df, batch_id).outcome for sink in (named, unnamed))

    query = scenario.stream(spark, source("(1, 10, 'c', 'one')"), tmp_path / "checkpoint", each)

    assert outcomes == ["committed", "no_change"]
    assert transactions(tmp_table) == [[], [(f"{query}/named/target", 0)], [(f"{query}/target", 0)]]


@pytest.mark.parametrize("spelled", [str, with_scheme])
def test_two_sinks_at_work_under_one_identity_are_refused(
    spark: SparkSession, tmp_table: str, monkeypatch: pytest.MonkeyPatch, spelled: Callable[[str], str]
):
    """One would skip the other's batches; afterwards the second may go on."""
    at_work, go_on = threading.Event(), threading.Event()
    merge = committing.commit

    def waiting(*args: Any) -> Any:
        at_work.set()
        assert go_on.wait(WAIT_SECONDS)
        return merge(*args)

    monkeypatch.setattr(committing, "commit", waiting)
    first = scenario.sink(tmp_table, app_id="orders")
    second = scenario.sink(spelled(tmp_table), app_id="orders")
    elsewhere = scenario.sink(tmp_table + "2", app_id="orders")
    with ThreadPoolExecutor(max_workers=1) as pool:
        running = pool.submit(first, scenario.events(spark, "(1, 10, 'c', 'one')"), 0)
        try:
            assert at_work.wait(WAIT_SECONDS)
            with pytest.raises(ConfigError, match=r"same identity 'orders'.*give each sink of a query its own name="):
                second(scenario.events(spark, "(2, 10, 'c', 'two')"), 1)
        finally:
            go_on.set()
        running.result()

    assert deliver(spark, second, "(2, 10, 'c', 'two')", 1) == "committed"
    assert deliver(spark, elsewhere, "(2, 10, 'c', 'two')", 1) == "committed"
    assert target_rows(spark, tmp_table) == [(1, 10, "one"), (2, 10, "two")]


def test_one_batch_in_two_calls_is_refused_and_not_taken_for_delivered_again(
    spark: SparkSession, tmp_table: str, source: Callable[..., Path], tmp_path: Path
):
    """By one sink, or by two without names: the second part would be skipped."""
    one, other = scenario.sink(tmp_table), scenario.sink(tmp_table)
    events = spark.readStream.schema(scenario.SCHEMA).json(str(source("(1, 10, 'c', 'one'), (2, 10, 'c', 'two')")))
    for second in (one, other):

        def each(batch_df: DataFrame, batch_id: int, second: MergeSink = second) -> None:
            for _ in "tried", "again":
                one(batch_df.where("id = 1"), batch_id)
            second(batch_df.where("id = 2"), batch_id)

        query = events.writeStream.foreachBatch(each).option("checkpointLocation", str(tmp_path / f"c{id(second)}"))
        with pytest.raises(StreamingQueryException, match=r"a sink has already merged other events of batch 0 into"):
            query.trigger(availableNow=True).start().awaitTermination()


def test_history_reaches_back_although_others_have_committed_meanwhile(spark: SparkSession, tmp_table: str):
    """Delta counts from its newest version: a commit whose answer was lost would not be among as many as there were."""
    for version in range(4):
        spark.sql(f"SELECT {version} AS v").write.format("delta").mode("append").save(tmp_table)

    found = spark_table.history(spark, TableRef(tmp_table), newer_than=0, up_to=1)

    assert 1 in {commit.version for commit in found}
    assert 0 not in {commit.version for commit in found}


def test_a_users_own_commit_metadata_is_kept_beside_the_sinks(spark: SparkSession, tmp_table: str):
    """One JSON object: ours under `stream_merge`, theirs as it is under `user`; what they set stays set."""
    sink = scenario.sink(tmp_table, app_id="orders")
    try:
        for batch_id, own in enumerate(["release 7", '{"by": "ops"}']):
            spark.conf.set(USER_METADATA_CONF, own)
            deliver(spark, sink, f"(1, {batch_id}, 'u', 'one')", batch_id)
            assert spark.conf.get(USER_METADATA_CONF) == own
    finally:
        spark.conf.unset(USER_METADATA_CONF)
    deliver(spark, sink, "(1, 9, 'u', 'one')", 2)

    found = [json.loads(metadata) for metadata in user_metadata(tmp_table)[1:]]
    assert [metadata["user"] for metadata in found] == ["release 7", '{"by": "ops"}', None]
    assert [(m["stream_merge"]["identity"], m["stream_merge"]["batch_id"]) for m in found] == [
        ("orders", 0),
        ("orders", 1),
        ("orders", 2),
    ]


def test_a_failed_merge_leaves_no_conf_behind(spark: SparkSession, tmp_table: str):
    """Neither in the caller's session nor in the sink's own, where the next batch would find them."""
    sink = scenario.sink(tmp_table, app_id="orders")
    deliver(spark, sink, "(1, 10, 'c', 'one')", 0)
    spark.sql(f"ALTER TABLE delta.`{tmp_table}` ADD CONSTRAINT short CHECK (length(name) < 5)")
    before = confs(spark)

    with pytest.raises(MergeFailedError):
        deliver(spark, sink, "(1, 20, 'u', 'far too long')", 1)

    assert confs(spark) == before
    assert deliver(spark, sink, "(1, 20, 'd', null)", 1) == "committed"
    assert transactions(tmp_table) == [[], [("orders/target", 0)], [], [("orders/target", 1)]]
    assert [json.loads(m)["stream_merge"]["batch_id"] for m in user_metadata(tmp_table) if m] == [0, 1]


def test_two_sinks_on_threads_keep_ids_and_confs_to_themselves(
    spark: SparkSession, tmp_path: Path, source: Callable[..., Path]
):
    """50 batches through one batch function, with a plain write by the user beside them now and then."""
    left, right, audit = str(tmp_path / "left"), str(tmp_path / "right"), str(tmp_path / "audit")
    sinks = (scenario.sink(left, app_id="left"), scenario.sink(right, app_id="right"))
    deletes = ", (9, {}, 'd', null)"
    batches = [f"(1, {n}, 'u', 'n{n}'){deletes.format(n) if n >= 47 else ''}" for n in range(50)]
    changed_confs: list[set[tuple[str, str]]] = []

    def append(batch_df: DataFrame, _: int) -> None:
        batch_df.write.format("delta").mode("append").save(audit)

    def each(batch_df: DataFrame, batch_id: int) -> None:
        before = confs(batch_df.sparkSession)
        work = [*sinks, append] if batch_id % 10 == 0 else sinks
        for done in [pool.submit(write, batch_df, batch_id) for write in work]:
            done.result()
        after = confs(batch_df.sparkSession)
        # Delta notes there what a session has committed: the user's own append, in the batch's session.
        changed_confs.append(
            {c for c in before.items() ^ after.items() if c[0] != LAST_COMMIT_CONF or append not in work}
        )

    outer = confs(spark)
    with ThreadPoolExecutor(max_workers=3) as pool:
        query = scenario.stream(spark, source(*batches), tmp_path / "checkpoint", each)

    assert changed_confs == [set()] * 50
    assert confs(spark) == outer
    for table, name in ((left, "left"), (right, "right")):
        assert transactions(table) == [[], *([(f"{name}/{query}/target", n)] for n in range(50))]
        assert transactions(sibling(table, "tombstones")) == [
            [],
            *([(f"{name}/{query}/tombstones-add/{table_id(table)}", n)] for n in (47, 48, 49)),
        ]
        assert target_rows(spark, table) == [(1, 49, "n49")]
    assert transactions(audit) == [[]] * 5
    assert user_metadata(audit) == [None] * 5


def test_users_can_prove_that_a_replay_changes_nothing(spark: SparkSession, tmp_table: str):
    sink = scenario.sink(tmp_table, app_id="orders")
    assert_replay_stable(spark, sink, tmp_table, scenario.events(spark, scenario.BATCHES[0]), 0)
    assert target_rows(spark, tmp_table, "id") == [(1,), (3,)]


def test_users_are_told_of_a_source_that_answers_otherwise_the_second_time(spark: SparkSession, tmp_table: str):
    """Without a transaction id only equal sequences keep a replay from changing the row."""
    now = "cast(unix_millis(current_timestamp()) % 1000000000 AS int)"
    moving = spark.range(1).selectExpr("cast(id AS int) AS id", f"{now} AS lsn", "'u' AS op", "'a' AS name")
    with pytest.raises(AssertionError, match="replaying batch 0 changed the rows"):
        assert_replay_stable(spark, scenario.sink(tmp_table), tmp_table, moving, 0)
