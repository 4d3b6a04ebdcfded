"""Files that Spark has planned and not read yet. Needs a JVM: the plan is in the checkpoint of Spark's file source."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from files_job import SCHEMA, Job, SnapshotJob
from pyspark.sql import SparkSession

from stream_merge import ContractError
from stream_merge.jobs.files import planned
from stream_merge.jobs.files.planned import PlannedRead
from stream_merge.jobs.watch import queries
from stream_merge.spark.streaming import files_of
from stream_merge.testing import batch

A, B, C = (f'{{"id": {key}, "name": "{name}"}}' for key, name in ((1, "a"), (2, "b"), (3, "c")))


class Died(Exception):  # noqa: N818
    """Stands for the end of a process."""


@pytest.fixture
def dying(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run a job that ends when its first batch is planned."""

    def run(job: Job, *arguments: Any, **options: Any) -> None:
        def dies(*_: Any) -> None:
            raise Died

        with monkeypatch.context() as patched:
            patched.setattr(PlannedRead, "__call__", dies)
            with pytest.raises(queries.QueryFailedError):
                job(*arguments, **options)

    return run


@pytest.fixture
def job(spark: SparkSession, tmp_path: Path) -> SnapshotJob:
    return SnapshotJob(spark, tmp_path)


def refused(job: Job, said: str, *arguments: Any, **options: Any) -> None:
    with pytest.raises(ContractError, match=re.escape(said)):
        job(*arguments, **options)


@pytest.mark.parametrize("file_format", ["json", "parquet"])
def test_a_change_file_that_is_gone_stops_the_job(
    spark: SparkSession, tmp_path: Path, dying: Callable[..., None], file_format: Any
) -> None:
    """Spark passes over it without a word."""
    changes = Job(spark, tmp_path)
    options: dict[str, Any] = {"file_format": file_format, "schema": SCHEMA, "sequence_by": ("name",)}
    for key, name in ((1, "a ü%"), (2, "b")):
        written = tmp_path / f"{key}"
        batch(spark, SCHEMA, (key, name)).coalesce(1).write.format(file_format).save(str(written))
        (part,) = written.glob("part-*")
        part.rename(changes.source / f"{name}.{file_format}")
    dying(changes, **options)
    kept = (changes.source / f"a ü%.{file_format}").rename(tmp_path / "kept")

    refused(changes, f"is planned with missing file(s) 'file://{changes.source}/a ü%.{file_format}'", **options)
    (changes.source / f"b.{file_format}").rename(tmp_path / "b")
    refused(changes, "[SOURCE_FILE_MISSING] batch 0 ", **options)
    assert not Path(changes.target).exists()
    (changes.source / f"b.{file_format}").touch()
    kept.rename(changes.source / f"a ü%.{file_format}")
    changes(**options)
    assert changes.rows("id", "name") == [(1, "a ü%")]

    (changes.source / f"a ü%.{file_format}").unlink()  # it was merged
    assert changes(**options) == []


def test_a_file_that_says_nothing_is_as_good_as_none(spark: SparkSession, tmp_path: Path) -> None:
    changes = Job(spark, tmp_path)
    (changes.source / "a.json").touch()
    (changes.source / "b.json").write_text(f"{A}\n")
    changes(schema=SCHEMA, sequence_by=("name",))
    assert changes.rows("id", "name") == [(1, "a")]


def test_of_snapshots_of_one_time_nobody_knows_which_is_the_newest(job: SnapshotJob) -> None:
    """As after `cp`: Spark takes them in the order in which the file system lists them."""
    for name, row in (("1.json", A), ("2.json", B)):
        job.put(name, row)
        os.utime(job.source / name, (1_700_000_000, 1_700_000_000))

    refused(job, "and an earlier one have the same time, 2023-11-14T22:13:20Z; touch the newest file")
    (first,) = job.rows()
    job.put("3.json", C)
    refused(job, "and an earlier one have the same time")  # its batch is planned and comes first
    os.utime(job.source / ("2.json" if first == (1, "a") else "1.json"), (1_700_000_001, 1_700_000_001))
    job()
    assert job.rows() == [(3, "c")]


def test_a_snapshot_that_comes_late_does_not_turn_the_table_back(job: SnapshotJob) -> None:
    job.put("1.json", A)
    job.put("2.json", A, B)
    job()
    job.put("late.json", A, C)
    os.utime(job.source / "late.json", (1, 1))

    refused(job, "late.json' (1970-01-01T00:00:01Z) is older than 'file:")
    refused(job, "which was merged before; touch it if it is the newest, otherwise replace it")
    assert job.rows() == [(1, "a"), (2, "b")]
    job.put("late.json", C)
    job()
    assert job.rows() == [(3, "c")]
    os.utime(job.source / "late.json", (2e9, 2e9))
    job.put("later.json", A)
    refused(job, "late.json' (2033-05-18T03:33:20Z), which was merged before")
    os.utime(job.source / "later.json", (2, 2))
    (job.source / "late.json").unlink()
    refused(job, "2.json' (2023-11-14T22:13:22Z), which was merged before")
    job.put("later.json", A)
    for number in range(12):  # Spark packs its log
        job.put(f"n{number}.json", A, B)
    job()
    job.put("old.json", C)
    os.utime(job.source / "old.json", (3, 3))
    refused(job, "n11.json' (2023-11-14T22:13:38Z), which was merged before")


def test_a_snapshot_that_is_gone_stops_the_job(job: SnapshotJob, dying: Callable[..., None]) -> None:
    job.put("1.json", A)
    dying(job)
    (job.source / "1.json").unlink()
    refused(job, "1.json' is planned and does not exist any more; restore it, or put the newest one there")

    job.put("1.json", B)
    job()
    assert job.rows() == [(2, "b")]


def test_two_snapshots_in_one_batch_are_none(job: SnapshotJob, dying: Callable[..., None]) -> None:
    """Spark notes a file before it notes that a batch has it; a kill in between gives the next start both."""
    job.put("1.json", A)
    dying(job)
    (Path(job.checkpoint) / "offsets" / "0").unlink()
    (Path(job.checkpoint) / "offsets" / ".0.crc").unlink()
    job.put("2.json", B)

    refused(job, "batch 0 has 2 snapshots: 'file:")
    refused(job, "move all but the newest, 'file:")
    (job.source / "1.json").unlink()
    job()
    assert job.rows() == [(2, "b")]


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_parquet_snapshot_without_a_column_is_refused(job: SnapshotJob, tmp_path: Path, *, is_folder: bool) -> None:
    """Spark would read NULL in every row."""

    def put(name: str, schema: str, *rows: Any) -> None:
        batch(job.spark, schema, *rows).coalesce(1).write.parquet(str(tmp_path / name))
        if is_folder:
            (tmp_path / name).rename(job.source / name)
        else:
            (part,) = (tmp_path / name).glob("part-*")
            part.rename(job.source / f"{name}.parquet")

    full = f"{SCHEMA}, at struct<x: int, y: int>"
    put("1", full, (1, "a", (1, 2)), (2, "b", (3, 4)))
    job("parquet", schema=None)
    before = job.rows()
    put("2", "id bigint, at struct<x: int>", (1, (1,)), (2, (3,)))

    refused(job, "lacks column(s) ['name', 'at.y'], which have values in the table; write them", "parquet", schema=None)
    assert job.rows() == before
    job("parquet", schema="id bigint, at struct<x: int>")
    assert job.rows() == [(1, "a", (1, 2)), (2, "b", (3, 4))]


def test_a_first_load_of_parquet_snapshots_may_have_columns_that_came_later(job: SnapshotJob, tmp_path: Path) -> None:
    """Nothing is lost where nothing was."""
    for number, (schema, row) in enumerate([("id bigint", (1,)), (SCHEMA, (1, "a"))], start=1):
        batch(job.spark, schema, row).coalesce(1).write.parquet(str(tmp_path / f"{number}"))
        (part,) = (tmp_path / f"{number}").glob("part-*")
        part.rename(job.source / f"{number}.parquet")
        os.utime(job.source / f"{number}.parquet", (number, number))

    assert [result.events.received for result in job("parquet", schema=None)] == [1, 1]
    assert job.rows() == [(1, "a")]


def test_a_file_that_is_replaced_while_its_batch_is_planned_is_not_passed_over(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = Job(spark, tmp_path)
    for name, line in (("a", A), ("b", B)):
        (changes.source / f"{name}.json").write_text(f"{line}\n")
    monkeypatch.setattr(planned, "files_of", lambda found: [file for file in files_of(found) if "b.json" not in file])

    refused(changes, "disappeared and came back while Spark planned batch 0", schema=SCHEMA, sequence_by=("name",))
    monkeypatch.undo()
    changes(schema=SCHEMA, sequence_by=("name",))
    assert changes.rows("id") == [(1,), (2,)]


def test_a_session_that_passes_over_broken_files_does_not_here(spark: SparkSession, tmp_path: Path) -> None:
    changes = Job(spark, tmp_path)
    (changes.source / "broken.parquet").write_bytes(b"PAR1 is not all of it PAR1")
    lenient = ("spark.sql.files.ignoreCorruptFiles", "spark.sql.files.ignoreMissingFiles")
    for conf in lenient:
        spark.conf.set(conf, "true")
    try:
        refused(changes, "broken.parquet", "parquet", schema=SCHEMA, sequence_by=("name",))
    finally:
        for conf in lenient:
            spark.conf.unset(conf)
    assert not Path(changes.target).exists()
