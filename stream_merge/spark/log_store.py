"""The log store by which Spark's commits on S3 exclude those of others: its jar, and the confs for it.

It is Java (`deployments/log-store`), needs a file system that creates under a condition (S3A of Hadoop 3.4.2, Spark
4.1), and comes with this package.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pyspark.sql import SparkSession

from stream_merge.spark.confs import JARS, PACKAGES, REPOSITORIES, in_effect, listed
from stream_merge.spark.versions import SPARK

STORE_CONF = "spark.delta.logStore.s3a.impl"
_OF_S3 = "spark.delta.logStore.s3.impl"
_S3_FILES = "spark.hadoop.fs.s3.impl"
_S3A_FILES = "org.apache.hadoop.fs.s3a.S3AFileSystem"
ANY_STORE_CONF = "spark.delta.logStore.class"
CONDITIONAL_PUT = "streammerge.ConditionalPutLogStore"
REPOSITORY = Path(__file__).with_name("maven")
"""A Maven repository with the jar alone; its version is a hash of its sources, so a cache is never stale."""
_ARTIFACT = "stream-merge-log-store"
JAR = next(REPOSITORY.glob(f"**/{_ARTIFACT}-*.jar"), REPOSITORY / "no-file.jar")
"""A file if the package is in a folder, not in a Python archive."""
_COORDINATES = f"local.stream-merge:{_ARTIFACT}:{JAR.parent.name}"


def log_store_confs(own: Mapping[str, str]) -> dict[str, str]:
    """A session's confs, and those by which Spark commits to tables on S3 on condition that nobody else has.

    Unchanged where a log store is named, on Spark 4.0, whose S3A cannot do it, and where the jar is neither named nor a
    file.
    """
    if not _is_wanted(own):
        return dict(own)
    named = listed(JARS, own)
    if _is_among(named):
        return {**own, **_named(own)}
    return {**own, **_named(own), JARS: ",".join([*named, str(JAR)])} if JAR.is_file() else dict(own)


def log_store_packages(own: Mapping[str, str]) -> dict[str, str]:
    """The confs of `log_store_confs` for a session that downloads packages: the jar is one of them.

    `spark.jars` of a PySpark session replaces what Spark has downloaded for it (PySpark 4.2, SparkContext._do_init): on
    a cluster executors would lack Delta. `--repositories` in `PYSPARK_SUBMIT_ARGS` wins over a conf.
    """
    arguments = os.environ.get("PYSPARK_SUBMIT_ARGS", "")
    if not _is_wanted(own) or not JAR.is_file() or "--repositories" in arguments:
        return log_store_confs(own)
    confs = {**own, **_named(own)}
    named = listed(PACKAGES, own)
    if _is_among([*named, *listed(JARS, own)]):
        return confs
    repositories = dict.fromkeys([*listed(REPOSITORIES, own), REPOSITORY.as_uri()])
    return {**confs, PACKAGES: ",".join([*named, _COORDINATES]), REPOSITORIES: ",".join(repositories)}


def _is_among(jars: Iterable[str]) -> bool:
    return any(_ARTIFACT in jar.rsplit("/", 1)[-1] for jar in jars)


def log_store_of_jvm(jvm: Any, own: Mapping[str, str]) -> dict[str, str]:
    """The confs for a running JVM, except the jar; none if it lacks the jar."""
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    is_there = loader.getResource(f"{CONDITIONAL_PUT.replace('.', '/')}.class") is not None
    return _named(own) if is_there and _is_wanted(own) else {}


def log_stores(session: SparkSession, location: str) -> list[str]:
    """The log stores that are named for a location, by its own scheme; Delta reads the context's conf, not a session's.

    `DelegatingLogStore` (4.4) does not take one for `s3a:` for a table that a catalog has at `s3:`.
    """
    conf = session._jsparkSession.sparkContext().conf()
    named = (ANY_STORE_CONF, store_conf(location))
    return [store for store in (str(conf.get(name, "")) for name in named) if store]


def store_conf(location: str) -> str:
    """The conf of the log store for a location's scheme."""
    return f"spark.delta.logStore.{urlsplit(location).scheme}.impl"


def remedy(location: str) -> str | None:
    """The conf that puts Spark's commits there on a condition; None before Spark 4.1, whose file system has none."""
    named = f"{store_conf(location)}={CONDITIONAL_PUT}"
    return f"{named}, which stream_merge.session.s3_packages brings" if SPARK >= (4, 1) else None


def _named(own: Mapping[str, str]) -> dict[str, str]:
    """The log store for `s3a:`, and for the `s3:` of catalogs where S3A serves that."""
    serves_s3 = in_effect(_S3_FILES, own) == _S3A_FILES and not in_effect(_OF_S3, own)
    return {STORE_CONF: CONDITIONAL_PUT} | ({_OF_S3: CONDITIONAL_PUT} if serves_s3 else {})


def _is_wanted(own: Mapping[str, str]) -> bool:
    return SPARK >= (4, 1) and not any(in_effect(conf, own) for conf in (STORE_CONF, ANY_STORE_CONF))
