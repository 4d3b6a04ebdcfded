"""Confs of a session that hold for a block only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from pyspark.sql import SparkSession

TIMESTAMP_CONF = "spark.sql.parquet.outputTimestampType"
TIMESTAMP_MICROS = "TIMESTAMP_MICROS"
"""Spark's default is INT96, from which delta-rs reads years outside of 1677 to 2262 wrongly (1.6)."""


@contextmanager
def holding(session: SparkSession, wanted: Mapping[str, str | None]) -> Iterator[None]:
    """Set confs, None unsets one, and restore them whatever happens."""
    before = {key: session.conf.get(key, None) for key in wanted}
    try:
        _set(session, wanted)
        yield
    finally:
        _set(session, before)


def _set(session: SparkSession, confs: Mapping[str, str | None]) -> None:
    for key, value in confs.items():
        if value is None:
            session.conf.unset(key)
        else:
            session.conf.set(key, value)
