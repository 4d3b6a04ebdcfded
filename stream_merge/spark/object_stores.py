"""Object stores: their settings in Spark as options of delta-rs, and whether commits exclude each other there.

Read from Hadoop 3.5.0 (core-default.xml, S3AUtils, AbfsConfiguration, AzureBlobFileSystemStore), Delta 4.4
(DelegatingLogStore, AzureLogStore) and object_store 0.13, and run on Spark 4.2; Azure against an emulator, which has
the Blob endpoint and not the one of Data Lake Storage.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from stream_merge.errors import ConfigError
from stream_merge.model.locations import is_on_azure, is_on_s3
from stream_merge.spark.hadoop_files import HadoopSettings, NotTranslatedError, file_system, hadoop_settings
from stream_merge.spark.jvm import java_class
from stream_merge.spark.log_store import CONDITIONAL_PUT, log_stores

_DEFAULT_REGION = "us-east-1"
"""For the signature, where an endpoint of one's own has no region; as in Hadoop."""
_AMAZON_ENDPOINT = re.compile(r"s3(?:[.-](?P<region>[a-z]+(?:-[a-z]+)+-\d))?\.amazonaws\.com(?:\.cn)?")
_WITH_TOKEN = "TemporaryAWSCredentialsProvider"
_WITH_KEYS = "SimpleAWSCredentialsProvider"
_ANONYMOUS = "AnonymousAWSCredentialsProvider"
_FOUND_BY_BOTH = frozenset(
    {
        _WITH_TOKEN,
        _WITH_KEYS,
        "ContainerCredentialsProvider",
        "DefaultCredentialsProvider",
        "EnvironmentVariableCredentialsProvider",
        "IAMInstanceCredentialsProvider",
        "InstanceProfileCredentialsProvider",
        "ProfileCredentialsProvider",
        "WebIdentityTokenFileCredentialsProvider",
    }
)
"""Providers of credentials that delta-rs reads by itself when it is given none."""
_S3_ONLY_SPARK = (
    "accesspoint.arn",
    "acl.default",
    "create.storage.class",
    "encryption.algorithm",
    "server-side-encryption-algorithm",
    "proxy.host",
    "security.credential.provider.path",
)
"""Settings without an equivalent: delta-rs would write elsewhere, otherwise or as somebody else than Spark. The last
one names credential stores that S3A alone reads."""
_LOOKS_THEN_PUTS = frozenset(
    {"S3SingleDriverLogStore", "HDFSLogStore", "AzureLogStore", "GCSLogStore", "LocalLogStore"}
)
"""Delta's log stores that do not exclude other processes on S3; its others rely on a rename."""
_COMMITS_OTHERWISE = frozenset(
    f"{prefix}{name}"
    for name in ("conditional_put", "copy_if_not_exists", "s3_locking_provider", "s3_allow_unsafe_rename")
    for prefix in ("", "aws_")
)
"""Options of delta-rs by which it may not commit by a conditional put."""
_AZURE_HOSTS = (".dfs.core.windows.net", ".blob.core.windows.net")
"""Hosts that delta-rs knows by a URI."""
_AZURE_ONLY_SPARK = (
    "encryption.context.provider.type",
    "encryption.encoded.client-provided-key",
    "account.keyprovider",
)
"""Settings without an equivalent: delta-rs would write otherwise than Spark, or be denied access."""
_RENAMING_LOG_STORE = "AzureLogStore"
"""Delta's log store for Azure: it renames a commit to a name that must not exist."""
_BLOB_CLIENT = "AbfsBlobClient"
"""Hadoop's client of the Blob endpoint (3.5.0)."""


def storage_options(session: SparkSession, location: str) -> Mapping[str, str] | None:
    """Options by which delta-rs reaches a location as Spark does; None outside of S3 and Azure.

    Cost: some twenty calls into the JVM.

    Raises:
        NotTranslatedError: delta-rs has no equivalent of Spark's settings.
    """
    if is_on_azure(location):
        return azure_access(hadoop_settings(session), location).options()
    if not is_on_s3(location):
        return None
    bucket, settings = urlsplit(location).netloc, hadoop_settings(session)

    def first(get: Callable[[str], str | None]) -> Callable[[str], str]:
        return lambda name: str(get(f"fs.s3a.bucket.{bucket}.{name}") or get(f"fs.s3a.{name}") or "").strip()

    return S3Access(setting=first(settings.setting), secret=first(settings.secret), bucket=bucket).options()


def may_lose_commits(session: SparkSession, location: str, *, beside_driver: bool) -> bool:
    """Whether a commit may be overwritten by another process, so that it has to be checked again.

    Args:
        session: Spark's.
        location: of a table.
        beside_driver: whether the driver writes there on the promise that nobody else does.
    """
    if keeps_one_process_apart_only(session, location):
        return True
    return beside_driver and is_on_azure(location) and not excludes_driver(session, location, None)


def keeps_one_process_apart_only(session: SparkSession, location: str) -> bool:
    """Whether Spark's commits to a table on S3 overwrite those that another process makes at the same moment.

    Delta's own log store for S3 checks for a version and then puts it, under a lock in its JVM
    (S3SingleDriverLogStore, 4.4). Whoever configures a store that is not Delta's own knows why.
    """
    if not is_on_s3(location):
        return False
    return all(store.rsplit(".", 1)[-1] in _LOOKS_THEN_PUTS for store in log_stores(session, location))


def excludes_driver(session: SparkSession, location: str, options: Mapping[str, str] | None) -> bool:
    """Whether Spark's commits and those of delta-rs with these options exclude each other, in whatever processes.

    On S3 delta-rs puts a version on condition that there is none, unless its options say otherwise (1.6); of Spark's
    log stores the one of this package does (`ConditionalPutLogStore`). Whether the store respects the condition, which
    delta-rs does not find out, `expect_condition` tries. On Azure's Blob endpoint both create an object on condition
    that there is none: delta-rs puts it, Hadoop's rename copies it (`If-None-Match: *`). At other endpoints that is the
    service's promise, and was not tested.
    """
    if is_on_s3(location):
        named = {*(name.lower() for name in options or ()), *(name.lower() for name in os.environ)}
        return log_stores(session, location) == [CONDITIONAL_PUT] and named.isdisjoint(_COMMITS_OTHERWISE)
    if not is_on_azure(location):
        return False
    stores = {store.rsplit(".", 1)[-1] for store in log_stores(session, location)}
    return stores <= {_RENAMING_LOG_STORE} and _azure_client(session, location) == _BLOB_CLIENT


def expect_condition(session: SparkSession, location: str) -> None:
    """Try, once per bucket and JVM, whether a store on S3 respects the condition that commits are put on.

    The table must exist: the trial would leave a folder. Cost: two puts and a delete in its log, the first time.

    Raises:
        Py4JJavaError: the store ignores the condition, or the trial failed.
        ConfigError: the log store's jar is of an older version, without a trial.
    """
    if not is_on_s3(location):
        return
    file = java_class(session, "org.apache.hadoop.fs.Path")(f"{location}/_delta_log/_trial")
    conf = session._jsparkSession.sessionState().newHadoopConf()
    try:
        java_class(session, CONDITIONAL_PUT).expectCondition(file, conf)
    except Py4JError as err:
        if type(err) is not Py4JError:  # one of Java, or the JVM is gone
            raise
        msg = (
            "[VERSION_MISMATCH] the log store on Spark's class path belongs to another version of stream_merge; replace"
            " its jar with that of this version ('stream-merge jars --s3')"
        )
        raise ConfigError(msg) from err


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class S3Access:
    """Hadoop's settings `fs.s3a.*` of one bucket. Has secrets: no part of it is ever shown."""

    setting: Callable[[str], str]
    """The value of `fs.s3a.<name>`, or "": the bucket's first."""
    secret: Callable[[str], str]
    """The same value, also from Hadoop's credential stores."""
    bucket: str

    def options(self) -> dict[str, str]:
        """Options for delta-rs; credentials that it finds by itself, in environment or machine, are left out."""
        _refuse_set("fs.s3a", _S3_ONLY_SPARK, self.setting)
        return {**self._credentials(), **self._endpoint()}

    def _credentials(self) -> dict[str, str]:
        listed = re.split(r"[,\s]+", self.setting("aws.credentials.provider"))
        before: str | None = None
        for provider in (name.rsplit(".", 1)[-1] for name in listed if name):
            credentials = self._provider_credentials(provider)
            if credentials is not None and before is not None:
                msg = (
                    f"fs.s3a.aws.credentials.provider names {before} before {provider}, and only Hadoop knows who wins"
                )
                raise NotTranslatedError(msg)
            if credentials is not None:
                return credentials
            if provider not in (_WITH_TOKEN, _WITH_KEYS):
                before = provider
        return {}

    def _provider_credentials(self, provider: str) -> dict[str, str] | None:
        """Credentials of a provider in Hadoop's settings; None where it has none, or reads them elsewhere."""
        key, secret, token = (self.secret(name) for name in ("access.key", "secret.key", "session.token"))
        keys = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret}
        if provider == _ANONYMOUS:
            return {"AWS_SKIP_SIGNATURE": "true"}
        if provider == _WITH_TOKEN:
            return {**keys, "AWS_SESSION_TOKEN": token} if key and secret and token else None
        if provider == _WITH_KEYS:
            return keys if key and secret else None
        if provider not in _FOUND_BY_BOTH:
            msg = f"fs.s3a.aws.credentials.provider names {provider}, which delta-rs does not know"
            raise NotTranslatedError(msg)
        return None

    def _endpoint(self) -> dict[str, str]:
        named, region = self.setting("endpoint"), self.setting("endpoint.region")
        scheme = "http" if self.setting("connection.ssl.enabled").lower() == "false" else "https"
        endpoint = urlsplit(named if "://" in named else f"{scheme}://{named}")
        amazon = _AMAZON_ENDPOINT.fullmatch(endpoint.hostname or "")
        if not named or amazon is not None:
            region = region or (amazon.group("region") if amazon is not None else None) or ""
            return {"AWS_REGION": region} if region else {}
        in_path = self.setting("path.style.access").lower() == "true" or _is_address(endpoint.hostname or "")
        host = endpoint.netloc if in_path else f"{self.bucket}.{endpoint.netloc}"
        return {
            "AWS_ENDPOINT_URL": f"{endpoint.scheme}://{host}",
            "AWS_ALLOW_HTTP": str(endpoint.scheme == "http").lower(),
            "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": str(not in_path).lower(),
            "AWS_REGION": region or _DEFAULT_REGION,
        }


def _refuse_set(prefix: str, names: Iterable[str], value: Callable[[str], str]) -> None:
    for name in names:
        if value(name):
            msg = f"{prefix}.{name} is set, which is not translated for delta-rs"
            raise NotTranslatedError(msg)


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class AzureAccess:
    """Hadoop's settings `fs.azure.*` of one container. Has secrets: no part of it is ever shown."""

    secret: Callable[[str], str]
    """The value of `fs.azure.<name>`, or "", also from credential stores: the container's, else the account's."""
    scheme: str
    host: str

    def options(self) -> dict[str, str]:
        """Options for delta-rs: account, key and, where Hadoop has one, the endpoint.

        Without a key of the account delta-rs uses `AZURE_…` in the environment.
        """
        account = self.host.partition(".")[0]
        if not self.host.endswith(_AZURE_HOSTS):
            msg = f"{self.host} is not in Azure's public cloud, which is not translated for delta-rs"
            raise NotTranslatedError(msg)
        _refuse_set("fs.azure", _AZURE_ONLY_SPARK, self.secret)
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
        endpoint = self.secret("abfs.endpoint")
        if ":" not in endpoint:  # as in Hadoop: else the account's own
            return {}
        is_plain = self.scheme == "abfs" and self.secret("always.use.https").lower() == "false"
        return {
            "AZURE_STORAGE_ENDPOINT": f"{'http' if is_plain else 'https'}://{endpoint}/{account}",
            "AZURE_ALLOW_HTTP": str(is_plain).lower(),
        }


def azure_access(settings: HadoopSettings, location: str) -> AzureAccess:
    """The settings of the container that a location is in."""
    parts = urlsplit(location)
    host, container = parts.hostname or "", parts.username or ""

    def secret(name: str) -> str:
        values = (
            (settings.secret(f"fs.azure.{name}{of}") or "").strip() for of in (f".{container}.{host}", f".{host}", "")
        )
        return next((value for value in values if value), "")

    return AzureAccess(secret=secret, scheme=parts.scheme, host=host)


def _azure_client(session: SparkSession, location: str) -> str:
    """The class of Spark's client for a container, which it keeps from its first request on; "" before Hadoop 3.5."""
    try:
        client = file_system(session, location).getAbfsStore().getClient().getClass().getSimpleName()
    except Py4JError:
        return ""
    return str(client)
