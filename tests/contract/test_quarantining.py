"""Who writes the quarantine: delta-rs what a small batch refuses, Spark all else, and each event once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from deliveries import SCHEMA, ChangeStream, delete, ledger, upsert
from pyspark.sql import DataFrame, SparkSession

from stream_merge.model.names import CORRUPT_COLUMN, ORIGIN_COLUMN, QUARANTINE_TABLE_PREFIX, TOMBSTONE_TABLE_PREFIX
from stream_merge.model.results import MergeResult
from stream_merge.model.table_ref import TableRef
from stream_merge.spark.versions import SPARK
from stream_merge.tables import create_table, spark_table
from stream_merge.tables.log.handle import LogHandle
from stream_merge.tables.side import side_table
from stream_merge.testing import batch, run

BROKEN = [(None, 1, "u", "no key"), (None, None, "d", None), upsert(3, "no sequence", lsn=None)]


@pytest.fixture
def stream(spark: SparkSession, tmp_table: str) -> ChangeStream:
    """A target and a quarantine that exist: Spark makes both."""
    stream = ChangeStream(spark, tmp_table)
    stream.deliver(upsert(1, "row", lsn=1), (None, 1, "u", "the first one"))
    return stream


def twice(
    stream: ChangeStream, *batches: DataFrame, carries: Sequence[str] = (), first: int = 2, **settings: Any
) -> MergeResult:
    """Batches through one sink, which knows from an empty one that they are small; each comes again."""
    sink = ChangeStream(stream.spark, stream.target, **settings).sink()
    sink._calls.for_source(*carries)
    run(sink, batches[0].where("false"), first - 1)
    for batch_id, batch_df in enumerate(batches, start=first):
        result = run(sink, batch_df, batch_id)
        run(sink, batch_df, batch_id)
    return result


def broken(stream: ChangeStream, *events: Any) -> DataFrame:
    """The broken events, and others."""
    return batch(stream.spark, SCHEMA, *events, *BROKEN)


def writers(stream: ChangeStream, table: str | None = None) -> list[str]:
    """Who made each version that added events to the quarantine."""
    place = Path(table or stream.folder / f"{QUARANTINE_TABLE_PREFIX}table")
    found = []
    for commit in sorted((place / "_delta_log").glob("*.json")):
        actions = [json.loads(line) for line in commit.read_text().splitlines()]
        if any("add" in action for action in actions):
            info = next(action["commitInfo"] for action in actions if "commitInfo" in action)
            found.append("Spark" if info["engineInfo"].startswith("Apache-Spark") else "driver")
    return found


def kept(stream: ChangeStream, batch_id: int) -> list[Any]:
    """The quarantined events of a batch, all but when."""
    table = stream.side_table(QUARANTINE_TABLE_PREFIX).where(f"batch_id = {batch_id}").drop("batch_id", "recorded_at")
    return sorted((tuple(row) for row in table.collect()), key=repr)


def test_what_a_small_batch_refuses_is_appended_in_the_driver(stream: ChangeStream):
    """As Spark writes it, and once."""
    twice(stream, broken(stream, upsert(2, "row", lsn=1)), broken(stream))
    twice(stream, broken(stream), engine="spark", first=4)

    assert writers(stream) == ["Spark", "driver", "driver", "Spark"]
    assert len(kept(stream, 2)) == len(BROKEN)
    assert kept(stream, 2) == kept(stream, 3) == kept(stream, 4)
    recorded = stream.side_table(QUARANTINE_TABLE_PREFIX).selectExpr("max(recorded_at) - min(recorded_at) AS apart")
    assert recorded.collect()[0]["apart"].total_seconds() < 3_600


def test_the_first_broken_event_and_the_first_delete_need_no_job_of_spark(spark: SparkSession, tmp_table: str):
    """Both tables are created in the driver, and are what Spark would have created."""
    stream = ChangeStream(spark, tmp_table)
    stream.deliver(upsert(1, "row", lsn=1), upsert(2, "row", lsn=1))

    twice(stream, broken(stream, delete(1, lsn=2)))
    stream.batch_id = 3
    late = stream.deliver(upsert(1, "late", lsn=1), delete(2, lsn=3))

    assert writers(stream) == ["driver"]
    assert len(kept(stream, 2)) == len(BROKEN)
    assert ledger(late) == {"received": 2, "stale": 1, "deleted": 1}
    for prefix in (QUARANTINE_TABLE_PREFIX, TOMBSTONE_TABLE_PREFIX):
        ours = spark_table.find(spark, TableRef(stream.folder / f"{prefix}table"))
        assert ours is not None
        first = (Path(ours.location.removeprefix("file:")) / "_delta_log" / f"{0:020}.json").read_text()
        assert '"engineInfo": "stream_merge"' in first
        theirs = create_table.create(
            spark, TableRef(stream.folder / f"by_spark_{prefix}"), ours.schema.fields, properties=ours.properties
        )
        assert (theirs.schema, theirs.properties) == (ours.schema, ours.properties)
        assert '"protocol": {"minReaderVersion": 1, "minWriterVersion": 2}' in first


@pytest.mark.parametrize(("engine", "writer"), [("spark", "Spark"), ("driver", "driver")])
def test_a_reader_never_has_to_hold_more_than_a_hundred_rows(stream: ChangeStream, engine: str, writer: str):
    """Records may have megabytes, and Spark reads a row group, or 4,096 rows of it, at once."""
    twice(stream, broken(stream, *[(None, n, "u", "no key") for n in range(250)]), engine=engine)

    assert writers(stream)[-1] == writer
    files = [pq.ParquetFile(file).metadata for file in stream.folder.glob(f"{QUARANTINE_TABLE_PREFIX}table/*.parquet")]
    groups = [file.row_group(i) for file in files for i in range(file.num_row_groups)]
    assert sum(group.num_rows for group in groups) == 1 + 250 + len(BROKEN)
    if writer == "driver" or SPARK >= (4, 1):  # Parquet 1.15 of Spark 4.0 does not know such a limit
        assert max(group.num_rows for group in groups) == 100
    assert {group.column(0).compression for group in groups} == {"SNAPPY"}


def test_text_and_origin_are_kept_as_spark_keeps_them(stream: ChangeStream):
    """Of an undecodable record why; of each record its place and bytes."""

    def lines() -> DataFrame:
        return stream.spark.sql(
            "SELECT id, 1L AS lsn, 'u' AS op, 'x' AS name,"
            f" IF(id = 2, 'not a line', NULL) AS {CORRUPT_COLUMN},"
            " IF(id IS NULL, named_struct('topic', 't', 'partition', 1, 'offset', 7L, 'timestamp',"
            " timestamp'1969-12-31 23:59:59.999999', 'raw_key', X'00ff', 'raw_value', X''),"
            f" NULL) AS {ORIGIN_COLUMN} FROM VALUES (1L), (2L), (NULL) AS t(id)"
        )

    carries = (CORRUPT_COLUMN, ORIGIN_COLUMN)
    twice(stream, lines(), carries=carries)
    twice(stream, lines(), carries=carries, engine="spark", first=3)

    assert writers(stream) == ["Spark", "driver", "Spark"]
    assert len(kept(stream, 2)) == 2
    assert kept(stream, 2) == kept(stream, 3)


@pytest.mark.parametrize("landed", [False, True], ids=["before the commit", "after the commit"])
def test_spark_takes_over_when_the_driver_fails(
    stream: ChangeStream, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, landed: bool
):
    """The transaction id tells Spark whether there is anything left to write."""
    append = side_table.append

    def failing(handle: LogHandle, *args: Any, **kwargs: Any) -> None:
        if landed:
            append(handle, *args, **kwargs)
        if QUARANTINE_TABLE_PREFIX in handle.location:
            msg = "the disk is gone"
            raise OSError(msg)

    monkeypatch.setattr(side_table, "append", failing)

    result = twice(stream, broken(stream, upsert(2, "row", lsn=1)))

    assert ledger(result) == {"received": 4, "quarantined": 3, "inserted": 1}
    assert len(kept(stream, 2)) == len(BROKEN)
    assert writers(stream) == ["Spark", "driver" if landed else "Spark"]
    assert "quarantine_left_to_spark" in caplog.text


def test_what_two_sinks_may_share_is_left_to_spark(spark: SparkSession, tmp_table: str, tmp_path: Path):
    """On a local disk its commits and those of delta-rs do not exclude each other."""
    shared = str(tmp_path / "shared")
    stream = ChangeStream(spark, tmp_table)

    twice(stream, broken(stream), broken(stream), quarantine_target=shared)

    assert writers(stream, shared) == ["Spark", "Spark"]


def test_columns_of_others_are_left_to_spark(stream: ChangeStream):
    """Somebody may have added a column, with a default perhaps."""
    place = stream.folder / f"{QUARANTINE_TABLE_PREFIX}table"
    stream.spark.sql(f"ALTER TABLE delta.`{place}` ADD COLUMNS (ticket string)")

    twice(stream, broken(stream, upsert(2, "row", lsn=1)))

    assert writers(stream) == ["Spark", "Spark"]
    assert len(kept(stream, 2)) == len(BROKEN)
