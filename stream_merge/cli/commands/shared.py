"""What all commands share: the screen, errors as sentences and exit codes, Spark and /metrics for their time."""

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
from stream_merge.spark.defaults import in_effect
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
"""As wide as the terminal; elsewhere as wide as a table may need."""
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
    """Column names with commas between; a name that holds a comma is put in double quotes."""
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
    """Spark confs from `KEY=VALUE`, and those for the jars of a folder and for the stores that these places are in.

    Under spark-submit the user's alone: it has brought all jars.
    """
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
    """Something that starts a quiet local Spark; what it writes beside the tables goes with the command.

    Under spark-submit it gives the session of the application there.
    """
    if is_submitted():
        yield lambda: submitted_session(more)
        return
    with tempfile.TemporaryDirectory(prefix="stream-merge-", ignore_cleanup_errors=True) as scratch:
        quiet = {"spark.log.level": "OFF"}  # Spark would write a stack trace for each error that is one sentence here
        if in_effect("spark.sql.catalogImplementation", more) != "hive":  # whose tables lie there
            quiet["spark.sql.warehouse.dir"] = scratch  # Spark would make it in the working folder

        def start() -> SparkSession:
            with end_on_sigterm():
                return local_session(app_name, confs={**quiet, **more})

        yield start


def is_default(context: typer.Context, option: str) -> bool:
    """Whether nobody has given an option."""
    source = context.get_parameter_source(option)
    return source is not None and source.name == "DEFAULT"


@contextmanager
def metrics_server(
    port: int, host: str = "127.0.0.1", access: Access | None = None, *, is_wish: bool
) -> Iterator[MetricsServer]:
    """`/metrics` and probes for as long as a command runs; the default port is a wish, a given one is an order."""
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
    """Turn every error that a person can act on into one sentence and an exit code.

    Args:
        debug: show all of it behind the sentence.
        spell: names options or settings where a sentence of the sink names Python arguments.
    """
    try:
        yield
    except tuple(EXIT_CODES) as err:
        complain(err, debug=debug, spell=spell)
        raise typer.Exit(_exit_code(err)) from err
    except (PySparkException, Py4JError) as err:
        from_outside = environment.said(err)
        complain(err, from_outside or f"Spark failed: {innermost_message(str(err))}", debug=debug)
        raise typer.Exit(FAILED if from_outside is None else CONFIGURATION) from err
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
    """Print what went wrong.

    Args:
        error: what was raised.
        sentence: what it means; None: what it says.
        about: what it concerns; shown behind the code.
        debug: show all of it, with where it was raised and what Spark said.
        spell: names options or settings where a sentence of the sink names Python arguments.
    """
    said = (sentence,) if sentence else error.problems if isinstance(error, ConfigError) else (str(error),)
    lines = [located(about, line) if about else line for line in map(spell, said)]
    if ERR.quiet:
        tell(log.error, "command_failed", exc_info=error, reason="; ".join(lines))
        return
    for line in lines:
        ERR.print(f"stream-merge: {escape(line)}", highlight=False, soft_wrap=True)
    if debug:
        ERR.print("".join(traceback.format_exception(error)), highlight=False, markup=False, soft_wrap=True)


def _exit_code(error: Exception) -> int:
    is_said = environment.said(error) is not None
    if not is_said and (environment.away(error) is not None or is_of_cluster(error)):
        return AGAIN
    if is_said and not isinstance(error, CommitStateUnknownError):
        return CONFIGURATION
    return next(code for kind, code in EXIT_CODES.items() if isinstance(error, kind))


class _ScreenHandler(logging.Handler):
    """Prints through the console that draws the running table, above it; where stderr is a file, to that."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a line."""
        console = OUT if OUT.is_terminal and ERR.is_terminal else ERR
        try:
            # A text, not markup=False: that would hold for the table below, too, which is drawn in the same breath.
            console.print(Text(self.format(record)), highlight=False, soft_wrap=True)
        except Exception:
            self.handleError(record)


def log_to_screen(level: int) -> None:
    """Show what the sink logs from a level on, except what ends in a sentence anyway."""
    handler = _ScreenHandler()
    handler.setLevel(level)
    handler.addFilter(lambda record: getattr(record, "event", None) != "micro_batch_failed")
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))
    logging.getLogger("stream_merge").handlers = [handler]
    OUT.quiet = ERR.quiet = False
    _silence_spark()


def log_as_json() -> None:
    """Write the log as lines of JSON to stderr, and nothing else to either stream."""
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
