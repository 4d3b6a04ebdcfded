"""A server that speaks S3 (versitygw), a bucket on it, and how Spark and delta-rs are told of that."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import pyarrow.fs as pafs
import pytest
from pyspark.sql import SparkSession

from services import ROOT, SPARK_JARS, Server, _listens, free_port, missing, tell_hadoop
from stream_merge.spark.versions import SPARK

_FOUND = ROOT / ".jars" / "s3" / ".found"


def need() -> None:
    """Skip the test, with the reason, where there is no server or Spark has no file system for S3."""
    if not _FOUND.exists():
        pytest.skip("the S3 server is not there; 'make test-all' gets it")
    reason = missing()
    if reason:
        pytest.skip(reason)
    if not any(SPARK_JARS.glob("hadoop-aws-*.jar")):
        pytest.skip(f"{SPARK_JARS} holds no hadoop-aws; 'stream-merge jars --s3 {SPARK_JARS}' gets it")


class S3Server:
    """Keeps its buckets as folders on a disk; who may do what is decided by one pair of keys."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.access_key, self.secret_key = f"access{secrets.token_hex(8)}", f"s/{secrets.token_hex(18)}"
        self._buckets = folder / "buckets"
        beside = folder / "metadata"
        for made in (self._buckets, beside):
            made.mkdir(parents=True)
        found = subprocess.run(
            [str(ROOT / "deployments" / "setup.sh"), "s3"], check=True, capture_output=True, text=True
        )
        command = [found.stdout.strip(), "--port", f"127.0.0.1:{self.port}", "posix", "--sidecar", str(beside)]
        keys = {"ROOT_ACCESS_KEY": self.access_key, "ROOT_SECRET_KEY": self.secret_key}
        self._server = Server([*command, str(self._buckets)], folder, environment=keys)

    def start(self) -> None:
        self._server.start(lambda: _listens(self.port))

    def stop(self) -> None:
        self._server.stop()

    @property
    def output(self) -> str:
        """What it has said so far, one line for each request."""
        return self._server.output

    def bucket(self, name: str) -> Bucket:
        """A bucket, made where it is missing."""
        folder = self._buckets / name
        folder.mkdir(exist_ok=True)
        return Bucket(server=self, name=name, folder=folder)


class Place(Protocol):
    """Where clients are sent: a server, or what stands in front of it."""

    endpoint: str
    access_key: str
    secret_key: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """A bucket of a server."""

    server: Place = field(repr=False)
    name: str
    folder: Path
    """Where the server keeps it: a look around the server, for tests that say so."""

    def settings(self) -> Mapping[str, str]:
        """What Hadoop has to be told of it, for this bucket alone."""
        wanted = {
            "endpoint": self.server.endpoint,
            "endpoint.region": "us-east-1",
            "path.style.access": "true",
            "access.key": self.server.access_key,
            "secret.key": self.server.secret_key,
        }
        if SPARK < (4, 0):  # Hadoop 3.3.4 deletes markers of folders by a request that this server does not answer
            wanted["directory.marker.retention"] = "keep"
        return {f"fs.s3a.bucket.{self.name}.{name}": value for name, value in wanted.items()}

    def storage_options(self) -> dict[str, str]:
        """The same for delta-rs; as variables of the environment, too."""
        return {
            "AWS_ENDPOINT_URL": self.server.endpoint,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": self.server.access_key,
            "AWS_SECRET_ACCESS_KEY": self.server.secret_key,
            "AWS_ALLOW_HTTP": "true",
        }

    def tell(self, spark: SparkSession) -> None:
        """Let a running Spark reach it, without a word on any command line."""
        tell_hadoop(spark, self.settings())

    def put(self, path: str, data: bytes) -> None:
        """An object, by a client of S3 that is neither Spark's nor delta-rs'."""
        with self._client().open_output_stream(f"{self.name}/{path}") as out:
            out.write(data)

    def make_folder(self, path: str) -> None:
        """An empty object that marks a folder, by the same client."""
        self._client().create_dir(f"{self.name}/{path}")

    def remove(self, path: str) -> None:
        """Delete all objects under a path, by the same client; one by one, since the server keeps folders for them."""
        store, place = self._client(), f"{self.name}/{path}"
        found = store.get_file_info(pafs.FileSelector(place, recursive=True))
        for one in sorted(found, key=lambda one: len(one.path), reverse=True):
            (store.delete_file if one.type == pafs.FileType.File else store.delete_dir)(one.path)
        store.delete_dir(place)

    def _client(self) -> pafs.S3FileSystem:
        return pafs.S3FileSystem(
            access_key=self.server.access_key,
            secret_key=self.server.secret_key,
            endpoint_override=self.server.endpoint,
            region="us-east-1",
        )

    def uri(self, path: str) -> str:
        """Where a path in it lies."""
        return f"s3a://{self.name}/{path}"
