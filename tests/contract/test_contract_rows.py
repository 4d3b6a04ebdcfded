"""What a merge does to rows and columns: nothing that the events do not say."""

from __future__ import annotations

from typing import Any

import pytest
from deliveries import ChangeStream, delete, ledger, upsert
from disk import on_disk
from generated import create_generated
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from since import NEW_FIELDS, since

from stream_merge import ConfigError, MergeFailedError
from stream_merge.shapes import layouts

pytestmark = pytest.mark.engines("auto", "spark", "rewrite", "random")


@pytest.fixture
def stream(spark: SparkSession, tmp_table: str) -> ChangeStream:
    return ChangeStream(spark, tmp_table)


def properties(stream: ChangeStream) -> dict[str, str]:
    return {row["key"]: row["value"] for row in stream.sql("SHOW TBLPROPERTIES {target}").collect()}


@pytest.mark.smoke
def test_an_upsert_equal_to_the_row_leaves_no_trace(stream: ChangeStream):
    """Equal in every stored column and in sequence: no change feed row, in a batch of other changes too."""
    stream.deliver(upsert(1, "same", lsn=1), upsert(2, None, lsn=1), upsert(3, "old", lsn=1))

    alone = stream.deliver(upsert(1, "same", lsn=1), upsert(2, None, lsn=1))
    among = stream.deliver(upsert(1, "same", lsn=1), upsert(3, "new", lsn=2))

    assert (alone.outcome, ledger(alone)) == ("no_change", {"received": 2, "unaffected": 2})
    assert ledger(among) == {"received": 2, "unaffected": 1, "updated": 1}
    assert stream.changes() == [
        ("insert", 1, 1, "same"),
        ("insert", 2, 1, None),
        ("insert", 3, 1, "old"),
        ("update_postimage", 3, 2, "new"),
        ("update_preimage", 3, 1, "old"),
    ]


@pytest.mark.parametrize("not_stored", [["op"], ["op", "lsn"]], ids=["stored", "reserved column"])
def test_a_newer_event_with_equal_payload_advances_the_stored_sequence(stream: ChangeStream, not_stored: list[str]):
    """An update with change feed rows: otherwise an event between the two could win later."""
    stream.settings["except_column_list"] = not_stored
    stream.deliver(upsert(1, "same", lsn=1))

    advanced = stream.deliver(upsert(1, "same", lsn=5))
    between = stream.deliver(upsert(1, "late", lsn=3))

    assert stream.rows("id", "name") == [(1, "same")]
    assert ledger(advanced) == {"received": 1, "updated": 1}
    assert ledger(between) == {"received": 1, "unaffected": 1}
    assert [change for change, *_ in stream.changes()] == ["insert", "update_postimage", "update_preimage"]


def test_nan_equals_nan_and_zero_equals_negative_zero(spark: SparkSession, tmp_table: str):
    """Change detection follows Spark's `<=>`, at every depth and as a key."""
    stream = ChangeStream(
        spark,
        tmp_table,
        "k double, lsn int, v float, l array<double>, m map<string,double>",
        keys="k",
        sequence_by="lsn",
    )
    nan = float("nan")
    stream.deliver((nan, 1, nan, [nan, 0.0], {"a": nan}), (0.0, 1, 0.0, [-0.0], {"a": 0.0}))

    equal = stream.deliver((nan, 1, nan, [nan, -0.0], {"a": nan}), (-0.0, 1, -0.0, [0.0], {"a": -0.0}))
    other = stream.deliver((nan, 1, 1.0, [nan, 0.0], {"a": nan}), (-0.0, 1, nan, [-0.0], {"a": 0.0}))

    assert (equal.outcome, ledger(equal)) == ("no_change", {"received": 2, "unaffected": 2})
    assert ledger(other) == {"received": 2, "updated": 2}
    stored = stream.sql("SELECT isnan(k), isnan(v) FROM {target}").collect()
    assert sorted(tuple(row) for row in stored) == [(False, True), (True, False)]


NESTED = """
    SELECT {key} AS id, 1 AS lsn,
        map('b', 2, 'a', {number}) AS flat,
        map(1, map('x', array({number}))) AS deep,
        parse_json('{{"b": [1, {number}], "a": null}}') AS v,
        named_struct('m', map('k', {number}), 'l', array(named_struct('v', parse_json('{number}')))) AS s,
        array(map('k', CAST(NULL AS int)), NULL) AS l
"""
NESTED_REORDERED = """
    SELECT {key} AS id, 1 AS lsn,
        map('a', {number}, 'b', 2) AS flat,
        map(1, map('x', array({number}))) AS deep,
        parse_json('{{ "a":null,  "b":[1,{number}] }}') AS v,
        named_struct('m', map('k', {number}), 'l', array(named_struct('v', parse_json('{number}')))) AS s,
        array(map('k', CAST(NULL AS int)), NULL) AS l
"""


@since((4, 0), "VARIANT")
@pytest.mark.smoke
def test_columns_without_equality_are_compared_by_a_canonical_form(spark: SparkSession, tmp_table: str):
    """Maps and variants inside anything: order of entries and spelling of the JSON make no change."""
    stream = ChangeStream(spark, tmp_table, keys="id", sequence_by="lsn", apply_as_deletes=None, except_column_list=[])

    def events(text: str, **numbers: int) -> DataFrame:
        rows = (text.format(key=int(key[1:]), number=number) for key, number in numbers.items())
        return spark.sql(" UNION ALL ".join(rows))

    stream.deliver_frame(events(NESTED, k1=1, k2=2))

    equal = stream.deliver_frame(events(NESTED_REORDERED, k1=1, k2=2))
    changed = stream.deliver_frame(events(NESTED_REORDERED, k1=1, k2=3))

    assert (equal.outcome, ledger(equal)) == ("no_change", {"received": 2, "unaffected": 2})
    assert ledger(changed) == {"received": 2, "unaffected": 1, "updated": 1}
    stored = stream.sql("SELECT id, to_json(struct(flat.a, deep, v, s, l)) AS json FROM {target} ORDER BY id").collect()
    expected = (
        '{"a":#,"deep":{"1":{"x":[#]}},"v":{"a":null,"b":[1,#]},"s":{"m":{"k":#},"l":[{"v":#}]},"l":[{"k":null},null]}'
    )
    assert [row["json"] for row in stored] == [expected.replace("#", "1"), expected.replace("#", "3")]


def test_a_struct_may_be_null_though_its_fields_are_not(spark: SparkSession, tmp_table: str):
    """As Spark types what `IF` makes of a struct of literals; inside arrays and maps, too."""
    stream = ChangeStream(spark, tmp_table, keys="id", sequence_by="lsn", apply_as_deletes=None, except_column_list=[])

    for lsn in (1, 2):
        made = f"IF(id = {lsn}, NULL, struct(id AS a))"
        stream.deliver_frame(
            spark.sql(
                f"SELECT id, {lsn} AS lsn, {made} AS s, array({made}) AS l, map('k', {made}) AS m FROM range(1, 3)"
            )
        )

    assert stream.rows("id", "s", "l", "m") == [
        (1, (1,), [(1,)], {"k": (1,)}),
        (2, None, [None], {"k": None}),
    ]


def test_struct_fields_are_matched_by_name(spark: SparkSession, tmp_table: str):
    """A source that lists them in another order, narrower types included, changes nothing."""
    stream = ChangeStream(
        spark, tmp_table, "id int, lsn int, s struct<a:bigint,b:string>", keys="id", sequence_by="lsn"
    )
    stream.deliver((1, 1, (7, "x")))

    equal = stream.deliver((1, 1, ("x", 7)), schema="id int, lsn int, s struct<b:string,a:int>")
    stream.deliver((1, 2, ("y", 8)), schema="id int, lsn int, s struct<b:string,a:int>")

    assert ledger(equal) == {"received": 1, "unaffected": 1}
    assert stream.rows("s") == [((8, "y"),)]


def test_columns_that_the_source_does_not_have_are_left_to_the_table(stream: ChangeStream):
    """Kept on update; default or NULL on insert; generated columns are computed both times."""
    columns = "id bigint, note string, status string, name string, lsn bigint"
    create_generated(stream.spark, stream.target, columns, {"shout string": "upper(name)"})
    stream.sql("ALTER TABLE {target} SET TBLPROPERTIES ('delta.feature.allowColumnDefaults' = 'supported')")
    stream.sql("ALTER TABLE {target} ALTER COLUMN status SET DEFAULT 'new'")
    stream.sql("INSERT INTO {target} (id, note, status, name, lsn) VALUES (1, 'by hand', 'seen', 'old', 1)")

    result = stream.deliver(upsert(1, "new", lsn=2), upsert(2, "first", lsn=1))

    assert ledger(result) == {"received": 2, "updated": 1, "inserted": 1}
    assert stream.rows("id", "note", "status", "name", "shout") == [
        (1, "by hand", "seen", "new", "NEW"),
        (2, None, "new", "first", "FIRST"),
    ]


def test_an_upsert_moves_its_row_to_another_partition(spark: SparkSession, tmp_table: str):
    """One row, in the new partition: only keys are bounded, a delete may not even know the partition."""
    stream = ChangeStream(
        spark,
        tmp_table,
        "id int, lsn int, day date, op string",
        keys="id",
        sequence_by="lsn",
        partition_by="day",
        apply_as_deletes="op = 'd'",
        except_column_list=["op"],
    )
    stream.deliver_frame(spark.sql("SELECT id, 1 lsn, date'2026-01-01' day, 'u' op FROM VALUES 1, 2, 3 AS t(id)"))

    result = stream.deliver_frame(
        spark.sql(
            "SELECT * FROM VALUES (1, 2, date'2026-01-02', 'u'), (2, 2, CAST(NULL AS date), 'd'), (3, 2, NULL, 'u')"
            " AS t(id, lsn, day, op)"
        )
    )

    assert [(key, str(day)) for key, day in stream.rows("id", "day")] == [(1, "2026-01-02"), (3, "None")]
    assert ledger(result) == {"received": 3, "updated": 2, "deleted": 1}
    assert stream.sql("DESCRIBE DETAIL {target}").collect()[0]["partitionColumns"] == ["day"]


def test_rows_from_before_the_first_run_are_the_oldest(stream: ChangeStream):
    """An existing table gets the reserved column and the change feed; any event wins over its old rows."""
    stream.sql("CREATE TABLE {target} (id bigint, name string) USING delta")
    stream.sql("INSERT INTO {target} VALUES (1, 'before'), (2, 'before'), (3, 'before')")

    result = stream.deliver(upsert(1, "won", lsn=-9), delete(2, lsn=-9), except_column_list=["op", "lsn"])
    late = stream.deliver(upsert(1, "late", lsn=-10))

    assert stream.rows() == [(1, "won"), (3, "before")]
    assert ledger(result) == {"received": 2, "updated": 1, "deleted": 1}
    assert ledger(late) == {"received": 1, "unaffected": 1}
    assert dict(stream.sql("SELECT * FROM {target}").dtypes)["__stream_merge_sequence"] == "struct<c1:bigint>"
    assert properties(stream)["delta.enableChangeDataFeed"] == "true"
    assert properties(stream)["stream_merge.keys"] == '["id"]'


def test_rows_without_a_value_in_the_sequence_column_are_the_oldest_too(stream: ChangeStream):
    """The same holds where the sequence is a column of the table that nobody filled."""
    stream.sql("CREATE TABLE {target} (id bigint, lsn bigint, name string) USING delta")
    stream.sql("INSERT INTO {target} VALUES (1, NULL, 'before'), (2, NULL, 'before'), (3, 5, 'before')")

    result = stream.deliver(upsert(1, "won", lsn=-9), delete(2, lsn=-9), upsert(3, "late", lsn=4))

    assert stream.rows() == [(1, -9, "won"), (3, 5, "before")]
    assert ledger(result) == {"received": 3, "updated": 1, "deleted": 1, "unaffected": 1}


def test_the_change_feed_can_be_left_alone(spark: SparkSession, tmp_table: str):
    stream = ChangeStream(spark, tmp_table, change_data_feed=False)
    stream.deliver(upsert(1, "row", lsn=1))

    stream.deliver(upsert(1, "new", lsn=2))

    assert stream.rows() == [(1, 2, "new")]
    assert "delta.enableChangeDataFeed" not in properties(stream)


@pytest.mark.parametrize(
    ("selection", "stored"),
    [
        ({"column_list": ["c", "id", "a"]}, ["a", "id", "c", "__stream_merge_sequence"]),
        ({"except_column_list": ["b"]}, ["a", "lsn", "id", "c"]),
        ({"except_column_list": []}, ["a", "lsn", "id", "b", "c"]),
        ({}, ["a", "lsn", "id", "b", "c"]),
    ],
)
def test_stored_columns_keep_the_order_of_the_source(
    spark: SparkSession, tmp_table: str, selection: dict[str, Any], stored: list[str]
):
    """Whatever the order of the lists; a sequence that is not stored goes to the reserved column."""
    stream = ChangeStream(
        spark, tmp_table, "a int, lsn int, id int, b int, c int", keys="id", sequence_by="lsn", **selection
    )

    stream.deliver((1, 2, 3, 4, 5))

    assert spark.read.format("delta").load(tmp_table).columns == stored
    assert stream.rows("id", "a", "c") == [(3, 1, 5)]


NARROW = "id int, lsn int, s struct<a:int>, l array<struct<a:int>>"
WIDE = "id int, lsn int, s struct<b:string,a:int>, l array<struct<a:int,b:int>>, `new.col` map<string,int>, more int"


def test_new_columns_and_nested_fields_are_an_error_without_schema_evolution(spark: SparkSession, tmp_table: str):
    """Named one by one, never dropped silently; nothing is written."""
    stream = ChangeStream(spark, tmp_table, NARROW, keys="id", sequence_by="lsn")
    stream.deliver((1, 1, (1,), [(1,)]))
    before = stream.data_changes()

    with pytest.raises(ConfigError, match=r"\['s\.b', 'l\.element\.b', 'new\.col', 'more'\].*schema_evolution=True"):
        stream.deliver((1, 2, ("b", 2), [(2, 2)], {"k": 2}, 2), schema=WIDE)

    assert stream.data_changes() == before


@NEW_FIELDS
@pytest.mark.smoke
def test_schema_evolution_adds_new_columns_and_nested_fields(spark: SparkSession, tmp_table: str):
    """NULL in the rows that are there; an event equal but for the new columns is a change."""
    stream = ChangeStream(spark, tmp_table, NARROW, keys="id", sequence_by="lsn", schema_evolution=True)
    stream.deliver((1, 1, (1,), [(1,)]), (2, 1, (2,), None), (3, 1, None, []))

    result = stream.deliver(
        (1, 1, ("b", 1), [(1, 9)], {"k": 1}, 7), (4, 1, (None, 4), [(4, None)], None, None), schema=WIDE
    )

    assert ledger(result) == {"received": 2, "updated": 1, "inserted": 1}
    assert stream.rows() == [
        (1, 1, (1, "b"), [(1, 9)], {"k": 1}, 7),
        (2, 1, (2, None), None, None, None),
        (3, 1, None, [], None, None),
        (4, 1, (4, None), [(4, None)], None, None),
    ]


@pytest.mark.engines("auto")
def test_no_field_is_added_where_a_null_struct_would_become_one_of_nulls(
    spark: SparkSession, tmp_table: str, monkeypatch: pytest.MonkeyPatch
):
    """As Delta does it beside Spark 3.5, in rows that no event concerns, too; new columns are added as ever."""
    monkeypatch.setattr(layouts, "KEEPS_NULL_STRUCTS", False)
    stream = ChangeStream(spark, tmp_table, NARROW, keys="id", sequence_by="lsn", schema_evolution=True)
    stream.deliver((1, 1, (1,), [(1,)]), (2, 1, None, []))
    before = stream.data_changes()

    with pytest.raises(ConfigError, match=r"target's structs lack field\(s\) \['s\.b', 'l\.element\.b'\]"):
        stream.deliver((3, 1, ("b", 3), [(3, 9)], {"k": 1}, 7), schema=WIDE)
    assert stream.data_changes() == before

    stream.deliver((3, 1, (3,), [], 7), schema=f"{NARROW}, n int")
    assert stream.rows("id", "s", "l", "n") == [(1, (1,), [(1,)], None), (2, None, [], None), (3, (3,), [], 7)]


def test_schema_evolution_never_changes_a_type(spark: SparkSession, tmp_table: str):
    stream = ChangeStream(
        spark, tmp_table, "id int, lsn int, n int", keys="id", sequence_by="lsn", schema_evolution=True
    )
    stream.deliver((1, 1, 1))
    before = stream.data_changes()

    with pytest.raises(ConfigError, match=r"'n' of the target is too narrow \(n int -> bigint\)"):
        stream.deliver((1, 2, 2), schema="id int, lsn int, n bigint")

    assert stream.data_changes() == before


def test_a_hundred_columns_are_merged_like_three(spark: SparkSession, tmp_table: str):
    stream = ChangeStream(spark, tmp_table, "", keys="id", sequence_by="lsn", apply_as_deletes="false")

    def events(lsn: int, **changed: int) -> DataFrame:
        columns = {f"c{i}": F.lit(i) if i % 2 else F.lit(f"text {i}") for i in range(100)}
        columns |= {name: F.lit(value) for name, value in changed.items()}
        return spark.range(3).select("id", F.lit(lsn).alias("lsn"), *(v.alias(n) for n, v in columns.items()))

    stream.deliver_frame(events(1))
    equal = stream.deliver_frame(events(1))
    changed = stream.deliver_frame(events(1, c99=-1))

    assert ledger(equal) == {"received": 3, "unaffected": 3}
    assert ledger(changed) == {"received": 3, "updated": 3}
    assert stream.rows("id", "c0", "c98", "c99") == [(key, "text 0", "text 98", -1) for key in range(3)]


def test_an_empty_batch_commits_nothing(stream: ChangeStream):
    """Not even a table: it is made from the first batch that has events."""
    first = stream.deliver()
    made = stream.data_changes()
    stream.deliver(upsert(1, "row", lsn=1))
    before = stream.versions()

    empty = stream.deliver()

    assert [(r.outcome, r.version, r.attempts, ledger(r)) for r in (first, empty)] == [("empty", None, 0, {})] * 2
    assert made == {}
    assert stream.versions() == before
    assert stream.rows() == [(1, 1, "row")]


@pytest.mark.smoke
def test_a_batch_that_breaks_a_constraint_changes_nothing(stream: ChangeStream):
    """All or nothing: the good events of the batch are not merged either, and the batch can be tried again."""
    stream.deliver(upsert(1, "row", lsn=1), upsert(2, "row", lsn=1))
    stream.sql("ALTER TABLE {target} ADD CONSTRAINT short CHECK (length(name) < 6)")
    rows, versions = stream.rows(), stream.versions()["table"]

    for _ in "once", "and again":
        # Spark names the constraint, delta-rs alone does not; both name the row.
        with pytest.raises(
            MergeFailedError,
            match=r"merging batch 1 .* nothing was committed: .*(short .* values|validation check): .*name=too",
        ):
            stream.deliver(upsert(1, "new", lsn=2), delete(2, lsn=2), upsert(3, "too long", lsn=1))
        stream.batch_id = 0

    assert (stream.rows(), stream.versions()["table"]) == (rows, versions)
    result = stream.deliver(upsert(1, "new", lsn=2), delete(2, lsn=2), upsert(3, "short", lsn=1))
    assert ledger(result) == {"received": 3, "updated": 1, "deleted": 1, "inserted": 1}
    assert stream.rows() == [(1, 2, "new"), (3, 1, "short")]


def test_a_constraint_means_what_it_means_to_spark(stream: ChangeStream):
    """To DataFusion, which delta-rs would ask, 19 / 10 is 1: the row would pass."""
    stream.deliver(upsert(1, "row", lsn=1))
    stream.sql("ALTER TABLE {target} ADD CONSTRAINT few CHECK (lsn / 10 <= 1)")

    with pytest.raises((MergeFailedError, ConfigError), match="few"):
        stream.deliver(upsert(2, "new", lsn=19))

    assert stream.rows() == [(1, 1, "row")]


def test_a_source_that_fails_changes_nothing(stream: ChangeStream):
    """Its own error reaches the caller; nothing at all is written."""
    stream.deliver(upsert(1, "row", lsn=1))
    before = stream.versions()

    @F.udf("string", useArrow=False)
    def parsed(name: str) -> str:
        return {"row": "row"}[name]

    good = stream.spark.createDataFrame([upsert(1, "row", lsn=2), delete(2, lsn=2)], stream.schema)
    with pytest.raises(Exception, match="KeyError"):
        stream.deliver_frame(good.withColumn("name", parsed("name")))

    assert stream.versions() == before
    assert stream.rows() == [(1, 1, "row")]


def test_a_created_target_has_what_the_settings_say(spark: SparkSession, tmp_table: str):
    """Partitioning and properties of the user, and what the sink records with the table."""
    stream = ChangeStream(
        spark, tmp_table, partition_by=["name"], table_properties={"delta.logRetentionDuration": "interval 9 days"}
    )

    stream.deliver(upsert(1, "a", lsn=1))

    found = properties(stream)
    assert found["delta.logRetentionDuration"] == "interval 9 days"
    assert found["stream_merge.sequence"] == '{"columns": ["lsn"]}'
    assert (on_disk(tmp_table) / "name=a").is_dir()


def test_a_padded_key_finds_its_row_in_a_file_that_holds_it_without_padding(spark: SparkSession, tmp_table: str):
    """Spark pads char(n) when it reads; a file's statistics are what another writer has put there."""
    spark.sql(f"CREATE TABLE delta.`{tmp_table}` (id char(3), lsn bigint) USING delta")
    spark.sql(f"INSERT INTO delta.`{tmp_table}` VALUES ('a', 1), ('b', 1)")
    assert '\\"minValues\\":{\\"id\\":\\"a\\"' in (on_disk(tmp_table) / "_delta_log" / f"{1:020}.json").read_text()
    stream = ChangeStream(spark, tmp_table, "id string, lsn bigint", keys=["id"], sequence_by="lsn")

    result = stream.deliver(("a", 7), ("b", 8), ("c", 9))

    assert stream.rows() == [("a  ", 7), ("b  ", 8), ("c  ", 9)]
    assert ledger(result) == {"received": 3, "inserted": 1, "updated": 2}
