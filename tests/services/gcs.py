"""An emulator of Google's Cloud Storage (fake-gcs-server), a bucket on it, and how Spark is told of that.

delta-rs (1.6) writes by Google's XML interface, which the emulator has for reading alone: so Spark merges here.
"""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from services import ROOT, Server, _listens, free_port, missing, tell_hadoop

FOLDER = ROOT / ".jars" / "gcs"


def jars() -> list[str]:
    """Google's connector for Hadoop, where it is."""
    return sorted(map(str, FOLDER.glob("*.jar"))) if (FOLDER / ".found").exists() else []


def need() -> None:
    """Skip the test, with the reason, where there is no emulator or no connector."""
    reason = missing()
    if reason is None and not jars():
        reason = "the emulator of Google's store is not there; 'make soak' gets it, its build takes minutes"
    if reason:
        pytest.skip(reason)


class GcsServer:
    """Keeps its buckets in memory."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        found = subprocess.run(
            [str(ROOT / "deployments" / "setup.sh"), "gcs"], check=True, capture_output=True, text=True
        )
        place = f"127.0.0.1:{self.port}"
        command = [found.stdout.strip(), "-backend", "memory", "-scheme", "http", "-host", "127.0.0.1"]
        self._server = Server([*command, "-port", str(self.port), "-public-host", place], folder)

    def start(self) -> None:
        self._server.start(lambda: _listens(self.port))

    def stop(self) -> None:
        self._server.stop()

    def bucket(self, name: str) -> GcsBucket:
        """A bucket, made."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/storage/v1/b?project=tests",
            data=json.dumps({"name": name}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10):
            return GcsBucket(port=self.port, name=name)


@dataclass(frozen=True, kw_only=True, slots=True)
class GcsBucket:
    """A bucket of the emulator."""

    port: int
    name: str

    def settings(self) -> Mapping[str, str]:
        """What Hadoop has to be told of it."""
        return {
            "fs.gs.impl": "com.google.cloud.hadoop.fs.gcs.GoogleHadoopFileSystem",
            "fs.gs.project.id": "tests",
            "fs.gs.auth.type": "UNAUTHENTICATED",
            "fs.gs.client.type": "HTTP_API_CLIENT",
            "fs.gs.storage.root.url": f"http://127.0.0.1:{self.port}/",
            # Hadoop 3.5 has defaults for its own connector, as "64m", which Google's does not read as numbers.
            "fs.gs.block.size": str(64 << 20),
            "fs.gs.rewrite.max.chunk.size": str(512 << 20),
            "fs.gs.outputstream.buffer.size": str(8 << 20),
            "fs.gs.inputstream.inplace.seek.limit": str(8 << 20),
            "fs.gs.inputstream.min.range.request.size": str(2 << 20),
        }

    def uri(self, path: str) -> str:
        """A path in it."""
        return f"gs://{self.name}/{path}"

    def tell(self, spark: SparkSession) -> None:
        """Let a running Spark reach it."""
        tell_hadoop(spark, self.settings())
