"""Types that grow: what `schema_evolution="widen"` changes, what it costs, and what keeps up with it."""

from __future__ import annotations

import logging
from decimal import Decimal
from typing import Any

import pytest
from deliveries import COPY_ON_WRITE, ChangeStream, delete, ledger, upsert
from generated import create_generated
from grouped import sink_with
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession
from pyspark.sql import types as T
from since import since

from stream_merge import ConfigError
from stream_merge.model.names import TOMBSTONE_TABLE_PREFIX
from stream_merge.model.table_ref import TableRef
from stream_merge.shapes.widening import PROPERTY, TypeChange, obstacles, statements, wider, widest
from stream_merge.spark import columns
from stream_merge.spark.versions import from_ddl
from stream_merge.tables import create_table, spark_table
from stream_merge.testing import batch, run

pytestmark = since((4, 0), "types wider than int; tests/unit/test_widening_by_version.py has the others")


@pytest.mark.parametrize(
    ("stored", "source", "found"),
    [
        ("tinyint", "smallint", "smallint"),
        ("smallint", "bigint", "bigint"),
        ("int", "tinyint", "int"),
        ("float", "double", "double"),
        ("int", "double", "double"),
        ("smallint", "float", "double"),
        ("float", "int", "double"),
        ("bigint", "double", None),
        ("double", "bigint", None),
        ("smallint", "decimal(4,2)", "decimal(12,2)"),
        ("bigint", "decimal(3,1)", "decimal(21,1)"),
        ("decimal(10,2)", "decimal(12,4)", "decimal(12,4)"),
        ("decimal(10,2)", "decimal(9,4)", "decimal(12,4)"),
        ("decimal(10,2)", "bigint", "decimal(22,2)"),
        ("decimal(38,20)", "decimal(38,0)", None),
        ("decimal(10,2)", "double", None),
        ("int", "string", None),
        ("date", "timestamp_ntz", None),
        ("struct<a:int,b:int>", "struct<B:bigint>", "struct<a:int,b:bigint>"),
        (
            "map<int,array<struct<x:float>>>",
            "map<bigint,array<struct<x:double>>>",
            "map<bigint,array<struct<x:double>>>",
        ),
        ("array<int>", "array<string>", None),
    ],
)
def test_a_type_is_widened_to_the_least_that_delta_can_make_of_it_and_that_is_exact(
    spark: SparkSession, stored: str, source: str, found: str | None
):
    """A double for an integer of 64 bits, or text for a number, would be another value."""
    wanted = None if found is None else from_ddl(found)

    assert wider(from_ddl(source), from_ddl(stored)) == wanted


NARROW = (
    "id bigint, lsn bigint, a tinyint, b int, c float, d decimal(10,2), e int, `odd.name` smallint,"
    " s struct<x:int,l:array<struct<y:int>>>, m map<int,float>"
)
WIDE = (
    "id bigint, lsn bigint, a smallint, b bigint, c double, d decimal(14,4), e double, `odd.name` int,"
    " s struct<x:bigint,l:array<struct<y:bigint,z:string>>>, m map<bigint,double>"
)


def test_all_types_grow_before_the_batch_that_needs_it(
    spark: SparkSession, tmp_table: str, caplog: pytest.LogCaptureFixture
):
    """At the top and inside, together with a new field; rows of before keep their values; narrow events go on."""
    stream = ChangeStream(
        spark, tmp_table, NARROW, keys="id", sequence_by="lsn", schema_evolution="widen", app_id="widening"
    )
    old = (1, 1, 127, 2**31 - 1, 0.5, Decimal("1.25"), 7, 8, (9, [(10,)]), {11: 0.25})
    stream.deliver(old, (2, 1, *old[2:]))
    wide = (2, 2, 128, 2**31, 0.1, Decimal("1.2345"), 0.5, 2**15, (2**40, [(2**41, "z")]), {2**42: 0.3})

    result = stream.deliver(wide, schema=WIDE)
    later = (3, 1, *old[2:8], (9, [(10, None)]), old[9])
    again = stream.deliver(later, schema=NARROW.replace("y:int", "y:int,z:string"))

    assert ledger(result) == {"received": 1, "updated": 1}
    assert ledger(again) == {"received": 1, "inserted": 1}
    kept = (127, 2**31 - 1, 0.5, Decimal("1.2500"), 7.0, 8, (9, [(10, None)]), {11: 0.25})
    assert stream.rows() == [(1, 1, *kept), wide, (3, 1, *kept)]
    types = {f.name: f.dataType.simpleString() for f in spark.read.format("delta").load(tmp_table).schema.fields}
    assert types == {f.name: f.dataType.simpleString() for f in from_ddl(WIDE).fields}
    said = [record for record in caplog.records if record.msg.startswith("type_widening_enabled")]
    assert [(record.levelno, record.cost) for record in said] == [
        (
            logging.WARNING,
            "delta-rs and polars cannot read a table with type widening, until ALTER TABLE … DROP FEATURE typeWidening"
            " rewrites it; the driver goes on merging it",
        )
    ]


def test_without_widen_the_error_has_the_commands_that_help(spark: SparkSession, tmp_table: str):
    """Nothing is written until somebody runs them."""
    stream = ChangeStream(
        spark, tmp_table, "id int, lsn int, s struct<n:int>", keys="id", sequence_by="lsn", schema_evolution=True
    )
    stream.deliver((1, 1, (1,)))
    before = stream.data_changes()

    with pytest.raises(ConfigError) as caught:
        stream.deliver((1, 2, (2**40,)), schema="id int, lsn int, s struct<n:bigint>")

    (problem,) = caught.value.problems
    table = TableRef(tmp_table).sql
    commands = [
        f"ALTER TABLE {table} SET TBLPROPERTIES ('delta.enableTypeWidening' = 'true')",
        f"ALTER TABLE {table} ALTER COLUMN `s`.`n` TYPE bigint",
    ]
    assert problem == (
        "[TYPE_TOO_NARROW] column 's' of the target is too narrow (s.n int -> bigint); cast it in the stream, set"
        f" schema_evolution='widen', or run {'; '.join(commands)} (delta-rs and polars then cannot read the table)"
    )
    assert stream.data_changes() == before
    for command in commands:
        spark.sql(command)
    stream.batch_id = 0
    stream.deliver((1, 2, (2**40,)), schema="id int, lsn int, s struct<n:bigint>")
    assert stream.rows() == [(1, 2, (2**40,))]


def test_a_column_of_a_constraint_is_refused_before_type_widening_is_switched_on(spark: SparkSession, tmp_table: str):
    """Delta would say so only when delta-rs has been lost already."""
    stream = ChangeStream(
        spark, tmp_table, "id int, lsn int, n int", keys="id", sequence_by="lsn", schema_evolution="widen"
    )
    stream.deliver((1, 1, 1))
    stream.sql("ALTER TABLE {target} ADD CONSTRAINT positive CHECK (N > 0)")
    before = stream.versions()

    with pytest.raises(ConfigError, match=r"'n' cannot be widened while the CHECK constraint 'positive' uses it; drop"):
        stream.deliver((1, 2, 2), schema="id int, lsn int, n bigint")

    assert stream.versions() == before


@pytest.mark.parametrize(
    ("check", "refused"),
    [
        ("label <> 'n'", set()),
        ("s.n > 0", {"s.n"}),
        ("s.other > 0", set()),
        ("s IS NOT NULL", {"s.n"}),
        ("`odd``name` > 0", {"odd`name"}),
        ("`n` > 0 AND `S`.`N` > 0", {"n", "s.n"}),
        ("array_contains(l, 7)", {"l.element"}),
        ("l[0] > N", {"n", "l.element"}),
    ],
)
def test_a_constraint_stands_in_the_way_of_what_it_reads_and_of_nothing_else(
    spark: SparkSession, tmp_table: str, check: str, refused: set[str]
):
    """As Delta has it, which is asked, too: not each word of that name, and names in backticks as well."""
    schema = from_ddl("n int, `odd``name` int, label string, l array<int>, s struct<n: int, other: bigint>")
    wanted = [
        TypeChange(path=path, before=T.IntegerType(), after=T.LongType())
        for path in (("n",), ("odd`name",), ("l", "element"), ("s", "n"))
    ]
    properties = {PROPERTY: "true", "delta.columnMapping.mode": "name"}
    create_table.create(spark, TableRef(tmp_table), schema.fields, properties=properties)
    spark.sql(f"ALTER TABLE delta.`{tmp_table}` ADD CONSTRAINT some CHECK ({check})")
    by_delta = set()
    for change in wanted:
        (statement,) = statements(TableRef(tmp_table), [change], properties)
        try:
            spark.sql(statement)
        except AnalysisException as err:
            by_delta.add((".".join(change.path), err.getCondition()))

    said = " ".join(obstacles(wanted, schema, {"delta.constraints.some": check}, spark))

    assert by_delta == {(name, "DELTA_CONSTRAINT_DEPENDENT_COLUMN_CHANGE") for name in refused}
    assert {".".join(change.path) for change in wanted if repr(".".join(change.path)) in said} == refused


def test_a_generated_column_stands_in_the_way_of_what_it_is_made_of(spark: SparkSession, tmp_table: str):
    create_generated(spark, tmp_table, "n int, m int", {"g string": "concat('m', cast(n AS string))"})
    schema = spark_table.find(spark, TableRef(tmp_table)).schema
    wanted = [TypeChange(path=(name,), before=T.IntegerType(), after=T.LongType()) for name in ("n", "m")]

    (said,) = obstacles(wanted, schema, {}, spark)

    assert said.startswith(
        "[COLUMN_NOT_WIDENABLE] column 'n' cannot be widened while the generated column 'g' uses it; drop that"
    )


def test_the_widest_struct_has_the_fields_of_the_second_one():
    one, other = from_ddl("struct<a:bigint,b:int>"), from_ddl("struct<a:int,c:int>")

    assert widest(one, other) == from_ddl("struct<a:bigint,c:int>")
    assert columns.merged(one, widest(one, other)) == from_ddl("struct<a:bigint,c:int,b:int>")


def test_the_driver_alone_is_no_engine_for_wider_types(spark: SparkSession, tmp_table: str):
    stream = ChangeStream(
        spark, tmp_table, "id int, lsn int, n int", keys="id", sequence_by="lsn", schema_evolution="widen"
    )
    stream.deliver((1, 1, 1))
    before = stream.versions()

    with pytest.raises(ConfigError, match=r"engine='driver' cannot merge .*'n int -> bigint'.* are new or wider"):
        stream.deliver((1, 2, 2), schema="id int, lsn int, n bigint", engine="driver")

    assert stream.versions() == before


def test_two_writers_that_widen_at_once_both_go_on(spark: SparkSession, log_faults: Any, faulty_table: str):
    """Who loses looks again, and finds it done."""
    stream = ChangeStream(
        spark, faulty_table, "id int, lsn int, n int", keys="id", sequence_by="lsn", schema_evolution="widen"
    )
    run(stream.sink(), batch(spark, stream.schema, (1, 1, 1)), 0)
    wide = "id int, lsn int, n bigint"
    other = sink_with(**{**stream.settings, "app_id": "other"})

    log_faults.overtake(
        "/table/_delta_log",
        lambda: run(stream.sink(), batch(spark, wide, (2, 1, 2**40)), 1),
        lambda: run(other, batch(spark, wide, (3, 1, 2**41)), 0),
    )

    assert stream.rows() == [(1, 1, 1), (2, 1, 2**40), (3, 1, 2**41)]


# -- remembered deletes -------------------------------------------------------------------------


KEYED = "id int, lsn int, op string, name string"
WIDE_KEYED = "id bigint, lsn bigint, op string, name string"
FAR = 2**40


@pytest.mark.parametrize(
    ("engine", "by", "stored"),
    [
        ("auto", "the sink", True),
        ("auto", "somebody", False),
        ("spark", "the sink", False),
        ("spark", "somebody", True),
    ],
)
def test_deletes_are_remembered_beyond_the_old_type_of_key_and_sequence(
    spark: SparkSession, tmp_table: str, engine: Any, by: str, stored: bool
):
    """Those of before count on, those of the wide keys too, and the log stays a plain table that delta-rs can write."""
    stream = ChangeStream(
        spark,
        tmp_table,
        KEYED,
        keys="id",
        sequence_by="lsn",
        apply_as_deletes="op = 'd'",
        except_column_list=["op"] if stored else ["op", "lsn"],
        engine=engine,
        schema_evolution="widen" if by == "the sink" else False,
        table_properties=COPY_ON_WRITE,
    )
    stream.deliver(upsert(1, "one", lsn=1), upsert(2, "two", lsn=1))
    stream.deliver(delete(1, lsn=5))
    if by == "somebody":
        sequence = "lsn" if stored else "__stream_merge_sequence.c1"
        stream.sql("ALTER TABLE {target} SET TBLPROPERTIES ('delta.enableTypeWidening' = 'true')")
        stream.sql(f"ALTER TABLE {{target}} ALTER COLUMN id TYPE bigint, {sequence} TYPE bigint")

    late = stream.deliver(
        upsert(1, "ghost", lsn=4), upsert(FAR, "far", lsn=FAR), upsert(2, "two", lsn=FAR), schema=WIDE_KEYED
    )
    gone = stream.deliver(delete(FAR, lsn=FAR + 1), delete(2, lsn=FAR + 1), schema=WIDE_KEYED)
    ghosts = stream.deliver(
        upsert(FAR, "ghost", lsn=FAR), upsert(1, "ghost", lsn=4), upsert(2, "back", lsn=FAR + 2), schema=WIDE_KEYED
    )

    decided = {"auto, the sink": ("spark", "schema_change"), "auto, somebody": ("driver", None)}
    assert (late.engine, late.refusal) == decided.get(f"{engine}, {by}", ("spark", None))
    assert ledger(late) == {"received": 3, "stale": 1, "inserted": 1, "updated": 1}
    assert ledger(gone) == {"received": 2, "deleted": 2}
    assert ledger(ghosts) == {"received": 3, "stale": 2, "inserted": 1}
    assert stream.rows("id", "name") == [(2, "back")]
    log = stream.side_table(TOMBSTONE_TABLE_PREFIX)
    assert dict(log.dtypes)["id"] == "bigint"
    assert dict(log.dtypes)["__stream_merge_sequence"] == "struct<c1:bigint>"
    identifier = TableRef(tmp_table).tombstones.sql
    assert "delta.enableTypeWidening" not in {
        row["key"] for row in spark.sql(f"SHOW TBLPROPERTIES {identifier}").collect()
    }


def test_a_delete_that_is_remembered_while_the_log_is_widened_is_not_lost(
    spark: SparkSession, log_faults: Any, faulty_table: str
):
    """The log is written again as it is at the commit: of what came meanwhile nothing is overwritten."""
    stream = ChangeStream(
        spark, faulty_table, KEYED, keys="id", sequence_by="lsn", apply_as_deletes="op = 'd'", except_column_list=["op"]
    )
    events = batch(spark, KEYED, upsert(1, "one", lsn=1), upsert(2, "two", lsn=1), delete(3, lsn=1))
    run(stream.sink(), events, 0)
    stream.sql("ALTER TABLE {target} SET TBLPROPERTIES ('delta.enableTypeWidening' = 'true')")
    stream.sql("ALTER TABLE {target} ALTER COLUMN id TYPE bigint")
    log = TableRef(faulty_table).tombstones.sql
    entry = f"INSERT INTO {log} SELECT 2, named_struct('c1', 9), false, current_timestamp()"

    log_faults.overtake(
        f"{TOMBSTONE_TABLE_PREFIX}table/_delta_log",
        lambda: run(stream.sink(), batch(spark, WIDE_KEYED.replace("lsn bigint", "lsn int"), delete(FAR, lsn=2)), 1),
        lambda: spark.newSession().sql(entry),
    )

    remembered = spark.table(log).selectExpr("id", "__stream_merge_sequence.c1").collect()
    assert sorted(map(tuple, remembered)) == [(2, 9), (3, 1), (FAR, 2)]
    assert stream.rows("id") == [(1,), (2,)]


# -- what was renamed or dropped ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "settings", "problem"),
    [
        (
            "RENAME COLUMN id TO order_id",
            {},
            "[COLUMN_DROPPED] target {target!r} has no column 'id', which is a key; perhaps it was renamed to one of"
            " ['order_id']; rename it back (ALTER TABLE {table} RENAME COLUMN … TO `id`)",
        ),
        (
            "DROP COLUMN lsn",
            {},
            "[COLUMN_DROPPED] target {target!r} has no column 'lsn', which is the sequence (sequence_by); it was"
            " dropped; rename it back (ALTER TABLE {table} RENAME COLUMN … TO `lsn`), or, if all its rows may count as"
            " the oldest, add it: ALTER TABLE {table} ADD COLUMN `lsn` bigint",
        ),
        (
            "DROP COLUMN __stream_merge_sequence",
            {"except_column_list": ["op", "lsn"]},
            "[COLUMN_DROPPED] target {target!r} has no column '__stream_merge_sequence', and sequence_by is not stored;"
            " rename it back (ALTER TABLE {table} RENAME COLUMN … TO `__stream_merge_sequence`), store sequence_by"
            " again or, if all rows may count as the oldest: ALTER TABLE {table} UNSET TBLPROPERTIES"
            " ('stream_merge.sequence')",
        ),
    ],
    ids=["key", "sequence", "reserved sequence"],
)
def test_a_key_or_sequence_that_somebody_renamed_or_dropped_is_named_before_anything_is_written(
    spark: SparkSession, tmp_table: str, change: str, settings: dict[str, Any], problem: str
):
    """Added anew it would be NULL in all rows: each would be inserted again, or lose against any old event."""
    properties = {"delta.columnMapping.mode": "name"}
    stream = ChangeStream(spark, tmp_table, table_properties=properties, **settings)
    run(stream.sink(), batch(spark, stream.schema, upsert(1, "one", lsn=1)), 0)
    stream.sql(f"ALTER TABLE {{target}} {change}")
    before, events = stream.versions(), batch(spark, stream.schema, upsert(1, "two", lsn=2))

    for evolution in (True, False, "widen"):
        stream.settings["schema_evolution"] = evolution
        with pytest.raises(ConfigError) as caught:
            run(stream.sink(), events, 1)

        assert caught.value.problems == (problem.format(target=tmp_table, table=TableRef(tmp_table).sql),)
    assert stream.versions() == before


def test_a_new_field_of_a_key_is_named_until_it_is_added_and_the_remembered_deletes_follow(
    spark: SparkSession, tmp_table: str
):
    """Rows and remembered deletes of before have NULL there."""
    narrow, wide = "k struct<a:int>, lsn int, op string", "k struct<a:int,b:int>, lsn int, op string"
    stream = ChangeStream(
        spark,
        tmp_table,
        narrow,
        keys="k",
        sequence_by="lsn",
        apply_as_deletes="op = 'd'",
        except_column_list=["op"],
        schema_evolution=True,
    )
    run(stream.sink(), batch(spark, narrow, ((1,), 1, "u"), ((2,), 5, "d")), 0)
    events = batch(spark, wide, ((1, None), 2, "u"), ((1, 1), 2, "u"), ((2, None), 4, "u"), ((3, 3), 4, "d"))
    before = stream.versions()

    with pytest.raises(ConfigError, match=r"'k' of target .* is a key, lacks field\(s\) \['k\.b'\]; .* ADD COLUMN"):
        run(stream.sink(), events, 1)

    assert stream.versions() == before
    stream.sql("ALTER TABLE {target} ADD COLUMN k.b int")
    result = run(stream.sink(), events, 1)
    assert ledger(result) == {"received": 4, "stale": 1, "updated": 1, "inserted": 1, "unaffected": 1}
    assert stream.rows() == [((1, 1), 2), ((1, None), 2)]
