"""What a running local session is."""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession

from stream_merge.session import local_session


def test_a_local_session_reads_and_writes_delta(spark: SparkSession, tmp_table: str):
    spark.range(3).write.format("delta").save(tmp_table)

    assert sorted(row.id for row in spark.read.format("delta").load(tmp_table).collect()) == [0, 1, 2]


def test_python_workers_run_this_interpreter(spark: SparkSession):
    """Otherwise Spark takes the first `python3` on the PATH, which may lack every package."""
    workers = spark.sparkContext.parallelize([0], 1).map(lambda _: sys.executable).collect()

    assert workers == [sys.executable]


def test_asking_again_gives_the_running_session(spark: SparkSession):
    assert local_session("another").sparkContext.applicationId == spark.sparkContext.applicationId
