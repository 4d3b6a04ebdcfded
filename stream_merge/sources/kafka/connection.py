"""A Kafka cluster: one description of the connection for Spark and kafka-python."""

from __future__ import annotations

import json
import logging
import re
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from kafka import KafkaAdminClient, errors
from kafka.admin import ConfigResource, ConfigResourceType, OffsetSpec
from kafka.net.compat import KafkaNetClient
from kafka.net.manager import KafkaConnectionManager
from kafka.net.selector import NetworkSelector
from kafka.protocol.consumer.offsets import IsolationLevel
from kafka.structs import OffsetAndMetadata, TopicPartition
from pyspark.sql import DataFrame, SparkSession

from stream_merge.errors import ConfigError

Protocol = Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]
Mechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]
Isolation = Literal["read_committed", "read_uncommitted"]

Offsets = dict[str, dict[int, int]]
"""topic -> partition -> offset of the next record."""

_Received = tuple[bytes, Exception | None]
"""Data of a socket, and why it has ended."""

_LOGIN_MODULES: Mapping[str, str] = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
}
_RECEIVE_BUFFER_BYTES = 4 * 2**20
"""Spark 4.2's default of 64 KiB (`KafkaSourceProvider.kafkaParamsForExecutors`) is a small part of a broker's answer:
large batches waited for it. Records per poll keep Kafka's default: more, large and compressed, exhaust the JVM."""
_ADMIN_TIMEOUT_MILLIS = 10_000
_LONGEST_BACKOFF_MILLIS = 1_000
_CLEANUP_POLICY = "cleanup.policy"


@dataclass(frozen=True, kw_only=True, slots=True)
class Security:
    """Authentication of the client and the broker."""

    protocol: Protocol = "PLAINTEXT"
    mechanism: Mechanism | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    """PEM with trusted certificates; None: those of the system."""
    certificate_file: str | None = None
    """PEM with this client's private key (PKCS #8) and certificate chain, for mutual TLS."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Connection:
    """Connection to a cluster."""

    bootstrap: str
    isolation: Isolation = "read_committed"
    security: Security = field(default_factory=Security)

    def spark_options(self) -> dict[str, str]:
        """Options of Spark 4.2's Kafka source."""
        security = self.security
        options = {
            "kafka.bootstrap.servers": self.bootstrap,
            "kafka.isolation.level": self.isolation,
            "kafka.security.protocol": security.protocol,
            "kafka.receive.buffer.bytes": str(_RECEIVE_BUFFER_BYTES),
        }
        if security.mechanism is not None:
            options["kafka.sasl.mechanism"] = security.mechanism
            options["kafka.sasl.jaas.config"] = (
                f"{_LOGIN_MODULES[security.mechanism]} required"
                f" username={_jaas(security.user)} password={_jaas(security.password)};"
            )
        if security.ca_file is not None:
            options |= {"kafka.ssl.truststore.type": "PEM", "kafka.ssl.truststore.location": security.ca_file}
        if security.certificate_file is not None:
            # By its path: the key itself as an option would be in Spark's plans.
            options |= {"kafka.ssl.keystore.type": "PEM", "kafka.ssl.keystore.location": security.certificate_file}
        return options

    def client_options(self) -> dict[str, Any]:
        """Settings of kafka-python 3's clients."""
        security = self.security
        options: dict[str, Any] = {
            "bootstrap_servers": self.bootstrap.split(","),
            "security_protocol": security.protocol,
            "request_timeout_ms": _ADMIN_TIMEOUT_MILLIS,
            "bootstrap_timeout_ms": _ADMIN_TIMEOUT_MILLIS,
            "reconnect_backoff_max_ms": _LONGEST_BACKOFF_MILLIS,
            "kafka_client": _client,
        }
        if security.mechanism is not None:
            options |= {
                "sasl_mechanism": security.mechanism,
                "sasl_plain_username": _user_name(security),
                "sasl_plain_password": security.password,
            }
        for name, value in (
            ("ssl_cafile", security.ca_file),
            ("ssl_certfile", security.certificate_file),
            ("ssl_keyfile", security.certificate_file),
        ):
            if value is not None:
                options[name] = value
        if security.certificate_file is not None:
            options["ssl_password"] = ""  # else OpenSSL asks the terminal for that of an encrypted key
        return options


@dataclass(frozen=True, kw_only=True, slots=True)
class TopicState:
    """Current state of a topic at the broker."""

    topic_id: str
    """Changes when the topic is re-created."""
    starts: dict[int, int]
    """partition -> first available offset."""
    ends: dict[int, int]
    """partition -> offset of the next record, by isolation level."""


# Below WARNING the client logs each connection, at DEBUG with the password.
logging.getLogger("kafka").setLevel(logging.WARNING)


def _holds_no_password(record: logging.LogRecord) -> bool:
    return not any(module in record.getMessage() for module in _LOGIN_MODULES.values())


# At DEBUG Py4J (0.10.9.9) logs arguments of Java methods, with the options of Spark's source.
for _name in ("py4j.clientserver", "py4j.java_gateway"):
    logging.getLogger(_name).addFilter(_holds_no_password)


_SASL = errors.IllegalSaslStateError | errors.SaslAuthenticationFailedError | errors.UnsupportedSaslMechanismError


def is_refusal(error: BaseException) -> bool:
    """Whether the broker is available and one side refused the other's authentication."""
    if isinstance(error, _SASL):
        return True
    # kafka-python 3 wraps errors of TLS; the other subclasses are lost connections.
    causes = (error, error.__context__, *error.args)
    return any(type(one) in (ssl.SSLError, ssl.SSLCertVerificationError) for one in causes)


_NAMES = re.compile(r"\A(?:\[Error \d+\] )?(?:\w+Error: )*")
"""Class names before the messages of kafka-python, some twice."""


def message(error: BaseException) -> str:
    """The message of an error of kafka-python."""
    return _NAMES.sub("", str(error))


def _explained(security: Security, error: Exception) -> str:
    """Why a connection failed, with the job file's setting to change where one is wrong."""
    text = message(error)
    if isinstance(error, errors.UnsupportedSaslMechanismError):
        return (
            f"the broker does not offer SASL mechanism {security.mechanism}; set 'kafka.security.mechanism' to one of"
            " its sasl.enabled.mechanisms"
        )
    if isinstance(error, errors.SaslAuthenticationFailedError):
        return f"{text}; check 'kafka.security.user' and 'password'"
    if isinstance(error, errors.IllegalSaslStateError):
        return f"this listener does not use SASL; set 'kafka.security.protocol' to {security.protocol[5:]}"
    is_closed = isinstance(error, errors.KafkaConnectionError) and ("socket disconnected" in text or "EOF" in text)
    if is_closed or isinstance(error, errors.InvalidReceiveError):
        return (
            f"this listener does not accept 'kafka.security.protocol: {security.protocol}'; use SASL_PLAINTEXT or"
            " SASL_SSL if it requires a login, SSL or SASL_SSL if it requires TLS"
        )
    return text


class _Manager(KafkaConnectionManager):  # type: ignore[misc]  # kafka-python ships no types
    """Stops connecting at the first refusal, with its reason.

    kafka-python 3.0.12 retries until its timeout, and drops a broker's message before a disconnect.
    """

    def __init__(self, net: NetworkSelector, **settings: Any) -> None:
        super().__init__(net, **settings)
        self._refused: Exception | None = None
        self.last_failure: Exception | None = None
        """Why the newest connection failed or was closed."""

    def get_connection(self, *args: Any, **options: Any) -> Any:
        if self._refused is not None:
            raise self._refused
        connection = super().get_connection(*args, **options)
        connection.init_future.add_errback(self._note)
        connection.close_future.add_errback(self._note)
        return connection

    async def _build_transport(self, *args: Any, **options: Any) -> Any:
        transport = await super()._build_transport(*args, **options)
        if hasattr(transport, "_sock_recv"):  # private: in another release only the reason would be lost
            transport._sock_recv = _data_before_the_end(transport._sock_recv)
        return transport

    def _note(self, error: Exception) -> None:
        self.last_failure = error
        if is_refusal(error):
            self._refused = error


def _data_before_the_end(receive: Callable[[], _Received]) -> Callable[[], _Received]:
    """Return data that came together with the end of a connection before that end."""
    ended: list[Exception] = []

    def received() -> _Received:
        if ended:
            return b"", ended[0]
        data, error = receive()
        if data and error is not None:
            ended.append(error)
            return data, None
        return data, error

    return received


def _client(**settings: Any) -> KafkaNetClient:
    net = NetworkSelector(**settings)
    return KafkaNetClient(net=net, manager=_Manager(net, **settings))


class Cluster:
    """Requests to the broker, from one thread, over one connection that is replaced after an error.

    Its methods raise `kafka.errors.KafkaError` where the broker is unavailable or refuses.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._client: KafkaAdminClient | None = None

    def topics(self, names: Sequence[str]) -> dict[str, TopicState]:
        """The state of topics, without those that do not exist."""
        level = IsolationLevel[self.connection.isolation.upper()]
        states = {}
        with self._request() as client:
            for described in client.describe_topics(list(names)):
                code = described.get("error_code")
                if code == errors.UnknownTopicOrPartitionError.errno:
                    continue
                if code:
                    raise errors.for_code(code)
                name = described["name"]
                each = [TopicPartition(name, p["partition_index"]) for p in described["partitions"]]
                ends = client.list_partition_offsets(dict.fromkeys(each, OffsetSpec.LATEST), isolation_level=level)
                starts = client.list_partition_offsets(dict.fromkeys(each, OffsetSpec.EARLIEST))
                states[name] = TopicState(
                    topic_id=str(described["topic_id"]),
                    starts={tp.partition: o.offset for tp, o in starts.items()},
                    ends={tp.partition: o.offset for tp, o in ends.items()},
                )
        return states

    def compacted(self, names: Sequence[str]) -> set[str]:
        """The topics with compaction (needs the ACL DescribeConfigs)."""
        wanted = [ConfigResource(ConfigResourceType.TOPIC, name, {_CLEANUP_POLICY: None}) for name in names]
        with self._request() as client:
            (described,) = client.describe_configs(wanted, config_filter="all").values()
        return {name for name, config in described.items() if "compact" in str(config[_CLEANUP_POLICY]["value"])}

    def commit(self, group: str, offsets: Mapping[tuple[str, int], int]) -> None:
        """Write the offsets of a consumer group without members."""
        wanted = {TopicPartition(*partition): OffsetAndMetadata(end, "", -1) for partition, end in offsets.items()}
        with self._request() as client:
            answers = client.alter_group_offsets(group, wanted)
        refused = [error for error in answers.values() if error is not errors.NoError]
        if refused:
            raise refused[0]

    @contextmanager
    def _request(self) -> Iterator[KafkaAdminClient]:
        try:
            yield self._connected()
        except Exception:
            self.close()
            raise

    def _connected(self) -> KafkaAdminClient:
        if self._client is None:
            opened: list[KafkaNetClient] = []

            def client(**settings: Any) -> KafkaNetClient:
                opened.append(_client(**settings))
                return opened[-1]

            try:
                self._client = KafkaAdminClient(**self.connection.client_options() | {"kafka_client": client})
            except Exception as err:
                for one in opened:  # kafka-python leaves its thread running
                    one.close()
                if not isinstance(err, _SASL | errors.KafkaTimeoutError):
                    raise
                last = next((one._manager.last_failure for one in opened), None) or err
                who, why = self.connection.bootstrap, _explained(self.connection.security, last)
                msg = f"{who} refuses the job: {why}" if isinstance(err, _SASL) else f"{who} does not answer: {why}"
                raise type(err)(msg) from last
        return self._client

    def close(self) -> None:
        """Close the connection; the next request opens another one."""
        client, self._client = self._client, None
        if client is not None:
            client.close()


def records(
    session: SparkSession,
    connection: Connection,
    topics: Sequence[str],
    *,
    starting_offsets: str,
    starting_timestamp_millis: int | None,
    max_records: int,
    fail_on_data_loss: bool,
) -> DataFrame:
    """The topics as a stream of at most `max_records` offsets per micro-batch.

    Without a checkpoint it starts at a timestamp, else at "earliest", "latest" or Spark's JSON of offsets.
    """
    reader = session.readStream.format("kafka").options(**connection.spark_options())
    reader = reader.option("subscribe", ",".join(topics)).option("includeHeaders", "true")
    reader = reader.option("maxOffsetsPerTrigger", str(max_records))
    reader = reader.option("failOnDataLoss", str(fail_on_data_loss).lower())
    if starting_timestamp_millis is None:
        reader = reader.option("startingOffsets", starting_offsets)
    else:
        reader = reader.option("startingTimestamp", str(starting_timestamp_millis))
        reader = reader.option("startingOffsetsByTimestampStrategy", "latest")
    try:
        return reader.load()
    except Exception as err:
        if "kafka" in str(err) and ("FAILED_TO_FIND" in str(err) or "find data source" in str(err)):
            msg = (
                "[JAR_MISSING] Spark has no Kafka connector; build the session with"
                " stream_merge.session.kafka_packages, or pass --jars to spark-submit ('stream-merge jars DIR' fetches"
                " them)"
            )
            raise ConfigError(msg) from err
        raise


def parse_offsets(text: str) -> Offsets:
    """Spark's JSON of Kafka offsets, as in its checkpoints."""
    return {topic: {int(p): int(o) for p, o in offsets.items()} for topic, offsets in json.loads(text).items()}


def _jaas(value: str | None) -> str:
    escaped = (value or "").replace("\\", "\\\\").replace('"', '\\"')
    return '"' + escaped.replace("\n", "\\n").replace("\r", "\\r") + '"'


def _user_name(security: Security) -> str | None:
    """The name for kafka-python, which does not escape the separators of SCRAM's messages."""
    if security.user is None or security.mechanism == "PLAIN":
        return security.user
    return security.user.replace("=", "=3D").replace(",", "=2C")
