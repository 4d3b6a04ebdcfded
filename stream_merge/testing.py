"""Helpers for tests of a job with a sink: batches from literals, rows back out, replay assertions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pyspark.sql import DataFrame, DataFrameReader, SparkSession

from stream_merge.model import names
from stream_merge.model.results import MergeResult
from stream_merge.model.table_ref import TableRef
from stream_merge.sink import MergeSink

Row = Mapping[str, Any]


def batch(spark: SparkSession, schema: str, *rows: Sequence[Any]) -> DataFrame:
    """A micro-batch from literal rows; `schema` is DDL such as "id bigint, lsn bigint, op string"."""
    return spark.createDataFrame(list(rows), schema)


def target_rows(spark: SparkSession, target: str, *columns: str) -> list[tuple[Any, ...]]:
    """The target's rows as sorted tuples of the given columns; without any, all but the reserved ones."""
    table = _loaded(spark.read.format("delta"), target)
    wanted = columns or tuple(name for name in table.columns if not names.is_reserved(name))
    rows = table.select(*(names.quote(name) for name in wanted)).collect()
    return sorted((tuple(row) for row in rows), key=repr)


def change_rows(spark: SparkSession, target: str, *columns: str, since: int = 0) -> list[tuple[Any, ...]]:
    """The change feed from a version on: (version, change type, columns…), sorted."""
    reader = spark.read.format("delta").option("readChangeFeed", "true").option("startingVersion", since)
    feed = _loaded(reader, target)
    hidden = set(names.CHANGE_FEED_COLUMNS)
    wanted = columns or tuple(name for name in feed.columns if not names.is_reserved(name) and name not in hidden)
    rows = feed.select("_commit_version", "_change_type", *(names.quote(name) for name in wanted)).collect()
    return sorted((tuple(row) for row in rows), key=repr)


def table_version(spark: SparkSession, target: str) -> int:
    """The newest version of a table."""
    version: int = spark.sql(f"DESCRIBE HISTORY {TableRef(target).sql} LIMIT 1").collect()[0]["version"]
    return version


def run(sink: MergeSink, batch_df: DataFrame, batch_id: int) -> MergeResult:
    """Call the sink and return what the call did."""
    sink(batch_df, batch_id)
    result = sink.last_result
    if result is None:
        msg = "the sink returned without a result"
        raise AssertionError(msg)
    return result


def assert_replay_stable(spark: SparkSession, sink: MergeSink, target: str, batch_df: DataFrame, batch_id: int) -> None:
    """Deliver a batch twice and assert that the second delivery changes neither rows nor change feed."""
    run(sink, batch_df, batch_id)
    rows, feed = target_rows(spark, target), change_rows(spark, target)
    run(sink, batch_df, batch_id)
    if target_rows(spark, target) != rows:
        msg = f"replaying batch {batch_id} changed the rows of {target!r}"
        raise AssertionError(msg)
    if change_rows(spark, target) != feed:
        msg = f"replaying batch {batch_id} added change feed rows to {target!r}"
        raise AssertionError(msg)


def _loaded(reader: DataFrameReader, target: str) -> DataFrame:
    ref = TableRef(target)
    return reader.table(target) if ref.path is None else reader.load(ref.path)
