"""Ways that only some versions of Spark take are taken on every version: they give the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import Observation, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from stream_merge import MergeFailedError, MergeSink, read_files
from stream_merge.spark import catalog, versions
from stream_merge.spark.evaluate_once import materialised
from stream_merge.spark.jvm import zones

pytestmark = pytest.mark.smoke

OWN = versions.SPARK
WAYS = {"as this version does it": OWN}
if OWN >= (4, 0):  # what 3.5 does, its JVM alone can
    WAYS["as 4.0 does it"] = (4, 0)


@pytest.fixture(params=WAYS.values(), ids=WAYS.keys())
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "SPARK", request.param)


def numbering() -> versions.Decode:
    """Depends on the order of all rows of a task, as decoding does."""

    def numbered(batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:  # sent to the workers by value
        seen = 0
        for values, _ in batches:
            count = len(values)
            yield pa.StructArray.from_arrays([pa.array(range(seen, seen + count)), values], names=["number", "value"])
            seen += count

    return numbered


@pytest.mark.usefixtures("version")
def test_python_sees_each_row_once_and_the_columns_beside_it_stay(spark: SparkSession):
    """Needs Spark: three Arrow batches of a task and an empty task, filtered by what Python gives."""
    rows = spark.range(0, 5, 1, 1).select(
        "id", F.lit("1500-01-01 12:00:00").cast("timestamp").alias("at"), F.format_string("v%d", "id").alias("value")
    )
    rows = rows.union(rows.where("id < 0"))
    made = T.StructType([T.StructField("number", T.LongType()), T.StructField("value", T.StringType())])
    size = "spark.sql.execution.arrow.maxRecordsPerBatch"
    spark.conf.set(size, "2")
    try:
        found = versions.decoded(
            rows,
            numbering(),
            "value",
            F.col("id"),
            dtype=made,
            name="made",
            keep=["at", "id"],
            is_repeatable=False,
        )
        kept = found.where("made.number % 2 = 0").selectExpr("id", "cast(at AS string)", "made").collect()
    finally:
        spark.conf.unset(size)

    assert found.schema["at"].dataType == T.TimestampType()
    assert kept == [(i, "1500-01-01 12:00:00", Row(number=i, value=f"v{i}")) for i in (0, 2, 4)]


def test_what_is_observed_comes_as_python_values(spark: SparkSession):
    """Needs Spark: the aggregates of one pass; those that a batch is counted, bounded and routed by."""
    rows = spark.range(3).select("id", F.format_string("é𝄞\n%d", "id").alias("text"))

    _, found = materialised(
        rows,
        F.count(F.lit(1)).alias("received"),
        F.max(F.col("id").cast("tinyint")).alias("greatest"),
        F.bool_and(F.col("id") > 1).alias("all"),
        F.min("text").alias("least"),
        F.max(F.lit(None).cast("string")).alias("nothing"),
        F.sort_array(F.collect_set("text")).alias("texts"),
        F.sort_array(F.collect_set("id")).alias("ids"),
    )

    assert found == {
        "received": 3,
        "greatest": 2,
        "all": False,
        "least": "é𝄞\n0",
        "nothing": None,
        "texts": ["é𝄞\n0", "é𝄞\n1", "é𝄞\n2"],
        "ids": [0, 1, 2],
    }


EVERY_KIND = """
    SELECT id, CAST(id AS tinyint) t, id / 3 d, CAST(id AS float) f, CAST(id * 1.5 AS decimal(20, 4)) c, id % 2 = 0 b,
        X'00FF' raw, concat('é𝄞', id) text, date'1500-01-01' day, timestamp'9999-12-31 23:59:59.999999' at,
        timestamp_ntz'1582-10-10 00:00:00' local, array(timestamp'1969-12-31 23:59:59.999999', NULL) times,
        map('k', array(id), 'n', NULL) m, named_struct('a', id, 's', named_struct('m', map(1, date'2024-02-29'))) s,
        IF(id = 1, NULL, struct(nullif(id, 9) AS `a.b`)) missing, CAST(NULL AS string) nothing
    FROM range({rows})
"""


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_rows_come_to_python_and_go_back_as_they_are(spark: SparkSession, rows: int):
    """Needs Spark: values of every kind, in three Arrow batches, in one, and none at all."""
    frame = spark.sql(EVERY_KIND.format(rows=rows))
    size, zone = "spark.sql.execution.arrow.maxRecordsPerBatch", "spark.sql.session.timeZone"
    before = spark.conf.get(zone)
    spark.conf.set(size, "2")
    spark.conf.set(zone, "Asia/Kolkata")  # of which nothing must come through
    try:
        table = versions.arrow_table(frame)
        back = versions.arrow_frame(spark, table, frame.schema)
        found, wanted = back.orderBy("id").collect(), frame.orderBy("id").collect()
    finally:
        spark.conf.unset(size)
        spark.conf.set(zone, before)

    assert [(f.name, f.type) for f in table.schema] == [(f.name, versions.arrow_type(f.dataType)) for f in frame.schema]
    assert (table.num_rows, back.schema) == (rows, frame.schema)
    assert found == wanted


def test_a_text_that_is_not_utf8_is_told_from_others(spark: SparkSession):
    """Needs Spark: bytes that no text has, a surrogate, half a character, and the character for unreadable bytes."""
    texts = ("X'C3A9'", "X''", "X'EFBFBD'", "X'F09D849E'", "X'FF'", "X'EDA080'", "X'C3'", "X'C080'", "NULL")
    frame = spark.sql(" UNION ALL ".join(f"SELECT {i} i, CAST({text} AS string) text" for i, text in enumerate(texts)))

    found = frame.select("i", versions.is_valid_utf8(F.col("text"))).orderBy("i").collect()

    assert [legible for _, legible in found] == [True, True, True, True, False, False, False, False, None]


def test_ddl_is_read_and_written(spark: SparkSession):
    """Needs Spark: its parser, which `spark` has started."""
    ddl = "a BIGINT, `b c` STRUCT<d: ARRAY<DECIMAL(20,4)>, e: MAP<STRING,TIMESTAMP>> NOT NULL"

    schema = versions.from_ddl(ddl)

    assert versions.from_ddl(versions.to_ddl(schema)) == schema
    assert [(f.name, f.dataType.simpleString(), f.nullable) for f in schema] == [
        ("a", "bigint", True),
        ("b c", "struct<d:array<decimal(20,4)>,e:map<string,timestamp>>", False),
    ]


@pytest.mark.usefixtures("version")
def test_files_become_the_same_rows_and_the_same_quarantine(spark: SparkSession, tmp_path: Path):
    """Needs Spark: a stream of files through decoder, sink and quarantine."""
    (tmp_path / "in").mkdir()
    lines = ['{"id": 1, "lsn": 1, "at": "2024-03-01T10:00:00.000001Z"}', '{"id": 2, "lsn": "x"}', '{"id": 3, "lsn": 1}']
    (tmp_path / "in" / "a.json").write_text("\n".join(lines))
    events = read_files(spark, str(tmp_path / "in"), format="json", schema="id bigint, lsn bigint, at timestamp")
    sink = MergeSink(target=str(tmp_path / "table"), keys=["id"], sequence_by="lsn")

    writer = events.writeStream.foreachBatch(sink).option("checkpointLocation", str(tmp_path / "checkpoint"))
    writer.trigger(availableNow=True).start().awaitTermination()

    rows = spark.read.format("delta").load(str(tmp_path / "table")).selectExpr("id", "lsn", "cast(at AS string)")
    assert sorted(map(tuple, rows.collect())) == [(1, 1, "2024-03-01 10:00:00.000001"), (3, 1, None)]
    assert sink.last_result is not None
    assert (sink.last_result.events.received, sink.last_result.reasons) == (3, {"undecodable": 1})


def test_what_spark_never_tells_is_an_error(spark: SparkSession):
    """Needs Spark: an observation that nothing completes is waited for no longer than that, on each version."""
    observation = Observation()
    spark.range(3).observe(observation, F.count(F.lit(1)).alias("received"))

    with pytest.raises(MergeFailedError, match=r"did not report the counts of the batch within 0\.1 s"):
        versions.observed(observation, within_seconds=0.1)


def test_zones_are_read_as_spark_reads_them(spark: SparkSession):
    """Java's own reader refuses the first three."""
    session = spark.newSession()
    written = ("+7:00", "GMT+7:00", "PST", "-03:30", "Asia/Kathmandu")
    found = []
    for zone in written:
        session.conf.set("spark.sql.session.timeZone", zone)
        found.append(zones(session))
    _, own = found[0] or ("", "")
    session.conf.set("spark.sql.session.timeZone", own)

    told = ("+07:00", "GMT+07:00", "America/Los_Angeles", "-03:30", "Asia/Kathmandu")
    assert found == [(zone, own) for zone in told]
    assert zones(session) is None


def test_where_a_table_would_lie_is_told_as_spark_makes_it(spark: SparkSession):
    spark.sql("CREATE TABLE Here_It(id bigint) USING delta")
    entry = catalog.entry(spark, "Here_It")
    spark.sql("DROP TABLE Here_It")

    assert entry is not None
    assert catalog.place_to_be(spark, "spark_catalog.default.Here_It") == entry.location
    with pytest.raises(MergeFailedError, match=r"the catalog cannot load 'nowhere\.t': .*nowhere"):
        catalog.place_to_be(spark, "nowhere.t")
