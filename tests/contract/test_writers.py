"""Two processes on one table of a local disk: each hears of the other, and nobody is turned away for it."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import scenario
from pyspark.sql import SparkSession

from stream_merge import ConfigError, ContractError
from stream_merge.merge import commit as committing
from stream_merge.tables import locks
from stream_merge.testing import target_rows

CHILD = """
import logging, sys
from stream_merge.tables import locks
logging.basicConfig(format="%(message)s", stream=sys.stdout)
def heard():
    print("heard", flush=True)
what, target = sys.argv[1:]
if what == "job":
    with locks.only_writer(target, "query 'job'"):
        heard()
        sys.stdin.read()
else:
    for _ in sys.stdin:
        locks.warn_of_others(target, "query 'stream'")
        heard()
"""


class Other:
    """Another process that writes to a table, as far as others can see."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.pid = process, process.pid

    def heard(self) -> list[str]:
        """What it has logged until it has looked."""
        lines = iter(self.process.stdout.readline, "heard\n")
        return [line for line in lines if "another_writer" in line]

    def merge(self) -> list[str]:
        """Let it look once more, as after a batch."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.heard()


@contextmanager
def other(what: str, table: Path) -> Iterator[Other]:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, what, str(table)], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        try:
            yield Other(process)
        finally:
            process.kill()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.other for record in caplog.records if getattr(record, "event", "") == "another_writer"]


def test_a_running_sink_and_a_job_that_starts_hear_of_each_other_once(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Only a sink that starts later is refused; this one was there before."""
    table = tmp_path / "table"
    sink = scenario.sink(str(table), app_id="mine")
    sink(scenario.events(spark, "(1, 10, 'c', 'one')"), 0)
    with caplog.at_level(logging.WARNING, logger="stream_merge"), other("job", table) as job:
        said = job.heard()
        for batch_id in (1, 2):
            sink(scenario.events(spark, f"({batch_id + 1}, 10, 'c', 'more')"), batch_id)

    assert [f"process {os.getpid()} (query 'direct')" in line for line in said] == [True]
    assert "can overwrite each other: let one of them end" in said[0]
    assert warnings(caplog) == [f"process {job.pid} (query 'job')"]
    assert target_rows(spark, str(table), "id") == [(1,), (2,), (3,)]


def test_a_sink_is_seen_before_it_has_merged_and_by_its_file_alone(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Maintenance by hand would run beside a first batch; processes of two containers may have one number."""
    table = tmp_path / "table"
    with other("stream", table) as first:
        first.merge()
        with pytest.raises(ConfigError, match=f"process {first.pid} "):
            locks.expect_alone(str(table))
        (seen,) = (tmp_path / "__stream_merge_writers_table").iterdir()
        renamed = f"process {os.getpid()} (query 'of another container')"
        seen.write_text(renamed)
        with pytest.raises(ConfigError, match=re.escape(renamed)):
            locks.expect_alone(str(table))
    locks.expect_alone(str(table))

    sink = scenario.sink(str(table), app_id="mine")
    monkeypatch.setattr(committing, "commit", lambda *_: (_ for _ in ()).throw(ContractError("it fails", reasons={})))
    with pytest.raises(ContractError):
        sink(scenario.events(spark, "(1, 10, 'c', 'one')"), 0)
    with other("stream", table) as later:
        (said,) = later.merge()
    assert f"process {os.getpid()} (query 'direct')" in said
    locks.expect_alone(str(table))


def test_a_sink_whose_first_batch_is_applied_already_asks_before_it_writes_too(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What is left of the batch may be a commit; somebody else may have begun while it was evaluated."""
    table = str(tmp_path / "table")
    events = scenario.events(spark, "(1, 10, 'c', 'one'), (2, 10, 'd', NULL)")
    scenario.sink(table, app_id="mine")(events, 0)
    again = scenario.sink(table, app_id="mine")
    look, looks = locks.expect_no_other, []

    def later(*args: str | None) -> None:
        looks.append(args)
        if len(looks) > 1:  # nobody had begun, when the call did
            look(*args)

    monkeypatch.setattr(locks, "expect_no_other", later)
    with other("job", tmp_path / "table") as job:
        job.heard()
        with pytest.raises(ConfigError, match=rf"process {job.pid} \(query 'job'\)"):
            again(events, 0)

    again(events, 0)
    assert again.last_result is not None
    assert again.last_result.outcome == "skipped_duplicate"


def test_streams_of_two_processes_hear_of_each_other_and_of_no_process_that_has_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """However it has ended."""
    table = tmp_path / "table"
    with other("stream", table) as killed:
        assert killed.merge() == []
    with caplog.at_level(logging.WARNING, logger="stream_merge"), other("stream", table) as living:
        locks.warn_of_others(str(table), "query 'mine'")
        assert warnings(caplog) == []
        (said,) = living.merge()
        assert f"process {os.getpid()} (query 'mine')" in said
        assert living.merge() == []
        for _ in range(2):
            locks.warn_of_others(str(table), "query 'mine'")

    assert warnings(caplog) == [f"process {living.pid} (query 'stream')"]


def test_sinks_and_jobs_of_one_process_know_of_each_other(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    table = str(tmp_path / "table")
    with caplog.at_level(logging.WARNING, logger="stream_merge"):
        locks.warn_of_others(table, "query 'one'")
        with locks.only_writer(table, "query 'two'"):
            locks.warn_of_others(f"{table}/", "query 'two'")

    assert warnings(caplog) == []


def test_where_nothing_can_be_written_beside_a_table_nobody_is_kept_from_it(tmp_path: Path):
    (tmp_path / "__stream_merge_writers_table").touch()

    locks.warn_of_others(str(tmp_path / "table"), "query 'mine'")
    locks.warn_of_others(str(tmp_path / "nowhere" / "table"), "query 'mine'")
    locks.warn_of_others("s3a://bucket/table", "query 'mine'")
    locks.warn_of_others("catalog.table", "query 'mine'")

    assert [path.name for path in tmp_path.iterdir()] == ["__stream_merge_writers_table"]
