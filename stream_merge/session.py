"""Spark sessions for small micro-batches: the preset, Delta's jars, a quiet local session, the session of spark-submit.

Spark's and Delta's defaults are made for large queries; on a batch of a few thousand events most of their time goes
into empty tasks. `small_batches` sets what was measured to matter and is not set yet.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from delta import configure_spark_with_delta_pip
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkRuntimeError
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from stream_merge.model.logs import tell
from stream_merge.spark import preflight
from stream_merge.spark.confs import JARS, PACKAGES, spark_defaults
from stream_merge.spark.downloads import (
    azure_confs,
    has_kafka_connector,
    kafka_coordinates,
    packages,
    s3_confs,
)
from stream_merge.spark.log_store import log_store_of_jvm
from stream_merge.spark.memory import HEAP, heap
from stream_merge.spark.versions import CALENDAR_CONFS

_log = logging.getLogger(__name__)

DELTA_EXTENSION = "io.delta.sql.DeltaSparkSessionExtension"
UTC_OPTION = "-Duser.timezone=UTC"
COLLECTOR_OPTION = "-XX:+UseParallelGC"
"""The JVM's parallel collector: 2 M events from Kafka took 8 % less time with it than with G1, the default (17.5
instead of 19.1 s on 2 cores). Its full collections stop the JVM for about a second per GB in use, which is little
here."""

_MASTER = "spark.master"
_EXTENSIONS = "spark.sql.extensions"
_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_DEFAULT_JAVA_OPTIONS = "spark.driver.defaultJavaOptions"
_DELTA_JAR = "delta-spark_"
_JAVA_OPTIONS_OF_ENVIRONMENT = ("SPARK_SUBMIT_OPTS", "JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS")
_SECRET = re.compile(
    r"(?i)secret|password|token|(?:access|account|provided|private)[.-]?key"
    r"|encryption[.-]key\b|[.-]credential$|azure\.sas\."
)
"""Names of secret confs: those of spark.redaction.regex (4.2), and keys and signatures of stores."""
_NAMES_COLLECTOR = re.compile(r"-XX:\+Use\w+GC\b")


@dataclass(frozen=True, slots=True)
class Setting:
    """One conf of the preset."""

    conf: str
    value: str
    reason: str
    """Why small micro-batches need it."""
    joined_by: str | None = None
    """Separator, for a conf that is a list: the value joins what the user has. None: the user's value stays."""


SMALL_BATCHES: tuple[Setting, ...] = (
    Setting(
        _EXTENSIONS, DELTA_EXTENSION, "Delta's SQL and its rules; a MERGE does not resolve without it", joined_by=","
    ),
    Setting(
        "spark.sql.catalog.spark_catalog",
        "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "lets catalog names stand for Delta tables",
    ),
    Setting(
        "spark.sql.shuffle.partitions",
        "4",
        "a merge shuffles two to four times; without AQE the default is 200 tasks and files each",
    ),
    Setting(
        "spark.databricks.delta.snapshotPartitions",
        "2",
        "Delta rebuilds a table's state in as many tasks per commit; the default of 50 costs some 2.5 s more",
    ),
    Setting(
        "spark.sql.session.timeZone",
        "UTC",
        "in another zone Delta 4.4 verifies each commit's file list by rebuilding the state: 0.3 to 0.4 s",
    ),
    Setting(_JAVA_OPTIONS, UTC_OPTION, "the same verification looks at the JVM's zone as well", joined_by=" "),
    Setting(
        "spark.sql.codegen.cache.maxEntries",
        "2000",
        "a merge needs some 60 generated classes; the default of 100 lets merge, side tables and other queries"
        " evict each other: 43 classes compiled anew per batch instead of 4, a third of the processor time",
    ),
    Setting(
        "spark.python.sql.dataFrameDebugging.enabled",
        "false",
        "PySpark notes the Python call site of every column operation: four calls to the JVM for each,"
        " 0.6 s per batch here; without it errors lack the line of Python that made the column",
    ),
    Setting(
        "spark.sql.adaptive.enabled",
        "true",
        "coalesces small shuffle partitions; Spark's default, stated because a merge of many rows relies on it",
    ),
    *(
        Setting(
            conf,
            "CORRECTED",
            "as Spark 4 has it: Spark 3.5 by itself refuses to write dates before 1582 and times before 1900,"
            " and to read those that delta-rs has written",
        )
        for conf in CALENDAR_CONFS
    ),
)
"""The preset. Times are of one merge of 1,000 events into 20,000 rows on 2 cores, medians of 8 on a busy machine.
Within the noise (0.1 s), hence not set: fewer than 4 shuffle and 2 snapshot partitions, commit checksums, AQE off."""


def small_batches(builder: SparkSession.Builder) -> SparkSession.Builder:
    """Set what small micro-batches need, unless builder, `spark-defaults.conf` or a running session has a value.

    Works on a plain `SparkSession.builder`. Lists (extensions, JVM options) are added to, other confs of the user stay.
    JVM options only work when this session starts the JVM. With a local master `PYSPARK_PYTHON` becomes this
    interpreter, unless it or `spark.pyspark.python` is set: name another master before.
    """
    _run_workers_like_this_process(builder)
    for setting in SMALL_BATCHES:
        present = _present(builder, setting.conf)
        if present is None:
            builder.config(setting.conf, setting.value)
        elif setting.joined_by is not None:
            names = [entry.strip().partition("=")[0] for entry in present.split(setting.joined_by)]
            if setting.value.partition("=")[0] not in names:  # the user's own value stays
                builder.config(setting.conf, f"{present}{setting.joined_by}{setting.value}")
    return builder


def delta_packages(builder: SparkSession.Builder) -> SparkSession.Builder:
    """Have Spark download Delta's jars for the installed delta-spark, beside its other packages.

    Nothing is downloaded where the builder's `spark.jars` names them already. `PYSPARK_PYTHON` is set as by
    `small_batches`.
    """
    _run_workers_like_this_process(builder)
    if _DELTA_JAR in _options(builder).get(JARS, ""):
        return builder
    configure_spark_with_delta_pip(builder, extra_packages=packages(_options(builder)))
    named = dict.fromkeys(_options(builder).get(PACKAGES, "").split(","))  # the user's may name Delta's, too
    return builder.config(PACKAGES, ",".join(named))


def kafka_packages(builder: SparkSession.Builder) -> SparkSession.Builder:
    """Have Spark download its Kafka connector, beside its other packages, unless it has one."""
    confs = _options(builder)
    if not has_kafka_connector(confs):
        builder.config(PACKAGES, ",".join([*packages(confs), kafka_coordinates()]))
    return builder


def s3_packages(builder: SparkSession.Builder) -> SparkSession.Builder:
    """Have Spark download its file system for S3, beside its other packages."""
    return builder.config(map=dict(s3_confs(_options(builder))))


def azure_packages(builder: SparkSession.Builder) -> SparkSession.Builder:
    """Have Spark download its file system for Azure, beside its other packages."""
    return builder.config(map=dict(azure_confs(_options(builder))))


def local_session(
    app_name: str, *, memory: str | None = None, cores: int | None = None, confs: Mapping[str, str] | None = None
) -> SparkSession:
    """A session in this process, ready for Delta, that starts without output.

    The JVM's output at the start explains a failed start, and is logged at DEBUG otherwise; later output is passed on,
    line by line. Its collector is the parallel one (COLLECTOR_OPTION), unless JVM options name another.

    Args:
        app_name: shown in Spark's logs.
        memory: heap of the JVM; None: as confs have it, else by the container's limit, 2 GiB without one.
        cores: threads for tasks; None takes all.
        confs: more Spark confs; they win over the preset and over what this function sets.

    Raises:
        ConfigError: when Java, versions, jars or memory keep Spark from starting.
    """
    preflight.check_environment()
    builder = SparkSession.builder.appName(app_name).config(
        map={
            _MASTER: f"local[{'*' if cores is None else cores}]",
            HEAP: memory or heap(confs or {}),
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.log.level": "ERROR",
            **(confs or {}),
        }
    )
    session = _start_quietly(_with_collector(delta_packages(small_batches(builder))))
    preflight.check_session(session)  # a JVM that ran before may lack Delta's jar
    return session


def _with_collector(builder: SparkSession.Builder) -> SparkSession.Builder:
    """Name the collector, unless it is named: a JVM with two does not start."""
    own = _options(builder).get(_JAVA_OPTIONS, "")
    defaults = spark_defaults()
    named = [own, _options(builder).get(_DEFAULT_JAVA_OPTIONS, "")]
    named += [defaults.get(conf, "") for conf in (_JAVA_OPTIONS, _DEFAULT_JAVA_OPTIONS)]
    named += [os.environ.get(name, "") for name in _JAVA_OPTIONS_OF_ENVIRONMENT]
    if not any(_NAMES_COLLECTOR.search(options) for options in named):
        builder.config(_JAVA_OPTIONS, f"{own} {COLLECTOR_OPTION}".strip())
    return builder


def is_submitted() -> bool:
    """Whether spark-submit has started this process."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def submitted_session(confs: Mapping[str, str] | None = None) -> SparkSession:
    """The session of the application that spark-submit has started, ready for Delta.

    Name, master, cores, memory, jars and logs are those of spark-submit; the preset is added.

    Args:
        confs: more Spark confs; they win over spark-submit's.

    Raises:
        ConfigError: when spark-submit was not given Delta's jars.
    """
    SparkContext._ensure_initialized()  # from here on SparkConf has what spark-submit was given
    builder = small_batches(SparkSession.builder.config(conf=SparkConf()).config(map=dict(confs or {})))
    jvm: Any = SparkContext._jvm
    if UTC_OPTION in _options(builder).get(_JAVA_OPTIONS, "").split():  # which a running JVM does not read
        jvm.java.lang.System.setProperty("user.timezone", "UTC")
        jvm.java.util.TimeZone.setDefault(jvm.java.util.TimeZone.getTimeZone("UTC"))
    builder.config(map=dict(log_store_of_jvm(jvm, _options(builder))))
    session = builder.getOrCreate()
    preflight.check_session(session)
    return session


def _start_quietly(builder: SparkSession.Builder) -> SparkSession:
    if SparkContext._gateway is not None:  # the JVM runs already: there is nothing to keep quiet
        return builder.getOrCreate()
    confs = _options(builder).items()
    # As arguments of the JVM they would stand in `ps`; the session gets all of them when it is made.
    conf = SparkConf(loadDefaults=False).setAll([(name, value) for name, value in confs if not _SECRET.search(name)])
    # Ivy greets on stdout as well when it is given a settings file.
    with _JvmOutput("stdout") as stdout, _JvmOutput("stderr") as stderr:
        pipes = {"stdout": stdout.write_end, "stderr": stderr.write_end}
        try:
            gateway = launch_gateway(conf, popen_kwargs=pipes)  # type: ignore[no-untyped-call]
        except PySparkRuntimeError as err:  # JAVA_GATEWAY_EXITED
            raise preflight.failed_start(stderr.text_to_the_end(), conf.get(PACKAGES) or "") from err
        SparkContext._ensure_initialized(gateway=gateway, conf=conf)
        if _options(builder).get(JARS):  # with the downloads, which the builder's value would replace (PySpark 4.2)
            builder.config(JARS, SparkConf().get(JARS))
        session = builder.getOrCreate()
    tell(_log.debug, "spark_started", app_name=session.sparkContext.appName, jvm_stderr=stderr.text())
    return session


class _JvmOutput:
    """One output of a JVM: captured inside the `with` block, passed on to the same output of this process after it.

    The JVM has the write end for its lifetime, so the pipe is read for as long: a full pipe would stop the JVM.
    """

    def __init__(self, output: Literal["stdout", "stderr"]) -> None:
        self._output = output
        self._read_end, self.write_end = os.pipe()
        self._lines: list[str] = []
        self._captures = True
        self._open = True
        self._lock = threading.Lock()
        self._pump = threading.Thread(target=self._forward, name=f"stream-merge-jvm-{output}", daemon=True)

    def __enter__(self) -> _JvmOutput:
        self._pump.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leave_to_jvm()
        self._capture(False)
        # A thread that holds sys.stderr while the interpreter ends aborts it (CPython 3.11 to 3.13).
        atexit.register(self._capture, True)

    def text(self) -> str:
        """The captured output."""
        with self._lock:
            return "".join(self._lines)

    def text_to_the_end(self) -> str:
        """The whole output of a JVM that has ended."""
        self._leave_to_jvm()
        self._pump.join(timeout=5)
        return self.text()

    def _capture(self, captures: bool) -> None:
        with self._lock:
            self._captures = captures

    def _leave_to_jvm(self) -> None:
        """Close our copy of the write end, so that the pipe ends with the JVM."""
        if self._open:
            os.close(self.write_end)
            self._open = False

    def _forward(self) -> None:
        with os.fdopen(self._read_end, errors="replace") as lines:
            for line in lines:
                with self._lock:
                    if self._captures:
                        self._lines.append(line)
                    else:
                        self._pass_on(line)

    def _pass_on(self, line: str) -> None:
        # What sys.stderr is now, not descriptor 2: progress displays put their own there. It can be None or closed.
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream = getattr(sys, self._output)
            stream.write(line)
            stream.flush()


def _run_workers_like_this_process(builder: SparkSession.Builder) -> None:
    """Set `PYSPARK_PYTHON` where workers run locally: without it they are the PATH's `python3`.

    PySpark (4.2) started by plain `python` reads only the environment, not `spark.pyspark.python`.
    """
    if is_submitted() or "--master" in os.environ.get("PYSPARK_SUBMIT_ARGS", ""):
        master = _options(builder).get(_MASTER, "")
    else:
        master = _present(builder, _MASTER) or os.environ.get("MASTER") or "local[*]"
    if master.startswith("local"):
        os.environ.setdefault("PYSPARK_PYTHON", _present(builder, "spark.pyspark.python") or sys.executable)


def _options(builder: SparkSession.Builder) -> dict[str, str]:
    """The builder's options; PySpark 4.2 has no public way to read them."""
    return {conf: str(value) for conf, value in builder._options.items() if value is not None}


def _present(builder: SparkSession.Builder, conf: str) -> str | None:
    """The value on the builder, else in the session that it would return, else for all sessions."""
    own = _options(builder).get(conf)
    if own is not None:
        return own
    running = SparkSession._instantiatedSession
    if running is None or running._sc._jsc is None:
        return spark_defaults().get(conf)
    return running.conf.get(conf, None)
