"""Calls into Spark's JVM: classes, collections, signals, sessions and literals that have no public API.

They go through Py4J to classes that are not public API, read and run on Spark 4.2.0 with Delta 4.4.0.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from py4j.clientserver import ClientServer
from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.java_gateway import ensure_callback_server_started
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql.types import DataType, DateType, DecimalType, TimestampNTZType, TimestampType

from stream_merge.errors import ConfigError
from stream_merge.spark import versions
from stream_merge.spark.confs import WHOLE_READS


def java_class(session: SparkSession, name: str) -> Any:
    """A class by its full name: Py4J would ask the JVM for each package on the way, a millisecond in all."""
    return getattr(session.sparkContext._jvm, name)


def strings(seq: Any) -> tuple[str, ...]:
    """A Scala sequence of texts."""
    return tuple(map(str, each(seq)))


def entries(scala_map: Any) -> Iterator[tuple[Any, Any]]:
    """The entries of a Scala map."""
    iterator = scala_map.iterator()
    while iterator.hasNext():
        entry = iterator.next()
        yield entry._1(), entry._2()


def each(seq: Any) -> Iterator[Any]:
    """The elements of a Scala sequence."""
    return (seq.apply(i) for i in range(seq.size()))


def pins_threads(session: SparkSession) -> bool:
    """Whether each Python thread has a JVM thread of its own, which can hold a lock there (PYSPARK_PIN_THREAD)."""
    return isinstance(session.sparkContext._gateway, ClientServer)


def zones(session: SparkSession) -> tuple[str, str] | None:
    """The session's time zone and the JVM's, where their clocks differ."""
    read = java_class(session, "org.apache.spark.sql.catalyst.util.DateTimeUtils").getZoneId
    ours = read(session.conf.get("spark.sql.session.timeZone"))  # also +7:00, which Java's own reader refuses
    own = java_class(session, "java.time.ZoneId").systemDefault()
    return None if ours.getRules().equals(own.getRules()) else (str(ours.getId()), str(own.getId()))


@contextmanager
def active(session: SparkSession) -> Iterator[None]:
    """Make a session the active one of this thread, which Delta and catalogs use by default.

    A thread has the one of the thread that started it, or none (Delta 3.3 then fails, Delta 4.4 takes the default).
    """
    spark = java_class(session, "org.apache.spark.sql.SparkSession")
    before = spark.getActiveSession()
    spark.setActiveSession(session._jsparkSession)
    try:
        yield
    finally:
        if before.isDefined():
            spark.setActiveSession(before.get())
        else:
            spark.clearActiveSession()


def owned_session(session: SparkSession) -> SparkSession:
    """A copy of a session with its own confs, temporary views and functions (about 2 ms), which never skips files.

    `newSession` would drop confs set at run time. The current catalog and schema, which a clone lacks (Spark 4.2), are
    those of the session.
    """
    cloned = session._jsparkSession.cloneSession()
    theirs, ours = (one.sessionState().catalogManager() for one in (session._jsparkSession, cloned))
    if str(theirs.currentCatalog().name()) != str(ours.currentCatalog().name()):
        ours.setCurrentCatalog(theirs.currentCatalog().name())
    if list(theirs.currentNamespace()) != list(ours.currentNamespace()):
        ours.setCurrentNamespace(theirs.currentNamespace())
    own = SparkSession(session.sparkContext, cloned)
    for conf, value in WHOLE_READS.items():
        own.conf.set(conf, value)
    return own


def in_session(df: DataFrame, session: SparkSession) -> DataFrame:
    """The same rows, planned and run under another session's confs."""
    dataset = java_class(session, versions.DATASET)
    return DataFrame(dataset.ofRows(session._jsparkSession, df._jdf.logicalPlan()), session)


def caches_nothing(session: SparkSession) -> bool:
    """Whether no frame and no table is cached (`cache`, `persist`) in any session of this process."""
    return bool(session._jsparkSession.sharedState().cacheManager().isEmpty())


def expect_classic(batch: object, *, target: str | None, batch_id: int) -> None:
    """Refuse a batch of Spark Connect, without a JVM in this process, by a ConfigError."""
    if getattr(batch, "_jdf", None) is None:
        msg = (
            "[SESSION_NOT_READY] the batch belongs to a Spark Connect session, which is not supported; run the query in"
            " a classic session (without spark.remote)"
        )
        raise ConfigError(msg, target=target, batch_id=batch_id)


def same_session(one: SparkSession, other: SparkSession) -> bool:
    """Whether two Python handles stand for one JVM session."""
    return bool(one._jsparkSession.equals(other._jsparkSession))


def exact_literal(session: SparkSession, value: object, dtype: DataType) -> Column:
    """A literal of exactly this type, without a detour through Python's or the session's time zone.

    Args:
        session: its JVM makes the literal.
        value: microseconds for timestamps with and without zone, days for dates, text for decimals, else the value.
        dtype: the column's type.
    """
    java: Any = value
    if isinstance(dtype, TimestampType | TimestampNTZType):
        java = java_class(session, "java.time.Instant").EPOCH.plus(
            value, java_class(session, "java.time.temporal.ChronoUnit").MICROS
        )
        if isinstance(dtype, TimestampNTZType):
            java = java_class(session, "java.time.LocalDateTime").ofInstant(
                java, java_class(session, "java.time.ZoneOffset").UTC
            )
    elif isinstance(dtype, DateType):
        java = java_class(session, "java.time.LocalDate").ofEpochDay(value)
    elif isinstance(dtype, DecimalType):
        java = java_class(session, "java.math.BigDecimal")(str(value))
    return Column(java_class(session, "org.apache.spark.sql.functions").lit(java)).cast(dtype)


@dataclass(frozen=True, slots=True)
class FilterTraits:
    """Properties of a filter's condition."""

    is_deterministic: bool
    has_subquery: bool
    asks_for_now: bool
    """Whether it reads the time, the user or the like, which differ from query to query."""


def filter_traits(filtered: DataFrame) -> FilterTraits:
    """Properties of the condition of a frame whose last operation is `where`; nothing is run."""
    condition = filtered._jdf.queryExecution().analyzed().condition()
    subquery = java_class(filtered.sparkSession, "org.apache.spark.sql.catalyst.expressions.SubqueryExpression")
    patterns = java_class(filtered.sparkSession, "org.apache.spark.sql.catalyst.trees.TreePattern")
    return FilterTraits(
        is_deterministic=bool(condition.deterministic()),
        has_subquery=bool(subquery.hasSubquery(condition)),
        asks_for_now=bool(condition.containsPattern(patterns.CURRENT_LIKE())),
    )


def reads_only(filtered: DataFrame, rows: DataFrame) -> bool:
    """Whether the condition of a frame whose last operation is `where` reads columns of these rows alone."""
    condition = filtered._jdf.queryExecution().analyzed().condition()
    return bool(condition.references().subsetOf(rows._jdf.queryExecution().analyzed().outputSet()))


def is_never_true(filtered: DataFrame) -> bool:
    """Whether Spark's optimizer proves that a frame has no rows; nothing is run."""
    most = filtered._jdf.queryExecution().optimizedPlan().maxRows()
    return bool(most.isDefined()) and int(most.get()) == 0


def leaf_spans(session: SparkSession, sql: str) -> list[tuple[int, int]]:
    """Start and end of each leaf of an SQL expression: columns, literals, functions without arguments."""
    spans, todo = set(), [session._jsparkSession.sessionState().sqlParser().parseExpression(sql)]
    while todo:
        node = todo.pop()
        children, origin = list(each(node.children())), node.origin()
        todo += children
        if not children and origin.startIndex().isDefined():
            spans.add((int(origin.startIndex().get()), int(origin.stopIndex().get()) + 1))
    return sorted(spans)


@contextmanager
def jvm_signals(notify: Callable[[], None], *numbers: signal.Signals) -> Iterator[None]:
    """Have the JVM pass signals to this process, instead of ending Spark at once; nothing where no JVM runs.

    Under spark-submit the JVM is the process that people and cluster managers signal; elsewhere a signal to the process
    group reaches it, too. `notify` is called in a thread of its own for each signal.
    """
    gateway = SparkContext._gateway
    if gateway is None:
        yield
        return
    ensure_callback_server_started(gateway)  # type: ignore[no-untyped-call]
    java, handler = gateway.jvm.sun.misc.Signal, _SignalHandler(notify)
    signals = [java(number.name.removeprefix("SIG")) for number in numbers]
    before = [java.handle(one, handler) for one in signals]
    try:
        yield
    finally:
        with suppress(Py4JError):  # the JVM may have ended
            for one, theirs in zip(signals, before, strict=True):
                java.handle(one, theirs)


class _SignalHandler:
    """A `sun.misc.SignalHandler` in Python."""

    def __init__(self, notify: Callable[[], None]) -> None:
        self._notify = notify

    def handle(self, _signal: Any) -> None:
        """Called by the JVM."""
        self._notify()

    class Java:
        """Read by Py4J."""

        implements = ("sun.misc.SignalHandler",)
