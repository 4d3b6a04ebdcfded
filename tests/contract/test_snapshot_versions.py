"""Snapshots one after the other: by their versions from a function, and as calls of `files`.

Needs a JVM: the version is a transaction id in Delta's log.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import under_test
from files_job import SCHEMA
from prometheus_client import CollectorRegistry
from pyspark.sql import DataFrame, SparkSession
from typer.testing import CliRunner, Result

from stream_merge import ConfigError, MergeSink
from stream_merge.cli import app as cli
from stream_merge.cli.commands import shared
from stream_merge.metrics.instruments import MergeMetrics
from stream_merge.shapes import InsertOnly, Shape, Snapshot
from stream_merge.snapshots import merge_versions
from stream_merge.testing import batch, change_rows, target_rows

ANY = Snapshot(max_delete_share=1.0)

# -- versions ---------------------------------------------------------------------------------------


class Export:
    """Snapshots by their versions, and which of them were asked for."""

    def __init__(self, spark: SparkSession, versions: dict[int, list[tuple[Any, ...]]]) -> None:
        self._spark = spark
        self._versions = versions
        self.asked: list[int | None] = []

    def __call__(self, latest: int | None) -> tuple[DataFrame, int] | None:
        self.asked.append(latest)
        version = min((one for one in self._versions if latest is None or one > latest), default=None)
        return None if version is None else (batch(self._spark, SCHEMA, *self._versions[version]), version)


def sink_of(target: str, *, app_id: str | None = "export", shape: Shape = ANY) -> MergeSink:
    return under_test(
        MergeSink(
            target=target, keys="id", shape=shape, app_id=app_id, metrics=MergeMetrics(registry=CollectorRegistry())
        )
    )


def test_versions_are_merged_in_their_order_and_a_later_run_goes_on(spark: SparkSession, tmp_table: str):
    export = Export(spark, {3: [(1, "a"), (2, "b")], 5: [(1, "a"), (2, "c"), (4, "d")], 9: [(1, "a")]})

    results = merge_versions(sink_of(tmp_table), spark, export)

    assert [result.batch_id for result in results] == [3, 5, 9]
    assert export.asked == [None, 3, 5, 9]
    assert target_rows(spark, tmp_table) == [(1, "a")]
    made = [row[1:] for row in change_rows(spark, tmp_table)]
    assert made == [
        ("insert", 1, "a"),
        ("insert", 2, "b"),
        ("insert", 4, "d"),
        ("update_postimage", 2, "c"),
        ("update_preimage", 2, "b"),
        ("delete", 2, "c"),
        ("delete", 4, "d"),
    ]

    later = Export(spark, {5: [(7, "old")], 9: [(7, "old")], 10: [(1, "a"), (8, "new")]})
    merge_versions(sink_of(tmp_table), spark, later)
    assert later.asked == [9, 10]
    assert target_rows(spark, tmp_table) == [(1, "a"), (8, "new")]


def test_versions_that_do_not_ascend_are_an_error(spark: SparkSession, tmp_table: str):
    answers = iter([(batch(spark, SCHEMA, (1, "a")), 4), (batch(spark, SCHEMA, (2, "b")), 4)])

    with pytest.raises(ConfigError, match=r"next_version\(4\) returned version 4 for .*, which is not newer;"):
        merge_versions(sink_of(tmp_table), spark, lambda _: next(answers))
    assert target_rows(spark, tmp_table) == [(1, "a")]
    with pytest.raises(ConfigError, match=r"returned version '5' for .*; return a whole number"):
        merge_versions(sink_of(tmp_table), spark, lambda _: (batch(spark, SCHEMA, (1, "a")), "5"))


def test_a_sink_that_cannot_tell_versions_is_refused(spark: SparkSession, tmp_table: str):
    with pytest.raises(ConfigError) as caught:
        merge_versions(sink_of(tmp_table, app_id=None, shape=InsertOnly()), spark, lambda _: None)
    assert caught.value.problems == (
        "[MISSING_SETTING] merge_versions needs a sink with shape=Snapshot(…)",
        "[MISSING_SETTING] merge_versions needs a sink with app_id=, to find the versions it merged",
    )


# -- files ------------------------------------------------------------------------------------------


FILES = "files --source {0}/in/{1}.csv --format csv --keys id --target {0}/table --checkpoint {0}/checkpoint --once"


def test_the_command_takes_a_file_for_a_snapshot_and_says_why_it_refuses_one(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "local_session", lambda *_, **__: spark)

    def invoke(options: str, copy: int = 2) -> Result:
        return CliRunner().invoke(cli.app, f"{FILES.format(tmp_path, copy)} --metrics-port 0 {options}".split())

    def put(name: str, *lines: str) -> None:
        (tmp_path / "in" / name).write_text("".join(f"{line}\n" for line in ("id,name", *lines)))

    (tmp_path / "in").mkdir()
    target = str(tmp_path / "table")
    put("1.csv", "1,a", "2,b", "3,c", "4,d")
    assert invoke("--shape snapshot", 1).exit_code == 0
    put("2.csv", "1,a", "2,x")

    refused = invoke("--shape snapshot")
    assert (refused.exit_code, target_rows(spark, target)[1]) == (3, (2, "b"))
    assert "[TOO_MANY_DELETES]" in refused.stderr
    assert "would delete 2 of 4 rows (50.0%), more than" in " ".join(refused.stderr.split())
    assert invoke("--shape snapshot --max-delete-share 0.5").exit_code == 0
    assert target_rows(spark, target) == [(1, "a"), (2, "x")]
    explained = CliRunner().invoke(cli.app, ["explain", target]).output
    assert "filled as snapshot" in explained
    assert "driver: may merge into this table" in explained

    wrong = invoke("--shape insert-only --min-rows 3")
    assert (wrong.exit_code, "--shape insert-only excludes --min-rows; " in wrong.stderr) == (
        2,
        True,
    )
