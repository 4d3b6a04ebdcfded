"""What a table's own log tells about the engine of each batch."""

from __future__ import annotations

from collections import Counter

import pytest
import scenario
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from stream_merge import MergeSink
from stream_merge.cli import app as cli
from stream_merge.cli.commands import shared
from stream_merge.model.results import FATES
from stream_merge.tables.explain import explain
from stream_merge.tables.table_history import table_history
from stream_merge.testing import run


@pytest.fixture
def target(spark: SparkSession, tmp_table: str) -> str:
    """Two batches merged by Spark, and somebody else's commit between them."""
    sink = scenario.sink(tmp_table, app_id="orders", engine="spark")
    run(sink, scenario.events(spark, scenario.BATCHES[0]), 0)
    spark.sql(f"UPDATE delta.`{tmp_table}` SET name = 'by hand' WHERE id = 1")
    run(sink, scenario.events(spark, scenario.BATCHES[1]), 1)
    return tmp_table


def test_each_merge_is_told_with_its_engine_reason_and_counts(spark: SparkSession, target: str):
    driver = scenario.sink(target, app_id="orders", engine="driver")
    result = run(driver, scenario.events(spark, "(20, 50, 'c', 'new'), (1, 60, 'u', 'last')"), 2)

    found = explain(target)

    assert found.keys == '["id"]'
    assert found.driver is None
    assert found.version == result.version
    newest, second, first = found.merges
    assert (newest.batch_id, newest.engine, newest.identity, newest.role) == (2, "driver", "orders", "target")
    assert newest.plan.startswith("driver (mark): asked for; 2 events")
    assert (newest.metrics["numTargetRowsInserted"], newest.metrics["numTargetRowsUpdated"]) == (1, 1)
    assert [(merge.batch_id, merge.engine, merge.plan) for merge in (second, first)] == [
        (1, "spark", "spark: asked for"),
        (0, "spark", "spark: asked for"),
    ]
    assert (first.metrics["numTargetRowsInserted"], second.metrics["numTargetRowsDeleted"]) == (2, 1)
    assert first.at is not None
    assert newest.at is not None
    assert first.at < newest.at
    assert found.others == found.version + 1 - 3


@pytest.mark.parametrize("engine", ["driver", "spark"])
def test_the_history_has_the_ledger_and_the_phases_of_each_batch(spark: SparkSession, tmp_table: str, engine: str):
    sink = scenario.sink(tmp_table, app_id="orders", engine=engine)
    results = [run(sink, scenario.events(spark, batch), i) for i, batch in enumerate(scenario.BATCHES)]

    history = table_history(tmp_table)

    assert [commit.fates for commit in history.batches] == [
        {fate: getattr(result.events, fate) for fate in FATES} for result in results
    ]
    assert all(
        0 < commit.seconds <= result.duration_seconds for commit, result in zip(history.batches, results, strict=True)
    )
    assert Counter(one.reason for one in history.quarantined) == Counter(results[1].reasons)


def test_the_command_says_it_without_spark(target: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shared, "local_session", lambda *_, **__: pytest.fail("Spark was started"))
    monkeypatch.setattr(shared.OUT, "width", 200)

    told = CliRunner().invoke(cli.app, ["explain", target, "--last", "3"])

    assert told.exit_code == 0
    assert "driver: may merge into this table" in told.output
    assert "spark: asked for" in told.output
    assert "a sink merged 2 of the newest 3 versions" in told.output


def test_a_table_that_the_driver_must_not_write_is_named_with_the_reason(spark: SparkSession, tmp_table: str):
    spark.sql(f"CREATE TABLE delta.`{tmp_table}` (id INT) USING delta TBLPROPERTIES (delta.enableRowTracking = true)")

    assert explain(tmp_table).driver == "the table: the target uses rowTracking (updated rows would lose their ids)"
    assert explain(tmp_table).merges == ()


def test_advice_names_the_figures_of_the_newest_merge(spark: SparkSession, tmp_table: str):
    """Needs a JVM for what Spark writes: files that each hold keys from everywhere, change files, its metrics."""
    spark.range(0, 660_000, 1, 12).selectExpr("id * 7919 % 660000 AS id", "1L AS seq").write.format("delta").save(
        tmp_table
    )
    settings = {"keys": ["id"], "sequence_by": "seq", "app_id": "orders", "engine": "spark", "tombstones": False}
    run(MergeSink(target=tmp_table, **settings), spark.sql("SELECT id, 2L AS seq FROM range(100, 102)"), 0)

    found = explain(tmp_table)

    assert found.driver is None
    (vectors,) = found.advice
    assert vectors.startswith("1 merge rewrote 109,998 unchanged rows to change 2; deletion vectors avoid it")
