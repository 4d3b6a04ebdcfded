"""Checks that Spark and Delta can start here; each obstacle is one sentence instead of a stack trace.

Spark 4 needs Java 17 or newer with the module `jdk.incubator.vector`; Delta's Python package, its jar and PySpark must
belong together.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pyspark
from pyspark.sql import SparkSession

from stream_merge.errors import ConfigError
from stream_merge.model.table_ref import TableRef
from stream_merge.spark.catalog import is_forgotten
from stream_merge.spark.places import no_table
from stream_merge.spark.versions import DELTA_PACKAGE, NEEDS_VECTOR_MODULE, NEWEST, PARTS, Parts

OLDEST_JAVA = 17
"""Spark 4 requires it, and the sink is not tested on older ones."""

VECTOR_MODULE = "jdk.incubator.vector"
"""Spark 4 starts every JVM with `--add-modules` of it; a JVM without it does not start."""

_INSTALL_JDK = (
    "install a full JDK 17 or newer (Debian, Ubuntu: apt install openjdk-17-jdk-headless), or set JAVA_HOME to one"
)
_CLASSIC = "use a classic session: SparkSession.builder.master(...), without remote() and without SPARK_REMOTE"
_NEWEST_PYTHON_OF_SPARK_3 = (3, 11)


@dataclass(frozen=True, kw_only=True, slots=True)
class Java:
    """A `java` command as it describes itself."""

    major: int
    """Feature release: 8, 11, 17 ..."""
    has_vector_module: bool


def check_environment(environ: Mapping[str, str] = os.environ) -> None:
    """Refuse by a ConfigError to start where Spark or Delta could not; starts `java` once (about 0.1 s)."""
    problems = (
        version_problem(_installed("pyspark"), _installed("delta-spark")),
        python_problem(pyspark.__version__, sys.version_info[:2]),
        connect_problem(environ),
        java_problem(environ),
    )
    if any(problems):
        raise ConfigError([problem for problem in problems if problem is not None])


def check_session(session: object) -> None:
    """Refuse a running session that cannot merge into Delta tables.

    Raises:
        ConfigError: for Spark Connect, without Delta's jar or extension, and for PySpark, Spark and Delta's jar of
            different versions.
    """
    if type(session).__module__.startswith("pyspark.sql.connect"):
        msg = f"[SESSION_NOT_READY] Spark Connect sessions are not supported; {_CLASSIC}"
        raise ConfigError(msg)
    jvm = session.sparkContext._jvm  # type: ignore[attr-defined]  # a classic session of unknown origin
    # Py4J returns a package, which is not callable, where there is no class of that name.
    if not callable(jvm.io.delta.sql.DeltaSparkSessionExtension):
        msg = (
            "[SESSION_NOT_READY] the class path of the running session lacks Delta's jar; build the session with"
            f" stream_merge.session.delta_packages, or start Spark with --packages {DELTA_PACKAGE}"
        )
        raise ConfigError(msg)
    problem = python_problem(pyspark.__version__, sys.version_info[:2]) or mixture_problem(
        pyspark.__version__,
        session.sparkContext.version,  # type: ignore[attr-defined]
        _delta_jar(jvm),
    )
    if problem is not None:
        raise ConfigError(problem)
    extensions = session.conf.get("spark.sql.extensions", "")  # type: ignore[attr-defined]
    if "DeltaSparkSessionExtension" not in (extensions or ""):
        msg = (
            "[SESSION_NOT_READY] the running session has Delta's jar but not its extension; stop it and build it with"
            " stream_merge.session.small_batches, or set spark.sql.extensions=io.delta.sql.DeltaSparkSessionExtension"
        )
        raise ConfigError(msg)


def expect_workers(session: SparkSession) -> None:
    """Refuse by a ConfigError a local session whose Python workers, which decode records, lack this package."""
    context = session.sparkContext
    if str(context.master).startswith("local") and not _has_this_package(context.pythonExec):
        msg = (
            f"[SESSION_NOT_READY] Spark's Python workers run {context.pythonExec!r}, which cannot import stream_merge;"
            f" stop the session and restart it with PYSPARK_PYTHON={sys.executable}"
        )
        raise ConfigError(msg)


@cache
def _has_this_package(python: str) -> bool:
    return shutil.which(python) == sys.executable or _output(python, "-c", "import stream_merge") is not None


def version_problem(pyspark: str | None, delta_spark: str | None) -> str | None:
    """Why these two packages do not work together, or None."""
    if pyspark is None:
        return f"[VERSION_MISMATCH] pyspark is not installed; {_pins(PARTS[NEWEST])}"
    major, minor, patch = (*_numbers(pyspark), 0, 0)[:3]
    parts = PARTS.get((major, minor))
    if parts is None or not parts.fits(patch):
        allowed = ", ".join(one.pyspark for one in PARTS.values())
        return f"[VERSION_MISMATCH] pyspark {pyspark} is not one of {allowed}; {_pins(PARTS[NEWEST])}"
    if delta_spark is None:
        return f"[VERSION_MISMATCH] delta-spark is not installed; {_pins(parts)}"
    if _numbers(delta_spark) != _numbers(parts.delta):
        pins = _pins(parts)
        return f"[VERSION_MISMATCH] pyspark {pyspark} needs delta-spark {parts.delta}, got {delta_spark}; {pins}"
    return None


def python_problem(pyspark: str, python: tuple[int, ...]) -> str | None:
    """Why PySpark does not run on this Python, or None: 3.5 imports `distutils`, which Python 3.12 lacks."""
    if _numbers(pyspark) >= (4, 0) or python <= _NEWEST_PYTHON_OF_SPARK_3:
        return None
    running = f"{python[0]}.{python[1]}"
    return f"[VERSION_MISMATCH] pyspark {pyspark} needs Python 3.11, got {running}; use Python 3.11, or PySpark 4"


def mixture_problem(python: str, spark: str, delta_jar: str) -> str | None:
    """Why the versions of PySpark, Spark in the JVM and Delta's jar do not belong together, or None.

    The jar's name has the version of Spark that it was built for (delta-spark 4.4); Delta 3.3 was built for Spark 3.5.
    """
    if _numbers(python)[:2] != _numbers(spark)[:2]:
        return f"[VERSION_MISMATCH] the JVM runs Spark {spark}, Python has pyspark {python}; install pyspark=={spark}"
    named = re.search(r"delta-spark_(?:(\d+\.\d+)_)?\d+\.\d+-(\d+)\.", delta_jar)
    built_for = None if named is None else named[1] or ("3.5" if named[2] == "3" else None)
    if built_for is not None and _numbers(built_for) != _numbers(spark)[:2]:
        return (
            f"[VERSION_MISMATCH] Delta's jar is built for Spark {built_for}, but the JVM runs Spark {spark};"
            f" use {DELTA_PACKAGE}"
        )
    return None


def _delta_jar(jvm: Any) -> str:
    """Location of the jar with Delta's classes; empty where the JVM does not have it."""
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    source = loader.loadClass("io.delta.sql.DeltaSparkSessionExtension").getProtectionDomain().getCodeSource()
    return "" if source is None else str(source.getLocation())


def connect_problem(environ: Mapping[str, str]) -> str | None:
    """Why the environment would give a Spark Connect session, or None."""
    remote = environ.get("SPARK_REMOTE")
    if remote:
        # The value may carry a token.
        return f"[SESSION_NOT_READY] SPARK_REMOTE starts a Spark Connect session, which is not supported; {_CLASSIC}"
    if environ.get("SPARK_API_MODE", "").lower() == "connect":
        return f"[SESSION_NOT_READY] SPARK_API_MODE 'connect' is not supported; unset it and {_CLASSIC}"
    return None


def java_problem(environ: Mapping[str, str] = os.environ) -> str | None:
    """Why Spark could not run on its Java, or None."""
    home = environ.get("JAVA_HOME")
    if home:
        command = str(Path(home) / "bin" / "java")
        where = f"JAVA_HOME={home!r}"
        if not os.access(command, os.X_OK):
            return f"[SPARK_CANNOT_START] {where} has no executable bin/java; {_INSTALL_JDK}"
    else:
        on_path = shutil.which("java", path=environ.get("PATH"))
        if on_path is None:
            return f"[SPARK_CANNOT_START] no java was found in JAVA_HOME or on the PATH; {_INSTALL_JDK}"
        command, where = on_path, f"the java on PATH ({on_path})"
    java = describe_java(command)
    if java is None:
        return f"[SPARK_CANNOT_START] {where} does not run; {_INSTALL_JDK}"
    if java.major < OLDEST_JAVA:
        return f"[SPARK_CANNOT_START] {where} is Java {java.major}, Spark needs {OLDEST_JAVA} or newer; {_INSTALL_JDK}"
    if NEEDS_VECTOR_MODULE and not java.has_vector_module:
        return f"[SPARK_CANNOT_START] {where} lacks the module {VECTOR_MODULE}, which Spark loads; {_INSTALL_JDK}"
    return None


def describe_java(command: str) -> Java | None:
    """The description of a `java` command, or None when it does not run."""
    modules = _output(command, "--list-modules")
    if modules is not None:
        base = re.search(r"^java\.base@(\d+)", modules, re.MULTILINE)
        if base is not None:
            has_vector = re.search(rf"^{re.escape(VECTOR_MODULE)}\b", modules, re.MULTILINE) is not None
            return Java(major=int(base.group(1)), has_vector_module=has_vector)
    # Java 8 has no modules and calls itself 1.8.
    version = _output(command, "-version")
    old = re.search(r'version "(?:1\.)?(\d+)', version) if version is not None else None
    return Java(major=int(old.group(1)), has_vector_module=False) if old is not None else None


def refuse_forgetful_catalog(session: SparkSession, target: TableRef) -> None:
    """Refuse by a ConfigError a table in an in-memory catalog: it would be lost, and its checkpoint stay."""
    if is_forgotten(session, target):
        msg = (
            f"[CATALOG_NOT_SUPPORTED] target {target!r} is in an in-memory catalog, which is lost when this process"
            f" ends; use a path ('./{target.last}'), or configure a catalog with --conf"
        )
        raise ConfigError(msg, target=target)


def occupied(target: TableRef) -> str | None:
    """The error for a local folder with something else than a Delta table, without Spark; else None."""
    local = target.local
    try:
        if local is None or not local.exists():
            return None
        is_free = local.is_dir() and ((local / "_delta_log").is_dir() or not any(local.iterdir()))
    except PermissionError:
        return None
    return None if is_free else no_table(target)


def failed_start(output: str, packages: str) -> ConfigError:
    """The error for a JVM that did not start, from the output of spark-submit, Ivy and the JVM."""
    halves = _without_jar(output)
    if halves:
        names, remains = ", ".join(sorted(halves)), shlex.join(_remains(halves))
        return ConfigError(
            f"[JAR_DOWNLOAD_FAILED] Maven's folder has {names} without the jar, so Spark does not download it;"
            f" remove {remains} and run the same command again"
        )
    for sign, sentence in _START_PROBLEMS:
        match = re.search(sign, output, re.MULTILINE | re.IGNORECASE)
        if match is not None:
            detail = match.group(match.lastindex or 0).strip()
            return ConfigError(sentence.format(found=detail, packages=packages))
    lines = [line.strip() for line in output.splitlines() if line.strip() and not line.lstrip().startswith("at ")]
    last = f"its last line of output is {lines[-1][:300]!r}" if lines else "it wrote no output"
    return ConfigError(
        f"[SPARK_CANNOT_START] Spark's JVM did not start, {last}; run `java -version` and check JAVA_HOME, memory and"
        " disk"
    )


def _without_jar(output: str) -> dict[str, Path]:
    """Artifacts whose download failed because ~/.m2 has only their POM: Ivy (2.5) then tries no other repository."""
    folders = {}
    for group, name, version in set(re.findall(r"download failed: ([\w.-]+)#([\w.-]+);([\w.-]+)!", output)):
        folder = Path.home() / ".m2" / "repository" / Path(*group.split(".")) / name / version
        if (folder / f"{name}-{version}.pom").exists() and not (folder / f"{name}-{version}.jar").exists():
            folders[f"{group}:{name}:{version}"] = folder
    return folders


def _remains(halves: Mapping[str, Path]) -> list[str]:
    """Folders to remove: Maven's, and those of Ivy's cache for the same artifacts."""
    names = (artifact.split(":")[:2] for artifact in halves)
    cached = [path for group, name in names for path in Path.home().glob(f".ivy2*/cache/{group}/{name}")]
    return sorted(map(str, [*halves.values(), *cached]))


_START_PROBLEMS = (
    (
        r"unresolved dependency: ([^\s;]+;[^\s:]+)|unresolved dependency|UnresolvedDependency|Server access error",
        "[JAR_DOWNLOAD_FAILED] {packages} (spark.jars.packages) cannot be resolved ({found}); check network,"
        " proxy (spark.jars.ivySettings) and coordinates, or use --jars DIR with a folder that 'stream-merge jars DIR'"
        " fills elsewhere",
    ),
    (
        r"download failed: (\S+)|FAILED DOWNLOADS",
        "[JAR_DOWNLOAD_FAILED] {packages} (spark.jars.packages) cannot be downloaded ({found}); check the network or"
        " the mirror and run the same command again",
    ),
    (
        rf"Module {re.escape(VECTOR_MODULE)} not found",
        f"[SPARK_CANNOT_START] java lacks the module {VECTOR_MODULE}, which Spark loads ({{found}}); {_INSTALL_JDK}",
    ),
    (
        r"UnsupportedClassVersionError.*",
        f"[SPARK_CANNOT_START] java is older than Spark allows ({{found}}); {_INSTALL_JDK}",
    ),
    (
        r"JAVA_HOME is not set|bin/java: No such file or directory",
        f"[SPARK_CANNOT_START] no java was found ({{found}}); {_INSTALL_JDK}",
    ),
    (
        r"Could not reserve enough space.*|Invalid maximum heap size.*|Cannot allocate memory.*",
        "[SPARK_CANNOT_START] the JVM cannot allocate its memory ({found}); lower spark.driver.memory",
    ),
    (
        r"No space left on device.*",
        "[DISK_FULL] the disk is full ({found}); free space or set spark.local.dir to another disk",
    ),
)
"""Pattern in the output of the JVM or Ivy -> error sentence; the first match wins."""


def _pins(parts: Parts) -> str:
    """The pip command for the packages of one version of Spark."""
    return f"run pip install 'pyspark{parts.pyspark}' 'delta-spark=={parts.delta}'"


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: `4.2.0.dev1` -> (4, 2, 0)."""
    leading = re.match(r"\d+(?:\.\d+){0,2}", version)
    return tuple(int(part) for part in leading.group().split(".")) if leading is not None else ()


def _output(command: str, *arguments: str) -> str | None:
    """Stdout and stderr of a command that succeeded, or None."""
    try:
        done = subprocess.run([command, *arguments], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout + done.stderr if done.returncode == 0 else None
