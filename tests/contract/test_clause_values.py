"""Values of clauses that are of another type than their columns. Needs a JVM: Delta says which casts there are."""

from __future__ import annotations

import pytest
from deliveries import ChangeStream, ledger
from pyspark.sql import SparkSession
from since import STRUCT_CASTS

from stream_merge import ConfigError, MergeFailedError, MergeSink
from stream_merge.shapes import Clauses, clause_analysis, when_matched, when_not_matched
from stream_merge.testing import batch, run

WIDER = "named_struct('a', s.id, 'b', 'x')"
SCHEMA = "id bigint, st struct<a:int,b:string>, ls array<struct<a:int>>, d date"


@STRUCT_CASTS
@pytest.mark.parametrize(
    "value", ["named_struct('a', 1)", "named_struct('a', s.d, 'b', 'x')", "named_struct('a', s.id, 'b', 'x', 'c', 1)"]
)
def test_a_batch_with_a_value_that_delta_has_no_cast_for_fails_and_changes_nothing(
    spark: SparkSession, tmp_table: str, value: str
):
    """What is inside of a struct is Delta's to say, when it analyses the MERGE."""
    spark.sql(f"CREATE TABLE delta.`{tmp_table}` ({SCHEMA}) USING delta")
    sink = MergeSink(target=tmp_table, keys="id", shape=Clauses([when_matched().update({"st": value})]), app_id="test")

    with pytest.raises(MergeFailedError):
        run(sink, batch(spark, SCHEMA, (1, (1, "x"), [(1,)], None)), 0)

    assert "MERGE" not in [row["operation"] for row in spark.sql(f"DESCRIBE HISTORY delta.`{tmp_table}`").collect()]


def test_a_struct_in_another_type_is_refused_where_delta_would_spoil_null_ones(
    spark: SparkSession, tmp_table: str, monkeypatch: pytest.MonkeyPatch
):
    """Beside Spark 3.5 it makes a struct of NULLs of them. The very type is not cast."""
    monkeypatch.setattr(clause_analysis, "KEEPS_NULL_STRUCTS", False)
    clauses = [when_matched().update({"st": "s.st"}), when_not_matched().insert({"id": "s.id", "st": WIDER})]
    spark.sql(f"CREATE TABLE delta.`{tmp_table}` ({SCHEMA}) USING delta")

    sink = MergeSink(target=tmp_table, keys="id", shape=Clauses(clauses), app_id="test")

    with pytest.raises(ConfigError, match="casts a NULL struct to a struct of NULLs; cast it in the clause") as raised:
        run(sink, batch(spark, SCHEMA, (1, (1, "x"), [(1,)], None)), 0)

    assert len(raised.value.problems) == 1


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
