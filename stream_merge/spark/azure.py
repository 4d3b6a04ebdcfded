"""How Spark reaches Azure, by Hadoop's settings `fs.azure.*`, in the words of delta-rs; and who writes there.

Read from Hadoop 3.5.0 (AbfsConfiguration, AzureBlobFileSystemStore), Delta 4.4 (AzureLogStore) and object_store 0.12.
Run on Spark 4.2 against an emulator, which has Azure's Blob endpoint and not the one of Data Lake Storage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from pyspark.sql import SparkSession

from stream_merge.spark.hadoop_settings import HadoopSettings, NotTranslatedError, hadoop_settings
from stream_merge.spark.log_store import log_stores
from stream_merge.spark.places import is_on_azure

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


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Access:
    """What Hadoop's settings say of one account. Holds secrets: no part of it is ever shown."""

    setting: Callable[[str], str]
    """The value of `fs.azure.<name>`, empty where there is none; that of the account comes first."""
    secret: Callable[[str], str]
    """As `setting`, also from Hadoop's credential stores."""
    host: str

    def options(self) -> dict[str, str]:
        """Options for delta-rs: account, key and, where Hadoop is given one, the endpoint.

        Raises:
            NotTranslatedError: there is something that delta-rs has no word for, or that was not tried.
        """
        account = self.host.partition(".")[0]
        if not self.host.endswith(_HOSTS):
            msg = f"{self.host} is not in Azure's public cloud, which is not translated for delta-rs"
            raise NotTranslatedError(msg)
        for name in _ONLY_SPARK:
            if self.setting(name):
                msg = f"fs.azure.{name} is set, which is not translated for delta-rs"
                raise NotTranslatedError(msg)
        kind, key = self.setting("account.auth.type") or "SharedKey", self.secret("account.key")
        if kind != "SharedKey" or not key:
            what = "no fs.azure.account.key" if kind == "SharedKey" else f"fs.azure.account.auth.type {kind}"
            msg = f"{what} is set for the account, and only keys of accounts are translated for delta-rs"
            raise NotTranslatedError(msg)
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": account,
            "AZURE_STORAGE_ACCOUNT_KEY": key,
            **self._endpoint(account),
        }

    def _endpoint(self, account: str) -> dict[str, str]:
        told = self.setting("abfs.endpoint")
        if ":" not in told:  # as Hadoop has it: else the account's own
            return {}
        is_plain = self.setting("always.use.https").lower() == "false"
        return {
            "AZURE_STORAGE_ENDPOINT": f"{'http' if is_plain else 'https'}://{told}/{account}",
            "AZURE_ALLOW_HTTP": str(is_plain).lower(),
        }

    @property
    def is_of_blobs(self) -> bool:
        """Whether Spark speaks to the account's Blob endpoint, as delta-rs does (Hadoop from 3.4.2 on)."""
        return (
            self.setting("account.hns.enabled").lower() == "false"
            and self.setting("fns.account.service.type").upper() == "BLOB"
        )


def storage_options(session: SparkSession, location: str) -> Mapping[str, str] | None:
    """What delta-rs needs to reach a place as Spark does; None where that is not on Azure.

    Raises:
        NotTranslatedError: delta-rs cannot be told.
    """
    return _access(hadoop_settings(session), location).options() if is_on_azure(location) else None


def excludes_delta_rs(session: SparkSession, location: str) -> bool:
    """Whether Spark's commits there and those of delta-rs exclude each other, in whatever processes.

    On the Blob endpoint both make an object on condition that there is none: delta-rs puts it, Hadoop's rename copies
    it (`If-None-Match: *`). Elsewhere that is the service's promise, and was not seen.
    """
    if not is_on_azure(location):
        return False
    if any(store.rsplit(".", 1)[-1] != _BY_RENAME for store in log_stores(session, location)):
        return False
    return _access(hadoop_settings(session), location).is_of_blobs


def _access(settings: HadoopSettings, location: str) -> Access:
    host = urlsplit(location).hostname or ""

    def first(get: Callable[[str], str | None]) -> Callable[[str], str]:
        return lambda name: str(get(f"fs.azure.{name}.{host}") or get(f"fs.azure.{name}") or "").strip()

    return Access(setting=first(settings.setting), secret=first(settings.secret), host=host)
