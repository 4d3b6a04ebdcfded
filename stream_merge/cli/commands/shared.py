"""Shared by commands: consoles, options, errors as exit codes, Spark and /metrics for their time."""

from __future__ import annotations

import csv
import logging
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from rich.console import Console
from rich.text import Text

from stream_merge.errors import (
    CommitConflictError,
    CommitStateUnknownError,
    ConfigError,
    ContractError,
    HeldError,
    MergeFailedError,
    RoutedMergeError,
    StreamMergeError,
    located,
)
from stream_merge.jobs.kafka import jars
from stream_merge.jobs.watch.queries import QueryFailedError, end_on_sigterm, innermost_message
from stream_merge.jobs.watch.screen import escape
from stream_merge.metrics.server import Access, MetricsServer, serve
from stream_merge.model.logs import JsonFormatter, tell
from stream_merge.session import is_submitted, local_session, submitted_session
from stream_merge.spark import environment
from stream_merge.spark.confs import in_effect
from stream_merge.spark.downloads import for_places
from stream_merge.spark.errors import is_of_cluster
from stream_merge.spark.versions import error_loggers

log = logging.getLogger(__name__)

METRICS_PORT = 9108
FAILED, CONFIGURATION, DATA, AGAIN, INTERRUPTED = 1, 2, 3, 4, 130

EXIT_CODES: dict[type[Exception], int] = {
    HeldError: AGAIN,
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
"""As wide as the terminal, else wide enough for tables."""
ERR = Console(stderr=True)
MetricsPort = Annotated[
    int,
    typer.Option(min=0, max=65535, metavar="PORT", help="Serve /metrics on this port; 0 picks a free one."),
]
Debug = Annotated[
    bool, typer.Option("--debug", help="Show the full error: the Python stack trace and what Spark reported.")
]
Confs = Annotated[
    list[str] | None, typer.Option(metavar="KEY=VALUE", help="A Spark conf, as for spark-submit; repeatable.")
]

Jars = Annotated[
    str | None,
    typer.Option(
        "--jars",
        envvar="STREAM_MERGE_JARS",
        metavar="DIR",
        help="Folder filled by 'stream-merge jars'; by default Spark downloads the jars.",
    ),
]


def names(option: str, text: str) -> tuple[str, ...]:
    """Column names separated by commas; one with a comma is in double quotes."""
    try:
        (row,) = csv.reader([text], skipinitialspace=True, strict=True)
    except (csv.Error, ValueError) as err:
        msg = f"[INVALID_SETTING] {option} {text!r} must be column names separated by commas: {err}"
        raise ConfigError(msg) from err
    return tuple(row)


def confs(pairs: list[str]) -> dict[str, str]:
    """Spark confs from `KEY=VALUE`."""
    wrong = [pair for pair in pairs if not re.match(r"spark\.[^=]+=", pair)]
    if wrong:
        name, equals, _ = wrong[0].partition("=")
        shown = f"{name}{equals and '=…'}"  # the value may be a secret
        msg = f"[INVALID_SETTING] --conf {shown!r} is not a Spark conf; write it like --conf spark.driver.memory=4g"
        raise ConfigError(msg)
    return dict(pair.split("=", 1) for pair in pairs)


def session_confs(pairs: list[str] | None, jars_in: str | None, places: Iterable[str]) -> dict[str, str]:
    """Spark confs from `KEY=VALUE`, and, unless under spark-submit, those for jars and the stores of these places."""
    own = confs(pairs or [])
    if is_submitted():
        return own
    return for_places(own if jars_in is None else jars.conf(jars_in, own), places)


def properties(option: str, pairs: list[str]) -> dict[str, str]:
    """Table properties from `NAME=VALUE`."""
    wrong = [pair for pair in pairs if not re.match(r"[^=\s]+=", pair)]
    if wrong:
        msg = (
            f"[INVALID_SETTING] {option} {wrong[0]!r} is not a property; write it like {option}"
            " delta.enableDeletionVectors=false"
        )
        raise ConfigError(msg)
    return dict(pair.split("=", 1) for pair in pairs)


@contextmanager
def session_starter(app_name: str, more: dict[str, str]) -> Iterator[Callable[[], SparkSession]]:
    """A function that starts a quiet local Spark with a temporary warehouse; under spark-submit its session."""
    if is_submitted():
        yield lambda: submitted_session(more)
        return
    with tempfile.TemporaryDirectory(prefix="stream-merge-", ignore_cleanup_errors=True) as scratch:
        quiet = {"spark.log.level": "OFF"}  # else a stack trace for each error
        if in_effect("spark.sql.catalogImplementation", more) != "hive":  # which has tables there
            quiet["spark.sql.warehouse.dir"] = scratch  # by default in the working folder

        def start() -> SparkSession:
            with end_on_sigterm():
                return local_session(app_name, confs={**quiet, **more})

        yield start


def is_default(context: typer.Context, option: str) -> bool:
    """Whether an option was not given."""
    source = context.get_parameter_source(option)
    return source is not None and source.name == "DEFAULT"


@contextmanager
def metrics_server(
    port: int, host: str = "127.0.0.1", access: Access | None = None, *, is_wish: bool
) -> Iterator[MetricsServer]:
    """`/metrics` and probes while a command runs; `is_wish`: another port will do."""
    try:
        server = serve(port, host, access=access)
    except ConfigError:
        if not is_wish:
            raise
        server = serve(0, host, access=access)
        ERR.print(f"port {port} is in use, so /metrics is served on port {server.port}", highlight=False)
    with server:
        yield server


@contextmanager
def errors_as_sentences(*, debug: bool = False, spell: Callable[[str], str] = str) -> Iterator[None]:
    """Print expected errors as one sentence, with `debug` also the trace, and exit with their code.

    `spell` replaces Python arguments in the sentence by options or settings.
    """
    try:
        yield
    except tuple(EXIT_CODES) as err:
        complain(err, debug=debug, spell=spell)
        raise typer.Exit(_exit_code(err)) from err
    except (PySparkException, Py4JError) as err:
        problem = environment.said(err)
        complain(err, problem or f"Spark failed: {innermost_message(str(err))}", debug=debug)
        raise typer.Exit(FAILED if problem is None else CONFIGURATION) from err
    except OSError as err:
        if err.errno not in environment.REFUSALS:
            raise
        complain(err, environment.not_writable(str(err.filename), err), debug=debug)
        raise typer.Exit(CONFIGURATION) from err
    except KeyboardInterrupt:
        ERR.print("stream-merge: interrupted; what was merged stays, the next run merges the rest")
        raise typer.Exit(INTERRUPTED) from None


def complain(
    error: Exception,
    sentence: str | None = None,
    *,
    about: str | None = None,
    debug: bool = False,
    spell: Callable[[str], str] = str,
) -> None:
    """Print an error, or a sentence in its place, about a subject; see `errors_as_sentences`."""
    problems = (sentence,) if sentence else error.problems if isinstance(error, ConfigError) else (str(error),)
    lines = [located(about, line) if about else line for line in map(spell, problems)]
    if ERR.quiet:
        tell(log.error, "command_failed", exc_info=error, reason="; ".join(lines))
        return
    for line in lines:
        ERR.print(f"stream-merge: {escape(line)}", highlight=False, soft_wrap=True)
    if debug:
        ERR.print("".join(traceback.format_exception(error)), highlight=False, markup=False, soft_wrap=True)


def _exit_code(error: Exception) -> int:
    has_problem = environment.said(error) is not None
    if not has_problem and (environment.away(error) is not None or is_of_cluster(error)):
        return AGAIN
    if has_problem and not isinstance(error, CommitStateUnknownError):
        return CONFIGURATION
    return next(code for kind, code in EXIT_CODES.items() if isinstance(error, kind))


class _ScreenHandler(logging.Handler):
    """Prints above the running table; where stderr is a file, to that."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a line."""
        console = OUT if OUT.is_terminal and ERR.is_terminal else ERR
        try:
            # A text, not markup=False, which would also apply to the table below.
            console.print(Text(self.format(record)), highlight=False, soft_wrap=True)
        except Exception:
            self.handleError(record)


def log_to_screen(level: int) -> None:
    """Show the sink's log from a level on, without failures, which are printed anyway."""
    handler = _ScreenHandler()
    handler.setLevel(level)
    handler.addFilter(lambda record: getattr(record, "event", None) != "micro_batch_failed")
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))
    logging.getLogger("stream_merge").handlers = [handler]
    OUT.quiet = ERR.quiet = False
    _silence_spark()


def log_as_json() -> None:
    """Write the log as lines of JSON to stderr, and no other output."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    logging.getLogger().handlers = [handler]
    package = logging.getLogger("stream_merge")
    package.handlers = []
    package.setLevel(logging.INFO)
    OUT.quiet = ERR.quiet = True
    _silence_spark()


def _silence_spark() -> None:
    for logger in error_loggers():
        logger.setLevel(logging.CRITICAL)
    logging.getLogger("py4j").setLevel(logging.CRITICAL)  # a stack trace for an interrupt
