"""Full snapshots: the table becomes the copy, or an error stops it before anything is written.

Needs a JVM: Delta's MERGE, its metrics and its change feed are what is tested.
"""

from __future__ import annotations

import datetime as dt
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from deliveries import ChangeStream, ledger
from delta_log import live_rows
from disk import on_disk
from engines import under_test
from grouped import sink_with
from log_faults import LogFaults
from prometheus_client import CollectorRegistry
from pyspark.sql import SparkSession

from stream_merge import CommitConflictError, ConfigError, ContractError, MergeMetrics, RetryPolicy
from stream_merge.engines.spark import whole
from stream_merge.engines.spark.merger import SparkMerger
from stream_merge.model.results import MergeResult
from stream_merge.shapes import InsertOnly, Snapshot, target_filter
from stream_merge.testing import batch, change_rows, run, target_rows

pytestmark = pytest.mark.engines("auto", "spark")

SCHEMA = "id bigint, v int, name string"
ONE, TWO, THREE = (1, 1, "one"), (2, 2, "two"), (3, 3, "three")
ANY = {"max_delete_share": 1.0}
"""Tables of a test are small, and much of them goes."""
FLAG = {"deleted_at": "current_timestamp()"}


def stream_of(
    spark: SparkSession, target: str, schema: str = SCHEMA, *, settings: Any = None, **own: Any
) -> ChangeStream:
    return ChangeStream(spark, target, schema, keys=["id"], shape=Snapshot(**{**ANY, **own}), **(settings or {}))


def of(result: MergeResult, *names: str) -> list[int]:
    return [result.metrics[name] for name in names]


# -- the table becomes the snapshot ----------------------------------------------------------------


@pytest.mark.smoke
def test_the_table_becomes_the_snapshot_and_what_stays_has_no_change(spark: SparkSession, tmp_table: str):
    stream = stream_of(spark, tmp_table)
    first = stream.deliver(ONE, TWO, THREE)

    second = stream.deliver(ONE, (2, 20, "two"), (4, 4, None))

    assert stream.rows() == [ONE, (2, 20, "two"), (4, 4, None)]
    assert stream.changes()[3:] == [
        ("insert", 4, 4, None),
        ("update_postimage", 2, 20, "two"),
        ("update_preimage", *TWO),
    ] or sorted(stream.changes()) == sorted(
        [
            ("insert", *ONE),
            ("insert", *TWO),
            ("insert", *THREE),
            ("delete", *THREE),
            ("insert", 4, 4, None),
            ("update_preimage", *TWO),
            ("update_postimage", 2, 20, "two"),
        ],
        key=repr,
    )
    assert ledger(first) == {"received": 3, "inserted": 3}
    assert ledger(second) == {"received": 3, "unaffected": 1, "inserted": 1, "updated": 1}
    assert of(second, "numTargetRowsNotMatchedBySourceDeleted") == [1]
    assert [field.name for field in spark.read.format("delta").load(tmp_table).schema] == ["id", "v", "name"]


def test_the_same_snapshot_again_commits_nothing(spark: SparkSession, tmp_table: str):
    stream = stream_of(spark, tmp_table)
    stream.deliver(ONE, (2, None, "two"))
    before = stream.versions()

    result = stream.deliver((2, None, "two"), ONE)

    assert (result.outcome, result.version, ledger(result)) == ("no_change", None, {"received": 2, "unaffected": 2})
    assert stream.versions() == before


@pytest.mark.engines("spark")
def test_a_large_copy_is_held_against_its_table_as_a_small_one_is(
    spark: SparkSession, tmp_table: str, monkeypatch: pytest.MonkeyPatch
):
    """Rows with a key that nothing equals, and with one that the table has twice, count as rows and not as new keys."""
    monkeypatch.setattr(whole, "BROADCAST_EVENTS", 0)
    stream = stream_of(spark, tmp_table)
    stream.deliver(ONE, TWO)
    spark.sql(f"INSERT INTO delta.`{tmp_table}` VALUES (1, 1, 'one'), (NULL, 0, 'nobody')")

    with pytest.raises(ContractError, match=r"would delete 2 of 4 rows \(50.0%\)"):
        stream.deliver(ONE, THREE, shape=Snapshot(max_delete_share=0.4))
    kept = Snapshot(delete_missing=False)
    assert stream.deliver(ONE, TWO, shape=kept).outcome == "no_change"
    assert ledger(stream.deliver(ONE, THREE, shape=kept)) == {"received": 2, "unaffected": 1, "inserted": 1}


def test_flagged_rows_stay_untouched_until_their_key_returns(spark: SparkSession, tmp_table: str):
    stream = stream_of(spark, tmp_table, missing={**FLAG, "gone": "concat(t.name, '!')"})
    stream.deliver(ONE, TWO)
    assert stream.rows() == [(*ONE, None, None), (*TWO, None, None)]

    flagged = stream.deliver(ONE)
    gone = stream.rows()[1]
    assert (gone[:3], gone[4]) == (TWO, "two!")
    assert isinstance(gone[3], dt.datetime)
    assert of(flagged, "numTargetRowsNotMatchedBySourceUpdated") == [1]

    assert stream.deliver(ONE).outcome == "no_change"
    stream.deliver(ONE, THREE)
    assert stream.rows()[1] == gone

    back = stream.deliver(ONE, TWO, THREE)
    assert ledger(back) == {"received": 3, "unaffected": 2, "updated": 1}
    assert stream.rows() == [(*row, None, None) for row in (ONE, TWO, THREE)]


def as_told(rows: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Rows in order, each with its flag as whether it is set."""
    return sorted(((*row[:3], (*row, None)[3] is not None) for row in rows), key=repr)


def due(
    stored: Mapping[int, tuple[Any, ...]], rows: Mapping[int, tuple[Any, ...]], *, flags: bool, name: str | None
) -> tuple[dict[int, tuple[Any, ...]], Counter[tuple[Any, ...]], dict[str, int]]:
    """What a snapshot makes of rows by key: rows, changes and ledger.

    Args:
        stored: id, v, name, whether it is flagged.
        rows: of the snapshot.
        flags: whether missing rows are flagged; else they are deleted.
        name: of the rows that may be missing; None for all.
    """
    changes: Counter[tuple[Any, ...]] = Counter()
    fates: Counter[str] = Counter({"received": len(rows)} if rows else {})
    after = dict(stored)
    for key, row in rows.items():
        before = stored.get(key)
        after[key] = (*row, False)
        if before is None:
            changes["insert", *row] += 1
            fates["inserted"] += 1
        elif before != after[key]:
            changes["update_preimage", *before[:3]] += 1
            changes["update_postimage", *row] += 1
            fates["updated"] += 1
        else:
            fates["unaffected"] += 1
    for key, row in stored.items():
        if key in rows or row[3] or name not in (None, row[2]):
            continue
        if flags:
            after[key] = (*row[:3], True)
            changes["update_preimage", *row[:3]] += 1
            changes["update_postimage", *row[:3]] += 1
        else:
            del after[key]
            changes["delete", *row[:3]] += 1
    return after, changes, dict(fates)


def changes_by_version(spark: SparkSession, target: str) -> dict[int, Counter[tuple[Any, ...]]]:
    """What the feed tells of each version; nothing of a table that is not there."""
    found: dict[int, Counter[tuple[Any, ...]]] = defaultdict(Counter)
    for version, *change in change_rows(spark, target) if on_disk(target).exists() else ():
        found[version][tuple(change[:4])] += 1
    return found


@pytest.mark.parametrize("round_", range(6))
def test_random_snapshots_leave_what_a_plain_model_says(
    spark: SparkSession, tmp_table: str, monkeypatch: pytest.MonkeyPatch, seed: int, round_: int
):
    """Rows, change feed and ledger: deleting or flagging, with a window or not, with deletion vectors or not.

    Small copies, in which the rows are looked up, and such as count for large ones. After each of them the rows are
    read as the log has them, at the end by Spark; the feed says then what each version changed.
    """
    rng = random.Random(f"{seed} {round_}")
    monkeypatch.setattr(whole, "BROADCAST_EVENTS", rng.choice((0, whole.BROADCAST_EVENTS)))
    flags, has_window = rng.random() < 0.5, rng.random() < 0.5
    stream = stream_of(
        spark,
        tmp_table,
        missing=FLAG if flags else None,
        within="t.name = 'in'" if has_window else None,
        min_rows=0,
        settings={"table_properties": {"delta.enableDeletionVectors": rng.choice(("true", "false"))}},
    )
    stored: dict[int, tuple[Any, ...]] = {}
    """Key -> id, v, name, whether it is flagged."""
    made: dict[int | None, Counter[tuple[Any, ...]]] = {}
    """What each version has to change."""
    if has_window:  # rows outside of it, as another job leaves them
        outside = [(key, 0, "out") for key in range(0, 9, 4)]
        first = stream.deliver(*outside, shape=Snapshot(max_delete_share=1.0))
        made[first.version] = Counter({("insert", *row): 1 for row in outside})
        stream.settings["shape"] = Snapshot(within="t.name = 'in'", min_rows=0, missing=FLAG if flags else None, **ANY)
        stored = {row[0]: (*row, False) for row in outside}
        if flags:
            stream.settings["schema_evolution"] = True
    for _ in range(4):
        keys = rng.sample(range(9), rng.randrange(7))
        names = ("in",) if has_window else ("in", None)
        rows = {key: (key, rng.choice((None, 1, 2)), rng.choice(names)) for key in keys}
        result = stream.deliver(*rows.values())

        after, expected, fates = due(stored, rows, flags=flags, name="in" if has_window else None)
        rows_now = live_rows(on_disk(tmp_table)).to_pylist() if on_disk(tmp_table).exists() else []
        assert as_told([tuple(row.values()) for row in rows_now]) == sorted(after.values(), key=repr)
        assert ledger(result) == fates
        assert (result.version is None) == (not expected)
        if expected:
            made[result.version] = expected
        stored = after

    assert changes_by_version(spark, tmp_table) == made
    if made:
        assert as_told(stream.rows()) == sorted(stored.values(), key=repr)


# -- guards: nothing is written ---------------------------------------------------------------------


def refused(stream: ChangeStream, *rows: Sequence[Any], **settings: Any) -> str:
    """The sentence that stops a snapshot; the files of all tables are as before."""
    before = stream.versions()
    with pytest.raises(ContractError) as caught:
        stream.deliver(*rows, **settings)
    assert stream.versions() == before
    return str(caught.value)


def test_a_key_twice_a_null_key_and_too_few_rows_are_errors_before_anything_is_written(
    spark: SparkSession, tmp_table: str
):
    stream = stream_of(spark, tmp_table, min_rows=2)

    assert 'has 2 row(s) more than keys, such as {"id":1} and {"id":2};' in refused(stream, ONE, ONE, TWO, (2, 5, "x"))
    assert "1 of 3 rows of snapshot 1 for" in (said := refused(stream, ONE, TWO, (None, 1, "x")))
    assert "break the contract (null_key: 1)" in said
    assert "has 1 row(s), fewer than min_rows=2" in refused(stream, ONE)
    assert not on_disk(tmp_table).exists()


def test_an_empty_snapshot_is_refused_unless_it_may_be(spark: SparkSession, tmp_table: str):
    stream = stream_of(spark, tmp_table)
    stream.deliver(ONE, TWO)

    assert "has 0 row(s), fewer than min_rows=1" in refused(stream)

    result = stream.deliver(shape=Snapshot(min_rows=0, **ANY))
    assert (result.outcome, ledger(result), stream.rows()) == ("committed", {}, [])
    assert stream.deliver().outcome == "empty"


def test_too_many_missing_rows_are_an_error_with_both_numbers_and_the_remedy(spark: SparkSession, tmp_table: str):
    stream = stream_of(spark, tmp_table, max_delete_share=0.25)
    stream.deliver(*((key, key, "x") for key in range(1, 9)))

    said = refused(stream, *((key, 0, "x") for key in range(1, 6)))
    assert f"snapshot 1 for {tmp_table!r} would delete 3 of 8 rows (37.5%), more than max_delete_share=0.25" in said
    assert said.endswith("merge it with max_delete_share=0.38")

    stream.deliver(*((key, 0, "x") for key in range(1, 7)))
    assert [row[0] for row in stream.rows()] == [1, 2, 3, 4, 5, 6]


def test_flagged_rows_count_neither_as_rows_nor_as_missing(spark: SparkSession, tmp_table: str):
    stream = stream_of(spark, tmp_table, max_delete_share=0.5, missing=FLAG)
    stream.deliver(ONE, TWO, THREE, (4, 4, "four"))
    stream.deliver(ONE, TWO)

    assert "would flag 2 of 2 rows (100.0%)" in refused(stream, (5, 5, "five"))
    stream.deliver(ONE, (5, 5, "five"))
    assert [row[0] for row in stream.rows() if row[3] is None] == [1, 5]


def test_a_refused_first_snapshot_leaves_no_property_on_a_table_of_others(spark: SparkSession, tmp_table: str):
    batch(spark, SCHEMA, ONE, TWO).write.format("delta").save(tmp_table)
    stream = stream_of(spark, tmp_table, max_delete_share=0.1, missing=FLAG, settings={"schema_evolution": True})

    refused(stream, ONE)

    assert spark.read.format("delta").load(tmp_table).columns == ["id", "v", "name"]


def test_an_older_snapshot_than_the_last_one_merged_is_an_error(spark: SparkSession, tmp_table: str):
    stream = stream_of(spark, tmp_table)
    stream.batch_id = 6
    stream.deliver(ONE)

    stream.batch_id = 4
    assert "snapshot 5 for" in (said := refused(stream, TWO))
    assert "is older than 7, the last one merged" in said


@pytest.mark.engines("spark")
def test_after_a_lost_commit_the_guards_see_the_table_as_it_is_then(
    spark: SparkSession, tmp_table: str, monkeypatch: pytest.MonkeyPatch
):
    """Another writer commits while the first look is being taken: what was counted does not count any more."""
    stream = stream_of(spark, tmp_table, max_delete_share=0.5)
    stream.deliver(ONE, TWO)
    look, looks = whole.Beside.would_change, []

    def disturbed(self: Any) -> bool:
        found = look(self)
        if not looks:
            batch(spark, SCHEMA, *((key, key, "x") for key in range(10, 14))).write.format("delta").mode("append").save(
                tmp_table
            )
        looks.append(found)
        return found

    monkeypatch.setattr(whole.Beside, "would_change", disturbed)
    with pytest.raises(ContractError, match=r"would delete 5 of 6 rows"):
        stream.deliver(ONE, THREE)
    assert looks == [True]
    assert len(stream.rows()) == 6


@pytest.mark.engines("spark")
def test_looks_that_another_writer_makes_worthless_end_with_the_retry_policy(
    spark: SparkSession, tmp_table: str, monkeypatch: pytest.MonkeyPatch
):
    """Each is a lost attempt: waited for, counted like a lost commit, and after the last one an error."""
    registry, waits = CollectorRegistry(), []
    mine = under_test(
        sink_with(
            target=tmp_table,
            keys="id",
            app_id="mine",
            shape=Snapshot(**ANY),
            retry=RetryPolicy(attempts=3),
            metrics=MergeMetrics(registry=registry),
        ),
        sleep=waits.append,
    )
    run(mine, batch(spark, SCHEMA, ONE, TWO), 0)
    look, disturbances = whole.Beside.would_change, [3]

    def disturbed(self: Any) -> bool:
        found = look(self)
        if disturbances[0]:
            disturbances[0] -= 1
            spark.sql(f"ALTER TABLE delta.`{tmp_table}` SET TBLPROPERTIES ('left' = '{disturbances[0]}')")
        return found

    monkeypatch.setattr(whole.Beside, "would_change", disturbed)
    with pytest.raises(
        CommitConflictError, match=r"snapshot 1 was compared with version 3 of .*now is at version 4;"
    ) as lost:
        run(mine, batch(spark, SCHEMA, ONE, THREE), 1)

    assert (lost.value.conflict, lost.value.attempts, lost.value.batch_id) == ("ConcurrentWriteException", 3, 1)
    assert lost.value.__notes__[0].startswith("gave up after 3 attempt(s)")
    assert (len(waits), target_rows(spark, tmp_table)) == (2, [ONE, TWO])

    disturbances[0] = 2
    result = run(mine, batch(spark, SCHEMA, ONE, THREE), 1)

    assert (result.attempts, dict(result.conflicts)) == (3, {"ConcurrentWriteException": 2})
    assert target_rows(spark, tmp_table) == [ONE, THREE]
    sink = {"query": "direct", "target": "table"}
    assert registry.get_sample_value("stream_merge_attempts_total", sink) == 7
    assert (
        registry.get_sample_value("stream_merge_conflicts_total", {**sink, "conflict": "ConcurrentWriteException"}) == 5
    )


def test_a_commit_lost_to_another_writer_is_tried_again_on_the_table_as_it_is_then(
    spark: SparkSession, log_faults: LogFaults, faulty_table: str
):
    """Rows of the winner count as missing, and in the share, too."""
    shapes = (Snapshot(max_delete_share=0.5), Snapshot(delete_missing=False))
    mine, other = (
        under_test(sink_with(target=faulty_table, keys="id", app_id=app_id, shape=shape), sleep=lambda _: None)
        for app_id, shape in zip(("mine", "other"), shapes, strict=True)
    )
    run(mine, batch(spark, SCHEMA, ONE, TWO, THREE), 0)

    log_faults.overtake(
        "/table/_delta_log",
        lambda: run(mine, batch(spark, SCHEMA, (1, 10, "one"), TWO), 1),
        lambda: run(other, batch(spark, SCHEMA, (3, 30, "x"), (4, 4, "x")), 0),
    )
    result = mine.last_result
    assert result is not None
    assert (result.attempts, ledger(result)) == (2, {"received": 2, "unaffected": 1, "updated": 1})
    assert target_rows(spark, faulty_table) == [(1, 10, "one"), TWO]

    with pytest.raises(ContractError, match=r"would delete 3 of 4 rows \(75.0%\)"):
        log_faults.overtake(
            "/table/_delta_log",
            lambda: run(mine, batch(spark, SCHEMA, (1, 11, "one")), 2),
            lambda: run(other, batch(spark, SCHEMA, (2, 20, "x"), (3, 3, "x"), (4, 4, "x")), 1),
        )
    assert [row[0] for row in target_rows(spark, faulty_table)] == [1, 2, 3, 4]


@pytest.mark.engines("spark")
def test_rows_that_nobody_could_count_are_told(
    spark: SparkSession, tmp_table: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Another writer commits after the last look at the version, before Delta begins its MERGE."""
    stream = stream_of(spark, tmp_table, max_delete_share=0.5)
    stream.deliver(ONE, TWO)
    execute = SparkMerger._executed

    def disturbed(self: Any, *arguments: Any) -> Any:
        batch(spark, SCHEMA, THREE, (4, 4, "x")).write.format("delta").mode("append").save(tmp_table)
        return execute(self, *arguments)

    monkeypatch.setattr(SparkMerger, "_executed", disturbed)
    stream.deliver(ONE)

    (record,) = (one for one in caplog.records if getattr(one, "event", None) == "more_rows_removed_than_counted")
    assert (record.counted, record.removed) == (1, 3)  # type: ignore[attr-defined]


# -- a window ---------------------------------------------------------------------------------------

DAYS = "id bigint, v int, day string"


def test_within_a_window_only_its_rows_are_missing(spark: SparkSession, tmp_table: str):
    stream = stream_of(spark, tmp_table, DAYS)
    stream.deliver((1, 1, "mon"), (2, 2, "mon"), (3, 3, "tue"), (4, 4, None))
    window = {"shape": Snapshot(within="t.day = 'tue'", **ANY)}

    assert "2 of 3 rows of snapshot 1 for" in (
        said := refused(stream, (3, 3, "tue"), (5, 5, "mon"), (6, 6, None), **window)
    )
    assert "are outside of within=\"t.day = 'tue'\"" in said

    moved = stream.deliver((2, 22, "tue"), (7, 7, "tue"), **window)
    assert stream.rows() == [(1, 1, "mon"), (2, 22, "tue"), (4, 4, None), (7, 7, "tue")]
    assert ledger(moved) == {"received": 2, "inserted": 1, "updated": 1}

    too_many = {"shape": Snapshot(within="t.day = 'tue'", max_delete_share=0.4)}
    assert "would delete 1 of 2 rows within \"t.day = 'tue'\" (50.0%)" in refused(stream, (2, 0, "tue"), **too_many)


def test_a_window_that_moves_stands_still_for_a_call(
    spark: SparkSession, tmp_table: str, monkeypatch: pytest.MonkeyPatch
):
    """Its check and its merge may lie on two days, and rows that nobody has checked would be deleted."""
    stream = stream_of(spark, tmp_table, DAYS)
    stream.deliver((1, 1, "2024-06-01"), (2, 2, "2024-06-02"))
    days = iter(["2024-06-01", *["2024-06-02"] * 9])
    fixed = []

    def now(_: SparkSession, written: str) -> str:
        fixed.append(written.replace("current_date()", f"DATE '{next(days)}'"))
        return fixed[-1]

    monkeypatch.setattr(target_filter, "fixed", now)
    stream.deliver((1, 9, "2024-06-01"), shape=Snapshot(within="CAST(t.day AS DATE) = current_date()", **ANY))

    assert fixed[0] == "CAST(t.day AS DATE) = DATE '2024-06-01'"
    assert stream.rows() == [(1, 9, "2024-06-01"), (2, 2, "2024-06-02")]


def test_missing_rows_may_be_left_alone(spark: SparkSession, tmp_table: str):
    stream = stream_of(spark, tmp_table, delete_missing=False, max_delete_share=0.0)
    stream.deliver(ONE, TWO)

    assert stream.deliver(TWO).outcome == "no_change"
    stream.deliver((2, 5, "x"))
    assert stream.rows() == [ONE, (2, 5, "x")]


# -- source and target ------------------------------------------------------------------------------


def test_what_does_not_fit_is_one_error_before_anything_is_written(spark: SparkSession, tmp_table: str):
    stream = stream_of(spark, tmp_table)
    stream.deliver(ONE)

    for wanted, shape in {
        "within='t.nix = 1' over the table does not fit": Snapshot(within="t.nix = 1"),
        "within='rand\\(\\) < 1' over the table is not deterministic": Snapshot(within="rand() < 1"),
        "missing sets column 'deleted_at', which .* lacks; set schema_evolution=True": Snapshot(missing=FLAG),
        "missing sets column 'name', which the source has, too": Snapshot(missing={"name": "'x'"}),
        "missing sets 'x' to 'NULL', which is void": Snapshot(missing={"x": "NULL"}),
        "missing sets 'x' to 't.nix', which does not fit": Snapshot(missing={"x": "t.nix"}),
    }.items():
        with pytest.raises(ConfigError, match=wanted):
            stream.deliver(ONE, shape=shape)
    with pytest.raises(ConfigError, match=r"'t\.v' of 'x' in missing may be NULL, and then flags no row"):
        stream.deliver(ONE, shape=Snapshot(missing={"x": "t.v"}), schema_evolution=True)
    with pytest.raises(ConfigError, match="was filled as snapshot and would now be as insert-only"):
        stream.deliver(ONE, shape=InsertOnly())
    assert len(stream.rows()) == 1


def test_new_columns_and_flags_are_added_where_the_schema_may_evolve(spark: SparkSession, tmp_table: str):
    batch(spark, SCHEMA, ONE, TWO).write.format("delta").save(tmp_table)
    stream = stream_of(spark, tmp_table, missing=FLAG, settings={"schema_evolution": True})

    stream.deliver((1, 1, "one", "n"), schema=f"{SCHEMA}, note string")

    assert [(row[0], row[3] is not None, row[4]) for row in stream.rows()] == [(1, False, "n"), (2, True, None)]


def test_columns_of_the_table_s_own_are_kept(spark: SparkSession, tmp_table: str):
    batch(spark, f"{SCHEMA}, own string", (*ONE, "a"), (*TWO, "b")).write.format("delta").save(tmp_table)
    stream = stream_of(spark, tmp_table)

    result = stream.deliver(ONE, (2, 5, "x"), THREE)

    assert ledger(result) == {"received": 3, "unaffected": 1, "inserted": 1, "updated": 1}
    assert stream.rows() == [(*ONE, "a"), (2, 5, "x", "b"), (*THREE, None)]


def test_a_table_of_the_catalog_whose_names_need_quotes(spark: SparkSession):
    target = "default.a_snapshot"
    own = {"keys": ["the id"], "app_id": "test", "shape": Snapshot(missing={"gone-at": "current_timestamp()"}, **ANY)}
    schema = "`the id` bigint, `a.b` struct<x: double, m: map<string, int>>"
    nan = (float("nan"), {"k": 1})
    sink = under_test(sink_with(target=target, **own))
    try:
        run(sink, batch(spark, schema, (1, nan), (2, nan)), 0)
        again = run(sink, batch(spark, schema, (2, nan), (1, nan)), 1)
        flagged = run(sink, batch(spark, schema, (2, (0.0, {"k": 2}))), 2)
        back = run(sink, batch(spark, schema, (1, nan), (2, (-0.0, {"k": 2}))), 3)

        assert (again.outcome, flagged.outcome) == ("no_change", "committed")
        assert ledger(back) == {"received": 2, "unaffected": 1, "updated": 1}
        assert target_rows(spark, "default.a_snapshot", "the id", "gone-at") == [(1, None), (2, None)]
    finally:
        spark.sql(f"DROP TABLE IF EXISTS {target}")


def test_with_deletion_vectors_unchanged_rows_are_not_written_again(spark: SparkSession, tmp_table: str):
    spark.range(40_000).selectExpr("id", "CAST(id AS INT) AS v", "uuid() AS name").coalesce(1).write.format(
        "delta"
    ).option("delta.enableDeletionVectors", "true").save(tmp_table)
    stream = stream_of(spark, tmp_table)
    copy = (
        spark.read.format("delta").load(tmp_table).where("id != 7").selectExpr("id", "IF(id = 5, -1, v) AS v", "name")
    )

    result = stream.deliver_frame(copy.localCheckpoint())

    assert ledger(result) == {"received": 39_999, "unaffected": 39_998, "updated": 1}
    assert of(result, "numTargetRowsCopied", "numTargetDeletionVectorsAdded") == [0, 1]
