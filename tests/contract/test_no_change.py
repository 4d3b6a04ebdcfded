"""Batches that change no row: nothing is committed, on any engine, so no reader of the feed sees changes."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from deliveries import SCHEMA, ChangeStream, delete, upsert
from deltalake import DeltaTable
from disk import options_of
from pyspark.sql import SparkSession

from stream_merge.engines.spark.merger import SparkMerger
from stream_merge.shapes import surely_changes
from stream_merge.shapes.layouts import plan_layout
from stream_merge.shapes.surely_changes import GreatestSequence
from stream_merge.tables.log.handle import LogHandle
from stream_merge.testing import batch, run

ROWS = (
    upsert(1, "one", lsn=50),
    upsert(2, "two", lsn=10),
    upsert(3, None, lsn=30),
    upsert(4, "four", lsn=10),
    upsert(5, "five", lsn=10),
)
NOTHING_NEW = {
    "older upserts": [upsert(1, "late", lsn=49), upsert(2, "late", lsn=9)],
    "the rows again": list(ROWS),
    "deletes of absent keys": [delete(8, lsn=99), delete(9, lsn=99)],
    "an older delete": [delete(1, lsn=49)],
    "all of these": [upsert(1, "one", lsn=50), upsert(2, "late", lsn=9), delete(3, lsn=29), delete(9, lsn=99)],
}
SOMETHING_NEW = {
    "newer than its row, older than others": [upsert(2, "due", lsn=11)],
    "a new key, older than others": [upsert(6, "six", lsn=1)],
    "the same sequence, another row": [upsert(3, "trois", lsn=30)],
    "a delete among nothing new": [upsert(1, "late", lsn=49), delete(4, lsn=11)],
    "a delete alone": [delete(5, lsn=11)],
    "newer than all": [upsert(1, "uno", lsn=60)],
}
SEQUENCES: dict[str, dict[str, Any]] = {
    "stored": {},
    "kept apart": {"except_column_list": ["op", "lsn"]},
    "of two": {"sequence_by": ["lsn", "op"], "except_column_list": ["op"], "apply_as_deletes": "op = 'd'"},
}


def read_by_others(table: str) -> DeltaTable:
    """The table as delta-rs reads it, on its own."""
    return DeltaTable(table, storage_options=options_of(table))


@pytest.fixture(params=["spark", "driver"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("sequence", list(SEQUENCES))
def test_nothing_is_committed(spark: SparkSession, tmp_table: str, engine: str, sequence: str):
    """Readers without operation metrics (delta-rs, so polars, DuckDB) take rewritten files for deletes and inserts."""
    stream = ChangeStream(spark, tmp_table, engine=engine, **SEQUENCES[sequence])
    stream.deliver(*ROWS)
    before, rows = read_by_others(tmp_table).version(), stream.rows()

    results = {name: stream.deliver(*events) for name, events in NOTHING_NEW.items()}

    assert {name: (r.outcome, r.version) for name, r in results.items()} == dict.fromkeys(
        NOTHING_NEW, ("no_change", None)
    )
    assert read_by_others(tmp_table).version() == before
    assert stream.rows() == rows
    feed = pa.table(read_by_others(tmp_table).load_cdf(starting_version=0).read_all())
    assert feed["_change_type"].to_pylist() == ["insert"] * len(ROWS)


@pytest.mark.parametrize("sequence", list(SEQUENCES))
def test_what_changes_a_row_is_committed(spark: SparkSession, tmp_table: str, engine: str, sequence: str):
    """Also where the batch is older than what the table holds, so that only a look at the rows can tell."""
    stream = ChangeStream(spark, tmp_table, engine=engine, **SEQUENCES[sequence])
    stream.deliver(*ROWS)

    outcomes = {name: stream.deliver(*events).outcome for name, events in SOMETHING_NEW.items()}

    assert outcomes == dict.fromkeys(SOMETHING_NEW, "committed")
    assert stream.rows("id", "name") == [(1, "uno"), (2, "due"), (3, "trois"), (6, "six")]


@pytest.mark.engines("spark")
@pytest.mark.parametrize("asked", ["spark", "auto"])
def test_a_batch_that_is_newer_than_the_table_is_not_looked_at_again(
    spark: SparkSession, tmp_table: str, monkeypatch: pytest.MonkeyPatch, asked: str
):
    """The statistics in the log tell that it changes a row; a look at the rows would be one more scan."""
    looked: list[bool] = []
    would_change = SparkMerger._would_change
    monkeypatch.setattr(SparkMerger, "_would_change", lambda *args: looked.append(would_change(*args)) or looked[-1])
    stream = ChangeStream(spark, tmp_table, engine=asked, app_id=None)
    run(stream.sink(), batch(spark, SCHEMA, *ROWS), 0)
    run(stream.sink(), batch(spark, SCHEMA, upsert(2, "due", lsn=51), upsert(1, "late", lsn=3)), 1)
    assert looked == []

    run(stream.sink(), batch(spark, SCHEMA, upsert(2, "late", lsn=51)), 2)
    run(stream.sink(), batch(spark, SCHEMA, delete(3, lsn=60)), 3)
    assert looked == [True, True]


@pytest.mark.parametrize("sequence", ["bigint", "timestamp", "date"])
def test_the_bound_holds_all_that_is_stored(spark: SparkSession, tmp_table: str, sequence: str):
    """Read from Spark's statistics, of a sequence in a column of the reserved struct."""
    values = {"bigint": ("7L", "9L"), "date": ("DATE'1969-12-30'", "DATE'2026-01-02'")}
    values["timestamp"] = ("TIMESTAMP'1969-12-31 23:59:59.999999Z'", "TIMESTAMP'2026-01-02 03:04:05.678901Z'")
    greatest = {"bigint": 9, "date": 20455, "timestamp": 1767323045678901}[sequence]
    stream = ChangeStream(
        spark, tmp_table, "", keys="id", sequence_by="s", except_column_list=["s"], engine="spark", app_id=None
    )
    events = spark.sql(
        " UNION ALL ".join(f"SELECT {i}L AS id, {value} AS s" for i, value in enumerate(values[sequence]))
    )
    run(stream.sink(), events, 0)
    layout = plan_layout(events, stream.sink()._calls.spec, spark.read.format("delta").load(tmp_table).schema)

    bound = surely_changes.stored(LogHandle(tmp_table, options_of(tmp_table)).files(), layout)

    assert bound is not None
    assert greatest <= bound.components[0] <= greatest + 1_000
    assert not GreatestSequence(components=(greatest,)).is_beyond(bound, None)
    assert GreatestSequence(components=(greatest + 2_000,)).is_beyond(bound, None)
