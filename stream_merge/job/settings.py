"""The job file: every setting, checked at once and before anything is touched."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError, model_validator
from pyspark.sql import types as T

from stream_merge.errors import ConfigError
from stream_merge.job.sequence import BY_LOG_POSITION, BY_OFFSET
from stream_merge.sources.formats import plain
from stream_merge.sources.formats.base import Format
from stream_merge.sources.formats.connect_schema import PLACEHOLDER, encoding
from stream_merge.sources.formats.debezium import DebeziumJson
from stream_merge.sources.formats.encodings import Encoding
from stream_merge.sources.formats.flattened import FlattenedJson
from stream_merge.sources.formats.plain import PlainJson
from stream_merge.sources.formats.postgres import (
    AmbiguousTypeError,
    BinaryHandling,
    DecimalHandling,
    HstoreHandling,
    IntervalHandling,
    Modes,
    TimePrecision,
    connect_schema,
)
from stream_merge.sources.formats.strict_json import UndecodableError
from stream_merge.sources.kafka import Connection, Isolation, Mechanism, Protocol, Security

_VARIABLE = re.compile(r"\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)\}")
_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>b|[kmg]i?b)?", re.IGNORECASE)
_DURATION = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>ms|s|seconds?|m|minutes?|h|hours?)?", re.IGNORECASE)
_DECIMAL = re.compile(r"decimal\((\d+),\s*(\d+)\)")
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600}


def _bytes(value: Any) -> Any:
    """`256 MiB` or a number of bytes."""
    found = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None:
        return value
    return int(float(found["number"]) * _UNITS[(found["unit"] or "b").lower()])


def _seconds(value: Any) -> Any:
    """`500 ms`, `1 second`, `5 m` or a number of seconds."""
    found = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None:
        return value
    unit = (found["unit"] or "s").lower()
    return float(found["number"]) * _SECONDS["ms" if unit == "ms" else unit[0]]


Bytes = Annotated[int, BeforeValidator(_bytes)]
Seconds = Annotated[float, BeforeValidator(_seconds)]
Names = Annotated[tuple[str, ...], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class SecuritySettings(_Model):
    """`kafka.security`: how the job proves who it is, and how it knows the broker."""

    protocol: Protocol = "PLAINTEXT"
    mechanism: Mechanism | None = None
    user: str | None = None
    password: SecretStr | None = None
    ca_file: str | None = None
    certificate_file: str | None = None
    """Private key and certificate chain in one PEM."""

    @model_validator(mode="after")
    def _belong_together(self) -> SecuritySettings:
        sasl = self.protocol.startswith("SASL")
        given = (self.mechanism, self.user, self.password)
        if sasl and None in given:
            msg = f"protocol {self.protocol} needs mechanism, user and password"
            raise ValueError(msg)
        if not sasl and any(value is not None for value in given):
            msg = f"mechanism, user and password are used with SASL_PLAINTEXT and SASL_SSL, not with {self.protocol}"
            raise ValueError(msg)
        files = (self.ca_file, self.certificate_file)
        if not self.protocol.endswith("SSL") and any(value is not None for value in files):
            msg = f"PEM files are used with SSL and SASL_SSL, not with {self.protocol}"
            raise ValueError(msg)
        missing = [name for name in files if name is not None and not Path(name).is_file()]
        if missing:
            msg = f"file(s) {missing!r} are not there"
            raise ValueError(msg)
        return self


class KafkaSettings(_Model):
    """`kafka`: the cluster."""

    bootstrap: str = Field(min_length=1)
    security: SecuritySettings = SecuritySettings()
    isolation_level: Isolation = "read_committed"

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


class MetricsSettings(_Model):
    """`metrics`: where Prometheus finds them."""

    host: str = "127.0.0.1"
    port: int = Field(default=9108, ge=0, le=65535)


class DebeziumFormat(_Model):
    """`value_format: {type: debezium}`: envelopes in JSON, as PostgreSQL's connector writes them."""

    type: Literal["debezium"] = "debezium"
    columns: Mapping[str, str] | None = None
    """Column -> PostgreSQL type, for records without a schema block."""
    types: Mapping[str, str] = {}
    """Column -> `string` or `decimal(p,s)`, for numbers with a schema block: what they are stored as instead."""
    time_precision_mode: TimePrecision | None = None
    decimal_handling_mode: DecimalHandling | None = None
    binary_handling_mode: BinaryHandling | None = None
    interval_handling_mode: IntervalHandling | None = None
    hstore_handling_mode: HstoreHandling | None = None
    money_fraction_digits: int | None = Field(default=None, ge=0, le=10)
    unavailable_value_placeholder: str = PLACEHOLDER

    @property
    def modes(self) -> Modes:
        """The connector's settings."""
        return Modes(
            time_precision=self.time_precision_mode,
            decimal_handling=self.decimal_handling_mode,
            binary_handling=self.binary_handling_mode,
            interval_handling=self.interval_handling_mode,
            hstore_handling=self.hstore_handling_mode,
            money_fraction_digits=self.money_fraction_digits,
        )

    def format(self) -> Format:
        """The decoder."""
        return DebeziumJson(
            declared=self.declared(), placeholder=self.unavailable_value_placeholder, wanted=self.wanted()
        )

    def wanted(self) -> dict[str, T.DataType]:
        """The types of `types`."""
        found: dict[str, T.DataType] = {}
        for name, declared in self.types.items():
            digits = _DECIMAL.fullmatch(declared.strip())
            if digits is not None:
                found[name] = T.DecimalType(int(digits[1]), int(digits[2]))
            elif declared.strip() == "string":
                found[name] = T.StringType()
            else:
                msg = f"types: {name!r} is {declared!r}; it can be 'string' or 'decimal(p,s)'"
                raise ValueError(msg)
        return found

    @property
    def ordering(self) -> str:
        """Name of the sequence's definition, recorded with each commit."""
        return BY_LOG_POSITION

    def declared(self) -> Mapping[str, Encoding] | None:
        """How the columns are written in records without a schema block."""
        if self.columns is None:
            return None
        return {
            name: encoding(connect_schema(column, self.modes), placeholder=self.unavailable_value_placeholder)
            for name, column in self.columns.items()
        }

    @model_validator(mode="after")
    def _say_how_values_are_written(self) -> Self:
        problems = []
        self.wanted()
        for name, declared in (self.columns or {}).items():
            try:
                connect_schema(declared, self.modes)
            except AmbiguousTypeError as err:
                problems.append(f"column {name!r}: {err}")
        if problems:
            raise ValueError("; ".join(problems))
        return self


class FlattenedFormat(DebeziumFormat):
    """`value_format: {type: flattened}`: rows of Debezium's ExtractNewRecordState."""

    type: Literal["flattened"] = "flattened"  # type: ignore[assignment]
    add_fields_prefix: str = Field(default="__", min_length=1)
    position: Literal["lsn", "offset"] = "lsn"
    """What orders the events of a key; "offset" is for topics whose keys stay in their partitions."""

    def format(self) -> Format:
        """The decoder."""
        return FlattenedJson(
            declared=self.declared(),
            placeholder=self.unavailable_value_placeholder,
            wanted=self.wanted(),
            prefix=self.add_fields_prefix,
            ordered_by_offset=self.position == "offset",
        )

    @property
    def ordering(self) -> str:
        """Name of the sequence's definition, recorded with each commit."""
        return BY_LOG_POSITION if self.position == "lsn" else BY_OFFSET


class JsonFormat(_Model):
    """`value_format: {type: json}`: objects whose fields are the columns."""

    type: Literal["json"]
    columns: Mapping[str, str] = Field(min_length=1)
    """Column -> Spark type."""
    position: str | None = None
    """Integer column that orders the events of a key; None: Kafka's order."""
    deletes: Mapping[str, str | int | bool] | None = Field(default=None, min_length=1, max_length=1)
    """Field -> value that makes an event a delete."""

    def format(self) -> Format:
        """The decoder."""
        return PlainJson(
            declared={name: plain.encoding(declared) for name, declared in self.columns.items()},
            position=self.position,
            deletes=None if self.deletes is None else next(iter(self.deletes.items())),
        )

    @property
    def ordering(self) -> str:
        """Name of the sequence's definition, recorded with each commit."""
        return BY_OFFSET if self.position is None else f"column/1:{self.position}"

    @model_validator(mode="after")
    def _has_types(self) -> JsonFormat:
        problems = []
        for name, declared in self.columns.items():
            try:
                plain.encoding(declared)
            except UndecodableError as err:
                problems.append(f"column {name!r}: {err}")
        if self.position is not None and self.position not in self.columns:
            problems.append(f"position names {self.position!r}, which columns does not declare")
        if problems:
            raise ValueError("; ".join(problems))
        return self


ValueFormat = Annotated[DebeziumFormat | FlattenedFormat | JsonFormat, Field(discriminator="type")]


class Limits(_Model):
    """`limits`: what a single micro-batch may take."""

    max_events_per_batch: int = Field(default=100_000, ge=1)
    """Counted by offsets."""
    max_value_bytes: Bytes = Field(default=16 * 2**20, ge=1)
    """A larger record is undecodable."""
    max_quarantine_share: float = Field(default=0.5, ge=0, le=1)
    """A batch of 1,000 or more records of which more is undecodable stops the job: the settings are wrong."""
    max_position_regression: Bytes = Field(default=256 * 2**20, ge=0)
    """How far behind the highest position a new event may be before the source counts as another one; bytes of WAL."""


class QuerySettings(_Model):
    """One of `queries`: one topic into one table."""

    name: str = Field(min_length=1)
    topic: Names = Field(min_length=1)
    value_format: ValueFormat = DebeziumFormat()
    target: str = Field(min_length=1)
    keys: Names = Field(min_length=1)
    checkpoint: str = Field(min_length=1)
    trigger: Seconds = Field(default=1.0, ge=0)
    """Least time between the starts of two micro-batches."""
    start: Literal["earliest", "latest"] | datetime | Mapping[int, int] | None = None
    """Where a new checkpoint starts: a time, or offsets by partition. None: earliest."""
    epoch: int = Field(default=0, ge=0)
    unchanged: Literal["update", "skip"] = "update"
    on_truncate: Literal["stop", "ignore"] = "stop"
    on_data_loss: Literal["stop", "continue"] = "stop"
    unavailable: Literal["quarantine", "null", "fail"] = "quarantine"
    schema_evolution: bool = True
    engine: Literal["auto", "spark", "native"] = "auto"
    group: str | None = None
    """Consumer group that shows what is merged to ordinary lag tools; None: `stream-merge-<name>`. "" for none."""
    tombstone_retention: Seconds | None = Field(default=None, gt=0)
    limits: Limits = Limits()

    @model_validator(mode="after")
    def _partitions_of_one_topic(self) -> QuerySettings:
        if isinstance(self.start, Mapping) and len(self.topic) > 1:
            msg = "offsets by partition are for a single topic; start several topics at a time"
            raise ValueError(msg)
        return self


class JobSettings(_Model):
    """A whole job file."""

    kafka: KafkaSettings
    metrics: MetricsSettings = MetricsSettings()
    queries: tuple[QuerySettings, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _apart(self) -> JobSettings:
        for what in ("name", "target", "checkpoint"):
            values = [getattr(query, what) for query in self.queries]
            twice = sorted({value for value in values if values.count(value) > 1})
            if twice:
                msg = f"several queries have the same {what}: {twice!r}; give each its own"
                raise ValueError(msg)
        return self


def load(path: str | Path, *, environment: Mapping[str, str] | None = None) -> JobSettings:
    """Read a job file.

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
        msg = f"job file {str(path)!r} cannot be read: {err.strerror}"
        raise ConfigError(msg) from err
    except (yaml.YAMLError, UnicodeDecodeError) as err:
        msg = f"job file {str(path)!r} is not YAML: {' '.join(str(err).split())}"
        raise ConfigError(msg) from err
    if not isinstance(found, dict):
        msg = f"job file {str(path)!r} holds no settings; it starts with 'kafka:' and 'queries:'"
        raise ConfigError(msg)
    missing: list[str] = []
    filled = _filled(found, os.environ if environment is None else environment, missing)
    defaults = filled.pop("defaults", None) or {}
    problems = [f"${{{name}}} is not set in the environment" for name in dict.fromkeys(missing)]
    if isinstance(defaults, dict) and isinstance(filled.get("queries"), list):
        filled["queries"] = [{**defaults, **q} if isinstance(q, dict) else q for q in filled["queries"]]
    elif not isinstance(defaults, dict):
        problems.append("defaults: holds no settings of queries")
    try:
        settings = JobSettings.model_validate(filled)
    except ValidationError as err:
        found = err.errors(include_url=False, include_input=False)
        is_counted = len(found) > 1  # a list whose entries are refused counts as too short as well
        problems += [_problem(error) for error in found if not (is_counted and error["type"] == "too_short")]
    if problems:
        raise ConfigError([f"{path}: {problem}" for problem in problems])
    return settings


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


def _problem(error: Mapping[str, Any]) -> str:
    place = ".".join(str(part) for part in error["loc"])
    said = str(error["msg"]).removeprefix("Value error, ").replace("valid tuple", "list")
    if error["type"] == "extra_forbidden":
        said = "is not a setting"
    elif error["type"] == "missing":
        said = "is missing"
    return f"{place}: {said}" if place else said
