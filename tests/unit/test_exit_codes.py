"""Who has to do something after an error, where only Spark knows what it was."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from stream_merge import ConfigError, MergeFailedError
from stream_merge.errors import HeldError
from stream_merge.jobs.kafka.exit_codes import Verdict, verdict, worst

JOB = "Job aborted due to stage failure: Task 0 in stage 7.0 failed 4 times, most recent failure: Lost task 0.3 in"
SPARK = "org.apache.spark.SparkException"


@dataclass
class JavaError(Exception):
    """An error as Py4J hands it over."""

    name: str
    said: str

    @property
    def java_exception(self) -> JavaError:
        return self

    def getClass(self) -> JavaError:  # noqa: N802
        return self

    def getName(self) -> str:  # noqa: N802
        return self.name

    def getMessage(self) -> str:  # noqa: N802
        return self.said

    def getCause(self) -> None:  # noqa: N802
        return None


def failed(name: str, said: str) -> MergeFailedError:
    """A merge, for this reason of Spark's."""
    error = MergeFailedError("merging batch 3 failed")
    error.__cause__ = JavaError(name, said)
    return error


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (SPARK, f"{JOB} (10.0.0.7 executor 1): ExecutorLostFailure (executor 1 exited unrelated to the running tasks)"),
        (SPARK, "Job 12 cancelled because SparkContext was shut down"),
        (SPARK, f"{JOB} (10.0.0.7 executor 2): FetchFailed(BlockManagerId(1, 10.0.0.8), shuffleId=3, mapIndex=0"),
        (SPARK, "Python worker exited unexpectedly (crashed)"),
        ("java.lang.IllegalStateException", "Cannot call methods on a stopped SparkContext."),
        ("java.lang.IllegalStateException", "SparkContext has been shutdown"),
    ],
)
def test_a_merge_that_spark_did_not_live_to_end_is_tried_again(name: str, said: str) -> None:
    assert verdict(failed(name, said)) is Verdict.AGAIN


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (SPARK, f"{JOB} stage 7.0 (TID 9): org.apache.spark.SparkArithmeticException: [DIVIDE_BY_ZERO]"),
        ("io.delta.exceptions.DeltaInvariantViolationException", "note : 'SparkContext was shut down'"),
    ],
)
def test_what_the_data_did_is_for_a_person(name: str, said: str) -> None:
    """Whatever stands in it."""
    assert verdict(failed(name, said)) is Verdict.DATA


def test_who_meets_another_process_comes_again_when_that_has_ended() -> None:
    held = HeldError("process 7 (query 'orders') is writing to 'x'")

    assert verdict(held) is Verdict.AGAIN
    assert worst([held, ConfigError("x")]) is Verdict.CONFIGURATION
