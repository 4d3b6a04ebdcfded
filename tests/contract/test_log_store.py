"""The log store for S3: of several commits of one version, one is made, whoever makes them.

Needs a JVM: it is Java, on Hadoop's file system for S3; and a real S3 server, or a socket that answers like a bad one.
"""

from __future__ import annotations

import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from uuid import uuid4

import pytest
from log_faults import class_path, compile_java
from pyspark.sql import SparkSession
from services import ROOT, s3
from since import since
from story import commit_at_once

from stream_merge.spark import log_store
from stream_merge.spark.delta import put_commit
from stream_merge.spark.jvm import java_class
from stream_merge.spark.object_stores import excludes_driver, expect_condition, keeps_one_process_apart_only

SOURCES = ROOT / "deployments" / "log-store" / "src" / "main" / "java"


def test_the_jar_of_the_package_is_made_of_its_sources(spark: SparkSession, tmp_path: Path) -> None:
    if not compile_java(tmp_path, class_path(spark), SOURCES, "**/*.java", "--release", "17", "-g"):
        pytest.skip("no javac on the PATH, only a Java runtime")

    with zipfile.ZipFile(log_store.JAR) as jar:
        shipped = {name: jar.read(name) for name in jar.namelist() if name.endswith(".class")}
    made = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*.class")}
    assert made == shipped, "sources and jar differ: 'make log-store' builds the jar anew"


def test_of_commits_at_the_same_time_one_is_made(spark: SparkSession, bucket: s3.Bucket) -> None:
    """No lock: the store is asked to make the object where there is none."""
    table, versions = bucket.uri(f"{uuid4().hex[:8]}/t"), 8

    won = commit_at_once(spark, table, writers=4, versions=versions, lines=1_000)

    folder = bucket.folder / table.removeprefix(bucket.uri("")) / "_delta_log"
    texts = {path.name: path.read_text() for path in folder.iterdir()}
    assert texts == {
        f"{version:020d}.json": f"{writer}\n" * 1_000 for writer, of_writer in enumerate(won) for version in of_writer
    }


def test_who_excludes_whom_is_told_by_spark_s_confs(spark: SparkSession, bucket: s3.Bucket) -> None:
    table = bucket.uri("t")

    assert excludes_driver(spark, table, None)
    assert not keeps_one_process_apart_only(spark, table)
    assert not excludes_driver(spark, "abfss://c@a.dfs.core.windows.net/t", None)
    assert not excludes_driver(spark, "/t", None)


@pytest.mark.parametrize(
    "name", ["AWS_CONDITIONAL_PUT", "conditional_put", "aws_s3_allow_unsafe_rename", "AWS_S3_LOCKING_PROVIDER"]
)
def test_delta_rs_may_be_told_to_commit_otherwise(
    spark: SparkSession, bucket: s3.Bucket, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """By its options, or by the environment, where its names are in upper case."""
    assert not excludes_driver(spark, bucket.uri("t"), {name: "x"})
    monkeypatch.setenv(name.upper() if name.lower().startswith("aws") else f"AWS_{name.upper()}", "x")
    assert not excludes_driver(spark, bucket.uri("t"), None)


# -- a store that knows no condition ------------------------------------------------------------


class _Careless(BaseHTTPRequestHandler):
    """Answers to each put that it is done, and knows no object."""

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200)

    def do_HEAD(self) -> None:
        self._answer(404)

    def do_GET(self) -> None:
        self._answer(404)

    def do_DELETE(self) -> None:
        self._answer(204)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._answer(200)

    def _answer(self, code: int) -> None:
        self.send_response(code)
        self.send_header("ETag", '"1"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def careless() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Careless) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_a_store_that_ignores_the_condition_is_refused(spark: SparkSession, bucket: s3.Bucket) -> None:
    """Else each of two commits of one version would seem to be made."""
    with careless() as endpoint:
        hadoop = spark.sparkContext._jsc.hadoopConfiguration()  # type: ignore[attr-defined]
        for name, value in bucket.settings().items():
            hadoop.set(name.replace(bucket.name, "careless"), endpoint if name.endswith(".endpoint") else value)

        with pytest.raises(Exception, match=r"s3a://careless ignores If-None-Match, so that commits"):
            put_commit(spark, "s3a://careless/t", 0, "{}\n")
        # delta-rs puts its commits itself, and would not find out.
        with pytest.raises(Exception, match=r"s3a://careless ignores If-None-Match, so that commits"):
            expect_condition(spark, "s3a://careless/t")


@since((4, 1), "a file system that puts on a condition")
def test_another_file_system_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    hadoop = spark._jsparkSession.sessionState().newHadoopConf()
    store = java_class(spark, log_store.CONDITIONAL_PUT)(hadoop)
    path = java_class(spark, "org.apache.hadoop.fs.Path")(str(tmp_path / f"{0:020d}.json"))
    no_lines = java_class(spark, "java.util.Collections").emptyIterator()

    with pytest.raises(Exception, match=r"file:/* cannot create a file on condition that there is none"):
        store.write(path, no_lines, False, hadoop)
    assert list(tmp_path.iterdir()) == []
