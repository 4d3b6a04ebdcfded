"""Values of clauses that are of another type than their columns: refused exactly where Delta has no cast for them.

Needs a JVM: Delta analyses the same MERGE, and Spark says which casts there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from deliveries import ChangeStream, ledger
from disk import on_disk
from pyspark.sql import SparkSession
from since import STRUCT_CASTS, before

from stream_merge import ConfigError, MergeSink
from stream_merge.shapes import Clauses, when_matched, when_not_matched, when_not_matched_by_source
from stream_merge.spark import casts
from stream_merge.spark.versions import SPARK, from_ddl
from stream_merge.testing import batch, run

COLUMNS: Mapping[str, str] = {
    "i": "int",
    "bo": "boolean",
    "ts": "timestamp",
    "l": "array<int>",
    "st": "struct<a:int,b:string>",
    "deep": "struct<a:int,inner:struct<x:int,y:int>>",
    "ls": "array<struct<a:int,b:string>>",
    "ll": "array<array<int>>",
    "m": "map<string,int>",
    "ms": "map<string,struct<a:int,b:string>>",
    "mk": "map<struct<a:int>,int>",
}
VALUES: Sequence[tuple[str, str]] = (
    ("i", "2L"),
    ("i", "'7'"),
    ("i", "1.5"),
    ("i", "true"),
    ("i", "current_date()"),
    ("bo", "1"),
    ("ts", "true"),
    ("ts", "1"),
    ("l", "array(1L)"),
    ("l", "array('7')"),
    ("l", "array(current_date())"),
    ("l", "array(array(1))"),
    ("l", "null"),
    ("st", "named_struct('B', 'x', 'a', 1L)"),
    ("st", "named_struct('a', 1)"),
    ("st", "named_struct('a', 1, 'b', 'x', 'c', 1)"),
    ("st", "named_struct('a', 1, 'c', 'x')"),
    ("st", "named_struct('a', current_date(), 'b', 'x')"),
    ("st", "named_struct('a', null, 'b', null)"),
    ("deep", "named_struct('inner', named_struct('y', 1, 'x', '2'), 'a', 1)"),
    ("deep", "named_struct('a', 1, 'inner', named_struct('x', 1))"),
    ("deep", "named_struct('a', 1, 'inner', 5)"),
    ("ls", "array(named_struct('b', 'x', 'a', 1))"),
    ("ls", "array(named_struct('a', 1))"),
    ("ls", "array(named_struct('a', 1, 'b', array(1)))"),
    ("ls", "array(1)"),
    ("ll", "array(array(1L))"),
    ("ll", "array(array(current_date()))"),
    ("m", "map('k', 1L)"),
    ("m", "map(1, 1)"),
    ("m", "map('k', current_date())"),
    ("ms", "map('k', named_struct('b', 'x', 'a', 1))"),
    ("ms", "map('k', named_struct('a', 1))"),
    ("ms", "map('k', 1)"),
    ("mk", "map(named_struct('a', 1L), 1)"),
    ("mk", "map(named_struct('z', 1), 1)"),
)


@pytest.fixture(scope="module")
def table(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A table of Delta's with all the columns."""
    path = str(tmp_path_factory.mktemp("values") / "table")
    listed = ", ".join(f"{name} {dtype}" for name, dtype in COLUMNS.items())
    spark.sql(f"CREATE TABLE delta.`{path}` (id bigint, {listed}) USING delta")
    return path


HAS_STRUCTS = ("st", "deep", "ls", "ms", "mk")


@pytest.mark.parametrize(("policy", "evolves"), [("ANSI", False), ("ANSI", True), ("STRICT", False), ("LEGACY", False)])
def test_delta_casts_what_is_no_obstacle_and_nothing_else(spark: SparkSession, table: str, policy: str, evolves: bool):
    """Delta is asked by EXPLAIN: it analyses the MERGE and runs nothing. Only structs care for schema evolution."""
    if evolves and SPARK < (4, 0):
        pytest.skip("SQL of Spark 3.5 has no MERGE WITH SCHEMA EVOLUTION")
    words = "WITH SCHEMA EVOLUTION " if evolves else ""
    ours, theirs = {}, {}
    spark.conf.set("spark.sql.storeAssignmentPolicy", policy)
    try:
        for column, value in VALUES:
            if (column in HAS_STRUCTS) is (policy != "ANSI") or (evolves and column not in HAS_STRUCTS):
                continue
            held = spark.sql(f"SELECT {value} AS value").schema["value"].dataType
            obstacle = casts.obstacle(spark, held, from_ddl(COLUMNS[column]), evolves=evolves)
            plan = spark.sql(
                f"EXPLAIN MERGE {words}INTO delta.`{table}` AS t USING (SELECT 1L AS id) AS s ON s.id = t.id"
                f" WHEN MATCHED THEN UPDATE SET {column} = {value}"
            ).first()[0]
            ours[column, value] = obstacle is None
            theirs[column, value] = "MergeIntoCommand" in plan and not plan.startswith("Error occurred")
    finally:
        spark.conf.unset("spark.sql.storeAssignmentPolicy")

    if SPARK < (4, 0):  # structs are not cast there at all, so that what Delta would do may be refused
        assert [found for found, passes in ours.items() if passes and not theirs[found]] == []
        return
    assert ours == theirs
    assert {True, False} == set(theirs.values())


SCHEMA = "id bigint, st struct<a:int,b:string>, ls array<struct<a:int>>, d date"
BAD: Sequence[tuple[str, str]] = (
    (
        "named_struct('a', 1)",
        "is struct<a:int>, and the column is struct<a:int,b:string>: it lacks field(s) ['b'] of the column; add them"
        " (NULL where unknown)",
    ),
    (
        "named_struct('a', s.id, 'b', 'x', 'c', 1)",
        "is struct<a:bigint,b:string,c:int>, and the column is struct<a:int,b:string>: it has field(s) ['c'] that the"
        " column lacks",
    ),
    (
        "named_struct('a', s.d, 'b', 'x')",
        "is struct<a:date,b:string>, and the column is struct<a:int,b:string>: 'a' of it is date for int, which"
        " spark.sql.storeAssignmentPolicy=ANSI does not cast; cast it in the clause",
    ),
)


@STRUCT_CASTS
@pytest.mark.parametrize("is_there", [False, True])
def test_every_value_that_delta_has_no_cast_for_is_named_before_anything_is_written(
    spark: SparkSession, tmp_table: str, is_there: bool
):
    """The table is neither made nor prepared."""
    if is_there:
        spark.sql(f"CREATE TABLE delta.`{tmp_table}` ({SCHEMA}) USING delta")
    clauses = [
        *(when_matched(f"s.id = {i}").update({"st": value}) for i, (value, _) in enumerate(BAD)),
        when_not_matched().insert({"id": "s.id", "ls": "array(named_struct('A', array(1)))"}),
        when_not_matched_by_source().update({"ls": "array(named_struct('z', 1))"}),
    ]
    sink = MergeSink(target=tmp_table, keys="id", shape=Clauses(clauses), app_id="test")

    with pytest.raises(ConfigError) as caught:
        run(sink, batch(spark, SCHEMA, (1, (1, "x"), [(1,)], None)), 0)

    problems = caught.value.problems
    assert [problem.rsplit(repr(value), 1)[-1] for problem, (value, _) in zip(problems, BAD, strict=False)] == [
        f" {said}" for _, said in BAD
    ]
    assert "'element.a' of it is array<int> for int, which" in problems[3]
    assert "'element' of it has field(s) ['z'] that the column lacks" in problems[4]
    assert len(problems) == 5
    if is_there:
        assert spark.sql(f"DESCRIBE HISTORY delta.`{tmp_table}`").count() == 1
    else:
        assert list(on_disk(tmp_table).parent.iterdir()) == []


@before((4, 0), "casts of structs that leave NULL ones alone")
def test_a_struct_in_another_type_is_refused_where_delta_would_spoil_null_ones(spark: SparkSession):
    held, stored = (from_ddl(f"s struct<a: {kind}>")["s"].dataType for kind in ("int", "bigint"))

    said = casts.obstacle(spark, held, stored, evolves=True)

    assert said == (
        "it is struct<a:int> for struct<a:bigint>, and beside Spark 3.5 Delta makes a struct of NULLs of a NULL one"
        " when it casts; cast it in the clause"
    )
    assert casts.obstacle(spark, stored, stored, evolves=True) is None


@STRUCT_CASTS
def test_fields_are_assigned_by_name_and_may_be_missing_where_the_schema_evolves(spark: SparkSession, tmp_table: str):
    """As in Delta: the place of a field means nothing, and what a value does not have is NULL."""
    clauses = (
        when_matched("s.st.a > 5").update({"st": "named_struct('b', concat(t.st.b, '!'), 'a', '7')"}),
        when_matched().update({"st": "s.st", "ls": "array(named_struct('a', cast(s.id as smallint)))"}),
        when_not_matched().insert_all(),
    )
    stream = ChangeStream(spark, tmp_table, SCHEMA, keys="id", shape=Clauses(clauses))
    stream.deliver((1, (1, "one"), [(1,)], None), (2, (2, "two"), [(2,)], None), (3, (3, "three"), None, None))

    stream.deliver((1, (6, "x"), None, None), (2, (5, "new"), None, None), (3, None, None, None))
    before = [(1, (7, "one!"), [(1,)], None), (2, (5, "new"), [(2,)], None), (3, None, [(3,)], None)]
    assert stream.rows() == before

    wider = "id bigint, st struct<a:int,b:string,c:int>, ls array<struct<a:int>>, d date"
    lacking = Clauses([when_matched("s.st.c = 1").update({"st": "named_struct('c', s.st.c)"}), *clauses[1:]])
    result = stream.deliver(
        (1, (6, "x", 1), None, None), (2, (5, "six", 2), None, None), schema=wider, shape=lacking, schema_evolution=True
    )
    assert ledger(result) == {"received": 2, "updated": 2}
    assert stream.rows() == [
        (1, (None, None, 1), [(1,)], None),
        (2, (5, "six", 2), [(2,)], None),
        (3, None, [(3,)], None),
    ]
