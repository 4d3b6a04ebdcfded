"""Any name that Spark allows for a column works, and a name means what the session says it means."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from deliveries import SCHEMA, ChangeStream, delete, ledger, upsert
from disk import on_disk, options_of
from engines import under_test
from grouped import sink_with
from pyspark.sql import SparkSession
from since import since

from stream_merge import ConfigError
from stream_merge.model.names import QUARANTINE_TABLE_PREFIX, TARGET_ID_PROPERTY, TOMBSTONE_TABLE_PREFIX, quote
from stream_merge.model.table_ref import TableRef
from stream_merge.tables.explain import explain
from stream_merge.tables.side import tombstones
from stream_merge.testing import target_rows

pytestmark = pytest.mark.engines("auto", "spark", "rewrite")

KEYS = ["k.e`y 1", "select"]
SEQUENCE = ["l's\"n.", "order"]
PAYLOAD = "größe 漢字 {=,}()"


@pytest.mark.engines("spark")
@pytest.mark.parametrize("keys", [["s", "d"], ["k1", "k2"], ["entries", "k0"]])
def test_no_key_is_called_as_what_stands_beside_it(
    spark: SparkSession, tmp_table: str, keys: list[str], monkeypatch: pytest.MonkeyPatch
):
    """While deletes are looked up, and put together."""
    monkeypatch.setattr(tombstones, "TIDY_FILES", 2)
    schema = f"{keys[0]} bigint, {keys[1]} bigint, lsn bigint, op string"
    settings = {"keys": keys, "sequence_by": "lsn", "apply_as_deletes": "op = 'd'", "except_column_list": ["op"]}
    stream = ChangeStream(spark, tmp_table, schema, **settings)
    stream.deliver((1, 1, 1, "c"), (1, 2, 1, "c"))
    stream.deliver((1, 1, 5, "d"))
    stream.deliver((1, 1, 6, "d"))
    late = stream.deliver((1, 1, 5, "c"), (1, 2, 2, "c"))

    assert ledger(late) == {"received": 2, "stale": 1, "updated": 1}
    assert stream.rows() == [(1, 2, 2)]
    log = TableRef(tmp_table).tombstones
    assert "MERGE" in {row["operation"] for row in spark.sql(f"DESCRIBE HISTORY delta.`{log}`").collect()}


@pytest.mark.parametrize(
    ("backtick", "change_data_feed", "not_stored"),
    [("'", True, []), ("`", False, [SEQUENCE[0]])],
    ids=["change feed", "backticks, reserved column"],
)
def test_hostile_names_work_everywhere(
    spark: SparkSession, tmp_table: str, backtick: str, change_data_feed: bool, not_stored: list[str]
):
    """Dots, quotes, backticks, spaces, unicode, reserved words.

    As keys, sequence and payload, nested, in the partitioning, in both side tables, in a new column
    and in the path.
    """
    keys = [KEYS[0].replace("`", backtick), KEYS[1]]
    columns = {
        backtick: f"struct<{quote(PAYLOAD)}:int>",
        keys[1]: "string",
        SEQUENCE[0]: "int",
        keys[0]: "int",
        "op; --": "string",
        SEQUENCE[1]: "int",
        PAYLOAD: "string",
    }
    schema = ", ".join(f"{quote(name)} {dtype}" for name, dtype in columns.items())
    stream = ChangeStream(
        spark,
        f"{tmp_table} ta'ble 1 größe",
        schema,
        keys=keys,
        sequence_by=SEQUENCE,
        apply_as_deletes="`op; --` = 'd'",
        except_column_list=["op; --", *not_stored],
        partition_by=[keys[1]],
        change_data_feed=change_data_feed,
        schema_evolution=True,
    )
    first = stream.deliver(
        ((1,), "a", 1, 1, "u", 1, "old"),
        ((2,), "a", 1, 2, "u", 1, "gone"),
        ((3,), None, 1, 3, "u", 1, "no key"),
        (None, "b", 1, 3, "u", None, "no sequence"),
        ((5,), "b", 1, 5, "u", 1, "collapsed"),
        ((5,), "b", 1, 5, "u", 2, "same"),
    )
    second = stream.deliver(
        ((1,), "a", 1, 1, "u", 2, "new"), (None, "a", 2, 2, "d", 1, None), ((5,), "b", 1, 5, "u", 2, "same")
    )
    third = stream.deliver(
        ((1,), "a", 1, 1, "u", 0, "late", "x"),
        ((2,), "a", 1, 2, "u", 9, "ghost", "x"),
        ((6,), "c", 1, 6, "u", 1, "first", "x"),
        schema=f"{schema}, `a.b` string",
    )

    assert stream.rows(*keys, backtick, PAYLOAD, "a.b") == [
        (1, "a", (1,), "new", None),
        (5, "b", (5,), "same", None),
        (6, "c", (6,), "first", "x"),
    ]
    assert ledger(first) == {"received": 6, "quarantined": 2, "collapsed": 1, "inserted": 3}
    assert ledger(second) == {"received": 3, "updated": 1, "deleted": 1, "unaffected": 1}
    assert ledger(third) == {"received": 3, "unaffected": 1, "stale": 1, "inserted": 1}
    assert [(row[0], row[1]) for row in stream.side_table(TOMBSTONE_TABLE_PREFIX).collect()] == [(2, "a")]
    events = [json.loads(row["event"]) for row in stream.side_table(QUARANTINE_TABLE_PREFIX).collect()]
    assert sorted(event[PAYLOAD] for event in events) == ["no key", "no sequence"]


HOSTILE = "a\"b\\c{d}$[red]\x1b[2J\u2028\n'e"
"""Ends texts, lines, labels and markup, and commands a terminal."""


@pytest.mark.engines("auto")
@pytest.mark.parametrize("engine", ["spark", "driver"])
def test_names_end_nothing_that_they_stand_in(spark: SparkSession, tmp_table: str, engine: str):
    """Identity, label, path and values, in transaction ids, commit metadata, quarantine and predicates."""
    pattern = "[1]{a,b}*" if engine == "spark" else ""  # the driver's reader of files takes these for any name
    target = f"{tmp_table} gl{pattern} \"q'"
    stream = ChangeStream(spark, target, app_id=HOSTILE, name=HOSTILE, engine=engine)
    stream.deliver(upsert(1, "a", lsn=1), upsert(2, "b", lsn=1), (None, 1, "u", HOSTILE))
    stream.deliver(delete(1, lsn=2), upsert(2, HOSTILE, lsn=2))

    late = stream.deliver(upsert(1, "late", lsn=1))

    assert stream.rows() == [(2, 2, HOSTILE)]
    assert (late.target, ledger(late)) == (HOSTILE, {"received": 1, "stale": 1})
    merges = explain(target, storage_options=options_of(target)).merges
    assert {(merge.identity, merge.engine) for merge in merges} == {(HOSTILE, engine)}
    ((event,),) = stream.side_table(QUARANTINE_TABLE_PREFIX).select("event").collect()
    assert json.loads(event)["name"] == HOSTILE


@pytest.mark.engines("auto")
def test_a_path_that_is_a_pattern_is_left_to_spark(spark: SparkSession, tmp_table: str):
    stream = ChangeStream(spark, f"{tmp_table}[1]")
    stream.deliver(upsert(1, "a", lsn=1))

    second = stream.deliver(delete(1, lsn=2), upsert(2, "b", lsn=2))

    assert (second.engine, second.refusal) == ("spark", "storage")
    assert "in a path with '[', which stands for any name" in second.plan
    assert stream.rows() == [(2, 2, "b")]


def test_columns_with_control_characters_and_quotes_are_names(spark: SparkSession, tmp_table: str):
    columns = ['k"e\\y', "l\ns\x1bn", "o[red]\tp", "v\u2028\r"]
    stream = ChangeStream(
        spark,
        tmp_table,
        ", ".join(
            f"{quote(name)} {dtype}" for name, dtype in zip(columns, ("string", "int", "string", "string"), strict=True)
        ),
        keys=[columns[0]],
        sequence_by=columns[1],
        apply_as_deletes=f"{quote(columns[2])} = 'd'",
        except_column_list=[columns[2]],
    )
    stream.deliver((HOSTILE, 1, "u", "a"), ("k", 1, "u", "a"), (None, 1, "u", "a"))
    stream.deliver((HOSTILE, 2, "u", HOSTILE), ("k", 2, "d", None))

    late = stream.deliver((HOSTILE, 1, "u", "late"), ("k", 1, "u", "late"))

    assert ledger(late) == {"received": 2, "stale": 1, "unaffected": 1}
    assert stream.rows() == [(HOSTILE, 2, HOSTILE)]


def test_a_backtick_in_a_column_and_the_change_feed_exclude_each_other(spark: SparkSession, tmp_table: str):
    """Delta 4.4 fails at the first update of such a table, so it is refused before the first insert."""
    stream = ChangeStream(spark, tmp_table, "id int, lsn int, `a``b` int", keys="id", sequence_by="lsn")

    with pytest.raises(ConfigError, match=r"change data feed cannot write column.*'a`b'.*change_data_feed=False"):
        stream.deliver((1, 1, 1))

    assert stream.versions() == {}


def test_a_clustered_target_may_have_hostile_names(spark: SparkSession, tmp_table: str):
    """Found without case, like every other name."""
    stream = ChangeStream(
        spark, tmp_table, "id int, lsn int, `A.b c` int", keys="id", sequence_by="lsn", cluster_by=["a.b c", "ID"]
    )

    stream.deliver((1, 1, 1))

    assert stream.sql("DESCRIBE DETAIL {target}").collect()[0]["clusteringColumns"] == ["`A.b c`", "id"]


def test_a_struct_sequence_with_hostile_field_names_fits_an_existing_table(spark: SparkSession, tmp_table: str):
    """The reserved column is added with them."""
    stream = ChangeStream(
        spark,
        tmp_table,
        "id int, pos struct<`a b`:struct<`x.y```:int>>, name string",
        keys="id",
        sequence_by="pos",
        except_column_list=["pos"],
    )
    stream.sql(
        "CREATE TABLE {target} (id int, name string) USING delta TBLPROPERTIES ('delta.columnMapping.mode' = 'name')"
    )
    stream.deliver((1, ((5,),), "row"))

    late = stream.deliver((1, ((4,),), "late"))

    assert stream.rows() == [(1, "row")]
    assert ledger(late) == {"received": 1, "unaffected": 1}


@pytest.fixture
def session(spark: SparkSession) -> Iterator[SparkSession]:
    """A session of its own, so that no conf reaches other tests."""
    yield spark.newSession()
    SparkSession._instantiatedSession = spark


def test_names_are_compared_without_case_by_default(spark: SparkSession, tmp_table: str):
    """In every setting, and between source and target, whose spelling wins."""
    stream = ChangeStream(
        spark,
        tmp_table,
        SCHEMA,
        keys=["ID"],
        sequence_by="LSN",
        apply_as_deletes="Op = 'd'",
        except_column_list=None,
        column_list=["iD", "LSN", "NAME"],
        partition_by=["Name"],
    )
    stream.sql("CREATE TABLE {target} (Id bigint, Name string, Lsn bigint) USING delta")
    stream.deliver(upsert(1, "row", lsn=1), upsert(2, "row", lsn=1))

    stream.deliver(upsert(1, "new", lsn=2), delete(2, lsn=2), schema="ID bigint, LSN bigint, OP string, NAME string")

    assert stream.rows() == [(1, "new", 2)]
    assert stream.sql("SELECT * FROM {target}").columns == ["Id", "Name", "Lsn"]


def test_partitioning_is_found_without_case_too(spark: SparkSession, tmp_table: str):
    stream = ChangeStream(spark, tmp_table, partition_by=["NAME"])

    stream.deliver(upsert(1, "a", lsn=1))

    assert stream.sql("DESCRIBE DETAIL {target}").collect()[0]["partitionColumns"] == ["name"]


@pytest.mark.engines("auto")
def test_a_key_in_another_case_cannot_be_the_sequence(spark: SparkSession, tmp_table: str):
    """A key cannot order its own versions, however it is spelled."""
    stream = ChangeStream(spark, tmp_table, keys=["id"], sequence_by="ID")

    with pytest.raises(ConfigError, match="is also a key"):
        stream.deliver(upsert(1, "a", lsn=1))


def test_names_are_compared_with_case_where_the_session_says_so(session: SparkSession, tmp_table: str):
    """`spark.sql.caseSensitive=true`: another case is another name, in the settings and in the source."""
    session.conf.set("spark.sql.caseSensitive", "true")
    stream = ChangeStream(session, tmp_table, "id int, ID int, lsn int", keys="id", sequence_by="lsn")

    with pytest.raises(ConfigError, match="'LSN', which the source does not have"):
        stream.deliver((1, 2, 1), sequence_by="LSN")
    made = stream.versions()
    stream.deliver((1, 2, 1), sequence_by="lsn", except_column_list=["ID"])

    assert made == {}
    assert stream.rows() == [(1, 1)]


def test_two_source_columns_that_differ_in_case_only_are_refused(spark: SparkSession, tmp_table: str):
    """Where case is ignored nobody can tell them apart."""
    stream = ChangeStream(spark, tmp_table, "id int, Name int, lsn int, name int", keys="id", sequence_by="lsn")

    with pytest.raises(ConfigError, match=r"\['Name', 'name'\] more than once"):
        stream.deliver((1, 2, 3, 4))


@pytest.fixture
def schema(spark: SparkSession, tmp_path: Path) -> Iterator[str]:
    """A schema whose tables lie in a folder of this test."""
    name = "contract_names"
    spark.sql(f"CREATE SCHEMA {name} LOCATION '{tmp_path.as_uri()}'")
    yield name
    spark.sql(f"DROP SCHEMA {name} CASCADE")


def test_a_catalog_name_is_a_target_like_a_path(spark: SparkSession, schema: str, tmp_path: Path):
    """Parsed as SQL, reserved words quoted; the sink's own tables lie in the same schema."""
    stream = ChangeStream(spark, f"{schema}.`order`", folder=tmp_path, keys=["id"])
    stream.deliver(upsert(1, "row", lsn=1), delete(2, lsn=5), (None, 1, "u", "no key"))

    late = stream.deliver(upsert(1, "new", lsn=2), upsert(2, "ghost", lsn=4))

    assert stream.rows() == [(1, 2, "new")]
    assert ledger(late) == {"received": 2, "updated": 1, "stale": 1}
    assert sorted(row["tableName"] for row in spark.sql(f"SHOW TABLES IN {schema}").collect()) == [
        "__stream_merge_quarantine_order",
        "__stream_merge_tombstones_order",
        "order",
    ]


def test_a_dropped_table_of_the_catalog_starts_without_the_old_tombstones(
    spark: SparkSession, schema: str, tmp_path: Path
):
    stream = ChangeStream(spark, f"{schema}.t", folder=tmp_path)
    stream.deliver(delete(1, lsn=5))
    spark.sql(f"DROP TABLE {schema}.t")

    stream.batch_id = -1
    result = stream.deliver(upsert(1, "new life", lsn=1))

    assert ledger(result) == {"received": 1, "inserted": 1}


@since((4, 0), "types wider than int")
@pytest.mark.parametrize("engine", ["auto", "spark"])
def test_what_lies_beside_a_table_of_the_catalog_is_found_again_after_its_types_were_widened(
    spark: SparkSession, schema: str, tmp_path: Path, engine: str
):
    """The remembered deletes are written again under their name, and stay those of this very target."""
    narrow, wide = ("id int, lsn int, op string, name string", "id bigint, lsn bigint, op string, name string")
    settings = {"keys": "id", "sequence_by": "lsn", "apply_as_deletes": "op = 'd'", "except_column_list": ["op"]}
    settings |= {"schema_evolution": "widen", "engine": engine}
    stream = ChangeStream(spark, f"{schema}.t", narrow, folder=tmp_path, **settings)

    def properties() -> dict[str, str]:
        found = spark.sql(f"SHOW TBLPROPERTIES {schema}.{TOMBSTONE_TABLE_PREFIX}t").collect()
        return {row["key"]: row["value"] for row in found if row["key"].startswith("stream_merge.")}

    stream.deliver(upsert(1, "one", lsn=1), delete(2, lsn=5), (None, 1, "u", "no key"))
    before = properties()
    stream.deliver(upsert(2**40, "far", lsn=2), (None, 2, "u", "no key"), schema=wide)
    late = stream.deliver(upsert(2, "ghost", lsn=4), schema=wide)

    assert dict(stream.side_table(TOMBSTONE_TABLE_PREFIX).dtypes)["id"] == "bigint"
    assert TARGET_ID_PROPERTY in before
    assert properties() == before
    assert ledger(late) == {"received": 1, "stale": 1}
    assert stream.rows("id") == [(1,), (2**40,)]
    assert stream.side_table(QUARANTINE_TABLE_PREFIX).count() == 2


@pytest.mark.engines("auto")
def test_a_uri_names_the_folder_that_spark_takes_it_for(spark: SparkSession, tmp_path: Path):
    """`%20` in it is no blank, neither for the sink's own reading nor for its locks; delta-rs would take it for one."""
    target = f"file://{tmp_path}/a%20b"
    ChangeStream(spark, str(tmp_path / "a b"), folder=tmp_path).deliver(upsert(1, "other", lsn=1))
    for key, engine in enumerate(("auto", "spark")):
        stream = ChangeStream(spark, target, folder=tmp_path, app_id=engine, engine=engine)
        done = stream.deliver(upsert(key, engine, lsn=1))
        assert done.engine == "spark"

    assert ChangeStream(spark, str(tmp_path / "a b"), folder=tmp_path).rows("name") == [("other",)]
    assert target_rows(spark, f"{tmp_path}/a%20b", "id", "name") == [(0, "auto"), (1, "spark")]


@pytest.mark.engines("auto")
def test_a_table_of_the_catalog_in_a_folder_with_odd_characters_is_merged_in_the_driver(
    spark: SparkSession, schema: str, tmp_path: Path
):
    """The catalog has its location as a URI, in which they are encoded."""
    for name, folder in (("blank", "a b#c"), ("share", "50%")):
        place = tmp_path / folder
        spark.sql(f"CREATE TABLE {schema}.{name} (id BIGINT, lsn BIGINT, name STRING) USING delta LOCATION '{place}'")
        stream = ChangeStream(spark, f"{schema}.{name}", folder=tmp_path, engine="driver")

        done = stream.deliver(upsert(1, "row", lsn=1))

        assert done.engine in ("driver", "driver")
        assert target_rows(spark, str(place), "id", "name") == [(1, "row")]


def test_the_spelling_of_a_path_does_not_enter_the_identity(spark: SparkSession, tmp_table: str):
    """The same batch under another spelling of the same table is known."""
    stream = ChangeStream(spark, tmp_table)
    stream.deliver(upsert(1, "row", lsn=1))

    for spelling in (f"{tmp_table}/", f"delta.`{tmp_table}`", on_disk(tmp_table).as_uri()):
        sink = under_test(sink_with(**{**stream.settings, "target": spelling}))
        sink(spark.createDataFrame([upsert(1, "row", lsn=1)], SCHEMA), 0)
        assert sink.last_result is not None
        assert sink.last_result.outcome == "skipped_duplicate"
