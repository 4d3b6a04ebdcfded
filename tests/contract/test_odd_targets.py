"""Tables and sessions that nobody would think of: merged exactly, or refused before anything is written.

On Spark: what is asked is what Spark and Delta make of them.
"""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from grouped import sink_with
from pyspark.sql import DataFrame, SparkSession
from since import since

from stream_merge import ConfigError, ContractError, Maintenance, MergeFailedError, MergeSink, MergeSinks
from stream_merge.merge import steps
from stream_merge.model.table_ref import TableRef
from stream_merge.shapes import Clauses, Snapshot, when_matched, when_not_matched
from stream_merge.spark.confs import WHOLE_READS
from stream_merge.spark.versions import SPARK
from stream_merge.tables.maintenance import maintain
from stream_merge.testing import batch, run, table_version, target_rows


def spark_sink(target: str, **settings: object) -> MergeSink:
    return sink_with(**{"target": target, "keys": ["id"], "engine": "spark", "app_id": "odd", **settings})


@pytest.mark.parametrize("copied", ["100L AS id, 1 AS x", "0L AS id, 0 AS x"], ids=["no row is left", "one is left"])
def test_a_window_over_a_struct_that_is_called_like_the_events_is_one_over_the_row(
    spark: SparkSession, tmp_table: str, copied: str
) -> None:
    """Beside an event `s.x` is the event's x; the look before the MERGE counted no missing row, and all went."""
    spark.sql(f"CREATE TABLE delta.`{tmp_table}` (id BIGINT, x INT, s STRUCT<x: INT>) USING delta")
    spark.sql(f"INSERT INTO delta.`{tmp_table}` SELECT id, 0, named_struct('x', 1) FROM range(10)")
    sink = spark_sink(tmp_table, shape=Snapshot(within="s.x = 1", max_delete_share=0.2))

    with pytest.raises(ContractError, match=r"would delete (10|9) of 10 rows within"):
        run(sink, spark.sql(f"SELECT {copied}, named_struct('x', 1) AS s"), 1)

    assert len(target_rows(spark, tmp_table)) == 10


def test_a_window_may_leave_out_whose_column_it_means(spark: SparkSession, tmp_table: str) -> None:
    sink = spark_sink(tmp_table, shape=Snapshot(within="day = 1", max_delete_share=1.0))
    run(sink, batch(spark, "id bigint, day int, v string", (1, 1, "a"), (2, 1, "b"), (3, 1, "c")), 0)

    run(sink, batch(spark, "id bigint, day int, v string", (1, 1, "a")), 1)

    assert target_rows(spark, tmp_table) == [(1, 1, "a")]


def test_a_sequence_of_padded_text_wins_a_tie_as_any_other(spark: SparkSession, tmp_table: str) -> None:
    spark.sql(f"CREATE TABLE delta.`{tmp_table}` (id BIGINT, seq CHAR(5), v STRING) USING delta")
    sink = spark_sink(tmp_table, sequence_by="seq")
    schema = "id bigint, seq string, v string"
    run(sink, batch(spark, schema, (1, "b", "1")), 0)

    run(sink, batch(spark, schema, (1, "b", "2")), 1)

    assert target_rows(spark, tmp_table, "id", "v") == [(1, "2")]


@pytest.mark.parametrize(
    ("columns", "settings", "said"),
    [
        ("id STRUCT<c: CHAR(5)>, lsn BIGINT", {"sequence_by": "lsn"}, "key 'id' holds char.n. inside of struct<c:"),
        ("id STRUCT<c: VARCHAR(5)>, lsn BIGINT", {"sequence_by": "lsn"}, None),
        (
            "id STRUCT<c: STRING>, lsn BIGINT, _row_id_ INT",
            {"sequence_by": "lsn"},
            "'_row_id_'. have names that Delta's MERGE",
        ),
    ],
)
def test_what_delta_would_stumble_over_is_refused(
    spark: SparkSession, tmp_table: str, columns: str, settings: dict[str, str], said: str | None
) -> None:
    """Delta pads a char(n) in a struct, too (4.4): each event of the key would be a row of its own."""
    spark.sql(f"CREATE TABLE delta.`{tmp_table}` ({columns}) USING delta")
    events = spark.sql("SELECT named_struct('c', 'a') AS id, 1L AS lsn")

    if said is None:
        run(spark_sink(tmp_table, **settings), events, 0)
        assert len(target_rows(spark, tmp_table)) == 1
        return
    with pytest.raises(ConfigError, match=said):
        run(spark_sink(tmp_table, **settings), events, 0)
    assert table_version(spark, tmp_table) == 0


@pytest.mark.parametrize("has_target", [True, False])
def test_columns_that_differ_in_case_alone_are_refused(spark: SparkSession, tmp_table: str, has_target: bool) -> None:
    """Delta has no two of them; a session that tells them apart would find out in the merge."""
    if has_target:
        spark.sql(f"CREATE TABLE delta.`{tmp_table}` (id BIGINT, lsn BIGINT, v INT) USING delta")
    strict = spark.newSession()
    strict.conf.set("spark.sql.caseSensitive", "true")
    events = strict.sql(f"SELECT 1L AS id, 1L AS lsn, 2 AS V{'' if has_target else ', 1 AS v'}")

    with pytest.raises(ConfigError, match=r"column.s. \['V'.*only in case"):
        run(spark_sink(tmp_table, sequence_by="lsn", schema_evolution=True), events, 0)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("name", "engine"),
    [
        *((name, "spark") for name in ("FilePath", "rowIndexCol", "deletionVectorId", "path")),
        ("filePath", "auto"),
    ],
)
def test_columns_that_delta_looks_for_when_it_writes_deletion_vectors(
    spark: SparkSession, tmp_path: Path, name: str, engine: str
) -> None:
    """A bare MERGE into a table with such a column and deletion vectors fails; here it writes files again."""
    table = str(tmp_path / "table")
    settings = {"sequence_by": "lsn", "apply_as_deletes": "gone", "except_column_list": ["gone"], "engine": engine}
    sink = sink_with(target=table, keys="id", app_id="a", **settings)
    schema = f"id bigint, lsn bigint, gone boolean, `{name}` string"

    run(sink, batch(spark, schema, *((key, 1, False, "a") for key in range(4))), 0)
    run(sink, batch(spark, schema, (0, 2, False, "b"), (1, 2, True, None), (7, 1, False, "c")), 1)

    assert target_rows(spark, table, "id", name) == [(0, "b"), (2, "a"), (3, "a"), (7, "c")]


@pytest.mark.parametrize("name", ["filePath", "rowIndexCol", "deletionVectorId", "_metadata", "path"])
def test_so_may_columns_of_the_source_be_called_that_are_not_stored(
    spark: SparkSession, tmp_path: Path, name: str
) -> None:
    table = str(tmp_path / "table")
    clauses = Clauses([when_matched(f"s.`{name}` = 'x'").update({"lsn": "s.lsn"}), when_not_matched().insert_all()])
    own = sink_with(target=table, keys="id", app_id="b", shape=clauses, except_column_list=[name], engine="spark")

    for number in range(2):
        run(own, batch(spark, f"id bigint, lsn bigint, `{name}` string", (0, number, "x"), (2, number, "y")), number)

    assert target_rows(spark, table, "id", "lsn") == [(0, 1), (2, 0)]


def test_names_that_delta_reserves_for_its_reader_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    """With any of them Spark could not read the table, sooner or later; what the error recommends works."""
    table, other = str(tmp_path / "table"), str(tmp_path / "other")
    reserved = {
        "the reader": ["_tmp_metadata_row_index", "__delta_internal_is_row_deleted"],
        "deletion vectors": ["_METADATA", "__delta_internal_row_index"],
        "the change data feed": ["__is_cdc", "_change_type", "_commit_timestamp", "_commit_version"],
    }
    taken = [(name, what) for what, listed in reserved.items() for name in listed]
    events = spark.sql("SELECT 1L AS id, 1L AS lsn," + ", ".join(f"'a' AS `{name}`" for name, _ in taken))

    with pytest.raises(ConfigError) as caught:
        run(spark_sink(table, sequence_by="lsn"), events, 0)

    assert caught.value.problems == tuple(
        f"[RESERVED_COLUMN_NAME] column {name!r} has a name that Delta reserves for {what}; rename it in the stream:"
        f" withColumnRenamed({name!r}, …), or omit it with except_column_list"
        for name, what in taken
    )
    assert not (tmp_path / "table").exists()

    plain = {"table_properties": {"delta.enableDeletionVectors": "false"}, "change_data_feed": False}
    first = spark.sql("SELECT 1L AS id, 1L AS lsn, named_struct('file_path', 'f') AS _metadata, 'own' AS _change_type")
    run(spark_sink(other, sequence_by="lsn", **plain), first, 0)
    spark.sql(f"ALTER TABLE delta.`{other}` SET TBLPROPERTIES ('delta.enableDeletionVectors' = 'true')")
    with pytest.raises(ConfigError) as refused:
        run(spark_sink(other, sequence_by="lsn", **plain), first, 1)
    mapping = f"ALTER TABLE delta.`{other}` SET TBLPROPERTIES ('delta.columnMapping.mode' = 'name')"
    rename = f"ALTER TABLE delta.`{other}` RENAME COLUMN `_metadata` TO"
    assert refused.value.problems == (
        f"[RESERVED_COLUMN_NAME] target {other!r} has a column '_metadata', a name that Delta reserves for deletion"
        f" vectors; rename it there and in the stream: {mapping}; {rename} …",
    )

    spark.sql(mapping)
    spark.sql(f"{rename} source_file")
    run(spark_sink(other, sequence_by="lsn", **plain), first.withColumnRenamed("_metadata", "source_file"), 2)

    assert target_rows(spark, other, "id", "source_file") == [(1, ("f",))]


@since((4, 0), "SQL declares identity columns")
def test_columns_that_a_merge_cannot_write_are_refused(spark: SparkSession, tmp_table: str) -> None:
    """Delta fails at each batch; what the error recommends works."""
    spark.sql(
        f"CREATE TABLE delta.`{tmp_table}` (id BIGINT, lsn BIGINT, n BIGINT GENERATED BY DEFAULT AS IDENTITY,"
        " s STRUCT<a: INT NOT NULL, t: STRUCT<`b.c`: INT NOT NULL>>) USING delta"
    )
    events = spark.sql("SELECT 1L AS id, 1L AS lsn, 7L AS n, named_struct('a', 1, 't', named_struct('b.c', 2)) AS s")

    with pytest.raises(ConfigError) as caught:
        run(spark_sink(tmp_table, sequence_by="lsn"), events, 0)

    allow = [
        f"ALTER TABLE delta.`{tmp_table}` ALTER COLUMN {path} DROP NOT NULL" for path in ("`s`.`a`", "`s`.`t`.`b.c`")
    ]
    assert caught.value.problems == (
        f"[COLUMN_NOT_WRITABLE] column 'n' of target {tmp_table!r} is an identity column, which Delta fills itself;"
        " omit it with except_column_list",
        f"[COLUMN_NOT_WRITABLE] column 's' of target {tmp_table!r} has NOT NULL fields, which Delta's MERGE cannot"
        f" write; allow NULL: {'; '.join(allow)}",
    )
    for statement in allow:
        spark.sql(statement)
    run(spark_sink(tmp_table, sequence_by="lsn", except_column_list=["n"]), events, 0)
    assert target_rows(spark, tmp_table, "id", "n", "s") == [(1, 1, (1, (2,)))]


def test_a_file_that_is_gone_is_no_reason_to_insert_its_rows_again(spark: SparkSession, tmp_path: Path) -> None:
    """Whatever the session says of files that are missing: Delta would commit the loss. Of the source it holds."""
    table = tmp_path / "table"
    reading = spark.newSession()
    reading.conf.set("spark.sql.files.ignoreMissingFiles", "true")
    sink = spark_sink(str(table), sequence_by="lsn")
    schema = "id bigint, lsn bigint, v string"
    batch(spark, schema, (1, 1, "a"), (2, 1, "b")).repartition(2, "id").write.parquet(str(tmp_path / "source"))
    source = reading.read.parquet(str(tmp_path / "source"))
    files = {pq.read_table(file)["v"][0].as_py(): file for file in (tmp_path / "source").glob("*.parquet")}
    os.unlink(files["b"])
    run(sink, source, 0)
    assert target_rows(spark, str(table), "id") == [(1,)]
    for file in table.glob("*.parquet"):
        os.unlink(file)

    with pytest.raises(MergeFailedError):
        run(sink, batch(reading, schema, (1, 2, "c")), 1)


@pytest.mark.parametrize("conf", WHOLE_READS)
def test_a_source_is_read_as_its_session_says_also_for_the_state_of_an_applied_batch(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, conf: str
) -> None:
    """Else the query would stop for ever at a file without which the batch was merged."""
    reading, folder = spark.newSession(), tmp_path / "source"
    reading.conf.set(conf, "true")
    batch(spark, "id bigint, lsn bigint", (1, 1), (2, 1)).repartition(2, "id").write.parquet(str(folder))
    source = reading.read.parquet(str(folder))
    file = next(folder.glob("*.parquet"))
    os.unlink(file) if "Missing" in conf else file.write_bytes(b"PAR1 and then nothing")
    table, read, run_through = str(tmp_path / "table"), list[int](), steps.run_through

    def noted(events: DataFrame) -> None:
        run_through(events)
        read.append(len(events.collect()))

    run(spark_sink(table, sequence_by="lsn"), source, 0)
    monkeypatch.setattr(steps, "keeps_state", lambda _: True)
    monkeypatch.setattr(steps, "run_through", noted)

    run(spark_sink(table, sequence_by="lsn"), source, 0)

    assert read == [1]
    assert len(target_rows(spark, table)) == 1


@pytest.mark.parametrize("conf", WHOLE_READS)
def test_maintenance_by_hand_takes_no_broken_file_for_an_empty_one(
    spark: SparkSession, tmp_path: Path, conf: str
) -> None:
    """OPTIMIZE reads what it writes again: what the session leaves out would be gone for good."""
    table, damaged = tmp_path / "table", spark.newSession()
    spark.range(60).repartition(6).write.format("delta").save(str(table))
    file = next(table.glob("*.parquet"))
    os.unlink(file) if "Missing" in conf else file.write_bytes(b"PAR1 and then nothing")
    damaged.conf.set(conf, "true")

    found = maintain(damaged, TableRef(str(table)), Maintenance())

    assert (found.outcome, found.removed_files) == ("failed", 0)
    assert damaged.conf.get(conf) == "true"
    assert table_version(spark, str(table)) == 0


def test_the_sequence_of_a_table_is_of_instants_whatever_a_session_calls_a_timestamp(
    spark: SparkSession, tmp_table: str
) -> None:
    spark.sql(f"CREATE TABLE delta.`{tmp_table}` (id BIGINT, v STRING) USING delta")
    local = spark.newSession()
    events = local.sql("SELECT 1L AS id, TIMESTAMP '2026-01-01 00:00:00' AS at, 'a' AS v")
    local.conf.set("spark.sql.timestampType", "TIMESTAMP_NTZ")
    sink = spark_sink(tmp_table, sequence_by="at", except_column_list=["at"])

    run(sink, events, 0)
    run(sink, events, 1)

    stored = spark.read.format("delta").load(tmp_table).schema["__stream_merge_sequence"].dataType
    assert stored.simpleString() == "struct<c1:timestamp>"


@pytest.mark.skipif(SPARK < (4, 0), reason="collations are of Spark 4")
def test_a_route_is_told_by_its_letters_whatever_its_collation(spark: SparkSession, tmp_path: Path) -> None:
    """The tables are without it: Delta 4.4 has no collations."""
    how = {"sequence_by": "lsn", "except_column_list": ["r"]}
    sinks = {name: spark_sink(str(tmp_path / name), **how) for name in ("a", "A1")}

    MergeSinks(sinks, route_by="r")(
        spark.sql("SELECT id, 1L AS lsn, r COLLATE UTF8_LCASE AS r FROM VALUES (1L, 'a'), (2L, 'A1') AS e(id, r)"), 0
    )

    assert [target_rows(spark, str(tmp_path / name), "id") for name in sinks] == [[(1,)], [(2,)]]
