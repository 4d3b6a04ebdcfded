"""A replay of quarantined records that is killed on its way: merged once all the same, and none is lost.

On Spark: what is asked is how the commits of two Delta tables stand to each other.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, nullcontext
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from files_job import Job
from pyspark.sql import SparkSession
from rich.console import Console

from stream_merge import MergeFailedError, MergeSink
from stream_merge.jobs.files import run
from stream_merge.jobs.files.replay import Replayed
from stream_merge.jobs.files.run import replay_quarantine
from stream_merge.merge import commit as committing
from stream_merge.merge import steps
from stream_merge.model.table_ref import TableRef
from stream_merge.shapes import Changes, Clauses, when_matched, when_not_matched
from stream_merge.tables import spark_table
from stream_merge.tables.side import replay_claims
from stream_merge.tables.side.replay_claims import Claims, Unfinished
from stream_merge.testing import batch, target_rows
from stream_merge.testing import run as run_batch

ADDING = Clauses([when_matched().update({"n": "t.n + s.n"}), when_not_matched().insert({"id": "s.id", "n": "s.n"})])
"""Not idempotent: what is merged twice is counted twice."""
SCHEMA = "id bigint, n bigint"
FULL = "the disk is full"


class Killed(BaseException):
    """In place of the end of the process: nothing behind it may clean up."""


class AddingJob(Job):
    """A folder of numbers that are added up; `broken` records are readable once their schema is repaired."""

    def settings(self, *args: Any, **options: Any) -> Any:
        return super().settings(*args, **{"shape": ADDING, "schema": "id bigint, n int", **options})

    @property
    def quarantine(self) -> TableRef:
        return TableRef(str(Path(self.target).with_name("__stream_merge_quarantine_customers")))

    def replay(self, **options: Any) -> Replayed:
        console, settings = Console(file=StringIO(), width=200), self.settings(**{"schema": SCHEMA, **options})
        return replay_quarantine(settings, console=console, start_session=lambda: self.spark)

    def marked(self) -> list[bool]:
        return [at is not None for (at,) in target_rows(self.spark, str(self.quarantine), "replayed_at")]


@pytest.fixture
def job(spark: SparkSession, tmp_path: Path) -> AddingJob:
    """Key 1 has 5; what would add 3,000,000,000 to it is in quarantine, for its number was read as an int."""
    job = AddingJob(spark, tmp_path)
    (job.source / "a.json").write_text('{"id": 1, "n": 5}\n')
    job(schema=SCHEMA)
    (job.source / "b.json").write_text('{"id": 1, "n": 3000000000}\n')
    job()
    assert (job.rows(), job.marked()) == ([(1, 5)], [False])
    return job


def killed(*_: Any, **__: Any) -> None:
    raise Killed


def kill_before_the_merge(job: AddingJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay has claimed its records, and that is all."""
    with monkeypatch.context() as dying:
        dying.setattr(MergeSink, "__call__", killed)
        dying.setattr(Claims, "settle", lambda claims: None if claims._claimed() is None else killed())
        with pytest.raises(Killed):
            job.replay()


def test_a_replay_that_is_killed_behind_its_merge_is_not_merged_again(
    job: AddingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as dying:
        dying.setattr(Claims, "_end", killed)
        with pytest.raises(Killed):
            job.replay()

    again = job.replay()

    assert (again.records, job.rows(), job.marked()) == (0, [(1, 3_000_000_005)], [True])


def test_a_replay_that_is_killed_before_its_merge_is_merged_by_the_next_one(
    job: AddingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_before_the_merge(job, monkeypatch)
    assert (job.rows(), job.marked()) == ([(1, 5)], [True])

    again = job.replay()

    assert (again.marked, job.rows(), job.marked()) == (1, [(1, 3_000_000_005)], [True])
    assert job.replay().records == 0


def test_records_of_a_replay_that_fails_are_open_again(job: AddingJob, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> None:
        raise MergeFailedError(FULL)

    with monkeypatch.context() as full:
        full.setattr(MergeSink, "__call__", failing)
        with pytest.raises(MergeFailedError, match=FULL):
            job.replay()

    assert (job.rows(), job.marked()) == ([(1, 5)], [False])
    assert job.replay().marked == 1


@pytest.mark.parametrize("clock", [[0, 4_000, 2_000], [0, 2_000, 4_000]], ids=["earlier", "later"])
def test_a_replay_beside_another_one_merges_nothing(
    job: AddingJob, monkeypatch: pytest.MonkeyPatch, clock: list[int]
) -> None:
    """The other claims between its look and its own claim, whichever of them has the later time."""
    times = iter(clock)

    def other_claims_first() -> int:
        now = next(times)
        if not now:
            places = spark_table.rows(job.spark, job.quarantine).select("topic", "offset", "timestamp", "raw_value")
            claims = replay_claims.query_claims(job.spark, job.quarantine, TableRef(job.target), owner=job.checkpoint)
            assert claims is not None
            claims._claim(places)
            now = next(times)
        return now

    monkeypatch.setattr(replay_claims.time, "time_ns", other_claims_first)
    with pytest.raises(MergeFailedError, match="another replay has taken records of"):
        job.replay()

    assert (job.rows(), job.marked()) == ([(1, 5)], [True])


def test_a_merge_that_is_still_under_way_when_its_claim_is_settled_fails(
    job: AddingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process may be taken for dead where storage keeps no two of them apart; the records are merged once."""
    merge = MergeSink.__call__
    beside: list[Replayed] = []

    def late(sink: MergeSink, *args: Any) -> None:
        if not beside:
            beside.append(Replayed())
            beside[0] = job.replay()
        merge(sink, *args)

    monkeypatch.setattr(MergeSink, "__call__", late)
    monkeypatch.setattr(run, "_alone", lambda _: nullcontext(ExitStack()))
    with pytest.raises(MergeFailedError, match="another replay has taken records of"):
        job.replay()

    assert (beside[0].marked, job.rows(), job.marked()) == (1, [(1, 3_000_000_005)], [True])
    assert job.replay().records == 0


def test_a_merge_that_lands_right_before_its_claim_is_settled_is_not_repeated(
    job: AddingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look for its id and the commit that takes it: by Delta's rules both may stand in the table."""
    kill_before_the_merge(job, monkeypatch)
    claims = replay_claims.query_claims(job.spark, job.quarantine, TableRef(job.target), owner=job.checkpoint)
    assert claims is not None
    at = claims._claimed()
    assert at is not None
    sink = run._sink(job.settings(schema=SCHEMA), f"replay/{at}")
    look = Claims._fate

    seen: list[object] = []

    def lands_behind_the_second_look(claims: Claims, at: int) -> object:
        seen.append(look(claims, at))
        if len(seen) == 2:
            run_batch(sink, batch(job.spark, SCHEMA, (1, 3_000_000_000)), 0)
        return seen[-1]

    with monkeypatch.context() as late:
        late.setattr(Claims, "_fate", lands_behind_the_second_look)
        left = claims.settle()

    fate = replay_claims._Fate
    assert (seen, look(claims, at)) == ([fate.OPEN, fate.OPEN, fate.LANDED_BEFORE_FENCE], fate.LANDED)
    assert left == Unfinished(at=at)
    again = job.replay()
    assert (again.records, job.rows(), job.marked()) == (0, [(1, 3_000_000_005)], [True])


@pytest.mark.parametrize("step", ["prepare", "remember_deletes"])
def test_a_merge_that_comes_too_late_forgets_no_delete(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Its upsert would have revived the key, and is not in the table: an older one would."""
    job = AddingJob(spark, tmp_path)
    changes = {"shape": Changes(), "sequence_by": ("n",), "apply_as_deletes": "gone"}
    wide, narrow = f"{SCHEMA}, gone boolean", "id bigint, n int, gone boolean"
    for name, schema, record in (
        ("a", wide, '{"id": 1, "n": 5, "gone": false}'),
        ("b", wide, '{"id": 1, "n": 10, "gone": true}'),
        ("c", narrow, '{"id": 1, "n": 3000000000, "gone": false}'),
    ):
        (job.source / f"{name}.json").write_text(record + "\n")
        job(schema=schema, **changes)
    begun = getattr(steps, step)

    def late(*args: Any) -> Any:
        claims = replay_claims.query_claims(job.spark, job.quarantine, TableRef(job.target), owner=job.checkpoint)
        assert claims is not None
        claims.settle()  # as a job does that starts elsewhere
        return begun(*args)

    with monkeypatch.context() as beside:
        beside.setattr(steps, step, late)
        with pytest.raises(MergeFailedError, match="another replay has taken records of"):
            job.replay(schema=wide, **changes)
    (job.source / "d.json").write_text('{"id": 1, "n": 8, "gone": false}\n')
    job(schema=wide, **changes)

    assert (job.rows(), job.marked()) == ([], [False])


def test_a_claim_is_known_by_its_checkpoint_however_it_is_spelled(job: AddingJob) -> None:
    places = spark_table.rows(job.spark, job.quarantine).select("topic", "offset", "timestamp", "raw_value")
    spelled = (f"file://{job.checkpoint}/", os.path.relpath(job.checkpoint))
    ours, *others = (
        replay_claims.query_claims(job.spark, job.quarantine, TableRef(job.target), owner=owner)
        for owner in (job.checkpoint, *spelled)
    )
    assert ours is not None
    at = ours._claim(places)
    assert [other and other._claimed() for other in others] == [at, at]


def test_what_a_replay_has_left_undone_is_done_by_the_next_one(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delete that another query has remembered, and not merged yet, refuses the row, as when a batch comes again."""
    job = AddingJob(spark, tmp_path)
    changes = {"shape": Changes(), "sequence_by": ("n",), "apply_as_deletes": "gone"}
    (job.source / "a.json").write_text('{"id": 7, "n": 5, "gone": false}\n')
    job(schema=f"{SCHEMA}, gone boolean", **changes)
    (job.source / "b.json").write_text('{"id": 1, "n": 3000000000, "gone": false}\n')
    job(schema="id bigint, n int, gone boolean", **changes)

    def overtaken(*_: Any) -> Any:
        monkeypatch.setattr(committing, "commit", killed)
        other = MergeSink(target=job.target, keys="id", sequence_by="n", apply_as_deletes="gone", name="other")
        run_batch(other, batch(spark, f"{SCHEMA}, gone boolean", (1, 4_000_000_000, True)), 0)

    with monkeypatch.context() as dying:
        dying.setattr(steps, "recheck", overtaken)
        with pytest.raises(Killed):
            job.replay(schema=f"{SCHEMA}, gone boolean", **changes)
    monkeypatch.undo()
    before = job.rows()

    again = job.replay(schema=f"{SCHEMA}, gone boolean", **changes)

    assert [len(rows) for rows in (before, job.rows())] == [2, 1]
    assert (again.records, job.marked()) == (0, [True])


def test_replays_of_two_queries_into_one_table_leave_each_other_alone(job: AddingJob) -> None:
    mine, other = (
        replay_claims.query_claims(job.spark, job.quarantine, TableRef(job.target), owner=owner)
        for owner in ("mine", "other")
    )
    assert mine is not None
    assert other is not None
    at = mine._claim(spark_table.rows(job.spark, job.quarantine).select("topic", "offset", "timestamp", "raw_value"))

    other.settle()

    assert (mine._claimed(), other._claimed(), job.marked()) == (at, None, [True])


def test_a_replay_behind_a_claim_that_is_open_waits(job: AddingJob) -> None:
    claims = replay_claims.query_claims(job.spark, job.quarantine, TableRef(job.target), owner=job.checkpoint)
    assert claims is not None
    places = spark_table.rows(job.spark, job.quarantine).select("topic", "offset", "timestamp", "raw_value")
    claims._claim(places)

    with pytest.raises(MergeFailedError, match="another replay has taken records of"):
        claims._claim(places)
