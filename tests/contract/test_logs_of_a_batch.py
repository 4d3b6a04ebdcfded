"""What a merged batch and a failed one say in the log."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from deliveries import ChangeStream, delete, upsert
from pyspark.sql import SparkSession
from since import since

from stream_merge import ConfigError
from stream_merge.spark.versions import error_loggers


def test_a_merged_batch_says_its_numbers(spark: SparkSession, tmp_table: str, caplog: pytest.LogCaptureFixture) -> None:
    stream = ChangeStream(spark, tmp_table, engine="spark")
    caplog.set_level(logging.INFO)

    stream.deliver(upsert(1, "row", lsn=1), upsert(1, "newer", lsn=2), delete(2, lsn=1))

    first = next(record for record in caplog.records if getattr(record, "event", None) == "micro_batch_merged")
    assert first.getMessage().startswith(
        "micro_batch_merged target=table query=direct batch_id=0 outcome=committed version=1"
        " events=received:3,collapsed:1,unaffected:1,inserted:1 seconds=prepare:"
    )


@since((4, 0), "until then PySpark logged no errors")
def test_a_failed_batch_says_why_and_pyspark_does_not_say_it_before(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """PySpark writes each error as a line of JSON with its trace, though the sink says it in a sentence."""
    stream = ChangeStream(spark, str(tmp_path / "table"), apply_as_deletes="opp = 'd'")
    noise: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: noise.append(record.getMessage())  # type: ignore[method-assign]
    pyspark = next(logger for logger in error_loggers() if logger.name == "SQLQueryContextLogger")
    pyspark.addHandler(listener)
    before = pyspark.level  # commands that ran in this process have silenced it
    pyspark.setLevel(logging.NOTSET)
    try:
        with pytest.raises(ConfigError, match="opp"):
            stream.deliver(upsert(1, "row", lsn=1))
        assert noise == []
        with pytest.raises(Exception, match="UNRESOLVED_COLUMN"):
            spark.range(1).selectExpr("nobody")  # not ours: goes on as it was
        assert len(noise) == 1
    finally:
        pyspark.removeHandler(listener)
        pyspark.setLevel(before)

    (record,) = (record for record in caplog.records if record.name.startswith("stream_merge"))
    assert record.getMessage().startswith(
        'micro_batch_failed target=table query=direct batch_id=0 error=ConfigError reason="[INVALID_EXPRESSION] '
    )
