"""What an error says about a job: who has to do something before it can go on, and whether it can be tried again."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from enum import Enum

from kafka.errors import KafkaError

from stream_merge.errors import CommitConflictError, CommitStateUnknownError, ConfigError, HeldError, StreamMergeError
from stream_merge.jobs.watch.queries import QueryFailedError
from stream_merge.sources.kafka import connection
from stream_merge.spark import environment
from stream_merge.spark.errors import is_of_cluster, java_causes, with_causes
from stream_merge.spark.versions import captured

_OUTAGES = (
    "org.apache.kafka.common.errors.TimeoutException",
    "org.apache.kafka.common.errors.DisconnectException",
    "org.apache.kafka.common.errors.NetworkException",
    "org.apache.kafka.common.errors.RetriableException",
    "org.apache.kafka.common.errors.UnknownTopicOrPartitionException",
    "org.apache.kafka.common.errors.TopicAuthorizationException",
    "org.apache.kafka.common.KafkaException",
    "java.util.concurrent.TimeoutException",
)
"""Java errors of a broker that is away, or does not show the job a topic right now."""
_REFUSALS = (
    "org.apache.kafka.common.errors.SaslAuthenticationException",
    "org.apache.kafka.common.errors.SslAuthenticationException",
    "org.apache.kafka.common.errors.UnsupportedSaslMechanismException",
    "org.apache.kafka.common.errors.InvalidConfigurationException",
)
"""Java errors of a client that is not let in, does not trust the broker, or cannot read its own PEM files."""
_REPORT_OF_SOURCE = "org.apache.spark.sql.kafka010.KafkaMicroBatchStream$.metrics("
_JAVA_CLASS = re.compile(r"^[\w.$]+(Exception|Error): ")


class Verdict(Enum):
    """What has to change before the job can go on; the value is the exit code."""

    NOTHING = 0
    CONFIGURATION = 2
    DATA = 3
    AGAIN = 4


_WORST_FIRST = (Verdict.DATA, Verdict.CONFIGURATION, Verdict.AGAIN, Verdict.NOTHING)
"""Whoever restarts jobs that ended with 4 must not do so while a query waits for a person."""


def worst(errors: Iterable[Exception]) -> Verdict:
    """Of several queries."""
    return worst_of({verdict(error) for error in errors})


def worst_of(found: Collection[Verdict]) -> Verdict:
    """The one that counts for all."""
    return next((one for one in _WORST_FIRST if one in found), Verdict.NOTHING)


def verdict(error: Exception) -> Verdict:
    """What has to change after an error."""
    if environment.said(error) is None and environment.away(error) is not None:
        return Verdict.AGAIN
    if isinstance(error, HeldError | CommitConflictError | CommitStateUnknownError):
        return Verdict.AGAIN
    if isinstance(error, ConfigError):
        return Verdict.CONFIGURATION
    if environment.said(error) is not None:
        return Verdict.CONFIGURATION
    if is_outage(error) or is_of_cluster(error):
        return Verdict.AGAIN
    return Verdict.DATA if isinstance(error, StreamMergeError) else Verdict.AGAIN


def is_outage(error: BaseException) -> bool:
    """Whether the broker was away: the same offsets can be read later."""
    return _comes_from(error, lambda one: isinstance(one, KafkaError | TimeoutError | ConnectionError), _OUTAGES)


def is_refusal(error: BaseException) -> bool:
    """Whether the broker was there and one side did not accept the other's password or certificate."""
    is_told = any(said.startswith(_REFUSALS) for said in _told(error))
    return is_told or _comes_from(error, connection.is_refusal, _REFUSALS)


def is_of_report(error: BaseException) -> bool:
    """Whether Spark failed when it reported on a batch that it had recorded: the query goes on behind it.

    Kafka's source of Spark 4.1.0 and 4.1.1 does so once, where the first batch of a query comes again: what it reports
    is set when a batch is planned, which this one was before the restart (SPARK-57438).
    """
    return any(_REPORT_OF_SOURCE in str(captured(one, "stackTrace")) for one in with_causes(error))


def _comes_from(error: BaseException, is_it: Callable[[BaseException], bool], class_names: tuple[str, ...]) -> bool:
    """Whether an error or one of its causes is of a kind, in Python or by the name of its Java class."""
    found: BaseException | None = error
    while found is not None:
        if is_it(found):
            return True
        if any(class_name in class_names for class_name, _ in java_causes(found)):
            return True
        if isinstance(found, QueryFailedError) and any(name in found.trace for name in class_names):
            return True
        found = found.__cause__
    return False


def refused(query: str, error: Exception) -> ConfigError:
    """The error that a query ends with when the broker does not let it in, or is not trusted."""
    msg = (
        f"[BROKER_REFUSED] query {query!r} and the broker do not accept each other: {_reason(error)}; correct"
        " 'kafka.security' in the job file, or the broker's users and certificates"
    )
    said = ConfigError(msg)
    said.__cause__ = error
    return said


def _reason(error: Exception) -> str:
    """What the refusal and its causes say, on one line."""
    said = [error.reason if isinstance(error, QueryFailedError) else connection.message(error)]
    told = list(_told(error))
    said = next((told[i:] for i, one in enumerate(told) if one.startswith(_REFUSALS)), said)
    return " ".join(": ".join(_JAVA_CLASS.sub("", one) for one in said).split())


def _told(error: BaseException) -> Iterator[str]:
    """Class and message of the Java exceptions behind an error that PySpark has no class for, outermost first."""
    for one in with_causes(error):
        said = captured(one, "desc")
        if said:
            yield str(said)
