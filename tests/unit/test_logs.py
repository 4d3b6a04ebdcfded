"""What is logged says what happened by itself, whatever logging setup shows it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from deliveries import ChangeStream, delete, upsert
from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession

from stream_merge import ConfigError
from stream_merge.logs import tell

log = logging.getLogger("stream_merge.test")


def test_the_message_is_the_events_name_and_its_facts(caplog: pytest.LogCaptureFixture) -> None:
    """What has a space, a quote or an equals sign is quoted; a percent sign is one."""
    tell(log.warning, "commit_conflict", target="shop.orders", batch_id=7, wait=0.25, why='100 % "full"', by=None)

    (record,) = caplog.records
    assert record.getMessage() == (
        'commit_conflict target=shop.orders batch_id=7 wait=0.250 why="100 % \\"full\\"" by=None'
    )
    fields = (record.event, record.target, record.batch_id, record.wait, record.why, record.by)  # type: ignore[attr-defined]
    assert fields == ("commit_conflict", "shop.orders", 7, 0.25, '100 % "full"', None)
    assert (record.levelname, record.filename) == ("WARNING", "test_logs.py")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a\nERROR root all is lost", '"a\\nERROR root all is lost"'),
        ("a\rb", '"a\\rb"'),
        ("a\x1b[2Jb", '"a\\u001b[2Jb"'),
        ("a\u2028b\x85c", '"a\\u2028b\\x85c"'),
        ("a\u202eb", '"a\\u202eb"'),
        ("a\ud800b", '"a\\ud800b"'),
        ("a engine=native", '"a engine=native"'),
        ("", '""'),
        ("Zürich", "Zürich"),
        ("x" * 5000, "x" * 2000 + "…"),
    ],
)
def test_a_name_cannot_begin_a_line_or_a_fact_of_its_own(
    name: str, shown: str, caplog: pytest.LogCaptureFixture
) -> None:
    tell(log.warning, "topic_missing", topic=name)

    assert [record.getMessage() for record in caplog.records] == [f"topic_missing topic={shown}"]


def test_a_merged_batch_says_its_numbers(spark: SparkSession, tmp_table: str, caplog: pytest.LogCaptureFixture) -> None:
    stream = ChangeStream(spark, tmp_table, engine="spark")
    caplog.set_level(logging.INFO)

    stream.deliver(upsert(1, "row", lsn=1), upsert(1, "newer", lsn=2), delete(2, lsn=1))

    first = next(record for record in caplog.records if getattr(record, "event", None) == "micro_batch_merged")
    assert first.getMessage().startswith(
        "micro_batch_merged target=table query=direct batch_id=0 outcome=committed version=1"
        " events=received:3,collapsed:1,unaffected:1,inserted:1 seconds=prepare:"
    )


def test_a_failed_batch_says_why_and_pyspark_does_not_say_it_before(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """PySpark writes each error as a line of JSON with its trace, though the sink says it in a sentence."""
    stream = ChangeStream(spark, str(tmp_path / "table"), apply_as_deletes="opp = 'd'")
    noise: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: noise.append(record.getMessage())  # type: ignore[method-assign]
    pyspark = PySparkLogger.getLogger("SQLQueryContextLogger")
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
        'micro_batch_failed target=table query=direct batch_id=0 error=ConfigError reason="apply_as_deletes='
    )
