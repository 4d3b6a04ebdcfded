"""What differs between the databases that Debezium reads: positions in their logs, and forms of declared types."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, NoReturn

import pyarrow as pa

from stream_merge.sources.wire.connect_schema import DECIMAL, NEGATIVE_SCALES
from stream_merge.sources.wire.encodings import refuse, shown

TimePrecision = Literal["adaptive", "adaptive_time_microseconds", "connect", "isostring", "microseconds", "nanoseconds"]
DecimalHandling = Literal["precise", "double", "string"]
BigintUnsignedHandling = Literal["long", "precise"]
BinaryHandling = Literal["bytes", "base64", "base64-url-safe", "hex"]
IntervalHandling = Literal["numeric", "string"]
HstoreHandling = Literal["json", "map"]

Schema = dict[str, Any]
"""A schema as Kafka Connect's JSON converter writes it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Modes:
    """Settings of the connector, `time.precision.mode` and so on; None: not stated."""

    time_precision: TimePrecision | None = None
    decimal_handling: DecimalHandling | None = None
    bigint_unsigned_handling: BigintUnsignedHandling | None = None
    binary_handling: BinaryHandling | None = None
    interval_handling: IntervalHandling | None = None
    hstore_handling: HstoreHandling | None = None
    money_fraction_digits: int | None = None


class AmbiguousTypeError(ValueError):
    """A declared type that leaves the form of its values open; the text says what to add."""


class LogPosition(NamedTuple):
    """Position of an event in the log of its database."""

    position: int
    last_commit: int | None = None
    """Position of the last commit before the event."""
    server: str | None = None
    """The server that wrote the event, where positions are of one server; None: unknown, or of no concern."""


class LogPositions(NamedTuple):
    """`LogPosition` of many events; NULL positions where `Database.position` decides."""

    position: pa.Int64Array
    last_commit: pa.Int64Array
    server: pa.StringArray

    @classmethod
    def at_start(cls, count: int) -> LogPositions:
        """So many events at position 0."""
        zeros = pa.repeat(pa.scalar(0, pa.int64()), count)
        return cls(zeros, pa.nulls(count, pa.int64()), pa.nulls(count, pa.string()))


@dataclass(frozen=True, kw_only=True)
class Database(ABC):
    """A kind of database, as Debezium's connector of that name describes its changes; sent to the workers."""

    name: str
    """Name in the job file, and `source.connector` of events."""
    log: str
    """The log in words."""
    ordering: str
    """Name of the order of positions, recorded with each commit."""
    required: tuple[str, ...]
    """Fields of `source` without which an event has no position."""
    fields: Mapping[str, pa.DataType] = field(default_factory=dict)
    """Fields of `source` that `positions` reads, in these types."""
    metadata: frozenset[str] = frozenset()
    """All fields of `source` that other databases lack."""

    @abstractmethod
    def position(self, source: Mapping[str, Any]) -> LogPosition:
        """The position of an event, from its `source`. Raises `UndecodableError`."""

    @abstractmethod
    def positions(self, source: Mapping[str, pa.Array]) -> LogPositions:
        """`position` of each event, from `fields`."""

    @abstractmethod
    def connect_schema(self, declared: str, modes: Modes) -> Schema:
        """Debezium's schema of a column, declared as in CREATE TABLE. Raises `AmbiguousTypeError`."""

    def regression(self, highest: int, position: int) -> int:
        """How many bytes of log lie between a position and a higher one."""
        return highest - position

    def shown(self, position: int) -> str:
        """A position in words."""
        return str(position)

    def _refuse(self, name: str, source: Mapping[str, Any]) -> NoReturn:
        """Refuse an event for a field of its `source`."""
        connector = source.get("connector", self.name)
        is_other = f"; the event is from {connector!r}, which 'database' must name" if connector != self.name else ""
        refuse(f"source.{name} is {shown(source.get(name))}, not a position in {self.log}{is_other}")


class Declared(NamedTuple):
    """The parts of a declared type."""

    text: str
    name: str
    first: int | None
    """First number in parentheses."""
    second: int | None
    modes: Modes

    def mode(self, setting: str) -> Any:
        """The value of a setting of the connector. Raises `AmbiguousTypeError` where it is not stated."""
        value = getattr(self.modes, setting.removesuffix(".mode").replace(".", "_"))
        if value is None:
            msg = f"{self.text!r} depends on {setting}; set the connector's value"
            raise AmbiguousTypeError(msg)
        return value

    @property
    def time_precision(self) -> TimePrecision:
        """`time.precision.mode`."""
        mode: TimePrecision = self.mode("time.precision.mode")
        return mode

    def decimal(self, precision: int, scale: int) -> Schema:
        """A number with these digits by `decimal.handling.mode`. Raises `AmbiguousTypeError` where Delta has fewer."""
        mode = self.mode("decimal.handling.mode")
        return self.precise(precision, scale) if mode == "precise" else {"type": mode}

    def precise(self, precision: int, scale: int) -> Schema:
        """Connect's Decimal."""
        if max(precision, scale, precision - scale) > 38:  # noqa: PLR2004 - digits of Delta's widest decimal
            msg = (
                f"{self.text!r} has more digits than Delta's decimals (38); set the connector's decimal.handling.mode"
                " to string"
            )
            raise AmbiguousTypeError(msg)
        parameters = {
            "scale": str(scale if scale >= 0 else scale + NEGATIVE_SCALES),
            "connect.decimal.precision": str(precision),
        }
        return {"type": "bytes", "name": DECIMAL, "parameters": parameters}

    def binary(self) -> Schema:
        """Bytes by `binary.handling.mode`."""
        return {"type": "bytes" if self.mode("binary.handling.mode") == "bytes" else "string"}

    def bits(self) -> Schema:
        """`bit` of so many digits."""
        if self.first in (None, 1):
            return {"type": "boolean"}
        return {"type": "bytes", "name": "io.debezium.data.Bits", "parameters": {"length": str(self.first)}}

    def date(self) -> Schema:
        """A date by `time.precision.mode`."""
        return _DATES.get(self.time_precision, _DAYS)

    def time(self, *, in_millis: bool = False) -> Schema:
        """A time of day; `in_millis`: an adaptive mode writes milliseconds."""
        if in_millis:
            return {"type": "int32", "name": "io.debezium.time.Time"}
        return _TIMES.get(self.time_precision, {"type": "int64", "name": "io.debezium.time.MicroTime"})

    def timestamp(self, *, in_millis: bool) -> Schema:
        """A time without zone; `in_millis`: an adaptive mode writes milliseconds."""
        if in_millis:
            return {"type": "int64", "name": "io.debezium.time.Timestamp"}
        return _TIMESTAMPS.get(self.time_precision, {"type": "int64", "name": "io.debezium.time.MicroTimestamp"})


_DAYS: Schema = {"type": "int32", "name": "io.debezium.time.Date"}
_DATES: Mapping[str, Schema] = {
    "connect": {"type": "int32", "name": "org.apache.kafka.connect.data.Date"},
    "isostring": {"type": "string", "name": "io.debezium.time.IsoDate"},
}
_TIMES: Mapping[str, Schema] = {
    "isostring": {"type": "string", "name": "io.debezium.time.IsoTime"},
    "connect": {"type": "int32", "name": "org.apache.kafka.connect.data.Time"},
    "nanoseconds": {"type": "int64", "name": "io.debezium.time.NanoTime"},
}
_TIMESTAMPS: Mapping[str, Schema] = {
    "isostring": {"type": "string", "name": "io.debezium.time.IsoTimestamp"},
    "connect": {"type": "int64", "name": "org.apache.kafka.connect.data.Timestamp"},
    "nanoseconds": {"type": "int64", "name": "io.debezium.time.NanoTimestamp"},
}


POINT: Schema = {
    "type": "struct",
    "name": "io.debezium.data.geometry.Point",
    "fields": [
        {"field": "x", "type": "double"},
        {"field": "y", "type": "double"},
        {"field": "wkb", "type": "bytes", "optional": True},
        {"field": "srid", "type": "int32", "optional": True},
    ],
}
