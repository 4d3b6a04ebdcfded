"""What all commands share: the screen, errors as sentences and exit codes, Spark and /metrics for their time."""

from __future__ import annotations

import csv
import logging
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession
from rich.console import Console
from rich.markup import escape

from stream_merge.errors import (
    CommitConflictError,
    CommitStateUnknownError,
    ConfigError,
    ContractError,
    MergeFailedError,
    RoutedMergeError,
    StreamMergeError,
)
from stream_merge.server import MetricsServer, serve
from stream_merge.session import is_submitted, local_session, submitted_session
from stream_merge.watch.queries import QueryFailedError, innermost_message

METRICS_PORT = 9108
FAILED, CONFIGURATION, DATA, AGAIN, INTERRUPTED = 1, 2, 3, 4, 130

EXIT_CODES: dict[type[Exception], int] = {
    ConfigError: CONFIGURATION,
    ContractError: DATA,
    MergeFailedError: DATA,
    RoutedMergeError: DATA,
    CommitConflictError: AGAIN,
    CommitStateUnknownError: AGAIN,
    QueryFailedError: FAILED,
    StreamMergeError: DATA,
}

OUT = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 200)
"""As wide as the terminal; elsewhere as wide as a table may need."""
ERR = Console(stderr=True)
MetricsPort = Annotated[
    int,
    typer.Option(min=0, max=65535, metavar="PORT", help="Serve /metrics on this loopback port; 0 takes a free one."),
]
Confs = Annotated[
    list[str] | None, typer.Option(metavar="KEY=VALUE", help="A Spark conf, as for spark-submit; repeatable.")
]


def names(option: str, text: str) -> tuple[str, ...]:
    """Column names with commas between; a name that holds a comma is put in double quotes."""
    try:
        (row,) = csv.reader([text], skipinitialspace=True, strict=True)
    except (csv.Error, ValueError) as err:
        msg = f"{option} {text!r} is not a list of column names with commas between: {err}"
        raise ConfigError(msg) from err
    return tuple(row)


def confs(pairs: list[str]) -> dict[str, str]:
    """Spark confs from `KEY=VALUE`."""
    wrong = [pair for pair in pairs if not re.match(r"spark\.[^=]+=", pair)]
    if wrong:
        msg = f"--conf {wrong[0]!r} is not a Spark conf; write it like --conf spark.driver.memory=4g"
        raise ConfigError(msg)
    return dict(pair.split("=", 1) for pair in pairs)


@contextmanager
def session_starter(app_name: str, more: dict[str, str]) -> Iterator[Callable[[], SparkSession]]:
    """Something that starts a quiet local Spark; what it writes beside the tables goes with the command.

    Under spark-submit it gives the session of the application there.
    """
    if is_submitted():
        yield lambda: submitted_session(more)
        return
    with tempfile.TemporaryDirectory(prefix="stream-merge-", ignore_cleanup_errors=True) as scratch:
        quiet = {
            "spark.log.level": "OFF",  # Spark would write a stack trace for each error that is one sentence here
            "spark.sql.warehouse.dir": scratch,  # Spark would make it in the working folder
        }
        yield lambda: local_session(app_name, confs={**quiet, **more})


@contextmanager
def metrics_server(context: typer.Context, port: int) -> Iterator[MetricsServer]:
    """`/metrics` for as long as a command runs; the default port is a wish, a given one is an order."""
    try:
        server = serve(port)
    except ConfigError:
        source = context.get_parameter_source("metrics_port")
        if source is None or source.name != "DEFAULT":
            raise
        server = serve(0)
        ERR.print(f"port {port} is taken, so /metrics is on port {server.port}", highlight=False)
    with server:
        yield server


@contextmanager
def errors_as_sentences() -> Iterator[None]:
    """Turn every error that a person can act on into one sentence and an exit code."""
    try:
        yield
    except tuple(EXIT_CODES) as err:
        ERR.print(f"stream-merge: {escape(str(err))}", highlight=False, soft_wrap=True)
        raise typer.Exit(next(code for kind, code in EXIT_CODES.items() if isinstance(err, kind))) from err
    except (PySparkException, Py4JJavaError) as err:
        ERR.print(f"stream-merge: Spark failed: {escape(innermost_message(str(err)))}", highlight=False, soft_wrap=True)
        raise typer.Exit(FAILED) from err
    except KeyboardInterrupt:
        ERR.print("stream-merge: interrupted; what was merged stays, the rest comes with the next run")
        raise typer.Exit(INTERRUPTED) from None


def log_to_screen(level: int) -> None:
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
