"""What stands behind an error of Spark, in a sentence; and that PySpark does not say it before."""

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
"""What Spark 4.0 and newer say of a job that somebody cancelled, and what Spark 3.5 says."""

_PART_LOST = re.compile(
    r"ExecutorLostFailure|FetchFailed\(|SparkContext (?:was|has been) (?:shut down|stopped|shutdown)"
    r"|stopped SparkContext|Python worker exited unexpectedly"
)
"""What Spark 4.2 says of executors, helpers and contexts that are gone (DAGScheduler, SparkContext, PythonRunner)."""
_SAY_SO = ("org.apache.spark.", "java.lang.IllegalStateException")


def java_causes(error: BaseException) -> list[tuple[str, str]]:
    """(class name, message) of the Java exception behind a Python one and of its causes, outermost first."""
    java = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    chain: list[tuple[str, str]] = []
    while java is not None and len(chain) < _LONGEST_CAUSE_CHAIN:
        chain.append((str(java.getClass().getName()), str(java.getMessage() or "")))
        java = java.getCause()
    return chain


def with_causes(error: BaseException) -> Iterator[BaseException]:
    """An error and those that have caused it, in Python and as PySpark holds those of the JVM."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or captured(found, "cause")


def is_of_cluster(error: BaseException) -> bool:
    """Whether Spark itself came to an end, or lost a part of itself for good: a merge is not to blame for that."""
    return any(
        name.startswith(_SAY_SO) and _PART_LOST.search(said)
        for one in with_causes(error)
        for name, said in java_causes(one)
    )


def root_cause(error: BaseException) -> str:
    """What the innermost cause of an error is called and says, on one line; a cause in the JVM may say nothing."""
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
    """Whether Spark stopped a query because its answer is larger than `spark.driver.maxResultSize`."""
    messages = [str(error), *(message for _, message in java_causes(error))]
    return any("spark.driver.maxResultSize" in message for message in messages)


def was_cancelled(error: BaseException) -> bool:
    """Whether somebody cancelled the job behind an error, or interrupted its thread: then nothing is wrong with it."""
    found: BaseException | None = error
    while found is not None:
        for class_name, message in java_causes(found):
            if "Interrupted" in class_name or _CANCELLED.match(message):
                return True
        found = found.__cause__
    return False


_errors_are_ours: ContextVar[bool] = ContextVar("stream_merge_errors_are_ours", default=False)


@contextmanager
def spark_errors_unlogged() -> Iterator[None]:
    """Keep PySpark from logging Spark's errors in this thread for a while: they become sentences, or are handled."""
    for logger in error_loggers():
        logger.addFilter(_not_ours)  # which adds the same one once
    token = _errors_are_ours.set(True)
    try:
        yield
    finally:
        _errors_are_ours.reset(token)


def _not_ours(_record: logging.LogRecord) -> bool:
    return not _errors_are_ours.get()
