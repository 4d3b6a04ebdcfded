"""Commits that fail, wait or lose their answer on a real Delta table: a log store for the scheme `faulty:`."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark import InheritableThread
from pyspark.sql import SparkSession

JAVA_SOURCES = Path(__file__).parent / "java"
PATIENCE_SECONDS = 90


class LogFaults:
    """Arms one fault for one commit; conflicts and lost answers then happen where a test wants them."""

    def __init__(self, spark: SparkSession, classes: Path) -> None:
        self._store = _load(spark, classes)

    def refuse_commit(self, where: str, *, after: int = 0) -> None:
        """The next commit to a path that contains `where` fails before anything is written."""
        self._store.arm("refuse", where, after)

    def lose_answer(self, where: str, *, after: int = 0) -> None:
        """The next commit is written, and the writer gets an error."""
        self._store.arm("lose answer", where, after)

    def put_twice(self, where: str) -> None:
        """The next commit is written, its answer lost, and the store's client puts it again: it exists already."""
        self._store.arm("put twice", where, 0)

    def lose_answer_and_table(self, where: str) -> None:
        """The next commit is written, the writer gets an error, and the log cannot be read until `disarm`."""
        self._store.arm("lose answer, then unreadable", where, 0)

    def disarm(self) -> None:
        """No fault, and everything readable."""
        self._store.arm("", "", 0)

    @property
    def is_armed(self) -> bool:
        """Whether the fault has still to happen."""
        return bool(self._store.isArmed())

    def overtake(
        self, where: str, call: Callable[[], object], meanwhile: Callable[[], object], *, after: int = 0
    ) -> None:
        """Run `call`; when it is about to commit to `where`, run `meanwhile` to its end, then let it commit.

        The call has read its snapshot by then, so `meanwhile` lands exactly between snapshot and commit.
        """
        self._store.arm("wait", where, after)
        with _running(call) as thread:
            try:
                arrived = self._store.awaitArrival(PATIENCE_SECONDS)
                if arrived:
                    meanwhile()
            finally:
                self._store.release()
            thread.join(PATIENCE_SECONDS)
        assert arrived, f"no commit to {where!r} was attempted"


@contextmanager
def _running(call: Callable[[], object]) -> Iterator[threading.Thread]:
    """A call on a thread of its own; what it raises is raised at the end of the block."""
    raised: list[BaseException] = []

    def guarded() -> None:
        try:
            call()
        except BaseException as err:
            raised.append(err)

    thread = InheritableThread(target=guarded)
    thread.start()
    yield thread
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive(), "the call did not end"
    if raised:
        raise raised[0]


def compile_log_store(folder: Path, jars: list[str]) -> Path:
    """Compile the log store and its file system; skips the test where there is no compiler."""
    if not compile_java(folder, jars, JAVA_SOURCES, "Faulty*.java"):
        pytest.skip("no javac on the PATH: faults in a Delta log need a JDK, not only a Java runtime")
    return folder


def compile_java(folder: Path, jars: list[str], sources: Path, pattern: str, *options: str) -> bool:
    """Compile Java sources of a folder; False where there is no compiler."""
    javac = shutil.which("javac")
    if javac is None:
        return False
    files = [str(path) for path in sorted(sources.glob(pattern))]
    command = [javac, "-proc:none", "-nowarn", *options, "-d", str(folder), "-cp", ":".join(jars)]
    subprocess.run([*command, *files], check=True)
    return True


def class_path(spark: SparkSession) -> list[str]:
    """Where the JVM found Delta's and Hadoop's classes."""
    jvm: Any = spark.sparkContext._jvm
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    wanted = ("io.delta.storage.LocalLogStore", "org.apache.hadoop.fs.RawLocalFileSystem")
    return [loader.loadClass(name).getProtectionDomain().getCodeSource().getLocation().getPath() for name in wanted]


def added_jars(spark: SparkSession) -> list[str]:
    """Jars that Spark has been given beside its own; of those that it resolved, `spark.jars` may know nothing."""
    return [url.getPath() for url in _loader(spark).getURLs()]


def add_classes(spark: SparkSession, classes: Path) -> None:
    """Give compiled classes to the JVM that runs already."""
    _loader(spark).addURL(spark._jvm.java.io.File(str(classes)).toURI().toURL())


def _loader(spark: SparkSession) -> Any:
    jvm: Any = spark.sparkContext._jvm
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    while "MutableURLClassLoader" not in loader.getClass().getName():
        loader = loader.getParent()
    return loader


def _load(spark: SparkSession, classes: Path) -> Any:
    """Give the classes to the JVM that runs already, and the scheme to Hadoop and Delta."""
    context: Any = spark.sparkContext
    jvm = context._jvm
    add_classes(spark, classes)
    context._jsc.hadoopConfiguration().set("fs.faulty.impl", "streammerge.tests.FaultyFileSystem")
    # Delta reads this from the context's conf, which Spark hides from Scala callers only.
    context._jsc.sc().conf().set("spark.delta.logStore.faulty.impl", "streammerge.tests.FaultyLogStore")
    return jvm.streammerge.tests.FaultyLogStore
