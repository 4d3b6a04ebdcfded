"""Schema evolution, shape by shape: what one merge adds and widens, what it leaves, what it refuses.

Needs a JVM: Delta adds columns and fields, and two writers meet in its log.
"""

from __future__ import annotations

from typing import Any

import pytest
from deliveries import ChangeStream, ledger
from log_faults import LogFaults
from pyspark.sql import SparkSession
from since import NEW_FIELDS, since

from stream_merge import ConfigError, MergeFailedError, MergeResult
from stream_merge.engines.spark.merger import SparkMerger
from stream_merge.merge import steps
from stream_merge.model.source_batch import Intake
from stream_merge.model.table_ref import TableRef
from stream_merge.shapes import Clauses, InsertOnly, Snapshot, when_matched, when_not_matched
from stream_merge.spark.versions import from_ddl
from stream_merge.tables import create_table, spark_table
from stream_merge.testing import batch, change_rows, run

NARROW = (
    "id bigint, lsn bigint, n int, s struct<a:int>, l array<struct<a:int>>, m map<string,struct<a:int>>, kept string"
)
WIDE = (
    "id bigint, lsn bigint, n bigint, s struct<a:bigint,b:string>, l array<struct<a:int,b:string>>,"
    " m map<string,struct<a:int,b:string>>, note string"
)
"""Two types grow, each struct has a new field, a column is new, and one of before is missing."""
SHAPES: dict[str, dict[str, Any]] = {
    "changes": {"sequence_by": "lsn"},
    "clauses": {"shape": Clauses([when_matched().update_all(), when_not_matched().insert_all()])},
    "insert-only": {"shape": InsertOnly()},
    "snapshot": {"shape": Snapshot(max_delete_share=1.0)},
}
ONE = (1, 1, 1, (1,), [(1,), None], {"k": (1,), "z": None}, "one")
TWO = (2, 1, 2, None, None, None, "two")
THREE = (3, 1, 3, (None,), [None], {}, None)


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> str:
    """The name of a shape."""
    return str(request.param)


def stream_of(spark: SparkSession, target: str, shape: str, **settings: Any) -> ChangeStream:
    own = {"keys": "id", "table_properties": {"delta.enableChangeDataFeed": "true"}, **SHAPES[shape], **settings}
    return ChangeStream(spark, target, NARROW, **own)


@since((4, 0), "types wider than int")
@pytest.mark.smoke
def test_one_merge_adds_columns_fields_and_widens_and_leaves_what_it_does_not_name(
    spark: SparkSession, tmp_table: str, shape: str
):
    """A NULL struct stays NULL, at the top, in an array and in a map; a column that is not there keeps its values."""
    stream = stream_of(spark, tmp_table, shape, schema_evolution="widen")
    stream.deliver(ONE, TWO, THREE)
    wide = (1, 2, 2**40, (2**41, "x"), [(1, "y"), None], {"k": (1, "z"), "n": None}, "new")
    rest = [(2, 1, 2, None, None, None, None), (3, 1, 3, (None, None), [None], {}, None)]
    new = (4, 2, 4, None, [], {"k": None}, "four")
    stays = rest if shape == "snapshot" else []

    result = stream.deliver(wide, *stays, new, schema=WIDE)

    assert ledger(result)["inserted"] == 1
    one = (1, 1, 1, (1, None), [(1, None), None], {"k": (1, None), "z": None}, "one", None)
    if shape != "insert-only":
        one = (*wide[:6], "one", "new")
    assert stream.rows() == [
        one,
        (2, 1, 2, None, None, None, "two", None),
        (3, 1, 3, (None, None), [None], {}, None, None),
        (4, 2, 4, None, [], {"k": None}, None, "four"),
    ]
    stored = spark.read.format("delta").load(tmp_table).schema
    wanted = from_ddl(WIDE.replace(", note string", ", kept string, note string"))
    assert [(f.name, f.dataType.simpleString()) for f in stored] == [
        (f.name, f.dataType.simpleString()) for f in wanted
    ]

    # A NULL struct is a value; what a new field's column was NULL in stays so. The schema stays as it is.
    unset = (1, 3, 1, None, None, None, "again")
    before = stream.rows()
    stream.deliver(unset, *stays, *([new] if stays else []), schema=WIDE)
    assert stream.rows() == ([(*unset[:6], "one", "again"), *before[1:]] if shape != "insert-only" else before)


@pytest.mark.parametrize("evolution", [False, True])
def test_a_clash_is_one_error_and_nothing_is_written(spark: SparkSession, tmp_table: str, shape: str, evolution: bool):
    """Every clash of the batch at once; the table, what lies beside it and its properties are as before."""
    stream = stream_of(spark, tmp_table, shape, schema_evolution=evolution)
    stream.deliver(ONE, TWO, THREE)
    before = stream.versions()
    clashing = "id bigint, lsn bigint, n string, s struct<a:string>, l array<int>, m map<int,struct<a:int>>, kept date"

    with pytest.raises(ConfigError) as caught:
        stream.deliver((1, 2, "x", ("x",), [1], {1: (1,)}, None), schema=clashing)

    said = [problem.split(" in the target")[0] for problem in caught.value.problems]
    assert said == [
        "[TYPE_MISMATCH] column 'n' is string in the source and int",
        "[TYPE_MISMATCH] column 's.a' is string in the source and int",
        "[TYPE_MISMATCH] column 'l.element' is int in the source and struct<a:int>",
        "[TYPE_MISMATCH] column 'm.key' is int in the source and string",
        "[TYPE_MISMATCH] column 'kept' is date in the source and string",
    ]
    assert stream.versions() == before


@NEW_FIELDS
@pytest.mark.parametrize(("shape", "evolution"), [*((shape, True) for shape in SHAPES), ("changes", False)])
def test_a_writer_that_changes_the_schema_meanwhile_costs_an_attempt_on_a_fresh_table(
    spark: SparkSession, log_faults: LogFaults, faulty_table: str, shape: str, evolution: bool
):
    """Theirs is kept with its values, in structs, too, which Delta would make NULL; where we add columns, both are."""
    stream = stream_of(spark, faulty_table, shape, schema_evolution=evolution)
    simple = "id bigint, lsn bigint, s struct<a:int>"
    sink = stream.sink()
    run(sink, batch(spark, simple, (1, 1, (1,)), (2, 1, None)), 0)

    def theirs() -> None:
        stream.sql("ALTER TABLE {target} ADD COLUMNS (city string, s.c int)")
        stream.sql("UPDATE {target} SET city = 'Bonn', s = named_struct('a', 7, 'c', 9) WHERE id = 1")

    wide = "id bigint, lsn bigint, s struct<a:int,b:string>, note string"
    ours = batch(spark, wide, (1, 2, (1, "x"), "new"), (2, 1, None, None), (3, 1, (3, "y"), None))
    ours = ours if evolution else ours.selectExpr("id", "lsn", "named_struct('a', s.a) AS s").where("id != 2")
    log_faults.overtake("/table/_delta_log", lambda: run(sink, ours, 1), theirs)

    result = sink.last_result
    assert (result.outcome, result.attempts) == ("committed", 2)
    assert dict(result.conflicts) == {"MetadataChangedException": 1}
    if not evolution:
        assert stream.rows() == [(1, 2, (1, 9), "Bonn"), (2, 1, None, None), (3, 1, (3, None), None)]
        return
    one = (1, 1, (7, 9, None), "Bonn", None) if shape == "insert-only" else (1, 2, (1, 9, "x"), "Bonn", "new")
    assert stream.rows("id", "lsn", "s", "city", "note") == [
        one,
        (2, 1, None, None, None),
        (3, 1, (3, None, "y"), None, None),
    ]


@NEW_FIELDS
@pytest.mark.parametrize("engine", ["auto", "spark"])
def test_a_field_that_appears_between_look_and_merge_is_kept(
    spark: SparkSession, tmp_table: str, monkeypatch: pytest.MonkeyPatch, engine: str
):
    """No commit is lost, since the merge begins after it: Delta would take the events' narrower struct for the row."""
    stream = stream_of(spark, tmp_table, "changes", engine=engine)
    simple = "id bigint, lsn bigint, s struct<a:int>"
    sink = stream.sink()
    run(sink, batch(spark, simple, (1, 1, (1,)), (2, 1, (2,))), 0)
    choose_plan = steps.choose_plan

    def overtaken(*args: Any) -> Any:
        stream.sql("ALTER TABLE {target} ADD COLUMNS (s.c int)")
        stream.sql("UPDATE {target} SET s = named_struct('a', 7, 'c', 9) WHERE id = 1")
        return choose_plan(*args)

    monkeypatch.setattr(steps, "choose_plan", overtaken)
    result = run(sink, batch(spark, simple, (1, 2, (5,)), (2, 2, None), (3, 1, (3,))), 1)

    assert (result.attempts, result.engine) == (1, "spark")
    assert stream.rows("id", "lsn", "s") == [(1, 2, (5, 9)), (2, 2, None), (3, 1, (3, None))]


def test_types_that_need_no_cast_pass_the_strictest_policy(spark: SparkSession, tmp_table: str, shape: str):
    """Narrower values are made the target's before Delta casts anything, whatever the session's policy."""
    stream = stream_of(spark, tmp_table, shape)
    stream.deliver((1, 1, 1, (1,), None, None, "one"))
    narrower = NARROW.replace("lsn bigint, n int, s struct<a:int>", "LSN int, n tinyint, s struct<A:smallint>")
    spark.conf.set("spark.sql.storeAssignmentPolicy", "STRICT")
    try:
        stream.deliver((1, 2, 7, (8,), None, None, "x"), (2, 1, 9, (9,), None, None, "two"), schema=narrower)
    finally:
        spark.conf.unset("spark.sql.storeAssignmentPolicy")

    one = (1, 1, 1, (1,), None, None, "one") if shape == "insert-only" else (1, 2, 7, (8,), None, None, "x")
    assert stream.rows() == [one, (2, 1, 9, (9,), None, None, "two")]


@pytest.mark.parametrize("engine", ["auto", "spark"])
def test_a_column_that_appears_with_another_type_between_look_and_merge_is_refused(
    spark: SparkSession, tmp_table: str, monkeypatch: pytest.MonkeyPatch, engine: str
):
    """Delta would cast 1.5 into what the other writer has added, without a word."""
    stream = stream_of(spark, tmp_table, "changes", engine=engine, schema_evolution=True)
    sink = stream.sink()
    run(sink, batch(spark, "id bigint, lsn bigint", (1, 1)), 0)
    choose_plan = steps.choose_plan

    def overtaken(*args: Any) -> Any:
        stream.sql("ALTER TABLE {target} ADD COLUMNS (c int)")
        return choose_plan(*args)

    monkeypatch.setattr(steps, "choose_plan", overtaken)
    with pytest.raises(ConfigError, match=r"column 'c' of the target is too narrow \(c int -> double"):
        run(sink, batch(spark, "id bigint, lsn bigint, c double", (1, 2, 1.5)), 1)

    assert stream.rows() == [(1, 1, None)]


def with_default(stream: ChangeStream, batch_id: int, *rows: Any) -> MergeResult | None:
    """Deliver a batch, as a process of its own, whose source says that rows from before `note` hold 'none'."""
    sink = stream.sink()
    frame = batch(stream.spark, "id bigint, lsn bigint, note string", *rows)
    sink._calls.merge(frame, batch_id, Intake(column_defaults={"note": "none", "id": "9"}))
    return sink.last_result


@pytest.mark.smoke
def test_the_default_of_a_new_column_fills_earlier_rows_once_wherever_a_call_stops(
    spark: SparkSession, log_faults: LogFaults, faulty_table: str
):
    """Column and default come in one commit: each crash leaves both or none, and a later NULL stays NULL."""
    stream = stream_of(spark, faulty_table, "changes", schema_evolution=True)
    run(stream.sink(), batch(spark, "id bigint, lsn bigint", (1, 1), (2, 1), (3, 1)), 0)
    events = ((1, 2, None), (4, 1, "new"))

    log_faults.refuse_commit("/table/_delta_log")
    with pytest.raises(MergeFailedError):
        with_default(stream, 1, *events)
    before = stream.rows()
    log_faults.refuse_commit("/table/_delta_log", after=1)
    with pytest.raises(MergeFailedError):
        with_default(stream, 1, *events)
    between = stream.rows()
    merged = with_default(stream, 1, *events)
    repeated = with_default(stream, 1, *events)
    with_default(stream, 2, (2, 2, None))

    assert before == [(1, 1), (2, 1), (3, 1)]
    assert between == [(1, 1, "none"), (2, 1, "none"), (3, 1, "none")]
    assert merged is not None
    assert ledger(merged) == {"received": 2, "inserted": 1, "updated": 1}
    assert repeated is not None
    assert repeated.outcome == "skipped_duplicate"
    assert stream.rows() == [(1, 2, None), (2, 2, None), (3, 1, "none"), (4, 1, "new")]
    filled = [row for row in change_rows(spark, faulty_table) if row[1] == "update_postimage" and row[-1] == "none"]
    assert [row[1:] for row in filled] == [("update_postimage", key, 1, "none") for key in (1, 2, 3)]
    table = spark_table.find(spark, TableRef(faulty_table))
    assert table is not None
    assert table.transaction("test/column-default") == 1


def test_a_default_fills_the_rows_that_the_filter_names_and_no_column_that_another_writer_added(
    spark: SparkSession, log_faults: LogFaults, faulty_table: str, tmp_table: str
):
    """A commit that another writer overtakes is tried again, and finds the column."""
    filtered = stream_of(spark, f"{tmp_table}_filtered", "changes", schema_evolution=True, target_filter="t.id < 10")
    run(filtered.sink(), batch(spark, "id bigint, lsn bigint", (1, 1)), 0)
    filtered.sql("INSERT INTO {target} (id, lsn) VALUES (10, 1)")
    with_default(filtered, 1, (2, 1, "new"))
    stream = stream_of(spark, faulty_table, "changes", schema_evolution=True)
    run(stream.sink(), batch(spark, "id bigint, lsn bigint", (1, 1), (2, 1)), 0)

    def theirs() -> None:
        stream.sql("ALTER TABLE {target} ADD COLUMNS (note string)")
        stream.sql("UPDATE {target} SET note = 'theirs' WHERE id = 1")

    log_faults.overtake("/table/_delta_log", lambda: with_default(stream, 1, (3, 1, "new")), theirs)

    assert filtered.rows() == [(1, 1, "none"), (10, 1, None), (2, 1, "new")]
    assert stream.rows() == [(1, 1, "theirs"), (2, 1, None), (3, 1, "new")]


@NEW_FIELDS
def test_a_field_that_appears_while_the_table_is_looked_at_costs_an_attempt(
    spark: SparkSession, tmp_table: str, monkeypatch: pytest.MonkeyPatch
):
    """Behind the look at the columns, before the MERGE: in a large table that is minutes, and no conflict to Delta."""
    stream = stream_of(spark, tmp_table, "changes", engine="spark")
    simple = "id bigint, lsn bigint, s struct<a:int>"
    sink = stream.sink()
    run(sink, batch(spark, simple, (1, 1, (1,)), (2, 1, (2,))), 0)
    would_change, looks = SparkMerger._would_change, []

    def overtaken(self: SparkMerger, *args: Any) -> bool:
        looks.append(1)
        if len(looks) == 1:
            stream.sql("ALTER TABLE {target} ADD COLUMNS (s.c int)")
            stream.sql("UPDATE {target} SET s = named_struct('a', 7, 'c', 9) WHERE id = 1")
        return would_change(self, *args)

    monkeypatch.setattr(SparkMerger, "_is_sure", lambda *_: False)
    monkeypatch.setattr(SparkMerger, "_would_change", overtaken)
    result = run(sink, batch(spark, simple, (1, 2, (5,)), (3, 1, (3,))), 1)

    assert (result.attempts, dict(result.conflicts)) == (2, {"MetadataChangedException": 1})
    assert stream.rows("id", "lsn", "s") == [(1, 2, (5, 9)), (2, 1, (2, None)), (3, 1, (3, None))]


def test_a_table_that_another_writer_makes_with_partitions_meanwhile_is_not_taken_for_one_without(
    spark: SparkSession, tmp_table: str, monkeypatch: pytest.MonkeyPatch
):
    """Partitions keep NULL for an empty text: the row of such a key would never be found again."""
    schema = "id bigint, country string, lsn bigint"
    stream = ChangeStream(spark, tmp_table, schema, keys=["id", "country"], sequence_by="lsn")
    create = create_table.create

    def overtaken(*args: Any, **settings: Any) -> Any:
        spark.sql(f"CREATE TABLE delta.`{tmp_table}` ({schema}) USING delta PARTITIONED BY (country)")
        return create(*args, **settings)

    monkeypatch.setattr(create_table, "create", overtaken)
    with pytest.raises(MergeFailedError, match="created by another writer with other column types or partitions"):
        run(stream.sink(), batch(spark, schema, (1, "", 1), (2, "de", 1)), 0)
    monkeypatch.undo()
    result = run(stream.sink(), batch(spark, schema, (1, "", 1), (2, "de", 1)), 0)

    assert dict(result.reasons) == {"null_key": 1}
    assert stream.rows() == [(2, "de", 1)]
