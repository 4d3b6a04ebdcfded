"""An emulator of Azure's Blob endpoint (Azurite), a container on it, and how Spark is told of that.

A proxy in front of it does one thing that Azure does and it does not: a listing begins where `startFrom` says, by which
delta-rs (1.6) asks for a log's new commits alone.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from deltalake.fs import DeltaStorageHandler
from pyarrow.fs import FileSelector, PyFileSystem
from pyspark.sql import SparkSession

from services import ROOT, SPARK_JARS, Server, _listens, free_port, missing, running, tell_hadoop
from services.s3_proxy import S3Proxy, StartingLate

_FOUND = ROOT / ".jars" / "azurite" / ".found"
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The emulator's own account, which its documentation gives."""
HOST = f"{ACCOUNT}.dfs.core.windows.net"


def need() -> None:
    """Skip the test, with the reason, where there is no emulator or Spark has no file system for Azure."""
    if not _FOUND.exists():
        pytest.skip("the emulator of Azure is not there; 'make test-all' gets it")
    reason = missing()
    if reason:
        pytest.skip(reason)
    if not any(SPARK_JARS.glob("hadoop-azure-*.jar")):
        pytest.skip(f"{SPARK_JARS} holds no hadoop-azure; 'stream-merge jars --azure {SPARK_JARS}' gets it")


class Azurite:
    """Keeps its containers in a folder, in files of its own."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.access_key, self.secret_key = ACCOUNT, KEY
        folder.mkdir(parents=True)
        found = subprocess.run(
            [str(ROOT / "deployments" / "setup.sh"), "azurite"], check=True, capture_output=True, text=True
        )
        self._server = Server(
            [
                *(found.stdout.strip(), "--blobHost", "127.0.0.1", "--blobPort", str(self.port)),
                *("--location", str(folder), "--skipApiVersionCheck", "--disableTelemetry", "--silent"),
            ],
            folder,
        )

    def start(self) -> None:
        self._server.start(lambda: _listens(self.port))

    def stop(self) -> None:
        self._server.stop()


@dataclass(frozen=True, kw_only=True, slots=True)
class Container:
    """A container of the emulator; Spark makes it when it first looks there."""

    endpoint: str = field(repr=False)
    """Host and port."""
    name: str

    def settings(self) -> Mapping[str, str]:
        """What Hadoop has to be told of it."""
        return {
            f"fs.azure.account.key.{HOST}": KEY,
            "fs.azure.account.hns.enabled": "false",
            "fs.azure.fns.account.service.type": "BLOB",
            "fs.azure.abfs.endpoint": self.endpoint,
            "fs.azure.abfs.account.name": HOST,
            "fs.azure.always.use.https": "false",
            # Its other one needs TLS (Hadoop 3.5.0).
            "fs.azure.networking.library": "JDK_HTTP_URL_CONNECTION",
            "fs.azure.io.retry.max.retries": "2",
            "fs.azure.io.retry.backoff.interval": "200",
            "fs.azure.io.retry.max.backoff.interval": "500",
            "fs.azure.createRemoteFileSystemDuringInitialization": "true",
        }

    def storage_options(self) -> dict[str, str]:
        """The same for delta-rs; as variables of the environment, too."""
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
            "AZURE_STORAGE_ENDPOINT": f"http://{self.endpoint}/{ACCOUNT}",
            "AZURE_ALLOW_HTTP": "true",
        }

    def uri(self, path: str) -> str:
        """A path in it as Hadoop spells it."""
        return f"abfs://{self.name}@{HOST}/{path}"

    def tell(self, spark: SparkSession) -> None:
        """Let a running Spark reach it, without a word on any command line."""
        tell_hadoop(spark, self.settings())

    def copy(self, path: str, folder: Path, *, only: str = "") -> Path:
        """What lies under a path, in a folder on the disk; of it those whose paths contain a text."""
        files = PyFileSystem(DeltaStorageHandler(self.uri(path), self.storage_options()))
        all_found = files.get_file_info(FileSelector("", recursive=True))
        folders = {str(parent) for found in all_found for parent in Path(found.path).parents}
        for found in all_found:
            copied = folder / found.path
            # Hadoop makes objects for folders.
            if found.is_file and found.path not in folders and only in found.path:
                copied.parent.mkdir(parents=True, exist_ok=True)
                copied.write_bytes(files.open_input_file(found.path).read())
        return folder


@contextmanager
def container(folder: Path, name: str) -> Iterator[Container]:
    """A container of an emulator that runs for as long as the block does."""
    server = Azurite(folder / "azurite")
    proxy = S3Proxy(server, folder / "proxy")
    with running(server), running(proxy), proxy.fault(StartingLate(), "LIST"):
        yield Container(endpoint=f"127.0.0.1:{proxy.port}", name=name)
