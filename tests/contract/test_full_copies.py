"""`files --shape snapshot`: one full copy, a file or a folder with `_SUCCESS`, becomes the table, once.

Needs a JVM: Spark reads the files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from files_job import SCHEMA, Job
from pyspark.sql import SparkSession
from rich.console import Console

from stream_merge import ConfigError, ContractError, MergeResult
from stream_merge.jobs.files.run import replay_quarantine
from stream_merge.merge import steps
from stream_merge.shapes import Snapshot
from stream_merge.sources.files.reader import Folder, Format
from stream_merge.testing import batch, change_rows, table_version

A, B, C = (f'{{"id": {key}, "name": "{name}"}}\n' for key, name in ((1, "a"), (2, "b"), (3, "c")))
B2 = B.replace('"b"', '"B"')


class Copies(Job):
    """`stream-merge files --shape snapshot --once`, called for one copy after the other."""

    def put(self, name: str, files: dict[str, str], *, is_whole: bool = True) -> Path:
        """A folder of files with these texts; with `_SUCCESS`, unless it is not whole."""
        folder = self.source / name
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (folder / file).write_text(text)
        if is_whole:
            (folder / "_SUCCESS").touch()
        return folder

    def merge(self, copy: Path, file_format: Format = "json", **options: Any) -> MergeResult:
        shape = Snapshot(max_delete_share=1.0)
        settings = {"folder": Folder(path=str(copy), format=file_format), "schema": SCHEMA, "shape": shape, **options}
        (result,) = self(**settings)
        return result

    def refused(self, copy: Path, said: str, *options: Any, as_error: type[Exception] = ContractError) -> None:
        """The job ends with this, and the table is as before."""
        before = table_version(self.spark, self.target) if Path(self.target).exists() else None
        with pytest.raises(as_error, match=re.escape(said)):
            self.merge(copy, *options)
        assert before == (table_version(self.spark, self.target) if Path(self.target).exists() else None)


@pytest.fixture
def job(spark: SparkSession, tmp_path: Path) -> Copies:
    return Copies(spark, tmp_path)


def test_the_table_becomes_the_copy_whenever_one_is_given(job: Copies) -> None:
    name = "2024-06-02 {b}*%20=ü"
    first = job.put("2024-06-01T00", {"part-0.json": A + B, "_half.json": "{", "part-2.json": ""})
    job.put("2024-06-01T00/day=1", {"part-1.json": C}, is_whole=False)
    (first / "_SUCCESS").touch()
    second = job.put(name, {"part-0.json": A, "part-1.json": B2})

    assert job.merge(first).events.inserted == 3
    result = job.merge(second)
    assert job.rows() == [(1, "a"), (2, "B")]
    assert [row[1:] for row in change_rows(job.spark, job.target) if row[0] == result.version] == [
        ("delete", 3, "c"),
        ("update_postimage", 2, "B"),
        ("update_preimage", 2, "b"),
    ]
    assert job.merge(second).outcome == "no_change"
    assert job.merge(first).events.inserted == 1  # exactly the copy that is given


def test_a_single_file_is_a_copy_too_and_counts_under_the_name_of_the_job(job: Copies) -> None:
    for text in (A + B, B):
        (job.source / "all.json").write_text(text)
        result = job.merge(job.source / "all.json", name="nightly", schema=None)
    assert (result.query, job.rows()) == ("nightly", [(2, "b")])
    assert "inferred from the files" not in job.said  # by the second copy the types are known


@pytest.mark.parametrize("file_format", ["csv", "parquet"])
def test_folders_that_spark_writes_are_copies(job: Copies, file_format: Format) -> None:
    for name, rows in {"1": [(1, "a"), (2, "x"), (3, "c")], "2": [(2, "b"), (4, "d")]}.items():
        frame = batch(job.spark, SCHEMA, *rows).repartition(2)
        frame.write.option("header", "true").format(file_format).save(str(job.source / name))
        result = job.merge(job.source / name, file_format, schema=None)

    assert (result.events.received, result.events.inserted) == (2, 1)
    assert job.rows() == [(2, "b"), (4, "d")]


def test_what_is_not_one_copy_is_refused(job: Copies) -> None:
    job.put("1", {"a.json": A})
    whole = "must be one full copy: a file, or a folder with _SUCCESS in it; folders of several copies are not watched"

    for several in (job.source, job.source / "*", job.put("2", {"a.json": A}, is_whole=False)):
        job.refused(several, f"[SNAPSHOT_SOURCE_LAYOUT] source {str(several)!r} {whole}", as_error=ConfigError)


def test_a_broken_copy_stops_the_job(job: Copies) -> None:
    copy = job.put("1", {"a.json": A, "b.json": B[:-4] + "\n"})

    job.refused(copy, "break the contract (undecodable: 1)")
    (copy / "a.json").write_text("[\n" + A)
    (copy / "_SUCCESS").touch()
    job.refused(copy, "a.json: the file is a JSON array or a multi-line object")
    (copy / "b.json").unlink()
    (copy / "a.json").write_text("")
    (copy / "_SUCCESS").touch()
    job.refused(copy, "has 0 row")

    settings = job.settings(shape=Snapshot(), schema=SCHEMA)
    with pytest.raises(ConfigError, match="quarantined records are not a snapshot"):
        replay_quarantine(settings, console=Console(file=StringIO()), start_session=lambda: job.spark)


def marked_again(folder: Path) -> None:
    os.utime(folder / "_SUCCESS", (2e9, 2e9))


def one_more(folder: Path) -> None:
    (folder / "b.json").write_text(B)


@pytest.mark.parametrize("change", [marked_again, one_more])
def test_a_copy_that_is_written_while_it_is_read_is_refused(
    job: Copies, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    """What is read may be a part of the old files and a part of the new ones."""
    job.merge(job.put("1", {"a.json": A + B}))
    folder = job.put("2", {"a.json": A})
    evaluate = steps.evaluate

    def written_meanwhile(*arguments: Any) -> Any:
        batch = evaluate(*arguments)
        change(folder)
        return batch

    with monkeypatch.context() as patched:
        patched.setattr(steps, "evaluate", written_meanwhile)
        job.refused(folder, "/in/2' is still being written; run again when it is complete, with _SUCCESS written last")
    marked_again(folder)
    job.merge(folder)
    assert job.rows() == [(1, "a"), *([(2, "b")] if change is one_more else [])]


def test_a_folder_whose_mark_came_first_is_refused(job: Copies) -> None:
    """A copy in the order of names begins with it."""
    folder = job.put("2", {})
    os.utime(folder / "_SUCCESS", (1e9, 1e9))
    job.put("2", {"a.json": A, "_hidden.json": "{"}, is_whole=False)

    job.refused(folder, "/in/2' has a _SUCCESS older than 1 of its files, such as 'a.json'; when all files are there")
    (folder / "_SUCCESS").touch()
    job.merge(folder)


def test_a_parquet_copy_without_a_column_is_refused(job: Copies) -> None:
    """Spark would read NULL in every row."""
    full = f"{SCHEMA}, at struct<x: int, y: int>"
    for name, schema, *rows in (
        ("1", full, (1, "a", (1, 2)), (2, "b", (3, 4))),
        ("2", "id bigint, at struct<x: int>", (1, (1,)), (2, (3,))),
    ):
        batch(job.spark, schema, *rows).coalesce(1).write.parquet(str(job.source / name))
    job.merge(job.source / "1", "parquet", schema=None)
    before = job.rows()

    lacks = "lacks column(s) ['name', 'at.y'], which would become NULL in every row"
    with pytest.raises(ContractError, match=re.escape(lacks)):
        job.merge(job.source / "2", "parquet", schema=None)
    assert job.rows() == before
    job.merge(job.source / "2", "parquet", schema="id bigint, at struct<x: int>")
    assert job.rows() == before
