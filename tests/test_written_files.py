"""How a table's files were written, and values that delta-rs must not touch: such batches are Spark's, unasked."""

from __future__ import annotations

from typing import Any

import pytest
from deliveries import ChangeStream, delete, ledger, upsert
from pyspark.sql import SparkSession

from stream_merge import ConfigError, StreamMergeError
from stream_merge.engines import data_files
from stream_merge.engines.native import NativeEngine
from stream_merge.own_session import TIMESTAMP_CONF

NAMES = ("id bigint", "lsn bigint", "op string", "name string")
OPEN_END = "TIMESTAMP'9999-12-31 00:00:00Z'"
FAR = [f"c{number} int" for number in range(32)]
"""More columns than Delta keeps statistics of."""


def written_by_spark(spark: SparkSession, table: str, select: str, **options: Any) -> ChangeStream:
    """A table of three rows in one file that a user wrote; `select` gives its columns beyond those of an event."""
    rows = f"SELECT id, 1L AS lsn, concat('row ', id) AS name, {select} FROM range(1, 4)"
    writer = spark.sql(rows).coalesce(1).write.format("delta").option("delta.enableChangeDataFeed", "true")
    writer.partitionBy(*options.pop("partition_by", ())).save(table)
    return ChangeStream(spark, table, engine="auto", **options)


def described(stream: ChangeStream, *columns: str) -> list[tuple[str, ...]]:
    """Columns of the target as Spark spells them."""
    casts = ", ".join(f"CAST({column} AS string)" for column in columns)
    return sorted(tuple(row) for row in stream.sql(f"SELECT {casts} FROM {{target}}").collect())


# -- times that Spark keeps as INT96 ------------------------------------------------------------


@pytest.mark.parametrize(
    ("select", "column"),
    [
        (f"IF(id = 1, current_timestamp(), {OPEN_END}) AS until", "until"),
        (f"struct({OPEN_END} AS until) AS valid", "valid.until"),
        (f"array({OPEN_END}) AS ends", "ends[0]"),
        (f"map('until', {OPEN_END}) AS ends", "ends['until']"),
        (f"{', '.join(f'1 AS c{n}' for n in range(32))}, {OPEN_END} AS until", "until"),
    ],
    ids=["column", "in a struct", "in an array", "in a map", "beyond the statistics"],
)
def test_rows_that_a_batch_does_not_name_keep_times_that_nanoseconds_cannot_hold(
    spark: SparkSession, tmp_table: str, select: str, column: str
):
    """delta-rs would copy 9999-12-31 as 1816-03-29; once Spark has written the file again, it is delta-rs' own."""
    stream = written_by_spark(spark, tmp_table, select)
    first = stream.deliver(upsert(1, "new", lsn=2))
    second = stream.deliver(upsert(1, "newer", lsn=3))

    assert (first.engine, first.refusal) == ("spark", "column")
    assert "INT96" in first.plan
    assert second.engine == "native"
    assert described(stream, "id", "name", column)[1:] == [
        ("2", "row 2", "9999-12-31 00:00:00"),
        ("3", "row 3", "9999-12-31 00:00:00"),
    ]


def test_a_key_that_nanoseconds_cannot_hold_is_not_doubled(spark: SparkSession, tmp_table: str):
    """The wrapped key of one file may be the key of a batch that lies in no file: so all files count."""
    settings = {"keys": "until", "sequence_by": "lsn", "except_column_list": ["op"], "apply_as_deletes": "op = 'd'"}
    spark.sql(f"SELECT {OPEN_END} AS until, 1L AS lsn, 'old' AS name").write.format("delta").save(tmp_table)
    stream = ChangeStream(spark, tmp_table, "until timestamp, lsn bigint, op string, name string", **settings)
    events = "SELECT {} AS until, {}L AS lsn, 'u' AS op, '{}' AS name"
    wrapped = stream.deliver_frame(
        spark.sql(events.format("timestamp_micros(-4852202631933722624 DIV 1000)", 2, "1816"))
    )
    second = stream.deliver_frame(spark.sql(events.format(OPEN_END, 3, "new")))

    assert (wrapped.engine, wrapped.refusal, ledger(wrapped)) == ("spark", "column", {"received": 1, "inserted": 1})
    assert ledger(second) == {"received": 1, "updated": 1}
    assert [name for _, name in described(stream, "until", "name")] == ["1816", "new"]


def test_times_that_nanoseconds_hold_are_left_to_delta_rs_however_wide_the_table(
    spark: SparkSession, tmp_table: str, monkeypatch: pytest.MonkeyPatch
):
    """Beyond the columns with statistics a file is looked into, once; without times no file is."""
    looked: list[str] = []
    look = data_files.Times._look_into
    monkeypatch.setattr(data_files.Times, "_look_into", lambda self, path: (looked.append(path), look(self, path))[1])
    filler = ", ".join(f"1 AS c{n}" for n in range(32))
    stream = written_by_spark(spark, tmp_table, f"{filler}, TIMESTAMP'2261-01-01 00:00:00Z' AS until")
    sink = stream.sink()
    for batch_id, name in enumerate(("new", "newer")):
        sink(stream.spark.createDataFrame([upsert(1, name, lsn=batch_id + 2)], stream.schema), batch_id)
        assert sink.last_result.engine == "native", sink.last_result.plan

    assert len(looked) == len(set(looked)) == 2
    assert described(stream, "name", "until")[0] == ("newer", "2261-01-01 00:00:00")


def test_what_a_sink_writes_by_spark_is_fit_for_delta_rs_and_the_users_session_is_left_alone(
    spark: SparkSession, tmp_table: str
):
    """Target and remembered deletes: with keys that INT96 would keep."""
    before = spark.conf.get(TIMESTAMP_CONF)
    settings = {"keys": "until", "sequence_by": "lsn", "except_column_list": ["op"], "apply_as_deletes": "op = 'd'"}
    stream = ChangeStream(
        spark, tmp_table, "until timestamp, lsn bigint, op string, name string", engine="spark", **settings
    )
    events = (
        "SELECT timestamp_micros(253402214400000000 + id) AS until, {}L AS lsn, '{}' AS op, 'x' AS name FROM range(3)"
    )
    stream.deliver_frame(spark.sql(events.format(1, "u")))
    stream.deliver_frame(spark.sql(events.format(5, "d")))
    late = stream.deliver_frame(spark.sql(events.format(4, "u")), engine="native")

    assert (late.engine, ledger(late)) == ("native", {"received": 3, "stale": 3})
    assert stream.rows() == []
    assert spark.conf.get(TIMESTAMP_CONF) == before


def test_dates_in_the_calendar_of_spark_2_are_left_to_spark(spark: SparkSession, tmp_table: str):
    conf = "spark.sql.parquet.datetimeRebaseModeInWrite"
    spark.conf.set(conf, "LEGACY")
    try:
        stream = written_by_spark(spark, tmp_table, "DATE'1500-01-01' AS day")
    finally:
        spark.conf.unset(conf)
    result = stream.deliver(upsert(1, "new", lsn=2))

    assert (result.engine, "calendar of Spark 2" in result.plan) == ("spark", True), result.plan
    assert described(stream, "id", "day")[2] == ("3", "1500-01-01")


def test_a_file_that_comes_after_the_choice_counts_too(
    spark: SparkSession, tmp_table: str, monkeypatch: pytest.MonkeyPatch
):
    stream = written_by_spark(spark, tmp_table, "TIMESTAMP'2026-01-01 00:00:00Z' AS until")
    merge = NativeEngine.merge

    def overtaken(self: NativeEngine, *args: Any) -> Any:
        monkeypatch.setattr(NativeEngine, "merge", merge)
        stream.sql(f"INSERT INTO {{target}} SELECT id + 0, 1L, 'theirs', {OPEN_END} FROM range(4, 6)")
        return merge(self, *args)

    monkeypatch.setattr(NativeEngine, "merge", overtaken)
    result = stream.deliver(upsert(1, "new", lsn=2), upsert(4, "mine", lsn=2))

    assert (result.engine, result.refusal, "INT96" in result.plan) == ("spark", "failed", True), result.plan
    assert described(stream, "id", "name", "until")[3:] == [
        ("4", "mine", "9999-12-31 00:00:00"),
        ("5", "theirs", "9999-12-31 00:00:00"),
    ]


# -- paths and partition values -----------------------------------------------------------------


@pytest.mark.parametrize("column", ["name", "straße"])
def test_a_path_that_delta_rs_would_write_otherwise_is_left_to_spark(spark: SparkSession, tmp_table: str, column: str):
    """delta-rs removes and adds its own files under whatever path; those of Spark it would leave behind."""
    city = f"`{column}` string"
    schema = f"id bigint, lsn bigint, op string, {city}"
    stream = ChangeStream(
        spark,
        tmp_table,
        schema,
        keys="id",
        sequence_by="lsn",
        except_column_list=["op"],
        apply_as_deletes="op = 'd'",
        partition_by=column,
    )
    stream.deliver(upsert(1, "Zürich", lsn=1), upsert(2, "Bern", lsn=1), engine="native")
    own = stream.deliver(upsert(1, "Zürich", lsn=2), engine="native")
    stream.deliver(upsert(1, "Zürich", lsn=3), upsert(3, "Zürich", lsn=3), engine="spark")
    sparks = stream.deliver(upsert(1, "Zürich", lsn=4), engine="auto")

    assert ledger(own) == {"received": 1, "updated": 1}
    assert (sparks.engine, sparks.refusal, ledger(sparks)) == ("spark", "column", {"received": 1, "updated": 1})
    assert stream.rows("id", "lsn", column) == [(1, 4, "Zürich"), (2, 1, "Bern"), (3, 3, "Zürich")]
    with pytest.raises(ConfigError, match="has a path that delta-rs would write otherwise"):
        stream.deliver(delete(3, lsn=5), engine="native")


def test_a_merge_that_removes_a_file_under_another_name_is_not_taken_for_good(
    spark: SparkSession, tmp_table: str, monkeypatch: pytest.MonkeyPatch
):
    """The belt: should a path get past the check before the merge, the commit is held against the log."""
    stream = written_by_spark(spark, tmp_table, "'Zürich' AS city", partition_by=["city"])
    monkeypatch.setattr(data_files, "misnamed", lambda _: None)

    with pytest.raises(StreamMergeError, match=r"removes file\(s\) \['city=Z%C3%BCrich/.*restore version 1"):
        stream.deliver(upsert(1, "new", lsn=2))


@pytest.mark.parametrize(
    ("dtype", "value", "spelled"),
    [
        ("timestamp", "'2026-11-24 12:00:00Z'", "2026-11-24 17:45:00"),
        ("decimal(10,2)", "-1.25", "-1.25"),
        ("binary", "X'01FF'", None),
        ("double", "1.5", "1.5"),
    ],
)
def test_partition_types_that_delta_rs_writes_otherwise_are_left_to_spark(
    spark: SparkSession, tmp_table: str, dtype: str, value: str, spelled: str | None
):
    zone = "spark.sql.session.timeZone"
    before = spark.conf.get(zone)
    spark.conf.set(zone, "Asia/Kathmandu")
    try:
        stream = ChangeStream(spark, tmp_table, keys="id", sequence_by="lsn", schema="", partition_by="p")
        frame = f"SELECT id, {{}}L AS lsn, CAST({value} AS {dtype}) AS p FROM range(2)"
        results = [stream.deliver_frame(spark.sql(frame.format(lsn)), engine="auto") for lsn in (1, 2)]
        found = described(stream, "id", "lsn", "p" if spelled else "hex(p)")
    finally:
        spark.conf.set(zone, before)

    assert {(result.engine, result.refusal) for result in results} == {("spark", "column")}
    assert found == [("0", "2", spelled or "01FF"), ("1", "2", spelled or "01FF")]


# -- text and times that Python does not know ---------------------------------------------------

NOT_UTF8 = "CAST(X'{}' AS string)"


@pytest.mark.parametrize("engine", ["spark", "auto"])
@pytest.mark.parametrize(
    "keys",
    [("FF",), ("61", "C3FF", "EFBBBF"), ("80", "C3A9"), ("FF", "F09F9880")],
    ids=["alone", "between others", "least of its file", "greatest of its file"],
)
def test_a_key_that_is_not_utf8_is_not_doubled(spark: SparkSession, tmp_table: str, keys: tuple[str, ...], engine: str):
    """Statistics hold U+FFFD in its place, and Python nothing: bounds must not exclude it, nor its neighbours."""
    settings = {"keys": "id", "sequence_by": "lsn", "except_column_list": ["op"], "apply_as_deletes": "op = 'd'"}
    stream = ChangeStream(spark, tmp_table, schema="", engine=engine, tombstones=True, **settings)

    def frame(lsn: int, op: str, keys: tuple[str, ...]) -> Any:
        rows = (f"SELECT {NOT_UTF8.format(key)} AS id, {lsn}L AS lsn, '{op}' AS op" for key in (*keys, *keys))
        return spark.sql(" UNION ALL ".join(rows)).coalesce(1)

    first = stream.deliver_frame(frame(1, "u", keys))
    second = stream.deliver_frame(frame(2, "u", keys[-1:]))
    third = stream.deliver_frame(frame(3, "d", keys))
    late = stream.deliver_frame(frame(2, "u", keys))

    count = len(keys)
    assert first.events.inserted == count
    assert ledger(second) == {"received": 2, "collapsed": 1, "updated": 1}
    assert ledger(third) == {"received": 2 * count, "collapsed": count, "deleted": count}
    assert ledger(late) == {"received": 2 * count, "collapsed": count, "stale": count}
    assert {first.engine, third.engine, late.engine} == {"spark"}


@pytest.mark.parametrize("dtype", ["timestamp_ntz", "timestamp", "date"])
@pytest.mark.parametrize("engine", ["spark", "native"])
def test_keys_beyond_the_years_of_python_are_bounded_and_found(
    spark: SparkSession, tmp_table: str, dtype: str, engine: str
):
    settings = {"keys": "id", "sequence_by": "lsn", "except_column_list": ["op"], "apply_as_deletes": "op = 'd'"}
    stream = ChangeStream(spark, tmp_table, schema="", engine=engine, **settings)

    def frame(lsn: int, op: str) -> Any:
        ends = ("'-0044-03-15'", "'+12000-02-29'", "'+200000-01-01'")
        rows = (f"SELECT CAST({end} AS {dtype}) AS id, {lsn}L AS lsn, '{op}' AS op" for end in ends)
        return spark.sql(" UNION ALL ".join(rows))

    results = [stream.deliver_frame(frame(lsn, op)) for lsn, op in ((1, "u"), (3, "u"), (4, "d"), (2, "u"))]

    assert [ledger(result) for result in results] == [
        {"received": 3, "inserted": 3},
        {"received": 3, "updated": 3},
        {"received": 3, "deleted": 3},
        {"received": 3, "stale": 3},
    ]
    assert {"bounds on id" in result.plan for result in results} == {True}


def test_dates_that_delta_rs_cannot_spell_are_left_to_spark(
    spark: SparkSession, tmp_table: str, capfd: pytest.CaptureFixture[str]
):
    """It would panic, with a backtrace on the user's screen: in a batch, and in a file that it writes again."""
    spark.sql(f"CREATE TABLE delta.`{tmp_table}` (id bigint, lsn bigint, day date, note string) USING delta")
    stream = ChangeStream(spark, tmp_table, schema="", engine="auto", keys="id", sequence_by="lsn")
    far = "SELECT {}L AS id, {}L AS lsn, date_from_unix_date(2147483647) AS day"
    stream.deliver_frame(spark.sql(far.format(1, 1)))
    stream.deliver_frame(spark.sql(f"{far.format(2, 1)} UNION ALL {far.format(1, 2)}"))
    copied = stream.deliver_frame(spark.sql("SELECT 2L AS id, 3L AS lsn, DATE'2026-01-01' AS day"))

    assert copied.refusal == "column"
    assert described(stream, "id", "lsn", "unix_date(day)") == [("1", "2", "2147483647"), ("2", "3", "20454")]
    assert "panicked" not in capfd.readouterr().err
