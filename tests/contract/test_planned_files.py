"""Files that Spark has planned and not read yet. Needs a JVM: the plan is in the checkpoint of Spark's file source."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from files_job import SCHEMA, Job
from pyspark.sql import SparkSession

from stream_merge import ContractError
from stream_merge.jobs.files import batches
from stream_merge.jobs.files.batches import PlannedRead
from stream_merge.jobs.watch import queries
from stream_merge.spark.streaming import planned_files
from stream_merge.testing import batch

A, B = (f'{{"id": {key}, "name": "{name}"}}' for key, name in ((1, "a"), (2, "b")))


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


def test_a_file_that_is_replaced_while_its_batch_is_planned_is_not_passed_over(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = Job(spark, tmp_path)
    for name, line in (("a", A), ("b", B)):
        (changes.source / f"{name}.json").write_text(f"{line}\n")
    monkeypatch.setattr(
        batches, "planned_files", lambda found: [file for file in planned_files(found) if "b.json" not in file]
    )

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
