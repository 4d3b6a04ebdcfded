"""The commands: what they print, how they end, and what they say instead of a stack trace."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from rich.console import Console
from typer.testing import CliRunner, Result

from stream_merge import (
    CommitConflictError,
    CommitStateUnknownError,
    ConfigError,
    ContractError,
    MergeFailedError,
    StreamMergeError,
    cli,
)
from stream_merge.cli import shared, tables
from stream_merge.demo.run import DemoSettings
from stream_merge.demo.run import run as run_demo
from stream_merge.files.run import FilesSettings
from stream_merge.watch.queries import QueryFailedError

SMALL = DemoSettings(events=400, keys=80, batches=2)
FILES = "files --source in --format json --keys id --sequence-by lsn --target ./t --checkpoint ./c --metrics-port 0"


Invoke = Callable[..., Result]


@pytest.fixture
def invoke() -> Invoke:
    """Run a command line."""
    return lambda line, *more: CliRunner().invoke(cli.app, [*line.split(), *more])


@pytest.fixture
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where Spark is started for what can be said without it."""

    def start(*_: object, **__: object) -> SparkSession:
        msg = "Spark was started"
        raise AssertionError(msg)

    monkeypatch.setattr(shared, "local_session", start)


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
    assert "temporary and removed at the end" in said


@pytest.mark.usefixtures("no_spark")
def test_a_folder_of_something_else_is_not_taken_for_a_demo(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")

    result = invoke("demo --metrics-port 0 --keep", str(tmp_path))

    assert result.exit_code == 2
    assert result.stderr == (
        f"stream-merge: --keep '{tmp_path}' exists and holds no demo; name a new or empty folder, or one that a demo"
        " left\n"
    )


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("", False),
        ("--schema-evolution --once", True),
        ("--once --schema-evolution", True),
        ("--schema-evolution true", True),
        ("--schema-evolution widen --once", "widen"),
        ("--schema-evolution=widen", "widen"),
    ],
)
def test_schema_evolution_may_stand_alone_or_say_how_far(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, given: str, meant: bool | str
) -> None:
    started: list[FilesSettings] = []
    monkeypatch.setattr(tables, "run_files", lambda settings, **_: started.append(settings))

    result = invoke(f"{FILES} {given}")

    assert (result.exit_code, [settings.schema_evolution for settings in started]) == (0, [meant])


def test_the_version_is_the_installed_one(invoke: Invoke) -> None:
    result = invoke("--version")

    assert result.exit_code == 0
    assert result.stdout.startswith("stream-merge 0.")


@pytest.mark.parametrize("command", ["demo", "files"])
def test_help_tells_every_option(invoke: Invoke, command: str) -> None:
    result = invoke(f"{command} --help")

    assert result.exit_code == 0
    assert "--metrics-port" in result.stdout


@pytest.mark.usefixtures("no_spark")
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("demo --events 3", "--events"),
        ("demo --batches 0", "--batches"),
        ("demo --metrics-port 70000", "--metrics-port"),
        (f"{FILES} --format xml", "--format"),
        ("files --format json", "--source"),
        (f"{FILES} --keys id,id", "keys names ['id'] more than once"),
        (f"{FILES} --keys lsn", "sequence_by='lsn' is also a key"),
        (f"{FILES} --columns id --except-columns lsn", "column_list and except_column_list are both given"),
        (f'{FILES} --keys "id', "--keys '\"id' is not a list of column names"),
        (f"{FILES} --conf driver.memory=4g", "--conf 'driver.memory=4g' is not a Spark conf"),
        (f"{FILES} --max-files-per-trigger 0", "--max-files-per-trigger"),
    ],
)
def test_wrong_settings_end_with_2_and_a_sentence_before_spark_starts(invoke: Invoke, line: str, said: str) -> None:
    result = invoke(line)

    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (ContractError("x", reasons={}), 3),
        (MergeFailedError("x"), 3),
        (CommitConflictError("x", conflict="ConcurrentAppendException"), 4),
        (CommitStateUnknownError("x"), 4),
        (QueryFailedError("x", RuntimeError("y")), 1),
    ],
)
def test_every_error_has_an_exit_code_and_one_line(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(tables, "run_files", fail)

    result = invoke(FILES)

    assert result.exit_code == code
    assert result.stderr == f"stream-merge: {error}\n"


def test_no_error_of_the_sink_is_forgotten() -> None:
    """A new class of error must be given an exit code."""
    assert set(StreamMergeError.__subclasses__()) <= set(shared.EXIT_CODES)


def test_an_interrupt_ends_with_130_and_a_sentence(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tables, "run_files", interrupt)

    result = invoke(FILES)

    assert result.exit_code == 130
    assert "what was merged stays" in result.stderr


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


@pytest.mark.usefixtures("no_spark")
def test_a_given_metrics_port_that_is_taken_is_an_error(invoke: Invoke, taken_port: int) -> None:
    result = invoke(f"{FILES} --metrics-port {taken_port}")

    assert result.exit_code == 2
    assert f"cannot serve metrics on 127.0.0.1:{taken_port}" in result.stderr


def test_the_default_metrics_port_gives_way(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two demos on one machine must both run."""
    urls: list[str] = []

    def taken_once(port: int, host: str) -> shared.MetricsServer:
        if port == shared.METRICS_PORT:
            msg = "taken"
            raise ConfigError(msg)
        return serve(port, host)

    serve = shared.serve
    monkeypatch.setattr(shared, "serve", taken_once)
    monkeypatch.setattr(tables, "run_files", lambda *_, metrics_url, **__: urls.append(metrics_url))

    result = invoke(FILES.removesuffix(" --metrics-port 0"))

    assert result.exit_code == 0
    assert "port 9108 is taken, so /metrics is on port " in result.stderr
    assert urls[0].startswith("http://127.0.0.1:")


def test_names_with_commas_can_be_written_in_quotes() -> None:
    assert shared.names("--keys", 'id, "a,b",c d') == ("id", "a,b", "c d")
