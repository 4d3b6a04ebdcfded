"""What Delta's own suites ask of MERGE and no other file here does: odd sources, odd targets, one clock.

Needs a JVM: Delta merges, and Spark makes the sources. `tests/delta_merge_suites.md` has all of Delta's cases.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deltalake
import pytest
from deliveries import ChangeStream, delete, ledger, upsert
from disk import beside, make_folder, options_of
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T
from since import NEW_FIELDS, since

from stream_merge import ConfigError, MergeFailedError
from stream_merge.shapes import Clauses, InsertOnly, when_matched, when_not_matched
from stream_merge.spark.versions import SPARK, from_ddl
from stream_merge.testing import batch, run, target_rows

ENGINES = pytest.mark.parametrize("engine", ["auto", "spark"])
SCHEMA = "id bigint, lsn bigint, name string"
UPSERT = (when_matched().update_all(), when_not_matched().insert_all())


def changes_of(spark: SparkSession, target: str, schema: str = SCHEMA, **settings: Any) -> ChangeStream:
    return ChangeStream(spark, target, schema, keys="id", sequence_by="lsn", **settings)


# -- sources ---------------------------------------------------------------------------------------


@ENGINES
def test_the_source_may_be_made_of_the_target_itself(spark: SparkSession, tmp_table: str, engine: str):
    """Read once, before anything of the batch is written; both sides have the same column names."""
    stream = ChangeStream(spark, tmp_table, engine=engine)
    stream.deliver(upsert(1, "one", lsn=1), upsert(2, "two", lsn=1))
    spark.read.format("delta").load(tmp_table).createOrReplaceTempView("itself")
    events = spark.sql("SELECT id + 1 AS id, lsn + 1 AS lsn, 'u' AS op, concat(name, '!') AS name FROM itself")

    result = run(stream.sink(), events, 1)

    assert ledger(result) == {"received": 2, "inserted": 1, "updated": 1}
    assert stream.rows() == [(1, 1, "one"), (2, 2, "one!"), (3, 2, "two!")]
    run(stream.sink(), spark.sql("SELECT id, lsn + 1 AS lsn, 'd' AS op, name FROM itself WHERE id < 3"), 2)
    assert stream.rows() == [(3, 2, "two!")]
    spark.catalog.dropTempView("itself")


def test_the_source_may_be_any_query(spark: SparkSession, tmp_table: str):
    """With a CTE, set operations, ORDER BY with LIMIT, a join and a subquery; what a user has persisted stays so."""
    stream = changes_of(spark, tmp_table)
    events = spark.sql(
        "WITH e AS (SELECT * FROM VALUES (1L, 1L, 'a'), (2L, 1L, 'b'), (2L, 9L, 'c'), (3L, 1L, 'd'), (4L, 1L, 'e')"
        " AS t(id, lsn, name)), newest AS (SELECT * FROM e ORDER BY lsn DESC, id LIMIT 4)"
        " SELECT newest.* FROM newest JOIN (SELECT DISTINCT id FROM e) USING (id)"
        " WHERE id IN (SELECT max(id) - 1 FROM e)"
        " UNION (SELECT * FROM newest WHERE id < 3) EXCEPT SELECT 1L, 1L, 'a'"
    ).persist()

    result = stream.deliver_frame(events)

    assert ledger(result) == {"received": 3, "collapsed": 1, "inserted": 2}
    assert stream.rows() == [(2, 9, "c"), (3, 1, "d")]
    assert events.is_cached
    assert events.storageLevel.useMemory
    events.unpersist()


def test_a_column_of_another_frame_is_refused(spark: SparkSession, tmp_table: str):
    """It belongs to that frame alone; `s` and `t` are written as names."""
    events = batch(spark, SCHEMA, (1, 1, "one"))
    bound = Clauses([when_matched(events["lsn"] > 1).update({"name": events["name"]}), UPSERT[1]])

    with pytest.raises(ConfigError) as caught:
        ChangeStream(spark, tmp_table, SCHEMA, keys="id", shape=bound).deliver_frame(events)

    assert [problem.split("): ")[-1].split(" does not fit")[0] for problem in caught.value.problems] == [
        f"its condition '{'>(lsn, 1)' if SPARK >= (4, 0) else '(lsn > 1)'}'",
        "the value of 'name' 'name'",
    ]
    assert beside(tmp_table) == []


@pytest.mark.parametrize(
    ("value", "refused"),
    [
        ("null", {"v": "void"}),
        ("named_struct('a', 1, 'v', null)", {"v.v": "void"}),
        ("array(null)", {"v.element": "void"}),
        ("map('k', named_struct('v', null))", {"v.value.v": "void"}),
        ("from_json('{}', 'struct<>')", {"v": "struct<>"}),
        ("map('k', array(from_json('{}', 'a struct<>')))", {"v.value.element.a": "struct<>"}),
        (
            "named_struct('a', INTERVAL '1' MONTH, 'b', map(INTERVAL '1' DAY, make_interval(1)))",
            {"v.a": "interval month", "v.b.key": "interval day", "v.b.value": "interval"},
        ),
        pytest.param("array(TIME '10:00:00')", {"v.element": "time(6)"}, marks=since((4, 1), "TIME")),
        pytest.param("'a' COLLATE UTF8_LCASE", {"v": "string collate UTF8_LCASE"}, marks=since((4, 0), "collations")),
    ],
)
def test_types_that_delta_does_not_store_are_refused_at_any_depth(
    spark: SparkSession, tmp_table: str, value: str, refused: dict[str, str]
):
    """Of a struct without fields Delta would create the table and then write nothing to it, ever."""
    events = spark.sql(f"SELECT 1L AS id, 1L AS lsn, {value} AS v")

    with pytest.raises(ConfigError) as caught:
        changes_of(spark, tmp_table).deliver_frame(events)

    assert caught.value.problems == tuple(
        f"[UNSUPPORTED_TYPE] column {name!r} is {dtype}, which Delta does not store; cast it in the stream to a type"
        " such as string, or leave it out"
        for name, dtype in refused.items()
    )
    assert beside(tmp_table) == []


def test_types_of_a_user_s_own_are_stored_as_spark_does(spark: SparkSession, tmp_table: str):
    """User-defined types, at the top and in a struct, compared and kept as what they are made of."""
    inner = T.StructType([T.StructField("p", VectorUDT())])
    schema = T.StructType(
        [*from_ddl("id bigint, lsn bigint"), T.StructField("p", VectorUDT()), T.StructField("st", inner)]
    )
    one, two = Vectors.dense([1.0, 2.0]), Vectors.sparse(3, [1], [5.0])
    stream = changes_of(spark, tmp_table, engine="spark")
    stream.deliver_frame(spark.createDataFrame([(1, 1, one, (one,)), (2, 1, one, None)], schema))

    result = stream.deliver_frame(spark.createDataFrame([(1, 2, two, (two,)), (2, 1, one, None)], schema))

    assert ledger(result) == {"received": 2, "unaffected": 1, "updated": 1}
    assert stream.rows() == [(1, 2, two, (two,)), (2, 1, one, None)]


# -- one merge ---------------------------------------------------------------------------------------


def test_all_rows_of_a_merge_have_one_time(spark: SparkSession, tmp_table: str):
    """One for conditions and values of all clauses, and not before that of the source; chance is each row's own."""
    spark.sql(
        f"CREATE TABLE delta.`{tmp_table}` (id bigint, at timestamp, also timestamp, made timestamp, dice double)"
        " USING delta"
    )
    own = {"dice": "rand()", "at": "current_timestamp()", "also": "now()", "made": "s.made"}
    clauses = Clauses([when_matched("t.at < now()").update(own), when_not_matched().insert({"id": "s.id", **own})])
    stream = ChangeStream(spark, tmp_table, keys="id", shape=clauses, schema="", app_id="clock")

    def events(rows: int) -> Any:
        return spark.range(rows).select("id", F.current_timestamp().alias("made")).repartition(4)

    for number, rows in enumerate((20, 40)):
        result = run(stream.sink(), events(rows), number)
        assert result.outcome == "committed"

    (found,) = (
        spark.read.format("delta")
        .load(tmp_table)
        .selectExpr(
            "count(*)", "count(DISTINCT at)", "bool_and(at = also)", "bool_and(made <= at)", "count(DISTINCT dice)"
        )
        .collect()
    )
    assert tuple(found) == (40, 1, True, True, 40)


def test_only_new_columns_that_a_clause_assigns_are_added(spark: SparkSession, tmp_table: str):
    """Others travel along for conditions and values; a column of before may be made of a new one."""
    batch(spark, SCHEMA, (1, 1, "one"), (2, 1, "two")).write.format("delta").save(tmp_table)
    clauses = [
        when_matched("s.flag").update({"note": "concat(s.extra, '!')", "name": "s.extra"}),
        when_not_matched().insert({"id": "s.id", "note": "s.note"}),
    ]
    schema = f"{SCHEMA}, flag boolean, extra string, note string"
    stream = ChangeStream(spark, tmp_table, schema, keys="id", shape=Clauses(clauses), schema_evolution=True)

    stream.deliver((1, 2, "x", True, "new", "n"), (2, 2, "x", False, "new", "n"), (3, 2, "x", None, "new", "n"))

    assert spark.read.format("delta").load(tmp_table).columns == ["id", "lsn", "name", "note"]
    assert stream.rows() == [(1, 1, "new", "new!"), (2, 1, "two", None), (3, None, None, "n")]


@NEW_FIELDS
def test_functions_of_arrays_need_one_type_of_element(spark: SparkSession, tmp_table: str):
    """Delta would bring both sides to the evolved type; here that is said before anything is written."""
    narrow, wide = "id bigint, l array<struct<a:int>>", "id bigint, l array<struct<a:int,b:string>>"
    union = Clauses([when_matched().update({"l": "array_union(t.l, s.l)"}), UPSERT[1]])
    stream = ChangeStream(spark, tmp_table, narrow, keys="id", shape=union, schema_evolution=True)
    stream.deliver((1, [(1,)]))
    stream.deliver((1, [(1,), (2,)]))
    assert stream.rows() == [(1, [(1,), (2,)])]

    with pytest.raises(ConfigError, match=r"array_union\(t\.l, s\.l\)' does not fit"):
        stream.deliver((1, [(3, "x")]), schema=wide)


# -- targets -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["insert-only", "changes"])
def test_what_is_cached_of_the_target_hides_nothing(spark: SparkSession, tmp_table: str, shape: str):
    """Neither from the sink what others have committed, nor from readers what the sink has."""
    own: dict[str, Any] = {"sequence_by": "lsn", "tombstones": False} if shape == "changes" else {"shape": InsertOnly()}
    stream = ChangeStream(spark, tmp_table, SCHEMA, keys="id", engine="spark", **own)
    stream.deliver((1, 5, "one"), (2, 5, "two"))
    cached = spark.read.format("delta").load(tmp_table).cache()
    assert cached.count() == 2
    try:
        others = deltalake.DeltaTable(tmp_table, storage_options=options_of(tmp_table))
        others.delete("id = 1")  # as a process of its own would: Spark hears nothing

        result = stream.deliver((1, 2, "again"))

        assert ledger(result) == {"received": 1, "inserted": 1}
        assert stream.rows() == [(1, 2, "again"), (2, 5, "two")]
        native = stream.deliver((3, 1, "by delta-rs"), engine="driver")
        assert (native.engine, len(stream.rows())) == ("driver", 3)
    finally:
        cached.unpersist()


def test_a_column_named_as_one_of_the_feed_is_stored_where_there_is_no_feed(spark: SparkSession, tmp_table: str):
    stream = changes_of(spark, tmp_table, "id bigint, lsn bigint, _change_type string", change_data_feed=False)
    run(stream.sink(), batch(spark, stream.schema, (1, 1, "own"), (2, 1, "own")), 0)

    result = run(stream.sink(), batch(spark, stream.schema, (1, 2, "new"), (3, 1, None)), 1)

    assert ledger(result) == {"received": 2, "inserted": 1, "updated": 1}
    assert stream.rows() == [(1, 2, "new"), (2, 1, "own"), (3, 1, None)]


@pytest.mark.parametrize("inside", ["_delta_log", "_delta_log/_staged_commits"])
def test_a_log_without_any_commit_is_no_table(spark: SparkSession, tmp_table: str, inside: str):
    """Delta makes these folders first: a process that is killed then, or cannot commit, must not hold up the next one.

    Deleting all objects of a table in a bucket leaves their marks, too.
    """
    make_folder(f"{tmp_table}/{inside}")

    changes_of(spark, tmp_table).deliver((1, 1, "one"))

    assert target_rows(spark, tmp_table) == [(1, 1, "one")]


def test_a_log_whose_first_commit_has_no_name_yet_is_no_table(spark: SparkSession, tmp_path: Path):
    """What a process leaves that is killed between writing version 0 and renaming it, with Hadoop's checksum."""
    log = tmp_path / "table" / "_delta_log"
    log.mkdir(parents=True)
    (log / ".00000000000000000000.json.7a4e.tmp").write_text("{")
    (log / "..00000000000000000000.json.7a4e.tmp.crc").write_bytes(b"crc")

    changes_of(spark, str(tmp_path / "table")).deliver((1, 1, "one"))

    assert target_rows(spark, str(tmp_path / "table")) == [(1, 1, "one")]


def test_what_is_no_whole_table_is_no_target(spark: SparkSession, tmp_path: Path):
    """A view, and a folder inside a table, whether of a partition or not: Delta would merge into the table."""
    table = str(tmp_path / "table")
    rows = batch(spark, f"{SCHEMA}, p string", (1, 1, "one", "a"))
    rows.write.format("delta").partitionBy("p").save(table)
    newer = batch(spark, SCHEMA, (1, 2, "new"), (2, 1, "two"))
    spark.read.format("delta").load(table).createOrReplaceTempView("a_view")
    before = sorted(tmp_path.rglob("*"))
    try:
        for target, said in (
            ("a_view", "'a_view' is a view; use the table to merge into"),
            (f"{table}/p=a", "p=a' is located inside the Delta table at .*; use that table, or"),
            (f"{table}/another", "another' is located inside the Delta table"),
        ):
            with pytest.raises(ConfigError, match=said):
                run(changes_of(spark, target, folder=tmp_path).sink(), newer, 0)
    finally:
        spark.catalog.dropTempView("a_view")
    assert sorted(tmp_path.rglob("*")) == before


@ENGINES
def test_each_row_of_a_key_that_the_table_has_more_than_once_is_changed(
    spark: SparkSession, tmp_table: str, engine: str
):
    """Somebody else's doing; an event counts once however many rows it changes."""
    rows = [(1, 1, "a"), (1, 1, "b"), (2, 1, "c"), (2, 1, "d"), (3, 1, "e")]
    batch(spark, SCHEMA, *rows).coalesce(1).write.format("delta").save(tmp_table)
    stream = ChangeStream(spark, tmp_table, engine=engine)

    result = run(stream.sink(), batch(spark, stream.schema, upsert(1, "new", lsn=2), delete(2, lsn=2)), 0)

    assert stream.rows() == [(1, 2, "new"), (1, 2, "new"), (3, 1, "e")]
    assert ledger(result)["received"] == 2


@since((4, 0), "SQL declares identity columns")
def test_comments_and_identity_stay_when_a_column_is_added(spark: SparkSession, tmp_table: str):
    """What a table's columns say of themselves is the table's; numbers of an identity column go on."""
    spark.sql(
        f"CREATE TABLE delta.`{tmp_table}` (n bigint GENERATED ALWAYS AS IDENTITY, id bigint COMMENT 'the key',"
        " lsn bigint, st struct<a: int COMMENT 'inside'>) USING delta"
    )
    stream = changes_of(spark, tmp_table, "id bigint, lsn bigint, st struct<a:int>", schema_evolution=True)
    stream.deliver((1, 1, (1,)), (2, 1, None))
    (first,) = stream.rows("n")[0]

    stream.deliver(
        (1, 2, (1, "x"), 5), (3, 1, None, 6), schema="id bigint, lsn bigint, st struct<a:int,b:string>, e int"
    )

    rows = stream.rows("id", "n", "st", "e")
    assert [(row[0], *row[2:]) for row in rows] == [(1, (1, "x"), 5), (2, None, None), (3, None, 6)]
    numbers = [row[1] for row in rows]
    assert len({*numbers}) == 3
    assert first in numbers[:2]
    schema = spark.read.format("delta").load(tmp_table).schema
    inside: Any = schema["st"].dataType
    assert (schema["id"].metadata["comment"], inside["a"].metadata["comment"]) == ("the key", "inside")


def test_rows_keep_their_ids_where_the_table_tracks_them(spark: SparkSession, tmp_table: str):
    spark.sql(
        f"CREATE TABLE delta.`{tmp_table}` ({SCHEMA}) USING delta TBLPROPERTIES ('delta.enableRowTracking'='true')"
    )
    stream = changes_of(spark, tmp_table, app_id="ids")

    def ids() -> dict[int, int]:
        rows = spark.read.format("delta").load(tmp_table).select("id", "_metadata.row_id").collect()
        return {row["id"]: row["row_id"] for row in rows}

    run(stream.sink(), batch(spark, SCHEMA, (1, 1, "one"), (2, 1, "two")), 0)
    before = ids()
    run(stream.sink(), batch(spark, SCHEMA, (1, 2, "new"), (3, 1, "three")), 1)

    after = ids()
    assert {key: after[key] for key in before} == before
    assert len({*after.values()}) == 3


def test_a_table_without_columns_is_filled_by_none_but_those_who_made_it(spark: SparkSession, tmp_table: str):
    """A key that the table lacks is not added: nobody knows what its rows would be."""
    spark.sql(f"CREATE TABLE delta.`{tmp_table}` USING delta")

    with pytest.raises(ConfigError, match=r"has no column 'id', which is a key"):
        changes_of(spark, tmp_table, schema_evolution=True).deliver((1, 1, "one"))

    assert spark.sql(f"DESCRIBE HISTORY delta.`{tmp_table}`").count() == 1


def test_what_a_column_does_not_allow_fails_the_batch_and_changes_nothing(spark: SparkSession, tmp_table: str):
    """NOT NULL and the length of a varchar hold; a new column may be NULL, even if the source's never is."""
    spark.sql(
        f"CREATE TABLE delta.`{tmp_table}` (id bigint NOT NULL, lsn bigint, name varchar(5) NOT NULL) USING delta"
    )
    schema = T.StructType(
        [
            T.StructField("id", T.LongType(), nullable=False),
            T.StructField("lsn", T.LongType(), nullable=False),
            T.StructField("name", T.StringType(), nullable=False),
            T.StructField("new", T.StructType([T.StructField("a", T.IntegerType(), nullable=False)]), nullable=False),
        ]
    )
    stream = changes_of(spark, tmp_table, schema_evolution=True)
    stream.deliver((1, 1, "one"))
    stream.deliver_frame(spark.createDataFrame([(2, 1, "two", (7,))], schema))
    before = stream.versions()["table"]

    for name, said in ((None, "NOT NULL"), ("too long", "EXCEED_LIMIT_LENGTH|varchar")):
        with pytest.raises(MergeFailedError, match=said):
            run(stream.sink(), batch(spark, SCHEMA, (1, 2, "fine"), (3, 2, name)), 5)

    assert stream.versions()["table"] == before
    assert stream.rows() == [(1, 1, "one", None), (2, 1, "two", (7,))]
