"""What somebody does wrong in the first hour is said in a sentence, early, and leaves nothing behind."""

from __future__ import annotations

import os
import pydoc
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner, Result

from stream_merge import ConfigError, MergeSink
from stream_merge.cli import app as cli
from stream_merge.cli.commands import jobs, shared
from stream_merge.jobs.kafka.run import JobResult
from stream_merge.jobs.kafka.settings import load
from stream_merge.tables import locks

JOB = """
kafka: {bootstrap: "127.0.0.1:1"}
metrics: {METRICS}
queries:
  - {name: orders, topic: orders, target: ./table, keys: id, checkpoint: checkpoint}
"""
FILES = "files --source in --format json --keys id --sequence-by lsn --target ./table --checkpoint checkpoint"

Invoke = Callable[..., Result]


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Run a command in a folder of its own, with `job.yaml` there."""
    monkeypatch.chdir(tmp_path)

    def start(*_: object, **__: object) -> SparkSession:
        msg = "Spark was started"
        raise AssertionError(msg)

    monkeypatch.setattr(shared, "local_session", start)
    Path("job.yaml").write_text(JOB.replace("METRICS", "port: 0"))
    Path("in").mkdir()
    return lambda line: CliRunner().invoke(cli.app, line.split())


def test_the_errors_of_a_job_file_come_one_per_line(invoke: Invoke) -> None:
    wrong = JOB.replace("keys: id", "key: id, topic_column: t, epoch: -1").replace("{METRICS}", "{port: x, prot: 1}")
    Path("job.yaml").write_text(wrong)

    result = invoke("check job.yaml")

    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        "stream-merge: [INVALID_SETTING] job.yaml: metrics.port: must be a valid integer, unable to parse string as an"
        " integer",
        "stream-merge: [UNKNOWN_SETTING] job.yaml: metrics.prot is not a setting",
        "stream-merge: [MISSING_SETTING] job.yaml: queries.orders.keys is missing",
        "stream-merge: [INVALID_SETTING] job.yaml: queries.orders.epoch: must be greater than or equal to 0",
        "stream-merge: [UNKNOWN_SETTING] job.yaml: queries.orders.key is not a setting",
    ]


def test_problems_of_one_query_come_one_per_line_as_well(invoke: Invoke) -> None:
    Path("job.yaml").write_text(
        JOB.replace("{METRICS}", "{port: 0}")
        .replace("topic: orders", "topic: [a, b], start: {0: 1}")
        .replace("keys: id", "keys: [id, b], key_format: {type: text}")
    )

    result = invoke("check job.yaml")

    assert [line.split(":")[2] for line in result.stderr.splitlines()] == [" queries.orders"] * 3


def test_stop_without_a_running_job_says_so_and_leaves_no_file(invoke: Invoke) -> None:
    """Neither on a fresh folder nor after a run that has ended, whose lock is still there."""
    for lock in (False, True):
        if lock:
            Path("checkpoint.lock").touch()
        before = sorted(Path().iterdir())

        result = invoke("stop job.yaml")

        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr == (
            "stream-merge: [JOB_NOT_RUNNING] no process runs this job, so there is nothing to stop\n"
        )
        assert sorted(Path().iterdir()) == before


def test_a_checkpoint_that_is_used_by_another_name_is_said_before_spark_starts(invoke: Invoke) -> None:
    Path("linked").symlink_to("checkpoint")
    with locks.locked(Path("checkpoint.lock"), "query 'other'"):
        result = invoke(f"{FILES.replace('checkpoint checkpoint', 'checkpoint linked')} --metrics-port 0")

    assert result.exit_code == 4
    assert f"process {os.getpid()} (query 'other') is using checkpoint 'linked'; end that process" in result.stderr
    assert not Path("linked.lock").exists()


@pytest.mark.parametrize(
    ("lock", "said"),
    [
        (
            "checkpoint.lock",
            r"\[CHECKPOINT_LOCKED\] query 'orders' is already running in another .* '{folder}/checkpoint'; stop",
        ),
        (
            "__stream_merge_lock_table",
            r"(\[\w+\] )?query 'orders': process {pid} \(query 'other'\) is writing to '{folder}/table'",
        ),
    ],
)
def test_a_job_that_runs_already_is_said_before_spark_starts(invoke: Invoke, lock: str, said: str) -> None:
    with locks.locked(Path(lock), "query 'other'"):
        result = invoke("run job.yaml")

    assert (result.exit_code, result.stdout) == (4, "")
    assert re.match(f"stream-merge: {said}".format(folder=Path.cwd(), pid=os.getpid()), result.stderr), result.stderr


def test_a_source_that_does_not_exist_is_said_before_spark_starts(invoke: Invoke) -> None:
    Path("in").rmdir()

    result = invoke(f"{FILES} --metrics-port 0")

    assert result.exit_code == 2
    assert result.stderr == (
        "stream-merge: [SOURCE_NOT_FOUND] source 'in' does not exist; create the folder, or correct the path\n"
    )
    assert list(Path().iterdir()) == [Path("job.yaml")]


@pytest.mark.parametrize("line", ["run job.yaml", f"{FILES} --metrics-port 0"])
@pytest.mark.parametrize("is_file", [True, False])
def test_something_else_at_the_target_is_said_before_spark_starts(invoke: Invoke, line: str, is_file: bool) -> None:
    """Plain Parquet, or a file."""
    if is_file:
        Path("table").touch()
    else:
        Path("table").mkdir()
        Path("table/part-0.parquet").touch()

    result = invoke(line)

    assert result.exit_code == 2
    assert result.stderr.replace(str(Path.cwd()), ".") == (
        "stream-merge: [NOT_A_DELTA_TABLE] target './table' exists but is not a Delta table; convert it (CONVERT TO"
        " DELTA) or choose another\n"
    )


@pytest.mark.parametrize(("metrics", "gives_way"), [("{}", True), ("{port: 9108}", False)])
def test_run_takes_a_free_port_where_none_was_asked_for(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, metrics: str, gives_way: bool
) -> None:
    """The default is a wish, a given port an order, as for `files`."""
    Path("job.yaml").write_text(JOB.replace("{METRICS}", metrics))
    serve, urls = shared.serve, []

    def taken_once(port: int, host: str, **access: Any) -> shared.MetricsServer:
        if port == 9108:
            msg = "cannot serve metrics on port 9108"
            raise ConfigError(msg)
        return serve(port, host, **access)

    def run(_settings: object, _start: object, server: shared.MetricsServer, **_: object) -> JobResult:
        urls.append(server.url)
        return JobResult()

    monkeypatch.setattr(shared, "serve", taken_once)
    monkeypatch.setattr(shared, "local_session", lambda *_, **__: None)
    monkeypatch.setattr(jobs, "_run", run)

    result = invoke("run job.yaml")

    if gives_way:
        assert result.exit_code == 0
        assert result.stderr.startswith("port 9108 is in use, so /metrics is served on port ")
        assert len(urls) == 1
    else:
        assert result.exit_code == 2
        assert result.stderr == "stream-merge: cannot serve metrics on port 9108\n"


def plan_batch(folder: Path, source: str) -> None:
    """A checkpoint, as Spark 4.2 leaves it behind, of a query that has read something."""
    (folder / "offsets").mkdir(parents=True)
    (folder / "metadata").write_text('{"id":"8c4ca5d4-9d4c-4f56-a2a5-05b2d1a7a2f1"}')
    (folder / "offsets" / "0").write_text(f"v1\n{{}}\n{source}")


def test_a_checkpoint_of_another_query_is_refused_before_spark_starts(invoke: Invoke) -> None:
    """By what its query reads: files, or other topics."""
    for source, line, said in (
        (
            '{"logOffset":0}',
            "run job.yaml",
            "query 'orders': checkpoint .*/checkpoint. belongs to 'stream-merge files'",
        ),
        (
            '{"items":{"0":5}}',
            "run job.yaml",
            "query 'orders': checkpoint .*/checkpoint. belongs to a query over topic",
        ),
        (
            '{"orders":{"0":5},"items":{"0":5}}',
            "run job.yaml",
            "query 'orders': checkpoint .*/checkpoint. has offsets of topic.s. .'items'.",
        ),
        *(
            (
                other,
                "run job.yaml",
                "query 'orders': checkpoint .*/checkpoint. belongs to a query that does not read topics",
            )
            for other in ("12", '{"sourceVersion":1,"reservoirId":"4f5c","reservoirVersion":3,"index":-1}')
        ),
        ('{"orders":{"0":5}}', FILES, "checkpoint 'checkpoint' belongs to a query that does not read files"),
    ):
        shutil.rmtree("checkpoint", ignore_errors=True)
        plan_batch(Path("checkpoint"), source)
        before = sorted(Path().rglob("*"))

        result = invoke(f"{line} --metrics-port 0" if line == FILES else line)

        assert result.exit_code == 2, result.output
        assert re.match(rf"stream-merge: \[CHECKPOINT_MISMATCH\] {said}", result.stderr), result.stderr
        assert len(result.stderr.splitlines()) == 1
        assert sorted(Path().rglob("*")) == before


def test_help_shows_what_users_call() -> None:
    """Beside the constructor and the call itself; what the package needs of a sink has an underscore."""
    text = pydoc.render_doc(MergeSink, renderer=pydoc.plaintext)

    assert re.findall(r"^ \|  ([a-z]\w*)(?:\(|$)", text, flags=re.M) == ["last_result"]
    assert "__call__(self, batch_df: 'DataFrame', batch_id: 'int')" in text


def test_the_job_file_of_these_tests_is_a_good_one(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB.replace("METRICS", "port: 0"))

    assert [query.name for query in load(tmp_path / "job.yaml").queries] == ["orders"]
