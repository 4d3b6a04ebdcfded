"""Jars that Spark downloads beside its own, by Maven coordinates, and whether it has them."""

from __future__ import annotations

import glob
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

import pyspark

from stream_merge.model.locations import is_on_azure, is_on_s3
from stream_merge.spark.confs import EXCLUDES, JARS, PACKAGES, in_effect, listed, spark_home
from stream_merge.spark.log_store import log_store_confs, log_store_packages
from stream_merge.spark.versions import AWS_PARTS, AWS_WHOLE, HADOOP, SCALA

_CLASS_PATH = "spark.driver.extraClassPath"
_KAFKA_CONNECTOR = "spark-sql-kafka-0-10"
AVRO = "spark-avro"
_S3_CONNECTOR = "hadoop-aws"
_AZURE_CONNECTOR = "hadoop-azure"


def s3_confs(own: Mapping[str, str]) -> dict[str, str]:
    """A session's confs, and those that have Spark download its file system for S3 (`s3a:`), with the log store for it.

    Of Amazon's SDK only the parts in use, a few MB; hadoop-aws depends on all of it, 600 MB.
    """
    own = log_store_packages(own)
    named = _with(packages(own), s3_coordinates())
    left_out = dict.fromkeys([*listed(EXCLUDES, own), AWS_WHOLE])
    return {**own, PACKAGES: ",".join(named), EXCLUDES: ",".join(left_out)}


def azure_confs(own: Mapping[str, str]) -> dict[str, str]:
    """A session's confs, and those that have Spark download its file system for Azure (`abfs:`, `abfss:`)."""
    return {**own, PACKAGES: ",".join(_with(packages(own), [azure_coordinates()]))}


def azure_coordinates() -> str:
    """Maven coordinates of Spark's file system for Azure, for this PySpark."""
    return f"org.apache.hadoop:{_AZURE_CONNECTOR}:{HADOOP}"


def _with(named: list[str], wanted: Iterable[str]) -> list[str]:
    """Packages, and those wanted of which no version is named."""
    modules = {package.rsplit(":", 1)[0] for package in named}
    return [*named, *(package for package in wanted if package.rsplit(":", 1)[0] not in modules)]


def s3_coordinates() -> list[str]:
    """Maven coordinates of Spark's file system for S3, and of its parts of Amazon's SDK, for this PySpark."""
    return [f"org.apache.hadoop:{_S3_CONNECTOR}:{HADOOP}", *AWS_PARTS]


def packages(confs: Mapping[str, str]) -> list[str]:
    """Maven coordinates of what Spark downloads for a session with these confs.

    Whoever adds to the list has to start with these: once a session names a list, Spark ignores the one in the file.
    """
    return listed(PACKAGES, confs)


def kafka_coordinates() -> str:
    """Maven coordinates of the Kafka connector and of Spark's Avro for the installed PySpark."""
    return ",".join(f"org.apache.spark:{name}_{SCALA}:{pyspark.__version__}" for name in (_KAFKA_CONNECTOR, AVRO))


def has_kafka_connector(confs: Mapping[str, str]) -> bool:
    """Whether Spark's jars, a session's confs or `spark-defaults.conf` have the Kafka connector."""
    return _has(_KAFKA_CONNECTOR, confs)


def for_places(own: Mapping[str, str], locations: Iterable[str]) -> dict[str, str]:
    """A session's confs, and those for the file systems of these locations, unless Spark has them.

    Where one is on S3, also those of the log store.
    """
    locations, confs = list(locations), dict(own)
    if any(map(is_on_s3, locations)):
        confs = log_store_confs(confs) if _has(_S3_CONNECTOR, confs) else s3_confs(confs)
    if any(map(is_on_azure, locations)) and not _has(_AZURE_CONNECTOR, confs):
        confs = azure_confs(confs)
    return confs


def _has(connector: str, confs: Mapping[str, str]) -> bool:
    submit_args = [arg.rpartition("=")[2] for arg in shlex.split(os.environ.get("PYSPARK_SUBMIT_ARGS", ""))]
    named = [*packages(confs), *submit_args]
    named += [entry for text in [in_effect(JARS, confs), *submit_args] for entry in text.split(",")]
    named += [entry for text in [in_effect(_CLASS_PATH, confs), *submit_args] for entry in text.split(os.pathsep)]
    named.append(f"{spark_jars_folder()}/*")
    return any(connector in name for entry in named for name in _files(entry.strip()))


def _files(entry: str) -> list[str]:
    """The local files of a pattern in `spark.jars` or a class path; else the entry itself."""
    return glob.glob(re.sub(r"^(file|local):(//)?", "", entry)) if glob.has_magic(entry) else [entry]


def spark_jars_folder() -> Path:
    """The jars of the Spark that a local session starts."""
    return spark_home() / "jars"
