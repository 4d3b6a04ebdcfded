"""What is set up wrongly is one sentence with its remedy, before anything is written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from grouped import sink_with
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from stream_merge import ConfigError, MergeSink
from stream_merge.spark.versions import SPARK, WIDENS_BEYOND_INTEGERS
from stream_merge.testing import run, table_version

COLUMNS = ["id", "lsn", "name", "op", "tags", "doc", "at"]
DOC = "variant" if SPARK >= (4, 0) else "map<string,int>"


@pytest.fixture(scope="module")
def source(spark: SparkSession) -> DataFrame:
    """One event with columns of all sorts."""
    return spark.range(1).selectExpr(
        "id",
        "1L AS lsn",
        "'ann' AS name",
        "'u' AS op",
        "map('a', 'b') AS tags",
        "parse_json('{}') AS doc" if SPARK >= (4, 0) else "map('a', 1) AS doc",  # VARIANT came with 4.0
        "named_struct('file', 1L, 'tags', map('a', 1)) AS at",
    )


WIDER = (
    "[TYPE_TOO_NARROW] column 'lsn' of the target is too narrow (lsn bigint -> decimal(38,0)); cast it in the stream,"
    " set schema_evolution='widen', or run ALTER TABLE delta.`{target}` SET TBLPROPERTIES ('delta.enableTypeWidening' ="
    " 'true'); ALTER TABLE delta.`{target}` ALTER COLUMN `lsn` TYPE decimal(38,0) (delta-rs and polars then cannot"
    " read the table)"
)


def sink_of(target: str, **settings: Any) -> MergeSink:
    return sink_with(**{"target": target, "keys": ["id"], "sequence_by": "lsn", **settings})


@contextmanager
def nothing_written(folder: Path) -> Iterator[None]:
    """Not a file more or less, the sink's own tables included."""
    before = sorted(folder.rglob("*"))
    yield
    assert sorted(folder.rglob("*")) == before


def problems_of(sink: MergeSink, events: DataFrame) -> tuple[str, ...]:
    """What the sink says of a batch; the message is all problems in one line."""
    with pytest.raises(ConfigError) as caught:
        sink(events, 0)
    assert str(caught.value) == "; ".join(caught.value.problems)
    assert caught.value.target == sink._calls.spec.target
    assert all("\n" not in problem for problem in caught.value.problems)
    return caught.value.problems


# -- seen without Spark -------------------------------------------------------------------------


# -- seen in the source -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"keys": ["nope"]},
            f"[COLUMN_NOT_FOUND] keys names column 'nope', which the source does not have; its columns are {COLUMNS!r}",
        ),
        (
            {"keys": ["at.file"]},
            "[COLUMN_NOT_FOUND] keys names column 'at.file', which the source does not have; its columns are"
            f" {COLUMNS!r}",
        ),
        (
            {"sequence_by": ["lsn", "nope"]},
            "[COLUMN_NOT_FOUND] sequence_by names column 'nope', which the source does not have; its columns are"
            f" {COLUMNS!r}",
        ),
        (
            {"sequence_by": "tags"},
            "[UNSUPPORTED_TYPE] sequence_by uses 'tags' of type map<string,string>, which has no order; use numbers,"
            " timestamps, text or a struct of them",
        ),
        (
            {"sequence_by": "doc"},
            f"[UNSUPPORTED_TYPE] sequence_by uses 'doc' of type {DOC}, which has no order; use numbers, timestamps,"
            " text or a struct of them",
        ),
        (
            {"sequence_by": "at"},
            "[UNSUPPORTED_TYPE] sequence_by uses 'at' of type struct<file:bigint,tags:map<string,int>>, which has no"
            " order; use numbers, timestamps, text or a struct of them",
        ),
        (
            {"keys": ["tags"]},
            "[UNSUPPORTED_TYPE] key 'tags' is map<string,string>, which cannot be compared; use another key",
        ),
        ({"keys": ["doc"]}, f"[UNSUPPORTED_TYPE] key 'doc' is {DOC}, which cannot be compared; use another key"),
        (
            {"column_list": ["id", "nope"]},
            "[COLUMN_NOT_FOUND] column_list names column 'nope', which the source does not have; its columns are"
            f" {COLUMNS!r}",
        ),
        (
            {"except_column_list": ["nope"]},
            "[COLUMN_NOT_FOUND] except_column_list names column 'nope', which the source does not have; its columns are"
            f" {COLUMNS!r}",
        ),
        (
            {"except_column_list": ["ID"]},
            "[CONFLICTING_SETTINGS] key 'id' is not stored; do not leave it out",
        ),
        ({"apply_as_deletes": "op"}, "[INVALID_EXPRESSION] apply_as_deletes='op' must be boolean, not string"),
        (
            {"partition_by": ["nope"]},
            f"[COLUMN_NOT_FOUND] partition_by names column 'nope', which is not stored; stored columns are {COLUMNS!r}",
        ),
    ],
)
def test_what_the_source_cannot_give_is_refused(source, tmp_path, settings, problem):
    with nothing_written(tmp_path):
        assert problems_of(sink_of(str(tmp_path / "table"), **settings), source) == (problem,)


@pytest.mark.parametrize("condition", ["op = = 'd'", "nope = 'd'", "no_such_function(op)"])
def test_a_delete_condition_that_does_not_fit_the_source_is_refused(source, tmp_path, condition):
    with nothing_written(tmp_path):
        (problem,) = problems_of(sink_of(str(tmp_path / "table"), apply_as_deletes=condition), source)

    assert problem.startswith(f"[INVALID_EXPRESSION] apply_as_deletes={condition!r} does not fit the source: [")
    assert problem.endswith(f"; its columns are {COLUMNS!r}")


def test_a_sequence_expression_that_does_not_fit_the_source_is_refused(source, tmp_path):
    with nothing_written(tmp_path):
        (problem,) = problems_of(sink_of(str(tmp_path / "table"), sequence_by=F.col("at.nope")), source)

    assert problem.startswith("[INVALID_EXPRESSION] sequence_by='at.nope' does not fit the source: [FIELD_NOT_FOUND]")


def test_a_reserved_column_in_the_source_is_refused(source, tmp_path):
    odd = source.select("id", "lsn", F.lit(1).alias("__Stream_Merge_delete"))

    with nothing_written(tmp_path):
        assert problems_of(sink_of(str(tmp_path / "table")), odd) == (
            "[RESERVED_COLUMN_NAME] the source has column(s) ['__Stream_Merge_delete']; the prefix '__stream_merge_' is"
            " reserved, rename them in the stream",
        )


def test_keys_may_be_spelled_in_another_case_than_the_column_list(source, tmp_path):
    """Case follows `spark.sql.caseSensitive`, which is off; only the source can tell."""
    result = run(sink_of(str(tmp_path / "table"), keys=["ID"], column_list=["id", "lsn", "name"]), source, 0)

    assert result.events.inserted == 1


def test_all_problems_of_a_batch_are_reported_at_once(source, tmp_path):
    sink = sink_of(
        str(tmp_path / "table"), keys=["nope", "tags"], sequence_by="doc", apply_as_deletes="op", create=False
    )

    with nothing_written(tmp_path):
        assert [problem.split(",")[0] for problem in problems_of(sink, source)] == [
            "[COLUMN_NOT_FOUND] keys names column 'nope'",
            "[UNSUPPORTED_TYPE] key 'tags' is map<string",
            f"[UNSUPPORTED_TYPE] sequence_by uses 'doc' of type {DOC.split(',', maxsplit=1)[0]}",
            "[INVALID_EXPRESSION] apply_as_deletes='op' must be boolean",
        ]


# -- seen in the target -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def orders(spark: SparkSession, source: DataFrame, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table that a sink has merged into, with keys ["id"] and sequence ["lsn"]."""
    table = tmp_path_factory.mktemp("orders") / "orders"
    run(sink_of(str(table)), source.select("id", "lsn", "name"), 0)
    return table


@pytest.mark.parametrize(
    ("settings", "select", "problem"),
    [
        (
            {"keys": ["name"]},
            ["id", "lsn", "name"],
            "[DEFINITION_CHANGED] target {target!r} is merged by keys ['id'], now keys=['name']; use the recorded keys,"
            " or rebuild the table",
        ),
        (
            {"sequence_by": ["lsn", "name"]},
            ["id", "lsn", "name"],
            "[DEFINITION_CHANGED] target {target!r} is sequenced by ['lsn'], now by ['lsn', 'name']; use the recorded"
            " definition, or rebuild the table",
        ),
        (
            {},
            ["CAST(id AS string) AS id", "lsn", "name"],
            "[TYPE_MISMATCH] column 'id' is string in the source and bigint in the target, which cannot hold it"
            " exactly; cast it in the stream to bigint",
        ),
        (
            {},
            ["id", "CAST(lsn AS decimal(38, 0)) AS lsn", "name"],
            WIDER
            if WIDENS_BEYOND_INTEGERS
            else "[TYPE_MISMATCH] column 'lsn' is decimal(38,0) in the source and bigint in the target, which cannot"
            " hold it exactly; cast it in the stream to bigint",
        ),
        (
            {},
            ["id", "lsn", "name", "op"],
            "[COLUMN_NOT_IN_TARGET] the source has column(s) ['op'] that the target lacks; set schema_evolution=True to"
            " add them, or leave them out with except_column_list",
        ),
        (
            {"schema_evolution": True},
            ["id", "lsn", "name", "op AS `change op`"],
            "[COLUMN_NOT_WRITABLE] new column(s) ['change op'] need column mapping, which target {target!r} does not"
            " have; set delta.columnMapping.mode='name', or rename them in the stream",
        ),
    ],
    ids=["keys", "sequence", "type", "decimal", "unknown column", "column mapping"],
)
def test_what_an_existing_table_does_not_allow_is_refused(source, orders, settings, select, problem):
    with nothing_written(orders.parent):
        problems = problems_of(sink_of(str(orders), **settings), source.selectExpr(*select))

    assert problems == (problem.format(target=str(orders)),)


def test_an_append_only_table_is_refused(spark, source, tmp_path, tmp_table):
    spark.sql(
        f"CREATE TABLE delta.`{tmp_table}` (id bigint, lsn bigint) USING delta"
        " TBLPROPERTIES ('delta.appendOnly' = 'true')"
    )

    with nothing_written(tmp_path):
        assert problems_of(sink_of(tmp_table), source.select("id", "lsn")) == (
            f"[TARGET_IS_APPEND_ONLY] target {tmp_table!r} has delta.appendOnly, but a merge updates and deletes; unset"
            " the property",
        )
    assert table_version(spark, tmp_table) == 0


def test_a_folder_that_is_no_delta_table_is_refused(source, tmp_path, tmp_table):
    source.select("id", "lsn").write.parquet(tmp_table)

    with nothing_written(tmp_path):
        assert problems_of(sink_of(tmp_table), source.select("id", "lsn")) == (
            f"[NOT_A_DELTA_TABLE] target {tmp_table!r} exists but is not a Delta table; convert it (CONVERT TO DELTA)"
            " or choose another",
        )


def test_a_file_in_the_place_of_the_target_is_refused(source, tmp_path, tmp_table):
    Path(tmp_table).write_text("not a table")

    with nothing_written(tmp_path):
        assert problems_of(sink_of(tmp_table), source.select("id", "lsn")) == (
            f"[NOT_A_DELTA_TABLE] target {tmp_table!r} exists but is not a Delta table; convert it (CONVERT TO DELTA)"
            " or choose another",
        )


def test_a_catalog_table_that_is_no_delta_table_is_refused(spark, source):
    spark.sql("CREATE TABLE bad_input_parquet (id bigint, lsn bigint) USING parquet")
    try:
        assert problems_of(sink_of("bad_input_parquet"), source.select("id", "lsn")) == (
            "[NOT_A_DELTA_TABLE] target 'bad_input_parquet' exists but is not a Delta table; convert it (CONVERT TO"
            " DELTA) or choose another",
        )
        assert [row["tableName"] for row in spark.sql("SHOW TABLES LIKE '*bad_input*'").collect()] == [
            "bad_input_parquet"
        ]
    finally:
        spark.sql("DROP TABLE bad_input_parquet")


@pytest.mark.parametrize("target", ["no such name", "one..two", "shop.`orders"])
def test_a_target_that_is_no_table_name_is_refused(source, target):
    (problem,) = problems_of(sink_of(target), source.select("id", "lsn"))

    assert problem.startswith(f"[INVALID_TARGET] target {target!r} is not a valid table name in Spark: [")


def test_a_missing_schema_is_one_sentence(source):
    (problem,) = problems_of(sink_of("no_such_schema.orders"), source.select("id", "lsn"))

    assert problem == (
        "[SCHEMA_NOT_FOUND] the schema of target 'no_such_schema.orders' does not exist; create it (CREATE SCHEMA"
        " `spark_catalog`.`no_such_schema`), or correct the name"
    )


def test_a_missing_table_is_refused_when_the_sink_may_not_create_it(source, tmp_path, tmp_table):
    with nothing_written(tmp_path):
        assert problems_of(sink_of(tmp_table, create=False), source.select("id", "lsn")) == (
            f"[TABLE_NOT_FOUND] target {tmp_table!r} does not exist and create is False; create the table, or remove"
            " create=False",
        )


def test_a_table_in_the_place_of_the_quarantine_is_refused(spark, source, tmp_path, tmp_table):
    elsewhere = str(tmp_path / "elsewhere")
    source.select("id").write.format("delta").save(elsewhere)

    with nothing_written(tmp_path), pytest.raises(ConfigError) as caught:
        sink_of(tmp_table, quarantine_target=elsewhere)(source.select("id", "lsn"), 0)

    (problem,) = caught.value.problems
    assert problem.startswith(f"[SIDE_TABLE_NAME_TAKEN] quarantine_target {elsewhere!r} lacks column(s) ['reasons', ")
    assert problem.endswith("use another name, under which the sink creates the table")


# -- permissions --------------------------------------------------------------------------------


def test_the_source_may_spell_the_sequence_in_another_case(source, orders):
    """The recorded definition is compared as the session compares names."""
    again = source.selectExpr("id", "2L AS LSN", "name")

    assert run(sink_of(str(orders), sequence_by="LSN"), again, 1).events.updated == 1


# -- defaults and surface -----------------------------------------------------------------------
