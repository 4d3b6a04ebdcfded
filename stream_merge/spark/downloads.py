"""Which jars Spark is to download beside its own, by Maven's coordinates, and whether it has them already."""

from __future__ import annotations

import glob
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

import pyspark

from stream_merge.spark.defaults import in_effect, spark_home
from stream_merge.spark.log_store import log_store_confs, log_store_packages
from stream_merge.spark.places import is_on_s3
from stream_merge.spark.versions import AWS_PARTS, AWS_WHOLE, HADOOP, SCALA

JARS = "spark.jars"
PACKAGES = "spark.jars.packages"
EXCLUDES = "spark.jars.excludes"
_CLASS_PATH = "spark.driver.extraClassPath"
_KAFKA_CONNECTOR = "spark-sql-kafka-0-10"
_S3_CONNECTOR = "hadoop-aws"


def s3_confs(own: Mapping[str, str]) -> dict[str, str]:
    """A session's confs, and those that have Spark download its file system for S3 (`s3a:`), with the log store for it.

    Of Amazon's SDK only the parts that it uses, a few MB; it names the whole, 600 MB.
    """
    own = log_store_packages(own)
    named = packages(own)
    for wanted in s3_coordinates():
        module = wanted.rsplit(":", 1)[0]
        if not any(package.rsplit(":", 1)[0] == module for package in named):
            named.append(wanted)
    left_out = [one for one in in_effect(EXCLUDES, own).split(",") if one]
    return {**own, PACKAGES: ",".join(named), EXCLUDES: ",".join(dict.fromkeys([*left_out, AWS_WHOLE]))}


def s3_coordinates() -> list[str]:
    """Maven's coordinates of Spark's file system for S3, and of what it uses of Amazon's SDK, for this PySpark."""
    return [f"org.apache.hadoop:{_S3_CONNECTOR}:{HADOOP}", *AWS_PARTS]


def packages(confs: Mapping[str, str]) -> list[str]:
    """Maven's coordinates of what Spark downloads for a session with these confs.

    Those of `spark-defaults.conf` where the confs name none. Whoever adds to the list has to start with these: once a
    session names a list, Spark does not look into the file for it.
    """
    return [package.strip() for package in in_effect(PACKAGES, confs).split(",") if package.strip()]


def kafka_coordinates() -> str:
    """Maven's coordinates of the Kafka connector for the installed PySpark."""
    return f"org.apache.spark:{_KAFKA_CONNECTOR}_{SCALA}:{pyspark.__version__}"


def has_kafka_connector(confs: Mapping[str, str]) -> bool:
    """Whether Spark's jars, confs or `spark-defaults.conf` bring the Kafka connector; confs are those of a session."""
    return _has(_KAFKA_CONNECTOR, confs)


def for_places(own: Mapping[str, str], places: Iterable[str]) -> dict[str, str]:
    """A session's confs, and where one of these places is on S3 those for its file system, unless Spark has that.

    And those of the log store in any case.
    """
    if not any(map(is_on_s3, places)):
        return dict(own)
    return log_store_confs(own) if _has(_S3_CONNECTOR, own) else s3_confs(own)


def _has(connector: str, confs: Mapping[str, str]) -> bool:
    submit_args = [arg.rpartition("=")[2] for arg in shlex.split(os.environ.get("PYSPARK_SUBMIT_ARGS", ""))]
    named = [*packages(confs), *submit_args]
    named += [entry for text in [in_effect(JARS, confs), *submit_args] for entry in text.split(",")]
    named += [entry for text in [in_effect(_CLASS_PATH, confs), *submit_args] for entry in text.split(os.pathsep)]
    named.append(f"{spark_jars_folder()}/*")
    return any(connector in name for entry in named for name in _files(entry.strip()))


def _files(entry: str) -> list[str]:
    """What an entry of `spark.jars` or of a class path stands for: itself, or the local files of a pattern."""
    return glob.glob(re.sub(r"^(file|local):(//)?", "", entry)) if glob.has_magic(entry) else [entry]


def spark_jars_folder() -> Path:
    """Where the Spark that a local session starts has its own jars."""
    return spark_home() / "jars"
