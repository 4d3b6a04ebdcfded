"""Records without a value: whether they repeat a delete, and the schema of their keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pyspark.sql import types as T

from stream_merge.sources.envelopes.base import Format, Kind, Read
from stream_merge.sources.wire.strict_json import UndecodableError
from stream_merge.spark.columns import holds, nullable

_KEY = "key: "


class OneByOne(NamedTuple):
    """Records that are read one by one."""

    indexes: list[int]
    """Indexes in the batch, ascending."""
    keys: list[bytes | None]
    values: list[bytes | None]
    partitions: list[int]
    old_keys: list[bytes | None]


def mark_redundant(
    reads: list[Read],
    records: OneByOne,
    deletes: list[tuple[int, tuple[int, bytes]]],
    back: list[tuple[int, tuple[int, bytes]]],
    deleted: set[tuple[int, bytes]],
) -> None:
    """Mark null-value records that repeat the delete of their key (Debezium's `tombstones.on.delete`).

    Not where another record of the key is between the two, even an undecodable one. Changes `reads` and `deleted`.
    """
    events: list[tuple[int, Kind, int | None, tuple[int, bytes]]] = [
        *((i, Kind.DELETE, None, place) for i, place in deletes),
        *((i, Kind.UPSERT, None, place) for i, place in back),
    ]
    for n, (read, key) in enumerate(zip(reads, records.keys, strict=True)):
        if key is not None:
            events.append((records.indexes[n], read.kind, n, (records.partitions[n], key)))
    for _, kind, at, place in sorted(events, key=lambda one: one[0]):
        if kind is Kind.DELETE:
            deleted.add(place)
        elif place in deleted and kind is Kind.NULL_VALUE and at is not None:
            reads[at] = Read(Kind.REDUNDANT)
        elif kind in (Kind.UPSERT, Kind.UNDECODABLE, Kind.OTHER_SCHEMA):
            deleted.discard(place)


def key_note(schema_id: str) -> str:
    """The note of a record in no known schema whose key includes one, a schema of keys alone."""
    return f"{_KEY}{schema_id}"


def schemas(notes: Iterable[str | None]) -> tuple[list[str], list[str]]:
    """The schemas in notes of `Kind.OTHER_SCHEMA`, sorted: those of rows, and those of keys of topics without rows."""
    unique = sorted({one for note in notes if note for one in note.splitlines()})
    key_schemas = [note.removeprefix(_KEY) for note in unique if note.startswith(_KEY)]
    return [note for note in unique if not note.startswith(_KEY)], key_schemas


def judge_keys(reads: list[Read], form: Format, columns: T.StructType, keys: Sequence[str]) -> None:
    """Refuse null-value records whose keys have a schema that the columns do not hold. Changes `reads`.

    They become `OTHER_SCHEMA` where another schema of the batch may add the types.
    """
    refusals: dict[str, Read | None] = {}
    for i, read in enumerate(reads):
        if read.kind is not Kind.NULL_VALUE or not read.schema_id:
            continue
        if read.schema_id not in refusals:
            refusals[read.schema_id] = _refusal(form, columns, keys, read.schema_id)
        reads[i] = refusals[read.schema_id] or read


def _refusal(form: Format, columns: T.StructType, keys: Sequence[str], schema_id: str) -> Read | None:
    try:
        encodings = form.encodings(schema_id)
    except UndecodableError as err:
        return Read(Kind.UNDECODABLE, note=f"the schema of its key cannot be stored: {err}")
    fits = all(_fits(encodings[key].dtype, columns[key].dataType) for key in keys)
    return None if fits else Read(Kind.OTHER_SCHEMA)


def _fits(brought: T.DataType, column: T.DataType) -> bool:
    if isinstance(brought, T.StructType | T.ArrayType | T.MapType):
        return nullable(brought) == nullable(column)
    return holds(brought, column)
