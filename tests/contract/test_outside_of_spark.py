"""A full disk and a missing jar are one sentence when Spark met them."""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from deliveries import DEFAULTS, SCHEMA
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from stream_merge import ConfigError, MergeFailedError, MergeSink
from stream_merge.jobs.kafka.exit_codes import Verdict, verdict
from stream_merge.jobs.watch import queries
from stream_merge.jobs.watch.queries import Stream

FULL = (
    "[DISK_FULL] the disk is full (No space left on device); free space for table, checkpoint and spark.local.dir, then"
    " run it again"
)
ON_GOOGLE = "gs://lake/table"
NO_GOOGLE = (
    r"Spark has no file system for gs:// \((Class org\.apache\.hadoop\.fs\.gs\.GoogleHadoopFileSystem not found|No"
    r' FileSystem for scheme "gs")\); add its jars, for example with the Spark conf spark\.jars\.packages='
    r"(org\.apache\.hadoop:hadoop-gcp:3\.5\.0|com\.google\.cloud\.bigdataoss:gcs-connector:hadoop3-2\.2\.26)"
)
"""Hadoop has one of its own from 3.5 on."""


def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A file system of its own there, for as long as the test runs."""
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"nothing may be mounted here: {done.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    yield from mounted(tmp_path / "small", "size=300k")


@pytest.mark.parametrize("engine", ["auto", "spark"])
def test_a_full_disk_ends_a_stream_with_one_sentence(
    spark: SparkSession, small_disk: Path, tmp_path: Path, engine: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not with a stack overflow, nor after a second try by Spark on the same disk; the table stays as it was."""
    (tmp_path / "in").mkdir()
    rows = spark.range(20_000).select(
        "id", F.col("id").alias("lsn"), F.lit("u").alias("op"), F.expr("uuid()").alias("name")
    )
    rows.write.mode("overwrite").parquet(str(tmp_path / "in"))
    target = str(small_disk / "table")
    sink = MergeSink(target=target, engine=engine, **DEFAULTS)  # type: ignore[arg-type]
    events = spark.readStream.schema(SCHEMA).parquet(str(tmp_path / "in"))
    stream = Stream(name="full", events=events, sink=sink, checkpoint=str(tmp_path / "checkpoint"))

    with pytest.raises(MergeFailedError) as caught:
        queries.run([stream], once=True, stopping=threading.Event(), on_result=lambda *_: None)

    assert str(caught.value) == f"[MERGE_FAILED] merging batch 0 into {target!r} failed, nothing was committed: {FULL}"
    assert verdict(caught.value) is Verdict.CONFIGURATION
    assert spark.read.format("delta").load(target).count() == 0
    heard = capfd.readouterr()
    assert "StackOverflowError" not in heard.err + heard.out


def test_a_storage_without_jars_is_named(spark: SparkSession) -> None:
    events = spark.createDataFrame([(1, 1, "u", "x")], SCHEMA)

    with pytest.raises(ConfigError) as caught:
        MergeSink(target=ON_GOOGLE, **DEFAULTS)(events, 0)

    assert re.search(f"batch 0 for {ON_GOOGLE!r}: {NO_GOOGLE}$", str(caught.value))
