"""The demo merges what it generates, and ends in the state that was expected."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path

from pyspark.sql import SparkSession
from rich.console import Console

from stream_merge.demo.run import DemoSettings
from stream_merge.demo.run import run as run_demo

SMALL = DemoSettings(events=400, keys=80, batches=2)


def demo(spark: SparkSession, settings: DemoSettings) -> tuple[bool, str]:
    console = Console(file=StringIO(), width=200)
    as_expected = run_demo(settings, console=console, start_session=lambda: spark, metrics_url="http://here/metrics")
    return as_expected, console.file.getvalue()


def test_a_demo_continues_in_a_kept_folder_and_notices_a_wrong_table(spark: SparkSession, tmp_path: Path) -> None:
    """Equal after the first run and after the second; not equal once somebody else has written to it."""
    settings = replace(SMALL, keep=tmp_path / "kept")

    first, said = demo(spark, settings)
    assert first
    assert "equal to the expected state" in said
    assert "400 events in 2 micro-batches, each with one fate" in said
    assert "4 broken events (2 null_key, 1 null_key and null_sequence, 1 null_sequence)" in said
    assert str(tmp_path / "kept" / "__stream_merge_quarantine_orders") in said
    assert "update_postimage" in said
    assert "http://here/metrics" in said

    second, said = demo(spark, settings)
    assert second
    assert "8 broken events" in said
    assert "from 800 events" in said

    table = tmp_path / "kept" / "orders"
    spark.sql(f"INSERT INTO delta.`{table}` (id, lsn, customer) VALUES (999, 1, 'nobody')")
    third, said = demo(spark, replace(settings, events=10, batches=1))
    assert not third
    assert "NOT equal to the expected state" in said
    assert "1 unexpected: (999, 1, 'nobody', None, None)" in said


def test_a_demo_with_two_writers_ends_in_the_expected_state(spark: SparkSession) -> None:
    as_expected, said = demo(spark, replace(SMALL, conflict=True))

    assert as_expected
    assert "400 events in 4 micro-batches" in said
    assert "one batch 0" in said
    assert "two batch 0" in said
    *_, report = said.rpartition("received")
    assert "/stream-merge-demo-" not in report  # the folder is gone when it is read
    assert "temporary and removed at the end" in report
