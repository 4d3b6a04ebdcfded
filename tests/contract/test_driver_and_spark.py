"""The driver beside Spark on one table: it needs a JVM, for Spark is the reference reader and the other writer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from delta_log import check_table, live_rows
from deltalake import DeltaTable, QueryBuilder
from engines import DriverAlways, way, with_costs
from grouped import sink_with
from prometheus_client import CollectorRegistry
from pyspark.sql import DataFrame, SparkSession
from since import since

from stream_merge import MergeFailedError, MergeMetrics, MergeSink, RetryPolicy
from stream_merge.model.results import MergeResult
from stream_merge.testing import batch, run

Row = dict[str, Any]
Rows = dict[Any, Row]

QUICK = RetryPolicy(attempts=200, backoff_initial_seconds=0, backoff_max_seconds=0.02, backoff_jitter_seconds=0.02)
VECTORS = "delta.enableDeletionVectors"
ALWAYS = {VECTORS: "true", "delta.enableChangeDataFeed": "true"}
WITHOUT = {VECTORS: "false"}
IN_BOTH_MODES = pytest.mark.parametrize("vectors", [{}, WITHOUT], ids=["mark", "rewrite"])
MAPPED = {"delta.columnMapping.mode": "name"}
COLUMNS = {"id": "bigint", "lsn": "bigint", "name": "string", "part": "string"}


class Table:
    """A table, with deletion vectors unless it is told otherwise, and the rows that it has to have.

    Args:
        columns: name -> type in DDL; `id` is the key.
        layout: more of CREATE TABLE.
        properties: besides `ALWAYS`.
        by_delta_rs: whether delta-rs can read it.
    """

    mode = "mark"
    """In which the driver merges into it."""

    def __init__(
        self,
        spark: SparkSession,
        path: str,
        columns: Mapping[str, str] = COLUMNS,
        *,
        layout: str = "",
        by_delta_rs: bool = True,
        **properties: str,
    ) -> None:
        self.spark = spark
        self.path = path
        self.root = Path(path)
        self.columns = dict(columns)
        self.by_delta_rs = by_delta_rs
        self.rows: Rows = {}
        self.checked = 0
        self.vacuumed = False
        self.batch_id = -1
        if properties.get(VECTORS) == "false":
            self.mode = "rewrite"
        listed = ", ".join(f"'{name}' = '{value}'" for name, value in {**ALWAYS, **properties}.items())
        ddl = ", ".join(f"{name} {kind}" for name, kind in columns.items())
        self.sql(f"CREATE TABLE {{t}} ({ddl}) USING delta {layout} TBLPROPERTIES ({listed})")
        self.settled: Rows = {}
        self.sink = self.new_sink()

    def new_sink(self, **settings: Any) -> MergeSink:
        """A sink that knows nothing of the table yet."""
        made = sink_with(
            **{
                "target": self.path,
                "keys": ["id"],
                "sequence_by": "lsn",
                "apply_as_deletes": "op = 'd'",
                "except_column_list": ["op"],
                "tombstones": False,
                "app_id": "test",
                "retry": QUICK,
                "metrics": MergeMetrics(registry=CollectorRegistry()),
                **settings,
            }
        )
        return with_costs(made, DriverAlways())

    @property
    def version(self) -> int:
        return max(commits(self.root))

    def sql(self, statement: str) -> Any:
        """Run a statement with `{t}` as the table's identifier."""
        return self.spark.sql(statement.format(t=f"delta.`{self.path}`")).collect()

    def deliver(self, *events: Sequence[Any]) -> MergeResult:
        """Merge events (the columns' values, then the operation) in the driver, where it may."""
        ddl = ", ".join(f"{name} {kind}" for name, kind in {**self.columns, "op": "string"}.items())
        self.batch_id += 1
        return run(self.sink, batch(self.spark, ddl, *events), self.batch_id)

    def merge(self, *events: Sequence[Any]) -> MergeResult:
        """Deliver events and compare the table with what they make of it."""
        result = self.deliver(*events)
        assert (way(result), result.outcome) == (self.mode, "committed"), result.plan
        for *values, op in events:
            row = dict(zip(self.columns, values, strict=True))
            known = self.rows.get(row["id"])
            if known is not None and (known["lsn"] or 0) > row["lsn"]:
                continue
            if op == "d":
                self.rows.pop(row["id"], None)
            else:
                self.rows[row["id"]] = row
        self.check()
        return result

    def check(self) -> None:
        """Rows by three readers, the log by the protocol, and the changes since the last check by Spark."""
        expected = sorted((tuple(row[name] for name in self.columns) for row in self.rows.values()), key=repr)
        assert self.read() == expected
        check_table(self.root, vacuumed=self.vacuumed)
        assert _tuples(live_rows(self.root).select(list(self.columns))) == expected
        if self.by_delta_rs:
            found = QueryBuilder().register("t", DeltaTable(self.path)).execute("SELECT * FROM t")
            assert _tuples(pa.table(found.read_all()).select(list(self.columns))) == expected
        self.check_feed()

    def read(self) -> list[tuple[Any, ...]]:
        found = self.spark.read.format("delta").load(self.path).select(*self.columns).collect()
        return sorted(map(_plain, found), key=repr)

    def check_feed(self) -> None:
        """Before an update stands what was there, and all changes together make the one table of the other."""
        if self.version > self.checked:
            feed = (
                self.spark.read.format("delta")
                .option("readChangeFeed", "true")
                .option("startingVersion", self.checked + 1)
                .load(self.path)
                .orderBy("_commit_version")
                .select("_commit_version", "_change_type", *self.columns)
                .collect()
            )
            rows = {key: {**dict.fromkeys(self.columns), **row} for key, row in self.settled.items()}
            for _, kind, *values in _before_after(map(_plain, feed)):
                row = dict(zip(self.columns, values, strict=True))
                if kind in ("delete", "update_preimage"):
                    assert rows.pop(row["id"], None) == row, (kind, row)
                else:
                    assert rows.setdefault(row["id"], row) is row, (kind, row)
            assert rows == self.rows
        self.settle()

    def settle(self) -> None:
        """The table is as it has to be; changes are looked at from here on."""
        self.checked = self.version
        self.settled = {key: dict(row) for key, row in self.rows.items()}

    def forget(self) -> None:
        """Let Spark and the sink read the log anew."""
        jvm: Any = self.spark._jvm
        jvm.org.apache.spark.sql.delta.DeltaLog.clearCache()
        self.sink = self.new_sink()

    def live_vectors(self) -> int:
        return sum(add.get("deletionVector") is not None for add in check_table(self.root).files.values())


def commits(root: Path) -> dict[int, Path]:
    """The commits that the log has."""
    found = (root / "_delta_log").iterdir()
    return {int(file.stem): file for file in found if re.fullmatch(r"\d{20}\.json", file.name)}


def _before_after(feed: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Changes by version, removals first: within a version the feed has no order."""
    first = ("delete", "update_preimage")
    return sorted(feed, key=lambda change: (change[0], change[1] not in first))


def _tuples(rows: pa.Table) -> list[tuple[Any, ...]]:
    return sorted(map(_plain, rows.to_pylist()), key=repr)


def _plain(value: Any) -> Any:
    """Rows and structs as tuples, whoever has read them."""
    if isinstance(value, dict):
        return tuple(map(_plain, value.values()))
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value


def upserts(*keys: int, lsn: int, name: str = "on read", part: str = "a", more: tuple[Any, ...] = ()) -> list[Any]:
    return [(key, lsn, f"{name} {key}", part, *more, "u") for key in keys]


def deletes(*keys: int, lsn: int, more: tuple[Any, ...] = ()) -> list[Any]:
    return [(key, lsn, None, None, *more, "d") for key in keys]


# -- a life beside Spark ------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "partitioned": {"layout": "PARTITIONED BY (part)"},
    "mapped by name": {"by_delta_rs": False, **MAPPED},
    "mapped by name, partitioned": {"layout": "PARTITIONED BY (part)", "by_delta_rs": False, **MAPPED},
    "clustered, dated": {"layout": "CLUSTER BY (id)", "delta.enableInCommitTimestamps": "true"},
    "checkpoints of version 2": {"delta.checkpointPolicy": "v2"},
    "without vectors": WITHOUT,
    "without vectors, partitioned, mapped by name": {
        "layout": "PARTITIONED BY (part)",
        "by_delta_rs": False,
        **WITHOUT,
        **MAPPED,
    },
    "without vectors, clustered, dated": {
        "layout": "CLUSTER BY (id)",
        "delta.enableInCommitTimestamps": "true",
        **WITHOUT,
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_life_beside_spark(spark: SparkSession, tmp_table: str, kind: str):
    """Between merges in the driver Spark does all that it can do to a table; a checkpoint is due every second version.

    Each reader sees the rows of each step, and Spark's change feed tells how they came to be.
    """
    table = Table(spark, tmp_table, **{"delta.checkpointInterval": "2", **KINDS[kind]})
    by_spark(table, 1)
    table.merge(*upserts(1, 2, 30, lsn=3, part="b"), *deletes(3, lsn=3))

    table.sql(
        "MERGE INTO {t} t USING (SELECT explode(sequence(4, 6)) AS id) s ON t.id = s.id"
        " WHEN MATCHED AND s.id = 4 THEN DELETE WHEN MATCHED THEN UPDATE SET name = 'by merge', lsn = 4"
    )
    del table.rows[4]
    set_all(table, (5, 6), name="by merge", lsn=4)
    table.merge(*upserts(4, 5, lsn=5), *deletes(6, lsn=5), *upserts(1, lsn=2))

    table.sql("UPDATE {t} SET name = 'by update', lsn = 6 WHERE id IN (1, 7)")
    set_all(table, (1, 7), name="by update", lsn=6)
    table.merge(*upserts(1, lsn=7), *upserts(7, lsn=5))

    table.sql("DELETE FROM {t} WHERE id IN (2, 8)")
    del table.rows[2], table.rows[8]
    before, kept = table.version, {key: dict(row) for key, row in table.rows.items()}
    table.merge(*upserts(2, lsn=8, part="c"), *deletes(9, lsn=8))

    table.sql("OPTIMIZE {t}")
    table.merge(*upserts(2, 10, lsn=9, part="b"), *deletes(30, lsn=9))

    table.sql("REORG TABLE {t} APPLY (PURGE)")
    table.check()
    if "clustered" not in kind:  # there Delta 4.4 leaves small files alone, with their vectors
        assert table.live_vectors() == 0
    table.merge(*upserts(11, lsn=10), *deletes(10, lsn=10))
    assert (table.live_vectors() > 0) == (table.mode == "mark")

    table.sql(f"RESTORE TABLE {{t}} TO VERSION AS OF {before}")
    table.rows = {key: dict(row) for key, row in kept.items()}
    table.merge(*upserts(2, 9, lsn=11), *deletes(12, lsn=11))

    table.sql("ALTER TABLE {t} ADD COLUMN more INT")
    table.columns["more"] = "int"
    set_all(table, table.rows, more=None)
    table.merge(*upserts(2, 13, lsn=12, more=(7,)), *deletes(14, lsn=12, more=(None,)))

    survives_without_its_commits(table)
    table.merge(*upserts(2, 15, lsn=13, more=(8,)), *deletes(16, 13, lsn=13, more=(None,)))
    written = {
        pq.ParquetFile(file).metadata.created_by.split()[0] for file in table.root.glob("_delta_log/**/*.parquet")
    }
    assert len(written) > 1, written

    spark.conf.set("spark.databricks.delta.retentionDurationCheck.enabled", "false")
    try:
        table.sql("VACUUM {t} RETAIN 0 HOURS")
    finally:
        spark.conf.unset("spark.databricks.delta.retentionDurationCheck.enabled")
    table.vacuumed = True
    table.forget()
    table.settle()
    table.merge(*upserts(2, 17, lsn=14, more=(9,)), *deletes(18, lsn=14, more=(None,)))


def by_spark(table: Table, lsn: int) -> None:
    """Forty rows in two files or more."""
    for keys in (range(1, 21), range(21, 41)):
        rows = [{"id": key, "lsn": lsn, "name": f"by Spark {key}", "part": "ab"[key % 2]} for key in keys]
        schema = ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())
        frame = batch(table.spark, schema, *(tuple(one.values()) for one in rows))
        frame.write.format("delta").mode("append").save(table.path)
        table.rows |= {row["id"]: row for row in rows}


def set_all(table: Table, keys: Any, **values: Any) -> None:
    for key in keys:
        table.rows[key] |= values


def survives_without_its_commits(table: Table) -> None:
    """Vectors are in the checkpoint: commits before it are tidied away, as after the log's retention."""
    log = table.root / "_delta_log"
    newest = max(int(file.name[:20]) for file in log.glob("[0-9]*.checkpoint*"))
    vectors = table.live_vectors()
    assert (vectors > 0) == (table.mode == "mark")
    for version, file in commits(table.root).items():
        if version < newest:
            file.unlink()
    table.forget()
    table.settle()
    table.check()
    assert table.live_vectors() == vectors


@since((4, 0), "types wider than int")
@IN_BOTH_MODES
@pytest.mark.parametrize("kind", ["plain", "partitioned"])
def test_columns_that_are_renamed_dropped_and_widened(
    spark: SparkSession, tmp_table: str, kind: str, vectors: dict[str, str]
):
    """Files keep their names and types; each is read as the table is now."""
    layout = "PARTITIONED BY (part)" if kind == "partitioned" else ""
    columns = {**COLUMNS, "n": "int", "s": "struct<a: int, b: string>"}
    properties = {**MAPPED, **vectors, "delta.enableTypeWidening": "true"}
    table = Table(spark, tmp_table, columns, layout=layout, by_delta_rs=False, **properties)
    table.merge(*(row(key, 1, key, (key, "x")) for key in range(1, 7)), row(7, 1, None, None))
    table.merge(row(1, 2, 11, None), row(2, 2, None, (None, None)))

    table.sql("ALTER TABLE {t} RENAME COLUMN name TO label")
    table.sql("ALTER TABLE {t} ALTER COLUMN n TYPE BIGINT")
    table.sql("ALTER TABLE {t} ALTER COLUMN s.a TYPE BIGINT")
    table.sql("ALTER TABLE {t} ADD COLUMN s.c DATE")
    table.columns = {
        "id": "bigint",
        "lsn": "bigint",
        "label": "string",
        "part": "string",
        "n": "bigint",
        "s": "struct<a: bigint, b: string, c: date>",
    }
    as_spark_has_it(table)
    table.forget()
    table.merge(row(1, 3, 2**40, (2**40, "y", None)), row(3, 3, None, None), row(8, 3, 8, None))

    table.sql("ALTER TABLE {t} RENAME COLUMN label TO gone")
    table.sql("ALTER TABLE {t} DROP COLUMN gone")
    table.sql("ALTER TABLE {t} ADD COLUMN name STRING")
    table.columns = {name: kind for name, kind in table.columns.items() if name != "label"} | {"name": "string"}
    as_spark_has_it(table)
    table.forget()
    table.merge((1, 4, "a", 5, (1, "z", None), "new", "u"), (4, 4, None, None, None, None, "d"))


def row(key: int, lsn: int, n: int | None, s: tuple[Any, ...] | None) -> tuple[Any, ...]:
    return (key, lsn, f"name {key}", "ab"[key % 2], n, s, "u")


def as_spark_has_it(table: Table) -> None:
    """The rows after a change of the schema: what old files hold is Spark's to say."""
    rows = (dict(zip(table.columns, found, strict=True)) for found in table.read())
    table.rows = {found["id"]: found for found in rows}
    table.settle()


# -- keys ---------------------------------------------------------------------------------------

KEYS = {
    "bigint": ("9223372036854775807", "-9223372036854775808", "0"),
    "string": ("'é'", "'e\\u0301'", "'\\uffff\\U0001F600'", "''", "'%41/?*[a]'"),
    "decimal(20,4)": ("9999999999999999.9999", "-0.0001", "0"),
    "decimal(38,0)": ("99999999999999999999999999999999999999", "-1", "9007199254740993"),
    "date": ("'0001-01-01'", "'1582-10-04'", "'9999-12-31'"),
    "timestamp": (
        "'9999-12-31 23:59:59.999999Z'",
        "'1500-01-01 00:00:00Z'",
        "'2024-01-01 00:00:00.123456Z'",
        "'1969-12-31 23:59:59.999999Z'",
        "timestamp_micros(9223372036854775807)",
    ),
    "timestamp_ntz": ("'9999-12-31 23:59:59.999999'", "'1500-01-01 00:00:00'", "'2024-01-01 00:00:00.123456'"),
    "binary": ("X''", "X'00FF'", "X'80'"),
    "boolean": ("true", "false"),
}


@pytest.mark.parametrize(
    ("kind", "vectors"),
    [
        *((kind, {}) for kind in KEYS),
        *(pytest.param(kind, WITHOUT, marks=pytest.mark.smoke) for kind in ("timestamp", "decimal(20,4)")),
    ],
)
def test_keys_of_files_by_spark_and_by_ourselves(
    spark: SparkSession, tmp_table: str, kind: str, vectors: dict[str, str]
):
    """Each key once, whoever has written it, in INT96 or not: updated, not inserted a second time."""
    conf = "spark.sql.parquet.outputTimestampType"
    table = Table(spark, tmp_table, {"id": kind, "lsn": "bigint", "name": "string"}, **vectors)
    values = KEYS[kind]
    former = spark.conf.get(conf)
    try:
        for number, value in enumerate(values):
            spark.conf.set(conf, "INT96" if number % 2 else "TIMESTAMP_MICROS")
            table.sql(f"INSERT INTO {{t}} SELECT CAST({value} AS {kind}), 1, 'by Spark'")
    finally:
        spark.conf.set(conf, former)

    for lsn in (2, 3):
        rows = ", ".join(f"(CAST({value} AS {kind}), {lsn}L, 'on read {lsn}', 'u')" for value in values)
        result = run(table.sink, spark.sql(f"SELECT * FROM VALUES {rows} AS t(id, lsn, name, op)"), lsn)
        assert (way(result), result.events.updated, result.events.inserted) == (table.mode, len(values), 0)
        found = table.sql("SELECT DISTINCT CAST(hash(id) AS STRING), lsn, name FROM {t}")
        assert len(found) == len(values) == table.sql("SELECT count(*) FROM {t}")[0][0]
        assert {tuple(one)[1:] for one in found} == {(lsn, f"on read {lsn}")}
    check_table(table.root)


@IN_BOTH_MODES
def test_keys_that_took_the_name_of_another_column(spark: SparkSession, tmp_table: str, vectors: dict[str, str]):
    """RENAME twice on a table that was raised to column mapping: statistics have the names of files."""
    columns = {"id": "bigint", "new_id": "bigint", "lsn": "bigint", "name": "string"}
    table = Table(spark, tmp_table, columns, by_delta_rs=False, **vectors)
    table.sql("INSERT INTO {t} VALUES (1, 100, 1, 'one'), (2, 200, 1, 'two')")
    table.sql("ALTER TABLE {t} SET TBLPROPERTIES ('delta.columnMapping.mode' = 'name')")
    table.sql("ALTER TABLE {t} RENAME COLUMN id TO old_id")
    table.sql("ALTER TABLE {t} RENAME COLUMN new_id TO id")
    table.columns = {"old_id": "bigint", "id": "bigint", "lsn": "bigint", "name": "string"}
    as_spark_has_it(table)

    table.merge((7, 100, 2, "new", "u"))


@IN_BOTH_MODES
def test_fields_that_took_each_others_names(spark: SparkSession, tmp_table: str, vectors: dict[str, str]):
    """A struct that is carried over keeps its values."""
    columns = {**COLUMNS, "s": "struct<a: int, b: int>"}
    table = Table(spark, tmp_table, columns, by_delta_rs=False, **vectors)
    table.sql("INSERT INTO {t} VALUES (1, 1, 'one', 'a', named_struct('a', 1, 'b', 2))")
    table.sql("ALTER TABLE {t} SET TBLPROPERTIES ('delta.columnMapping.mode' = 'name')")
    renames = ("RENAME COLUMN s.a TO c", "RENAME COLUMN s.b TO a", "RENAME COLUMN s.c TO b")
    for change in (*renames, "ALTER COLUMN s.a FIRST"):
        table.sql(f"ALTER TABLE {{t}} {change}")
    assert table.sql("SELECT s.a, s.b FROM {t}") == [(2, 1)]
    sink = table.new_sink(column_list=["id", "lsn", "name"], except_column_list=None)
    result = run(sink, batch(spark, "id bigint, lsn bigint, name string, op string", (1, 2, "new", "u")), 0)

    assert (way(result), result.events.updated) == (table.mode, 1)
    assert table.sql("SELECT name, s.a, s.b FROM {t}") == [("new", 2, 1)]


def test_files_whose_names_of_columns_differ_in_case(spark: SparkSession, tmp_table: str):
    """CONVERT TO DELTA takes them over, and Spark reads them: so is each row found."""
    spark.sql("SELECT 1L AS id, 1L AS lsn, 'one' AS name").write.parquet(tmp_table)
    spark.sql("SELECT 2L AS ID, 1L AS LSN, 'two' AS NAME").write.mode("append").parquet(tmp_table)
    spark.sql(f"CONVERT TO DELTA parquet.`{tmp_table}`")
    listed = ", ".join(f"'{name}' = '{value}'" for name, value in ALWAYS.items())
    spark.sql(f"ALTER TABLE delta.`{tmp_table}` SET TBLPROPERTIES ({listed})")
    sink = with_costs(sink_with(target=tmp_table, keys=["id"], sequence_by="lsn"), DriverAlways())
    run(sink, batch(spark, "id bigint, lsn bigint, name string", (1, 2, "new"), (2, 2, "new")), 0)

    found = spark.read.format("delta").load(tmp_table).select("id", "lsn", "name").collect()
    assert sorted(map(tuple, found)) == [(1, 2, "new"), (2, 2, "new")]


# -- what is refused ----------------------------------------------------------------------------


@IN_BOTH_MODES
def test_column_mapping_by_id_is_refused(spark: SparkSession, tmp_table: str, vectors: dict[str, str]):
    """Files of such a table may call their columns anything."""
    table = Table(spark, tmp_table, **{"delta.columnMapping.mode": "id", **vectors})
    by_spark(table, 1)
    result = table.deliver(*upserts(1, 99, lsn=2))

    assert result.engine == "spark"
    assert (result.events.updated, result.events.inserted) == (1, 1)


@IN_BOTH_MODES
def test_check_constraints_are_enforced_by_spark(spark: SparkSession, tmp_table: str, vectors: dict[str, str]):
    table = Table(spark, tmp_table, **vectors)
    table.merge(*upserts(1, 2, lsn=1))
    table.sql("ALTER TABLE {t} ADD CONSTRAINT small CHECK (id < 5)")
    result = table.deliver(*upserts(1, 3, lsn=2))
    assert result.engine == "spark"
    rows, version = table.read(), table.version
    with pytest.raises(MergeFailedError, match="CHECK constraint small"):
        table.deliver(*upserts(2, 9, lsn=3))
    assert (table.read(), table.version) == (rows, version)

    table.sql("ALTER TABLE {t} DROP CONSTRAINT small")
    table.rows |= {key: dict(zip(COLUMNS, (key, 2, f"on read {key}", "a"), strict=True)) for key in (1, 3)}
    table.settle()
    table.merge(*upserts(2, 9, lsn=4))


# -- races --------------------------------------------------------------------------------------

ROUNDS = 20


@IN_BOTH_MODES
def test_no_update_is_lost_between_merges_and_updates_of_spark(
    spark: SparkSession, tmp_table: str, vectors: dict[str, str]
):
    """Both at once on the same rows of the same file, round after round; who loses tries again."""
    columns = {"id": "bigint", "lsn": "bigint", "name": "string", "counted": "bigint"}
    table = Table(spark, tmp_table, columns, **vectors)
    table.sql("INSERT INTO {t} SELECT id, 0L, 'none', 0L FROM range(10)")
    sink = table.new_sink(column_list=["id", "lsn", "name"], except_column_list=None, app_id="race")
    schema = "id bigint, lsn bigint, name string, op string"
    frames = [batch(spark, schema, *((key, lsn, f"round {lsn}", "u") for key in (1, 2, 100 + lsn))) for lsn in rounds()]

    def merge(lsn: int, frame: DataFrame) -> int:
        result = run(sink, frame, lsn)
        assert (way(result), result.events.updated, result.events.inserted) == (table.mode, 2, 1)
        return sum(result.conflicts.values())

    def update() -> int:
        return updated(lambda: table.sql("UPDATE {t} SET counted = counted + 1 WHERE id IN (1, 3)"))

    run(sink, batch(spark, schema, (2, 0, "first", "u")), 0)  # which notes in the table's properties what its keys are
    lost = 0
    with ThreadPoolExecutor(2) as threads:
        for lsn, frame in zip(rounds(), frames, strict=True):
            both = threads.submit(merge, lsn, frame), threads.submit(update)
            lost += sum(one.result(120) for one in both)

    found = {row["id"]: row for row in spark.read.format("delta").load(tmp_table).collect()}
    assert tuple(found[1]) == (1, ROUNDS, f"round {ROUNDS}", ROUNDS)
    assert tuple(found[2]) == (2, ROUNDS, f"round {ROUNDS}", 0)
    assert tuple(found[3]) == (3, 0, "none", ROUNDS)
    assert sorted(found) == [*range(10), *(100 + lsn for lsn in rounds())]
    assert lost > 0, "nobody lost a commit: the two have not met"
    changes = check_table(table.root).changes
    assert sum(counts["update_postimage"] for counts in changes.values()) == 4 * ROUNDS + 1
    written = commits(table.root)
    operations = [json.loads(written[version].read_text().splitlines()[0])["commitInfo"] for version in changes]
    assert {info["operation"] for info in operations} == {"MERGE", "UPDATE"}


def rounds() -> range:
    return range(1, ROUNDS + 1)


def updated(update: Callable[[], Any]) -> int:
    """How often an update had to be tried again."""
    for lost in range(200):
        try:
            update()
        except Exception as err:
            if "DELTA_CONCURRENT" not in str(err):
                raise
            continue
        return lost
    pytest.fail("an update of Spark never came through")


def test_rows_that_are_larger_than_their_file_tells_go_to_spark(spark: SparkSession, tmp_table: str):
    """One long text in many rows is short in a file; only who reads the rows knows that there is no room for them."""
    table = Table(spark, tmp_table)
    table.sql("INSERT INTO {t} SELECT id, 1, repeat('x', 50000), 'a' FROM range(1000)")
    ceiling = 350 << 20
    events = [(number, 2, "n", "b", "u") for number in range(1000)]
    changes = batch(spark, "id bigint, lsn bigint, name string, part string, op string", *events)

    sink = table.new_sink(driver_memory_bytes=ceiling)
    sink(changes, 1)

    assert sink.last_result is not None
    assert (sink.last_result.engine, sink.last_result.refusal) == ("spark", "memory")
    assert re.search(r"the merge might need \d+ MB of the driver's memory, of 367 MB allowed", sink.last_result.plan)
    assert spark.sql(f"SELECT DISTINCT lsn, name, part FROM delta.`{tmp_table}`").collect() == [(2, "n", "b")]
    told = "the merge might need .* of 367 MB allowed"
    table.sql("UPDATE {t} SET name = repeat('x', 50000), lsn = 1")
    with pytest.raises(MergeFailedError, match=told):
        table.new_sink(driver_memory_bytes=ceiling, engine="driver")(changes, 2)
    sink = table.new_sink(driver_memory_bytes=2 * ceiling)
    sink(changes, 2)
    assert sink.last_result is not None
    assert sink.last_result.engine == "driver"
