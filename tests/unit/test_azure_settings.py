"""What Hadoop's settings for Azure are to delta-rs, and which places are on Azure; no Spark."""

from __future__ import annotations

import pytest

from stream_merge.spark.azure import Access
from stream_merge.spark.downloads import azure_confs, azure_coordinates, for_places
from stream_merge.spark.hadoop_settings import NotTranslatedError
from stream_merge.spark.places import canonical, is_on_azure

HOST = "orders.dfs.core.windows.net"
KEYS = {"account.key": "secret"}


def access(settings: dict[str, str], *, host: str = HOST) -> Access:
    return Access(setting=lambda name: settings.get(name, ""), secret=lambda name: settings.get(name, ""), host=host)


def test_a_key_of_the_account_is_told() -> None:
    assert access(KEYS).options() == {
        "AZURE_STORAGE_ACCOUNT_NAME": "orders",
        "AZURE_STORAGE_ACCOUNT_KEY": "secret",
    }


@pytest.mark.parametrize(("https", "url"), [("", "https"), ("true", "https"), ("false", "http")])
def test_an_endpoint_of_an_emulator_is_told(https: str, url: str) -> None:
    """As Hadoop makes it: host and port, with the account in the path."""
    told = access({**KEYS, "abfs.endpoint": "127.0.0.1:10000", "always.use.https": https}).options()

    assert told["AZURE_STORAGE_ENDPOINT"] == f"{url}://127.0.0.1:10000/orders"
    assert told["AZURE_ALLOW_HTTP"] == str(url == "http").lower()


@pytest.mark.parametrize(
    ("settings", "host", "sentence"),
    [
        ({}, HOST, "no fs.azure.account.key is set"),
        ({**KEYS, "account.auth.type": "OAuth"}, HOST, "fs.azure.account.auth.type OAuth is set"),
        ({**KEYS, "encryption.context.provider.type": "x.Y"}, HOST, "fs.azure.encryption.context.provider.type is set"),
        ({**KEYS, "account.keyprovider": "x.Y"}, HOST, "fs.azure.account.keyprovider is set"),
        (KEYS, "orders.dfs.core.chinacloudapi.cn", "is not in Azure's public cloud"),
    ],
)
def test_what_was_not_tried_is_left_to_spark(settings: dict[str, str], host: str, sentence: str) -> None:
    with pytest.raises(NotTranslatedError, match=sentence) as raised:
        access(settings, host=host).options()
    assert "secret" not in str(raised.value)
    assert "secret" not in repr(access(settings, host=host))


@pytest.mark.parametrize(
    ("settings", "is_of_blobs"),
    [
        ({}, False),
        ({"account.hns.enabled": "false"}, False),
        ({"account.hns.enabled": "true", "fns.account.service.type": "BLOB"}, False),
        ({"account.hns.enabled": "false", "fns.account.service.type": "BLOB"}, True),
    ],
)
def test_commits_exclude_each_other_where_spark_speaks_to_the_blob_endpoint(
    settings: dict[str, str], is_of_blobs: bool
) -> None:
    assert access(settings).is_of_blobs is is_of_blobs


def test_with_tls_and_without_is_one_place() -> None:
    assert is_on_azure(f"abfss://lake@{HOST}/t")
    assert is_on_azure(f"abfs://lake@{HOST}/t")
    assert not is_on_azure(f"wasbs://lake@{HOST}/t")
    assert canonical(f"ABFSS://lake@{HOST}/t/") == canonical(f"abfs://lake@{HOST}/t")


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
