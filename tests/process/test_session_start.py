"""How a JVM of a local session starts."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import services


def test_the_preset_the_collector_and_all_jars_reach_the_running_session():
    """In a JVM of its own: the session that tests share has fewer tasks, and another collector.

    Jars that are named and those that were downloaded both: executors of a cluster get what `spark.jars` says.
    """
    code = """
        import sys
        from stream_merge.session import SMALL_BATCHES, local_session
        from stream_merge.spark.log_store import JAR, log_store_confs
        sys.path.insert(0, "tests")
        from traces import collectors

        session = local_session("preset", cores=1, memory="512m", confs=log_store_confs({}))
        names = ("sql.shuffle.partitions", "sql.session.timeZone", "databricks.delta.snapshotPartitions")
        print(*(session.conf.get(f"spark.{name}") for name in names), sep=",")
        print(*sorted(collectors(session)), session._jvm.java.util.TimeZone.getDefault().getID(), sep=",")
        for setting in SMALL_BATCHES:
            session.conf.get(setting.conf)
        jars = [jar.rsplit("/", 1)[-1] for jar in session.conf.get("spark.jars").split(",")]
        print(any("delta-spark_" in jar for jar in jars), JAR.name in jars, sep=",")
        session.stop()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=240, check=False
    )

    assert done.stdout == "4,UTC,2\nPS MarkSweep,PS Scavenge,UTC\nTrue,True\n", done.stderr


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
        from traces import collectors

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


def test_starting_is_silent_and_the_jvm_is_heard_afterwards(tmp_path: Path):
    """The JVM keeps the descriptor it was started with for life; only the start is kept back."""
    code = """
        import sys
        from stream_merge.session import local_session

        session = local_session("quiet", cores=1, memory="512m")
        err = session.sparkContext._jvm.java.lang.System.err
        err.println("first words: \\u00fc")
        for _ in range(2000):
            err.println("x" * 100)
        err.println("last words")
        session.sparkContext._jvm.java.lang.System.out.println("to stdout")
        sys.stdin.read()
        session.stop()
    """
    out, err = tmp_path / "out", tmp_path / "err"
    with out.open("w") as stdout, err.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)],
            env={**os.environ, "PYTHONIOENCODING": "utf-8", "PYTHONUTF8": "1"},
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
        )
    try:
        services.wait_until(
            lambda: process.poll() is not None or (out.stat().st_size and "last words\n" in err.read_text("utf-8")),
            "the JVM was heard",
            seconds=240,
        )
    finally:
        process.communicate(timeout=60)
    lines = err.read_text("utf-8").splitlines()

    assert (process.returncode, out.read_text()) == (0, "to stdout\n")
    assert lines[0].startswith("first words: ")
    assert lines[1:-1] == ["x" * 100] * 2000
    assert lines[-1] == "last words"
