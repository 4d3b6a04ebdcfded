"""Upkeep of a target at the end of a call. Needs a JVM: OPTIMIZE and VACUUM are Spark's, on real tables.

When a round comes, and which files it takes, is arithmetic: `tests/unit/test_compaction.py`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
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
from stream_merge.model.results import MergeResult
from stream_merge.tables import upkeep
from stream_merge.tables.upkeep import TableUpkeep, maintained
from stream_merge.testing import run

OFTEN = Maintenance(every=5)


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

    assert [result.upkeep is None for result in done] == [True] * 4 + [False, True]
    assert done[4].upkeep is not None
    assert (done[4].upkeep.outcome, done[4].upkeep.removed_files, done[4].upkeep.added_files) == ("done", 5, 1)
    assert done[4].seconds["upkeep"] > 0
    assert done[3].seconds["upkeep"] == pytest.approx(0, abs=0.01)
    assert (done[4].outcome, done[5].outcome) == ("committed", "committed")
    assert operations(tmp_table).count("OPTIMIZE") == 1
    assert [row[0] for row in stream.rows()] == list(range(6))
    assert [row[:2] for row in stream.changes()] == [("insert", key) for key in range(6)]
    stream.batch_id = 5
    assert stream.deliver(upsert(3, "changed", lsn=20)).events.updated == 1


def test_files_are_written_without_the_rows_that_vectors_removed(spark: SparkSession, tmp_table: str) -> None:
    vectors = {"delta.enableDeletionVectors": "true"}
    stream = ChangeStream(
        spark, tmp_table, engine="spark", table_properties=vectors, maintenance=Maintenance(every=1, budget_seconds=90)
    )
    sink = stream.sink()
    run(sink, spark.range(1_000).selectExpr("id", "10L AS lsn", "'u' AS op", "'x' AS name"), 0)
    spark.conf.set("spark.databricks.delta.merge.deletionVectors.persistent", "true")
    result = run(sink, spark.range(200).selectExpr("id", "20L AS lsn", "'d' AS op", "'x' AS name"), 1)

    assert result.metrics["numTargetDeletionVectorsAdded"] == 1
    assert result.upkeep is not None
    assert (result.upkeep.outcome, result.upkeep.removed_files) == ("done", 1)
    assert spark.read.format("delta").load(tmp_table).count() == 800
    metadata = deltalake.DeltaTable(tmp_table).get_add_actions(flatten=True)
    assert sum(metadata.column("num_records").to_pylist()) == 800


@pytest.mark.parametrize("settings", [{"cluster_by": ["id"]}, {"zorder": True}], ids=["cluster_by", "zorder_by"])
def test_rows_that_are_to_lie_together_do(spark: SparkSession, tmp_table: str, settings: dict[str, Any]) -> None:
    zorder = settings.pop("zorder", False)
    maintenance = Maintenance(every=5, zorder_by=("id",) if zorder else ())
    stream = ChangeStream(spark, tmp_table, engine="spark", maintenance=maintenance, **settings)
    done = grown(stream, 5)

    assert done[-1].upkeep is not None
    assert (done[-1].upkeep.outcome, done[-1].upkeep.added_files) == ("done", 1)
    parameters = deltalake.DeltaTable(tmp_table).history(1)[0]["operationParameters"]
    wanted = "zOrderBy" if zorder else "clusterBy"
    assert "id" in str(parameters[wanted])


def test_what_does_not_fit_the_budget_is_left_out_and_told(
    spark: SparkSession, tmp_table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "BYTES_PER_SECOND", 10.0)
    stream = ChangeStream(spark, tmp_table, engine="driver", maintenance=OFTEN)
    done = grown(stream, 5)

    assert done[-1].upkeep is not None
    assert done[-1].upkeep.outcome == "over_budget"
    assert "MB would take about" in done[-1].upkeep.detail
    assert "OPTIMIZE" not in operations(tmp_table)


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

    monkeypatch.setattr(TableUpkeep, "_optimized", failing)
    stream = ChangeStream(spark, tmp_table, engine="driver", maintenance=Maintenance(every=1))
    (result,) = grown(stream, 1)

    assert (result.outcome, result.events.inserted) == ("committed", 1)
    assert result.upkeep is not None
    assert (result.upkeep.outcome, result.upkeep.detail) == (outcome, str(error))


def test_files_that_are_no_longer_needed_are_deleted(
    spark: SparkSession, tmp_table: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Below the table's retention only if that is forced; what was removed just now stays, and nothing is printed."""
    forced = Maintenance(every=1, optimize=False, vacuum_after=timedelta(hours=1), force=True)
    stream = ChangeStream(spark, tmp_table, engine="driver")
    stream.deliver(upsert(1, "one", lsn=10))
    needed = stored_files(tmp_table)
    old = Path(tmp_table, "of-a-writer-that-died.parquet")
    old.write_bytes(b"never committed")
    os.utime(old, (time.time() - 3_700,) * 2)
    stream.settings["maintenance"] = forced
    sink = stream.sink()
    capfd.readouterr()
    result = run(sink, spark.sql("SELECT 1L AS id, 30L AS lsn, 'u' AS op, 'eins' AS name"), 7)

    assert result.upkeep is not None
    assert (result.upkeep.outcome, result.upkeep.vacuumed) == ("done", True)
    assert not old.exists()
    assert needed <= stored_files(tmp_table)
    assert stream.rows() == [(1, 30, "eins")]
    assert "Deleted" not in "".join(capfd.readouterr())
    again = run(sink, spark.sql("SELECT 1L AS id, 40L AS lsn, 'u' AS op, 'un' AS name"), 8).upkeep
    assert again is not None
    assert (again.outcome, again.vacuumed) == ("nothing", False)  # not twice on a day


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
    forced = Maintenance(every=1, optimize=False, vacuum_after=timedelta(hours=1), force=True)

    result = stream.deliver(upsert(1, "one", lsn=9), upsert(2, "two", lsn=20), maintenance=forced)

    assert result.upkeep is not None
    assert (result.upkeep.outcome, result.upkeep.vacuumed) == ("done", True)
    assert [file.exists() for file in old] == [False, False]
    assert len(deltalake.DeltaTable(str(quarantine)).file_uris()) == 1
    assert spark.read.format("delta").load(str(quarantine)).count() == 5
    assert (result.events.stale, stream.rows()) == (1, [(2, 20, "two")])
    assert stream.deliver(upsert(0, "older", lsn=9)).events.stale == 1


def test_a_time_beyond_the_retention_is_refused(spark: SparkSession, tmp_table: str) -> None:
    """Of a file whose removal Delta has forgotten VACUUM goes by its age alone (Delta 4.4).

    Here by that of one that was removed two hours ago, where it was to stay for three.
    """
    brief = {"delta.deletedFileRetentionDuration": "interval 1 hour"}
    wanted = Maintenance(every=1, optimize=False, vacuum_after=timedelta(hours=3))
    refused = ChangeStream(spark, tmp_table, engine="driver", table_properties=brief, maintenance=wanted)
    with pytest.raises(ConfigError, match=r"vacuum_after=3:00:00 is longer than .* delete removed files too early"):
        refused.deliver(upsert(9, "nine", lsn=10))
    assert not Path(tmp_table).exists()

    stream = ChangeStream(spark, tmp_table, engine="driver", table_properties=brief)
    stream.deliver(upsert(9, "nine", lsn=10))
    removed = stored_files(tmp_table)
    spark.sql(f"DELETE FROM delta.`{tmp_table}`")
    log = sorted(Path(tmp_table, "_delta_log").glob("*.json"))[-1]
    was, now = log.read_text(), int(time.time() * 1000)
    log.write_text(re.sub(r'"deletionTimestamp":\d+', f'"deletionTimestamp":{now - 7_200_000}', was))
    log.with_name(f".{log.name}.crc").unlink()
    for file in removed:
        os.utime(file, (time.time() - 5 * 3_600,) * 2)
    forced = Maintenance(every=1, optimize=False, vacuum_after=timedelta(hours=3), force=True)
    assert maintained(spark, tmp_table, forced).vacuumed

    assert not removed & stored_files(tmp_table)


def test_a_retention_that_has_grown_counts_from_then_on(spark: SparkSession, tmp_table: str) -> None:
    stream = ChangeStream(spark, tmp_table, maintenance=Maintenance(every=2, vacuum_after=timedelta(days=7)))
    sink = stream.sink()
    run(sink, spark.sql("SELECT 1L AS id, 1L AS lsn, 'u' AS op, 'a' AS name"), 0)
    spark.sql(f"ALTER TABLE delta.`{tmp_table}` SET TBLPROPERTIES (delta.deletedFileRetentionDuration = '30 days')")
    result = run(sink, spark.sql("SELECT 1L AS id, 2L AS lsn, 'u' AS op, 'a' AS name"), 1)

    assert (result.outcome, result.upkeep is not None and result.upkeep.outcome) == ("committed", "failed")
    assert result.upkeep is not None
    assert "is shorter than delta.deletedFileRetentionDuration" in result.upkeep.detail


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({}, "[COLUMN_NOT_FOUND] zorder_by names ['nmae'], not in"),
        ({"cluster_by": ["id"], "zorder_by": ("id",)}, "is clustered (cluster_by); remove it"),
        ({"partition_by": ["name"], "zorder_by": ("NAME",)}, "zorder_by names ['name'], by which"),
        (
            {"table_properties": {"delta.deletedFileRetentionDuration": "interval soon"}},
            "is not a comparable interval",
        ),
    ],
)
def test_what_a_round_could_never_do_is_refused_at_once(
    spark: SparkSession, tmp_table: str, settings: dict[str, Any], problem: str
) -> None:
    zorder_by = settings.pop("zorder_by", ("nmae",))
    wanted = Maintenance(zorder_by=zorder_by, vacuum_after=timedelta(days=7))
    stream = ChangeStream(spark, tmp_table, maintenance=wanted, **settings)
    with pytest.raises(ConfigError) as raised:
        run(stream.sink(), spark.sql("SELECT 1L AS id, 1L AS lsn, 'u' AS op, 'a' AS name"), 0)
    assert problem in str(raised.value)
    assert not Path(tmp_table).exists()


@pytest.mark.parametrize("retention", [None, "interval 2 weeks", "interval 30 hours"])
def test_a_time_below_the_retention_is_refused_before_anything_is_written(
    spark: SparkSession, tmp_table: str, retention: str | None
) -> None:
    properties = {} if retention is None else {"delta.deletedFileRetentionDuration": retention}
    too_short = Maintenance(vacuum_after=timedelta(hours=29))
    stream = ChangeStream(spark, tmp_table, table_properties=properties, maintenance=too_short)
    with pytest.raises(ConfigError) as raised:
        run(stream.sink(), spark.sql("SELECT 1L AS id, 1L AS lsn, 'u' AS op, 'a' AS name"), 0)

    assert str(raised.value) == (
        "[INVALID_RETENTION] vacuum_after=1 day, 5:00:00 is shorter than"
        f" delta.deletedFileRetentionDuration='{retention or 'interval 1 week'}' of {tmp_table!r}, so time travel and"
        " slow readers would lose files; use that interval, set the property, or force=True"
    )
    assert not Path(tmp_table).exists()
    if retention == "interval 30 hours":
        long_enough = Maintenance(vacuum_after=timedelta(hours=30))
        stream.deliver(delete(1, lsn=1), maintenance=long_enough)


def test_by_hand(spark: SparkSession, tmp_table: str) -> None:
    stream = ChangeStream(spark, tmp_table, engine="driver")
    grown(stream, 6)
    command = CliRunner()

    assert command.invoke(cli.app, ["maintain", tmp_table]).output == "compacted 6 files into 1\n"
    assert command.invoke(cli.app, ["maintain", tmp_table]).output == "nothing to do\n"
    refused = command.invoke(cli.app, ["maintain", tmp_table, "--vacuum-after", "3 days"])
    assert (refused.exit_code, "vacuum_after=3 days, 0:00:00 is shorter than" in refused.output) == (2, True)
    done = command.invoke(cli.app, ["maintain", tmp_table, "--vacuum-after", "1 hour", "--force"])
    assert done.output == "no files are worth compacting; files that it no longer needs are deleted\n"
    too_short = command.invoke(cli.app, ["maintain", tmp_table, "--vacuum-after", "0 s", "--force"])
    assert (too_short.exit_code, "must be at least an hour" in too_short.output) == (2, True)
    wrong = command.invoke(cli.app, ["maintain", tmp_table, "--vacuum-after", "3"])
    assert (wrong.exit_code, "'3' has no unit" in wrong.output) == (2, True)
    with pytest.raises(ConfigError, match="there is no Delta table at"):
        maintained(spark, tmp_table + "_missing", OFTEN)
