"""`value_format` and `key_format`: how the records of a topic are written."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import BeforeValidator, Field, model_validator
from pyspark.sql import types as T

from stream_merge.jobs.kafka.ordering import BY_OFFSET
from stream_merge.jobs.units import Model
from stream_merge.sources.databases import DATABASES
from stream_merge.sources.databases.base import (
    AmbiguousTypeError,
    BigintUnsignedHandling,
    BinaryHandling,
    Database,
    DecimalHandling,
    HstoreHandling,
    IntervalHandling,
    Modes,
    TimePrecision,
)
from stream_merge.sources.envelopes import debezium, plain
from stream_merge.sources.envelopes.base import Format
from stream_merge.sources.envelopes.debezium import Debezium
from stream_merge.sources.envelopes.flattened import Added, Flattened
from stream_merge.sources.envelopes.plain import Plain, PlainJson
from stream_merge.sources.wire.connect_avro import AvroKey, ConnectAvro, Schemas
from stream_merge.sources.wire.connect_json import ConnectJson, RowSchema
from stream_merge.sources.wire.connect_schema import PLACEHOLDER, encoding
from stream_merge.sources.wire.encodings import Encoding
from stream_merge.sources.wire.keys import JsonKey, KeyFormat, NoKey, TextKey
from stream_merge.sources.wire.strict_json import UndecodableError

_DECIMAL = re.compile(r"decimal\((\d+),\s*(\d+)\)")
_WANTED: Mapping[str, T.DataType] = {
    "string": T.StringType(),
    "smallint": T.ShortType(),
    "int": T.IntegerType(),
    "bigint": T.LongType(),
    "double": T.DoubleType(),
}


class Wire(NamedTuple):
    """How Kafka Connect's converters write records."""

    values: Callable[..., ConnectJson]
    """Takes the schemas of the registry, and the fields of `ConnectJson` by name."""
    key: Callable[[Schemas, str | None], KeyFormat]
    """Takes the schemas of the registry, and the key column where there is just one."""
    needs_registry: bool


WIRES: Mapping[str, Wire] = {
    "json": Wire(lambda _, **fields: ConnectJson(**fields), lambda _, only: JsonKey(only=only), needs_registry=False),
    "avro": Wire(
        lambda schemas, **fields: ConnectAvro(schemas=schemas, **fields),
        lambda schemas, only: AvroKey(schemas=schemas, json=JsonKey(only=only)),
        needs_registry=True,
    ),
}
"""`encoding` -> how it is read."""

_DATABASES = {database.name: database for database in DATABASES}

if TYPE_CHECKING:
    EncodingName = str
    KeyType = str
    DatabaseName = str
else:
    EncodingName = Literal[tuple(WIRES)]
    KeyType = Literal[*WIRES, "text", "none"]
    DatabaseName = Literal[tuple(_DATABASES)]


class DebeziumFormat(Model):
    """`value_format: {type: debezium}`: envelopes of Debezium's connectors."""

    deletes_by_null_values: ClassVar[bool] = False
    """Whether null-value records may be all that tells deletes."""
    type: Literal["debezium"] = "debezium"
    database: DatabaseName = DATABASES[0].name
    """Where the changes come from, as `source.connector` names it."""
    encoding: EncodingName = "json"
    """How Connect's converter writes records: in JSON, or in Avro with a schema registry."""
    columns: Mapping[str, str] | None = None
    """Column -> type in the database, for records without a schema block."""
    types: Mapping[str, str] = {}
    """Column -> a type for numbers with a schema block: `string` or `decimal(p,s)` for a decimal, or a wider number
    than the block says (`smallint`, `int`, `bigint`, `double`, `decimal(p,s)`) for a column that is yet to be made."""
    time_precision_mode: TimePrecision | None = None
    decimal_handling_mode: DecimalHandling | None = None
    bigint_unsigned_handling_mode: BigintUnsignedHandling | None = None
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
            bigint_unsigned_handling=self.bigint_unsigned_handling_mode,
            binary_handling=self.binary_handling_mode,
            interval_handling=self.interval_handling_mode,
            hstore_handling=self.hstore_handling_mode,
            money_fraction_digits=self.money_fraction_digits,
        )

    def format(self, key: KeyFormat, *, key_completes: bool, schemas: Schemas) -> Format:
        """The decoder of records whose keys are written like that.

        Args:
            key: how they are written.
            key_completes: whether the job says so; deletes take the keys that they lack from there in any case.
            schemas: of records in Avro.
        """
        database = _DATABASES[self.database]
        wire = self.wire(debezium.row_schema, schemas, reads=debezium.reads(database))
        return Debezium(wire=wire, key=key, database=database)

    def wire(self, row_schema: RowSchema, schemas: Schemas, **reads: Mapping[str, Collection[str]]) -> ConnectJson:
        """How values are written."""
        return WIRES[self.encoding].values(
            schemas,
            row_schema=row_schema,
            declared=self.declared(),
            placeholder=self.unavailable_value_placeholder,
            wanted=self.wanted(),
            **reads,
        )

    def wanted(self) -> dict[str, T.DataType]:
        """The types of `types`."""
        found: dict[str, T.DataType] = {}
        for name, declared in self.types.items():
            digits = _DECIMAL.fullmatch(declared.strip())
            if digits is not None:
                found[name] = T.DecimalType(int(digits[1]), int(digits[2]))
            elif declared.strip() in _WANTED:
                found[name] = _WANTED[declared.strip()]
            else:
                others = ", ".join(map(repr, _WANTED))
                msg = f"[INVALID_SETTING] types: {name!r} is {declared!r}; it must be 'decimal(p,s)' or one of {others}"
                raise ValueError(msg)
        return found

    @property
    def log(self) -> Database | None:
        """The database whose log orders the events of a key; None: its log does not."""
        return _DATABASES[self.database]

    @property
    def ordering(self) -> str:
        """Name of the sequence's definition, recorded with each commit."""
        return BY_OFFSET if self.log is None else self.log.ordering

    def declared(self) -> Mapping[str, Encoding] | None:
        """How the columns are written in records without a schema block."""
        if self.columns is None:
            return None
        schemas = {name: self._schema(column) for name, column in self.columns.items()}
        return {name: encoding(one, placeholder=self.unavailable_value_placeholder) for name, one in schemas.items()}

    def _schema(self, declared: str) -> dict[str, Any]:
        return _DATABASES[self.database].connect_schema(declared, self.modes)

    @model_validator(mode="after")
    def _say_how_values_are_written(self) -> Self:
        problems = []
        if self.encoding == "avro" and self.columns is not None:
            problems.append("[CONFLICTING_SETTINGS] columns are those of the Avro schema; remove columns, or use types")
        self.wanted()
        for name, declared in (self.columns or {}).items():
            try:
                self._schema(declared)
            except AmbiguousTypeError as err:
                problems.append(f"[INVALID_SETTING] column {name!r}: {err}")
        if problems:
            raise ValueError("\n".join(problems))
        return self


class FlattenedFormat(DebeziumFormat):
    """`value_format: {type: flattened}`: rows of Debezium's ExtractNewRecordState."""

    deletes_by_null_values: ClassVar[bool] = True
    type: Literal["flattened"] = "flattened"  # type: ignore[assignment]
    add_fields_prefix: str = Field(default="__", min_length=1)
    position: Literal["log", "offset"] = "log"
    """What orders the events of a key; "offset" is for topics whose keys stay in their partitions."""

    def format(self, key: KeyFormat, *, key_completes: bool, schemas: Schemas) -> Format:
        """As `DebeziumFormat.format`."""
        database = _DATABASES[self.database]
        added = Added(prefix=self.add_fields_prefix, database=database)
        return Flattened(
            wire=self.wire(added.row_schema, schemas),
            key=key,
            database=database,
            added=added,
            ordered_by_offset=self.position == "offset",
        )

    @property
    def log(self) -> Database | None:
        """As `DebeziumFormat.log`."""
        return super().log if self.position == "log" else None


class RowsFormat(Model):
    """What formats of rows without envelope have in common."""

    position: str | None = None
    """Integer column that orders the events of a key; None: Kafka's order."""
    deletes: Mapping[str, str | int | bool] | None = Field(default=None, min_length=1, max_length=1)
    """Field -> value that makes an event a delete."""

    @property
    def deletes_by_null_values(self) -> bool:
        """As `DebeziumFormat.deletes_by_null_values`."""
        return self.deletes is None

    @property
    def marker(self) -> tuple[str, Any] | None:
        """The field and value of `deletes`."""
        return None if self.deletes is None else next(iter(self.deletes.items()))

    def wanted(self) -> dict[str, T.DataType]:
        """None: the schema says all types."""
        return {}

    @property
    def log(self) -> None:
        """As `DebeziumFormat.log`."""

    @property
    def ordering(self) -> str:
        """Name of the sequence's definition, recorded with each commit."""
        return BY_OFFSET if self.position is None else f"column/1:{self.position}"


class JsonFormat(RowsFormat):
    """`value_format: {type: json}`: objects whose fields are the columns."""

    type: Literal["json"]
    encoding: ClassVar[str] = "json"
    columns: Mapping[str, str] = Field(min_length=1)
    """Column -> Spark type."""

    def format(self, key: KeyFormat, *, key_completes: bool, schemas: Schemas) -> Format:
        """The decoder of records whose keys are written like that."""
        declared = {name: plain.declared_encoding(declared) for name, declared in self.columns.items()}
        return PlainJson(
            key=key, key_completes=key_completes, declared=declared, position=self.position, deletes=self.marker
        )

    @model_validator(mode="after")
    def _has_types(self) -> JsonFormat:
        problems = []
        for name, declared in self.columns.items():
            try:
                plain.declared_encoding(declared)
            except UndecodableError as err:
                problems.append(f"[INVALID_SETTING] column {name!r}: {err}")
        if self.position is not None and self.position not in self.columns:
            problems.append(f"[INVALID_SETTING] position {self.position!r} must be one of columns")
        if problems:
            raise ValueError("\n".join(problems))
        return self


class PlainFormat(RowsFormat):
    """`value_format: {type: plain}`: rows whose fields are the columns, of a schema that each record has."""

    type: Literal["plain"]
    encoding: EncodingName = "json"
    """JSON with a schema block, or Avro with a schema registry."""

    def format(self, key: KeyFormat, *, key_completes: bool, schemas: Schemas) -> Format:
        """The decoder of records whose keys are written like that."""
        marker = self.marker
        row_schema = partial(plain.row_schema, marker=None if marker is None else marker[0])
        wire = WIRES[self.encoding].values(schemas, row_schema=row_schema)
        return Plain(key=key, wire=wire, position=self.position, deletes=marker)


class KeySettings(Model):
    """`key_format`: how record keys are written, whatever the values are."""

    type: KeyType = "json"
    """An object with the key columns (of a single one also its value alone), in JSON or in Avro with a schema registry;
    text of the single key column, or nothing that concerns the row."""
    holds: Literal["string", "integer"] = "string"
    """What the text of `type: text` is."""

    def reader(self, keys: tuple[str, ...], schemas: Schemas) -> KeyFormat:
        """The decoder of record keys, for a table with these key columns."""
        only = keys[0] if len(keys) == 1 else None
        if self.type == "none":
            return NoKey()
        if self.type in WIRES:
            return WIRES[self.type].key(schemas, only)
        return TextKey(only=keys[0], is_integer=self.holds == "integer")

    @model_validator(mode="after")
    def _only_text_holds(self) -> Self:
        if self.type != "text" and "holds" in self.model_fields_set:
            msg = f"[CONFLICTING_SETTINGS] holds requires type text, not {self.type}; remove it"
            raise ValueError(msg)
        return self


def _written_as_json(converter: str) -> BeforeValidator:
    """Refuses records in a binary format.

    Args:
        converter: the setting of Kafka Connect that has them written in JSON.
    """

    def check(given: Any) -> Any:
        kind = given.get("type") if isinstance(given, Mapping) else given
        if kind == "protobuf":
            msg = (
                f"[UNSUPPORTED_FORMAT] {kind} is not supported yet; set {converter} in the connector to its Avro or"
                " JSON converter"
            )
            raise ValueError(msg)
        if kind == "avro" and converter == "value.converter":
            msg = "[INVALID_SETTING] 'avro' is an encoding; use type debezium, flattened or plain with encoding: avro"
            raise ValueError(msg)
        return given

    return BeforeValidator(check)


ValueFormat = Annotated[
    DebeziumFormat | FlattenedFormat | JsonFormat | PlainFormat,
    Field(discriminator="type"),
    _written_as_json("value.converter"),
]
KeyFormatSettings = Annotated[KeySettings, _written_as_json("key.converter")]
