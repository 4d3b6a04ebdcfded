"""What every format tells about a record, before any column is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from stream_merge.sources.wire.connect_json import DECLARED
from stream_merge.sources.wire.encodings import Encoding
from stream_merge.sources.wire.keys import JsonKey, KeyFormat


class Kind(StrEnum):
    """What a record is."""

    UPSERT = "upsert"
    DELETE = "delete"
    TRUNCATE = "truncate"
    NULL_VALUE = "null_value"
    """Key without value: Kafka's tombstone. What it means depends on what came before it."""
    REDUNDANT = "redundant"
    """Key without value that repeats a delete."""
    FILTERED = "filtered"
    """Belongs to the connector, not to the table; the note says what it is."""
    UNDECODABLE = "undecodable"
    """The note says why."""
    OTHER_SCHEMA = "other_schema"
    """Written in a schema that the decoder has not been told of; the note holds it."""


HEARTBEAT, SCHEMA_CHANGE, TRANSACTION, MESSAGE = "heartbeat", "schema_change", "transaction", "message"


_NO_FIELDS: Mapping[str, Any] = MappingProxyType({})


class Read(NamedTuple):
    """A record, taken apart. A tuple, because a frozen dataclass takes three times as long to make."""

    kind: Kind
    fields: Mapping[str, Any] = _NO_FIELDS
    """JSON values of the row; for a delete those of its key."""
    schema_id: str = ""
    """Which schema they are written in; "" is the declared one."""
    position: int | None = None
    """Where the connector read it in the source's log."""
    is_snapshot: bool = False
    """Whether an initial snapshot read it."""
    source_millis: int | None = None
    """When the source committed it, milliseconds since the epoch."""
    connector: str | None = None
    """Name that the connector gives the source (`topic.prefix`)."""
    last_commit: int | None = None
    """As `Database.last_commit`."""
    note: str | None = None
    """As the kind says; of an upsert in a file the names of its fields that are not columns."""
    before: Mapping[str, Any] = _NO_FIELDS
    """JSON values of the row before an update, as far as the record tells."""


class ReadMany(NamedTuple):
    """Records in one schema, taken apart all at once: each is a row event, and `Format.read` says the same of it.

    All arrays have a row per record.
    """

    indexes: pa.Int64Array
    """Which of the given records they are, ascending."""
    schema_id: str
    is_delete: pa.BooleanArray
    image: pa.StructArray
    """The row, its columns as `Encoding.wire` says; NULL where a delete has none."""
    position: pa.Int64Array
    is_snapshot: pa.BooleanArray
    source_millis: pa.Int64Array
    connector: pa.StringArray
    last_commit: pa.Int64Array
    key_completes: bool
    """Whether the record key has the keys that the image of a delete lacks."""
    before: pa.StructArray | None = None
    """Of upserts the row before, NULL where a record does not tell; None: none of them does."""
    note: pa.StringArray | None = None
    """As `Read.note`; None: there is none."""

    @classmethod
    def upserts(cls, indexes: pa.Int64Array, image: pa.StructArray, note: pa.StringArray | None = None) -> ReadMany:
        """Rows in the declared schema, of which nothing else is known."""
        count = len(indexes)
        return cls(
            indexes=indexes,
            schema_id=DECLARED,
            is_delete=pa.repeat(pa.scalar(False), count),
            image=image,
            position=pa.repeat(pa.scalar(0, pa.int64()), count),
            is_snapshot=pa.repeat(pa.scalar(False), count),
            source_millis=pa.nulls(count, pa.int64()),
            connector=pa.nulls(count, pa.string()),
            last_commit=pa.nulls(count, pa.int64()),
            key_completes=False,
            note=note,
        )

    def where(self, mask: pa.BooleanArray) -> ReadMany:
        """Some of them."""
        return self if pc.all(mask, skip_nulls=False).as_py() else self._of(lambda values: values.filter(mask))

    def slice(self, first: int, length: int) -> ReadMany:
        """So many of them behind each other."""
        return self._of(lambda values: values.slice(first, length))

    def _of(self, part: Callable[[pa.Array], pa.Array]) -> ReadMany:
        arrays = {name: values for name, values in self._asdict().items() if isinstance(values, pa.Array)}
        return self._replace(**{name: part(values) for name, values in arrays.items()})


class Format(Protocol):
    """One way of writing change events; sent to the workers."""

    @property
    def key(self) -> KeyFormat:
        """How record keys are written."""
        ...

    @property
    def is_declared(self) -> bool:
        """Whether columns are declared for records that bring no schema: those of the schema id ""."""
        ...

    def read(self, key: bytes | None, value: bytes) -> Read:
        """Take a record apart.

        Raises:
            UndecodableError: it is not written in this format.
        """
        ...

    def read_many(self, values: pa.BinaryArray) -> Iterator[ReadMany]:
        """Take apart what is surely written as expected; the other records are left to `read`.

        Args:
            values: none of them NULL.
        """
        ...

    def encodings(self, schema_id: str) -> Mapping[str, Encoding]:
        """How the columns of a schema are written.

        Raises:
            UndecodableError: there is no such schema, or a column of it that nothing can hold.
        """
        ...


@dataclass(kw_only=True)
class Declared:
    """The part of a `Format` whose records bring no schema: columns are declared."""

    declared: Mapping[str, Encoding]
    """Column -> how it is written."""
    key: KeyFormat = field(default_factory=JsonKey)
    """How record keys are written."""

    @property
    def is_declared(self) -> bool:
        """As `Format.is_declared`: always."""
        return True

    def encodings(self, schema_id: str) -> Mapping[str, Encoding]:
        """As `Format.encodings`; there is one schema."""
        return self.declared


# -- what Debezium (3.4) says about an event, in whatever envelope --------------------------------

SNAPSHOT_READS = frozenset(
    {True, "true", "first", "first_in_data_collection", "last_in_data_collection", "last", "incremental"}
)
"""Values of `source.snapshot` in initial, blocking and incremental snapshots."""


def tells_snapshot(about: pa.StructType, name: str) -> bool:
    """Whether a field, where there is one, has a type in which connectors name snapshot reads."""
    types = [field.type for field in about if field.name == name]
    return set(types) <= {pa.null(), pa.string(), pa.bool_()}


def are_snapshot_reads(about: pa.StructArray, name: str) -> pa.BooleanArray:
    """Which events a snapshot has read, by a field of the block about them."""
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
