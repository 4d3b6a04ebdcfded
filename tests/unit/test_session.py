"""The preset says what small batches need and nothing that the user has said already."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from stream_merge.session import SMALL_BATCHES, delta_packages, local_session, small_batches

DELTA_PACKAGE = "io.delta:delta-spark_4.2_2.13:4.4.0"


def options(builder: SparkSession.Builder) -> dict[str, str]:
    return dict(builder._options)


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


def test_the_preset_reaches_the_running_session(spark: SparkSession):
    in_session = {setting.conf: spark.conf.get(setting.conf) for setting in SMALL_BATCHES}
    zone = spark.sparkContext._jvm.java.util.TimeZone.getDefault().getID()

    assert {conf: in_session[conf] for conf in ("spark.sql.shuffle.partitions", "spark.sql.session.timeZone")} == {
        "spark.sql.shuffle.partitions": "4",
        "spark.sql.session.timeZone": "UTC",
    }
    assert in_session["spark.databricks.delta.snapshotPartitions"] == "2"
    assert zone == "UTC"


def test_a_local_session_reads_and_writes_delta(spark: SparkSession, tmp_table: str):
    spark.range(3).write.format("delta").save(tmp_table)

    assert sorted(row.id for row in spark.read.format("delta").load(tmp_table).collect()) == [0, 1, 2]


def test_python_workers_run_this_interpreter(spark: SparkSession):
    """Otherwise Spark takes the first `python3` on the PATH, which may lack every package."""
    workers = spark.sparkContext.parallelize([0], 1).map(lambda _: sys.executable).collect()

    assert workers == [sys.executable]


def collectors(session: SparkSession) -> set[str]:
    """What the JVM calls its collectors."""
    beans = session.sparkContext._jvm.java.lang.management.ManagementFactory.getGarbageCollectorMXBeans()
    return {str(bean.getName()) for bean in beans}


def test_the_jvm_of_a_local_session_collects_in_parallel(spark: SparkSession):
    assert collectors(spark) == {"PS Scavenge", "PS MarkSweep"}


@pytest.mark.parametrize("said_in", ["confs", "environment", "spark-defaults.conf"])
def test_a_collector_of_the_users_own_stays(tmp_path: Path, said_in: str):
    """A JVM that is told two collectors does not start."""
    (tmp_path / "spark-defaults.conf").write_text("spark.driver.defaultJavaOptions  -XX:+UseSerialGC\n")
    own = {
        "confs": {"CONFS": "-XX:+UseSerialGC"},
        "environment": {"SPARK_SUBMIT_OPTS": f"{os.environ['SPARK_SUBMIT_OPTS']} -XX:+UseSerialGC"},
        "spark-defaults.conf": {"SPARK_CONF_DIR": str(tmp_path)},
    }[said_in]
    code = """
        import os, sys
        from stream_merge.session import local_session
        sys.path.insert(0, "tests")
        from test_session import collectors

        options = os.environ.get("CONFS")
        confs = {"spark.driver.extraJavaOptions": options} if options else {}
        session = local_session("own collector", cores=1, memory="512m", confs=confs)
        print(*sorted(collectors(session)), sep=",")
        session.stop()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )

    assert done.stdout == "Copy,MarkSweepCompact\n", done.stderr


def test_asking_again_gives_the_running_session(spark: SparkSession):
    assert local_session("another").sparkContext.applicationId == spark.sparkContext.applicationId


def test_starting_is_silent_and_the_jvm_is_heard_afterwards():
    """The JVM keeps the descriptor it was started with for life; only the start is kept back."""
    code = """
        import time
        from stream_merge.session import local_session

        session = local_session("quiet", cores=1, memory="512m")
        err = session.sparkContext._jvm.java.lang.System.err
        err.println("first words: \\u00fc")
        for _ in range(2000):
            err.println("x" * 100)
        err.println("last words")
        session.sparkContext._jvm.java.lang.System.out.println("to stdout")
        time.sleep(1)
        session.stop()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONIOENCODING": "utf-8", "PYTHONUTF8": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=240,
        check=False,
    )
    lines = done.stderr.splitlines()

    assert (done.returncode, done.stdout) == (0, "to stdout\n")
    assert lines[0].startswith("first words: ")
    assert lines[1:-1] == ["x" * 100] * 2000
    assert lines[-1] == "last words"
