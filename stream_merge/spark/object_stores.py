"""Object stores that delta-rs may reach as Spark does, and whether their commits exclude each other there."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import SparkSession

from stream_merge.model.locations import is_on_azure, is_on_s3
from stream_merge.spark import azure, log_store, s3


def storage_options(session: SparkSession, location: str) -> Mapping[str, str] | None:
    """What delta-rs needs to reach a place as Spark does; None where that is in no store whose settings are known.

    Cost: some twenty calls into the JVM.

    Raises:
        NotTranslatedError: delta-rs cannot be told.
    """
    on_s3 = s3.storage_options(session, location)
    return azure.storage_options(session, location) if on_s3 is None else on_s3


def may_lose_commits(session: SparkSession, location: str, *, beside_driver: bool) -> bool:
    """Whether a commit there may be overwritten by one of another process, so that it has to be looked at again.

    Args:
        session: Spark's.
        location: of a table.
        beside_driver: whether it writes there because somebody has promised that nobody else does.
    """
    if s3.keeps_one_process_apart_only(session, location):
        return True
    return beside_driver and is_on_azure(location) and not azure.excludes_driver(session, location)


def expect_condition(session: SparkSession, location: str) -> None:
    """As `log_store.expect_condition`, where commits of a table rely on it; elsewhere nothing is to be tried.

    Raises:
        Py4JJavaError: the store ignores the condition, or the trial failed.
        ConfigError: nothing can be tried.
    """
    if is_on_s3(location):
        log_store.expect_condition(session, location)


def excludes_driver(session: SparkSession, location: str, options: Mapping[str, str] | None) -> bool:
    """Whether Spark's commits there and those of delta-rs exclude each other, in whatever processes.

    Args:
        session: Spark's.
        location: of a table.
        options: of delta-rs.
    """
    return s3.excludes_driver(session, location, options) or azure.excludes_driver(session, location)
