"""What records without a value say: whether they repeat a delete, and in which schema their keys are written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from pyspark.sql import types as T

from stream_merge.sources.envelopes.base import Format, Kind, Read
from stream_merge.sources.wire.strict_json import UndecodableError
from stream_merge.spark.columns import holds, nullable

_OF_KEY = "key: "


class Records(NamedTuple):
    """Records that are read one by one."""

    indexes: list[int]
    """Which of the batch's they are, ascending."""
    keys: list[bytes | None]
    values: list[bytes | None]
    partitions: list[int]
    old_keys: list[bytes | None]


def mark_redundant(
    reads: list[Read],
    records: Records,
    deletes: list[tuple[int, tuple[int, bytes]]],
    back: list[tuple[int, tuple[int, bytes]]],
    deleted: set[tuple[int, bytes]],
) -> None:
    """A null-value record behind the delete of its key says the same again (Debezium's `tombstones.on.delete`).

    Not where something of the key stands between the two, be it a record that cannot be read.
    """
    said: list[tuple[int, Kind, int | None, tuple[int, bytes]]] = [
        *((i, Kind.DELETE, None, place) for i, place in deletes),
        *((i, Kind.UPSERT, None, place) for i, place in back),
    ]
    for n, (read, key) in enumerate(zip(reads, records.keys, strict=True)):
        if key is not None:
            said.append((records.indexes[n], read.kind, n, (records.partitions[n], key)))
    for _, kind, at, place in sorted(said, key=lambda one: one[0]):
        if kind is Kind.DELETE:
            deleted.add(place)
        elif place in deleted and kind is Kind.NULL_VALUE and at is not None:
            reads[at] = Read(Kind.REDUNDANT)
        elif kind in (Kind.UPSERT, Kind.UNDECODABLE, Kind.OTHER_SCHEMA):
            deleted.discard(place)


def schema_of_key(schema_id: str) -> str:
    """The note of a record in no known schema whose key brings one: of keys alone, and so no schema of rows."""
    return f"{_OF_KEY}{schema_id}"


def schemas(notes: Iterable[str | None]) -> tuple[list[str], list[str]]:
    """The schemas that records of `Kind.OTHER_SCHEMA` note, sorted: those of rows, and those of keys.

    One of keys is for topics of which no row is known yet.
    """
    said = sorted({note for note in notes if note})
    of_keys = [note.removeprefix(_OF_KEY) for note in said if note.startswith(_OF_KEY)]
    return [note for note in said if not note.startswith(_OF_KEY)], of_keys


def judge_keys(reads: list[Read], problem: Callable[[str], str | None]) -> None:
    """What becomes of null-value records whose keys bring a schema: of before an ALTER, or already of one behind it.

    By it they are read. Where the columns do not hold what it says, they may once the batch's other schemas are let in:
    another schema's. Changes `reads`.

    Args:
        reads: of a batch.
        problem: why the columns do not hold keys in a schema; empty where they do not hold its types (yet).
    """
    found: dict[str, str | None] = {}
    for i, read in enumerate(reads):
        if read.kind is not Kind.NULL_VALUE or not read.schema_id:
            continue
        if read.schema_id not in found:
            found[read.schema_id] = problem(read.schema_id)
        said = found[read.schema_id]
        if said is not None:
            reads[i] = Read(Kind.UNDECODABLE, note=said) if said else Read(Kind.OTHER_SCHEMA)


def key_problem(form: Format, columns: T.StructType, keys: Sequence[str], schema_id: str) -> str | None:
    """As `judge_keys` asks."""
    try:
        encodings = form.encodings(schema_id)
    except UndecodableError as err:
        return f"the schema of its key cannot be stored: {err}"
    return None if all(_fits(encodings[key].dtype, columns[key].dataType) for key in keys) else ""


def _fits(brought: T.DataType, column: T.DataType) -> bool:
    if isinstance(brought, T.StructType | T.ArrayType | T.MapType):
        return nullable(brought) == nullable(column)
    return holds(brought, column)
