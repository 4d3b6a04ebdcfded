"""Where the jars of Delta and Kafka come from: Spark's own download, or a folder that `stream-merge jars` fills."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pyspark
import pytest
from pyspark.sql import SparkSession

from stream_merge import ConfigError
from stream_merge.jobs.kafka import jars
from stream_merge.session import delta_packages, kafka_packages

KAFKA = f"org.apache.spark:spark-sql-kafka-0-10_2.13:{pyspark.__version__}"
OF_THE_CONNECTOR = (
    "commons-pool2-2.13.1.jar",
    "kafka-clients-3.9.2.jar",
    "spark-sql-kafka-0-10_2.13-4.2.0.jar",
    "spark-token-provider-kafka-0-10_2.13-4.2.0.jar",
)


@pytest.fixture(autouse=True)
def plain_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Spark that has two jars and no defaults."""
    monkeypatch.delenv("PYSPARK_SUBMIT_ARGS", raising=False)
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    monkeypatch.setenv("SPARK_HOME", str(tmp_path / "spark"))
    touch(tmp_path / "spark" / "jars", ["hadoop-client-api-3.5.0.jar", "slf4j-api-2.0.17.jar"])


def touch(folder: Path, names: Iterable[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()


def options(builder: SparkSession.Builder) -> dict[str, str]:
    return dict(builder._options)


def test_spark_downloads_the_connector_beside_the_users_packages() -> None:
    assert jars.conf(None) == {"spark.jars.packages": KAFKA}
    assert jars.conf(None, {"spark.jars.packages": "a:b:1", "spark.x": "y"}) == {
        "spark.jars.packages": f"a:b:1,{KAFKA}",
        "spark.x": "y",
    }
    assert options(kafka_packages(SparkSession.builder.config("spark.jars.packages", "a:b:1"))) == {
        "spark.jars.packages": f"a:b:1,{KAFKA}"
    }


@pytest.mark.parametrize("conf", ["spark.jars.packages", "spark.jars"])
def test_a_connector_of_the_users_own_stays(conf: str) -> None:
    own = {conf: "x,spark-sql-kafka-0-10_2.13-4.2.1"}

    assert jars.conf(None, own) == own
    assert options(kafka_packages(SparkSession.builder.config(map=own))) == own


@pytest.mark.parametrize("file", ["spark-defaults.conf", "spark/jars/spark-sql-kafka-0-10_2.13-4.2.0.jar"])
def test_nothing_is_downloaded_where_spark_has_the_connector(tmp_path: Path, file: str) -> None:
    (tmp_path / file).write_text(f"spark.jars.packages {KAFKA}\n")

    assert jars.conf(None) == {}


def test_a_folder_of_jars_leaves_nothing_to_download(tmp_path: Path) -> None:
    """Delta's are taken from there, too; what Spark has itself is not given to it twice."""
    folder = tmp_path / "filled"
    touch(folder, [*OF_THE_CONNECTOR, "delta-spark_4.2_2.13-4.4.0.jar", "hadoop-client-api-3.4.2.jar"])

    confs = jars.conf(str(folder), {"spark.jars": "/own.jar"})

    wanted = sorted([*OF_THE_CONNECTOR, "delta-spark_4.2_2.13-4.4.0.jar"])
    assert confs == {"spark.jars": ",".join(["/own.jar", *(str(folder / name) for name in wanted)])}
    assert options(delta_packages(SparkSession.builder.config(map=confs))) == confs


def test_a_folder_without_the_connector_is_refused_with_the_command_that_fills_it(tmp_path: Path) -> None:
    touch(tmp_path / "half", OF_THE_CONNECTOR[:2])

    with pytest.raises(ConfigError, match=r"lacks \['spark-sql-kafka-0-10', .*'stream-merge jars .*half' fetches them"):
        jars.conf(str(tmp_path / "half"))


def test_jars_are_fetched_into_a_folder_that_run_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a real download; an older jar of the same artifact goes."""
    monkeypatch.undo()
    folder = tmp_path / "jars"
    touch(folder, ["kafka-clients-3.0.0.jar", "my-own-1.0.jar"])

    command = [sys.executable, "-m", "stream_merge.cli", "jars", str(folder), "--conf", "spark.driver.memory=512m"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)

    there = {path.name for path in folder.iterdir()}
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{len(there) - 1} jars in {folder}\n"
    assert {*OF_THE_CONNECTOR, "delta-spark_4.2_2.13-4.4.0.jar", "delta-storage-4.4.0.jar", "my-own-1.0.jar"} <= there
    assert not {"kafka-clients-3.0.0.jar", "hadoop-client-runtime-3.5.0.jar"} & there
    assert "delta-spark" in jars.conf(str(folder))["spark.jars"]
