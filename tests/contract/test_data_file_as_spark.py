"""Data files that Python writes, beside Spark's: the same statistics, and Spark reads the same rows from both.

Spark is the reference for what statistics say and for what readers make of a file, so these tests need it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confs import REBASE, conf
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType
from since import since

from stream_merge.spark.versions import arrow_table, arrow_type
from stream_merge.tables.files.data_file import write_change_file, write_data_file
from stream_merge.tables.files.statistics import statistics

EMOJIS = "\U0001f600" * 20
NOT_FINITE = ("NaN", "Infinity", "-Infinity")


class Table:
    """A table that Spark made, and its log."""

    def __init__(self, spark: SparkSession, path: Path, columns: str, partitioned: str = "", **properties: str) -> None:
        self.spark, self.path = spark, path
        told = ", ".join(f"'delta.{name}' = '{value}'" for name, value in {"appendOnly": "false", **properties}.items())
        by = f"PARTITIONED BY ({partitioned})" if partitioned else ""
        spark.sql(f"CREATE TABLE {self.name} ({columns}) USING delta {by} TBLPROPERTIES ({told})")

    @property
    def name(self) -> str:
        return f"delta.`{self.path}`"

    def logged(self, kind: str) -> list[dict[str, Any]]:
        """The actions of a kind in all commits."""
        commits = sorted((self.path / "_delta_log").glob("*.json"))
        actions = [json.loads(line) for commit in commits for line in commit.read_bytes().splitlines()]
        return [action[kind] for action in actions if kind in action]

    @property
    def properties(self) -> Mapping[str, str]:
        found: Mapping[str, str] = self.logged("metaData")[-1]["configuration"]
        return found

    @property
    def schema(self) -> StructType:
        """With the metadata of fields, which Spark's reader leaves out."""
        return StructType.fromJson(json.loads(self.logged("metaData")[-1]["schemaString"]))

    def append(self, rows: DataFrame) -> None:
        """Let Spark write rows in one file of each partition."""
        rows.coalesce(1).write.format("delta").mode("append").save(str(self.path))

    def commit(self, *actions: dict[str, Any]) -> None:
        """By hand, as the next version."""
        version = len(list((self.path / "_delta_log").glob("*.json")))
        info = {"timestamp": int(time.time() * 1000), "operation": "WRITE", "operationParameters": {}}
        text = "\n".join(json.dumps(action) for action in ({"commitInfo": info}, *actions))
        (self.path / "_delta_log" / f"{version:020d}.json").write_text(text + "\n")

    def write(self, rows: pa.Table, partition: Mapping[str, str | None] | None = None) -> dict[str, Any]:
        """A data file by us, not committed."""
        return write_data_file(
            self.path, rows, self.schema, partition=partition or {}, properties=self.properties, now_ms=1
        )

    def rows(self, where: str = "true") -> list[tuple[Any, ...]]:
        """Spelled by Spark: Python knows neither all times nor the sign of every zero."""
        return spelled(self.spark.sql(f"SELECT * FROM {self.name} WHERE {where}"))


def spelled(frame: DataFrame) -> list[tuple[Any, ...]]:
    found = frame.selectExpr("CAST(struct(*) AS STRING)", *("hex(raw)" for name in frame.columns if name == "raw"))
    return sorted(map(tuple, found.collect()))


def in_arrow(frame: DataFrame, *without: str) -> pa.Table:
    fields = [field for field in frame.schema.fields if field.name not in without]
    wanted = pa.schema([pa.field(field.name, arrow_type(field.dataType)) for field in fields])
    return arrow_table(frame.coalesce(1).drop(*without)).cast(wanted)


# -- every type ---------------------------------------------------------------------------------

COLUMNS = """
    id BIGINT NOT NULL, tiny TINYINT, small SMALLINT, medium INT, f FLOAT, d DOUBLE, odd DOUBLE, wide DOUBLE,
    zero DOUBLE, p5 DECIMAL(5,2), p15 DECIMAL(15,4), p38 DECIMAL(38,18), whole DECIMAL(38,0), text STRING, long STRING,
    raw BINARY,    yes BOOLEAN, day DATE, at TIMESTAMP, wall TIMESTAMP_NTZ, nothing STRING,
    s STRUCT<n: BIGINT, t: STRUCT<at: TIMESTAMP, p: DECIMAL(20,2), raw: BINARY>, l: ARRAY<INT>>,
    list ARRAY<STRUCT<day: DATE, p: DECIMAL(9,1), words: ARRAY<STRING>>>,
    map MAP<STRING, STRUCT<at: TIMESTAMP, f: FLOAT>>,
    by_day MAP<DATE, ARRAY<DECIMAL(18,2)>>
"""
VALUES = f"""
    (1, -128, -32768, -2147483648, 0.1, -1.7976931348623157E308, DOUBLE('NaN'), DOUBLE('-Infinity'), 0.0D,
     -999.99, -99999999999.9999, -99999999999999999999.999999999999999999, -99999999999999999999999999999999999999,
     '', '{"a" * 40}', X'', false, DATE'0001-01-01', TIMESTAMP'0001-01-01 00:00:00Z',
     TIMESTAMP_NTZ'0001-01-01 00:00:00', NULL, named_struct('n', 5, 't', NULL, 'l', array(1, NULL)),
     array(NULL, named_struct('day', DATE'1500-01-01', 'p', 1.5, 'words', array('', NULL, '{EMOJIS}'))),
     map('k', named_struct('at', TIMESTAMP'1500-06-15 12:34:56.789123Z', 'f', 1.5), '', NULL),
     map(DATE'1582-10-04', array(-1.25, NULL))),
    (9223372036854775807, 127, 32767, 2147483647, 3.4028235E38, 1.7976931348623157E308, 5.0D, DOUBLE('Infinity'), -0.0D,
     999.99, 99999999999.9999, 99999999999999999999.999999999999999999, 99999999999999999999999999999999999999,
     '\U0001f600\\n"\\\\', '{EMOJIS}', X'00FF80', true, DATE'9999-12-31', TIMESTAMP'9999-12-31 23:59:59.999999Z',
     TIMESTAMP_NTZ'9999-12-31 23:59:59.999999', NULL,
     named_struct('n', NULL, 't', named_struct('at', TIMESTAMP'9999-12-31 23:59:59.999999Z', 'p', -0.01, 'raw', X'01'),
                  'l', array()),
     array(), map(), map()),
    (3, 0, 0, 0, -0.3, 1E-5, NULL, 1.0D, NULL, 0.00, 0.0000, 0.000000000000000001, 1, '{"é" * 33}', '{"z" * 32}é',
     X'61', NULL, DATE'1500-01-01', TIMESTAMP'1500-01-01 12:34:56.789123Z', TIMESTAMP_NTZ'1969-12-31 23:59:59.999999',
     NULL, NULL, NULL, NULL, NULL),
    (4, {", ".join(["NULL"] * 24)})
"""  # fmt: skip
FILTERS = {
    "odd > 1e300": 1,
    "odd > 5": 1,
    "wide > 1e308": 1,
    "f = CAST(0.1 AS FLOAT)": 1,
    "zero = 0": 2,
    "at = TIMESTAMP'9999-12-31 23:59:59.999999Z' AND wall = TIMESTAMP_NTZ'9999-12-31 23:59:59.999999'": 1,
    "at <= TIMESTAMP'0001-01-01 00:00:00Z' AND day = DATE'0001-01-01'": 1,
    f"long = '{EMOJIS}' AND p38 = 99999999999999999999.999999999999999999": 1,
    "p5 = -999.99 AND p15 = -99999999999.9999 AND text = ''": 1,
    "s.t.p = -0.01 AND s.t.at > TIMESTAMP'9999-12-31 23:59:59.999Z'": 1,
    "s.t.p IS NULL AND nothing IS NULL": 3,
}


def test_statistics_and_rows_of_every_type_are_those_of_spark(spark: SparkSession, tmp_path: Path):
    """Ends that are not finite are left out by us alone; NOT NULL, NULLs at every depth, both calendars' edges."""
    properties = {"enableDeletionVectors": "true", "dataSkippingNumIndexedCols": "-1"}
    theirs = Table(spark, tmp_path / "theirs", COLUMNS, **properties)
    ours = Table(spark, tmp_path / "ours", COLUMNS, **properties)
    spark.sql(f"INSERT INTO {theirs.name} SELECT /*+ COALESCE(1) */ * FROM VALUES {VALUES}")

    add = ours.write(in_arrow(spark.table(theirs.name)))
    ours.commit({"add": add})

    (wanted,) = [json.loads(file["stats"], parse_float=Decimal, parse_int=Decimal) for file in theirs.logged("add")]
    found = json.loads(add["stats"], parse_float=Decimal, parse_int=Decimal)
    for ends in ("minValues", "maxValues"):
        for name in ("odd", "wide"):
            if wanted[ends][name] in NOT_FINITE:
                assert name not in found[ends]
                del wanted[ends][name]
        for name in ("f", "d", "odd", "wide", "zero"):
            for stats in (wanted[ends], found[ends]):
                stats[name] = as_float(stats[name], single=name == "f") if name in stats else None
    assert found == wanted
    assert found["maxValues"]["odd"] is None
    assert set(add) == set(theirs.logged("add")[0])

    rows = theirs.rows()
    assert len(rows) == 4
    assert ours.rows() == rows
    with conf(spark, "spark.sql.parquet.enableVectorizedReader", "false"):
        assert ours.rows() == rows
    with conf(spark, REBASE, "LEGACY"):
        assert ours.rows() == rows
    for where, count in FILTERS.items():
        assert (where, len(ours.rows(where))) == (where, count)
        assert (where, ours.rows(where)) == (where, theirs.rows(where))


def as_float(number: Decimal, *, single: bool) -> float:
    value: float = pa.scalar(float(number), pa.float64()).cast(pa.float32() if single else pa.float64()).as_py()
    return value


# -- which columns, and how texts are cut -------------------------------------------------------

TEXTS = [
    "a" * 32, "a" * 33, "a" * 32 + "\x7f", "a" * 32 + "\x7e", "a" * 32 + "é", "\U0001f600" * 16, "\U0001f600" * 17,
    "a" + "\U0001f600" * 20, "a" * 32 + "\U0010ffff" + "b", "a" * 32 + "\U0010ffff", "\U0010ffff" * 32,
    "\U0010ffff" * 33, "\U0010ffff" * 40, "a" * 31 + "\U0001f600" + "b", "\0\"\\\u2028" * 9,
]  # fmt: skip


@pytest.mark.parametrize(
    "properties",
    [
        {},
        {"dataSkippingNumIndexedCols": "16"},
        {"dataSkippingNumIndexedCols": "0"},
        {"dataSkippingStatsColumns": "C1, `s`.Deep.y, c3"},
        pytest.param(
            {"dataSkippingStatsColumns": "s", "dataSkippingStringPrefixLength": "3"},
            marks=since((4, 0), "a table's own length of texts in statistics"),
        ),
    ],
    ids=str,
)
def test_columns_and_texts_in_statistics_are_those_of_spark(spark: SparkSession, tmp_path: Path, properties):
    texts = ", ".join(f"c{i} STRING" for i in range(len(TEXTS)))
    columns = f"s STRUCT<x: STRING, Deep: STRUCT<y: BIGINT, raw: BINARY>, e: STRUCT<l: ARRAY<INT>>>, {texts}, last INT"
    table = Table(spark, tmp_path, columns, **properties)
    rows = [
        ((TEXTS[7], (7, None), (None,)), *TEXTS, 1),
        (None, *(text[:3] for text in TEXTS), None),
    ]
    table.append(spark.createDataFrame(rows, spark.table(table.name).schema))

    found = statistics(in_arrow(spark.table(table.name)), table.schema, table.properties)

    (wanted,) = [json.loads(file["stats"]) for file in table.logged("add")]
    assert json.loads(found) == wanted


# -- column mapping, partitions, the change feed ------------------------------------------------


@pytest.mark.parametrize("mode", ["name", "id"])
def test_spark_reads_files_with_mapped_columns_and_their_changes(spark: SparkSession, tmp_path: Path, mode: str):
    """Spark finds columns by name or by id; the physical names are not the logical ones, at any depth."""
    nested = "s STRUCT<x: INT, `,`: ARRAY<STRUCT<y: DECIMAL(5,1)>>>, m MAP<STRING, INT>"
    columns = f"id BIGINT NOT NULL, `a b` STRING, {nested}, p INT"
    settings = {"columnMapping.mode": mode, "enableChangeDataFeed": "true"}
    theirs = Table(spark, tmp_path / "theirs", columns, "p", **settings)
    ours = Table(spark, tmp_path / "ours", columns, "p", **settings)
    for table in (theirs, ours):
        spark.sql(f"ALTER TABLE {table.name} RENAME COLUMN s.x TO z")
    spark.sql(
        f"INSERT INTO {theirs.name} VALUES (1, 'x', named_struct('z', 1, ',', array(named_struct('y', 1.5), NULL)),"
        " map('k', 1), 7), (2, NULL, NULL, NULL, 7)"
    )
    rows = in_arrow(spark.table(theirs.name), "p")
    partition = {ours.schema["p"].metadata["delta.columnMapping.physicalName"]: "7"}
    changes = rows.append_column("_change_type", pa.array(["insert", "update_postimage"]))

    add = ours.write(rows, partition)
    cdc = write_change_file(ours.path, changes, ours.schema, partition=partition, properties=ours.properties)
    ours.commit({"add": add}, {"cdc": cdc})

    assert ours.rows() == theirs.rows()
    assert ours.rows("s.z = 1 AND p = 7") == theirs.rows("s.z = 1")
    feed = spark.read.format("delta").option("readChangeFeed", "true").option("startingVersion", 2)
    found = feed.load(str(ours.path)).drop("_commit_version", "_commit_timestamp")
    assert spelled(found.drop("_change_type")) == theirs.rows()
    assert sorted(row[0] for row in found.select("_change_type").collect()) == ["insert", "update_postimage"]
    (wanted,) = [json.loads(file["stats"]) for file in theirs.logged("add")]
    names = dict(zip(physical(ours.schema), physical(theirs.schema), strict=True))
    assert renamed(json.loads(add["stats"]), names) == wanted


def physical(schema: StructType) -> list[str]:
    found = []
    for field in schema.fields:
        found.append(field.metadata["delta.columnMapping.physicalName"])
        if isinstance(field.dataType, StructType):
            found += physical(field.dataType)
    return found


def renamed(stats: Any, names: Mapping[str, str]) -> Any:
    return (
        {names.get(name, name): renamed(part, names) for name, part in stats.items()}
        if isinstance(stats, dict)
        else stats
    )


def test_files_lie_in_the_folders_of_spark_and_are_found_there(spark: SparkSession, tmp_path: Path):
    columns, by = "id BIGINT, pq STRING, day DATE, i INT, yes BOOLEAN", "pq, day, i, yes"
    theirs = Table(spark, tmp_path / "theirs", columns, by)
    ours = Table(spark, tmp_path / "ours", columns, by)
    texts = [
        "plain",
        "a/b=c%d",
        "ä €\U0001f600",
        "x\u00a0\u2028y",
        'it\'s {"q"}[1]^#*?:\\',
        "l\nf\tt\x7f",
        "<|>`~!$&()+,;@",
        None,
    ]
    rows = [(i, text, None if i == 3 else f"{1 + i * 400:04}-02-03", -i, i % 2 == 0) for i, text in enumerate(texts)]
    frame = spark.createDataFrame(rows, "id BIGINT, pq STRING, day STRING, i INT, yes BOOLEAN")
    theirs.append(frame.selectExpr("id", "pq", "CAST(day AS DATE) AS day", "i", "yes"))

    adds = []
    for file in theirs.logged("add"):
        number = json.loads(file["stats"])["minValues"]["id"]
        add = ours.write(pa.table({"id": pa.array([number], pa.int64())}), file["partitionValues"])
        assert add["path"].rpartition("/")[0] == file["path"].rpartition("/")[0]
        assert add["partitionValues"] == file["partitionValues"]
        assert json.loads(add["stats"]) == json.loads(file["stats"])
        adds.append({"add": add})
    ours.commit(*adds)

    assert len(adds) == len(texts)
    assert ours.rows() == theirs.rows()
    assert ours.rows("pq = 'a/b=c%d'") == theirs.rows("id = 1")
