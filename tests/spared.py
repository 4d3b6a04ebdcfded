"""What the session of the tests is spared: Hadoop's processes for each file, and questions about classes asked twice.

Neither decides what is written or read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from log_faults import JAVA_SOURCES, add_classes, class_path, compile_java
from py4j.java_gateway import JavaClass, JavaPackage, JVMView
from pyspark.sql import SparkSession

LOCAL_FILES = "streammerge.tests.LocalFiles"


def spare_processes(spark: SparkSession, folder: Path) -> None:
    """Let Hadoop ask the JVM about local files; where there is no Java compiler it goes on asking processes."""
    if not compile_java(folder, class_path(spark), JAVA_SOURCES, "LocalFiles.java"):
        return
    add_classes(spark, folder)
    context: Any = spark.sparkContext
    hadoop = context._jsc.hadoopConfiguration()
    hadoop.set("fs.file.impl", f"{LOCAL_FILES}$WithChecksums")
    hadoop.set("fs.AbstractFileSystem.file.impl", f"{LOCAL_FILES}$ForContexts")
    context._jvm.org.apache.hadoop.fs.FileSystem.closeAll()  # those that are open would be kept


def spare_lookups() -> None:
    """Remember for each gateway which Java class or package a name is: each question costs up to 3 ms.

    Py4J asks class loaders that search 300 jars for what they do not have. What is not there, Py4J takes for a package:
    such a name is asked for again when it is spelled like a class.
    """
    for kind in (JVMView, JavaPackage):
        kind.__getattr__ = _remembering(kind.__getattr__)


def _remembering(ask: Any) -> Any:
    def ask_once(self: Any, name: str) -> Any:
        found = ask(self, name)
        if isinstance(found, JavaClass) or (isinstance(found, JavaPackage) and name.islower()):
            vars(self)[name] = found
        return found

    return ask_once
