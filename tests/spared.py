"""What tests are spared: Hadoop's processes for each file, lookups of classes, and CREATE TABLE of the same table.

None of them decides what is written or read.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from uuid import uuid4

from log_faults import JAVA_SOURCES, add_classes, class_path, compile_java
from py4j.java_gateway import JavaClass, JavaPackage, JVMView
from pyspark.sql import SparkSession
from pyspark.sql.types import StructField, StructType

from stream_merge.model.snapshot import TableSnapshot
from stream_merge.model.table_ref import TableRef
from stream_merge.tables import create_table, spark_table

_FIRST = f"{0:020}.json"
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


def spare_creations(folder: Path) -> None:
    """Create each kind of empty table once per process, and copy its log for every further one.

    A table is of the same kind if the arguments of `create_table.create` and the session's defaults of Delta are the
    same. Tables in catalogs, in object stores and in folders that exist are created by Spark, as ever.
    """
    create = create_table.create
    templates: dict[str, Path] = {}

    def created(session: SparkSession, target: str, fields: Sequence[StructField], **how: Any) -> TableSnapshot:
        table = Path(TableRef(target).plain)
        if not (TableRef(target).path is not None) or not table.is_absolute() or table.exists():
            return create(session, target, fields, **how)
        defaults = {name: value for name, value in session.conf.getAll.items() if "delta" in name}
        kind = json.dumps([StructType(list(fields)).jsonValue(), how, defaults], sort_keys=True, default=dict)
        template = templates.get(kind)
        if template is not None and _copied(template, table):
            found = spark_table.find(session, target)
            assert found is not None
            return found
        found = create(session, target, fields, **how)
        if found.version == 0:
            templates[kind] = folder / str(len(templates))
            shutil.copytree(table, templates[kind])
        return found

    create_table.create = created


def _copied(template: Path, table: Path) -> bool:
    """Whether the copy appeared, at once and whole; not where somebody else has created the table meanwhile."""
    table.parent.mkdir(parents=True, exist_ok=True)
    place = Path(mkdtemp(prefix=".creation-", dir=table.parent))
    (place / "_delta_log").mkdir()
    commit = (template / "_delta_log" / _FIRST).read_text()
    # Another table has another id; Delta's checksums are of the first one.
    (place / "_delta_log" / _FIRST).write_text(re.sub(r'(?<="metaData":{"id":")[^"]+', str(uuid4()), commit))
    place.chmod(0o755)
    try:
        os.rename(place, table)
    except OSError:
        shutil.rmtree(place)
        return False
    return True
