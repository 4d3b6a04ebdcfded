"""A query and its table: that it is still the same one, and that a recorded batch id means the same batch."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engines
import pytest
import scenario
from prometheus_client import CollectorRegistry
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from since import since
from traces import USER_METADATA_CONF, commits, transactions, user_metadata

from stream_merge import ConfigError, MergeMetrics, MergeSinks
from stream_merge.merge import calls
from stream_merge.merge import commit as committing
from stream_merge.model.source_batch import Intake, Undecodable
from stream_merge.model.table_ref import TableRef
from stream_merge.tables.side.quarantine import SCHEMA
from stream_merge.testing import run, table_version, target_rows

ENGINES = pytest.mark.parametrize("engine", ["auto", "spark"])


class Query:
    """A query over a folder of files, which starts anew for each run as after a restart."""

    def __init__(self, spark: SparkSession, folder: Path, engine: str) -> None:
        self.spark, self.folder, self.engine = spark, folder, engine
        self.table, self.checkpoint = str(folder / "table"), folder / "checkpoint"
        self.results: list[str] = []

    def add(self, *batches: str) -> None:
        scenario.write_files(self.folder / "source", batches)

    def run(self, *, each: Callable[[DataFrame, int], Any] | None = None, table: str | None = None, at_once: int = 1):
        """Merge the new files; its query id."""
        sink = scenario.sink(table or self.table, engine=self.engine)

        def merged(batch_df: DataFrame, batch_id: int) -> None:
            sink(batch_df, batch_id)
            self.results.append(sink.last_result.outcome)

        files = self.spark.readStream.schema(scenario.SCHEMA).option("maxFilesPerTrigger", at_once)
        writer = files.json(str(self.folder / "source")).writeStream.foreachBatch(each or merged)
        query = writer.option("checkpointLocation", str(self.checkpoint)).trigger(availableNow=True).start()
        query.awaitTermination()
        return query.id

    def is_refused(self, saying: str, **how: Any) -> None:
        before = self.files()
        with pytest.raises(StreamingQueryException, match=saying):
            self.run(**how)
        assert self.files() == before

    def restore(self, copy: Path) -> None:
        """Put an older copy of the checkpoint in its place."""
        shutil.rmtree(self.checkpoint)
        shutil.copytree(copy, self.checkpoint)

    def forget_last(self, batch_id: int) -> None:
        """Take the last batch for one that was not done, as after a crash behind the table's commit."""
        for last in self.checkpoint.glob(f"commits/*{batch_id}*"):
            last.unlink()

    def files(self) -> set[Path]:
        """Everything that tables have on the disk."""
        tables = [found for found in self.folder.glob("*") if found.name not in ("source", "checkpoint", "copy")]
        return {file for found in tables for file in found.rglob("*")}


@pytest.fixture
def query(request: pytest.FixtureRequest, spark: SparkSession, tmp_path: Path) -> Query:
    query = Query(spark, tmp_path, request.param if hasattr(request, "param") else "auto")
    query.add("(1, 10, 'c', 'one'), (2, 10, 'c', 'two')")
    query.run()
    return query


both_engines = pytest.mark.parametrize("query", ["auto", "spark"], indirect=True)


@both_engines
def test_a_lost_table_is_not_built_from_the_middle_of_the_stream(query: Query):
    """It would lack everything that was merged before, and nobody would know."""
    query.add("(1, 20, 'u', 'uno')")
    shutil.rmtree(query.table)

    query.is_refused(r"has merged into '.*table' \(Delta table id [0-9a-f-]+\).*there is no table.*new checkpoint")


def test_a_replaced_table_is_noticed(query: Query):
    shutil.rmtree(query.table)
    query.spark.sql(f"CREATE TABLE delta.`{query.table}` (id int, lsn int, name string) USING delta")
    query.add("(1, 20, 'u', 'uno')")

    query.is_refused("has merged into .*holds none of them; restore the table")


@since((4, 0), "CREATE OR REPLACE of a path")
def test_a_table_that_was_replaced_in_its_place_is_noticed(query: Query):
    """CREATE OR REPLACE TABLE leaves the transaction ids of the query in the log, and nothing of its batches."""
    query.spark.sql(f"CREATE OR REPLACE TABLE delta.`{query.table}` USING delta AS SELECT 9 AS id, 1 AS lsn")
    query.add("(1, 20, 'u', 'uno')")

    query.is_refused(r"has merged into .*Delta table id .*holds none of them; restore the table")


@since((4, 0), "CREATE OR REPLACE of a path")
@pytest.mark.parametrize("way", engines.WAYS)
def test_a_table_that_is_replaced_while_a_batch_is_merged_gets_nothing_of_it(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
):
    """Needs a JVM: each engine in turn finds another table under the log that it has looked at."""
    table, begin = str(tmp_path / "table"), committing.commit
    vectors = str(way == "mark").lower()
    sink = scenario.sink(table, app_id="orders", table_properties={"delta.enableDeletionVectors": vectors})
    engines.with_costs(sink, engines.Only(way))
    run(sink, scenario.events(spark, "(1, 10, 'c', 'one'), (2, 10, 'c', 'two')"), 0)
    (made,) = spark.sql(f"SHOW TBLPROPERTIES delta.`{table}`").where("key = 'delta.enableDeletionVectors'").collect()
    properties = spark.sql(f"SHOW TBLPROPERTIES delta.`{table}`").where("key LIKE 'stream_merge.%'").collect()
    said = ", ".join(f"'{key}' = '{value}'" for key, value in [*properties, made])

    def replaced(*args: Any, **more: Any) -> Any:
        spark.sql(
            f"CREATE OR REPLACE TABLE delta.`{table}` USING delta TBLPROPERTIES ({said})"
            " AS SELECT 9 AS id, 1 AS lsn, 'nine' AS name"
        )
        return begin(*args, **more)

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(committing, "commit", replaced)
        with pytest.raises(ConfigError, match="was replaced while batch 1 was merged"):
            run(sink, scenario.events(spark, "(1, 20, 'u', 'uno')"), 1)

    assert engines.way(sink.last_result) == way
    assert target_rows(spark, table) == [(9, 1, "nine")]


def test_a_table_whose_rows_somebody_has_overwritten_is_the_same_table(query: Query):
    rows = query.spark.sql("SELECT 9 AS id, 1 AS lsn, 'nine' AS name")
    rows.write.format("delta").mode("overwrite").option("overwriteSchema", "true").save(query.table)
    query.add("(1, 20, 'u', 'uno')")
    query.run()

    assert target_rows(query.spark, query.table) == [(1, 20, "uno"), (9, 1, "nine")]


def test_a_changed_target_is_noticed(query: Query):
    query.add("(1, 20, 'u', 'uno')")

    query.is_refused(
        "has merged into '.*table' by its checkpoint.*there is no table at '.*other'", table=query.table + "_other"
    )


def test_a_moved_table_is_the_same_table(query: Query):
    """Its log has the ids of the query."""
    shutil.move(query.table, query.table + "_moved")
    query.add("(1, 20, 'u', 'uno')")
    query.run(table=query.table + "_moved")

    assert target_rows(query.spark, query.table + "_moved") == [(1, 20, "uno"), (2, 10, "two")]


@ENGINES
def test_batches_without_events_leave_the_table_for_later(spark: SparkSession, tmp_path: Path, engine: str):
    """A table that a query has not needed yet is not a lost one."""
    query = Query(spark, tmp_path, engine)
    sink = scenario.sink(query.table, engine=engine)
    query.add("(1, 10, 'c', 'one')", "(2, 10, 'c', 'two')")
    query.run(each=lambda df, batch_id: sink(df.where("id = 2"), batch_id))

    assert target_rows(spark, query.table) == [(2, 10, "two")]


@ENGINES
def test_a_first_batch_that_changes_nothing_commits_its_id_alone(spark: SparkSession, tmp_path: Path, engine: str):
    """The only commit without a changed row; by it the table is known to the query. Later ones commit nothing."""
    query = Query(spark, tmp_path, engine)
    scenario.sink(query.table, engine=engine)(scenario.events(spark, "(1, 10, 'c', 'one')"), 0)
    query.add("(1, 5, 'u', 'late')", "(1, 6, 'u', 'late'), (7, 6, 'd', null)")
    query_id = query.run()

    assert query.results == ["no_change", "no_change"]
    assert transactions(query.table) == [[], [], [(f"{query_id}/target", 0)]]
    assert [list(action) for action in commits(query.table)[-1]] == [["commitInfo"], ["txn"]]
    shutil.rmtree(query.table)
    query.add("(1, 20, 'u', 'uno')")
    query.is_refused("has merged into")


def test_events_of_a_first_batch_that_committed_its_id_alone_and_then_failed_are_counted_once(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Delivered again the batch is applied, and counts nothing."""
    query, registry = Query(spark, tmp_path, "auto"), CollectorRegistry()
    scenario.sink(query.table)(scenario.events(spark, "(1, 10, 'c', 'one')"), 0)
    sink = scenario.sink(query.table)
    sink._calls._own_metrics = MergeMetrics(registry)
    query.add("(1, 5, 'u', 'late')")

    def full(*_: object) -> None:
        msg = "java.io.IOException: No space left on device"
        raise RuntimeError(msg)

    monkeypatch.setattr(calls, "note_target", full)
    with pytest.raises(StreamingQueryException, match=r"batch 0 is in .* but a later step failed"):
        query.run(each=sink)
    monkeypatch.undo()
    query.run(each=sink)

    assert sink.last_result is not None
    assert sink.last_result.outcome == "skipped_duplicate"
    received = [one for family in registry.collect() for one in family.samples if one.name.endswith("received_total")]
    assert sum(one.value for one in received) == 1


def test_a_checkpoint_of_an_older_version_gets_a_warning(query: Query, caplog: pytest.LogCaptureFixture):
    """Before, batches that changed nothing left no trace: all of its batches may have been such ones."""
    shutil.rmtree(query.table)
    shutil.rmtree(query.checkpoint / "stream_merge_targets")
    scenario.sink(query.table)(scenario.events(query.spark, "(1, 10, 'c', 'one')"), 0)
    query.add("(1, 20, 'u', 'uno')")
    with caplog.at_level(logging.WARNING, logger="stream_merge"):
        query.run()

    assert "merged_before_unknown" in caplog.text
    assert target_rows(query.spark, query.table) == [(1, 20, "uno")]


def test_an_older_versions_checkpoint_does_not_build_a_missing_table(query: Query):
    shutil.rmtree(query.table)
    shutil.rmtree(query.checkpoint / "stream_merge_targets")
    query.add("(1, 20, 'u', 'uno')")

    query.is_refused(
        "has run batches before by its checkpoint.*there is no table", each=scenario.sink(query.table, engine="auto")
    )


def test_a_table_that_was_merged_by_hand_goes_on_with_the_sink(query: Query, caplog: pytest.LogCaptureFixture):
    """The checkpoint is the hand-written function's, and so are the rows."""
    shutil.rmtree(query.table)
    shutil.rmtree(query.checkpoint / "stream_merge_targets")
    rows = scenario.events(query.spark, "(1, 10, 'c', 'one'), (2, 10, 'c', 'two')").drop("op")
    rows.write.format("delta").save(query.table)
    query.add("(1, 20, 'u', 'uno')")
    with caplog.at_level(logging.WARNING, logger="stream_merge"):
        query.run(each=scenario.sink(query.table))

    assert "merged_before_unknown" in caplog.text
    assert target_rows(query.spark, query.table) == [(1, 20, "uno"), (2, 10, "two")]


def test_a_function_may_call_its_sink_when_there_is_something_to_merge(spark: SparkSession, tmp_path: Path):
    """A table that starts with batch 1 is not a lost one; once it has, it is missed."""
    query = Query(spark, tmp_path, "auto")

    def each(batch_df: DataFrame, batch_id: int) -> None:
        wanted = batch_df.where("id > 1")
        if not wanted.isEmpty():
            scenario.sink(query.table)(wanted, batch_id)

    query.add("(1, 10, 'c', 'one')", "(2, 10, 'c', 'two')")
    query.run(each=each)
    assert target_rows(spark, query.table) == [(2, 10, "two")]

    shutil.rmtree(query.table)
    query.add("(3, 10, 'c', 'three')")
    query.is_refused("has merged into", each=each)


def test_a_sink_that_a_function_gets_later_needs_a_name(query: Query):
    """Without one it might be the first one under a changed target."""
    query.add("(3, 10, 'c', 'three')")
    other = query.table + "_other"
    query.is_refused("a new second sink of the query needs its own name=", table=other)

    second = scenario.sink(other, name="other")

    def each(batch_df: DataFrame, batch_id: int) -> None:
        second(batch_df, batch_id)

    query.run(each=each)
    assert target_rows(query.spark, other) == [(3, 10, "three")]


def test_ids_that_delta_has_let_expire_get_a_warning(query: Query, caplog: pytest.LogCaptureFixture):
    """The Delta table id says that it is the same table."""
    log = Path(query.table) / "_delta_log"
    (commit,) = [file for file in log.glob("*.json") if '"txn"' in file.read_text()]
    commit.write_text("\n".join(line for line in commit.read_text().splitlines() if '"txn"' not in line) + "\n")
    for derived in log.glob("*.crc"):
        derived.unlink()
    query.spark._jvm.org.apache.spark.sql.delta.DeltaLog.clearCache()
    query.add("(1, 20, 'u', 'uno')")
    with caplog.at_level(logging.WARNING, logger="stream_merge"):
        query.run()

    assert "merged_before_unknown" in caplog.text
    assert target_rows(query.spark, query.table) == [(1, 20, "uno"), (2, 10, "two")]


def test_a_table_of_many_starts_with_its_first_events_and_is_missed_when_it_is_gone(
    spark: SparkSession, tmp_path: Path
):
    query = Query(spark, tmp_path, "auto")
    query.add("(1, 10, 'c', 'left')", "(2, 10, 'c', 'right')")

    def sinks() -> MergeSinks:
        return MergeSinks(
            {name: scenario.sink(str(tmp_path / name)) for name in ("left", "right")}, route_by="name", parallel=1
        )

    query.run(each=sinks())
    assert target_rows(spark, str(tmp_path / "right")) == [(2, 10, "right")]

    shutil.rmtree(tmp_path / "right")
    query.add("(3, 10, 'c', 'right')")
    query.is_refused("has merged into '.*right'", each=sinks())


# -- a checkpoint that is older than its table ---------------------------------------------------


@both_engines
@pytest.mark.smoke
def test_a_restored_checkpoint_loses_no_events(query: Query, tmp_path: Path):
    """Its next batches get ids that the table knows already: taken for replays, their events would be nowhere."""
    shutil.copytree(query.checkpoint, tmp_path / "copy")
    query.add("(3, 10, 'c', 'three')", "(4, 10, 'c', 'four')")
    query.run()
    query.restore(tmp_path / "copy")
    query.add("(5, 10, 'c', 'five')")

    query.is_refused(
        r"older than the table: .*holds batches of this query up to 2, so batch 1 of query .*"
        r" \(file:.*0001.json\) would be skipped; restore the newest checkpoint, or start a new one"
    )


@both_engines
def test_a_restored_checkpoint_loses_no_deletes_of_batches_that_changed_no_row(query: Query, tmp_path: Path):
    """Their ids are recorded beside the target alone, with the deletes that they remember."""
    shutil.copytree(query.checkpoint, tmp_path / "copy")
    query.add("(7, 10, 'd', null)", "(8, 10, 'd', null)")
    query.run()
    query.restore(tmp_path / "copy")
    query.add("(9, 10, 'd', null)")

    query.is_refused("a table beside it holds batches of this query up to 2, so batch .* would be skipped")


BESIDE = "a table beside it holds another batch of this query under this id, so batch .* would be skipped"
DELETES = ("(7, 10, 'd', null)", "(8, 10, 'd', null)"), "(9, 10, 'd', null)"
INVALID = ("(null, 10, 'c', 'one')", "(null, 20, 'c', 'two')"), "(null, 30, 'c', 'three')"


def beside(query: Query) -> list[Any]:
    """What lies in the tables beside the target, without the times of the calls."""
    found = [log.parent for log in query.folder.glob("__stream_merge_*/_delta_log")]
    rows = [row for path in found for row in query.spark.read.format("delta").load(str(path)).collect()]
    at = ("recorded_at", "__stream_merge_recorded_at")
    return sorted([(name, value) for name, value in row.asDict().items() if name not in at] for row in rows)


@both_engines
@pytest.mark.parametrize("events", [DELETES, INVALID], ids=["deletes", "invalid"])
def test_an_id_that_is_recorded_beside_the_target_alone_is_no_replay_of_other_events(
    query: Query, tmp_path: Path, events: tuple[tuple[str, str], str]
):
    """The batch changed no row of the target; taken for repeated, its deletes or invalid events would be nowhere."""
    (first, second), other = events
    query.add(first)
    query.run()
    shutil.copytree(query.checkpoint, tmp_path / "copy")
    query.add(second)
    query.run()
    query.restore(tmp_path / "copy")
    query.add(other)

    query.is_refused(BESIDE, at_once=2)


@both_engines
def test_an_id_that_is_recorded_beside_the_target_with_the_same_events_is_a_replay(query: Query):
    """Also where an older version has recorded it without what the batch reads."""
    query.add(*DELETES[0], *INVALID[0])
    query.run()
    query.add("(10, 10, 'd', null), (null, 40, 'c', 'four')")
    query.run()
    before = beside(query)
    query.forget_last(5)
    query.run()

    assert beside(query) == before
    assert query.results[-2:] == ["no_change", "no_change"]

    query.forget_last(5)
    forget_content(query)
    query.add("(11, 10, 'd', null)")
    query.run()

    assert len(beside(query)) == len(before) + 1


def forget_content(query: Query) -> None:
    """Take from the logs of the tables beside the target what the sink says of its batches."""
    for table in query.folder.glob("__stream_merge_*"):
        for commit in (table / "_delta_log").glob("*.json"):
            actions = [json.loads(line) for line in commit.read_text().splitlines()]
            for action in actions:
                action.get("commitInfo", {}).pop("userMetadata", None)
            commit.write_text("".join(f"{json.dumps(action)}\n" for action in actions))
        for derived in (table / "_delta_log").glob("*.crc"):
            derived.unlink()
    query.spark._jvm.org.apache.spark.sql.delta.DeltaLog.clearCache()


def test_a_recorded_id_of_records_that_were_no_events_is_no_replay_of_others(query: Query, tmp_path: Path):
    def each(batch_df: DataFrame, batch_id: int) -> None:
        values = {f.name: F.lit(None).cast(f.dataType) for f in SCHEMA.fields} | {"event": F.col("name")}
        values |= {"batch_id": F.lit(batch_id)}
        rows = batch_df.select(*(value.alias(name) for name, value in values.items()))
        intake = Intake(calls="every", undecodable=Undecodable(rows=rows, events=1))
        scenario.sink(query.table)._calls.account(batch_df, batch_id, intake)

    shutil.copytree(query.checkpoint, tmp_path / "copy")
    query.add("(3, 10, 'c', 'three')")
    query.run(each=each)
    query.restore(tmp_path / "copy")
    query.run(each=each)
    assert [dict(row)["event"] for row in beside(query)] == ["three"]

    query.restore(tmp_path / "copy")
    query.add("(4, 10, 'c', 'four')")
    query.is_refused(BESIDE, each=each, at_once=2)


def test_a_user_value_of_the_metadata_stays_in_commits_beside_the_target(query: Query):
    query.spark.conf.set(USER_METADATA_CONF, "mine")
    try:
        query.add(*DELETES[0][:1])
        query.run()
    finally:
        query.spark.conf.unset(USER_METADATA_CONF)

    metadata = json.loads(user_metadata(TableRef(query.table).tombstones)[-1])
    assert metadata["user"] == "mine"
    assert sorted(metadata["stream_merge"]) == ["app_id", "batch_id", "source"]


def test_events_that_were_set_aside_are_no_replay_of_others(spark: SparkSession, tmp_path: Path):
    """Nothing is lost: those of a table that failed are merged or set aside again, those without a sink set aside."""
    query = Query(spark, tmp_path, "auto")

    def sinks() -> MergeSinks:
        left = scenario.sink(str(tmp_path / "left"))
        return MergeSinks(
            {"left": left}, route_by="name", on_failure="quarantine", quarantine_target=str(tmp_path / "unrouted")
        )

    query.add("(1, 10, 'c', 'left')")
    query.run(each=sinks())
    spark.sql(f"ALTER TABLE delta.`{tmp_path / 'left'}` ADD CONSTRAINT small CHECK (id < 5)")
    shutil.copytree(query.checkpoint, tmp_path / "copy")
    query.add("(6, 10, 'c', 'left'), (7, 10, 'c', 'nobody')")
    query.run(each=sinks())
    query.forget_last(1)
    query.run(each=sinks())
    query.restore(tmp_path / "copy")
    query.add("(2, 10, 'c', 'left'), (8, 10, 'c', 'nobody')")
    (query.folder / "source" / "0001.json").unlink()
    query.run(each=sinks())

    assert target_rows(spark, str(tmp_path / "left"), "id") == [(1,), (2,)]
    aside = [json.loads(dict(row)["event"])["id"] for row in beside(query)]
    unrouted = [json.loads(event)["id"] for (event,) in target_rows(spark, str(tmp_path / "unrouted"), "event")]
    assert (aside, sorted(unrouted)) == ([6], [7, 8])


# -- a table that is older than its checkpoint ---------------------------------------------------


@both_engines
def test_an_older_copy_of_the_table_is_not_gone_on_with(query: Query, tmp_path: Path):
    """A backup of the table under the checkpoint of today: nobody would read again what came in between."""
    shutil.copytree(query.table, tmp_path / "copy")
    query.add("(3, 10, 'c', 'three')", "(3, 20, 'd', null)", "(4, 10, 'd', null)")
    query.run()
    newest = table_version(query.spark, query.table)
    shutil.move(query.table, tmp_path / "copy" / "newer")
    shutil.copytree(tmp_path / "copy", query.table, ignore=shutil.ignore_patterns("newer"))
    query.add("(5, 10, 'c', 'five')")

    query.is_refused(rf"is at version \d, but batch 2 of this query is version {newest}; restore the newer table")

    shutil.rmtree(query.table)
    shutil.move(tmp_path / "copy" / "newer", query.table)
    query.run()
    assert target_rows(query.spark, query.table, "id") == [(1,), (2,), (5,)]


@both_engines
def test_table_and_checkpoint_of_one_backup_go_on(query: Query, tmp_path: Path):
    """What came after it is read again."""
    for name, place in (("table", query.table), ("checkpoint", query.checkpoint)):
        shutil.copytree(place, tmp_path / "copy" / name)
    query.add("(3, 10, 'c', 'three')")
    query.run()
    shutil.rmtree(query.table)
    shutil.copytree(tmp_path / "copy" / "table", query.table)
    query.restore(tmp_path / "copy" / "checkpoint")

    query.run()

    assert target_rows(query.spark, query.table, "id") == [(1,), (2,), (3,)]


def test_a_table_that_was_restored_goes_on(query: Query):
    """RESTORE is a newer version, and somebody's wish."""
    before = table_version(query.spark, query.table)
    query.add("(3, 10, 'c', 'three')")
    query.run()
    query.spark.sql(f"RESTORE TABLE delta.`{query.table}` TO VERSION AS OF {before}")
    query.add("(4, 10, 'c', 'four')")

    query.run()

    assert target_rows(query.spark, query.table, "id") == [(1,), (2,), (4,)]


@both_engines
def test_the_recorded_id_with_other_events_is_no_replay(query: Query, tmp_path: Path):
    shutil.copytree(query.checkpoint, tmp_path / "copy")
    query.add("(3, 10, 'c', 'three')")
    query.run()
    query.restore(tmp_path / "copy")
    query.add("(4, 10, 'c', 'four')")

    query.is_refused("the table holds another batch of this query under this id", at_once=2)


def test_the_recorded_id_with_the_same_events_is_a_replay(query: Query):
    """The crash between the table's commit and the checkpoint's, also where a file source has packed its log."""
    query.add(*(f"({n}, {n}, 'u', 'n')" for n in range(20, 31)))
    query.run()
    query.forget_last(11)
    query.results.clear()
    query.run()

    assert query.results == ["skipped_duplicate"]
