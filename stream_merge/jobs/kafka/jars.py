"""Where Spark gets the jars of Delta and Kafka from: its own download, or a folder that `stream-merge jars` fills."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pyspark.sql import SparkSession

from stream_merge.errors import ConfigError
from stream_merge.session import JARS, PACKAGES, has_kafka_connector, kafka_coordinates, spark_jars_folder

CONNECTOR = ("spark-sql-kafka-0-10", "spark-token-provider-kafka-0-10", "kafka-clients", "commons-pool2")
"""What Spark 4.2's Kafka source needs beside Spark (org.apache.spark:spark-sql-kafka-0-10_2.13 names them)."""

_VERSION = re.compile(r"-\d[^-]*(?:-(?!\d)[^-]*)*\.jar$")


def conf(folder: str | None, own: Mapping[str, str] | None = None) -> dict[str, str]:
    """The user's Spark confs, and those that put the Kafka connector on the class path.

    Args:
        folder: jars of the connector, and of Delta where they are there, too; None: Spark downloads the connector,
            unless it has it already or the user's confs name it.
        own: the user's confs; lists of jars and packages are added to.

    Raises:
        ConfigError: the folder lacks a jar of the connector.
    """
    confs = dict(own or {})
    if folder is not None:
        return {**confs, JARS: _joined(confs.get(JARS), jars_in(folder))}
    if has_kafka_connector(confs):
        return confs
    return {**confs, PACKAGES: _joined(confs.get(PACKAGES), [kafka_coordinates()])}


def jars_in(folder: str) -> list[str]:
    """The jars of a folder that Spark does not have itself.

    Raises:
        ConfigError: the folder lacks a jar of the Kafka connector.
    """
    there = sorted(Path(folder).glob("*.jar"))
    missing = [name for name in CONNECTOR if not any(jar.name.startswith(name) for jar in there)]
    if missing:
        msg = f"--jars {folder!r} lacks {missing!r}; 'stream-merge jars {folder}' fetches them"
        raise ConfigError(msg)
    return [str(jar) for jar in _beside_spark(there)]


def fetch(session: SparkSession, folder: Path) -> list[Path]:
    """Copy the jars that a session was given beside Spark's own into a folder.

    Args:
        session: started with the packages of Delta and of the Kafka connector.
        folder: is made where it is missing; older jars of the same artifacts are removed.

    Returns:
        The copies, named as in Maven's repository.
    """
    folder.mkdir(parents=True, exist_ok=True)
    given = [Path(unquote(urlsplit(uri).path)) for uri in session.conf.get(JARS, "").split(",") if uri]  # type: ignore[union-attr]
    by_name = {_maven_name(path): path for path in given}
    copies = []
    for target in _beside_spark(folder / name for name in sorted(by_name)):
        for older in folder.glob("*.jar"):
            if _artifact(older) == _artifact(target):
                older.unlink()
        copies.append(Path(shutil.copyfile(by_name[target.name], target)))
    return copies


def _beside_spark(jars: Iterable[Path]) -> list[Path]:
    sparks_own = {_artifact(jar) for jar in spark_jars_folder().glob("*.jar")}
    return [jar for jar in jars if _artifact(jar) not in sparks_own]


def _artifact(jar: Path) -> str:
    return _VERSION.sub("", jar.name)


def _maven_name(jar: Path) -> str:
    """Ivy puts the group before the name of what Spark downloads (Spark 4.2): `io.delta_delta-storage-4.4.0.jar`."""
    _, _, name = jar.name.partition("_")
    return name if name and not name[0].isdigit() else jar.name


def _joined(present: str | None, more: Sequence[str]) -> str:
    return ",".join([*filter(None, (present or "").split(",")), *more])
