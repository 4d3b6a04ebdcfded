"""Where the jars of Delta and Kafka come from: Spark's own download, or a folder that `stream-merge jars` fills."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, cast

import pyspark
import pytest
from pyspark.sql import SparkSession

from stream_merge import ConfigError
from stream_merge.jobs.kafka import jars
from stream_merge.session import delta_packages, kafka_packages

KAFKA = ",".join(
    f"org.apache.spark:{name}_2.13:{pyspark.__version__}" for name in ("spark-sql-kafka-0-10", "spark-avro")
)
DELTA = "io.delta:delta-spark_4.2_2.13:4.4.0"
DELTA_JAR = "delta-spark_4.2_2.13-4.4.0.jar"
OF_THE_CONNECTOR = (
    "commons-pool2-2.13.1.jar",
    "kafka-clients-3.9.2.jar",
    "spark-sql-kafka-0-10_2.13-4.2.0.jar",
    "spark-token-provider-kafka-0-10_2.13-4.2.0.jar",
    "spark-avro_2.13-4.2.0.jar",
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


def test_nothing_is_downloaded_where_sparks_folder_has_the_connector(tmp_path: Path) -> None:
    touch(tmp_path / "spark" / "jars", OF_THE_CONNECTOR)

    assert jars.conf(None) == {}


@pytest.mark.parametrize(
    "conf", ["spark.jars {}/{}", "spark.jars=a.jar,file://{}/*.jar", "spark.driver.extraClassPath:/a:{}/*"]
)
def test_nothing_is_downloaded_where_the_defaults_name_the_connectors_jars(tmp_path: Path, conf: str) -> None:
    """Spark expands patterns of `spark.jars` (4.2), Java those of a class path."""
    touch(tmp_path / "opt", OF_THE_CONNECTOR)
    (tmp_path / "spark-defaults.conf").write_text(conf.format(tmp_path / "opt", OF_THE_CONNECTOR[2]))

    assert jars.conf(None) == {}
    assert options(kafka_packages(SparkSession.builder)) == {}


def test_nothing_is_downloaded_where_the_users_patterns_find_the_connector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch(tmp_path / "opt", OF_THE_CONNECTOR)
    own = {"spark.jars": f"{tmp_path}/opt/*"}

    assert jars.conf(None, own) == own
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", f"--jars '{tmp_path}/opt/*.jar' pyspark-shell")
    assert jars.conf(None) == {}


@pytest.mark.parametrize(
    "conf", ["spark.jars /none/*.jar", "# spark.jars.packages {}", "  !spark.jars.packages={}", "spark.x {}"]
)
def test_the_connector_is_downloaded_where_the_defaults_only_seem_to_bring_it(tmp_path: Path, conf: str) -> None:
    (tmp_path / "spark-defaults.conf").write_text(conf.format(KAFKA))

    assert jars.conf(None) == {"spark.jars.packages": KAFKA}


def test_packages_of_the_defaults_are_downloaded_beside_deltas(tmp_path: Path) -> None:
    """A list that the session names replaces the one in `spark-defaults.conf`, so it has to hold that one."""
    (tmp_path / "spark-defaults.conf").write_text(f"spark.jars.packages  a:b:1,{KAFKA}\n")

    confs = jars.conf(None)

    assert confs == {}
    assert options(delta_packages(SparkSession.builder.config(map=confs))) == {
        "spark.jars.packages": f"{DELTA},a:b:1,{KAFKA}"
    }


def test_lists_of_the_defaults_stay_where_the_connector_is_added(tmp_path: Path) -> None:
    (tmp_path / "spark-defaults.conf").write_text("spark.jars.packages a:b:1\nspark.jars /own.jar")

    assert jars.conf(None) == {"spark.jars.packages": f"a:b:1,{KAFKA}"}
    assert options(kafka_packages(SparkSession.builder)) == {"spark.jars.packages": f"a:b:1,{KAFKA}"}
    touch(tmp_path / "filled", OF_THE_CONNECTOR)
    assert jars.conf(str(tmp_path / "filled"))["spark.jars"].startswith("/own.jar,")


def test_packages_of_the_users_own_replace_those_of_the_defaults(tmp_path: Path) -> None:
    """As in Spark: the session's list wins, and the connector is not in it."""
    (tmp_path / "spark-defaults.conf").write_text(f"spark.jars.packages {KAFKA},a:b:1")

    assert jars.conf(None, {"spark.jars.packages": "a:b:2"}) == {"spark.jars.packages": f"a:b:2,{KAFKA}"}


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

    with pytest.raises(ConfigError, match=r"lacks .*'spark-avro'\]; run 'stream-merge jars .*half'"):
        jars.conf(str(tmp_path / "half"))


def test_the_connector_is_fetched_also_where_spark_has_it(tmp_path: Path) -> None:
    touch(tmp_path / "spark" / "jars", OF_THE_CONNECTOR)
    (tmp_path / "spark-defaults.conf").write_text("spark.jars.packages a:b:1")

    assert jars.conf_to_fetch({}) == {"spark.jars.packages": f"a:b:1,{KAFKA}"}
    assert jars.conf_to_fetch({"spark.jars.packages": KAFKA}) == {"spark.jars.packages": KAFKA}


def downloaded(tmp_path: Path) -> list[Path]:
    """As Spark names what it has downloaded; each file holds its name."""
    folder = tmp_path / "ivy" / "jars"
    names = [f"org.example_{name}" for name in (*OF_THE_CONNECTOR, DELTA_JAR, "hadoop-client-api-3.4.2.jar")]
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text(name)
    return [folder / name for name in names]


def fill(tmp_path: Path, given: Iterable[Path]) -> list[str]:
    """By a session that Spark has given these jars."""

    class Session:
        conf: ClassVar = {
            "spark.jars": ",".join(jar.as_uri() for jar in given),
            "spark.jars.ivy": str(tmp_path / "ivy"),
        }

    return [jar.name for jar in jars.fetch(cast(SparkSession, Session()), tmp_path / "jars")]


def test_a_folder_gets_also_what_was_put_beside_sparks_own_jars(tmp_path: Path) -> None:
    """Another machine's Spark has hadoop-client-api, but neither the connector nor Delta."""
    touch(tmp_path / "spark" / "jars", [*OF_THE_CONNECTOR, DELTA_JAR])

    assert sorted(fill(tmp_path, downloaded(tmp_path))) == sorted([*OF_THE_CONNECTOR, DELTA_JAR])


def test_jars_that_the_session_has_from_the_folder_itself_stay_until_newer_ones_are_there(tmp_path: Path) -> None:
    folder = tmp_path / "jars"
    touch(folder, ["kafka-clients-3.9.2.jar", "commons-pool2-2.0.jar", "my_lib-1.0.jar", "other-1.0.jar"])
    inside = [jar for jar in folder.iterdir() if jar.name != "other-1.0.jar"]

    copies = fill(tmp_path, [*inside, *downloaded(tmp_path)])

    assert sorted(copies) == sorted([*OF_THE_CONNECTOR, DELTA_JAR, "my_lib-1.0.jar"])
    assert {jar.name for jar in folder.iterdir()} == {*copies, "other-1.0.jar"}
    assert (folder / "kafka-clients-3.9.2.jar").read_text() == "org.example_kafka-clients-3.9.2.jar"


def test_a_folder_whose_own_jars_are_all_that_the_session_has_is_left_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "jars"
    touch(folder, [*OF_THE_CONNECTOR, DELTA_JAR])

    assert sorted(fill(tmp_path, folder.iterdir())) == sorted([*OF_THE_CONNECTOR, DELTA_JAR])
    assert {jar.name for jar in folder.iterdir()} == {*OF_THE_CONNECTOR, DELTA_JAR}


def test_a_jar_of_the_users_own_keeps_its_name(tmp_path: Path) -> None:
    """Only what Spark has downloaded has a group before the name."""
    touch(tmp_path / "own", ["my_lib-1.0.jar"])

    assert "my_lib-1.0.jar" in fill(tmp_path, [tmp_path / "own" / "my_lib-1.0.jar", *downloaded(tmp_path)])


def test_a_failed_copy_leaves_the_older_jars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def disk_full(_source: Path, target: Path) -> None:
        target.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    touch(tmp_path / "jars", ["kafka-clients-3.0.0.jar"])
    monkeypatch.setattr(shutil, "copyfile", disk_full)

    with pytest.raises(OSError, match="No space left"):
        fill(tmp_path, downloaded(tmp_path))

    assert [jar.name for jar in (tmp_path / "jars").iterdir()] == ["kafka-clients-3.0.0.jar"]


def test_a_folder_that_run_would_refuse_is_not_reported_as_filled(tmp_path: Path) -> None:
    given = [jar for jar in downloaded(tmp_path) if "kafka-clients" not in jar.name]

    with pytest.raises(ConfigError, match=r"lacks \['kafka-clients'\], not downloaded by Spark"):
        fill(tmp_path, given)


@pytest.mark.parametrize("uri", ["https://example.com/lib-1.0.jar", "file:///none/lib-1.0.jar"])
def test_a_jar_that_is_not_on_a_local_disk_is_named_before_anything_is_copied(tmp_path: Path, uri: str) -> None:
    class Session:
        conf: ClassVar = {"spark.jars": uri}

    with pytest.raises(ConfigError, match=f"spark.jars has .*{uri}"):
        jars.fetch(cast(SparkSession, Session()), tmp_path / "jars")
    assert not (tmp_path / "jars").exists()


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
