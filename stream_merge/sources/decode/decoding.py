"""Decodes a topic's records into change events, in Spark's workers."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from stream_merge.model.logs import tell
from stream_merge.sources.decode import null_values
from stream_merge.sources.decode.bulk import Piece, pieces
from stream_merge.sources.decode.events import META, OLD_KEY, PLACE, ROW, Reading, Records, is_time
from stream_merge.sources.decode.null_values import OneByOne
from stream_merge.sources.envelopes.base import Kind, Read
from stream_merge.sources.wire import connect_schema, json_table
from stream_merge.sources.wire.connect_json import DECLARED
from stream_merge.sources.wire.encodings import Encoding, decode, folded
from stream_merge.sources.wire.json_table import FEWEST
from stream_merge.sources.wire.keys import JsonKey
from stream_merge.sources.wire.strict_json import UndecodableError, UnknownSchemaError
from stream_merge.spark.columns import holds
from stream_merge.spark.versions import arrow_type, decoded

NO_KEY = "the record has neither key nor value"

log = logging.getLogger(__name__)

_WITH_RAW = frozenset({Kind.UNDECODABLE, Kind.NULL_VALUE, Kind.OTHER_SCHEMA})
_DECODED = "decoded"
_OLD_KEY_HEADER = "__debezium.oldkey"
"""On the create of a key change (Debezium 3.4, RelationalChangeRecordEmitter)."""
_HEADER_KEY = JsonKey()
"""Kafka Connect's header converters write keys as JSON, whatever the record key's converter."""


def events(records: DataFrame, decoder: Decoder) -> DataFrame:
    """Records as events: `PLACE` and `Reading.schema`, one for each record."""
    rows = decoded(
        records,
        decoder,
        *decoder.inputs(records),
        dtype=decoder.schema,
        name=_DECODED,
        keep=PLACE,
    )
    return rows.select(*PLACE, f"{_DECODED}.*")


def _old_keys(records: DataFrame) -> Column:
    """The header of each record with the row's former key, as bytes; NULL without."""
    if "headers" in records.columns:
        return F.get(F.filter("headers", lambda header: header["key"] == _OLD_KEY_HEADER), F.lit(0))["value"]
    return F.col("raw_old_key") if "raw_old_key" in records.columns else F.lit(None).cast("binary")


@dataclass(frozen=True, kw_only=True)
class Decoder(Reading):
    """Decodes records into events; sent to the workers.

    Guarantees: one event for each record, in order. Never raises for the content of a record.
    """

    def inputs(self, records: DataFrame) -> Sequence[str | Column]:
        """What `__call__` reads of records; where Spark transcodes them, key and value once more as they are."""
        texts = self.format.texts()
        key, value = ("key", "value") if texts is None else texts
        return (key, value, "partition", _old_keys(records), *(() if texts is None else ("key", "value")))

    def __call__(self, batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        """Decode a task's record keys, values, partitions and old keys, in the order of their offsets."""
        deleted: set[tuple[int, bytes]] = set()
        for columns in batches:
            yield self.decode(Records(*columns), deleted)

    def decode(self, batch: Records, deleted: set[tuple[int, bytes]]) -> pa.StructArray:
        """Decode records: those of the expected form all at once, others one by one.

        `deleted` has partition and record key of each delete so far that is the last of its key; it is changed.
        """
        keys, values = batch.keys, batch.values
        if self.may_be_framed:
            keys, values = self.format.key.unframed(keys), json_table.unframed(values)
        raw_keys = batch.keys if batch.raw_keys is None else batch.raw_keys
        raw_values = batch.values if batch.raw_values is None else batch.raw_values
        partitions = batch.partitions
        at_once = self._at_once(keys, values)
        done = pa.concat_arrays([piece.indexes for piece in at_once] or [pa.array([], pa.int64())])
        rest = _others(len(values), done)
        old_keys = pa.nulls(len(keys), pa.binary()) if batch.old_keys is None else batch.old_keys
        columns = raw_keys, raw_values, partitions, old_keys
        records = OneByOne(rest.to_pylist(), *(column.take(rest).to_pylist() for column in columns))
        key_texts = records.keys if keys is raw_keys else keys.take(rest).to_pylist()
        texts = records.values if values is raw_values else values.take(rest).to_pylist()
        reads = [self._read(key, value) for key, value in zip(key_texts, texts, strict=True)]
        deletes = _positions([piece.indexes for piece in at_once if piece.are_deletes], raw_keys, partitions)
        gone = {key for _, key in deleted} | {key for _, (_, key) in deletes}
        gone |= {
            key for read, key in zip(reads, records.keys, strict=True) if read.kind is Kind.DELETE and key is not None
        }
        others = [piece.indexes for piece in at_once if not piece.are_deletes]
        back = _positions(others, raw_keys, partitions, only=gone)
        null_values.mark_redundant(reads, records, deletes, back, deleted)
        null_values.judge_keys(reads, self.format, self.columns, self.keys)
        events = self._events(reads, records)
        if not at_once:
            return events
        order = pc.sort_indices(pa.concat_arrays([done, rest]))
        return pa.concat_arrays([*(piece.events for piece in at_once), events]).take(order)

    def _at_once(self, keys: pa.BinaryArray, values: pa.BinaryArray) -> list[Piece]:
        try:
            return list(pieces(self, keys, values)) if len(values) >= FEWEST else []
        except Exception as err:
            # Whatever the records contain, they must not stop the query.
            tell(log.warning, "not_decoded_at_once", error=f"{type(err).__name__}: {err}")
            return []

    # -- one record --------------------------------------------------------------------------

    def _read(self, key: bytes | None, value: bytes | None) -> Read:
        try:
            return self._read_strictly(key, value)
        except UndecodableError as err:
            return Read(Kind.UNDECODABLE, note=str(err))
        except UnknownSchemaError as err:
            return self._in_unknown_schema(err, key)
        except Exception as err:
            # Whatever a record contains, it must not stop the query.
            return Read(Kind.UNDECODABLE, note=f"{type(err).__name__}: {err}")

    def _in_unknown_schema(self, err: UnknownSchemaError, key: bytes | None) -> Read:
        """Its note has the schema of the key, too: the record is read only once more."""
        schema_id, of_key = str(err), self.format.key.unread(key)
        if schema_id in self.broken:
            return Read(Kind.UNDECODABLE, note=f"its schema cannot be used: {self.broken[schema_id]}")
        notes = [] if err.of_key else [schema_id]
        if of_key is not None and of_key not in self.broken:
            notes.append(null_values.key_note(of_key))
        return Read(Kind.OTHER_SCHEMA, note="\n".join(notes))

    def _read_strictly(self, key: bytes | None, value: bytes | None) -> Read:
        if value is None:
            if key is None:
                raise UndecodableError(NO_KEY)
            schema = None if self.format.is_declared else self.format.key.schema(key)
            schema = schema and connect_schema.part(schema, self.keys)
            if not self.known:
                return Read(Kind.OTHER_SCHEMA, note=schema and null_values.key_note(schema))
            return Read(Kind.NULL_VALUE, folded(self.format.key.fields(key), set(self.keys)), schema or "")
        if len(value) > self.max_value_bytes:
            msg = f"the value has {len(value)} bytes, more than max_value_bytes ({self.max_value_bytes})"
            raise UndecodableError(msg)
        read = self.format.read(key, value)
        if read.kind not in (Kind.UPSERT, Kind.DELETE):
            return read
        self._expect_same_keys(read, key)
        if read.position is None or not -_BIGINT <= read.position < _BIGINT:
            msg = f"position {read.position} is not one of a log"
            raise UndecodableError(msg)
        if read.schema_id in self.broken:
            msg = f"its schema cannot be used: {self.broken[read.schema_id]}"
            raise UndecodableError(msg)
        if read.schema_id not in self.known:
            return Read(Kind.OTHER_SCHEMA, note=read.schema_id)
        return read

    def _expect_same_keys(self, read: Read, record_key: bytes | None) -> None:
        """Refuse an update that moves its row to another key, unless the record key has the changed columns.

        Debezium (3.4) sends a delete and a create where a column of the record key changes, else an update. `before`
        has columns of the record key only as far as the replica identity goes.
        """
        changed = [n for n in self.keys if read.before.get(n) is not None and read.before[n] != read.fields.get(n)]
        if not changed:
            return
        try:
            key_fields = folded(self.format.key.fields(record_key), set(self.keys))
        except UndecodableError:
            key_fields = {}
        changed = [name for name in changed if name not in key_fields]
        if changed:
            was, now = ({name: values.get(name) for name in changed} for values in (read.before, read.fields))
            msg = (
                f"an update changes key column(s) of its row from {was!r} to {now!r}, and as they are not in the record"
                " key, the source sends no delete of the row before; give the topic a record key with all keys"
                " (message.key.columns), or delete that row and merge this one by hand (where these are defaults of"
                " columns outside of the replica identity, as with USING INDEX, set REPLICA IDENTITY FULL)"
            )
            raise UndecodableError(msg)

    # -- all columns -------------------------------------------------------------------------

    def _events(self, reads: list[Read], records: OneByOne) -> pa.StructArray:
        missing = _Missing()
        rows = self._rows(reads, missing)
        refusable = missing.null_keys | missing.unavailable.keys()
        has_raw = [read.kind in _WITH_RAW or i in refusable for i, read in enumerate(reads)]
        columns: dict[str, list[Any]] = {
            "kind": [str(read.kind) for read in reads],
            "note": [_storable(read.note) for read in reads],
            "raw_key": _where(has_raw, records.keys),
            "raw_value": _where(has_raw, records.values),
            "raw_old_key": _where(has_raw, records.old_keys),
            "position": [read.position for read in reads],
            "last_commit": [read.last_commit for read in reads],
            "server": [_storable(read.server) for read in reads],
            "is_snapshot": [read.is_snapshot for read in reads],
            "source_millis": [read.source_millis if is_time(read.source_millis) else None for read in reads],
            "connector": [_storable(read.connector) for read in reads],
            "unavailable": [missing.unavailable.get(i) for i in range(len(reads))],
            "absent": [missing.absent.get(i) for i in range(len(reads))],
        }
        types = {field.name: arrow_type(field.dataType) for field in META.fields}
        arrays = [pa.array(columns[name], dtype) for name, dtype in types.items()]
        old = self._old_keys(reads, records.old_keys, missing)
        return pa.StructArray.from_arrays([*arrays, old, rows], names=[*types, OLD_KEY, ROW])

    def _rows(self, reads: list[Read], missing: _Missing) -> pa.StructArray:
        """The rows as one struct column; reads that do not fit become undecodable."""
        pieces: dict[str, list[pa.Array]] = {name: [] for name in self.columns.names}
        order: list[int] = []
        for group in self._groups(reads):
            order += group.indexes
            for fld in self.columns.fields:
                pieces[fld.name].append(self._column(fld, group, reads, missing))
        index = {row: i for i, row in enumerate(order)}
        indexes = pa.array([index.get(i) for i in range(len(reads))], pa.int64())
        fields = [pa.field(f.name, arrow_type(f.dataType)) for f in self.columns.fields]
        if not fields:  # no schema is known yet; from_arrays would make an array without rows
            return pa.nulls(len(reads), pa.struct([]))
        arrays = [
            pa.concat_arrays(pieces[fld.name]).take(indexes) if order else pa.nulls(len(reads), fld.type)
            for fld in fields
        ]
        return pa.StructArray.from_arrays(arrays, fields=fields)

    def _old_keys(self, reads: list[Read], old_keys: list[bytes | None], missing: _Missing) -> pa.StructArray:
        """The former keys of rows with unavailable values; NULL where one cannot be read."""
        keys: list[dict[str, Any] | None] = [None] * len(reads)
        for i in missing.unavailable:
            raw = old_keys[i]
            if raw is not None and reads[i].kind is Kind.UPSERT:
                keys[i] = self._old_key(raw, self.format.encodings(reads[i].schema_id))
        return pa.array(keys, arrow_type(self.key_columns))

    def _old_key(self, raw: bytes, encodings: Mapping[str, Encoding]) -> dict[str, Any] | None:
        try:
            fields = folded(_HEADER_KEY.fields(raw), set(self.keys))
        except UndecodableError:
            return None
        decoded = {name: decode(encodings[name], [fields.get(name)]) for name in self.keys}
        if any(one.errors for one in decoded.values()):
            return None
        return {name: one.values[0].as_py() for name, one in decoded.items()}

    def _groups(self, reads: list[Read]) -> list[_Group]:
        """Rows by schema and by whether they have all columns."""
        groups: dict[tuple[str, bool], _Group] = {}
        default_schema = self._widest_schema()
        for i, read in enumerate(reads):
            is_upsert = read.kind is Kind.UPSERT
            if not is_upsert and read.kind not in (Kind.DELETE, Kind.NULL_VALUE):
                continue
            # Keys of null-value records without schema have the form of the events around them.
            schema_id = read.schema_id or default_schema
            group = groups.get((schema_id, is_upsert))
            if group is None:
                encodings = self.format.encodings(schema_id)
                group = _Group(encodings=encodings, is_upsert=is_upsert, may_lack=schema_id == DECLARED)
                groups[schema_id, is_upsert] = group
            if is_upsert and not read.fields.keys() <= group.encodings.keys():
                more = sorted(read.fields.keys() - group.encodings.keys())
                _spoil(reads, i, f"column(s) {more!r} are in the row but in no schema")
            else:
                group.indexes.append(i)
        return list(groups.values())

    def _widest_schema(self) -> str:
        """The known schema with the widest keys, for keys without schema."""
        widest: str | None = None
        for schema_id in sorted(self.known):
            if widest is None or self._has_wider_keys(self.format.encodings(schema_id), self.format.encodings(widest)):
                widest = schema_id
        return widest or ""

    def _has_wider_keys(self, one: Mapping[str, Encoding], other: Mapping[str, Encoding]) -> bool:
        types = [(one[key].dtype, other[key].dtype) for key in self.keys if key in one and key in other]
        return any(wide != narrow for wide, narrow in types) and all(holds(narrow, wide) for wide, narrow in types)

    def _column(self, fld: T.StructField, group: _Group, reads: list[Read], missing: _Missing) -> pa.Array:
        name, dtype, indexes = fld.name, arrow_type(fld.dataType), group.indexes
        encoding, is_key = group.encodings.get(name), name in self.keys
        if encoding is None or not (group.is_upsert or is_key):
            if group.is_upsert:
                _note(missing.absent, indexes, name)
            return pa.nulls(len(indexes), dtype)
        given = [reads[i].fields.get(name, _ABSENT) for i in indexes]
        values = [None if value is _ABSENT else value for value in given]
        for n, value in enumerate(given):
            if value is _ABSENT and (is_key or not group.may_lack):
                _spoil(reads, indexes[n], f"column {name!r}: the field is missing")
            elif value is _ABSENT:
                _note(missing.absent, [indexes[n]], name)
            elif value is None:
                if is_key:
                    missing.null_keys.add(indexes[n])
                if group.is_upsert and not encoding.is_optional:
                    _spoil(reads, indexes[n], f"column {name!r}: a required field is missing")
            elif group.is_upsert and not is_key and encoding.is_unavailable(value):
                _note(missing.unavailable, [indexes[n]], name)
                values[n] = None
        decoded = decode(encoding, values)
        for n, error in decoded.errors.items():
            _spoil(reads, indexes[n], f"column {name!r}: {error}")
        return decoded.values if decoded.values.type == dtype else decoded.values.cast(dtype)


@dataclass(kw_only=True, slots=True)
class _Group:
    """Rows of a batch in one schema."""

    encodings: Mapping[str, Encoding]
    is_upsert: bool
    """Whether they have all columns; others have only their keys."""
    may_lack: bool
    """Whether a row may lack a column: the schema is not the record's own."""
    indexes: list[int] = field(default_factory=list)


_ABSENT = object()
_BIGINT = 2**63


def _others(count: int, done: pa.Int64Array) -> pa.Int64Array:
    """Indexes of the records that are not done."""
    indexes = pa.arange(0, count)
    return indexes.filter(pc.invert(pc.is_in(indexes, value_set=done)))


def _positions(
    passed: list[pa.Int64Array], keys: pa.BinaryArray, partitions: pa.Int32Array, *, only: set[bytes] | None = None
) -> list[tuple[int, tuple[int, bytes]]]:
    """Index in the batch, partition and record key of these records, where given of those with a key in `only`."""
    positions: list[tuple[int, tuple[int, bytes]]] = []
    for indexes in passed if only is None or only else []:
        wanted = indexes
        if only is not None:
            wanted = indexes.filter(pc.is_in(keys.take(indexes), value_set=pa.array(list(only), keys.type)))
        columns = (wanted, partitions.take(wanted), keys.take(wanted))
        for i, partition, key in zip(*(column.to_pylist() for column in columns), strict=True):
            if key is not None:
                positions.append((i, (partition, key)))
    return positions


@dataclass(slots=True)
class _Missing:
    """Row -> columns that it lacks."""

    unavailable: dict[int, list[str]] = field(default_factory=dict)
    absent: dict[int, list[str]] = field(default_factory=dict)
    null_keys: set[int] = field(default_factory=set)


def _where(mask: list[bool], values: list[bytes | None]) -> list[bytes | None]:
    return [value if is_set else None for value, is_set in zip(values, mask, strict=True)]


def _storable(text: str | None) -> str | None:
    """A record's text in UTF-8, which has no lone surrogates, as JSON does."""
    return None if text is None else text.encode("utf-8", "backslashreplace").decode("utf-8")


def _note(missing: dict[int, list[str]], indexes: Iterable[int], name: str) -> None:
    for i in indexes:
        missing.setdefault(i, []).append(name)


def _spoil(reads: list[Read], i: int, note: str) -> None:
    if reads[i].kind is not Kind.UNDECODABLE:
        reads[i] = Read(Kind.UNDECODABLE, note=note)
