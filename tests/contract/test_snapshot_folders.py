"""Folders with `_SUCCESS` as snapshots: each whole one once, in the order of their names.

Needs a JVM: Spark reads the folders, and its checkpoint says which of them were merged.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from files_job import SCHEMA, SnapshotJob
from pyspark.sql import SparkSession

from stream_merge import ConfigError, ContractError
from stream_merge.jobs.files.whole import FolderRead
from stream_merge.jobs.watch import queries
from stream_merge.microbatch import steps
from stream_merge.shapes import InsertOnly
from stream_merge.sources.files.reader import Folder
from stream_merge.sources.files.whole import Snapshots
from stream_merge.testing import batch, change_rows, table_version

A, B, C = (f'{{"id": {key}, "name": "{name}"}}\n' for key, name in ((1, "a"), (2, "b"), (3, "c")))
B2 = B.replace('"b"', '"B"')


@pytest.fixture
def job(spark: SparkSession, tmp_path: Path) -> SnapshotJob:
    return SnapshotJob(spark, tmp_path)


def refused(job: SnapshotJob, said: str, *, as_error: type[Exception] = ContractError, **options: Any) -> None:
    """The job ends with this, and the table is as before."""
    before = table_version(job.spark, job.target) if Path(job.target).exists() else None
    with pytest.raises(as_error, match=re.escape(said)):
        job(**options)
    assert before == (table_version(job.spark, job.target) if Path(job.target).exists() else None)


def test_a_folder_is_merged_once_and_not_before_it_is_whole(job: SnapshotJob) -> None:
    first, second = "2024-06-01T00:00", "2024-06-02 {b}*%20=ü"
    job.put_folder(first, {"part-0.json": A + B, "_half.json": "{", "part-2.json": ""})
    job.put_folder(f"{first}/day=1", {"part-1.json": C}, is_whole=False)
    (job.source / first / "_SUCCESS").touch()
    job.put_folder(second, {"part-0.json": A}, is_whole=False)

    assert [result.events.inserted for result in job()] == [3]
    (job.source / second / "part-1.json").write_text(B2)
    assert job() == []
    (job.source / second / "_SUCCESS").touch()
    (result,) = job()

    assert job.rows() == [(1, "a"), (2, "B")]
    assert [row[1:] for row in change_rows(job.spark, job.target) if row[0] == result.version] == [
        ("delete", 3, "c"),
        ("update_postimage", 2, "B"),
        ("update_preimage", 2, "b"),
    ]
    job.put_folder(second, {"part-2.json": C})  # it was merged: what changes in it does not count
    shutil.rmtree(job.source / first)
    assert job() == []

    job.put_folder("2024-05-31", {"part-0.json": C})
    older = f"sorts before {second!r}, which is already merged; remove it"
    refused(job, f"snapshot '2024-05-31' in {str(job.source)!r} {older}")
    assert job.rows() == [(1, "a"), (2, "B")]


@pytest.mark.parametrize("format_", ["csv", "parquet"])
def test_folders_that_spark_writes_come_in_the_order_of_their_names(job: SnapshotJob, format_: str) -> None:
    """Not of their times, which a copy changes. Types are inferred from whole folders alone."""
    folder = Folder(path=str(job.source), format=format_)  # type: ignore[arg-type]
    for name, rows in {"2": [(2, "b"), (4, "d")], "1": [(1, "a"), (2, "x"), (3, "c")], "3": [(7, "g")]}.items():
        frame = batch(job.spark, SCHEMA, *rows).repartition(2)
        frame.write.option("header", "true").format(format_).save(str(job.source / name))
    (job.source / "3" / "_SUCCESS").unlink()
    if format_ == "csv":
        job.put_folder("3", {"part-9.csv": "other,columns\n1,2\n"}, is_whole=False)

    results = job(folder=folder, schema=None)

    assert [(result.events.received, result.events.inserted) for result in results] == [(3, 3), (2, 1)]
    assert job.rows() == [(2, "b"), (4, "d")]


def test_a_broken_folder_stops_the_job_until_it_is_written_again(job: SnapshotJob) -> None:
    job.put_folder("1", {"a.json": A + B})
    job()
    job.put_folder("2", {"a.json": A, "b.json": B[:-4] + "\n"})

    refused(job, "break the contract (undecodable: 1)")
    shutil.rmtree(job.source / "2")
    refused(job, "snapshot '2' in")
    refused(job, "is planned and does not exist any more; restore it, complete, under its name")
    job.put_folder("2", {"a.json": A}, is_whole=False)
    refused(job, "is planned and has no _SUCCESS any more")

    job.put_folder("2", {"b.json": C})
    job.put_folder("3", {"a.json": A + C})
    assert [result.outcome for result in job()] == ["committed", "no_change"]
    assert job.rows() == [(1, "a"), (3, "c")]


class Died(Exception):  # noqa: N818
    """Stands for the end of a process."""


def test_a_death_at_any_point_merges_a_folder_once(job: SnapshotJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the note and the query, before the merge, and between the commits of the table and of the checkpoint."""
    job.put_folder("1", {"a.json": A + B})
    job.put_folder("2", {"a.json": A})

    def dies(*_: Any, **__: Any) -> None:
        raise Died

    with monkeypatch.context() as patched:
        patched.setattr(queries, "run", dies)
        with pytest.raises(Died):
            job()
    assert not Path(job.target).exists()

    merge = FolderRead.__call__
    with monkeypatch.context() as patched:
        patched.setattr(FolderRead, "__call__", dies)
        with pytest.raises(queries.QueryFailedError):
            job()
    assert not Path(job.target).exists()

    def dies_after(self: FolderRead, *arguments: Any) -> None:
        merge(self, *arguments)
        dies()

    with monkeypatch.context() as patched:
        patched.setattr(FolderRead, "__call__", dies_after)
        with pytest.raises(queries.QueryFailedError):
            job()
    assert job.rows() == [(1, "a"), (2, "b")]

    assert [result.outcome for result in job()] == ["skipped_duplicate", "committed"]
    assert job() == []
    assert [row[1:] for row in change_rows(job.spark, job.target)] == [
        ("insert", 1, "a"),
        ("insert", 2, "b"),
        ("delete", 2, "b"),
    ]


class Arrivals(threading.Event):
    """Lets a folder arrive whenever the job waits, and then stops it."""

    def __init__(self, job: SnapshotJob) -> None:
        super().__init__()
        self._job = job
        self._coming = iter([("1", A + B), ("2", A), ("3", None)])

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout == 1
        name, text = next(self._coming)
        if text is None:
            self.set()
        else:
            self._job.put_folder(name, {"a.json": text})
        return self.is_set()


def test_a_job_waits_for_folders_until_it_is_stopped(job: SnapshotJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """From an empty source on, of which nothing tells what a snapshot is."""
    assert job() == []

    @contextmanager
    def stopping(_: Any) -> Iterator[threading.Event]:
        yield Arrivals(job)

    monkeypatch.setattr(queries, "stop_on_signal", stopping)
    assert [result.events.received for result in job(once=False)] == [2, 1]
    assert job.rows() == [(1, "a")]


def test_files_and_folders_are_not_mixed(job: SnapshotJob, monkeypatch: pytest.MonkeyPatch) -> None:
    job.put("1.json", A.strip(), B.strip())
    job()
    job.put_folder("archive", {"0.json": A}, is_whole=False)

    mix = "has both files, such as '1.json', and folders, such as 'archive'; keep files only"
    refused(job, mix, as_error=ConfigError)
    with monkeypatch.context() as patched:  # the folder comes while the job is running
        look = Snapshots.kind
        answers = iter(["files", "files"])
        patched.setattr(Snapshots, "kind", lambda self: next(answers, None) or look(self))
        refused(job, mix, as_error=ConfigError)

    (job.source / "1.json").unlink()
    one_kind = f"checkpoint {job.checkpoint!r} records snapshot files, but source {str(job.source)!r} has folders"
    refused(job, one_kind, as_error=ConfigError)


def test_what_is_no_source_of_snapshots_is_refused(job: SnapshotJob) -> None:
    inner = job.put_folder("1", {"a.json": A})

    refused(
        job,
        f"source {str(inner)!r} is a snapshot itself: 'file:{inner}' has a _SUCCESS; pass the folder above it",
        as_error=ConfigError,
        folder=Folder(path=str(inner), format="json"),
    )
    (inner / "_SUCCESS").unlink()
    refused(job, "has no folder with _SUCCESS to infer types from; wait for one", as_error=ConfigError, schema=None)
    assert job() == []

    (inner / "_SUCCESS").touch()
    job()
    refused(
        job,
        "records snapshot folders, but shape 'insert-only' reads files as changes",
        as_error=ConfigError,
        shape=InsertOnly(),
    )
    shutil.rmtree(inner)
    job.put("1.json", A.strip())
    refused(job, "records snapshot folders, but source", as_error=ConfigError)


def marked_again(folder: Path) -> None:
    os.utime(folder / "_SUCCESS", (2e9, 2e9))


def one_more(folder: Path) -> None:
    (folder / "b.json").write_text(B)


@pytest.mark.parametrize("change", [marked_again, one_more])
def test_a_folder_that_is_written_again_while_it_is_read_is_refused(
    job: SnapshotJob, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    """What is read may be a part of the old files and a part of the new ones."""
    job.put_folder("1", {"a.json": A + B})
    job()
    folder = job.put_folder("2", {"a.json": A})
    evaluate = steps.evaluate

    def written_meanwhile(*arguments: Any) -> Any:
        found = evaluate(*arguments)
        change(folder)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(steps, "evaluate", written_meanwhile)
        refused(job, "/in/2' is still being written; run again when it is complete, with _SUCCESS written last")
    assert job.rows() == [(1, "a"), (2, "b")]
    job.put_folder("2", {"a.json": A + C})
    marked_again(folder)
    job()
    assert job.rows() == [(1, "a"), *([(2, "b")] if change is one_more else []), (3, "c")]


def test_a_folder_whose_mark_came_first_is_refused(job: SnapshotJob) -> None:
    """A copy in the order of names begins with it."""
    job.put_folder("1", {"a.json": A + B})
    job()
    folder = job.put_folder("2", {})
    os.utime(folder / "_SUCCESS", (1e9, 1e9))
    job.put_folder("2", {"a.json": A, "_hidden.json": "{"}, is_whole=False)

    refused(job, "/in/2' has a _SUCCESS older than 1 of its files, such as 'a.json'; when all files are there")
    job.put_folder("2", {"b.json": C})
    job()
    assert job.rows() == [(1, "a"), (3, "c")]


def test_a_checkpoint_that_is_moved_has_taken_what_it_had(job: SnapshotJob) -> None:
    """Spark's file source would know the notes by their whole paths, and give each folder once more."""
    job.put_folder("1", {"a.json": A + B})
    job.put_folder("2", {"a.json": A})
    job()
    Path(job.checkpoint).rename(f"{job.checkpoint}-moved")
    job.checkpoint += "-moved"

    assert job() == []
    job.put_folder("3", {"a.json": A + C})
    assert [result.outcome for result in job()] == ["committed"]
    assert job.rows() == [(1, "a"), (3, "c")]


def test_notes_that_are_given_again_turn_nothing_back(job: SnapshotJob) -> None:
    """A checkpoint whose own files were lost, beside notes that were not."""
    job.put_folder("1", {"a.json": A + B})
    job.put_folder("2", {"a.json": A})
    job()
    for name in ("offsets", "commits", "sources"):
        shutil.rmtree(Path(job.checkpoint, name))

    refused(job, "plans snapshot '1' of")
    refused(job, " after '2'; use a new checkpoint, and keep only the newest snapshot in the source")
    assert job.rows() == [(1, "a")]


def test_a_merged_folder_may_be_gone_when_its_batch_comes_again(
    job: SnapshotJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process died between the commits of the table and of the checkpoint, and somebody cleaned up."""
    folder = job.put_folder("1", {"a.json": A + B})
    merge = FolderRead.__call__

    def dies_after(self: FolderRead, *arguments: Any) -> None:
        merge(self, *arguments)
        raise Died

    with monkeypatch.context() as patched:
        patched.setattr(FolderRead, "__call__", dies_after)
        with pytest.raises(queries.QueryFailedError):
            job()
    shutil.rmtree(folder)

    assert [result.outcome for result in job()] == ["skipped_duplicate"]
    assert job.rows() == [(1, "a"), (2, "b")]


def test_names_whose_numbers_have_another_order_are_refused(job: SnapshotJob) -> None:
    """The newest would be merged before an older one, and nobody would notice."""
    for name in ("9", "10"):
        job.put_folder(name, {"a.json": A})

    refused(
        job,
        "are merged in the order of their names, where '10' sorts before '9'; add leading zeros",
        as_error=ConfigError,
    )
    assert not Path(job.target).exists()
    shutil.move(job.source / "9", job.source / "09")
    assert [result.outcome for result in job()] == ["committed", "no_change"]


def test_spark_does_not_see_what_says_that_a_folder_is_whole(spark: SparkSession, job: SnapshotJob) -> None:
    """Why the stream reads notes in place of `_SUCCESS`; where it fails, there is a simpler way."""
    folder = job.put_folder("1", {"a.json": A})

    for path in (folder, f"{job.source}/*/_SUCCESS", f"{job.source}/*/*"):
        assert "_SUCCESS" not in str(spark.read.format("binaryFile").load(str(path)).select("path").collect())
