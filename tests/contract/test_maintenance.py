"""Maintenance of a target at the end of a call. Needs a JVM: OPTIMIZE and VACUUM are Spark's, on real tables.

When it runs: `tests/unit/test_maintenance_plan.py`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deltalake
import pytest
from deliveries import ChangeStream, delete, upsert
from delta.exceptions import ConcurrentDeleteReadException
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from stream_merge import ConfigError, Maintenance
from stream_merge.cli import app as cli
from stream_merge.model.results import MaintenanceRun, MergeResult
from stream_merge.model.table_ref import TableRef
from stream_merge.tables import maintenance
from stream_merge.tables.maintenance import maintain
from stream_merge.testing import run

OFTEN = Maintenance(every=5)
VACUUM = Maintenance(every=1, optimize=False, vacuum=True)
BRIEF = {"delta.deletedFileRetentionDuration": "interval 1 hour"}


def operations(target: str) -> list[str]:
    """What the table's commits were, oldest first."""
    return [str(commit["operation"]) for commit in reversed(deltalake.DeltaTable(target).history())]


def stored_files(target: str) -> set[str]:
    """Data files on the disk, whether the table needs them or not."""
    return {str(file) for file in Path(target).rglob("*.parquet") if "_delta_log" not in str(file)}


def test_deltas_own_compaction_does_not_come_between_a_merge_and_its_answer(
    spark: SparkSession, tmp_table: str
) -> None:
    """It would commit under the sink's metadata; without the sink it runs after each write (Delta 4.4)."""
    properties = {"delta.autoOptimize.autoCompact": "true"}
    stream = ChangeStream(spark, tmp_table, engine="spark", maintenance=None, table_properties=properties)
    spark.conf.set("spark.databricks.delta.autoCompact.minNumFiles", "2")
    try:
        done = grown(stream, 3)
        by_sink = operations(tmp_table)
        stream.sql("INSERT INTO {target} (id, lsn, name) VALUES (9, 1, 'other')")
    finally:
        spark.conf.unset("spark.databricks.delta.autoCompact.minNumFiles")

    assert (by_sink.count("MERGE"), by_sink.count("OPTIMIZE")) == (3, 0)
    assert done[-1].version == len(by_sink) - 1
    assert operations(tmp_table)[-1] == "OPTIMIZE"


def grown(stream: ChangeStream, batches: int) -> list[MergeResult]:
    """Deliver batches of new keys, by one sink; each adds a file."""
    sink = stream.sink()
    done = []
    for number in range(batches):
        frame = stream.spark.range(1).selectExpr(f"{number}L AS id", "10L AS lsn", "'u' AS op", f"'{number}' AS name")
        done.append(run(sink, frame, number))
    return done


@pytest.mark.parametrize("engine", ["spark", "driver"])
@pytest.mark.smoke
def test_small_files_are_put_together_after_the_commit(spark: SparkSession, tmp_table: str, engine: str) -> None:
    """Rows, feed and the query's next batches are as without."""
    stream = ChangeStream(spark, tmp_table, engine=engine, maintenance=OFTEN)
    done = grown(stream, 6)

    assert [result.maintenance is None for result in done] == [True] * 4 + [False, True]
    assert done[4].maintenance is not None
    assert (done[4].maintenance.outcome, done[4].maintenance.removed_files, done[4].maintenance.added_files) == (
        "done",
        5,
        1,
    )
    assert done[4].seconds["maintenance"] > 0
    assert done[3].seconds["maintenance"] == pytest.approx(0, abs=0.01)
    assert (done[4].outcome, done[5].outcome) == ("committed", "committed")
    assert operations(tmp_table).count("OPTIMIZE") == 1
    assert [row[0] for row in stream.rows()] == list(range(6))
    assert [row[:2] for row in stream.changes()] == [("insert", key) for key in range(6)]
    stream.batch_id = 5
    assert stream.deliver(upsert(3, "changed", lsn=20)).events.updated == 1


def test_files_are_written_without_the_rows_that_vectors_removed(spark: SparkSession, tmp_table: str) -> None:
    vectors = {"delta.enableDeletionVectors": "true"}
    stream = ChangeStream(spark, tmp_table, engine="spark", table_properties=vectors, maintenance=Maintenance(every=1))
    sink = stream.sink()
    run(sink, spark.range(1_000).selectExpr("id", "10L AS lsn", "'u' AS op", "'x' AS name"), 0)
    spark.conf.set("spark.databricks.delta.merge.deletionVectors.persistent", "true")
    result = run(sink, spark.range(300).selectExpr("id", "20L AS lsn", "'d' AS op", "'x' AS name"), 1)

    assert result.metrics["numTargetDeletionVectorsAdded"] == 1
    assert result.maintenance is not None
    assert (result.maintenance.outcome, result.maintenance.removed_files) == ("done", 1)
    assert spark.read.format("delta").load(tmp_table).count() == 700
    metadata = deltalake.DeltaTable(tmp_table).get_add_actions(flatten=True)
    assert sum(metadata.column("num_records").to_pylist()) == 700


def test_new_files_of_a_clustered_table_are_clustered(spark: SparkSession, tmp_table: str) -> None:
    stream = ChangeStream(spark, tmp_table, engine="spark", maintenance=OFTEN, cluster_by=["id"])
    done = grown(stream, 5)

    assert done[-1].maintenance == MaintenanceRun(outcome="done", removed_files=5, added_files=1)
    parameters = deltalake.DeltaTable(tmp_table).history(1)[0]["operationParameters"]
    assert "id" in str(parameters["clusterBy"])


@pytest.mark.parametrize(
    ("made", "outcome"),
    [
        (lambda: RuntimeError("no such luck"), "failed"),
        (lambda: ConcurrentDeleteReadException("[DELTA] faster", ""), "lost"),  # on Spark 3.5 a JVM has to be there
    ],
)
def test_a_round_that_fails_does_not_fail_the_batch(
    spark: SparkSession, tmp_table: str, monkeypatch: pytest.MonkeyPatch, made: Callable[[], Exception], outcome: str
) -> None:
    error = made()

    def failing(*_: Any) -> None:
        raise error

    monkeypatch.setattr(maintenance, "_rewritten", failing)
    stream = ChangeStream(spark, tmp_table, engine="driver", maintenance=Maintenance(every=1))
    (result,) = grown(stream, 1)

    assert (result.outcome, result.events.inserted) == ("committed", 1)
    assert result.maintenance is not None
    assert (result.maintenance.outcome, result.maintenance.detail) == (outcome, str(error))


def test_files_that_are_no_longer_needed_are_deleted(
    spark: SparkSession, tmp_table: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """After the table's own retention; what was removed just now stays, and nothing is printed."""
    stream = ChangeStream(spark, tmp_table, engine="driver", table_properties=BRIEF)
    stream.deliver(upsert(1, "one", lsn=10))
    needed = stored_files(tmp_table)
    old = Path(tmp_table, "of-a-writer-that-died.parquet")
    old.write_bytes(b"never committed")
    os.utime(old, (time.time() - 3_700,) * 2)
    stream.settings["maintenance"] = VACUUM
    sink = stream.sink()
    capfd.readouterr()
    result = run(sink, spark.sql("SELECT 1L AS id, 30L AS lsn, 'u' AS op, 'eins' AS name"), 7)

    assert result.maintenance == MaintenanceRun(outcome="done", vacuumed=True)
    assert not old.exists()
    assert needed <= stored_files(tmp_table)
    assert stream.rows() == [(1, 30, "eins")]
    assert "Deleted" not in "".join(capfd.readouterr())


def test_tables_beside_the_target_are_looked_after_with_it(spark: SparkSession, tmp_table: str) -> None:
    """Their packs and small files would stay for ever; what they hold is as before."""
    stream = ChangeStream(spark, tmp_table, engine="driver")
    for number in range(5):
        stream.deliver(delete(number, lsn=10), upsert(None, "nobody", lsn=10))
    table = Path(tmp_table)
    tombstones, quarantine = (
        table.with_name(f"__stream_merge_{kind}_{table.name}") for kind in ("tombstones", "quarantine")
    )
    old = [beside / "of-an-older-pack.parquet" for beside in (tombstones, quarantine)]
    for file in old:
        file.write_bytes(b"removed long ago")
        os.utime(file, (time.time() - 8 * 86_400,) * 2)

    result = stream.deliver(upsert(1, "one", lsn=9), upsert(2, "two", lsn=20), maintenance=VACUUM)

    assert result.maintenance is not None
    assert (result.maintenance.outcome, result.maintenance.vacuumed) == ("done", True)
    assert [file.exists() for file in old] == [False, False]
    assert len(deltalake.DeltaTable(str(quarantine)).file_uris()) == 1
    assert spark.read.format("delta").load(str(quarantine)).count() == 5
    assert (result.events.stale, stream.rows()) == (1, [(2, 20, "two")])
    assert stream.deliver(upsert(0, "older", lsn=9)).events.stale == 1


def test_by_hand(spark: SparkSession, tmp_table: str) -> None:
    stream = ChangeStream(spark, tmp_table, engine="driver")
    grown(stream, 6)
    command = CliRunner()

    assert command.invoke(cli.app, ["maintain", tmp_table]).output == "compacted 6 files into 1\n"
    assert command.invoke(cli.app, ["maintain", tmp_table]).output == "nothing to do\n"
    vacuumed = command.invoke(cli.app, ["maintain", tmp_table, "--vacuum"])
    assert vacuumed.output == "deleted files that the table no longer needs\n"
    with pytest.raises(ConfigError, match="there is no Delta table at"):
        maintain(spark, TableRef(tmp_table + "_missing"), OFTEN)
