"""The driver: when it merges, what it must not overlook, and that Spark reads what it wrote."""

from __future__ import annotations

import json
import os
import shutil
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from confs import REBASE, conf
from deliveries import COPY_ON_WRITE, DEFAULTS, ChangeStream, delete, ledger, upsert
from generated import create_generated
from pyspark.sql import SparkSession

from stream_merge import ConfigError, MergeFailedError, RetryPolicy
from stream_merge.engines.driver.merger import DriverMerger
from stream_merge.engines.spark import engine as spark_engine
from stream_merge.model.table_ref import TableRef
from stream_merge.tables.side import side_table, tombstones
from stream_merge.testing import batch, run

SPARKS_ALONE = {**COPY_ON_WRITE, "delta.randomizeFilePrefixes": "true"}
QUICK = RetryPolicy(attempts=3, backoff_initial_seconds=0, backoff_max_seconds=0, backoff_jitter_seconds=0)


@pytest.fixture(params=[{}, COPY_ON_WRITE], ids=["mark", "rewrite"])
def stream(request: pytest.FixtureRequest, spark: SparkSession, tmp_table: str) -> ChangeStream:
    stream = ChangeStream(spark, tmp_table, engine="driver", retry=QUICK, table_properties=request.param)
    stream.deliver(upsert(1, "one", lsn=1), upsert(2, "two", lsn=1), upsert(3, "three", lsn=1))
    return stream


# -- where it is not taken ----------------------------------------------------------------------


def test_deletes_of_days_in_another_calendar_are_left_to_spark(spark: SparkSession, tmp_table: str) -> None:
    """Needs Spark, as its user has set it: the log of deletes, begun by Spark, stays with it."""
    stream = ChangeStream(spark, tmp_table, "day date, lsn bigint, op string", **{**DEFAULTS, "keys": ["day"]})
    with conf(spark, REBASE, "LEGACY"):
        stream.deliver((date(2, 1, 1), 5, "d"))
        stream.deliver((date(1, 1, 1), 5, "d"), (date(3, 1, 1), 5, "u"))
        late = stream.deliver((date(1, 1, 1), 4, "u"), (date(2, 1, 1), 4, "u"), engine="spark")

    assert ledger(late) == {"received": 2, "stale": 2}


def test_a_failure_that_left_nothing_goes_to_spark_once(stream: ChangeStream, monkeypatch: pytest.MonkeyPatch):
    """Under engine="auto" only."""

    def broken(*_: Any, **__: Any) -> Any:
        msg = "not implemented"
        raise ValueError(msg)

    monkeypatch.setattr(DriverMerger, "merge", broken)
    stream.settings["engine"] = "auto"
    result = stream.deliver(upsert(1, "new", lsn=5), delete(3, lsn=5))

    assert (result.outcome, result.engine, result.refusal) == ("committed", "spark", "failed")
    assert "not implemented" in result.plan
    assert stream.rows("id", "name") == [(1, "new"), (2, "two")]


# -- eligibility --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "properties", "said"),
    [
        ("id bigint, lsn bigint, name string", {"delta.enableRowTracking": "true"}, "rowTracking"),
        ("id bigint, lsn bigint, name string", {"delta.enableInCommitTimestamps": "true"}, None),
        ("id bigint, lsn bigint, name string", {"delta.enableTypeWidening": "true"}, None),
        ("id bigint, lsn bigint, name varchar(20)", {}, "'name' of the target is char(n) or varchar(n)"),
        ("id bigint, lsn bigint, name string, m map<string, int>", {}, None),
        ("id bigint, lsn bigint, name string, n bigint = id + 1", {}, "'n' of the target is generated"),
    ],
    ids=["row tracking", "in-commit timestamps", "type widening", "varchar", "map not in the source", "generated"],
)
def test_what_is_not_proven_is_left_to_spark(
    spark: SparkSession, tmp_table: str, columns: str, properties: dict[str, str], said: str | None
):
    """Read from the table before the merge; engine="driver" says so in one sentence."""
    listed = ", ".join(f"'{key}' = '{value}'" for key, value in properties.items())
    if " = " in columns:
        create_generated(spark, tmp_table, columns.partition(", n ")[0], {"n bigint": "id + 1"})
    else:
        also = f" TBLPROPERTIES ({listed})" if listed else ""
        spark.sql(f"CREATE TABLE delta.`{tmp_table}` ({columns}) USING delta{also}")
    stream = ChangeStream(spark, tmp_table, engine="auto" if said else "driver")

    result = stream.deliver(upsert(1, "one", lsn=1))

    if said is None:
        assert result.engine == "driver"
        return
    assert (result.engine, said in result.plan) == ("spark", True), result.plan
    stream.settings["engine"] = "driver"
    with pytest.raises(ConfigError, match="engine='driver' cannot merge this batch"):
        stream.deliver(upsert(1, "two", lsn=2))


def test_short_decimals_are_keys(spark: SparkSession, tmp_table: str):
    """The bounds of a batch hold zero in exponent notation."""
    schema = "id decimal(15,10), lsn bigint, op string"
    stream = ChangeStream(
        spark, tmp_table, schema, engine="driver", keys="id", sequence_by="lsn", apply_as_deletes="op = 'd'"
    )
    ids = [Decimal("0E-10"), Decimal("1E-10"), Decimal("-99999.1234567891")]
    stream.deliver(*((key, 1, "u") for key in ids))
    stream.deliver(*((key, 2, "d") for key in ids[:2]))
    late = stream.deliver(*((key, 1, "u") for key in ids))

    assert ledger(late) == {"received": 3, "stale": 2, "unaffected": 1}
    assert stream.rows("id", "lsn") == [(ids[2], 1)]


def test_an_unreadable_log_does_not_pass_for_an_empty_one(stream: ChangeStream, monkeypatch: pytest.MonkeyPatch):
    """A stale upsert would revive a deleted key; under engine="auto" Spark reads the log instead."""
    stream.deliver(delete(1, lsn=9))
    read = tombstones.rows_with_keys

    def unreadable(*_: Any) -> Any:
        msg = "too many open files"
        raise OSError(msg)

    monkeypatch.setattr(tombstones, "rows_with_keys", unreadable)
    late = batch(stream.spark, stream.schema, upsert(1, "late", lsn=5))
    with pytest.raises(MergeFailedError, match=r"tombstones of .* cannot be read or written"):
        run(stream.sink(), late, 2)
    stream.settings["engine"] = "auto"
    result = run(stream.sink(), late, 2)
    monkeypatch.setattr(tombstones, "rows_with_keys", read)

    assert (result.engine, ledger(result)) == ("spark", {"received": 1, "stale": 1})
    assert stream.rows("id") == [(2,), (3,)]


def test_housekeeping_that_fails_does_not_fail_the_batch(stream: ChangeStream, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: Any) -> Any:
        raise OSError

    monkeypatch.setattr(tombstones, "TIDY_FILES", 1)
    monkeypatch.setattr(tombstones, "rewrite", broken)

    assert stream.deliver(delete(1, lsn=9)).outcome == "committed"


def test_a_merge_that_might_need_too_much_memory_goes_to_spark(spark: SparkSession, tmp_table: str):
    stream = ChangeStream(spark, tmp_table, engine="auto", driver_memory_bytes=1 << 20)
    result = stream.deliver(upsert(1, "one", lsn=1))

    assert (result.engine, result.refusal) == ("spark", "memory")
    assert "of 1 MB allowed" in result.plan


# -- one table, two engines ---------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("vectors", ["true", "false"])
def test_both_engines_read_each_others_files_with_column_mapping(spark: SparkSession, tmp_table: str, vectors: str):
    """Rows that a deletion vector hides do not come back; mapped names stay mapped."""
    stream = ChangeStream(
        spark,
        tmp_table,
        table_properties={"delta.enableDeletionVectors": vectors, "delta.columnMapping.mode": "name"},
    )
    for round_number, engine in enumerate(("spark", "driver", "spark", "driver")):
        lsn = 10 * round_number
        stream.settings["engine"] = engine
        result = stream.deliver(
            *(upsert(key, f"{engine} {round_number}", lsn=lsn + 1) for key in range(6)),
            delete(round_number, lsn=lsn + 2),
        )
        stream.sql(f"DELETE FROM {{target}} WHERE id = {5 - round_number}")
        assert result.engine == engine

    assert stream.rows("id", "name") == [(key, "driver 3") for key in (0, 1, 4, 5)]


@pytest.mark.parametrize(
    ("favoured", "way", "vectors"), [(False, "copy-on-write", 0), (True, "with deletion vectors", 1)]
)
def test_spark_marks_or_rewrites_as_the_size_of_the_files_suggests(
    spark: SparkSession, tmp_table: str, monkeypatch: pytest.MonkeyPatch, *, favoured: bool, way: str, vectors: int
):
    """Only on a table that has deletion vectors; a small merge is cheaper without them."""
    stream = ChangeStream(
        spark, tmp_table, driver_memory_bytes=1, table_properties={"delta.enableDeletionVectors": "true"}
    )
    stream.deliver(*(upsert(key, "old", lsn=1) for key in range(5)))
    monkeypatch.setattr(spark_engine, "favours_deletion_vectors", lambda _: favoured)

    result = stream.deliver(upsert(1, "new", lsn=2))

    assert result.plan.split("; ")[1] == way
    assert result.metrics["numTargetDeletionVectorsAdded"] == vectors


def test_a_target_that_only_spark_may_write_has_its_deletes_remembered_in_the_driver(
    spark: SparkSession, tmp_table: str
):
    """The log is the sink's own table: plain, and read by Spark alone only until it is there."""
    stream = ChangeStream(spark, tmp_table, table_properties=SPARKS_ALONE)
    stream.deliver(upsert(1, "one", lsn=1), upsert(2, "two", lsn=1), delete(9, lsn=5))

    second = stream.deliver(delete(1, lsn=5), upsert(9, "late", lsn=4), upsert(2, "newer", lsn=2))
    third = stream.deliver(upsert(1, "late", lsn=4), upsert(1, "late, too", lsn=3), upsert(9, "back", lsn=6))

    assert {second.refusal, third.refusal} == {"table_feature"}
    assert ledger(second) == {"received": 3, "stale": 1, "updated": 1, "deleted": 1}
    assert ledger(third) == {"received": 3, "collapsed": 1, "stale": 1, "inserted": 1}
    assert stream.rows("id", "name") == [(2, "newer"), (9, "back")]
    log = Path(TableRef(tmp_table).tombstones) / "_delta_log"
    writers = [commit_info(file)["engineInfo"].split(":")[0] for file in sorted(log.glob("*.json"))]
    assert [writer.startswith("stream_merge") for writer in writers] == [True, False, True, True]


def commit_info(commit: Path) -> dict[str, Any]:
    """Who made a commit, and how."""
    actions = map(json.loads, commit.read_text().splitlines())
    return next(action["commitInfo"] for action in actions if "commitInfo" in action)


def test_tombstones_that_the_driver_cannot_read_are_left_to_spark(
    spark: SparkSession, tmp_table: str, monkeypatch: pytest.MonkeyPatch
):
    stream = ChangeStream(spark, tmp_table, table_properties=SPARKS_ALONE)
    stream.deliver(upsert(1, "one", lsn=1), delete(9, lsn=5))
    for module, broken in ((tombstones, "rows_with_keys"), (side_table, "append")):
        monkeypatch.setattr(module, broken, failing)

    result = stream.deliver(upsert(9, "late", lsn=4), upsert(2, "two", lsn=1), delete(1, lsn=6))

    assert ledger(result) == {"received": 3, "stale": 1, "inserted": 1, "deleted": 1}
    assert "the driver failed on the tombstones" in result.plan


def test_kept_tombstones_follow_other_writers_and_housekeeping(
    spark: SparkSession, tmp_table: str, monkeypatch: pytest.MonkeyPatch
):
    """One sink, whose entries in memory grow by its own appends; whatever else happens to the log is read again."""
    monkeypatch.setattr(tombstones, "TIDY_FILES", 4)
    settings = {"schema": "id string, lsn bigint, op string, name string", "tombstone_retention_seconds": 3600}
    stream = ChangeStream(spark, tmp_table, engine="driver", **DEFAULTS, **settings)
    sink, other = stream.sink(), ChangeStream(spark, tmp_table, engine="spark", app_id="other", **DEFAULTS, **settings)

    def deliver(batch_id: int, *events: tuple[Any, ...]) -> dict[str, int]:
        return ledger(run(sink, batch(spark, settings["schema"], *events), batch_id))

    deliver(0, upsert("a", "one", lsn=1), upsert("b", "two", lsn=1))
    deliver(1, delete("a", lsn=5))
    assert deliver(2, upsert("a", "late", lsn=4)) == {"received": 1, "stale": 1}
    run(other.sink(), batch(spark, settings["schema"], delete("c", lsn=9)), 0)
    assert deliver(3, upsert("c", "late", lsn=8)) == {"received": 1, "stale": 1}
    for batch_id in range(4, 10):
        deliver(batch_id, delete("b", lsn=batch_id))
    assert deliver(10, upsert("b", "late", lsn=3), upsert("c", "late", lsn=8), upsert("a", "back", lsn=6)) == {
        "received": 3,
        "stale": 2,
        "inserted": 1,
    }
    assert deliver(11, upsert("a", "newer", lsn=7)) == {"received": 1, "updated": 1}


def failing(*_: object) -> None:
    msg = "as if delta-rs had failed"
    raise OSError(msg)


def test_a_table_made_anew_at_the_same_place_is_not_taken_for_the_old_one(spark: SparkSession, tmp_table: str):
    """The kept handle knows more versions than the new table has."""
    sink = ChangeStream(spark, tmp_table, engine="driver").sink()
    for batch_id in range(3):
        run(
            sink,
            batch(spark, "id bigint, lsn bigint, op string, name string", upsert(1, "old", lsn=batch_id)),
            batch_id,
        )
    shutil.rmtree(tmp_table)
    fresh = ChangeStream(spark, tmp_table, engine="spark", app_id="fresh")
    fresh.deliver(upsert(7, "seven", lsn=1))

    result = run(sink, batch(spark, fresh.schema, upsert(8, "eight", lsn=1)), 3)

    assert result.version == 2
    assert fresh.rows("id", "name") == [(7, "seven"), (8, "eight")]


def test_a_log_is_kept_for_as_long_as_delta_reads_it_and_delta_rs_does_not(spark: SparkSession, tmp_table: str):
    """By its own default it would delete what is older than 30 days; Spark writes such a table's checkpoints."""
    properties = {"delta.checkpointInterval": "3", "delta.logRetentionDuration": "365 days"}
    stream = ChangeStream(spark, tmp_table, engine="driver", tombstones=False, table_properties=properties)
    sink, log = stream.sink(), Path(tmp_table) / "_delta_log"
    for batch_id in range(4):
        run(sink, batch(spark, stream.schema, upsert(1, "row", lsn=1 + batch_id)), batch_id)
    (checkpoint,) = log.glob("*.checkpoint*.parquet")
    first = log / f"{0:020d}.json"
    long_ago = first.stat().st_mtime - 100 * 86_400
    for commit in log.glob("*.json"):
        os.utime(commit, (long_ago, long_ago))
    for batch_id in range(4, 7):
        run(sink, batch(spark, stream.schema, upsert(1, "row", lsn=1 + batch_id)), batch_id)

    assert checkpoint.name.startswith(f"{3:020d}")
    assert len(list(log.glob("*.checkpoint*.parquet"))) == 2
    assert first.exists()
    assert stream.rows() == [(1, 7, "row")]


def test_checkpoints_are_written_at_the_tables_interval(spark: SparkSession, tmp_table: str):
    """Delta's default is 10 commits, and its property is obeyed; Spark starts from them."""
    stream = ChangeStream(
        spark, tmp_table, engine="driver", tombstones=False, table_properties={"delta.checkpointInterval": "3"}
    )
    sink = stream.sink()
    for batch_id in range(7):
        run(sink, batch(spark, stream.schema, upsert(batch_id, "row", lsn=1)), batch_id)

    log = Path(tmp_table) / "_delta_log"
    assert sorted(int(path.name[:20]) for path in log.glob("*.checkpoint*.parquet")) == [3, 6]
    assert len(stream.rows()) == 7
    last = json.loads((log / "_last_checkpoint").read_text())
    assert last["version"] == 6
