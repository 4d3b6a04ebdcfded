"""A query and its table: that it is still the same one, and that a recorded batch id means the same batch."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import scenario
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from traces import commits, transactions

from stream_merge import MergeSinks
from stream_merge.testing import target_rows

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

    query.is_refused("has merged into .*holds none of them: the table was dropped or replaced")


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
    query.is_refused("a second sink of the query's function, that begins now, needs a name=", table=other)

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
def test_a_restored_checkpoint_loses_no_events(query: Query, tmp_path: Path):
    """Its next batches get ids that the table knows already: taken for replays, their events would be nowhere."""
    shutil.copytree(query.checkpoint, tmp_path / "copy")
    query.add("(3, 10, 'c', 'three')", "(4, 10, 'c', 'four')")
    query.run()
    query.restore(tmp_path / "copy")
    query.add("(5, 10, 'c', 'five')")

    query.is_refused(
        r"batch 1 of query .* comes from a checkpoint .* older than the table.*holds batches of this query up to 2.*"
        r"would be skipped \(file:.*0001.json\); bring the newest checkpoint back, or start a new one"
    )


@both_engines
def test_a_restored_checkpoint_loses_no_deletes_of_batches_that_changed_no_row(query: Query, tmp_path: Path):
    """Their ids are recorded beside the target alone, with the deletes that they remember."""
    shutil.copytree(query.checkpoint, tmp_path / "copy")
    query.add("(7, 10, 'd', null)", "(8, 10, 'd', null)")
    query.run()
    query.restore(tmp_path / "copy")
    query.add("(9, 10, 'd', null)")

    query.is_refused("a table beside it holds batches of this query up to 2, so its events would be skipped")


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
    for last in query.checkpoint.glob("commits/*11*"):
        last.unlink()
    query.results.clear()
    query.run()

    assert query.results == ["skipped_duplicate"]
