"""How files of a table without deletion vectors were written: the driver writes them again, or leaves them to Spark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import engines
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from confs import conf
from deliveries import COPY_ON_WRITE, ledger
from grouped import sink_with
from prometheus_client import CollectorRegistry
from pyspark.sql import DataFrame, SparkSession

from stream_merge import ConfigError, MergeMetrics
from stream_merge.engines.driver.merger import DriverMerger
from stream_merge.model.results import MergeResult
from stream_merge.model.table_ref import TableRef
from stream_merge.shapes import Snapshot
from stream_merge.spark.confs import TIMESTAMP_CONF
from stream_merge.spark.versions import SHIFTS_PARTITION_TIMES
from stream_merge.tables.files.eligibility import PROVEN
from stream_merge.testing import run

UNITS = ("us", "ms")
OPEN_END = "TIMESTAMP'9999-12-31 00:00:00Z'"


class Table:
    """A table that batches from SQL are merged into."""

    def __init__(self, spark: SparkSession, path: str, **settings: Any) -> None:
        self.spark = spark
        self.path = path
        own = {"keys": "id", "sequence_by": "lsn", "app_id": "files", "table_properties": COPY_ON_WRITE}
        self.settings = {**own, **settings}
        self.batches = 0

    def write(self, select: str, **options: str) -> None:
        """Let a user of Spark append rows, in one file."""
        frame = self.spark.sql(select).coalesce(1).write.format("delta").mode("append")
        frame.option("delta.enableChangeDataFeed", "true").options(**options).save(self.path)

    def merge(self, select: str | DataFrame, *, engine: str = "auto", **settings: Any) -> MergeResult:
        """Merge a batch; an event is a delete where its column `op` says 'd'."""
        batch = self.spark.sql(select) if isinstance(select, str) else select
        deletes = {"apply_as_deletes": "op = 'd'", "except_column_list": ["op"]} if "op" in batch.columns else {}
        settings = {**self.settings, **deletes, **settings}
        sink = sink_with(target=self.path, engine=engine, metrics=MergeMetrics(CollectorRegistry()), **settings)
        self.batches += 1
        return run(sink, batch, self.batches)

    def rows(self, *columns: str) -> list[tuple[str, ...]]:
        """Columns of the target, spelled by Spark."""
        casts = ", ".join(f"CAST({column} AS string)" for column in columns)
        return sorted(tuple(row) for row in self.spark.sql(f"SELECT {casts} FROM {TableRef(self.path).sql}").collect())


@pytest.fixture
def table(spark: SparkSession, tmp_table: str) -> Table:
    """No table yet, but the place for one."""
    return Table(spark, tmp_table)


# -- how columns are held ------------------------------------------------------------------------


def convert(spark: SparkSession, path: str, *files: pa.Table) -> None:
    """Let Delta take over a folder of Parquet files; a column has the name that one of them gives it."""
    Path(path).mkdir(parents=True)
    for number, file in enumerate(files):
        pq.write_table(file, Path(path, f"{number}.parquet"))
    spark.sql(f"CONVERT TO DELTA parquet.`{path}`")


@pytest.mark.parametrize(
    "file",
    [
        pytest.param({"ID": [2], "lsn": [1], "w": [20], "s": [{"a": 1, "b": 2}]}, id="key"),
        pytest.param({"id": [2], "lsn": [1], "W": [20], "s": [{"a": 1, "b": 2}]}, id="payload"),
        pytest.param({"id": [2], "lsn": [1], "w": [20], "s": [{"a": 1, "B": 2}]}, id="in a struct"),
    ],
)
def test_columns_that_a_file_spells_otherwise_are_left_to_spark(table: Table, file: dict[str, list[Any]]):
    """To the driver a file lacks them: their values would become NULL, or the key be inserted a second time."""
    first = pa.table({"id": [1], "lsn": [1], "w": [10], "s": [{"a": 1, "b": 1}]})
    convert(table.spark, table.path, first, pa.table(file))
    result = table.merge("SELECT id, 2L AS lsn, 21L AS w FROM range(1, 3)")

    assert (result.engine, result.refusal) == ("spark", "column"), result.plan
    assert "holds column" in result.plan
    assert ledger(result) == {"received": 2, "updated": 2}
    assert table.rows("id", "w", "s.a", "s.b") == [("1", "21", "1", "1"), ("2", "21", "1", "2")]


def test_files_that_delta_took_over_are_rewritten_where_they_hold_what_the_table_says(table: Table):
    """Others with milliseconds are left to Spark; a column that a file lacks is NULL to everybody."""
    micros, millis = (
        pa.array([1_700_000_000_123], pa.timestamp("ms", "UTC")).cast(pa.timestamp(u, "UTC")) for u in UNITS
    )
    convert(
        table.spark,
        table.path,
        pa.table({"id": [1], "lsn": [1], "at": micros, "w": [1]}),
        pa.table({"id": [2], "lsn": [1]}),
        pa.table({"id": [3], "lsn": [1], "at": millis}),
    )
    results = [table.merge(f"SELECT {key}L AS id, 2L AS lsn") for key in (1, 2, 3)]

    assert [engines.way(result) for result in results] == ["rewrite", "rewrite", "spark"], results[0].plan
    assert table.rows("id", "lsn", "w", "unix_millis(at)") == [
        ("1", "2", "1", "1700000000123"),
        ("2", "2", None, None),
        ("3", "2", None, "1700000000123"),
    ]


@pytest.mark.parametrize(
    "properties",
    [
        {"delta.columnMapping.mode": "id"},
        {"delta.compatibility.symlinkFormatManifest.enabled": "true"},
    ],
    ids=["columns by ids", "manifests"],
)
def test_tables_for_which_spark_does_more_are_left_to_it(table: Table, properties: dict[str, str]):
    """Files may call columns anything, and readers of manifests see no commit but Spark's."""
    table.settings |= {"table_properties": {**COPY_ON_WRITE, **properties}, "change_data_feed": False}
    results = [table.merge(f"SELECT 1L AS id, {lsn}L AS lsn") for lsn in (1, 2)]

    assert [(result.engine, result.refusal) for result in results[1:]] == [("spark", "table_feature")], results[1].plan


@pytest.mark.parametrize("place", ["v", "s.x", "s.y.z"])
@pytest.mark.parametrize("mapped", [False, True], ids=["plain names", "mapped names"])
def test_nan_is_in_the_statistics_of_files_by_the_driver(table: Table, place: str, *, mapped: bool):
    """To Spark it is the greatest value: bounds without it would hide its row from a query for great ones."""
    nested = "named_struct('x', CAST({0} AS double), 'y', named_struct('z', CAST({0} AS float))) AS s"
    row, nan = f"CAST({{0}} AS double) AS v, {nested}", "IF(id = 1, double('NaN'), 1)"  # `s` is carried along
    if mapped:
        table.settings["table_properties"] = {**COPY_ON_WRITE, "delta.columnMapping.mode": "name"}
    table.merge(f"SELECT id, 1L AS lsn, {row.format(nan)} FROM range(3)", engine="spark")
    result = table.merge("SELECT 2L AS id, 2L AS lsn, 5D AS v")

    assert result.mode == "rewrite", result.plan
    assert table.rows("id", "lsn") == [("0", "1"), ("1", "1"), ("2", "2")]
    for condition in (f"{place} > 100", f"{place} = double('NaN')"):
        found = table.spark.read.format("delta").load(table.path).where(condition).select("id").collect()
        assert [row.id for row in found] == [1], condition


# -- how times are kept -------------------------------------------------------------------------


def test_rows_that_a_batch_does_not_name_keep_times_that_nanoseconds_cannot_hold(table: Table):
    """Spark keeps them as INT96 by itself, which Arrow takes for nanoseconds unless it is told."""
    table.write(f"SELECT id, 1L AS lsn, IF(id = 1, now(), {OPEN_END}) AS until FROM range(1, 4)")
    first = table.merge(f"SELECT 1L AS id, 2L AS lsn, {OPEN_END} AS until")
    second = table.merge(f"SELECT 1L AS id, 3L AS lsn, {OPEN_END} AS until")

    assert [first.mode, second.mode] == ["rewrite", "rewrite"], first.plan
    assert table.rows("id", "lsn", "year(until)") == [("1", "3", "9999"), ("2", "1", "9999"), ("3", "1", "9999")]


def test_a_key_that_nanoseconds_cannot_hold_is_not_doubled(table: Table):
    """In nanoseconds it would wrap, and equal another one."""
    table.settings["keys"] = "until"
    table.write(f"SELECT {OPEN_END} AS until, 1L AS lsn")
    wrapped = table.merge("SELECT timestamp_micros(-4852202631933723) AS until, 2L AS lsn")
    end = table.merge(f"SELECT {OPEN_END} AS until, 3L AS lsn")

    assert (wrapped.mode, ledger(wrapped)) == ("rewrite", {"received": 1, "inserted": 1})
    assert ledger(end) == {"received": 1, "updated": 1}
    assert table.rows("year(until)", "lsn") == [("1816", "2"), ("9999", "3")]


def test_what_a_sink_writes_by_spark_is_fit_for_the_driver_and_the_users_session_is_left_alone(table: Table):
    """Target and remembered deletes, with keys that INT96 would keep."""
    before = table.spark.conf.get(TIMESTAMP_CONF)
    table.settings["keys"] = "until"
    events = "SELECT timestamp_micros(253402214400000000 + id) AS until, {}L AS lsn, '{}' AS op FROM range(2)"
    table.merge(events.format(1, "u"), engine="spark")
    table.merge(events.format(5, "d"), engine="spark")
    late = table.merge(events.format(4, "u"), engine="driver")

    assert (late.engine, ledger(late)) == ("driver", {"received": 2, "stale": 2})
    assert table.spark.conf.get(TIMESTAMP_CONF) == before


def test_dates_in_the_calendar_of_spark_2_are_left_to_spark(table: Table):
    with conf(table.spark, "spark.sql.parquet.datetimeRebaseModeInWrite", "LEGACY"):
        table.write("SELECT id, 1L AS lsn, DATE'1500-01-01' AS day FROM range(2)")
    result = table.merge("SELECT 1L AS id, 2L AS lsn, DATE'1500-01-02' AS day")

    assert (result.engine, "calendar of Spark 2" in result.plan) == ("spark", True), result.plan
    assert table.rows("id", "day") == [("0", "1500-01-01"), ("1", "1500-01-02")]


def test_files_in_sparks_legacy_format_are_read_as_by_spark(table: Table):
    """Lists and maps of two levels, decimals in bytes; compressed otherwise than Spark does by itself."""
    with conf(table.spark, "spark.sql.parquet.writeLegacyFormat", "true"):
        nested = "array(id) AS a, map('k', array(id)) AS m, struct(array(1, NULL) AS x) AS s"
        flat = "CAST(-id * 1.25 AS decimal(9,2)) AS short, CAST(id * 1.25 AS decimal(15,2)) AS long"
        time = "TIMESTAMP'2026-01-01 00:00:00.123' AS at"
        table.write(f"SELECT id, 1L AS lsn, {nested}, {flat}, {time} FROM range(2)", compression="zstd")
    before = table.rows("a", "m", "s", "short", "long", "at")
    result = table.merge("SELECT 1L AS id, 2L AS lsn")

    assert (result.mode, ledger(result)) == ("rewrite", {"received": 1, "updated": 1})
    assert table.rows("a", "m", "s", "short", "long", "at") == before
    assert before[1] == ("[1]", "{k -> [1]}", "{[1, null]}", "-1.25", "1.25", "2026-01-01 00:00:00.123")


def test_a_file_that_comes_after_the_choice_counts_too(table: Table, monkeypatch: pytest.MonkeyPatch):
    table.write("SELECT id, 1L AS lsn, DATE'2026-01-01' AS day FROM range(2)")
    merge = DriverMerger.merge

    def overtaken(self: DriverMerger, *args: Any) -> Any:
        monkeypatch.setattr(DriverMerger, "merge", merge)
        with conf(table.spark, "spark.sql.parquet.datetimeRebaseModeInWrite", "LEGACY"):
            table.write("SELECT id, 1L AS lsn, DATE'1500-01-01' AS day FROM range(2, 4)")
        return merge(self, *args)

    monkeypatch.setattr(DriverMerger, "merge", overtaken)
    result = table.merge("SELECT id, 2L AS lsn, DATE'1500-01-02' AS day FROM range(1, 3)")

    assert (result.engine, result.refusal, "calendar" in result.plan) == ("spark", "column", True), result.plan
    assert table.rows("id", "lsn", "day")[2:] == [("2", "2", "1500-01-02"), ("3", "1", "1500-01-01")]


def test_dates_beyond_the_calendar_of_python_are_written_again(table: Table):
    table.write("SELECT id, 1L AS lsn, DATE'2026-01-01' AS day FROM range(2)")
    far = table.merge("SELECT 1L AS id, 2L AS lsn, date_from_unix_date(2147483647) AS day")
    copied = table.merge("SELECT 0L AS id, 3L AS lsn, DATE'2026-01-01' AS day")

    assert [far.mode, copied.mode] == ["rewrite", "rewrite"]
    assert table.rows("id", "lsn", "unix_date(day)") == [("0", "3", "20454"), ("1", "2", "2147483647")]


# -- paths and partition values -----------------------------------------------------------------


@pytest.mark.parametrize("column", ["city", "straße"])
def test_files_in_paths_that_are_not_ascii_are_removed_by_either_engine(table: Table, column: str):
    table.settings["partition_by"] = column
    events = f"SELECT {{}}L AS id, {{}}L AS lsn, 'Zürich' AS `{column}`"
    table.merge(f"{events.format(2, 1)} UNION ALL {events.format(1, 1)}", engine="driver")
    own = table.merge(events.format(1, 2), engine="driver")
    table.merge(events.format(1, 3), engine="spark")
    sparks = table.merge(events.format(1, 4))

    assert ledger(own) == ledger(sparks) == {"received": 1, "updated": 1}
    assert sparks.mode == "rewrite", sparks.plan
    assert table.rows("id", "lsn", f"`{column}`") == [("1", "4", "Zürich"), ("2", "1", "Zürich")]


@pytest.mark.parametrize("city", ["", "__HIVE_DEFAULT_PARTITION__"])
def test_partition_texts_that_spark_keeps_as_null_are_left_to_spark(table: Table, city: str):
    table.settings["partition_by"] = "city"
    results = [
        table.merge(f"SELECT {n}L AS id, 1L AS lsn, '{name}' AS city") for n, name in enumerate(("x", "a", city))
    ]

    assert [result.engine for result in results[1:]] == ["driver", "spark"]
    assert table.rows("coalesce(city, 'null')") == [("a",), ("null",), ("x",)]


PARTITIONS = {
    "timestamp": ("TIMESTAMP'2026-11-24 12:00:00Z'", "2026-11-24 17:45:00"),
    "decimal": ("CAST(-1.25 AS decimal(10,2))", "-1.25"),
    "binary": ("X'0141'", "\x01A"),
    "double": ("1.5D", "1.5"),
}


def test_partition_types_with_several_spellings_are_left_to_spark(table: Table):
    zone = "spark.sql.session.timeZone"
    before = table.spark.conf.get(zone)
    table.settings["partition_by"] = list(PARTITIONS)
    values = ", ".join(f"{value} AS `{name}`" for name, (value, _) in PARTITIONS.items())
    table.spark.conf.set(zone, "Asia/Kathmandu")
    try:
        if SHIFTS_PARTITION_TIMES:  # by Delta, whoever writes
            with pytest.raises(
                ConfigError, match=r"whose values Delta shifts on Spark 3\.5 if .* \(Asia/Kathmandu\) is not the JVM's"
            ):
                table.merge(f"SELECT 1L AS id, 1L AS lsn, {values}")
            return
        results = [table.merge(f"SELECT 1L AS id, {lsn}L AS lsn, {values}") for lsn in (1, 2)]
        found = table.rows("lsn", *(f"`{name}`" for name in PARTITIONS))
    finally:
        table.spark.conf.set(zone, before)

    assert [(result.engine, result.refusal) for result in results] == [("spark", "column")] * 2
    assert found == [("2", *(spelled for _, spelled in PARTITIONS.values()))]
    proven = {kind.typeName() for kind, places in PROVEN.items() if "partition" in places}
    assert proven == {"boolean", "byte", "short", "integer", "long", "date", "string"}


# -- text and times that Python does not know ---------------------------------------------------


@pytest.mark.parametrize("engine", ["spark", "auto"])
def test_a_key_that_is_not_utf8_is_not_doubled(table: Table, engine: str):
    """Statistics hold U+FFFD in its place, and Python nothing: bounds exclude neither it nor its neighbours."""
    files = ("FF",), ("80", "C3A9"), ("F8", "F09F9880"), ("61", "C3FF", "EFBBBF")

    def batch(lsn: int, op: str, keys: Sequence[str]) -> str:
        # A second event of each key: equal ones are told apart in the driver, too.
        values = ", ".join(f"('{key}')" for key in (*keys, *keys))
        return f"SELECT CAST(unhex(k) AS string) AS id, {lsn}L AS lsn, '{op}' AS op FROM VALUES {values} AS t(k)"

    inserted = [table.merge(batch(1, "u", keys), engine=engine).events.inserted for keys in files]
    updated = [table.merge(batch(2, "u", [key]), engine=engine).events.updated for *_, key in files]
    every = [key for keys in files for key in keys]
    deleted = table.merge(batch(4, "d", every), engine=engine).events.deleted
    late = [table.merge(batch(3, "u", keys), engine=engine).events.stale for keys in (files[0], files[1], every)]
    alone = [f"SELECT CAST(unhex('61FE') AS string) AS id, {lsn}L AS lsn, 'u' AS op" for lsn in (1, 2)]
    fates = [ledger(table.merge(one, engine=engine)) for one in alone]  # Spark knows the key from the plan

    assert (inserted, updated, deleted, late) == ([1, 2, 2, 3], [1, 1, 1, 1], 8, [1, 2, 8])
    assert fates == [{"received": 1, "inserted": 1}, {"received": 1, "updated": 1}]
    assert table.rows("hex(id)") == [("61FE",)]


@pytest.mark.parametrize("engine", ["spark", "auto"])
def test_keys_that_python_or_the_calendar_of_java_does_not_have_are_found(table: Table, engine: str):
    """Each in a file of its own; `java.sql` has no third day, and the last one is PostgreSQL's -infinity."""
    types = ("timestamp_ntz", "timestamp", "date")
    table.settings["keys"] = [f"a {dtype}" for dtype in types]
    table.settings["table_properties"] = {"delta.columnMapping.mode": "name"}
    ends = (
        *("TIMESTAMP'-0044-03-15'", "TIMESTAMP'+12000-02-29'", "TIMESTAMP'1582-10-10'"),
        *("TIMESTAMP'9999-12-31 23:59:59.999999'", "timestamp_micros(-9223372036832400000)"),
    )

    def event(end: str, lsn: int, op: str) -> str:
        keys = ", ".join(f"CAST({end} AS {dtype}) AS `a {dtype}`" for dtype in types)
        return f"SELECT {keys}, {lsn}L AS lsn, '{op}' AS op"

    fates = [
        ledger(table.merge(event(end, lsn, op), engine=engine)) for lsn, op in ((1, "u"), (3, "u")) for end in ends
    ]
    gone = table.merge(" UNION ALL ".join(event(end, 4, "d") for end in ends), engine=engine)
    late = table.merge(" UNION ALL ".join(event(end, 2, "u") for end in ends), engine=engine)

    assert fates == [{"received": 1, fate: 1} for fate in ("inserted", "updated") for _ in ends]
    assert (ledger(gone), ledger(late)) == ({"received": 5, "deleted": 5}, {"received": 5, "stale": 5})
    assert "bounds on no column" in gone.plan


def test_rows_that_python_cannot_hold_are_compared(table: Table):
    """Whether an event with its row's sequence, or a row of a copy, changes something."""
    row = "SELECT 1L AS id, 1L AS lsn, {} AS v, DATE'+20224-02-25' AS day"
    copied = Table(table.spark, f"{table.path}-copied", sequence_by=(), shape=Snapshot())

    fates = [ledger(one.merge(row.format(v), engine="spark")) for one in (table, copied) for v in (1, 2)]

    assert fates == [{"received": 1, "inserted": 1}, {"received": 1, "updated": 1}] * 2
    assert table.rows("v", "day") == copied.rows("v", "day") == [("2", "+20224-02-25")]
