"""What a MERGE on Spark leaves unread, and that no row is missed by it.

Needs a JVM: which files are read, and that the rows are those of a merge that reads everything, is Delta's to say.
"""

from __future__ import annotations

import datetime
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from deliveries import ChangeStream, from_sql, ledger
from generated import create_generated
from pyspark.sql import DataFrame, SparkSession
from since import since
from traces import commits, jobs_so_far

from stream_merge import ConfigError, ContractError, MergeFailedError, MergeSink
from stream_merge.engines.spark.merger import SparkMerger
from stream_merge.engines.spark.pruning import MOST_VALUES
from stream_merge.model.results import MergeResult
from stream_merge.shapes import Clauses, target_filter, when_matched, when_not_matched, when_not_matched_by_source
from stream_merge.spark.versions import SPARK
from stream_merge.testing import target_rows

SCHEMA = "id bigint, day date, lsn bigint, op string, name string"
OF_DAYS = {"keys": ["id"], "sequence_by": "lsn", "apply_as_deletes": "op = 'd'", "except_column_list": ["op"]}
JUNE = "t.day >= DATE '2024-06-01'"


def create(spark: SparkSession, path: str, columns: str, by: str, rows: str | None = None) -> None:
    spark.sql(f"CREATE TABLE delta.`{path}` ({columns}) USING delta PARTITIONED BY ({by})")
    if rows is not None:
        spark.sql(f"INSERT INTO delta.`{path}` {rows}")


@pytest.fixture
def days(spark: SparkSession, tmp_table: str) -> ChangeStream:
    """Twelve partitions of ten rows, a month each; keys lie in all of them."""
    create(
        spark,
        tmp_table,
        "id bigint, day date, lsn bigint, name string",
        "day",
        "SELECT id, make_date(2024, 1 + CAST(id % 12 AS INT), 1), 1, 'old' FROM range(0, 120, 1, 1)",
    )
    return ChangeStream(spark, tmp_table, SCHEMA, **OF_DAYS, target_filter=JUNE, folder=Path(tmp_table).parent)


def event(key: int, month: int, *, lsn: int = 2, op: str = "u", name: str | None = "new") -> tuple[Any, ...]:
    return (key, datetime.date(2024, month, 1), lsn, op, name)


@since((4, 0), "metrics of what was left unread")
@pytest.mark.smoke
def test_a_merge_reads_what_the_filter_says_and_nothing_else(days: ChangeStream):
    """Of 12 files that the bounds of the keys leave 7; the replay of the stream looks again, and finds it applied."""
    result = days.deliver(event(5, 6), event(119, 12), event(500, 7), event(10, 11, op="d", name=None))

    assert ledger(result) == {"received": 4, "inserted": 1, "updated": 2, "deleted": 1}
    assert result.engine == "spark"
    assert result.refusal == "filter"
    assert result.plan.endswith(f"key bounds on id, within {JUNE}")
    before, after = (result.metrics[f"numTargetFiles{when}Skipping"] for when in ("Before", "After"))
    assert (before, after) == (12, 7)


@pytest.mark.parametrize("op", ["u", "d"])
def test_rows_of_the_batchs_keys_outside_stop_it_before_anything_is_written(days: ChangeStream, op: str):
    """Of a delete as of an upsert; also the broken event of the batch is written nowhere."""
    (tables,) = (sorted(Path(days.target).parent.iterdir()),)
    versions, rows = len(commits(days.target)), days.rows()

    with pytest.raises(ContractError, match=r'outside of target_filter=.*, such as \{"id":4\};') as raised:
        days.deliver(event(5, 6), event(4, 6, op=op), (None, None, 2, "u", "broken"))

    assert "nothing was written, widen or remove the filter" in str(raised.value)
    assert (len(commits(days.target)), days.rows()) == (versions, rows)
    assert sorted(Path(days.target).parent.iterdir()) == tables


def test_a_row_for_which_the_filter_is_null_lies_outside(spark: SparkSession, tmp_table: str):
    create(spark, tmp_table, "id bigint, day date, lsn bigint, name string", "day", "VALUES (1, NULL, 1, 'old')")
    stream = ChangeStream(spark, tmp_table, SCHEMA, **OF_DAYS, target_filter=JUNE)

    with pytest.raises(ContractError, match=r'outside of target_filter=.*, such as \{"id":1\};'):
        stream.deliver(event(1, 7))

    assert target_rows(spark, tmp_table, "id", "name") == [(1, "old")]


def before_each(monkeypatch: pytest.MonkeyPatch, step: str, action: Callable[[], Any]) -> None:
    """Do something between the looks at the table and a step of the merger, once."""
    whole = getattr(SparkMerger, step)

    def overtaken(self: SparkMerger, *args: Any) -> Any:
        monkeypatch.setattr(SparkMerger, step, whole)
        action()
        return whole(self, *args)

    monkeypatch.setattr(SparkMerger, step, overtaken)


def another_writer(days: ChangeStream) -> Callable[[], Any]:
    return lambda: days.spark.sql(f"INSERT INTO delta.`{days.target}` VALUES (700, DATE '2024-01-01', 1, 'foreign')")


def test_a_row_that_another_writer_brings_before_the_merge_is_seen(days: ChangeStream, monkeypatch: pytest.MonkeyPatch):
    before_each(monkeypatch, "merge", another_writer(days))

    with pytest.raises(ContractError, match=r'such as \{"id":700\}'):
        days.deliver(event(700, 7))

    assert (700, "foreign") in target_rows(days.spark, days.target, "id", "name")
    assert (700, "new") not in target_rows(days.spark, days.target, "id", "name")


def test_one_that_comes_between_the_last_look_and_the_merge_is_told_of(
    days: ChangeStream, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Delta itself lets such an insert pass beside a MERGE that does not read its partition."""
    before_each(monkeypatch, "_executed", another_writer(days))

    days.deliver(event(700, 7))

    (told,) = [record for record in caplog.records if getattr(record, "event", None) == "keys_outside_of_filter"]
    assert '{"id":700}' in str(told.getMessage()).replace("\\", "")


def test_clauses_about_rows_without_an_event_keep_to_the_filter(days: ChangeStream):
    """Half a year of rows has no event, and only the half inside of the filter goes."""
    shape = Clauses(
        [
            when_matched().update({"name": "s.name"}),
            when_not_matched().insert_all(),
            when_not_matched_by_source("t.id > 20").delete(),
        ]
    )
    days.settings |= {"shape": shape, "apply_as_deletes": None, "tombstones": False, "sequence_by": ()}

    result = days.deliver(event(5, 6), event(500, 7))

    kept = [(key, day.month, name) for key, day, name in target_rows(days.spark, days.target, "id", "day", "name")]
    assert {row for row in kept if row[1] < 6} == {(i, 1 + i % 12, "old") for i in range(120) if i % 12 < 5}
    assert {row for row in kept if row[1] >= 6} == {
        *((i, 1 + i % 12, "new" if i == 5 else "old") for i in range(21) if i % 12 >= 5),
        (500, 7, "new"),
    }
    assert ledger(result)["updated"] == 1


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("t.nope = 1", "`t`.`nope` cannot be resolved"),
        ("day >= DATE '2024-06-01'", "write columns as t.<name>"),
        ("s.day >= DATE '2024-06-01'", "it applies to the target's row t"),
        ("t.day", "is not a boolean"),
        ("rand() < 0.5", "is not deterministic"),
        ("unix_timestamp() > t.lsn", "may differ from query to query; for the time use current_date()"),
        ("t.name <> current_user()", "may differ from query to query"),
        ("t.lsn IN (SELECT 1)", "has a subquery"),
        ("max(t.lsn) > 1", "invalid expressions: max(t.lsn)"),
    ],
)
def test_what_is_no_filter_is_one_sentence(days: ChangeStream, written: str, said: str):
    with pytest.raises(ConfigError) as raised:
        days.deliver(event(5, 6), target_filter=written)

    (problem,) = raised.value.problems
    assert problem.startswith(f"[INVALID_EXPRESSION] target_filter={written!r}")
    assert said in problem
    assert len(commits(days.target)) == 2


def test_times_are_looked_up_once_and_in_nobodys_texts(spark: SparkSession):
    """In quotes and comments, and as columns, they are no times."""
    written = (
        "t.day >= Current_Date - 7 AND t.ts < NOW ( ) AND t.now = `now()` AND t.text = 'it''s now() \\' now()'"
        ' /* now() */ AND t.current_date <> "current_date" AND LOCALTIMESTAMP() > t.u -- now()'
    )

    fixed = target_filter.fixed(spark, written)

    assert target_filter.fixed(spark, r"t.p = r'C:\' AND t.x = 'now()'") == r"t.p = r'C:\' AND t.x = 'now()'"
    assert target_filter.fixed(spark, fixed) == fixed
    day, instant = spark.sql("SELECT current_date(), now()").first()
    assert f">= DATE '{day}' - 7" in fixed
    assert "t.ts < timestamp_micros(" in fixed
    assert "TIMESTAMP_NTZ '" in fixed
    for kept in ("t.now", "`now()`", "'it''s now() \\' now()'", "/* now() */", 't.current_date <> "current_date"'):
        assert kept in fixed
    assert fixed.endswith("-- now()")
    assert spark.sql(f"SELECT {fixed.split('t.ts < ')[1].split(' AND')[0]} <= TIMESTAMP '{instant}'").first()[0]


def sink_of(target: str, *keys: str) -> MergeSink:
    return MergeSink(target=target, keys=keys, sequence_by="lsn", engine="spark", app_id="a", tombstones=False)


COLUMNS = "id bigint, day date, part string, lsn bigint, name string"
TEXTS = ("'a'", "'ab'", "'é'", "' '", "'a/b=c%20'", "'ﬀ\U0001f600'")
TYPES = {"id": "bigint", "day": "date", "part": "string", "lsn": "bigint", "name": "string"}


def some(spark: SparkSession, rng: random.Random, lsn: int, texts: Sequence[str]) -> DataFrame:
    rows = [
        {
            "id": str(rng.randrange(6)),
            "day": f"date_add(DATE '2023-12-30', {rng.randrange(4) * rng.choice([1, 100])})",
            "part": f"CAST({rng.choice(texts)} AS STRING)",
            "lsn": str(lsn + rng.randrange(3)),
            "name": f"'{lsn}'",
        }
        for _ in range(rng.randrange(1, 6))
    ]
    return from_sql(spark, rows, TYPES)


def test_partitions_of_keys_are_all_that_is_read_and_no_row_is_missed(spark: SparkSession, tmp_path: Path, seed: int):
    """A random history into a table with these partitions and into one without: the same rows."""
    rng = random.Random(seed)
    paths = [str(tmp_path / name) for name in ("parted", "whole")]
    create(spark, paths[0], COLUMNS, "day, part")
    spark.sql(f"CREATE TABLE delta.`{paths[1]}` ({COLUMNS}) USING delta")
    sinks = [sink_of(path, "id", "day", "part") for path in paths]
    skipped = 0
    for number in range(5):
        events = some(spark, rng, 10 * number, TEXTS)
        results: list[MergeResult] = []
        for sink in sinks:
            sink(events, number)
            assert sink.last_result is not None
            results.append(sink.last_result)
        assert results[0].events == results[1].events
        metrics = results[0].metrics
        skipped += metrics.get("numTargetFilesBeforeSkipping", 0) - metrics.get("numTargetFilesAfterSkipping", 0)
        texts = [f"SELECT id, day, hex(part), lsn, name FROM delta.`{path}`" for path in paths]
        rows = [sorted(map(tuple, spark.sql(text).collect())) for text in texts]
        assert rows[0] == rows[1]
    assert skipped > 0 or SPARK < (4, 0), "Delta 3.3 tells nothing of files that are left"


@since((4, 0), "a metric of the files that are left")
def test_partitions_between_those_of_the_keys_stay_unread_and_a_single_one_costs_no_job(
    spark: SparkSession, tmp_table: str
):
    rows = "SELECT id, date_add(DATE '2024-01-01', CAST(id AS INT)), 'p', 1, 'old' FROM range(0, 50, 1, 1)"
    create(spark, tmp_table, COLUMNS, "day", rows)
    sink = sink_of(tmp_table, "id", "day")

    def merged(batch_id: int, *wanted: int) -> tuple[int, int]:
        at = ", ".join(f"({i}, date_add(DATE '2024-01-01', {i}), 'p', {batch_id}, 'new')" for i in wanted)
        before = jobs_so_far(spark)
        sink(
            spark.sql(f"SELECT * FROM VALUES {at} AS t(id, day, part, lsn, name)").selectExpr(
                *(f"CAST({name} AS {kind}) {name}" for name, kind in TYPES.items())
            ),
            batch_id,
        )
        assert sink.last_result is not None
        return sink.last_result.metrics["numTargetFilesAfterSkipping"], jobs_so_far(spark) - before

    merged(2, 0, 49)  # the first call has jobs of its own
    far, jobs = merged(3, 0, 49)
    one, fewer = merged(4, 7)

    assert (far, one) == (2, 1)
    assert fewer < jobs
    many, _ = merged(5, *range(min(50, MOST_VALUES)))
    assert many == 50


def test_a_row_is_seen_in_the_partition_of_another_time_zones_date(spark: SparkSession, tmp_table: str):
    """A row that was written under another time zone is in the partition of that zone's date.

    It is found there: Delta refuses to write it again with another date, where a merge that had not seen it would have
    inserted its key a second time.
    """
    columns = "at timestamp, lsn bigint, name string"
    create_generated(spark, tmp_table, columns, {"day date": "CAST(at AS DATE)"}, ["day"])
    zone = "spark.sql.session.timeZone"
    events = "SELECT at, {}L lsn, 'x' name FROM VALUES (timestamp_micros(1717200000000000)) AS t(at)"
    before = spark.conf.get(zone)
    try:
        spark.conf.set(zone, "Pacific/Kiritimati")
        sink_of(tmp_table, "at")(spark.sql(events.format(1)), 0)
        spark.conf.set(zone, "America/Los_Angeles")
        with pytest.raises(MergeFailedError, match="DELTA_VIOLATE_CONSTRAINT"):
            sink_of(tmp_table, "at")(spark.sql(events.format(2)), 1)
    finally:
        spark.conf.set(zone, before)

    assert target_rows(spark, tmp_table, "lsn", "name") == [(1, "x")]


def test_a_filter_that_would_read_the_event_beside_the_events_is_refused(spark: SparkSession, tmp_table: str):
    """`s.day` is a field of the row's struct where rows are alone, and the event's column in the MERGE."""
    columns = "id bigint, day bigint, s struct<day: int>, lsn bigint"
    spark.sql(f"CREATE TABLE delta.`{tmp_table}` ({columns}) USING delta")
    sink = MergeSink(target=tmp_table, keys="id", sequence_by="lsn", target_filter="s.day >= 5", app_id="a")

    with pytest.raises(ConfigError, match=r"refers to a column of the event; .* write columns as t.<name>"):
        sink(spark.sql("SELECT 1L id, 3L day, named_struct('day', 7) s, 1L lsn"), 0)
    assert len(commits(tmp_table)) == 1
    sink = MergeSink(target=tmp_table, keys="id", sequence_by="lsn", target_filter="t.s.day >= 5", app_id="a")
    sink(spark.sql("SELECT 1L id, 3L day, named_struct('day', 7) s, 1L lsn"), 0)
    assert target_rows(spark, tmp_table, "id") == [(1,)]


def test_a_target_that_cannot_be_seen_is_not_one_without_changes(days: ChangeStream, monkeypatch: pytest.MonkeyPatch):
    """Such as a mount that was lost for a moment: the batch must come again."""
    away = Path(f"{days.target}-away")
    before_each(monkeypatch, "merge", lambda: Path(days.target).rename(away))

    with pytest.raises(MergeFailedError, match="disappeared after batch 0 was read; restore it"):
        days.deliver(event(5, 6))
    away.rename(days.target)

    result = days.deliver(event(5, 6))
    assert ledger(result) == {"received": 1, "updated": 1}
