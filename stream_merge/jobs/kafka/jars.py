"""Where Spark gets the jars of Delta and Kafka from: its own download, or a folder that `stream-merge jars` fills."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pyspark.sql import SparkSession

from stream_merge.errors import ConfigError
from stream_merge.spark.confs import JARS, PACKAGES, listed
from stream_merge.spark.downloads import (
    has_kafka_connector,
    kafka_coordinates,
    packages,
    spark_jars_folder,
)
from stream_merge.spark.versions import IVY_FOLDER

CONNECTOR = ("spark-sql-kafka-0-10", "spark-token-provider-kafka-0-10", "kafka-clients", "commons-pool2", "spark-avro")
"""What Spark 4.2's Kafka source needs beside Spark (org.apache.spark:spark-sql-kafka-0-10_2.13 names them), and what
reads Avro."""

_VERSION = re.compile(r"-\d[^-]*(?:-(?!\d)[^-]*)*\.jar$")


def conf(folder: str | None, own: Mapping[str, str] | None = None) -> dict[str, str]:
    """The user's Spark confs, and those that put the Kafka connector on the class path.

    Args:
        folder: jars of the connector, and of Delta where they are there, too; None: Spark downloads the connector,
            unless it has it already or the user's confs name it.
        own: the user's confs; lists of jars and packages, theirs or of `spark-defaults.conf`, are added to.

    Raises:
        ConfigError: the folder lacks a jar of the connector.
    """
    confs = dict(own or {})
    if folder is not None:
        return {**confs, JARS: ",".join([*listed(JARS, confs), *jars_in(folder)])}
    return confs if has_kafka_connector(confs) else conf_to_fetch(confs)


def conf_to_fetch(own: Mapping[str, str]) -> dict[str, str]:
    """The user's Spark confs, and those that have Spark download the Kafka connector, also where it has one."""
    named = packages(own)
    if any(CONNECTOR[0] in package for package in named):
        return dict(own)
    return {**own, PACKAGES: ",".join([*named, kafka_coordinates()])}


def jars_in(folder: str) -> list[str]:
    """The jars of a folder that Spark does not have itself.

    Raises:
        ConfigError: the folder lacks a jar of the Kafka connector.
    """
    there = sorted(Path(folder).glob("*.jar"))
    missing = _missing(there)
    if missing:
        msg = f"[JAR_MISSING] --jars {folder!r} lacks {missing!r}; run 'stream-merge jars {folder}'"
        raise ConfigError(msg)
    sparks_own = _artifacts(spark_jars_folder().glob("*.jar"))
    return [str(jar) for jar in there if _artifact(jar) not in sparks_own]


def fetch(session: SparkSession, folder: Path) -> list[Path]:
    """Copy the jars that a session was given beside Spark's own into a folder.

    Args:
        session: started with the packages of Delta and of the Kafka connector (`conf_to_fetch`).
        folder: is made where it is missing; older jars of the same artifacts are removed, others stay.

    Returns:
        The jars in the folder that the session was given, named as in Maven's repository.

    Raises:
        ConfigError: a jar that the session was given is not on a local disk, or the folder lacks one that `run` needs.
    """
    uris = [uri for uri in (session.conf.get(JARS) or "").split(",") if uri]
    elsewhere = [uri for uri in uris if urlsplit(uri).scheme not in {"", "file", "local"} or not _path(uri).is_file()]
    if elsewhere:
        msg = f"[INVALID_SETTING] {JARS} has {elsewhere!r}, which is not a local file and cannot be copied; remove it"
        raise ConfigError(msg)
    return _fill(folder, [_path(uri) for uri in uris], downloads=_downloads(session))


def _fill(folder: Path, given: Iterable[Path], *, downloads: Path) -> list[Path]:
    """Copy jars into a folder, except those that every Spark has.

    A jar is in place before an older one of the same artifact goes: the older one may be the file that is read, or be
    on the class path of a running session.

    Args:
        folder: is made where it is missing. Other artifacts there stay, as do given jars that are there already.
        given: of two jars that would get the same name the first counts, and one that is there already last.
        downloads: where Spark puts what it downloads, with the group before the name.

    Raises:
        ConfigError: the folder lacks a jar that `run --jars` needs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    of_every_spark = _of_every_spark()
    new: dict[str, Path] = {}
    present = set()
    for jar in given:
        name = _maven_name(jar, downloads)
        if _artifact(Path(name)) in of_every_spark:
            continue
        if name == jar.name and jar.parent.resolve() == folder.resolve():
            present.add(name)
        else:
            new.setdefault(name, jar)
    for name, jar in new.items():
        _copy(jar, folder / name)
    replaced = _artifacts(map(Path, new))
    for older in folder.glob("*.jar"):
        if older.name not in new and _artifact(older) in replaced:
            older.unlink()
    missing = _missing(folder.glob("*.jar"))
    if missing:
        msg = f"[JAR_MISSING] {str(folder)!r} lacks {missing!r}, not downloaded by Spark; check spark.jars.excludes"
        raise ConfigError(msg)
    return [jar for jar in sorted(folder.glob("*.jar")) if jar.name in present.union(new)]


def _copy(jar: Path, target: Path) -> None:
    part = target.with_name(f"{target.name}.part")
    try:
        shutil.copyfile(jar, part)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _missing(jars: Iterable[Path]) -> list[str]:
    names = [jar.name for jar in jars]
    return [needed for needed in CONNECTOR if not any(name.startswith(needed) for name in names)]


def _of_every_spark() -> set[str]:
    """The artifacts in Spark's folder that come with it.

    Others may have been put there, those of Delta and Kafka for instance, which another machine's Spark lacks.
    """
    there = list(spark_jars_folder().glob("*.jar"))
    try:
        shipped = _artifacts(Path(file) for file in metadata.files("pyspark") or [] if file.suffix == ".jar")
    except metadata.PackageNotFoundError:
        shipped = set()
    return _artifacts(there) & shipped or _artifacts(
        jar for jar in there if not jar.name.startswith((*CONNECTOR, "delta-"))
    )


def _artifacts(jars: Iterable[Path]) -> set[str]:
    return {_artifact(jar) for jar in jars}


def _artifact(jar: Path) -> str:
    return _VERSION.sub("", jar.name)


def _path(uri: str) -> Path:
    return Path(unquote(urlsplit(uri).path))


def _downloads(session: SparkSession) -> Path:
    """The folder of Ivy in which Spark collects what it has downloaded (MavenUtils.processIvyPathArg)."""
    told = (session.conf.get("spark.jars.ivy", "") or "").strip()
    if told:
        return Path(told, "jars")
    system = session.sparkContext._jvm.java.lang.System  # type: ignore[union-attr]
    return Path(system.getProperty("ivy.home", f"{system.getProperty('user.home')}/{IVY_FOLDER}"), "jars")


def _maven_name(jar: Path, downloads: Path) -> str:
    """Ivy puts the group before the name of what Spark downloads (Spark 4.2): `io.delta_delta-storage-4.4.0.jar`."""
    is_downloaded = jar.parent.resolve() == downloads.resolve()
    return jar.name.partition("_")[2] if is_downloaded and "_" in jar.name else jar.name
