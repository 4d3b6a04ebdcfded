"""What the machine does to a merge: a full disk, a place that is closed, a storage that Spark has no jars for."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from stream_merge.cli import app as cli
from stream_merge.errors import located
from stream_merge.jobs.kafka.exit_codes import Verdict, verdict
from stream_merge.jobs.watch.queries import QueryFailedError
from stream_merge.sources.kafka import connection
from stream_merge.spark import environment

FULL = (
    "[DISK_FULL] the disk is full (No space left on device); free space for table, checkpoint and spark.local.dir, then"
    " run it again"
)
NO_S3 = (
    "[JAR_MISSING] Spark has no file system for s3a:// (Class org.apache.hadoop.fs.s3a.S3AFileSystem not found); add"
    " its jars, for example with the Spark conf spark.jars.packages=org.apache.hadoop:hadoop-aws:3.5.0"
)
CLOSED = f"grant this process (uid {os.geteuid()}) write permission, or choose another path"


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
def closed_disk(tmp_path: Path) -> Iterator[Path]:
    """Closed to root as well, which runs the tests."""
    yield from mounted(tmp_path / "closed", "ro")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("java.io.IOException: No space left on device\n\tat java.base/x", FULL),
        ("Caused by: org.apache.hadoop.fs.FSError: java.io.IOException: No space left on device\n\tat x", FULL),
        ("External: Unable to copy data to file: No space left on device (os error 28)", FULL),
        (
            "Task 0: java.io.IOException: Mkdirs failed to create file:/x/a/_temporary/0 (exists=false, cwd=file:/)",
            f"[NOT_WRITABLE] '/x/a/_temporary/0' cannot be written (no permission); {CLOSED}",
        ),
        (
            "Caused by: java.io.FileNotFoundException: /x/.part.crc (Permission denied)\n\tat x",
            f"[NOT_WRITABLE] '/x/.part.crc' cannot be written (Permission denied); {CLOSED}",
        ),
        (
            "java.nio.file.AccessDeniedException: /x/t\n",
            f"[NOT_WRITABLE] '/x/t' cannot be written (no permission); {CLOSED}",
        ),
        (
            "java.nio.file.FileSystemException: /x/t: Read-only file system\n",
            f"[NOT_WRITABLE] '/x/t' cannot be written (Read-only file system); {CLOSED}",
        ),
        ("Caused by: java.lang.ClassNotFoundException: Class org.apache.hadoop.fs.s3a.S3AFileSystem not found", NO_S3),
        (
            'org.apache.hadoop.fs.UnsupportedFileSystemException: No FileSystem for scheme "gs"',
            '[JAR_MISSING] Spark has no file system for gs:// (No FileSystem for scheme "gs"); add its jars, for'
            " example with the Spark conf spark.jars.packages=com.google.cloud.bigdataoss:gcs-connector:hadoop3-2.2.26",
        ),
        (
            "java.lang.ClassNotFoundException: Class org.apache.hadoop.fs.gs.GoogleHadoopFileSystem not found",
            "[JAR_MISSING] Spark has no file system for gs:// (Class org.apache.hadoop.fs.gs.GoogleHadoopFileSystem not"
            " found); add its jars, for example with the Spark conf"
            " spark.jars.packages=org.apache.hadoop:hadoop-gcp:3.5.0",
        ),
        (
            'No FileSystem for scheme "oss"',
            '[JAR_MISSING] Spark has no file system for oss:// (No FileSystem for scheme "oss"); add its jars, for'
            " example with the Spark conf spark.jars.packages=the coordinates of its connector",
        ),
        # What is in the data is not what the machine says.
        ("CHECK constraint note (note <> '') violated by row with values:\n - note : No space left on device", None),
        ("java.lang.IllegalStateException: x", None),
    ],
)
def test_what_stands_at_the_bottom_of_a_trace_is_said(text: str, sentence: str | None) -> None:
    outer = QueryFailedError("orders", RuntimeError(f"Job aborted.\n\tat y\n{text}"))

    assert environment.said(outer) == sentence
    assert verdict(outer) is (Verdict.AGAIN if sentence is None else Verdict.CONFIGURATION)
    assert sentence is None or str(outer) == located("query 'orders' failed", sentence)


def no_spark(*_: object, **__: object) -> SparkSession:
    msg = "Spark was started"
    raise AssertionError(msg)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CliRunner:
    monkeypatch.setattr("stream_merge.cli.commands.shared.local_session", no_spark)
    monkeypatch.chdir(tmp_path)
    return CliRunner()


def job_file(checkpoint: Path) -> str:
    Path("job.yaml").write_text(
        f"""
kafka: {{bootstrap: "127.0.0.1:1"}}
metrics: {{port: 0}}
queries:
  - {{name: orders, topic: orders, target: t, keys: id, checkpoint: "{checkpoint}"}}
"""
    )
    return "job.yaml"


def test_a_checkpoint_that_cannot_be_written_is_said_before_spark_starts(
    commands: CliRunner, closed_disk: Path
) -> None:
    """By `run` and by `files`, with exit code 2 and nothing else on the screen."""
    checkpoint = closed_disk / "checkpoint"
    files = "files --source in --format json --keys id --sequence-by lsn --target t --metrics-port 0 --checkpoint"
    sentence = (
        f"stream-merge: [NOT_WRITABLE] this process (uid {os.geteuid()}) cannot write to {str(closed_disk)!r}"
        f" (Read-only file system), where {str(checkpoint)!r} is located; grant it write permission or choose another"
        " path\n"
    )

    for line in (["run", job_file(checkpoint)], [*files.split(), str(checkpoint)]):
        result = commands.invoke(cli.app, line)
        assert (result.exit_code, result.output) == (2, sentence)


def test_check_tells_every_problem_of_a_job_whose_broker_is_away(
    commands: CliRunner, closed_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders are tried by writing, the metrics port by listening; nothing is left behind."""
    monkeypatch.setattr(connection, "_ADMIN_TIMEOUT_MILLIS", 300)
    (closed_log := tmp_path / "logs" / "_delta_log").parent.mkdir()
    closed_log.symlink_to(closed_disk)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        Path("job.yaml").write_text(
            f"""
kafka: {{bootstrap: "127.0.0.1:1"}}
metrics: {{port: {port}}}
queries:
  - {{name: a, topic: a, target: {closed_disk}/deep/a, keys: id, checkpoint: c/a}}
  - {{name: b, topic: b, target: t/b, keys: [id, id], checkpoint: {closed_disk}/b, engine: driver, target_filter: t.x}}
  - {{name: c, topic: c, target: {closed_log.parent}, keys: id, checkpoint: c/c}}
"""
        )
        before = sorted(tmp_path.rglob("*"))
        result = commands.invoke(cli.app, ["check", "job.yaml"])

    cannot = f"[NOT_WRITABLE] this process (uid {os.geteuid()}) cannot write to"
    closed = f"{cannot} {str(closed_disk)!r} (Read-only file system), where"
    remedy = "is located; grant it write permission or choose another path"
    assert [line.removeprefix("problem ") for line in result.stdout.splitlines() if line.startswith("problem")] == [
        f"job, metrics: [METRICS_PORT_UNAVAILABLE] cannot serve metrics on 127.0.0.1:{port}: Address already in use;"
        " choose another port, or 0 for a free one",
        "job, broker: [BROKER_UNREACHABLE] 127.0.0.1:1 does not answer: 111 ECONNREFUSED",
        f"a, storage: {closed} '{closed_disk}/deep/a' {remedy}",
        f"b, checkpoint: {closed} '{closed_disk}/b' {remedy}",
        "b, settings: [INVALID_SETTING] queries.b.keys names ['id'] more than once; name each column once",
        "b, settings: [CONFLICTING_SETTINGS] queries.b.target_filter is SQL, which 'queries.b.engine: driver' does not"
        " execute; remove one of them",
        f"c, storage: {cannot} '{closed_log}' (Read-only file system); {remedy.removeprefix('is located; ')}",
    ]
    assert result.exit_code == 2
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_in_place_of_the_checkpoint_is_said(commands: CliRunner, tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    result = commands.invoke(cli.app, ["run", job_file(tmp_path / "file" / "checkpoint")])

    assert result.exit_code == 2
    assert f"'{tmp_path}/file' is a file, but '{tmp_path}/file/checkpoint' needs a folder" in result.output


def test_the_whole_error_is_shown_when_asked_for(commands: CliRunner, tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    result = commands.invoke(cli.app, ["run", job_file(tmp_path / "file" / "checkpoint"), "--debug"])

    assert result.exit_code == 2
    assert result.output.startswith("stream-merge: ")
    assert "Traceback (most recent call last):" in result.output


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "[X] CHECK constraint pos (price > 0) violated by row with values:\n - note : a : b\nc\n - price : -7",
            "[X] CHECK constraint pos (price > 0) violated by row with values: note=a : b\\nc, price=-7",
        ),
        (
            "CHECK constraint a violated by row with values:\n - a : 1\n\nJVM stacktrace:\nx\n - b : 2",
            "CHECK constraint a violated by row with values: a=1",
        ),
        (
            "1 rows failed validation check.\nPreview of invalid data:\n\n+----+------+\n| id | note |\n+----+------+\n"
            "| 2  | b    |\n+----+------+",
            "1 rows failed validation check: id=2, note=b",
        ),
        (
            "An exception was thrown from the Python worker:\nTraceback (most recent call last):\n"
            "  File \"a.py\", line 1, in <module>\n    import lake\nModuleNotFoundError: No module named 'lake'\n",
            "An exception was thrown from the Python worker: ModuleNotFoundError: No module named 'lake'",
        ),
        (
            "PythonException: thrown from the Python worker: Traceback (most recent call last):\n"
            '  File "a.py", line 1\nValueError: no\n SQLSTATE: 38000',
            "PythonException: thrown from the Python worker: ValueError: no",
        ),
        ("Cannot run program:\n\n  error=2\nmore", "Cannot run program: error=2"),
        ("nothing below:\n", "nothing below:"),
        ("[UNRESOLVED_COLUMN] opp;\n'Project ['opp]\n+- Relation", "[UNRESOLVED_COLUMN] opp;"),
        ("", ""),
    ],
)
def test_what_stands_below_a_colon_is_part_of_the_sentence(text: str, line: str) -> None:
    assert environment.first_line(text) == line
