"""Values of every type that both engines carry: the same rows, change feed and statistics, whichever merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from deliveries import from_sql, ledger
from prometheus_client import CollectorRegistry
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from stream_merge import MergeMetrics, MergeSink
from stream_merge.testing import run

pytestmark = pytest.mark.generated

COLUMNS = {
    "id": "bigint",
    "lsn": "bigint",
    "op": "string",
    "flag": "boolean",
    "tiny": "tinyint",
    "small": "smallint",
    "whole": "int",
    "price": "decimal(15,4)",
    "count": "decimal(18,0)",
    "ratio": "float",
    "score": "double",
    "day": "date",
    "at": "timestamp",
    "wall": "timestamp_ntz",
    "text": "string",
    "raw": "binary",
    "point": "struct<x: int, label: string>",
    "tags": "array<string>",
    "path": "array<struct<x: int, y: bigint>>",
}
EDGES: dict[str, tuple[str, ...]] = {
    "flag": ("true", "false"),
    "tiny": ("-128Y", "127Y"),
    "small": ("-32768S", "32767S"),
    "whole": ("-2147483648", "2147483647"),
    "price": ("-99999999999.9999", "0.0001"),
    "count": ("-999999999999999999", "999999999999999999"),
    "ratio": ("'NaN'", "'-0.0'", "'Infinity'", "1.5"),
    "score": ("'NaN'", "'-0.0'", "'-Infinity'", "1e300"),
    "day": ("'0001-01-01'", "'1582-10-04'", "'1899-12-31'", "'9999-12-31'"),
    "at": ("'0001-01-01 00:00:00.000001Z'", "'1899-12-31 23:59:59.999999Z'", "'9999-12-31 23:59:59Z'"),
    "wall": ("'0001-01-01 00:00:00.000001'", "'1899-12-31 23:59:59.999999'", "'2026-03-29 02:30:00'"),
    "text": ("''", "'ünïcode \\U0001F600'", f"'{'z' * 80}'", "'\\u0000'"),
    "raw": ("X''", "X'00FF'"),
    "point": ("struct(1, 'a')", "struct(null, null)", "null"),
    "tags": ("array()", "array('a', null)"),
    "path": ("array(struct(1, 2L))", "array(null)"),
}
ROWS = 8


def batches(spark: SparkSession) -> list[DataFrame]:
    """Inserts of every edge, then updates that shift every edge to another key, deletes and a NULL row between."""
    return [_batch(spark, lsn=1, shift=0, keys=range(ROWS)), _batch(spark, lsn=2, shift=1, keys=range(2, ROWS + 3))]


def _batch(spark: SparkSession, *, lsn: int, shift: int, keys: range) -> DataFrame:
    rows = []
    for key in keys:
        op = "'d'" if lsn > 1 and key == ROWS - 1 else "'u'"
        values = {"id": str(key), "lsn": str(lsn), "op": op}
        for column, edges in EDGES.items():
            values[column] = "null" if key == ROWS - 2 else edges[(key + shift) % len(edges)]
        rows.append(values)
    return from_sql(spark, rows, COLUMNS)


@pytest.fixture(scope="module")
def tables(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same two batches, merged by each engine from a target that Spark has made."""
    made = {engine: tmp_path_factory.mktemp(engine) / "table" for engine in ("spark", "driver")}
    ledgers = {}
    for engine, path in made.items():
        sink = MergeSink(
            target=str(path),
            keys="id",
            sequence_by="lsn",
            apply_as_deletes="op = 'd'",
            except_column_list=["op"],
            engine=engine,
            app_id="types",
            metrics=MergeMetrics(CollectorRegistry()),
        )
        results = [run(sink, batch, number) for number, batch in enumerate(batches(spark))]
        assert {result.engine for result in results} == {engine}
        ledgers[engine] = [ledger(result) for result in results]
    assert ledgers["spark"] == ledgers["driver"]
    return made


def told(frame: DataFrame) -> list[str]:
    """Every row as text that tells -0.0 from 0.0 and NULL from a struct of NULLs."""
    columns = [c for c in frame.columns if c not in ("_commit_timestamp",)]
    exact = [F.hex(c).alias(c) if c == "raw" else F.col(c).cast("string").alias(c) for c in columns]
    return sorted(json.dumps(row.asDict()) for row in frame.select(*exact).collect())


def test_the_rows_are_the_same(spark: SparkSession, tables: dict[str, Path]):
    rows = {engine: told(spark.read.format("delta").load(str(path))) for engine, path in tables.items()}

    assert len(rows["spark"]) == ROWS + 2
    assert rows["driver"] == rows["spark"]


def test_the_change_feed_is_the_same(spark: SparkSession, tables: dict[str, Path]):
    reader = spark.read.format("delta").option("readChangeFeed", "true").option("startingVersion", 0)
    feeds = {engine: told(reader.load(str(path))) for engine, path in tables.items()}

    assert feeds["driver"] == feeds["spark"]


def test_every_file_has_statistics_for_the_same_columns_that_hold_its_values(
    spark: SparkSession, tables: dict[str, Path]
):
    """A wrong bound would make a later merge skip the file and insert its keys twice."""
    described = {}
    for engine, path in tables.items():
        files = live_files(path)
        assert files
        for file, stats in files.items():
            assert_within(spark.read.parquet(str(path / file)), stats)
        described[engine] = set.union(*(set(leaves(stats["minValues"])) for stats in files.values()))
    # Neither keeps any for booleans; the driver none where the least is -Infinity, which JSON has no number for.
    assert described["driver"] <= described["spark"]
    assert described["spark"] - described["driver"] == {"score"}


def live_files(table: Path) -> dict[str, dict[str, Any]]:
    """Statistics of each data file that the newest version holds."""
    files: dict[str, dict[str, Any]] = {}
    for commit in sorted((table / "_delta_log").glob("*[0-9].json")):
        for line in commit.read_text().splitlines():
            action = json.loads(line)
            if "remove" in action:
                files.pop(action["remove"]["path"], None)
            if "add" in action:
                files[action["add"]["path"]] = json.loads(action["add"]["stats"])
    return files


def leaves(stats: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattened names of statistics to their values."""
    found: dict[str, Any] = {}
    for name, value in stats.items():
        found |= leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def assert_within(rows: DataFrame, stats: dict[str, Any]) -> None:
    """No value of a column lies outside of its bounds, and records and NULLs are counted right; in one job."""
    types = {f"{c}": dtype for c, dtype in COLUMNS.items()} | {"point.x": "int", "point.label": "string"}
    least, greatest, nulls = (leaves(stats[kind]) for kind in ("minValues", "maxValues", "nullCount"))
    counted = {"records": F.count(F.lit(1))}
    expected = {"records": stats["numRecords"]}
    for column in least.keys() | greatest.keys():
        value = F.col(column)
        outside = F.lit(False)
        if column in least:
            outside |= value < F.lit(least[column]).cast(types[column])
        if column in greatest:
            # Times are kept to the millisecond: the true maximum may lie within the last one (Delta protocol).
            slack = F.expr("INTERVAL 1 MILLISECOND") if types[column].startswith("timestamp") else None
            bound = F.lit(greatest[column]).cast(types[column])
            outside |= value > (bound if slack is None else bound + slack)
        told = f"outside of {least.get(column)} .. {greatest.get(column)}: {column}"
        counted[told], expected[told] = F.count_if(outside), 0
    for column, number in nulls.items():
        counted[f"NULL: {column}"], expected[f"NULL: {column}"] = F.count_if(F.col(column).isNull()), number
    found = rows.select(*counted.values()).first()
    assert dict(zip(counted, found or (), strict=True)) == expected
