"""Clauses of one's own: what a bare MERGE of Delta with the same clauses makes of the same table.

Needs a JVM: Delta's MERGE, its metrics and its change feed are what is tested, and conditions are Spark's SQL.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import pytest
from deliveries import ChangeStream, expect_metrics, from_sql, ledger
from delta.tables import DeltaMergeBuilder, DeltaTable
from delta_log import live_rows
from delta_log_files import commits_of
from disk import on_disk
from engines import under_test
from grouped import sink_with
from log_faults import LogFaults
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from since import NEW_FIELDS

from stream_merge import ConfigError, ContractError, MergeResult
from stream_merge.engines.spark import merger
from stream_merge.model.settings import MergeSpec
from stream_merge.shapes import (
    Clauses,
    InsertOnly,
    clause_analysis,
    when_matched,
    when_not_matched,
    when_not_matched_by_source,
)
from stream_merge.shapes.clause_builders import Then
from stream_merge.shapes.layouts import Layouts
from stream_merge.spark.versions import from_ddl
from stream_merge.testing import batch, change_rows, run, target_rows

SCHEMA = "id bigint, op string, v int, name string"
UPSERT = (when_matched().update_all(), when_not_matched().insert_all())


def stream_of(spark: SparkSession, target: str, *clauses: Any, schema: str = SCHEMA, **settings: Any) -> ChangeStream:
    own = {"keys": ["id"], "shape": Clauses(clauses), "except_column_list": ["op"], **settings}
    return ChangeStream(spark, target, schema, **own)


def filled(
    spark: SparkSession, target: str, *rows: Sequence[Any], partition_by: Sequence[str] = (), **properties: str
) -> None:
    """A table that no sink has ever merged into, each row in a file of its own, with the change feed on."""
    types = {"id": "bigint", "v": "int", "name": "string"}
    told = [
        {name: "NULL" if value is None else repr(value) for name, value in zip(types, row, strict=True)} for row in rows
    ]
    writer = from_sql(spark, told, types).repartition(len(rows)).write.format("delta").partitionBy(*partition_by)
    writer.options(**{"delta.enableChangeDataFeed": "true", **properties}).save(target)
    assert commits(target)[0].count('{"add":') == len(rows)


def commits(target: str) -> Sequence[str]:
    """The text of each commit, oldest first."""
    return [*commits_of(on_disk(target))[1].values()]


# -- what becomes of rows ------------------------------------------------------------------------


def test_the_first_clause_that_holds_counts_and_every_column_of_the_source_is_there(
    spark: SparkSession, tmp_table: str
):
    stream = stream_of(
        spark,
        tmp_table,
        when_matched("s.op = 'd'").delete(),
        when_matched(F.col("s.v") > F.col("t.v")).update(
            {"v": F.col("s.v") + F.col("t.v"), "name": "concat(t.name, '+', s.OP)"}
        ),
        when_not_matched("s.op != 'd'").insert_all(),
    )
    stream.deliver((1, "u", 1, "one"), (2, "u", 2, "two"), (3, "u", 3, "three"))

    result = stream.deliver((1, "d", 9, "x"), (2, "u", 5, "x"), (3, "u", 3, "x"), (4, "d", 1, "x"), (5, "i", 1, "five"))

    assert stream.rows() == [(2, 7, "two+u"), (3, 3, "three"), (5, 1, "five")]
    assert ledger(result) == {"received": 5, "unaffected": 2, "inserted": 1, "updated": 1, "deleted": 1}


CONDITIONS = (
    "s.op = 'd'",
    "s.v > t.v",
    "s.v <=> t.v",
    "t.name IS NULL OR s.v % 2 = 0",
    "s.v > 5 AND NULL",
)
ASSIGNED: Sequence[dict[str, Any]] = ({"v": "s.v"}, {"v": "coalesce(s.v, 0) + coalesce(t.v, 0)", "name": "s.op"}, {})
OF_EVENT = ("s.op <> 'd'", "s.v > 3", "s.name IS NOT NULL")
OF_ROW = ("t.v < 4", "t.id % 3 = 0", "t.name LIKE 'n%'")


def random_clauses(rng: random.Random) -> list[Then]:
    """At least one; the last of its kind may lack a condition."""
    found: list[Then] = []
    while not found:
        for when, conditions in (
            (when_matched, CONDITIONS),
            (when_not_matched, OF_EVENT),
            (when_not_matched_by_source, OF_ROW),
        ):
            chosen: list[str | None] = list(rng.sample(conditions, rng.choice((0, 1, 1, 2))))
            if chosen and rng.random() < 0.5:
                chosen[-1] = None
            found += [_then(rng, when(condition)) for condition in chosen]
    rng.shuffle(kinds := [clause.kind for clause in found])
    by_kind = {kind: iter([clause for clause in found if clause.kind == kind]) for kind in kinds}
    return [next(by_kind[kind]) for kind in kinds]  # kinds in any order, each kind's clauses in theirs


def _then(rng: random.Random, when: Any) -> Then:
    if when.__class__.__name__ == "WhenNotMatched":
        return rng.choice((when.insert_all(), when.insert({"id": "s.id", "v": "-s.v"})))
    if when.__class__.__name__ == "WhenNotMatchedBySource":
        return rng.choice((when.delete(), when.update({"v": "t.v + 100"})))
    values = rng.choice(ASSIGNED)
    return rng.choice((when.delete(), when.update(values) if values else when.update_all()))


def bare_merge(spark: SparkSession, target: str, events: DataFrame, clauses: Sequence[Then]) -> None:
    """The same clauses, as one writes them for Delta."""
    builder: DeltaMergeBuilder = DeltaTable.forPath(spark, target).alias("t").merge(events.alias("s"), "t.id = s.id")
    for clause in clauses:
        when, values = clause.condition, None if clause.values is None else dict(clause.values)
        match (clause.kind, clause.action):
            case ("matched", "delete"):
                builder = builder.whenMatchedDelete(when)
            case ("matched", "update"):
                builder = builder.whenMatchedUpdate(when, values) if values else builder.whenMatchedUpdateAll(when)
            case ("not_matched", _):
                builder = (
                    builder.whenNotMatchedInsert(when, values) if values else builder.whenNotMatchedInsertAll(when)
                )
            case (_, "delete"):
                builder = builder.whenNotMatchedBySourceDelete(when)
            case _:
                builder = builder.whenNotMatchedBySourceUpdate(when, values)
    builder.execute()


@pytest.mark.parametrize("round_", [pytest.param(0, marks=pytest.mark.smoke), *range(1, 10)])
def test_rows_and_change_feed_are_those_of_a_bare_merge(spark: SparkSession, tmp_table: str, seed: int, round_: int):
    """Random clauses over random batches; the ledger adds up and counts no row that no event has touched.

    Rows as the log has them after each batch; at the end Spark reads them, and the feeds, version by version.
    """
    rng = random.Random(f"{seed} {round_}")
    clauses = random_clauses(rng)
    ours, theirs = f"{tmp_table}/ours/table", f"{tmp_table}/theirs"
    rows = [(key, rng.choice((None, 1, 3, 6)), rng.choice((None, "n", "m"))) for key in range(0, 12, 3)]
    vectors, partition_by = rng.choice(("true", "false")), rng.choice(((), ("name",)))
    for table in (ours, theirs):
        filled(spark, table, *rows, partition_by=partition_by, **{"delta.enableDeletionVectors": vectors})
    stream = stream_of(spark, ours, *clauses)
    delivered: list[tuple[range, list[int], MergeResult]] = []
    """Of each batch the versions that a bare merge has made of it, its keys, and what became of it."""
    for _ in range(2):
        keys = rng.sample(range(14), 6)
        events = [(key, rng.choice("ud"), rng.choice((None, 2, 4, 6)), rng.choice((None, "x"))) for key in keys]
        before = len(commits(theirs))
        result = stream.deliver(*events)
        bare_merge(spark, theirs, batch(spark, SCHEMA, *events), clauses)
        delivered.append((range(before, len(commits(theirs))), keys, result))

        assert rows_of(ours) == rows_of(theirs), clauses

    assert stream.rows() == target_rows(spark, theirs), clauses
    feeds = [change_rows(spark, table) for table in (ours, theirs)]
    grouped = [[[row[1:] for row in rows] for _, rows in groupby(feed, itemgetter(0))] for feed in feeds]
    assert grouped[0] == grouped[1], clauses
    for versions, keys, result in delivered:
        made = Counter(change for version, change, key, *_ in feeds[1] if version in versions and key in keys)
        fates = {"insert": result.events.inserted, "delete": result.events.deleted}
        fates |= dict.fromkeys(("update_preimage", "update_postimage"), result.events.updated)
        assert {change: n for change, n in fates.items() if n} == made, clauses


def rows_of(target: str) -> list[tuple[Any, ...]]:
    """The rows, sorted, by a reader that is not Spark."""
    return sorted((tuple(row.values()) for row in live_rows(on_disk(target)).to_pylist()), key=repr)


def test_an_update_that_changes_nothing_is_made_as_delta_makes_it(spark: SparkSession, tmp_table: str):
    stream = stream_of(spark, tmp_table, *UPSERT)
    stream.deliver((1, "u", 1, "one"))

    result = stream.deliver((1, "u", 1, "one"))

    assert (result.outcome, ledger(result)) == ("committed", {"received": 1, "updated": 1})
    assert [change[0] for change in stream.changes()] == ["insert", "update_postimage", "update_preimage"]


def test_all_columns_but_some_and_new_ones_where_the_schema_may_evolve(spark: SparkSession, tmp_table: str):
    stream = stream_of(
        spark,
        tmp_table,
        when_matched().update_all(except_=["NAME"]),
        when_not_matched().insert_all(except_="v"),
    )
    stream.deliver((1, "u", 1, "one"))
    with pytest.raises(ConfigError, match=r"column\(s\) \['note'\] that the target lacks"):
        stream.deliver((1, "u", 2, "new", "n"), schema=f"{SCHEMA}, note string")

    wider = f"{SCHEMA}, note string"
    stream.deliver((1, "u", 2, "new", "n"), (2, "u", 2, "two", "m"), schema=wider, schema_evolution=True)

    assert stream.rows() == [(1, 2, "one", "n"), (2, None, "two", "m")]


@NEW_FIELDS
def test_new_fields_of_a_struct_are_added_and_those_that_the_source_lacks_are_kept(spark: SparkSession, tmp_table: str):
    spark.sql(
        f"CREATE TABLE delta.`{tmp_table}` (id bigint, st struct<a: int, c: int>, one struct<a: int>) USING delta"
    )
    spark.sql(f"INSERT INTO delta.`{tmp_table}` VALUES (1, struct(1, 3), struct(1))")
    schema = "id bigint, st struct<a: int, b: int>, one struct<a: int, b: int>"
    own = {"schema": schema, "except_column_list": [], "schema_evolution": True}
    stream = stream_of(spark, tmp_table, when_matched("s.st.b > t.st.c").update_all(), UPSERT[1], **own)

    stream.deliver((1, (8, 9), (8, 9)), (2, (8, 9), (8, 9)))

    assert stream.rows() == [(1, (8, 3, 9), (8, 9)), (2, (8, None, 9), (8, 9))]


def test_a_column_that_is_not_stored_is_not_brought_together_with_the_targets(spark: SparkSession, tmp_table: str):
    """Delta would merge the types of both where the schema may evolve, whatever a clause assigns."""
    spark.sql(f"CREATE TABLE delta.`{tmp_table}` (id bigint, info string) USING delta")
    own = {"schema": "id bigint, info struct<a: int>", "except_column_list": ["info"]}
    written = {"id": "s.id", "info": "to_json(s.info)"}
    stream = stream_of(spark, tmp_table, when_not_matched().insert(written), **own)
    stream.deliver((1, (8,)))

    assert stream.rows() == [(1, '{"a":8}')]
    with pytest.raises(
        ConfigError, match=r"'info' \(struct<a:int>\) is not stored, but the target has 'info' \(string\)"
    ):
        stream.deliver((2, (9,)), schema_evolution=True)


@pytest.mark.parametrize(
    ("column", "value", "held"),
    [
        ("st", "s.v", "int"),
        ("l", "s.v", "int"),
        ("m", "array(1)", "array"),
    ],
)
def test_a_value_of_another_kind_than_its_column_is_refused_before_anything_is_written(
    spark: SparkSession, tmp_table: str, column: str, value: str, held: str
):
    spark.sql(
        f"CREATE TABLE delta.`{tmp_table}` (id bigint, st struct<a: int>, l array<int>, m map<string, int>, v int)"
        " USING delta"
    )
    own = {"schema": "id bigint, v int", "except_column_list": ["v"]}
    stream = stream_of(spark, tmp_table, when_matched().update({column: value}), **own)
    with pytest.raises(ConfigError, match=f"{held}.*, and the column is "):
        stream.deliver((1, 2))
    assert spark.sql(f"DESCRIBE HISTORY delta.`{tmp_table}`").count() == 1


def test_a_source_of_narrower_types_and_a_padded_key(spark: SparkSession, tmp_table: str):
    """Conditions and values see the source's own values; what is stored and matched has the target's types."""
    spark.sql(f"CREATE TABLE delta.`{tmp_table}` (id char(3), v bigint, st struct<a: int, b: int>) USING delta")
    spark.sql(f"INSERT INTO delta.`{tmp_table}` VALUES ('a', 1, struct(1, 1)), ('b', 1, struct(1, 1))")
    schema = "ID string, v int, st struct<a: int>"
    stream = stream_of(
        spark,
        tmp_table,
        when_matched("s.id = 'a'").update({"v": "s.v + length(s.id)"}),
        when_matched("typeof(s.v) = 'int'").update_all(),
        when_not_matched().insert_all(),
        schema=schema,
        except_column_list=[],
    )

    result = stream.deliver(("a", 7, (7,)), ("b", 8, (8,)), ("c", 9, (9,)))

    assert stream.rows() == [("a  ", 8, (1, 1)), ("b  ", 8, (8, 1)), ("c  ", 9, (9, None))]
    assert ledger(result) == {"received": 3, "inserted": 1, "updated": 2}


def test_names_with_dots_and_blanks_are_written_in_backticks(spark: SparkSession, tmp_table: str):
    schema = "`order.id` bigint, `a.b` int, `not stored` int"
    stream = stream_of(
        spark,
        tmp_table,
        when_matched("s.`a.b` > t.`a.b` AND s.`not stored` = 1").update({"a.b": "s.`a.b`"}),
        when_not_matched().insert({"`order.id`": "s.`order.id`", "`a.b`": "s.`a.b`"}),
        schema=schema,
        keys=["order.id"],
        except_column_list=["not stored"],
    )
    stream.deliver((1, 1, 0), (2, 1, 0))

    stream.deliver((1, 5, 1), (2, 5, 0))

    assert stream.rows() == [(1, 5), (2, 1)]


def test_where_case_counts_names_that_differ_in_it_are_two(spark: SparkSession, tmp_table: str):
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        clauses = (when_matched("s.V > t.v").update({"v": "s.V"}), when_not_matched().insert_all())
        stream = stream_of(
            spark, tmp_table, *clauses, schema="id bigint, v int, V int", keys="id", except_column_list=["V"]
        )
        stream.deliver((1, 1, 9), (2, 1, 9))

        stream.deliver((1, 100, 5), (2, 100, 0))

        assert stream.rows() == [(1, 5), (2, 1)]
        with pytest.raises(ConfigError, match=r"has no column 'V' to assign; it has \['id', 'v'\]"):
            stream.deliver((1, 1, 1), shape=Clauses(when_matched().update({"V": "s.V"})))
        stream.replay_last()
    finally:
        spark.conf.unset("spark.sql.caseSensitive")


# -- which event of a key, and which events not ---------------------------------------------------


def test_without_a_sequence_different_events_of_a_key_are_an_error_before_anything_is_written(
    spark: SparkSession, tmp_table: str
):
    """The columns that are not stored tell events apart, too; equal ones are one event."""
    stream = stream_of(spark, tmp_table, *UPSERT)

    with pytest.raises(ContractError, match=r"different events of a key, such as \{\"id\":1\} and \{\"id\":7\}; set"):
        stream.deliver((1, "u", 1, "x"), (1, "d", 1, "x"), (2, "u", 1, "x"), (7, "u", 1, None), (7, "u", 2, None))
    assert not on_disk(tmp_table).exists()

    result = stream.deliver((1, "u", 1, "x"), (1, "u", 1, "x"), (2, "u", 1, "x"))
    assert ledger(result) == {"received": 3, "collapsed": 1, "inserted": 2}


def test_with_a_sequence_the_latest_of_a_batch_counts_and_none_is_kept(spark: SparkSession, tmp_table: str):
    """What comes late, in a later batch, is for the clauses to refuse."""
    stream = stream_of(
        spark, tmp_table, *UPSERT, schema="id bigint, lsn bigint, v int", sequence_by="lsn", except_column_list=["lsn"]
    )
    first = stream.deliver((1, 2, 2), (1, 3, 3), (1, 1, 1), (2, None, 1))

    second = stream.deliver((1, 1, 1))

    assert ledger(first) == {"received": 4, "quarantined": 1, "collapsed": 2, "inserted": 1}
    assert ledger(second) == {"received": 1, "updated": 1}
    assert stream.rows() == [(1, 1)]
    assert [field.name for field in spark.read.format("delta").load(tmp_table).schema] == ["id", "v"]


# -- rows that no event matches -------------------------------------------------------------------


def snapshot_of(spark: SparkSession, target: str, **settings: Any) -> ChangeStream:
    """Three rows far apart, and clauses about those that are missing."""
    filled(spark, target, (1, 1, "one"), (500, 1, "old"), (1000, 1, "gone"))
    clauses = (
        *UPSERT,
        when_not_matched_by_source("t.name = 'old'").update({"v": "t.v - 1"}),
        when_not_matched_by_source().delete(),
    )
    return stream_of(spark, target, *clauses, **settings)


def test_rows_that_no_event_matches_are_no_event_s_fate(spark: SparkSession, tmp_table: str):
    """They lie beyond the bounds of the batch's keys, which therefore leave no file unread."""
    stream = snapshot_of(spark, tmp_table)

    result = stream.deliver((1, "u", 2, "one"), (2, "u", 2, "two"))

    assert stream.rows() == [(1, 2, "one"), (2, 2, "two"), (500, 0, "old")]
    assert ledger(result) == {"received": 2, "inserted": 1, "updated": 1}
    counted = ("numTargetRowsNotMatchedBySourceUpdated", "numTargetRowsNotMatchedBySourceDeleted")
    assert [result.metrics[name] for name in counted] == [1, 1]
    expect_metrics(result, numTargetFilesAfterSkipping=3, numTargetFilesBeforeSkipping=3)
    assert result.plan.endswith("file skipping by key bounds on no column")


def test_a_batch_that_only_concerns_missing_rows_is_committed(spark: SparkSession, tmp_table: str):
    filled(spark, tmp_table, (1, 1, "one"), (2, 1, "two"))
    stream = stream_of(spark, tmp_table, when_not_matched_by_source().delete())

    result = stream.deliver((1, "u", 2, "one"))

    assert (result.outcome, ledger(result)) == ("committed", {"received": 1, "unaffected": 1})
    assert stream.rows() == [(1, 1, "one")]


def test_a_broken_event_does_not_make_its_row_a_missing_one(spark: SparkSession, tmp_table: str):
    stream = snapshot_of(spark, tmp_table)
    before = stream.versions()

    with pytest.raises(ContractError, match=r"1 of 2 events of batch 0 .* break the contract, so their rows"):
        stream.deliver((1, "u", 2, "one"), (None, "u", 2, "two"))

    assert stream.versions() == before


def test_a_batch_without_an_event_is_no_empty_table(spark: SparkSession, tmp_table: str):
    stream = snapshot_of(spark, tmp_table)

    assert stream.deliver().outcome == "empty"
    assert len(stream.rows()) == 3


# -- the same guarantees --------------------------------------------------------------------------


def test_a_merge_that_loses_is_tried_again_on_a_fresh_table(
    spark: SparkSession, log_faults: LogFaults, faulty_table: str
):
    """What the winner inserted is missing in the loser's source, and counts so; the source is read once."""
    evaluated = spark.sparkContext.accumulator(0)

    @F.udf("string", useArrow=False)
    def counted(name: str) -> str:
        evaluated.add(1)
        return name

    clauses = (*UPSERT, when_not_matched_by_source().update({"name": "'missing'"}))
    own: dict[str, Any] = {"keys": "id", "except_column_list": ["op"], "shape": Clauses(clauses)}
    mine, other = (
        under_test(sink_with(target=faulty_table, app_id=name, **own), sleep=lambda _: None)
        for name in ("mine", "other")
    )
    run(mine, batch(spark, SCHEMA, (1, "u", 1, "one")), 0)

    log_faults.overtake(
        "/table/_delta_log",
        lambda: run(mine, batch(spark, SCHEMA, (1, "u", 2, "one")).withColumn("name", counted("name")), 1),
        lambda: run(other, batch(spark, SCHEMA, (1, "u", 9, "x"), (3, "u", 9, "x")), 0),
    )

    result = mine.last_result
    assert target_rows(spark, faulty_table) == [(1, 2, "one"), (3, 9, "missing")]
    assert (result.attempts, ledger(result), evaluated.value) == (2, {"received": 1, "updated": 1}, 1)


def test_null_keys_go_to_the_quarantine(spark: SparkSession, tmp_table: str):
    stream = stream_of(spark, tmp_table, *UPSERT)

    result = stream.deliver((None, "u", 1, "x"), (1, "u", 1, "one"))

    assert ledger(result) == {"received": 2, "quarantined": 1, "inserted": 1}
    (event,) = stream.side_table("__stream_merge_quarantine_").select("event").collect()
    assert event["event"] == '{"id":null,"op":"u","v":1,"name":"x"}'


def test_a_table_keeps_its_shape(spark: SparkSession, tmp_table: str):
    stream_of(spark, tmp_table, *UPSERT).deliver((1, "u", 1, "one"))

    for shape, name in ((None, "changes"), (InsertOnly(), "insert-only")):
        other = ChangeStream(
            spark, tmp_table, SCHEMA, keys="id", sequence_by="v", shape=shape, except_column_list=["op"]
        )
        with pytest.raises(ConfigError, match=rf"was filled as clauses and would now be as {name}"):
            other.deliver((1, "u", 2, "two"))
    stream_of(spark, tmp_table, when_matched().delete(), app_id="other").deliver((1, "u", 1, "one"))
    assert target_rows(spark, tmp_table) == []


def test_the_plan_says_why_it_is_spark(spark: SparkSession, tmp_table: str):
    stream = stream_of(spark, tmp_table, *UPSERT, engine="auto")
    stream.deliver((1, "u", 1, "one"))

    result = stream.deliver((1, "u", 2, "one"))

    assert (result.engine, result.refusal) == ("spark", "shape")
    assert result.plan.startswith("spark: the shape's clauses are SQL, which only Spark executes")


# -- what does not fit source and target ----------------------------------------------------------


def test_every_misfit_is_said_at_once_before_anything_is_written(spark: SparkSession, tmp_table: str):
    stream = stream_of(
        spark,
        tmp_table,
        when_matched("s.opp = 'd'").delete(),
        when_matched("rand() > 0.5").delete(),
        when_matched("max(s.v) > 1").delete(),
        when_matched("s.v").delete(),
        when_matched("s.id IN (SELECT 1)").delete(),
        when_matched("s.v >").update({"total": "s.v", "V": "array(1)", "v": "sum(s.v)"}),
        when_not_matched("t.v = 1").insert_all(except_=["opp"]),
        when_not_matched_by_source("s.v = 1").delete(),
        when_matched("v = 1").delete(),
    )

    with pytest.raises(ConfigError) as caught:
        stream.deliver((1, "u", 1, "one"))

    said = [
        re.split(r"\)(?:\.delete\(\)|\.\w+\(.*?[})\]]\)): ", problem, maxsplit=1) for problem in caught.value.problems
    ]
    assert [where.split(",")[0] for where, _ in said] == [
        f"[INVALID_CLAUSE] clause {number}" for number in (1, 2, 3, 4, 5, 6, 6, 6, 6, 6, 7, 7, 8, 9)
    ]
    for (_, problem), expected in zip(
        said,
        (
            "its condition \"s.opp = 'd'\" does not fit",
            "its condition 'rand() > 0.5' is not deterministic, and MERGE evaluates it more than once",
            "its condition 'max(s.v) > 1' does not fit",
            "its condition 's.v' does not fit",
            "its condition 's.id IN (SELECT 1)' has a subquery",
            "its condition 's.v >' does not fit",
            "the target has no column 'total' to assign; it has ['id', 'v', 'name']",
            "the value of 'V' 'array(1)' does not fit",
            "'V' and 'v' are one column; name each column once",
            "the value of 'v' 'sum(s.v)' does not fit",
            "its condition 't.v = 1' does not fit",
            "except_ names 'opp', which is not among the stored columns ['id', 'v', 'name']",
            "its condition 's.v = 1' does not fit",
            "its condition 'v = 1' does not fit",
        ),
        strict=True,
    ):
        assert problem.startswith(expected), problem
    assert "; s has ['id', 'op', 'v', 'name'], t has ['id', 'v', 'name']" in said[0][1]
    assert "s has ['id', 'op', 'v', 'name'], there is no row t" in said[10][1]
    assert "t has ['id', 'v', 'name'], there is no event s" in said[12][1]
    assert not on_disk(tmp_table).exists()


# -- the paths that Delta takes -------------------------------------------------------------------


def test_updates_alone_leave_files_unread_by_what_they_ask_of_the_row(spark: SparkSession, tmp_table: str):
    """Delta's matched-only merge reads the files that a clause may change; with an insert it has to read all."""
    filled(spark, tmp_table, (1, 1, "one"), (2, 9, "two"))
    events = ((1, "u", 5, "x"), (2, "u", 5, "x"), (3, "u", 5, "x"))
    stream = stream_of(spark, tmp_table, when_matched("t.v > 5").update_all())

    result = stream.deliver(*events)
    expect_metrics(result, numTargetFilesBeforeSkipping=2, numTargetFilesAfterSkipping=1)
    expect_metrics(result, numTargetFilesRemoved=1, numTargetRowsInserted=0)
    assert stream.rows() == [(1, 1, "one"), (2, 5, "x")]

    none = stream.deliver(*events)
    assert none.outcome == "no_change"
    expect_metrics(none, numTargetFilesAfterSkipping=0, numSourceRowsInSecondScan=0, numTargetFilesAdded=0)

    both = stream.deliver(
        *events, shape=Clauses([when_matched("t.v > 5").update_all(), when_not_matched().insert_all()])
    )
    expect_metrics(both, numTargetFilesAfterSkipping=2, numTargetRowsCopied=2)


def test_inserts_alone_touch_no_file(spark: SparkSession, tmp_table: str):
    """Delta's insert-only merge: one scan; a table that allows only appends may be the target."""
    stream = stream_of(
        spark, tmp_table, when_not_matched("s.op = 'i'").insert_all(), table_properties={"delta.appendOnly": "true"}
    )
    stream.deliver((1, "i", 1, "one"))

    result = stream.deliver((1, "i", 2, "x"), (2, "i", 2, "two"), (3, "u", 3, "x"))

    assert stream.rows() == [(1, 1, "one"), (2, 2, "two")]
    expect_metrics(result, numSourceRowsInSecondScan=0, numTargetRowsCopied=0, numTargetFilesRemoved=0)
    expect_metrics(result, numTargetFilesAdded=1)
    assert ledger(result) == {"received": 3, "unaffected": 2, "inserted": 1}


def test_few_events_that_only_update_are_sent_to_the_rows_and_no_row_to_them(
    spark: SparkSession, tmp_table: str, monkeypatch: pytest.MonkeyPatch
):
    """Delta joins rows with such events alone, and of a query's events Spark does not know how few they are."""
    filled(spark, tmp_table, (1, 10, "one"), (2, 20, "two"))
    store = spark._jsparkSession.sharedState().statusStore()

    def planned(events: int) -> str:
        """How Spark planned to join what is written again, before it knew how much that is; so many events are few."""
        monkeypatch.setattr(merger, "BROADCAST_EVENTS", events)
        known = batch(spark, SCHEMA, (1, "u", events, "one"), (2, "u", events, "two"))
        sink = stream_of(spark, tmp_table, when_matched().update_all()).sink()
        run(sink, spark.createDataFrame(known.rdd, known.schema), events)
        newest = store.executionsList(max(0, int(store.executionsCount()) - 20), 20)
        plans = [newest.apply(i).physicalPlanDescription() for i in range(newest.size())]
        written_again = [plan for plan in plans if "Join RightOuter" in plan][-1]
        return re.findall(r"(\w+Join) RightOuter", written_again.partition("Initial Plan ==")[2])[0]

    assert planned(events=1) == "SortMergeJoin"
    assert planned(events=2) == "BroadcastHashJoin"


@pytest.mark.parametrize(
    ("clauses", "handles"),
    [
        ([when_matched("s.`$delete`").delete(), when_not_matched("NOT s.`$delete`").insert_all()], True),
        ([when_matched("s.`$delete`").delete(), when_matched().update_all()], True),
        ([when_matched("s.v > 1").update_all(), when_matched("s.`$delete`").delete()], False),
        ([when_matched("s.`$delete`").delete(), when_not_matched().insert_all()], False),
        ([when_not_matched("s.`$delete` IS NOT TRUE AND s.v = 1").insert_all()], True),
        ([when_matched().delete()], True),
        ([when_matched("s.`$delete`").update({"gone": "TRUE"}), when_matched().update_all()], True),
        # The mark is in a condition, and yet deletes get past it.
        ([when_matched("NOT s.`$delete` AND s.v > t.v").update_all(), when_matched().update_all()], False),
        ([when_matched("s.`$delete` AND s.v > t.v").delete(), when_matched().update_all()], False),
        ([when_not_matched("s.`$delete` OR s.v > 0").insert_all()], False),
        ([when_not_matched("NOT (s.`$delete` AND s.v > 0)").insert_all()], False),
        ([when_not_matched("s.name = ' AND NOT s.$delete AND '").insert_all()], False),
    ],
)
def test_what_marks_a_delete_has_to_be_asked_for_before_an_event_is_written(
    spark: SparkSession, tmp_table: str, clauses: list[Then], handles: bool
):
    """Spark's optimizer tells: with the mark, the condition of what would write the event is false."""
    schema = "id bigint, v bigint, name string, `$delete` boolean"
    spec = MergeSpec(target=tmp_table, keys=("id",), sequence_by=(), shape=Clauses(clauses))
    layout = Layouts(spec).plan(batch(spark, schema), None)
    target = from_ddl("id bigint, v bigint, name string, gone boolean")

    assert clause_analysis.handles_marked_events(spark, clauses, "`$delete`", layout, target) is handles
