"""What Hadoop's settings for Azure are to delta-rs, and which places are on Azure; no Spark."""

from __future__ import annotations

import os
from typing import cast

import pytest
from pyspark.sql import SparkSession

from stream_merge.model.locations import is_on_azure
from stream_merge.model.table_ref import TableRef
from stream_merge.spark import object_stores
from stream_merge.spark.downloads import azure_confs, azure_coordinates, for_places
from stream_merge.spark.hadoop_files import HadoopSettings, NotTranslatedError
from stream_merge.spark.object_stores import AzureAccess, azure_access

HOST = "orders.dfs.core.windows.net"
PLACE = f"abfs://lake@{HOST}/t"
KEYS = {"account.key": "secret"}


@pytest.fixture(autouse=True)
def says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without a word about Azure."""
    for name in [name for name in os.environ if name.upper().startswith("AZURE_")]:
        monkeypatch.delenv(name)


def told(settings: dict[str, str], place: str = PLACE) -> AzureAccess:
    """What `fs.azure.…` says of a place."""
    whole = {f"fs.azure.{name}": value for name, value in settings.items()}
    return azure_access(HadoopSettings(setting=whole.get, secret=whole.get), place)


def test_a_key_of_the_account_is_told() -> None:
    """Its own before that of all."""
    expected = {"AZURE_STORAGE_ACCOUNT_NAME": "orders", "AZURE_STORAGE_ACCOUNT_KEY": "secret"}

    assert told(KEYS).options() == expected
    assert told({"account.key": "of others", f"account.key.{HOST}": "secret"}).options() == expected


@pytest.mark.parametrize(
    ("scheme", "https", "url"),
    [("abfs", "", "https"), ("abfs", "true", "https"), ("abfs", "false", "http"), ("abfss", "false", "https")],
)
def test_an_endpoint_of_an_emulator_is_told(scheme: str, https: str, url: str) -> None:
    """As Hadoop makes it: host and port, with the account in the path."""
    settings = {**KEYS, "abfs.endpoint": "127.0.0.1:10000", "always.use.https": https}
    options = told(settings, PLACE.replace("abfs", scheme)).options()

    assert options["AZURE_STORAGE_ENDPOINT"] == f"{url}://127.0.0.1:10000/orders"
    assert options["AZURE_ALLOW_HTTP"] == str(url == "http").lower()


@pytest.mark.parametrize(
    ("settings", "host", "sentence"),
    [
        ({}, HOST, "no fs.azure.account.key is set"),
        ({**KEYS, "account.auth.type": "OAuth"}, HOST, "fs.azure.account.auth.type OAuth is set"),
        ({**KEYS, "encryption.context.provider.type": "x.Y"}, HOST, "fs.azure.encryption.context.provider.type is set"),
        (
            {**KEYS, f"encryption.encoded.client-provided-key.lake.{HOST}": "secret"},
            HOST,
            "fs.azure.encryption.encoded.client-provided-key is set",
        ),
        ({**KEYS, f"account.keyprovider.{HOST}": "x.Y"}, HOST, "fs.azure.account.keyprovider is set"),
        (KEYS, "orders.dfs.core.chinacloudapi.cn", "is not in Azure's public cloud"),
    ],
)
def test_what_was_not_tried_is_left_to_spark(settings: dict[str, str], host: str, sentence: str) -> None:
    found = told(settings, PLACE.replace(HOST, host))

    with pytest.raises(NotTranslatedError, match=sentence) as raised:
        found.options()
    assert "secret" not in str(raised.value)
    assert "secret" not in repr(found)


@pytest.mark.parametrize("settings", [{}, {"account.auth.type": "OAuth"}])
def test_what_the_environment_says_is_left_to_delta_rs(
    settings: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_CLIENT_ID", "x")

    assert told(settings).options() == {}


@pytest.mark.parametrize(
    ("named", "client", "excludes"),
    [
        ([], "AbfsBlobClient", True),
        (["io.delta.storage.AzureLogStore"], "AbfsBlobClient", True),
        (["io.delta.storage.HDFSLogStore"], "AbfsBlobClient", False),
        ([], "AbfsDfsClient", False),
        ([], "", False),
    ],
)
def test_commits_exclude_each_other_where_spark_speaks_to_the_blob_endpoint(
    named: list[str], client: str, excludes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And has Delta's own log store."""
    monkeypatch.setattr(object_stores, "log_stores", lambda *_: named)
    monkeypatch.setattr(object_stores, "_azure_client", lambda *_: client)

    assert object_stores.excludes_driver(cast(SparkSession, None), PLACE, None) is excludes
    assert not object_stores.excludes_driver(cast(SparkSession, None), "s3a://lake/t", None)
    lost = object_stores.may_lose_commits(cast(SparkSession, None), PLACE, beside_driver=True)
    assert lost is not excludes
    assert not object_stores.may_lose_commits(cast(SparkSession, None), PLACE, beside_driver=False)


def test_both_endpoints_with_tls_and_without_are_one_place() -> None:
    assert is_on_azure(f"abfss://lake@{HOST}/t")
    assert is_on_azure(f"abfs://lake@{HOST}/t")
    assert not is_on_azure(f"wasbs://lake@{HOST}/t")
    assert TableRef("ABFSS://lake@Orders.blob.core.windows.net/t@x/").canonical == f"abfs://lake@{HOST}/t@x"
    assert TableRef(PLACE).canonical == PLACE


def test_spark_downloads_its_file_system_for_azure_where_something_lies_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYSPARK_SUBMIT_ARGS", raising=False)
    own = {"spark.jars.packages": "a:b:1"}
    there = f"abfss://lake@{HOST}/t"

    assert for_places(own, ["/data/in"]) == own
    assert for_places(own, ["/data/in", there]) == {"spark.jars.packages": f"a:b:1,{azure_coordinates()}"}
    assert azure_confs(azure_confs(own)) == azure_confs(own)
    named = {"spark.jars": "/jars/hadoop-azure-3.5.0.jar"}
    assert for_places(named, [there]) == named
    both = for_places(own, ["s3://lake/in", there])["spark.jars.packages"]
    assert "hadoop-aws" in both
    assert "hadoop-azure" in both
