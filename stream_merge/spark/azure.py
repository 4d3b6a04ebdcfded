"""How Spark reaches Azure, by Hadoop's settings `fs.azure.*`, in the words of delta-rs; and who writes there.

Read from Hadoop 3.5.0 (AbfsConfiguration, AzureBlobFileSystemStore), Delta 4.4 (AzureLogStore) and object_store 0.13.
Run on Spark 4.2 against an emulator, which has Azure's Blob endpoint and not the one of Data Lake Storage.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from stream_merge.model.locations import is_on_azure
from stream_merge.spark.hadoop_files import HadoopSettings, NotTranslatedError, file_system, hadoop_settings
from stream_merge.spark.log_store import log_stores

_HOSTS = (".dfs.core.windows.net", ".blob.core.windows.net")
"""Of accounts that delta-rs knows by a URI; those of other clouds it has to be told."""
_ONLY_SPARK = (
    "encryption.context.provider.type",
    "encryption.encoded.client-provided-key",
    "account.keyprovider",
)
"""Settings that delta-rs is not told: without them it would write otherwise than Spark does, or not get in."""
_BY_RENAME = "AzureLogStore"
"""Delta's own: it writes a commit beside the log and renames it, to a name that must not be there."""
_OF_BLOBS = "AbfsBlobClient"
"""Hadoop's client of the Blob endpoint (3.5.0)."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Access:
    """What Hadoop's settings say of one container. Holds secrets: no part of it is ever shown."""

    secret: Callable[[str], str]
    """The value of `fs.azure.<name>`, empty where there is none, also from Hadoop's credential stores; that of the
    container comes first, then that of the account."""
    scheme: str
    host: str

    def options(self) -> dict[str, str]:
        """Options for delta-rs: account, key and, where Hadoop is given one, the endpoint.

        Without a key of the account what the environment says in `AZURE_…` is left to delta-rs.

        Raises:
            NotTranslatedError: there is something that delta-rs has no word for, or that was not tried.
        """
        account = self.host.partition(".")[0]
        if not self.host.endswith(_HOSTS):
            msg = f"{self.host} is not in Azure's public cloud, which is not translated for delta-rs"
            raise NotTranslatedError(msg)
        for name in _ONLY_SPARK:
            if self.secret(name):
                msg = f"fs.azure.{name} is set, which is not translated for delta-rs"
                raise NotTranslatedError(msg)
        return {**self._credentials(account), **self._endpoint(account)}

    def _credentials(self, account: str) -> dict[str, str]:
        kind, key = self.secret("account.auth.type") or "SharedKey", self.secret("account.key")
        if kind == "SharedKey" and key:
            return {"AZURE_STORAGE_ACCOUNT_NAME": account, "AZURE_STORAGE_ACCOUNT_KEY": key}
        if any(name.upper().startswith("AZURE_") for name in os.environ):
            return {}
        what = "no fs.azure.account.key" if kind == "SharedKey" else f"fs.azure.account.auth.type {kind}"
        msg = (
            f"{what} is set for the account, and only keys of accounts are translated for delta-rs; storage_options, or"
            " AZURE_… in the environment, may say how it gets in"
        )
        raise NotTranslatedError(msg)

    def _endpoint(self, account: str) -> dict[str, str]:
        told = self.secret("abfs.endpoint")
        if ":" not in told:  # as Hadoop has it: else the account's own
            return {}
        is_plain = self.scheme == "abfs" and self.secret("always.use.https").lower() == "false"
        return {
            "AZURE_STORAGE_ENDPOINT": f"{'http' if is_plain else 'https'}://{told}/{account}",
            "AZURE_ALLOW_HTTP": str(is_plain).lower(),
        }


def access(settings: HadoopSettings, location: str) -> Access:
    """What settings say of the container that a location is in."""
    parts = urlsplit(location)
    host, container = parts.hostname or "", parts.username or ""

    def secret(name: str) -> str:
        for place in (f".{container}.{host}", f".{host}", ""):
            found = (settings.secret(f"fs.azure.{name}{place}") or "").strip()
            if found:
                return found
        return ""

    return Access(secret=secret, scheme=parts.scheme, host=host)


def storage_options(session: SparkSession, location: str) -> Mapping[str, str] | None:
    """What delta-rs needs to reach a place as Spark does; None where that is not on Azure.

    Raises:
        NotTranslatedError: delta-rs cannot be told.
    """
    return access(hadoop_settings(session), location).options() if is_on_azure(location) else None


def excludes_driver(session: SparkSession, location: str) -> bool:
    """Whether Spark's commits there and those of delta-rs exclude each other; other processes' if they are set so, too.

    On the Blob endpoint both make an object on condition that there is none: delta-rs puts it, Hadoop's rename copies
    it (`If-None-Match: *`). Elsewhere that is the service's promise, and was not seen.
    """
    if not is_on_azure(location):
        return False
    if any(store.rsplit(".", 1)[-1] != _BY_RENAME for store in log_stores(session, location)):
        return False
    return _client(session, location) == _OF_BLOBS


def _client(session: SparkSession, location: str) -> str:
    """The class by which Spark's own file system speaks to the container, which it keeps from its first look on.

    Before Hadoop 3.5 nobody is told.
    """
    try:
        found = file_system(session, location).getAbfsStore().getClient().getClass().getSimpleName()
    except Py4JError:
        return ""
    return str(found)
