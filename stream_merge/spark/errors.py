"""The cause of an error of Spark, in a sentence; and PySpark's own logging of it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from py4j.protocol import Py4JJavaError

from stream_merge.spark import environment
from stream_merge.spark.versions import captured, error_loggers

_LONGEST_CAUSE_CHAIN = 20
_CANCELLED = re.compile(r"\[SPARK_JOB_CANCELLED\]|Job \d+ cancelled\b")
"""A cancelled job in Spark 4.0 and newer, and in Spark 3.5."""

_PART_LOST = re.compile(
    r"ExecutorLostFailure|FetchFailed\(|SparkContext (?:was|has been) (?:shut down|stopped|shutdown)"
    r"|stopped SparkContext|Python worker exited unexpectedly"
)
"""Lost executors, workers and contexts in Spark 4.2 (DAGScheduler, SparkContext, PythonRunner)."""
_REPORTERS = ("org.apache.spark.", "java.lang.IllegalStateException")


def java_causes(error: BaseException) -> list[tuple[str, str]]:
    """(class name, message) of the Java exception behind a Python one and of its causes, outermost first."""
    java = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    chain: list[tuple[str, str]] = []
    while java is not None and len(chain) < _LONGEST_CAUSE_CHAIN:
        chain.append((str(java.getClass().getName()), str(java.getMessage() or "")))
        java = java.getCause()
    return chain


def with_causes(error: BaseException) -> Iterator[BaseException]:
    """An error and its causes, in Python and as PySpark stores those of the JVM."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or captured(cause, "cause")


def is_of_cluster(error: BaseException) -> bool:
    """Whether Spark itself ended, or lost a part of itself for good: the merge is not to blame."""
    return any(
        name.startswith(_REPORTERS) and _PART_LOST.search(message)
        for one in with_causes(error)
        for name, message in java_causes(one)
    )


def root_cause(error: BaseException) -> str:
    """Class and message of the innermost cause, on one line; a cause in the JVM may have no message."""
    class_name, message = (java_causes(error) or [(type(error).__name__, str(error))])[-1]
    return environment.first_line(f"{class_name}: {message}" if message else class_name)


def reason(error: BaseException) -> str:
    """What went wrong, in one line; the first line of a `Py4JJavaError` only names the call that failed."""
    from_outside = environment.said(error) or environment.away(error)
    if from_outside is not None:
        return from_outside
    if isinstance(error, Py4JJavaError):
        for class_name, message in java_causes(error):
            return environment.first_line(f"{class_name.rsplit('.', 1)[-1]}: {message}")
    return environment.first_line(str(error).strip()) or type(error).__name__


def exceeds_driver_results(error: BaseException) -> bool:
    """Whether a result is larger than `spark.driver.maxResultSize`."""
    messages = [str(error), *(message for _, message in java_causes(error))]
    return any("spark.driver.maxResultSize" in message for message in messages)


def was_cancelled(error: BaseException) -> bool:
    """Whether the job behind an error was cancelled, or its thread interrupted."""
    causes = [java for one in with_causes(error) for java in java_causes(one)]
    return any("Interrupted" in class_name or _CANCELLED.match(message) for class_name, message in causes)


_errors_are_ours: ContextVar[bool] = ContextVar("stream_merge_errors_are_ours", default=False)


@contextmanager
def spark_errors_unlogged() -> Iterator[None]:
    """Keep PySpark from logging Spark's errors in this thread: they become sentences, or are handled."""
    for logger in error_loggers():
        logger.addFilter(_not_ours)  # which adds the same one once
    token = _errors_are_ours.set(True)
    try:
        yield
    finally:
        _errors_are_ours.reset(token)


def _not_ours(_record: logging.LogRecord) -> bool:
    return not _errors_are_ours.get()
