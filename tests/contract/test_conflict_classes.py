"""Delta's conflicts are recognised as the JVM raises them."""

from __future__ import annotations

from typing import Any

import delta.exceptions
import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import IllegalArgumentException
from pyspark.errors.exceptions.captured import convert_exception
from pyspark.sql import SparkSession

from stream_merge.tables import backoff
from stream_merge.tables.backoff import conflict, conflict_class

UMBRELLA = "DeltaConcurrentModificationException"  # abstract in Java
CLASSES = [
    name
    for name, found in vars(delta.exceptions).items()
    if isinstance(found, type) and found.__module__.startswith("delta.")
]
"""Of Delta's package, which lists them in `__all__` from 4.0 on."""


def test_every_conflict_code_of_this_delta_release_is_known(spark: SparkSession):
    """Delta's own list of error codes, read from its jar."""
    jvm: Any = spark.sparkContext._jvm
    stream = (
        jvm.java.lang.Thread.currentThread()
        .getContextClassLoader()
        .getResourceAsStream("error/delta-error-classes.json")
    )
    codes = jvm.java.lang.String(stream.readAllBytes(), "UTF-8")
    delta_codes = {line.split('"')[1] for line in str(codes).splitlines() if line.startswith('  "DELTA_')}
    about_concurrency = {
        code for code in delta_codes if code.startswith("DELTA_CONCURRENT_") or code.endswith(("METADATA_CHANGED",))
    }

    assert about_concurrency - set(backoff._BY_CODE) == set()
    assert set(backoff._BY_CODE) - delta_codes == set()


def java(spark: SparkSession) -> Any:
    return spark.sparkContext._jvm


def delta_conflict(spark: SparkSession, name: str = "ConcurrentAppendException") -> Any:
    """A Java exception of Delta, made in the JVM."""
    return getattr(java(spark).io.delta.exceptions, name)("somebody was faster")


def thrown(spark: SparkSession, throwable: Any) -> Exception:
    """What Python gets when this exception is the cause of a failed call into the JVM."""
    future = java(spark).java.util.concurrent.CompletableFuture()
    future.completeExceptionally(throwable)
    with pytest.raises(Py4JJavaError) as caught:
        future.get()
    return caught.value


@pytest.mark.parametrize("name", [name for name in CLASSES if name != UMBRELLA])
def test_a_conflict_wrapped_in_java_is_recognised(spark, name):
    """Spark wraps what happens in a command or in another thread; such a cause reaches Python untyped."""
    runtime = java(spark).java.lang.RuntimeException("Job aborted", delta_conflict(spark, name))
    execution = java(spark).java.util.concurrent.ExecutionException("in a thread", runtime)
    spark_error = java(spark).org.apache.spark.SparkException("Task failed", execution)

    assert conflict_class(thrown(spark, spark_error)) == name


def test_a_conflict_inside_an_error_that_pyspark_translates_is_recognised(spark):
    """PySpark gives such errors a class of its own and keeps the Java exception aside."""
    illegal = java(spark).java.lang.IllegalArgumentException("not now", delta_conflict(spark))

    translated = convert_exception(illegal)

    assert isinstance(translated, IllegalArgumentException)
    assert conflict_class(translated) == "ConcurrentAppendException"


def test_an_error_without_conflict_is_none(spark):
    io = java(spark).java.io.IOException("disk full")
    wrapped = java(spark).java.lang.RuntimeException("Job aborted", io)

    assert conflict_class(thrown(spark, wrapped)) is None
    assert conflict_class(ValueError("broken")) is None
    assert conflict(ValueError("broken"), target="shop.orders", batch_id=3) is None
