"""`stream-merge`: the commands; every error that a person can act on is one sentence and an exit code.

Exit codes: 0 done, or stopped after a micro-batch by Ctrl-C or SIGTERM; 1 the demo's table is not what it must be,
or Spark failed; 2 the settings or the environment have to change; 3 the data has to change; 4 run the same command
again; 130 interrupted in the middle.
"""

from __future__ import annotations

import csv
import logging
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession
from rich.console import Console
from rich.markup import escape

from stream_merge.demo.run import DemoSettings
from stream_merge.demo.run import run as run_demo
from stream_merge.errors import (
    CommitConflictError,
    CommitStateUnknownError,
    ConfigError,
    ContractError,
    MergeFailedError,
    RoutedMergeError,
)
from stream_merge.explain import explain as explain_table
from stream_merge.files.reader import Folder
from stream_merge.files.run import FilesSettings
from stream_merge.files.run import run as run_files
from stream_merge.server import MetricsServer, serve
from stream_merge.session import local_session
from stream_merge.watch.explained import show as show_explained
from stream_merge.watch.queries import QueryFailedError, innermost_message

METRICS_PORT = 9108
FAILED, CONFIGURATION, DATA, AGAIN, INTERRUPTED = 1, 2, 3, 4, 130

_EXIT_CODES: dict[type[Exception], int] = {
    ConfigError: CONFIGURATION,
    ContractError: DATA,
    MergeFailedError: DATA,
    RoutedMergeError: DATA,
    CommitConflictError: AGAIN,
    CommitStateUnknownError: AGAIN,
    QueryFailedError: FAILED,
}

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Merge change streams into Delta tables: exactly once, with every event accounted for.",
)


_OUT = Console()
_ERR = Console(stderr=True)
_DEMO = DemoSettings()
_SHORT_LIVED = {
    # Optimising code that runs for a minute took a third of all CPU time (measured on 2 cores). Without the second
    # compiler, Java 17 keeps only 48 MB for compiled code, which is too little for Spark.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=256m"
}
_MetricsPort = Annotated[
    int,
    typer.Option(min=0, max=65535, metavar="PORT", help="Serve /metrics on this loopback port; 0 takes a free one."),
]


class Format(StrEnum):
    """File formats of `files`."""

    JSON = "json"
    CSV = "csv"
    PARQUET = "parquet"


def main() -> None:
    """Run the command that the arguments name."""
    app()


def _show_version(wanted: bool) -> None:
    if wanted:
        Console().print(f"stream-merge {metadata.version('stream-merge')}", highlight=False)
        raise typer.Exit


@app.callback()
def _all_commands(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    context: typer.Context,
    *,
    seed: Annotated[int, typer.Option(help="The same seed makes the same events.")] = _DEMO.seed,
    events: Annotated[int, typer.Option(min=10, help="Events to deliver.")] = _DEMO.events,
    keys: Annotated[int, typer.Option(min=1, help="How many different orders there may be.")] = _DEMO.keys,
    batches: Annotated[int, typer.Option(min=1, help="Micro-batches, per writer.")] = _DEMO.batches,
    conflict: Annotated[
        bool, typer.Option("--conflict", help="Let a second query merge half of the events at the same time.")
    ] = _DEMO.conflict,
    keep: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Leave table and checkpoint there; a second run over them continues."),
    ] = _DEMO.keep,
    metrics_port: _MetricsPort = METRICS_PORT,
    hold: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Keep table and /metrics up after the end.")
    ] = _DEMO.hold_seconds,
) -> None:
    """Merge a made-up change stream and say whether the table is what it must be.

    Needs nothing but Java. The stream comes late, twice, out of order and in parts broken.
    """
    _log_to_screen(logging.CRITICAL)
    settings = DemoSettings(
        seed=seed,
        events=events,
        keys=keys,
        batches=batches,
        conflict=conflict,
        keep=keep,
        hold_seconds=hold,
    )
    with (
        _errors_as_sentences(),
        _metrics_server(context, metrics_port) as server,
        _session_starter("stream-merge demo", _SHORT_LIVED) as start,
    ):
        as_expected = run_demo(settings, console=_OUT, start_session=start, metrics_url=server.url)
    if not as_expected:
        raise typer.Exit(FAILED)


@app.command()
def files(
    context: typer.Context,
    *,
    source: Annotated[str, typer.Option(metavar="DIR", help="Folder of change files, read at any depth.")],
    format: Annotated[Format, typer.Option(help="json: one object per line; csv: RFC 4180.")],
    keys: Annotated[str, typer.Option(metavar="COLUMNS", help="Columns that identify a row, with commas between.")],
    sequence_by: Annotated[
        str, typer.Option(metavar="COLUMNS", help="Columns that order the changes of a row; the greatest wins.")
    ],
    target: Annotated[str, typer.Option(metavar="PATH", help="The Delta table; made from the first files if missing.")],
    checkpoint: Annotated[str, typer.Option(metavar="DIR", help="What has been merged; one for each target.")],
    apply_as_deletes: Annotated[
        str | None, typer.Option(metavar="SQL", help="Which changes are deletes, such as \"op = 'd'\".")
    ] = None,
    columns: Annotated[str | None, typer.Option(metavar="COLUMNS", help="The only columns to store.")] = None,
    except_columns: Annotated[str | None, typer.Option(metavar="COLUMNS", help="Columns not to store.")] = None,
    once: Annotated[bool, typer.Option("--once", help="End when everything that is there has been merged.")] = False,
    schema: Annotated[
        str | None,
        typer.Option(metavar="DDL", help="Types, such as 'id BIGINT, at TIMESTAMP'; else inferred once, then kept."),
    ] = None,
    schema_evolution: Annotated[
        bool, typer.Option("--schema-evolution", help="Add columns to the target that it lacks.")
    ] = False,
    header: Annotated[bool, typer.Option("--header/--no-header", help="CSV: files start with column names.")] = True,
    delimiter: Annotated[str, typer.Option(help="CSV: what separates fields.")] = ",",
    max_files_per_trigger: Annotated[
        int | None,
        typer.Option(min=1, metavar="NUMBER", help="Files per micro-batch; all that are there if not given."),
    ] = None,
    quarantine_target: Annotated[
        str | None, typer.Option(metavar="PATH", help="Where broken events go; beside the target if not given.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Label of metrics; the name of the table if not given.")] = None,
    metrics_port: _MetricsPort = METRICS_PORT,
    conf: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="A Spark conf, as for spark-submit; repeatable.")
    ] = None,
) -> None:
    """Merge a folder of change files into a Delta table, until it is stopped or --once.

    Lines that cannot be read go to the quarantine table. Put files into the folder by renaming: a file is read once.
    """
    _log_to_screen(logging.WARNING)
    with _errors_as_sentences():
        settings = FilesSettings(
            folder=Folder(path=source, format=format.value, header=header, delimiter=delimiter),
            target=target,
            checkpoint=checkpoint.rstrip("/"),
            keys=_names("--keys", keys),
            sequence_by=_names("--sequence-by", sequence_by),
            apply_as_deletes=apply_as_deletes,
            columns=None if columns is None else _names("--columns", columns),
            except_columns=None if except_columns is None else _names("--except-columns", except_columns),
            quarantine_target=quarantine_target,
            schema_evolution=schema_evolution,
            name=name,
            schema=schema,
            max_files_per_trigger=max_files_per_trigger,
            once=once,
        )
        with (
            _metrics_server(context, metrics_port) as server,
            _session_starter(f"stream-merge files {settings.label}", _confs(conf or [])) as start,
        ):
            run_files(settings, console=_OUT, start_session=start, metrics_url=server.url)


@app.command()
def explain(
    target: Annotated[str, typer.Argument(metavar="TABLE", help="Path or URI of a sink's target.")],
    *,
    last: Annotated[int, typer.Option(min=1, metavar="NUMBER", help="So many versions, newest first.")] = 20,
) -> None:
    """Say which engine merged a table's newest batches, why, and what each did. Reads the log only; needs no Java."""
    with _errors_as_sentences():
        show_explained(explain_table(target, last=last), target, console=_OUT)


def _names(option: str, text: str) -> tuple[str, ...]:
    """Column names with commas between; a name that holds a comma is put in double quotes."""
    try:
        (row,) = csv.reader([text], skipinitialspace=True, strict=True)
    except (csv.Error, ValueError) as err:
        msg = f"{option} {text!r} is not a list of column names with commas between: {err}"
        raise ConfigError(msg) from err
    return tuple(row)


def _confs(pairs: list[str]) -> dict[str, str]:
    wrong = [pair for pair in pairs if not re.match(r"spark\.[^=]+=", pair)]
    if wrong:
        msg = f"--conf {wrong[0]!r} is not a Spark conf; write it like --conf spark.driver.memory=4g"
        raise ConfigError(msg)
    return dict(pair.split("=", 1) for pair in pairs)


@contextmanager
def _session_starter(app_name: str, confs: dict[str, str]) -> Iterator[Callable[[], SparkSession]]:
    with tempfile.TemporaryDirectory(prefix="stream-merge-", ignore_cleanup_errors=True) as scratch:
        quiet = {
            "spark.log.level": "OFF",  # Spark would write a stack trace for each error that is one sentence here
            "spark.sql.warehouse.dir": scratch,  # Spark would make it in the working folder
        }
        yield lambda: local_session(app_name, confs={**quiet, **confs})


@contextmanager
def _metrics_server(context: typer.Context, port: int) -> Iterator[MetricsServer]:
    """`/metrics` for as long as a command runs; the default port is a wish, a given one is an order."""
    try:
        server = serve(port)
    except ConfigError:
        source = context.get_parameter_source("metrics_port")
        if source is None or source.name != "DEFAULT":
            raise
        server = serve(0)
        _ERR.print(f"port {port} is taken, so /metrics is on port {server.port}", highlight=False)
    with server:
        yield server


@contextmanager
def _errors_as_sentences() -> Iterator[None]:
    try:
        yield
    except tuple(_EXIT_CODES) as err:
        _ERR.print(f"stream-merge: {escape(str(err))}", highlight=False, soft_wrap=True)
        raise typer.Exit(next(code for kind, code in _EXIT_CODES.items() if isinstance(err, kind))) from err
    except (PySparkException, Py4JJavaError) as err:
        _ERR.print(
            f"stream-merge: Spark failed: {escape(innermost_message(str(err)))}", highlight=False, soft_wrap=True
        )
        raise typer.Exit(FAILED) from err
    except KeyboardInterrupt:
        _ERR.print("stream-merge: interrupted; what was merged stays, the rest comes with the next run")
        raise typer.Exit(INTERRUPTED) from None


def _log_to_screen(level: int) -> None:
    """Show what the sink logs from a level on, except what ends in a sentence anyway."""
    handler = logging.StreamHandler()
    handler.setLevel(level)
    handler.addFilter(lambda record: record.msg != "micro_batch_failed")
    handler.setFormatter(_Fields("%(levelname)s %(name)s %(message)s"))
    logging.getLogger("stream_merge").handlers = [handler]
    for name in ("DataFrameQueryContextLogger", "SQLQueryContextLogger"):  # PySpark 4.2: each error as a line of JSON
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL)
    logging.getLogger("py4j").setLevel(logging.CRITICAL)  # a stack trace for an interrupt


class _Fields(logging.Formatter):
    """Appends the fields of a structured log line."""

    _USUAL = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        fields = [f"{name}={value!r}" for name, value in record.__dict__.items() if name not in self._USUAL]
        return " ".join([super().format(record), *fields])
