"""Settings of the shared session for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession

REBASE = "spark.sql.parquet.datetimeRebaseModeInRead"


@contextmanager
def conf(spark: SparkSession, name: str, value: str) -> Iterator[None]:
    """One setting, put back afterwards."""
    before = spark.conf.get(name)
    spark.conf.set(name, value)
    try:
        yield
    finally:
        spark.conf.set(name, before)
