"""The preset says what small batches need and nothing that the user has said already."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pyspark
import pytest
from pyspark.sql import SparkSession

from stream_merge import session
from stream_merge.session import SMALL_BATCHES, delta_packages, small_batches
from stream_merge.spark.confs import properties, spark_defaults, spark_home

DELTA_PACKAGE = "io.delta:delta-spark_4.2_2.13:4.4.0"


@pytest.fixture(autouse=True)
def no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process may have one, whose confs count."""
    monkeypatch.setattr(SparkSession, "_instantiatedSession", None)


def options(builder: SparkSession.Builder) -> dict[str, str]:
    return dict(builder._options)


@pytest.mark.parametrize(
    ("conf", "is_secret"),
    [
        ("spark.hadoop.fs.s3a.access.key", True),
        ("spark.hadoop.fs.s3a.session.token", True),
        ("spark.hadoop.fs.azure.account.key.orders.dfs.core.windows.net", True),
        ("spark.hadoop.fs.azure.encryption.encoded.client-provided-key", True),
        ("spark.hadoop.fs.gs.auth.service.account.private.key", True),
        ("spark.hadoop.fs.s3a.encryption.key", True),
        ("spark.hadoop.fs.s3a.bucket.orders.encryption.key", True),
        ("spark.hadoop.fs.s3a.server-side-encryption.key", True),
        ("spark.hadoop.fs.s3a.bucket.orders.server-side-encryption-key", True),
        ("spark.hadoop.fs.gs.encryption.key", True),
        ("spark.hadoop.fs.gs.encryption.key.hash", True),
        ("spark.hadoop.fs.azure.sas.orders.shop.blob.core.windows.net", True),
        ("spark.hadoop.fs.adl.oauth2.credential", True),
        ("spark.hadoop.fs.azure.account.oauth2.client.secret", True),
        ("spark.hadoop.parquet.encryption.key.list", True),
        ("spark.sql.shuffle.partitions", False),
        ("spark.hadoop.fs.azure.account.auth.type", False),
        ("spark.hadoop.fs.s3a.encryption.algorithm", False),
        ("spark.hadoop.fs.s3a.aws.credentials.provider", False),
        ("spark.hadoop.hadoop.security.credential.provider.path", False),
        ("spark.io.encryption.keySizeBits", False),
    ],
)
def test_confs_with_secrets_are_no_arguments_of_the_jvm(conf: str, is_secret: bool) -> None:
    assert bool(session._SECRET.search(conf)) is is_secret


def test_a_plain_builder_gets_the_whole_preset():
    builder = SparkSession.builder

    assert small_batches(builder) is builder
    assert options(builder) == {
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.sql.shuffle.partitions": "4",
        "spark.databricks.delta.snapshotPartitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.driver.extraJavaOptions": "-Duser.timezone=UTC",
        "spark.sql.codegen.cache.maxEntries": "2000",
        "spark.python.sql.dataFrameDebugging.enabled": "false",
        "spark.sql.adaptive.enabled": "true",
    }


def test_every_setting_of_the_preset_has_a_reason():
    assert [setting.conf for setting in SMALL_BATCHES if len(setting.reason) < 20] == []
    assert len({setting.conf for setting in SMALL_BATCHES}) == len(SMALL_BATCHES)


def test_what_the_user_has_set_stays():
    own = {
        "spark.sql.shuffle.partitions": 64,
        "spark.databricks.delta.snapshotPartitions": "8",
        "spark.sql.session.timeZone": "Europe/Vienna",
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.catalog.spark_catalog": "com.example.Catalog",
    }

    changed = options(small_batches(SparkSession.builder.config(map=own)))

    assert {conf: changed[conf] for conf in own} == {conf: str(value) for conf, value in own.items()}


@pytest.mark.parametrize(
    ("confs", "environment", "workers"),
    [
        ({}, {}, sys.executable),
        ({"spark.master": "local[2]"}, {}, sys.executable),
        ({"spark.master": "spark://lake:7077"}, {}, None),
        ({}, {"MASTER": "yarn"}, None),
        ({}, {"PYSPARK_SUBMIT_ARGS": "--master yarn pyspark-shell"}, None),
        ({}, {"PYSPARK_GATEWAY_PORT": "4711"}, None),
        ({}, {"PYSPARK_PYTHON": "/opt/lake/bin/python"}, "/opt/lake/bin/python"),
        ({"spark.pyspark.python": "/opt/conf/bin/python"}, {}, "/opt/conf/bin/python"),
    ],
)
@pytest.mark.parametrize("prepare", [small_batches, delta_packages])
def test_python_workers_of_a_local_master_run_this_interpreter(prepare, confs, environment, workers, monkeypatch):
    for name in ("PYSPARK_PYTHON", "MASTER", "PYSPARK_SUBMIT_ARGS", "PYSPARK_GATEWAY_PORT"):
        monkeypatch.setenv(name, environment.get(name, ""))
        if name not in environment:
            monkeypatch.delenv(name)

    prepare(SparkSession.builder.config(map=confs))

    assert os.environ.get("PYSPARK_PYTHON") == workers


def test_what_the_defaults_say_stays_and_lists_are_added_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The builder's word would win over the file's: in another zone times without one would be other instants."""
    (tmp_path / "spark-defaults.conf").write_text(
        "spark.sql.session.timeZone Europe/Vienna\nspark.sql.shuffle.partitions 64\n"
        "spark.driver.extraJavaOptions -Dhttps.proxyHost=proxy\nspark.sql.extensions com.example.Ext\n"
    )
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))

    changed = options(small_batches(SparkSession.builder.config("spark.sql.shuffle.partitions", "8")))

    assert "spark.sql.session.timeZone" not in changed
    assert changed["spark.sql.shuffle.partitions"] == "8"
    assert changed["spark.driver.extraJavaOptions"] == "-Dhttps.proxyHost=proxy -Duser.timezone=UTC"
    assert changed["spark.sql.extensions"] == "com.example.Ext,io.delta.sql.DeltaSparkSessionExtension"


@pytest.mark.parametrize(
    ("conf", "own", "result"),
    [
        ("spark.driver.extraJavaOptions", "-Xss4m", "-Xss4m -Duser.timezone=UTC"),
        ("spark.driver.extraJavaOptions", "-Xss4m -Duser.timezone=Asia/Tokyo", "-Xss4m -Duser.timezone=Asia/Tokyo"),
        ("spark.sql.extensions", "com.example.Ext", "com.example.Ext,io.delta.sql.DeltaSparkSessionExtension"),
        (
            "spark.sql.extensions",
            "io.delta.sql.DeltaSparkSessionExtension, com.example.Ext",
            "io.delta.sql.DeltaSparkSessionExtension, com.example.Ext",
        ),
    ],
)
def test_lists_are_added_to_unless_they_answer_already(conf, own, result):
    assert options(small_batches(SparkSession.builder.config(conf, own)))[conf] == result


def test_applying_the_preset_twice_is_applying_it_once():
    once = options(small_batches(SparkSession.builder))

    assert options(small_batches(small_batches(SparkSession.builder))) == once


def test_deltas_jars_join_the_users_own_packages():
    assert options(delta_packages(SparkSession.builder)) == {"spark.jars.packages": DELTA_PACKAGE}

    builder = delta_packages(SparkSession.builder.config("spark.jars.packages", "com.example:a:1,com.example:b:2"))

    assert options(builder) == {"spark.jars.packages": f"{DELTA_PACKAGE},com.example:a:1,com.example:b:2"}


def test_deltas_jars_join_the_packages_of_the_defaults(tmp_path, monkeypatch):
    """Delta's, which the file may name as well, is there once."""
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    (tmp_path / "spark-defaults.conf").write_text(f"spark.jars.packages com.example:a:1, {DELTA_PACKAGE}")

    assert options(delta_packages(SparkSession.builder)) == {"spark.jars.packages": f"{DELTA_PACKAGE},com.example:a:1"}


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("a b\nc=d\r\ne:f\rg\th", {"a": "b", "c": "d", "e": "f", "g": "h"}),
        ("a =  b c \n b  :=c", {"a": "b c", "b": "=c"}),
        ("# a b\n  ! c d\n\ne #f", {"e": "#f"}),
        ("a b,\\\n   c\n# d \\\ne f", {"a": "b,c", "e": "f"}),
        (r"a\ b\=c d\\ne\t\u0041", {"a b=c": "d\\ne\tA"}),
        ("a b\na c\nd", {"a": "c", "d": ""}),
        ("a b\\", {"a": "b"}),
    ],
)
def test_the_defaults_are_read_as_javas_properties(text, entries):
    assert properties(text) == entries


def test_the_defaults_are_those_of_the_spark_that_starts(tmp_path, monkeypatch):
    """Not those of a folder `conf` where the process happens to work."""
    monkeypatch.delenv("SPARK_CONF_DIR", raising=False)
    monkeypatch.delenv("SPARK_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "spark-defaults.conf").write_text("spark.jars.packages a:b:1")

    assert "spark.jars.packages" not in spark_defaults()
    assert spark_home() == Path(pyspark.__file__).parent
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    assert spark_defaults() == {"spark.jars.packages": "a:b:1"}
