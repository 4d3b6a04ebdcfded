"""Files on the file systems of Hadoop: local disks, object stores, HDFS."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from stream_merge.model.locations import is_on_s3
from stream_merge.spark.errors import java_causes
from stream_merge.spark.jvm import java_class

GLOB = re.compile(r"[\\\[\]{}*?]")
"""What makes a path a pattern."""


def qualified_path(session: SparkSession, path: str) -> str:
    """A path with its scheme: one spelling per location."""
    hadoop_path, files = _located(session, path)
    return str(files.makeQualified(hadoop_path).toString())


def read_text(session: SparkSession, path: str) -> str | None:
    """The text of a small file; None where there is none."""
    hadoop_path, files = _located(session, path)
    try:
        stream = files.open(hadoop_path)
    except Py4JJavaError as err:  # `exists` would be one request more on an object store
        if java_causes(err)[0][0] != "java.io.FileNotFoundException":
            raise
        return None
    try:
        return bytes(stream.readAllBytes()).decode("utf-8")
    finally:
        stream.close()


def write_text(session: SparkSession, path: str, text: str) -> None:
    """Write a small file, folders included; it is there whole or not at all."""
    hadoop_path, files = _located(session, path)
    is_put = is_on_s3(path)  # where an object shows when it is whole, and a rename is a copy and a delete
    unfinished = hadoop_path
    if not is_put:
        unfinished = java_class(session, "org.apache.hadoop.fs.Path")(
            hadoop_path.getParent(), f".{hadoop_path.getName()}.{uuid4().hex}"
        )
    stream = files.create(unfinished, True)
    try:
        stream.write(bytearray(text.encode("utf-8")))
    except BaseException:
        (stream.abort if is_put else stream.close)()  # closing would make an object of what is there
        raise
    stream.close()
    if not is_put and not files.rename(unfinished, hadoop_path):  # something is there
        files.delete(hadoop_path, False)
        files.rename(unfinished, hadoop_path)


def make_folder(session: SparkSession, path: str) -> None:
    """Create a folder and its parents, where a file system has folders."""
    hadoop_path, files = _located(session, path)
    files.mkdirs(hadoop_path)


def list_names(session: SparkSession, path: str) -> list[str]:
    """The names in a folder; none where there is no folder."""
    hadoop_path, files = _located(session, path)
    if not files.exists(hadoop_path):
        return []
    return [str(entry.getPath().getName()) for entry in files.listStatus(hadoop_path)]


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """Size and time of a file, by which two writings of it differ."""

    bytes: int
    modified_millis: int
    """Milliseconds since 1970."""


def states_below(session: SparkSession, path: str) -> dict[str, State]:
    """All files in a folder, at any depth, or the single file, by their paths with scheme; none where nothing is."""
    hadoop_path, files = _located(session, path)
    states: dict[str, State] = {}
    try:
        listed = files.listFiles(hadoop_path, True)  # a request for a thousand of them on S3
        while listed.hasNext():
            status = listed.next()
            states[str(status.getPath().toString())] = _state(status)
    except Py4JJavaError as err:
        if java_causes(err)[0][0] != "java.io.FileNotFoundException":
            raise
        return {}
    return states


def state(session: SparkSession, path: str) -> State | None:
    """State of a file; None where there is none."""
    hadoop_path, files = _located(session, path)
    return _state(files.getFileStatus(hadoop_path)) if files.exists(hadoop_path) else None


def _state(status: Any) -> State:
    return State(bytes=int(status.getLen()), modified_millis=int(status.getModificationTime()))


def path_is_occupied(session: SparkSession, path: str) -> bool:
    """Whether a path has anything but an empty folder or a Delta table that is being created."""
    hadoop_path, files = _located(session, path)
    if not files.exists(hadoop_path):
        return False
    if not files.getFileStatus(hadoop_path).isDirectory():
        return True
    inside = [str(entry.getPath().getName()) for entry in files.listStatus(hadoop_path)]
    return bool(inside) and "_delta_log" not in inside


def remove_begun(session: SparkSession, path: str) -> bool:
    """Delete a folder that has nothing but empty folders and files of unfinished writes; whether that was done.

    Those begin with a dot, as files that Hadoop renames when they are complete (3.5, `FileContext` and checksums).
    """
    hadoop_path, files = _located(session, path)
    try:
        if files.getScheme() == "file":
            files = files.getRawFileSystem()  # the other one hides checksums
        entries = list(files.listStatus(hadoop_path))
        if any(not entry.isDirectory() and not entry.getPath().getName().startswith(".") for entry in entries):
            return False
        for entry in entries:
            files.delete(entry.getPath(), False)
        return bool(files.delete(hadoop_path, False))
    except Py4JJavaError:
        return False


def matching_paths(session: SparkSession, path: str) -> str:
    """A regular expression for the full paths that a path or glob means to Spark, as `scheme:/...`."""
    return str(
        java_class(session, "org.apache.hadoop.fs.GlobPattern")(qualified_path(session, path).rstrip("/"))
        .compiled()
        .pattern()
    )


def exactly(path: str) -> str:
    """The glob for this path alone."""
    return GLOB.sub(r"\\\g<0>", path)


def file_system(session: SparkSession, path: str) -> Any:
    """Hadoop's file system of a path."""
    return _located(session, path)[1]


def _located(session: SparkSession, path: str) -> tuple[Any, Any]:
    """Hadoop's path, and its file system."""
    hadoop_path = java_class(session, "org.apache.hadoop.fs.Path")(path)
    return hadoop_path, hadoop_path.getFileSystem(session._jsparkSession.sessionState().newHadoopConf())


def parquet_columns(session: SparkSession, path: str) -> dict[str, str]:
    """Dotted name -> type in a Parquet footer, such as `int64 (TIMESTAMP(NANOS,true))`; Spark has no type for some."""
    conf = session._jsparkSession.sessionState().newHadoopConf()
    hadoop_path = java_class(session, "org.apache.hadoop.fs.Path")(path)
    file = java_class(session, "org.apache.parquet.hadoop.util.HadoopInputFile").fromPath(hadoop_path, conf)
    reader = java_class(session, "org.apache.parquet.hadoop.ParquetFileReader").open(file)
    try:
        schema = reader.getFileMetaData().getSchema()
        return {".".join(names): _parquet_type(str(schema.getType(names)), names[-1]) for names in schema.getPaths()}
    finally:
        reader.close()


def _parquet_type(written: str, name: str) -> str:
    """The type alone: `optional int64 at (TIMESTAMP(NANOS,true))` has the column's name in it."""
    return re.sub(rf"^\w+ (\S+) {re.escape(name)}(?= |$)", r"\1", written)


class NotTranslatedError(ValueError):
    """Spark reaches the store in a way that delta-rs has no equivalent of; the sentence names it."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class HadoopSettings:
    """Settings by full names, each a call or two into the JVM. Never shown."""

    setting: Callable[[str], str | None]
    secret: Callable[[str], str | None]
    """The same value, also from Hadoop's credential stores."""


def hadoop_settings(session: SparkSession) -> HadoopSettings:
    """The session's settings of Hadoop."""
    conf = session._jsparkSession.sessionState().newHadoopConf()
    text = java_class(session, "java.lang.String")

    def secret(name: str) -> str | None:
        password = conf.getPassword(name)
        return None if password is None else str(text.copyValueOf(password))

    return HadoopSettings(setting=conf.get, secret=secret)
