"""`Layout`: which columns of the source are stored where, under which sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import AtomicType, BinaryType, DataType, StringType, StructField, StructType

from stream_merge.model import names
from stream_merge.shapes.widening import TypeChange
from stream_merge.spark import columns

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredColumn:
    """One column of the source that the target stores."""

    name: str
    """Name in the target; its spelling wins."""
    source_name: str
    source_type: DataType
    field: StructField
    """Name, type and metadata as stored; with schema evolution new nested fields and wider types included."""

    @property
    def dtype(self) -> DataType:
        """The stored type."""
        return self.field.dataType

    @property
    def is_stored_as_it_is(self) -> bool:
        """Whether the source's values have the stored type."""
        return columns.nullable(self.source_type) == columns.nullable(self.dtype)

    @property
    def lacks_fields(self) -> bool:
        """Whether the source's struct lacks stored fields: an update keeps them, in an insert they are NULL."""
        return columns.lacks_fields(self.source_type, self.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class EventColumn:
    """One column of the source on its way to the merge."""

    name: str
    """In the source."""
    travels_as: str
    """The stored column where that is the same, else a reserved name."""
    dtype: DataType


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeEvents:
    """What travels beside the stored columns, for clauses that may name any column of the source."""

    columns: tuple[EventColumn, ...]
    """All of the source's, in its order."""
    stored_as: Mapping[str, str]
    """Stored column -> what its value is called beside the source's columns."""
    is_ordered: bool
    """Whether a sequence orders a key's events."""

    @property
    def carried(self) -> tuple[EventColumn, ...]:
        """The columns that no stored column holds."""
        stored = set(self.stored_as)
        return tuple(column for column in self.columns if column.travels_as not in stored)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Layout:
    """How a batch's columns map onto the target."""

    stored: tuple[StoredColumn, ...]
    """In the source's order."""
    keys: tuple[str, ...]
    """Key columns, in the target's spelling."""
    sequence_fields: tuple[StructField, ...]
    """Components of the sequence, compared left to right, named c1, c2, …"""
    sequence_columns: tuple[str, ...] | None
    """Stored columns that are the sequence; empty where it is not stored, None where the reserved column is."""
    sequence_source: tuple[Column, ...]
    """Components of the sequence as expressions over the source."""
    deletes: Column | None
    """Condition over the source; None when there are no deletes."""
    new_columns: tuple[str, ...]
    """Columns and nested fields that this batch would add to the target."""
    type_changes: tuple[TypeChange, ...]
    """What has to be widened in the target before this batch is merged."""
    definition: str
    """The sequence definition as recorded with the table (JSON)."""
    case_sensitive: bool
    """Whether names are compared with case (`spark.sql.caseSensitive`)."""
    whole: WholeEvents | None = None
    """None: events are merged by their stored columns alone."""
    concerns_missing: bool = False
    """Whether rows whose key no event has are concerned."""
    is_whole: bool = False
    """Whether a batch is a full copy of the table, with each key once."""
    evolves: bool = False
    """Whether the merge runs with schema evolution: for the batch's columns, or because clauses rely on it."""
    beside: tuple[StructField, ...] = ()
    """Columns of the target that the source lacks and the shape needs."""
    texts_in_partitions: tuple[str, ...] = ()
    """Keys that are partition columns of text or binary: Delta does not store each of their values."""
    _built: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def is_indifferent_to_columns(self) -> bool:
        """Whether columns that another writer adds meanwhile do not change what Delta stores."""
        return (
            not self.new_columns
            and not self.type_changes
            and all(isinstance(column.dtype, AtomicType) for column in self.stored)
        )

    def once(self, name: str, build: Callable[[], T]) -> T:
        """The value of a name, built at the first call: each column operation is a call to the JVM.

        Unresolved columns belong to no frame and no session, so the next batch can use them again.
        """
        if name not in self._built:
            self._built[name] = build()
        value: T = self._built[name]
        return value

    @property
    def sequence_type(self) -> StructType:
        """Type of the sequence."""
        return StructType(list(self.sequence_fields))

    def onto(self, newer: Layout) -> Layout:
        """For events evaluated in this layout, and the target that `newer` was planned for.

        What the target's structs have gained the events lack: an update keeps it, in an insert it is NULL.
        """
        lacking = any(column.lacks_fields for column in newer.stored)
        return replace(
            self,
            stored=newer.stored,
            new_columns=newer.new_columns,
            type_changes=newer.type_changes,
            evolves=newer.evolves or lacking,
            _built={},
        )

    def in_event(self, name: str) -> str:
        """The name of a stored column's value in the events that a merge reads as `s`."""
        return name if self.whole is None else self.whole.stored_as.get(name, name)

    def as_merged(self, events: DataFrame) -> DataFrame:
        """Evaluated events as the merge reads them: whole ones under the source's column names."""
        whole = self.whole
        if whole is None:
            return events
        stored = {name: alias for name, alias in whole.stored_as.items() if names.is_reserved(alias)}
        aliased = [*((c.travels_as, c.name) for c in whole.columns), *stored.items()]
        return events.select(
            *self.once("as merged", lambda: [columns.column(name).alias(alias) for name, alias in aliased])
        )

    @property
    def key_fields(self) -> tuple[StructField, ...]:
        """The key columns as stored."""
        by_name = {column.name: column.field for column in self.stored}
        return tuple(by_name[key] for key in self.keys)

    @property
    def target_fields(self) -> tuple[StructField, ...]:
        """The columns of a target that is created for this layout."""
        fields = (*(StructField(c.name, c.dtype) for c in self.stored), *self.beside)
        if self.sequence_columns is None:
            fields += (StructField(names.SEQUENCE_COLUMN, self.sequence_type),)
        return fields

    def target_sequence(self, frame: str) -> Column:
        """The stored sequence of a target row, in the batch's types."""
        if self.sequence_columns is None:
            return columns.column(names.SEQUENCE_COLUMN, frame)
        parts = zip(self.sequence_columns, self.sequence_fields, strict=True)
        return F.struct(*(columns.column(name, frame).alias(field.name) for name, field in parts))

    @property
    def stored_values(self) -> list[Column]:
        """The stored columns over the source, in the target's names and types."""
        return [columns.as_stored_text(_conformed(c), c.field).alias(c.name) for c in self.stored]


def _conformed(stored: StoredColumn) -> Column:
    value = columns.conform(columns.column(stored.source_name), stored.source_type, stored.dtype)
    return value if stored.source_type == stored.dtype else value.cast(columns.nullable(stored.dtype))


def texts_in_partitions(
    stored: Sequence[StoredColumn], keys: Sequence[str], partition_columns: Sequence[str], *, case_sensitive: bool
) -> tuple[str, ...]:
    """The keys whose values are written into partitions as texts."""
    types = {column.name: column.field.dataType for column in stored}
    resolved = [columns.resolve(name, keys, case_sensitive=case_sensitive) for name in partition_columns]
    return tuple(key for key in resolved if key is not None and isinstance(types[key], StringType | BinaryType))
