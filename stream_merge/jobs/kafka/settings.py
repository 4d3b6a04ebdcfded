"""The job file: every setting, checked at once and before anything is touched."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

import yaml
from pydantic import AfterValidator, Field, PrivateAttr, SecretStr, ValidationError, model_validator
from pydantic_core import ErrorDetails
from yaml.error import MarkedYAMLError
from yaml.parser import ParserError
from yaml.scanner import ScannerError

from stream_merge import shapes
from stream_merge.errors import ConfigError, located
from stream_merge.jobs.kafka.formats import WIRES, DebeziumFormat, KeyFormatSettings, KeySettings, ValueFormat
from stream_merge.jobs.shapes import ClausesSettings, ShapeSettings, validation_problems
from stream_merge.jobs.units import (
    Bytes,
    JobPath,
    Model,
    Names,
    Retention,
    Seconds,
    Target,
    absolute_path,
    absolute_target,
)
from stream_merge.metrics.push import expect_gateway
from stream_merge.metrics.server import Access
from stream_merge.model import locations, names
from stream_merge.model.observer import Observer
from stream_merge.model.settings import Maintenance, SchemaEvolution, removed_settings
from stream_merge.model.table_ref import canonical_folder
from stream_merge.sources.envelopes.base import Format
from stream_merge.sources.kafka.connection import Connection, Isolation, Mechanism, Protocol, Security
from stream_merge.sources.schema_registry import RegistrySettings, SchemaRegistry
from stream_merge.sources.wire.connect_avro import Schemas

_GROUPS = ("key_format", "value_format", "limits", "maintenance")
_VARIABLE = re.compile(r"\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)\}")


class SecuritySettings(Model):
    """`kafka.security`: how the job proves who it is, and how it knows the broker."""

    protocol: Protocol = "PLAINTEXT"
    mechanism: Mechanism | None = None
    user: str | None = None
    password: SecretStr | None = None
    ca_file: JobPath | None = None
    certificate_file: JobPath | None = None
    """Private key and certificate chain in one PEM."""

    @model_validator(mode="after")
    def _belong_together(self) -> SecuritySettings:
        sasl = self.protocol.startswith("SASL")
        given = (self.mechanism, self.user, self.password)
        if sasl and None in given:
            msg = f"[MISSING_SETTING] protocol {self.protocol} needs mechanism, user and password"
            raise ValueError(msg)
        if not sasl and any(value is not None for value in given):
            msg = (
                "[CONFLICTING_SETTINGS] mechanism, user and password require protocol SASL_PLAINTEXT or SASL_SSL, not"
                f" {self.protocol}"
            )
            raise ValueError(msg)
        files = (self.ca_file, self.certificate_file)
        if not self.protocol.endswith("SSL") and any(value is not None for value in files):
            msg = f"[CONFLICTING_SETTINGS] PEM files require protocol SSL or SASL_SSL, not {self.protocol}"
            raise ValueError(msg)
        missing = [name for name in files if name is not None and not Path(name).is_file()]
        if missing:
            msg = f"[CANNOT_READ_FILE] file(s) {missing!r} do not exist; correct the path"
            raise ValueError(msg)
        return self


def _registry_url(url: str) -> str:
    """Refuses what is not a URL, without showing a password that it may hold."""
    try:
        parts = urlsplit(url)
        is_complete = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_complete = False
    if not is_complete:
        msg = "[INVALID_SETTING] schema_registry.url must be a URL such as https://registry:8081"
        raise ValueError(msg)
    if parts.username is not None:
        msg = "[INVALID_SETTING] schema_registry.url must not hold a user or password; set user and password"
        raise ValueError(msg)
    return url


class SchemaRegistrySettings(Model):
    """`kafka.schema_registry`: where the schemas of records in Avro are."""

    url: Annotated[str, AfterValidator(_registry_url)]
    user: str | None = None
    password: SecretStr | None = None
    token: SecretStr | None = None
    ca_file: JobPath | None = None
    certificate_file: JobPath | None = None
    """Private key and certificate chain in one PEM."""
    id_bytes: Literal[4, 8] = 4
    """Bytes of a schema's id in a record: 4, or 8 as clients of Apicurio 2 write them by default."""

    def registry(self) -> RegistrySettings:
        """For the client."""
        return RegistrySettings(
            url=self.url,
            user=self.user,
            password=None if self.password is None else self.password.get_secret_value(),
            token=None if self.token is None else self.token.get_secret_value(),
            ca_file=self.ca_file,
            certificate_file=self.certificate_file,
        )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.user is None) != (self.password is None):
            msg = "[MISSING_SETTING] schema_registry needs both user and password, or neither"
            raise ValueError(msg)
        if self.user is not None and self.token is not None:
            msg = "[CONFLICTING_SETTINGS] schema_registry takes user and password, or token; remove one of them"
            raise ValueError(msg)
        missing = [name for name in (self.ca_file, self.certificate_file) if name and not Path(name).is_file()]
        if missing:
            msg = f"[CANNOT_READ_FILE] file(s) {missing!r} do not exist; correct the path"
            raise ValueError(msg)
        return self


class KafkaSettings(Model):
    """`kafka`: the cluster."""

    bootstrap: str = Field(min_length=1)
    security: SecuritySettings = SecuritySettings()
    isolation_level: Isolation = "read_committed"
    schema_registry: SchemaRegistrySettings | None = None

    def connection(self) -> Connection:
        """The cluster, for Spark and for kafka-python."""
        given = self.security
        security = Security(
            protocol=given.protocol,
            mechanism=given.mechanism,
            user=given.user,
            password=None if given.password is None else given.password.get_secret_value(),
            ca_file=given.ca_file,
            certificate_file=given.certificate_file,
        )
        return Connection(bootstrap=self.bootstrap, isolation=self.isolation_level, security=security)


def _gateway(url: str) -> str:
    try:
        return expect_gateway(url)
    except ConfigError as err:
        raise ValueError(str(err)) from err


class MetricsSettings(Model):
    """`metrics`: where Prometheus finds them, and an orchestrator the probes."""

    host: str = Field(default="127.0.0.1", min_length=1)
    port: int = Field(default=9108, ge=0, le=65535)
    certificate_file: JobPath | None = None
    """PEM: serve HTTPS."""
    key_file: JobPath | None = None
    """PEM; None: the key is in `certificate_file`."""
    token_file: JobPath | None = None
    """Bearer token that `/metrics` then needs."""
    pushgateway: Annotated[str, AfterValidator(_gateway)] | None = None
    """URL that `run --once` pushes the metrics to when it ends."""

    def access(self) -> Access:
        """For the server."""
        return Access(certificate_file=self.certificate_file, key_file=self.key_file, token_file=self.token_file)


class LineageSettings(Model):
    """`lineage`: where OpenLineage events go."""

    url: str
    namespace: str = Field(default="stream-merge", min_length=1)
    api_key: SecretStr | None = None


class Limits(Model):
    """`limits`: what a single micro-batch may take."""

    max_events_per_batch: int = Field(default=100_000, ge=1)
    """Counted by offsets."""
    max_value_bytes: Bytes = Field(default=16 * 2**20, ge=1)
    """A larger record is undecodable."""
    max_quarantine_share: float = Field(default=0.5, ge=0, le=1)
    """A batch of 1,000 or more records of which more is undecodable stops the job: the settings are wrong."""
    max_position_regression: Bytes = Field(default=2**30, ge=0)
    """How far behind the highest position a new event may be before the source counts as another one; bytes of the
    database's log."""


class MaintenanceSettings(Model):
    """`maintenance`: the arguments of `Maintenance`."""

    optimize: bool = True
    vacuum: bool = False
    every: int = Field(default=100, ge=1)

    def maintenance(self) -> Maintenance:
        """For a sink.

        Raises:
            ConfigError: they do not fit together.
        """
        return Maintenance(**self.model_dump())

    @model_validator(mode="before")
    @classmethod
    def _refuse_removed(cls, settings: Any) -> Any:
        if isinstance(settings, Mapping) and (problems := removed_settings(settings)):
            raise ValueError("\n".join(problems))
        return settings

    @model_validator(mode="after")
    def _fits_together(self) -> MaintenanceSettings:
        try:
            self.maintenance()
        except ConfigError as err:
            raise ValueError("\n".join(err.problems)) from None
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class Beginning:
    """Where a query of a topic begins, as Spark is told."""

    offsets: str
    """`startingOffsets`: a word, or JSON by topic and partition."""
    millis: int | None = None
    """`startingTimestamp`, in the place of offsets."""

    @property
    def text(self) -> str:
        """The same for the same beginning."""
        return json.dumps([self.offsets, self.millis])


def _shape_of_changes(shape: str | ClausesSettings) -> str | ClausesSettings:
    """Refuses a shape that is not known, and one that takes a micro-batch for all rows of the table."""
    if isinstance(shape, ClausesSettings):
        if shape.shape().concerns_missing:
            msg = (
                "[SHAPE_NEEDS_FULL_COPY] a micro-batch of a topic lacks most keys of the table, so a"
                " not_matched_by_source clause would change nearly every row; remove the clause"
            )
            raise ValueError(msg)
    elif shape not in shapes.known_shapes():
        msg = f"[INVALID_SETTING] {shape!r} must be one of {', '.join(shapes.known_shapes())}, or clauses"
        raise ValueError(msg)
    elif shapes.from_name(shape).is_whole:
        msg = (
            f"[SHAPE_NEEDS_FULL_COPY] {shape!r} would delete every row that a micro-batch of a topic lacks; merge"
            " snapshots with 'stream-merge files --shape snapshot' or in Python"
        )
        raise ValueError(msg)
    return shape


class QuerySettings(Model):
    """One of `queries`: one topic into one table."""

    name: str = Field(min_length=1)
    topic: Names = Field(min_length=1)
    topic_column: str | None = None
    """Key column that the job fills with the topic's name, so that rows of several topics are told apart."""
    transactional: bool = False
    """Whether the topic is written in transactions, whose markers leave gaps between the offsets."""
    key_format: KeyFormatSettings = KeySettings()
    value_format: ValueFormat = DebeziumFormat()
    target: Target = Field(min_length=1)
    keys: Names = Field(min_length=1)
    checkpoint: Annotated[JobPath, AfterValidator(locations.hadoop_uri)] = Field(min_length=1)
    trigger: Seconds = Field(default=1.0, ge=0)
    """Least time between the starts of two micro-batches."""
    start: Literal["earliest", "latest"] | datetime | Mapping[int, int] | None = None
    """Where a new checkpoint starts: a time, or offsets by partition. None: earliest."""
    epoch: int = Field(default=0, ge=0)
    unchanged: Literal["update", "skip"] = "update"
    on_truncate: Literal["stop", "ignore"] = "stop"
    on_data_loss: Literal["stop", "continue"] = "stop"
    on_server_change: Literal["stop", "ignore"] = "stop"
    """For changes that another server wrote than those before; PostgreSQL's connector does not tell."""
    unavailable: Literal["quarantine", "null", "fail"] = "quarantine"
    schema_evolution: SchemaEvolution = True
    on_column_default: Literal["warn", "fill"] = "warn"
    """What rows from before a new column get where its schema block has a default."""
    engine: Literal["auto", "spark", "driver"] = "auto"
    table_properties: Mapping[str, str] = Field(default_factory=dict)
    """Of a target that the job creates."""
    target_filter: str | None = None
    """SQL over the row `t`: the only part of the target that is looked through for a batch's keys."""
    single_writer: bool = False
    """Promise that nobody else writes to the target, without which object stores are left to Spark."""
    shape: Annotated[ShapeSettings, AfterValidator(_shape_of_changes)] = shapes.Changes.name
    """What a batch means for the table: one of `shapes.known_shapes`, or clauses."""
    group: str | None = None
    """Consumer group that shows what is merged to ordinary lag tools; None: `stream-merge-<name>`. "" for none."""
    tombstone_retention: Retention | None = Field(default=None, gt=0)
    limits: Limits = Limits()
    maintenance: MaintenanceSettings | None = None
    _registry: SchemaRegistrySettings | None = PrivateAttr(default=None)
    """That of the job."""

    @property
    def event_keys(self) -> tuple[str, ...]:
        """The key columns that events bring along."""
        return tuple(key for key in self.keys if key != self.topic_column)

    def identity(self, query_id: str) -> str | None:
        """What its commits record, in the streaming query with this id."""
        return names.identity(query_id=query_id, app_id=None, name=self.name)

    def begins(self) -> Beginning:
        """Where a new checkpoint begins."""
        start = self.start
        if start is None or isinstance(start, str):
            return Beginning(offsets=start or "earliest")
        if isinstance(start, datetime):
            moment = start if start.tzinfo is not None else start.replace(tzinfo=UTC)
            return Beginning(offsets="earliest", millis=int(moment.timestamp() * 1000))
        by_partition = {str(partition): start[partition] for partition in sorted(start)}
        return Beginning(offsets=json.dumps({self.topic[0]: by_partition}))

    def digest(self) -> str:
        """The same for the same settings."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    @property
    def needs_registry(self) -> bool:
        """Whether its records have their schemas in a registry."""
        return any(
            WIRES[name].needs_registry for name in (self.key_format.type, self.value_format.encoding) if name in WIRES
        )

    def format(self) -> Format:
        """The decoder of its records."""
        given = self._registry
        registry = None if given is None else SchemaRegistry(given.registry())
        schemas = Schemas(registry=registry, id_bytes=4 if given is None else given.id_bytes)
        is_given = "key_format" in self.model_fields_set
        settings = self.key_format if is_given else KeySettings(type=self.value_format.encoding)
        key = settings.reader(self.event_keys, schemas)
        return self.value_format.format(key, key_completes=is_given, schemas=schemas)

    @model_validator(mode="after")
    def _fits_together(self) -> QuerySettings:
        problems = list(self._problems())
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _problems(self) -> Iterator[str]:
        if self.key_format.type == "text" and len(self.event_keys) > 1:
            yield (
                "[CONFLICTING_SETTINGS] key_format: text requires a single key column, but keys names"
                f" {len(self.event_keys)}; use json"
            )
        if self.topic_column is not None and (self.topic_column not in self.keys or not self.event_keys):
            yield f"[INVALID_SETTING] topic_column {self.topic_column!r} must be in keys, with a key of the events"
        if len(self.topic) > 1 and self.topic_column is None:
            yield (
                f"[MISSING_SETTING] equal keys of topics {list(self.topic)!r} would overwrite each other; set"
                " topic_column to a key column for the topic's name, or give each topic its own query"
            )
        if isinstance(self.start, Mapping) and len(self.topic) > 1:
            yield "[CONFLICTING_SETTINGS] start: offsets by partition require a single topic; use a time for several"


class JobSettings(Model):
    """A whole job file."""

    kafka: KafkaSettings
    metrics: MetricsSettings = MetricsSettings()
    traces: bool = False
    lineage: LineageSettings | None = None
    logs: Literal["text", "json"] = "text"
    queries: tuple[QuerySettings, ...] = Field(min_length=1)

    def observers(self, query: QuerySettings) -> list[Observer]:
        """Those of a query's micro-batches.

        Raises:
            ConfigError: the package that one needs is not installed, or its settings are wrong.
        """
        found: list[Observer] = []
        if self.traces:
            from stream_merge.observers.otel import Traces  # noqa: PLC0415  # needs the extra `otel`

            found.append(Traces())
        if self.lineage is not None:
            from stream_merge.observers.lineage import Lineage  # noqa: PLC0415  # needs the extra `lineage`

            given, broker = self.lineage, self.kafka.bootstrap.split(",")[0].strip()
            inputs = [f"kafka://{broker}/{topic}" for topic in query.topic]
            api_key = None if given.api_key is None else given.api_key.get_secret_value()
            found.append(Lineage(given.url, namespace=given.namespace, inputs=inputs, api_key=api_key))
        return found

    @model_validator(mode="after")
    def _have_registry(self) -> JobSettings:
        registry = self.kafka.schema_registry
        for query in self.queries:
            query._registry = registry
            if registry is None and query.needs_registry:
                msg = f"[MISSING_SETTING] query {query.name!r} reads Avro; set kafka.schema_registry.url"
                raise ValueError(msg)
        return self

    @model_validator(mode="after")
    def _can_be_observed(self) -> JobSettings:
        self.observers(self.queries[0])
        return self


def load(path: str | Path, *, environment: Mapping[str, str] | None = None) -> JobSettings:
    """Read a job file; its relative paths begin in its folder.

    Args:
        path: YAML.
        environment: values of `${NAME}`; None: this process's.

    Raises:
        ConfigError: every problem at once, each with its place in the file.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        found = yaml.safe_load(text)
    except OSError as err:
        msg = f"[CANNOT_READ_FILE] job file {str(path)!r} cannot be read: {err.strerror}"
        raise ConfigError(msg) from err
    except (yaml.YAMLError, UnicodeDecodeError) as err:
        msg = f"[CANNOT_READ_FILE] job file {str(path)!r} is not YAML: {_no_yaml(err)}"
        raise ConfigError(msg) from None  # its own text shows the line, which may hold a password
    if not isinstance(found, dict):
        msg = f"[MISSING_SETTING] job file {str(path)!r} must contain 'kafka:' and 'queries:'"
        raise ConfigError(msg)
    missing: list[str] = []
    filled = _filled(found, os.environ if environment is None else environment, missing)
    defaults = filled.pop("defaults", None) or {}
    problems = [f"[MISSING_SETTING] ${{{name}}} is not set in the environment" for name in dict.fromkeys(missing)]
    if isinstance(defaults, dict) and isinstance(filled.get("queries"), list):
        filled["queries"] = [_with(defaults, q) if isinstance(q, dict) else q for q in filled["queries"]]
    elif not isinstance(defaults, dict):
        problems.append("[INVALID_SETTING] defaults must be a mapping of settings of queries to values")
    queries = _queries(filled)
    folder = Path(path).parent.resolve()
    problems += _shared(queries, folder)
    try:
        settings = JobSettings.model_validate(filled, context=folder)
    except ValidationError as err:
        found = err.errors(include_url=False, include_input=False)
        for error in found:
            # A list whose entries are refused counts as too short as well.
            is_inside = [other["loc"][: len(error["loc"])] == error["loc"] for other in found if other != error]
            if error["type"] != "too_short" or not any(is_inside):
                problems += validation_problems(_by_name(error, queries))
    if problems:
        raise ConfigError([located(str(path), problem) for problem in problems])
    return settings


def _queries(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The queries before they are checked; an empty mapping for what is not one."""
    given = settings.get("queries")
    return [query if isinstance(query, dict) else {} for query in given] if isinstance(given, list) else []


def _shared(queries: Sequence[Mapping[str, Any]], folder: Path) -> Iterator[str]:
    """A problem for each name, target and checkpoint that several queries have; relative paths begin in the folder."""
    for setting, spelled in (
        ("name", str),
        ("target", lambda target: absolute_target(target, folder).canonical),
        ("checkpoint", lambda path: canonical_folder(locations.hadoop_uri(absolute_path(path, folder)))),
    ):
        values = [query[setting] for query in queries if isinstance(query.get(setting), str) and query[setting]]
        same = [spelled(value) for value in values]
        twice = sorted({value for value, one in zip(values, same, strict=True) if same.count(one) > 1})
        if twice:
            yield f"[DUPLICATE_SETTING] several queries have the same {setting}: {twice!r}; give each its own"


_UNIONS = ("schema_evolution", "shape", "start", "value_format")
"""Settings of a query behind which pydantic names the member of the union that it tried."""


def _by_name(error: ErrorDetails, queries: Sequence[Mapping[str, Any]]) -> ErrorDetails:
    """The same error with its query's name in place of the number, where no other query has that name."""
    match error["loc"]:
        case ("queries", int(number), *rest):
            if rest and rest[0] in _UNIONS:
                del rest[1:2]
            named = [query.get("name") for query in queries]
            is_known = bool(named[number]) and named.count(named[number]) == 1
            return {**error, "loc": ("queries", str(named[number]) if is_known else number, *rest)}
    return error


def _no_yaml(error: Exception) -> str:
    """Why and where a text is no YAML, without what is written there."""
    if not isinstance(error, MarkedYAMLError) or error.problem_mark is None:
        return "it contains bytes or characters that YAML does not allow"
    where = f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
    if isinstance(error, ScannerError | ParserError):
        return f"{where}: {error.problem}"
    return f"{where}: an unknown alias (*) or tag (!); quote text that begins with one"


def _with(defaults: Mapping[str, Any], query: Mapping[str, Any]) -> dict[str, Any]:
    """A query and the defaults of what it leaves open, in its groups of settings, too; not in one of another type."""
    found = {**defaults, **query}
    for name in _GROUPS:
        ours, theirs = defaults.get(name), query.get(name)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            merged = {**ours, **theirs}
            found[name] = merged if merged.get("type") == ours.get("type", merged.get("type")) else theirs
    return found


def _filled(node: Any, environment: Mapping[str, str], missing: list[str]) -> Any:
    """The same with `${NAME}` replaced in every text."""
    if isinstance(node, dict):
        return {key: _filled(value, environment, missing) for key, value in node.items()}
    if isinstance(node, list):
        return [_filled(value, environment, missing) for value in node]
    if not isinstance(node, str):
        return node

    def value_of(found: re.Match[str]) -> str:
        if found["name"] not in environment:
            missing.append(found["name"])
        return environment.get(found["name"], "")

    return _VARIABLE.sub(value_of, node)
