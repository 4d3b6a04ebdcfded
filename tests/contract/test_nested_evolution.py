"""Structs that grow, and events in the narrower struct of before: at the top, in arrays and in maps."""

from __future__ import annotations

from typing import Any

import pytest
from deliveries import ChangeStream, ledger
from pyspark.sql import SparkSession
from since import NEW_FIELDS, before

from stream_merge import ConfigError
from stream_merge.model.names import SEQUENCE_COLUMN
from stream_merge.model.settings import MergeSpec
from stream_merge.shapes.layouts import plan_layout
from stream_merge.spark.versions import from_ddl

NARROW = "id bigint, lsn bigint, s struct<a:int>, l array<struct<a:int>>"
WIDE = "id bigint, lsn bigint, s struct<a:int,b:string>, l array<struct<a:int,b:string>>"
MAPS = (", m map<string,struct<a:int>>", ", m map<string,struct<a:int,b:string>>")


def stream_of(spark: SparkSession, target: str, schema: str, **settings: Any) -> ChangeStream:
    return ChangeStream(spark, target, schema, keys="id", sequence_by="lsn", **settings)


@NEW_FIELDS
@pytest.mark.parametrize("engine", ["auto", "spark"])
@pytest.mark.parametrize("evolution", [True, "widen"])
def test_a_new_field_in_a_struct_an_array_and_a_map_is_null_in_what_was_there(
    spark: SparkSession, tmp_table: str, engine: str, evolution: Any
):
    """A struct that is NULL stays so, at the top, in an array and in a map."""
    narrow, wide = NARROW + MAPS[0], WIDE + MAPS[1]
    stream = stream_of(spark, tmp_table, narrow, engine=engine, schema_evolution=evolution)
    stream.deliver(
        (1, 1, (1,), [(1,)], {"k": (1,)}),
        (2, 1, None, None, None),
        (3, 1, (None,), [None, (3,)], {"k": None, "l": (3,)}),
    )

    result = stream.deliver(
        (1, 2, (1, "x"), [(1, "y"), None], {"k": (1, "z"), "n": None}),
        (4, 1, None, [], {}),
        schema=wide,
    )
    unset = stream.deliver((1, 3, None, [None], {"k": None}), schema=wide)

    assert (ledger(result), ledger(unset)) == (
        {"received": 2, "updated": 1, "inserted": 1},
        {"received": 1, "updated": 1},
    )
    assert stream.rows() == [
        (1, 3, None, [None], {"k": None}),
        (2, 1, None, None, None),
        (3, 1, (None, None), [None, (3, None)], {"k": None, "l": (3, None)}),
        (4, 1, None, [], {}),
    ]
    assert ("update_preimage", 1, 2, (1, "x"), [(1, "y"), None], {"k": (1, "z"), "n": None}) in stream.changes()


@pytest.mark.smoke
@before((4, 0), "NULL structs that stay NULL when a MERGE adds a field to them")
@pytest.mark.parametrize("engine", ["auto", "spark", "driver"])
def test_new_fields_that_delta_would_spoil_structs_for_are_an_error(spark: SparkSession, tmp_table: str, engine: str):
    """Nothing is written; added by `ALTER TABLE`, they are merged, and a NULL struct stays one."""
    stream = stream_of(spark, tmp_table, NARROW, engine=engine, schema_evolution=True)
    stream.deliver((1, 1, (1,), [(1,)]), (2, 1, None, [None]))
    before = stream.versions()

    with pytest.raises(ConfigError, match=r"structs lack field\(s\) .*'l\.element\.b'\], which .* on Spark 3\.5"):
        stream.deliver((1, 2, (1, "x"), [(1, "y")]), schema=WIDE)
    assert stream.versions() == before
    stream.sql("ALTER TABLE {target} ADD COLUMNS (s.b string, l.element.b string)")
    stream.batch_id = 0
    stream.deliver((1, 2, (1, "x"), [(1, "y")]), schema=WIDE)

    assert stream.rows() == [(1, 2, (1, "x"), [(1, "y")]), (2, 1, None, [None])]


def test_fields_that_differ_in_case_alone_are_refused(spark: SparkSession, tmp_table: str):
    """Else the last of them would be stored in the place of the others."""
    twins = "id bigint, lsn bigint, s struct<a:int,A:int>, l array<struct<x:int,X:int>>"
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        with pytest.raises(ConfigError) as raised:
            stream_of(spark, tmp_table, twins).deliver((1, 1, (1, 2), [(3, 4)]))
    finally:
        spark.conf.unset("spark.sql.caseSensitive")
    said = "differ from fields next to them only in case, which Delta does not allow; rename them"
    named = (f"[INVALID_COLUMN_NAME] field(s) {names} {said}" for names in (["s.A"], ["l.element.X"]))
    assert list(raised.value.problems) == [*named]


@NEW_FIELDS
def test_delta_rs_goes_on_when_spark_has_added_nested_fields(spark: SparkSession, tmp_table: str):
    """Only the batch that brings them is Spark's."""
    stream = stream_of(spark, tmp_table, NARROW, engine="driver", schema_evolution=True)
    stream.deliver((1, 1, (1,), [(1,)]), (2, 1, None, [None]))
    before = stream.versions()

    with pytest.raises(
        ConfigError, match=r"column\(s\) \['s\.b', 'l\.element\.b'\] are new or wider; use engine='auto' or"
    ):
        stream.deliver((1, 2, (1, "x"), [(1, "y")]), schema=WIDE)
    assert stream.versions() == before
    stream.batch_id = 0
    stream.deliver((1, 2, (1, "x"), [(1, "y")]), schema=WIDE, engine="auto")
    result = stream.deliver((2, 2, (2, None), [None, (2, "y")]), (3, 1, None, None), schema=WIDE, engine="driver")

    assert (result.engine, ledger(result)) == ("driver", {"received": 2, "updated": 1, "inserted": 1})
    assert stream.rows() == [
        (1, 2, (1, "x"), [(1, "y")]),
        (2, 2, (2, None), [None, (2, "y")]),
        (3, 1, None, None),
    ]


NESTED = "id bigint, lsn bigint, s struct<a:int,b:string,n:struct<x:int,y:int>>"
OLDER = "id bigint, lsn bigint, s struct<n:struct<X:int>,a:int>"


@pytest.mark.parametrize(
    ("engine", "evolution"), [("auto", True), ("auto", False), ("spark", True), ("spark", "widen")]
)
def test_events_in_an_older_narrower_struct_leave_the_other_fields_alone(
    spark: SparkSession, tmp_table: str, engine: str, evolution: Any
):
    """As columns that the source does not have: kept on update, NULL on insert; a NULL struct is a value."""
    stream = stream_of(spark, tmp_table, NESTED, engine=engine, schema_evolution=evolution)
    stream.deliver(
        (1, 1, (1, "one", (1, 10))),
        (2, 1, (2, "two", None)),
        (3, 1, None),
        (4, 1, (4, "four", (4, 40))),
        (5, 1, (5, "five", (5, 50))),
    )
    narrow = [
        (1, 2, ((8,), 7)),
        (2, 2, ((9,), 2)),
        (3, 2, (None, 3)),
        (4, 2, None),
        (5, 2, (None, 5)),
        (6, 1, ((6,), 6)),
    ]

    result = stream.deliver(*narrow, schema=OLDER)
    again = stream.deliver(*narrow, schema=OLDER)

    assert ledger(result) == {"received": 6, "updated": 5, "inserted": 1}
    assert (again.outcome, result.engine, result.refusal) == (
        "no_change",
        "spark",
        None if engine == "spark" else "column",
    )
    assert stream.rows() == [
        (1, 2, (7, "one", (8, 10))),
        (2, 2, (2, "two", (9, None))),
        (3, 2, (3, None, None)),
        (4, 2, None),
        (5, 2, (5, "five", None)),
        (6, 1, (6, None, (6, None))),
    ]
    assert ("update_postimage", 1, 2, (7, "one", (8, 10))) in stream.changes()


@NEW_FIELDS
def test_a_struct_may_lack_one_field_and_bring_another(spark: SparkSession, tmp_table: str):
    """In another type, too, that is wider than the stored one."""
    first = "id bigint, lsn bigint, s struct<a:int,b:string>"
    stream = stream_of(spark, tmp_table, first, schema_evolution="widen")
    stream.deliver((1, 1, (1, "one")), (2, 1, None))

    second = "id bigint, lsn bigint, s struct<a:bigint,c:boolean>"
    stream.deliver((1, 2, (2**40, True)), (2, 2, (None, None)), (3, 1, (3, False)), schema=second)

    assert stream.rows() == [(1, 2, (2**40, "one", True)), (2, 2, (None, None, None)), (3, 1, (3, None, False))]


def test_delta_rs_has_no_part_in_structs_that_lack_fields(spark: SparkSession, tmp_table: str):
    stream = stream_of(spark, tmp_table, "id bigint, lsn bigint, s struct<a:int,b:int>", engine="driver")
    stream.deliver((1, 1, (1, 1)))
    before = stream.versions()

    with pytest.raises(
        ConfigError, match=r"column 's' of the events lacks fields of the target's, .* only Spark keeps"
    ):
        stream.deliver((1, 2, (2,)), schema="id bigint, lsn bigint, s struct<a:int>")

    assert stream.versions() == before


PAIR, ONE = "struct<a:int,b:int>", "struct<a:int>"
SENTENCE = "[TYPE_MISMATCH] column {!r} of the source lacks field(s) ['b'] of the target; add them (NULL where unknown)"


@pytest.mark.parametrize("evolution", [False, True, "widen"])
@pytest.mark.parametrize(
    ("template", "place", "settings"),
    [
        ("array<{}>", "v.element", {}),
        ("map<int,{}>", "v.value", {}),
        ("struct<l:array<{}>>", "v.l.element", {}),
        ("{}", "v", {"keys": ("id", "v")}),
        ("{}", "v", {"sequence_by": ("v",)}),
        ("{}", "sequence component 1 (v)", {"sequence_by": ("v",), "except_column_list": ("v",)}),
    ],
    ids=["array", "map", "array in a struct", "key", "sequence", "sequence apart"],
)
def test_a_narrower_struct_is_refused_where_no_row_says_what_to_keep(
    spark: SparkSession, template: str, place: str, settings: dict[str, Any], evolution: Any
):
    """Nobody knows of which element of an array; keys and sequences are compared as a whole."""
    stored, narrower = template.format(PAIR), template.format(ONE)
    source = spark.createDataFrame([], f"id bigint, lsn bigint, v {narrower}")
    apart = f", {SEQUENCE_COLUMN} struct<c1:{stored}>" if "except_column_list" in settings else f", v {stored}"
    target = from_ddl(f"id bigint, lsn bigint{apart}")
    plain = {"target": "shop.orders", "keys": ("id",), "sequence_by": ("lsn",), "schema_evolution": evolution}

    with pytest.raises(ConfigError) as caught:
        plan_layout(source, MergeSpec(**plain | settings), target)

    assert caught.value.problems == (SENTENCE.format(place),)
