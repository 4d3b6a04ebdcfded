"""What Debezium says about an event (Debezium 3.4), in whatever envelope it says it."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

SNAPSHOT_READS = frozenset(
    {True, "true", "first", "first_in_data_collection", "last_in_data_collection", "last", "incremental"}
)
"""Values of `source.snapshot` in initial, blocking and incremental snapshots."""


def tells_snapshot(about: pa.StructType, name: str) -> bool:
    """Whether a field, where it is there, says as connectors do who has read an event."""
    types = [field.type for field in about if field.name == name]
    return set(types) <= {pa.null(), pa.string(), pa.bool_()}


def are_snapshot_reads(about: pa.StructArray, name: str) -> pa.BooleanArray:
    """Which events a snapshot has read, by a field of what is said about them."""
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
