"""Object stores that delta-rs may reach as Spark does, and whether their commits exclude each other there."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import SparkSession

from stream_merge.spark import azure, s3


def storage_options(session: SparkSession, location: str) -> Mapping[str, str] | None:
    """What delta-rs needs to reach a place as Spark does; None where that is in no store whose settings are known.

    Cost: some twenty calls into the JVM.

    Raises:
        NotTranslatedError: delta-rs cannot be told.
    """
    on_s3 = s3.storage_options(session, location)
    return azure.storage_options(session, location) if on_s3 is None else on_s3


def excludes_delta_rs(session: SparkSession, location: str, options: Mapping[str, str] | None) -> bool:
    """Whether Spark's commits there and those of delta-rs exclude each other, in whatever processes.

    Args:
        session: Spark's.
        location: of a table.
        options: of delta-rs.
    """
    return s3.excludes_delta_rs(session, location, options) or azure.excludes_delta_rs(session, location)
