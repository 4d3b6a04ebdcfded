"""The commands: what they print, how they end, and what they say instead of a stack trace."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pyspark.sql import SparkSession
from typer.main import get_command
from typer.testing import CliRunner, Result

from stream_merge import (
    CommitConflictError,
    CommitStateUnknownError,
    ConfigError,
    ContractError,
    MergeFailedError,
    StreamMergeError,
)
from stream_merge.cli import app as cli
from stream_merge.cli.commands import shared, tables
from stream_merge.jobs.files.run import FilesSettings
from stream_merge.jobs.kafka.jars import CONNECTOR
from stream_merge.jobs.watch.queries import QueryFailedError
from stream_merge.model.results import MaintenanceRun

FILES = "files --source in --format json --keys id --sequence-by lsn --target ./t --checkpoint ./c --metrics-port 0"
SNAPSHOTS = "files --source in --format json --keys id --target ./t --checkpoint ./c --metrics-port 0"
SNAPSHOTS += " --shape snapshot --once"


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


@pytest.mark.usefixtures("no_spark")
def test_a_folder_of_something_else_is_not_taken_for_a_demo(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")

    result = invoke("demo --metrics-port 0 --keep", str(tmp_path))

    assert result.exit_code == 2
    assert result.stderr == (
        f"stream-merge: [INVALID_SETTING] --keep '{tmp_path}' does not contain a demo; use a new, an empty or a demo's"
        " folder\n"
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


def commands(group: Any, *before: str) -> Iterator[tuple[str, Any]]:
    """Every command with the words that call it."""
    for name, command in group.commands.items():
        words = (*before, name)
        yield from commands(command, *words) if hasattr(command, "commands") else [(" ".join(words), command)]


EVERY_COMMAND = [pytest.param(*found, id=found[0]) for found in commands(get_command(cli.app))]


@pytest.mark.parametrize(("words", "command"), EVERY_COMMAND)
def test_help_tells_every_option(invoke: Invoke, words: str, command: Any) -> None:
    """Its name, and a sentence about it."""
    result = invoke(f"{words} --help")
    options = [param for param in command.params if param.param_type_name == "option"]
    said = " ".join(result.stdout.split())

    assert result.exit_code == 0
    assert [name for option in options for name in option.opts if f"{name} " not in said] == []
    assert [option.name for option in options if " ".join((option.help or "nothing at all").split()) not in said] == []


@pytest.mark.usefixtures("no_spark")
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("demo --events 3", "--events"),
        ("demo --batches 0", "--batches"),
        ("demo --metrics-port 70000", "--metrics-port"),
        (f"{FILES} --format xml", "--format"),
        ("files --format json", "--source"),
        (f"{FILES} --keys id,id", "--keys names ['id'] more than once"),
        (f"{FILES} --keys lsn", "--sequence-by 'lsn' is also a key"),
        (f"{FILES} --columns id --except-columns lsn", "--columns and --except-columns are both given"),
        (f'{FILES} --keys "id', "--keys '\"id' must be column names"),
        (f"{FILES} --conf driver.memory=4g", "--conf 'driver.memory=…' is not a Spark conf"),
        (f"{FILES} --conf driver.memory", "--conf 'driver.memory' is not a Spark conf"),
        (f"{FILES} --max-files-per-trigger 0", "--max-files-per-trigger"),
    ],
)
def test_wrong_settings_end_with_2_and_a_sentence_before_spark_starts(invoke: Invoke, line: str, said: str) -> None:
    result = invoke(line)

    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("given", "shape"),
    [
        ((), "Snapshot()"),
        (("--delete-missing",), "Snapshot()"),
        (("--no-delete-missing", "--min-rows", "0"), "Snapshot(delete_missing=False, min_rows=0)"),
        (
            ("--missing", "gone=t.v = 1", "--missing", "`at=` = now()", "--max-delete-share", "1"),
            "Snapshot(missing={'gone': 't.v = 1', 'at=': 'now()'}, max_delete_share=1.0)",
        ),
        (("--within", "t.day = '2024-06-01'"), "Snapshot(within=\"t.day = '2024-06-01'\")"),
    ],
)
def test_a_snapshot_is_told_all_that_it_is_told_in_python(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...], shape: str
) -> None:
    started: list[FilesSettings] = []
    monkeypatch.setattr(tables, "run_files", lambda settings, **_: started.append(settings))

    result = invoke(SNAPSHOTS, *given)

    assert (result.exit_code, [repr(settings.shape) for settings in started]) == (0, [shape])


@pytest.mark.usefixtures("no_spark")
@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            f"{FILES} --min-rows 3",
            "[CONFLICTING_SETTINGS] --shape changes excludes --min-rows; set --shape snapshot, or remove --min-rows",
        ),
        (
            f"{FILES} --shape insert-only --no-delete-missing --within t.x",
            "[CONFLICTING_SETTINGS] --shape insert-only excludes --delete-missing and --within; set --shape snapshot,"
            " or remove --delete-missing and --within",
        ),
        (
            f"{FILES} --clauses c.yaml --missing a=1",
            "[CONFLICTING_SETTINGS] --missing cannot be used with --clauses; remove one of them",
        ),
        (
            f"{SNAPSHOTS} --clauses c.yaml --min-rows 3",
            "[CONFLICTING_SETTINGS] --shape and --clauses exclude each other; remove one of them",
        ),
        (
            f"{SNAPSHOTS} --no-delete-missing --missing a=1",
            "[CONFLICTING_SETTINGS] --missing is given, but --no-delete-missing keeps such rows; remove one of them",
        ),
        (
            f"{SNAPSHOTS} --no-delete-missing --max-delete-share 0.5",
            "[CONFLICTING_SETTINGS] --no-delete-missing keeps missing rows, so --max-delete-share has no effect; remove"
            " one of them",
        ),
        (
            f"{SNAPSHOTS} --missing gone",
            "[INVALID_SETTING] --missing 'gone' sets no column; write --missing deleted_at=current_timestamp()",
        ),
        (
            f"{SNAPSHOTS} --missing gone=1 --missing `gone`=2",
            "[INVALID_SETTING] --missing sets 'gone' twice; remove one of the two",
        ),
        (
            SNAPSHOTS.removesuffix(" --once"),
            "[CONFLICTING_SETTINGS] --shape snapshot merges the full copy in --source and exits: set --once, without"
            " --max-files-per-trigger; call it for each copy",
        ),
        (
            f"{SNAPSHOTS} --sequence-by lsn",
            "[CONFLICTING_SETTINGS] --sequence-by has no effect with --shape snapshot, of which the later one counts;"
            " remove it",
        ),
        (
            f"{SNAPSHOTS} --missing id=1",
            "[CONFLICTING_SETTINGS] --missing sets key(s) ['id']; use other columns",
        ),
    ],
)
def test_options_of_snapshots_that_do_not_go_together_are_one_sentence(invoke: Invoke, line: str, said: str) -> None:
    result = invoke(line)

    assert (result.exit_code, result.stderr) == (2, f"stream-merge: {said}\n")


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


@pytest.mark.parametrize("error", [MergeFailedError("x"), QueryFailedError("x", RuntimeError("y"))], ids=type)
def test_a_store_that_is_away_lets_the_command_be_run_again(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Whoever restarts it must not wait for a person, of `files` as of `run`."""

    def fail(*_: object, **__: object) -> None:
        url = "http://127.0.0.1:9000/lake/t/1.json"
        said = (
            f"Generic S3 error\n   \x1b[31m↳\x1b[0m Error performing PUT {url} in 39.3ms, after 2 retries, max_retries"
        )
        raise error from OSError(f"{said}\n   2, retry_timeout\n   5s  - HTTP error: error sending request")

    monkeypatch.setattr(tables, "run_files", fail)

    assert invoke(FILES).exit_code == 4


@pytest.mark.parametrize(
    "line",
    [
        FILES,
        "maintain ./t",
        pytest.param("quarantine replay JOB --alone", id="replay"),
    ],
)
def test_every_command_that_starts_spark_takes_the_folder_of_jars(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str
) -> None:
    """A machine without network has no other way to Delta's jars."""
    given: list[dict[str, str]] = []

    def start(*_: object, confs: dict[str, str], **__: object) -> SparkSession:
        given.append(confs)
        msg = "enough"
        raise ConfigError(msg)

    monkeypatch.setattr(shared, "local_session", start)
    folder = tmp_path / "jars"
    folder.mkdir()
    for name in (*CONNECTOR, "delta-spark_4.2_2.13"):
        (folder / f"{name}-1.0.jar").touch()
    for name in ("in", "orders"):
        (tmp_path / name).mkdir()
    job = tmp_path / "job.yaml"
    query = {"name": "orders", "topic": "t", "value_format": {"type": "debezium"}, "keys": "id"}
    query |= {"target": str(tmp_path / "orders"), "checkpoint": str(tmp_path / "c")}
    job.write_text(yaml.safe_dump({"kafka": {"bootstrap": "localhost:1"}, "queries": [query]}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STREAM_MERGE_JARS", str(folder))

    result = invoke(line.replace("JOB", str(job)))

    assert (result.exit_code, result.stderr) == (2, "stream-merge: enough\n")
    assert "delta-spark_4.2_2.13-1.0.jar" in given[0]["spark.jars"]


def test_a_wrong_conf_for_the_download_of_jars_is_a_sentence(invoke: Invoke) -> None:
    result = invoke("jars x --conf nonsense")

    assert result.exit_code == 2
    assert result.stderr.startswith("stream-merge: [INVALID_SETTING] --conf 'nonsense' is not a Spark conf")


def test_a_maintenance_run_that_failed_in_part_says_what_it_did(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files were deleted: time travel is shorter, whatever became of the rest."""
    run = MaintenanceRun(outcome="failed", detail="full", vacuumed=True)
    monkeypatch.setattr(tables, "maintain_table", lambda *_: run)
    monkeypatch.setattr(shared, "local_session", lambda *_, **__: None)

    result = invoke("maintain ./t")

    assert result.exit_code == 1
    assert result.stdout == "failed: full; deleted files that the table no longer needs\n"


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

    def taken_once(port: int, host: str, **access: Any) -> shared.MetricsServer:
        if port == shared.METRICS_PORT:
            msg = "taken"
            raise ConfigError(msg)
        return serve(port, host, **access)

    serve = shared.serve
    monkeypatch.setattr(shared, "serve", taken_once)
    monkeypatch.setattr(tables, "run_files", lambda *_, metrics_url, **__: urls.append(metrics_url))

    result = invoke(FILES.removesuffix(" --metrics-port 0"))

    assert result.exit_code == 0
    assert "port 9108 is in use, so /metrics is served on port " in result.stderr
    assert urls[0].startswith("http://127.0.0.1:")


def test_a_run_that_fails_pushes_its_metrics_too(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed: list[tuple[str, list[str]]] = []

    def fail(*_: object, **__: object) -> None:
        msg = "broken"
        raise ConfigError(msg)

    monkeypatch.setattr(tables, "run_files", fail)
    monkeypatch.setattr(tables, "push", lambda gateway, queries: pushed.append((gateway, queries)))

    assert invoke(f"{FILES} --once --pushgateway http://gateway:9091 --name orders").exit_code == 2
    assert pushed == [("http://gateway:9091", ["orders"])]


def test_names_with_commas_can_be_written_in_quotes() -> None:
    assert shared.names("--keys", 'id, "a,b",c d') == ("id", "a,b", "c d")
