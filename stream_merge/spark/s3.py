"""How Spark reaches a bucket on S3, by Hadoop's settings `fs.s3a.*`, in the words of delta-rs; and who writes there.

Read from Hadoop 3.5.0 (core-default.xml, S3AUtils) and Delta 4.4 (DelegatingLogStore), and run on Spark 4.2.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from pyspark.sql import SparkSession

from stream_merge.model.locations import is_on_s3
from stream_merge.spark.hadoop_files import NotTranslatedError, hadoop_settings
from stream_merge.spark.log_store import CONDITIONAL_PUT, log_stores

_DEFAULT_REGION = "us-east-1"
"""Where an endpoint of one's own has none, for the signature alone; Hadoop takes the same."""
_OF_AMAZON = re.compile(r"s3(?:[.-](?P<region>[a-z]+(?:-[a-z]+)+-\d))?\.amazonaws\.com(?:\.cn)?")
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
"""Providers of credentials whose places delta-rs looks into by itself, when it is given none."""
_ONLY_SPARK = (
    "accesspoint.arn",
    "acl.default",
    "create.storage.class",
    "encryption.algorithm",
    "server-side-encryption-algorithm",
    "proxy.host",
    "security.credential.provider.path",
)
"""Settings that delta-rs is not told: without them it would write elsewhere, otherwise or as somebody else than Spark.

The last one names credential stores that S3A alone looks into.
"""


_LOOKS_THEN_PUTS = frozenset(
    {"S3SingleDriverLogStore", "HDFSLogStore", "AzureLogStore", "GCSLogStore", "LocalLogStore"}
)
"""Delta's own log stores that do not exclude other processes on S3; the others of them rely on a rename."""


_COMMITS_OTHERWISE = frozenset(
    f"{prefix}{name}"
    for name in ("conditional_put", "copy_if_not_exists", "s3_locking_provider", "s3_allow_unsafe_rename")
    for prefix in ("", "aws_")
)
"""Options of delta-rs by which it may commit in another way than by a conditional put."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Access:
    """What Hadoop's settings say of one bucket. Holds secrets: no part of it is ever shown."""

    setting: Callable[[str], str]
    """The value of `fs.s3a.<name>`, empty where there is none; that of the bucket comes first."""
    secret: Callable[[str], str]
    """As `setting`, also from Hadoop's credential stores."""
    bucket: str

    def options(self) -> dict[str, str]:
        """Options for delta-rs; credentials that it finds by itself, in environment or machine, are left out.

        Raises:
            NotTranslatedError: there is something that delta-rs has no word for.
        """
        for name in _ONLY_SPARK:
            if self.setting(name):
                msg = f"fs.s3a.{name} is set, which is not translated for delta-rs"
                raise NotTranslatedError(msg)
        return {**self._credentials(), **self._endpoint()}

    def _credentials(self) -> dict[str, str]:
        listed = re.split(r"[,\s]+", self.setting("aws.credentials.provider"))
        before: str | None = None
        for provider in (name.rsplit(".", 1)[-1] for name in listed if name):
            found = self._of_provider(provider)
            if found is not None and before is not None:
                msg = (
                    f"fs.s3a.aws.credentials.provider names {before} before {provider}, and only Hadoop knows who wins"
                )
                raise NotTranslatedError(msg)
            if found is not None:
                return found
            if provider not in (_WITH_TOKEN, _WITH_KEYS):
                before = provider
        return {}

    def _of_provider(self, provider: str) -> dict[str, str] | None:
        """What a provider has by Hadoop's settings; None where it has nothing, or looks elsewhere."""
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
        told, region = self.setting("endpoint"), self.setting("endpoint.region")
        scheme = "http" if self.setting("connection.ssl.enabled").lower() == "false" else "https"
        place = urlsplit(told if "://" in told else f"{scheme}://{told}")
        amazon = _OF_AMAZON.fullmatch(place.hostname or "")
        if not told or amazon is not None:
            region = region or (amazon.group("region") if amazon is not None else None) or ""
            return {"AWS_REGION": region} if region else {}
        in_path = self.setting("path.style.access").lower() == "true" or _is_address(place.hostname or "")
        host = place.netloc if in_path else f"{self.bucket}.{place.netloc}"
        return {
            "AWS_ENDPOINT_URL": f"{place.scheme}://{host}",
            "AWS_ALLOW_HTTP": str(place.scheme == "http").lower(),
            "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": str(not in_path).lower(),
            "AWS_REGION": region or _DEFAULT_REGION,
        }


def storage_options(session: SparkSession, location: str) -> Mapping[str, str] | None:
    """What delta-rs needs to reach a place as Spark does; None where that is not on S3.

    Cost: some twenty calls into the JVM.

    Raises:
        NotTranslatedError: delta-rs cannot be told.
    """
    if not is_on_s3(location):
        return None
    bucket = urlsplit(location).netloc
    settings = hadoop_settings(session)

    def first(get: Callable[[str], str | None]) -> Callable[[str], str]:
        return lambda name: str(get(f"fs.s3a.bucket.{bucket}.{name}") or get(f"fs.s3a.{name}") or "").strip()

    return Access(setting=first(settings.setting), secret=first(settings.secret), bucket=bucket).options()


def keeps_one_process_apart_only(session: SparkSession, location: str) -> bool:
    """Whether Spark's commits to a table there overwrite those that another process makes at the same moment.

    Delta's own log store for S3 looks whether a version is there and then puts it, with a lock in its JVM
    (S3SingleDriverLogStore, 4.4). Where a store that is not Delta's own is configured, its user knows why.
    """
    if not is_on_s3(location):
        return False
    return all(store.rsplit(".", 1)[-1] in _LOOKS_THEN_PUTS for store in log_stores(session, location))


def excludes_driver(session: SparkSession, location: str, options: Mapping[str, str] | None) -> bool:
    """Whether Spark's commits there and those of delta-rs exclude each other, in whatever processes.

    delta-rs puts a version on condition that there is none, unless it was told otherwise (1.6); of Spark's log stores
    the one of this package does (`ConditionalPutLogStore`). Whether the store respects the condition, which delta-rs
    does not find out, says `log_store.expect_condition`.

    Args:
        session: Spark's.
        location: of a table.
        options: of delta-rs.
    """
    if not is_on_s3(location) or log_stores(session, location) != [CONDITIONAL_PUT]:
        return False
    told = {*(name.lower() for name in options or ()), *(name.lower() for name in os.environ)}
    return told.isdisjoint(_COMMITS_OTHERWISE)


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
