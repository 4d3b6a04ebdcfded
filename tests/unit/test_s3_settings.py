"""What Hadoop's settings of a bucket are to delta-rs, and what is left to Spark; spellings of one place on S3.

Against a real server: tests/contract/test_s3.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from stream_merge.model.locations import is_on_s3
from stream_merge.model.table_ref import TableRef
from stream_merge.spark import log_store
from stream_merge.spark.downloads import for_places, s3_confs, s3_coordinates
from stream_merge.spark.log_store import (
    ANY_STORE_CONF,
    CONDITIONAL_PUT,
    JAR,
    REPOSITORY,
    STORE_CONF,
    log_store_confs,
    log_store_packages,
)
from stream_merge.spark.object_stores import NotTranslatedError, S3Access

LOG_STORE = f"local.stream-merge:stream-merge-log-store:{JAR.parent.name}"
DEFAULT_PROVIDERS = (
    "org.apache.hadoop.fs.s3a.TemporaryAWSCredentialsProvider,"
    " org.apache.hadoop.fs.s3a.SimpleAWSCredentialsProvider,"
    "\n software.amazon.awssdk.auth.credentials.EnvironmentVariableCredentialsProvider,"
    " org.apache.hadoop.fs.s3a.auth.IAMInstanceCredentialsProvider"
)
KEYS = {"access.key": "a", "secret.key": "s"}
AS_KEYS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "s"}


def options(settings: Mapping[str, str]) -> dict[str, str]:
    """For a bucket `lake` of which Hadoop is told nothing but this."""
    told = {"aws.credentials.provider": DEFAULT_PROVIDERS, "connection.ssl.enabled": "true", **settings}
    return S3Access(
        setting=lambda name: told.get(name, ""), secret=lambda name: told.get(name, ""), bucket="lake"
    ).options()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {}),  # both look into the environment and ask the machine
        (KEYS, AS_KEYS),
        ({"access.key": "a"}, {}),
        ({**KEYS, "session.token": "t"}, {**AS_KEYS, "AWS_SESSION_TOKEN": "t"}),
        ({**KEYS, "session.token": "t", "aws.credentials.provider": "x.SimpleAWSCredentialsProvider"}, AS_KEYS),
        ({**KEYS, "aws.credentials.provider": "x.TemporaryAWSCredentialsProvider"}, {}),
        ({**KEYS, "aws.credentials.provider": "x.SimpleAWSCredentialsProvider,x.ProfileCredentialsProvider"}, AS_KEYS),
        ({**KEYS, "aws.credentials.provider": "x.AnonymousAWSCredentialsProvider"}, {"AWS_SKIP_SIGNATURE": "true"}),
        ({"aws.credentials.provider": "x.WebIdentityTokenFileCredentialsProvider"}, {}),
    ],
)
def test_keys_are_those_of_the_first_provider_that_has_some(
    settings: Mapping[str, str], expected: Mapping[str, str]
) -> None:
    """As Hadoop asks them; where none has keys of its own, delta-rs is told none and looks where they do."""
    assert options(settings) == expected


def ours(endpoint: str, *, in_path: bool = True, region: str = "us-east-1") -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": str(endpoint.startswith("http:")).lower(),
        "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": str(not in_path).lower(),
        "AWS_REGION": region,
    }


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"endpoint.region": "eu-west-1"}, {"AWS_REGION": "eu-west-1"}),
        ({"endpoint": "s3.amazonaws.com"}, {}),
        ({"endpoint": "s3.eu-west-1.amazonaws.com"}, {"AWS_REGION": "eu-west-1"}),
        ({"endpoint": "https://s3-ap-southeast-2.amazonaws.com"}, {"AWS_REGION": "ap-southeast-2"}),
        ({"endpoint": "s3.cn-north-1.amazonaws.com.cn"}, {"AWS_REGION": "cn-north-1"}),
        ({"endpoint": "s3.eu-west-1.amazonaws.com", "endpoint.region": "x-y-1"}, {"AWS_REGION": "x-y-1"}),
        ({"endpoint": "minio:9000", "path.style.access": "true"}, ours("https://minio:9000")),
        (
            {"endpoint": "minio:9000", "path.style.access": "TRUE", "connection.ssl.enabled": "false"},
            ours("http://minio:9000"),
        ),
        ({"endpoint": "http://minio:9000/", "path.style.access": "true"}, ours("http://minio:9000")),
        ({"endpoint": "https://store.example"}, ours("https://lake.store.example", in_path=False)),
        ({"endpoint": "http://10.0.0.7:9000"}, ours("http://10.0.0.7:9000")),  # no bucket fits before an address
        ({"endpoint": "http://[::1]:9000"}, ours("http://[::1]:9000")),
        (
            {"endpoint": "https://store.example", "endpoint.region": "here", "path.style.access": "true"},
            ours("https://store.example", region="here"),
        ),
    ],
)
def test_an_endpoint_is_reached_as_spark_reaches_it(settings: Mapping[str, str], expected: Mapping[str, str]) -> None:
    assert options(settings) == expected


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("encryption.algorithm", "SSE-KMS", "fs.s3a.encryption.algorithm is set"),
        ("acl.default", "BucketOwnerFullControl", "fs.s3a.acl.default is set"),
        ("accesspoint.arn", "arn:aws:s3:…", "fs.s3a.accesspoint.arn is set"),
        ("proxy.host", "proxy", "fs.s3a.proxy.host is set"),
        ("security.credential.provider.path", "jceks://…", "fs.s3a.security.credential.provider.path is set"),
        ("aws.credentials.provider", "x.AssumedRoleCredentialProvider", "names AssumedRoleCredentialProvider, which"),
        (
            "aws.credentials.provider",
            "x.ProfileCredentialsProvider,x.SimpleAWSCredentialsProvider",
            "names ProfileCredentialsProvider before SimpleAWSCredentialsProvider",
        ),
    ],
)
def test_what_delta_rs_cannot_be_told_is_left_to_spark(setting: str, value: str, said: str) -> None:
    """It would write unencrypted, elsewhere, or as somebody else."""
    with pytest.raises(NotTranslatedError, match=said):
        options({**KEYS, setting: value})


def test_a_bucket_with_its_secrets_shows_nothing() -> None:
    access = S3Access(setting=lambda _: "hunter2", secret=lambda _: "hunter2", bucket="lake")

    assert "hunter2" not in repr(access)


@pytest.mark.parametrize(
    "spelling",
    [
        *("s3://lake/a/t", "s3n://lake/a/t/", "S3A://lake/a/t", "delta.`s3://lake/a/t`"),
        *("s3://lake/a/t/.", "s3://lake//a/t", "s3://lake/a/./b/../t/"),
    ],
)
def test_every_spelling_of_a_place_on_s3_is_one_place(spelling: str) -> None:
    """Two would be two logs and two locks in Spark."""
    assert TableRef(spelling).plain == "s3a://lake/a/t"
    assert TableRef(spelling).beside("__x_") == "s3a://lake/a/__x_t"
    assert TableRef(spelling).sql == "delta.`s3a://lake/a/t`"
    assert TableRef(spelling).canonical == TableRef("s3://lake/a/t").canonical
    assert is_on_s3(TableRef(spelling).plain)


@pytest.mark.parametrize("other", ["/s3/t", "s3/t", "gs://s3/t", "file:/s3a/t", "s3.lake.t", "abfss://lake@x/t"])
def test_other_places_are_not_on_s3(other: str) -> None:
    assert not is_on_s3(other)
    assert TableRef(other).plain == other


def test_spark_downloads_its_file_system_for_s3_where_something_lies_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Amazon's SDK, which it names as a whole, the parts that it uses; what users name and leave out stays."""
    monkeypatch.delenv("PYSPARK_SUBMIT_ARGS", raising=False)
    own = {"spark.jars.packages": "a:b:1", "spark.jars.excludes": "x:y"}

    assert for_places(own, ["/data/in", "tables/t"]) == own
    assert for_places(own, ["/data/in", "s3://lake/t"]) == {
        "spark.jars.packages": ",".join(["a:b:1", LOG_STORE, *s3_coordinates()]),
        "spark.jars.excludes": "x:y,software.amazon.awssdk:bundle",
        "spark.jars.repositories": REPOSITORY.as_uri(),
        STORE_CONF: CONDITIONAL_PUT,
    }
    named = {"spark.jars": "/jars/hadoop-aws-3.5.0.jar"}
    assert for_places(named, ["s3a://lake/t"]) == log_store_confs(named)


def test_the_log_store_for_s3_is_set_where_none_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its jar, once; who has named one keeps it; Spark 4.0 has no file system that it could put with."""
    monkeypatch.setattr(log_store, "SPARK", (4, 1))
    own = {"spark.jars": "/jars/a.jar"}

    assert log_store_confs(own) == {"spark.jars": f"/jars/a.jar,{JAR}", STORE_CONF: CONDITIONAL_PUT}
    assert log_store_confs({"spark.jars": f"/x/{JAR.name}"})["spark.jars"] == f"/x/{JAR.name}"
    serving = {**own, "spark.hadoop.fs.s3.impl": "org.apache.hadoop.fs.s3a.S3AFileSystem"}
    of_s3 = "spark.delta.logStore.s3.impl"
    assert {log_store_confs(serving)[conf] for conf in (STORE_CONF, of_s3)} == {CONDITIONAL_PUT}
    assert log_store_confs({**serving, of_s3: "x.Other"})[of_s3] == "x.Other"
    for conf in (STORE_CONF, ANY_STORE_CONF):
        theirs = {**own, conf: "io.delta.storage.S3DynamoDBLogStore"}
        assert log_store_confs(theirs) == theirs
        assert log_store_packages(theirs) == theirs
    monkeypatch.setattr(log_store, "SPARK", (4, 0))
    assert log_store_confs(own) == log_store_packages(own) == own
    assert JAR.is_file()


def test_the_log_store_is_downloaded_from_the_package_where_spark_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, from a Maven repository of one jar, beside the users' own; not where `spark.jars` names it."""
    monkeypatch.setattr(log_store, "SPARK", (4, 1))
    monkeypatch.delenv("PYSPARK_SUBMIT_ARGS", raising=False)
    own = {"spark.jars.packages": "a:b:1", "spark.jars.repositories": "https://maven.example"}
    group, artifact, version = LOG_STORE.split(":")
    folder = REPOSITORY.joinpath(*group.split("."), artifact, version)

    downloaded = log_store_packages(own)
    assert downloaded == {
        "spark.jars.packages": f"a:b:1,{LOG_STORE}",
        "spark.jars.repositories": f"https://maven.example,{REPOSITORY.as_uri()}",
        STORE_CONF: CONDITIONAL_PUT,
    }
    assert {path.name for path in folder.iterdir()} == {f"{artifact}-{version}.jar", f"{artifact}-{version}.pom"}
    assert log_store_packages(downloaded) == downloaded
    named = {"spark.jars": str(JAR), STORE_CONF: CONDITIONAL_PUT}
    assert log_store_packages({"spark.jars": str(JAR)}) == named
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "--repositories https://maven.example pyspark-shell")
    assert log_store_packages({"spark.jars.packages": "a:b:1"}) == log_store_confs({"spark.jars.packages": "a:b:1"})


def test_the_log_store_is_set_without_our_jar_where_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an archive of Python's, where this package's own is no file."""
    monkeypatch.setattr(log_store, "SPARK", (4, 1))
    monkeypatch.setattr(log_store, "JAR", JAR / "not-there")
    own = {"spark.jars": f"/jars/{JAR.name}"}

    assert log_store_confs(own) == log_store_packages(own) == {**own, STORE_CONF: CONDITIONAL_PUT}
    assert log_store_confs({}) == log_store_packages({}) == {}


def test_whoever_names_the_connector_gets_what_it_needs_of_the_sdk():
    """The whole SDK, which it names itself, is left out."""
    own = {"spark.jars.packages": "org.apache.hadoop:hadoop-aws:3.4.2,a:b:1"}
    connector, *sdk = s3_coordinates()

    assert connector.startswith("org.apache.hadoop:hadoop-aws:")
    assert s3_confs(own)["spark.jars.packages"].split(",") == [
        "org.apache.hadoop:hadoop-aws:3.4.2",
        "a:b:1",
        LOG_STORE,
        *sdk,
    ]
    assert s3_confs(s3_confs(own)) == s3_confs(own)
