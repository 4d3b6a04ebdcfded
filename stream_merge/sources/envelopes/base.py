"""Formats of change events: records taken apart before any column is decoded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column
from pyspark.sql import functions as F

from stream_merge.sources.databases import DATABASES
from stream_merge.sources.databases.base import Database, LogPositions
from stream_merge.sources.wire.connect_json import DECLARED, ConnectJson
from stream_merge.sources.wire.encodings import Encoding
from stream_merge.sources.wire.keys import JsonKey, KeyFormat


class Kind(StrEnum):
    """Kind of a record."""

    UPSERT = "upsert"
    DELETE = "delete"
    TRUNCATE = "truncate"
    NULL_VALUE = "null_value"
    """Key without value, Kafka's tombstone: its meaning depends on earlier records."""
    REDUNDANT = "redundant"
    """Key without value that repeats a delete."""
    FILTERED = "filtered"
    """A record of the connector, not of the table; the note names its type."""
    UNDECODABLE = "undecodable"
    """The note has the reason."""
    OTHER_SCHEMA = "other_schema"
    """In a schema that the decoder does not know; the note has it."""


_NO_FIELDS: Mapping[str, Any] = MappingProxyType({})


class Read(NamedTuple):
    """A record, taken apart. A frozen dataclass takes three times as long to create."""

    kind: Kind
    fields: Mapping[str, Any] = _NO_FIELDS
    """JSON values of the row; for a delete those of its key."""
    schema_id: str = ""
    """Schema of the fields; "" is the declared one."""
    position: int | None = None
    """Position in the source's log."""
    is_snapshot: bool = False
    """Whether an initial snapshot read it."""
    source_millis: int | None = None
    """Commit time at the source, milliseconds since the epoch."""
    connector: str | None = None
    """Name of the source in the connector (`topic.prefix`)."""
    last_commit: int | None = None
    """`LogPosition.last_commit`."""
    server: str | None = None
    """`LogPosition.server`."""
    note: str | None = None
    """See `Kind`; of an upsert in a file the names of its fields that are not columns."""
    before: Mapping[str, Any] = _NO_FIELDS
    """JSON values of the row before an update, as far as the record has them."""


class ReadMany(NamedTuple):
    """Row events in one schema, taken apart all at once as `Format.read` does; all arrays have a row per record."""

    indexes: pa.Int64Array
    """Which of the given records they are, ascending."""
    schema_id: str
    is_delete: pa.BooleanArray
    image: pa.StructArray
    """The row, in the types of `Encoding.wire`; NULL where a delete has none."""
    position: pa.Int64Array
    is_snapshot: pa.BooleanArray
    source_millis: pa.Int64Array
    connector: pa.StringArray
    last_commit: pa.Int64Array
    server: pa.StringArray
    key_completes: bool
    """Whether the record key has the keys that the image of a delete lacks."""
    before: pa.StructArray | None = None
    """The row before an update, NULL where unknown; None: unknown for all."""
    note: pa.StringArray | None = None
    """`Read.note` of each; None: no notes."""

    @classmethod
    def upserts(cls, indexes: pa.Int64Array, image: pa.StructArray, note: pa.StringArray | None = None) -> ReadMany:
        """Rows in the declared schema without position or source."""
        count = len(indexes)
        return cls(
            indexes=indexes,
            schema_id=DECLARED,
            is_delete=pa.repeat(pa.scalar(False), count),
            image=image,
            **LogPositions.at_start(count)._asdict(),
            is_snapshot=pa.repeat(pa.scalar(False), count),
            source_millis=pa.nulls(count, pa.int64()),
            connector=pa.nulls(count, pa.string()),
            key_completes=False,
            note=note,
        )

    def where(self, mask: pa.BooleanArray) -> ReadMany:
        """The records of a mask."""
        return self if pc.all(mask, skip_nulls=False).as_py() else self._map(lambda values: values.filter(mask))

    def slice(self, first: int, length: int) -> ReadMany:
        """Consecutive records."""
        return self._map(lambda values: values.slice(first, length))

    def _map(self, part: Callable[[pa.Array], pa.Array]) -> ReadMany:
        arrays = {name: values for name, values in self._asdict().items() if isinstance(values, pa.Array)}
        return self._replace(**{name: part(values) for name, values in arrays.items()})


@dataclass(kw_only=True)
class Format(ABC):
    """One format of change events; sent to the workers."""

    key: KeyFormat = field(default_factory=JsonKey)
    """Format of record keys."""

    @property
    @abstractmethod
    def is_declared(self) -> bool:
        """Whether columns are declared for records without a schema: those of the schema id ""."""

    def texts(self) -> tuple[Column, Column] | None:
        """Record keys and values as `read` takes them, where Spark transcodes them; None: as they are."""
        key, value = self.key.text(), self.value_text()
        if key is None and value is None:
            return None
        return F.col("key") if key is None else key, F.col("value") if value is None else value

    def value_text(self) -> Column | None:
        """Record values as `read` takes them; None: as they are."""
        return None

    def registered(self, values: Iterable[bytes | None]) -> set[str] | None:
        """Ids of the registered schemas of record values; None where they are read without a registry."""
        del values
        return None

    @abstractmethod
    def read(self, key: bytes | None, value: bytes) -> Read:
        """A record, taken apart. Raises `UndecodableError`, and `UnknownSchemaError` with its schema's id."""

    @abstractmethod
    def read_many(self, values: pa.BinaryArray) -> Iterator[ReadMany]:
        """The records that surely have the expected form, taken apart; the others are left to `read`.

        Args:
            values: none of them NULL.
        """

    @abstractmethod
    def encodings(self, schema_id: str) -> Mapping[str, Encoding]:
        """Encodings of a schema's columns. Raises `UndecodableError`."""


@dataclass(kw_only=True)
class Declared(Format):
    """A format of records without schema: columns are declared."""

    declared: Mapping[str, Encoding]
    """Column -> its encoding."""

    @property
    def is_declared(self) -> bool:
        """True."""
        return True

    def encodings(self, schema_id: str) -> Mapping[str, Encoding]:
        """Encodings of the only schema."""
        return self.declared


@dataclass(kw_only=True)
class ConnectFormat(Format):
    """A format of Kafka Connect's records."""

    wire: ConnectJson
    """Unwraps records and their rows."""
    database: Database = DATABASES[0]
    """Where the changes come from."""

    def value_text(self) -> Column | None:
        """As the wire writes them."""
        return self.wire.text()

    def registered(self, values: Iterable[bytes | None]) -> set[str] | None:
        """Ids of the registered schemas of record values."""
        return self.wire.registered(values)

    @property
    def is_declared(self) -> bool:
        """Whether the job declares columns."""
        return self.wire.is_declared

    def encodings(self, schema_id: str) -> Mapping[str, Encoding]:
        """Encodings of a schema's columns."""
        return self.wire.encodings(schema_id)


# -- metadata of Debezium (3.4), in any envelope ------------------------------------------------

SNAPSHOT_READS = frozenset(
    {True, "true", "first", "first_in_data_collection", "last_in_data_collection", "last", "incremental"}
)
"""Values of `source.snapshot` in initial, blocking and incremental snapshots."""


def tells_snapshot(about: pa.StructType, name: str) -> bool:
    """Whether a field is missing, or has a type in which connectors mark snapshot reads."""
    types = [field.type for field in about if field.name == name]
    return set(types) <= {pa.null(), pa.string(), pa.bool_()}


def are_snapshot_reads(about: pa.StructArray, name: str) -> pa.BooleanArray:
    """Which events a snapshot has read, by a field of their metadata."""
    if (name, pa.bool_()) in named(about.type):
        return pc.fill_null(about.field(name), False)
    texts = [value for value in SNAPSHOT_READS if isinstance(value, str)]
    return pc.is_in(inner(about, name, pa.string()), value_set=pa.array(texts))


def inner(objects: pa.StructArray, name: str, dtype: pa.DataType) -> pa.Array:
    """A field of objects; NULL where it is of another type."""
    return objects.field(name) if (name, dtype) in named(objects.type) else pa.nulls(len(objects), dtype)


def named(struct: pa.StructType) -> set[tuple[str, pa.DataType]]:
    """The fields of an object with their types."""
    return {(field.name, field.type) for field in struct}
