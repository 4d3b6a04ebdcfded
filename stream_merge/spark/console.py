"""What Delta's JVM prints for people at a shell, kept from the output of whoever runs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession

from stream_merge.spark.jvm import java_class


@contextmanager
def silent(session: SparkSession) -> Iterator[None]:
    """Drop what the block's own thread prints: VACUUM tells how much it deleted (`DatabricksLogging.logConsole`, 4.4).

    `setOutDirect` is `private[scala]`, which the JVM does not enforce; it concerns the calling thread alone.
    """
    module = "MODULE$"
    console = getattr(java_class(session, "scala.Console$"), module)
    before = console.out()
    nowhere = java_class(session, "java.io.OutputStream").nullOutputStream()
    console.setOutDirect(java_class(session, "java.io.PrintStream")(nowhere))
    try:
        yield
    finally:
        console.setOutDirect(before)
