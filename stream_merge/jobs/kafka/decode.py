"""A micro-batch of records, read from the topic once: what each of them is, and how many there are of each kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from stream_merge.errors import ConfigError
from stream_merge.jobs.kafka.batch_offsets import Range
from stream_merge.jobs.kafka.column_defaults import ColumnDefault
from stream_merge.jobs.kafka.columns import RowSchema
from stream_merge.jobs.kafka.counts import Counts, Place, Tally, of_frame, of_table
from stream_merge.jobs.kafka.ordering import PARTITION, TOPIC
from stream_merge.sources.decode.arrow_files import Spool, spooled
from stream_merge.sources.decode.decoding import Decoder, events
from stream_merge.sources.decode.events import OLD_KEY, ROW
from stream_merge.sources.envelopes.base import Kind
from stream_merge.spark import columns
from stream_merge.spark.evaluate_once import release


@dataclass(kw_only=True, slots=True)
class DecodedBatch:
    """The evaluated records of a batch; nothing after this reads the topic again."""

    frames: list[DataFrame]
    """Columns of `decoding.META` and the row; together each record once."""
    counts: Mapping[Place, Counts]
    highest_positions: Mapping[Place, int]
    """How far the source's log had come: of each partition that has changes, not only rows that a snapshot has read."""
    lowest_positions: Mapping[Place, int]
    """The same of the event that tells least, be it such a row."""
    reads: frozenset[Place]
    """Partitions with rows that a snapshot has read."""
    streamed: frozenset[Place]
    """Partitions with changes that the connector has streamed."""
    servers: Mapping[str, Mapping[str, Mapping[int, int]]]
    """As `Tally.servers`."""
    newest_millis: Mapping[str, int]
    """Topic -> commit time of its newest event at the source, milliseconds since the epoch."""
    first_truncate: tuple[str, int, int] | None
    """Topic, partition and offset."""
    connector: str | None
    """Name of the source that the connector gives, of one of the events."""
    old_keys: int
    """Events that lack values and say which key their row had before."""
    row: T.StructType
    decoder: Decoder
    """What the batch's records were read with in the end."""
    missing: list[str]
    """Columns that some event does not carry."""
    defaults: Mapping[str, ColumnDefault]
    """As `RowSchema.defaults`."""
    at_hand: pa.Table | None = None
    """The records once more, in the driver; None where they are not there, or some are not whole rows."""
    _held: list[DataFrame] = field(default_factory=list)
    _spool: Spool | None = None

    def of_kinds(self, *kinds: Kind) -> DataFrame:
        """The records of some kinds, all rows in the newest columns."""
        wanted = F.col("kind").isin([str(kind) for kind in kinds])
        parts = [self._with_all_columns(frame.where(wanted)) for frame in self.frames]
        found = parts[0]
        for part in parts[1:]:
            found = found.unionByName(part)
        return found

    def total(self, kind: Kind) -> int:
        """Records of a kind in all partitions."""
        return sum(counts.kinds[str(kind)] for counts in self.counts.values())

    @property
    def records(self) -> int:
        """All that the broker delivered."""
        return sum(counts.records for counts in self.counts.values())

    def kinds(self) -> Counter[str]:
        """Records by kind."""
        found: Counter[str] = Counter()
        for counts in self.counts.values():
            found.update(counts.kinds)
        return found

    def gaps(self, topic: str, partition: int, covered: Range) -> int:
        """Offsets without a record."""
        counts = self.counts.get((topic, partition))
        return len(covered) - (0 if counts is None else counts.records)

    def null_values_are_deletes(self, resolved: Mapping[Place, int]) -> None:
        """So many null-value records of each partition delete something; the others say nothing new."""
        for place, counts in self.counts.items():
            nulls = counts.kinds.pop(str(Kind.NULL_VALUE), 0)
            meant = resolved.get(place, 0)
            counts.kinds.update({str(Kind.DELETE): meant, str(Kind.REDUNDANT): nulls - meant})

    def hold(self, frame: DataFrame) -> None:
        """Free this frame, too, when the batch is released."""
        self._held.append(frame)

    def release(self) -> None:
        """Free what was evaluated."""
        self.at_hand = None
        try:
            for frame in self._held:
                release(frame)
        finally:
            if self._spool is not None:
                self._spool.remove()

    def _with_all_columns(self, frame: DataFrame) -> DataFrame:
        """Rows that were decoded before the batch's last column was known."""
        found, old_key = frame.schema[ROW].dataType, self.frames[-1].schema[OLD_KEY].dataType
        if found == self.row:
            return frame
        theirs = frame.schema[OLD_KEY].dataType
        if theirs != old_key:  # decoded before the key columns, or their types, were known
            is_known = isinstance(theirs, T.StructType) and bool(theirs.fields)
            frame = frame.withColumn(OLD_KEY, (F.col(OLD_KEY) if is_known else F.lit(None)).cast(old_key))
        row = columns.column(ROW)
        have = set(found.names) if isinstance(found, T.StructType) else set()
        fields = [
            (row.getField(f.name) if f.name in have else F.lit(None)).cast(f.dataType).alias(f.name)
            for f in self.row.fields
        ]
        grown = F.struct(*fields)
        later = [F.lit(f.name) for f in self.row.fields if f.name not in have]
        absent = F.concat(columns.or_empty(F.col("absent")), F.array(*later))
        return frame.withColumns({ROW: F.when(row.isNotNull(), grown), "absent": absent})


def refuse_unknown_keys(batch: DecodedBatch) -> None:
    """Stop for null-value records whose keys nobody can read yet.

    Raises:
        ConfigError: no event so far has a schema, and the job file declares no columns.
    """
    records = batch.total(Kind.OTHER_SCHEMA)
    if records:
        msg = (
            f"[KEY_SCHEMA_UNKNOWN] keys of {records} null-value records cannot be decoded: no earlier event has a"
            " matching schema; declare 'columns' in the job file"
        )
        raise ConfigError(msg)


def evaluate(records: DataFrame, rows: RowSchema, max_value_bytes: int) -> DecodedBatch:
    """Decode a batch, and let new schemas of events in.

    Cost: one Spark job that reads the topic, one over the decoded records for the counts; where a schema is
    new, two more over those records that are written in it.

    Raises:
        ConfigError: a new schema does not fit the target.
    """
    decoder = rows.decoder(max_value_bytes)
    # A local checkpoint: a lost executor fails the batch instead of reading the topic again.
    return _of_rows(events(records, decoder).localCheckpoint(eager=True), rows, max_value_bytes)


def evaluate_here(records: DataFrame, rows: RowSchema, max_value_bytes: int) -> DecodedBatch:
    """As `evaluate`, with the events in the driver where all of them are whole rows of known schemas.

    Requires: `arrow_files.workers_are_here`.
    Cost: one Spark job that reads the topic; where an event is not such a one, that of `evaluate` over the files.

    Raises:
        ConfigError: as `evaluate`.
    """
    spool = spooled(records, rows.decoder(max_value_bytes))
    try:
        found = spool.table()
        if _is_plain(found):
            decoder = rows.decoder(max_value_bytes)
            return _batch(of_table(found), [spool.frame()], rows, decoder, held=[], at_hand=found, spool=spool)
        first = spool.frame().localCheckpoint(eager=True)
    except BaseException:
        spool.remove()
        raise
    spool.remove()
    return _of_rows(first, rows, max_value_bytes)


_LOOKED_AT_AGAIN = (Kind.UNDECODABLE, Kind.NULL_VALUE, Kind.OTHER_SCHEMA)
"""Records of these kinds go elsewhere, or need more than themselves to be understood."""


def is_plain(batch: DecodedBatch) -> bool:
    """Whether each record is a whole row, a delete, or nothing: what `evaluate_here` is for."""
    return not batch.missing and not any(batch.total(kind) for kind in _LOOKED_AT_AGAIN)


def _is_plain(found: pa.Table) -> bool:
    lacking = any(found[name].null_count < found.num_rows for name in (OLD_KEY, "unavailable", "absent"))
    again = pa.array([str(kind) for kind in _LOOKED_AT_AGAIN])
    return not lacking and not pc.any(pc.is_in(found["kind"], value_set=again)).as_py()


def _of_rows(first: DataFrame, rows: RowSchema, max_value_bytes: int) -> DecodedBatch:
    held = [first]
    before = rows.columns.names
    try:
        frames = [first]
        tally = of_frame(first)
        if tally.others:
            rows.admit_noted(tally.noted)
            other = F.col("kind") == str(Kind.OTHER_SCHEMA)
            again = first.where(other).withColumnsRenamed({"raw_key": "key", "raw_value": "value"})
            second = events(again, rows.decoder(max_value_bytes)).localCheckpoint(eager=True)
            held.append(second)
            frames = [first.where(~other), second]
            grown = set(rows.columns.names) - set(before)
            tally = tally.replaced_by(of_frame(second))
            if tally.upserts_before:
                tally.missing |= grown
    except BaseException:
        for frame in held:
            release(frame)
        raise
    return _batch(tally, frames, rows, rows.decoder(max_value_bytes), held=held)


def _batch(
    tally: Tally,
    frames: list[DataFrame],
    rows: RowSchema,
    decoder: Decoder,
    *,
    held: list[DataFrame],
    at_hand: pa.Table | None = None,
    spool: Spool | None = None,
) -> DecodedBatch:
    rows.forget_not_registered()
    return DecodedBatch(
        frames=frames,
        counts=tally.counts,
        highest_positions=tally.highest_positions,
        lowest_positions=tally.lowest_positions,
        reads=frozenset(tally.reads),
        streamed=frozenset(tally.streamed),
        servers=tally.servers,
        newest_millis=tally.newest_millis,
        first_truncate=tally.first_truncate,
        connector=tally.connector,
        old_keys=tally.old_keys,
        row=rows.columns,
        decoder=decoder,
        missing=sorted(tally.missing),
        defaults=dict(rows.defaults),
        at_hand=at_hand,
        _held=held,
        _spool=spool,
    )


def counted_by_place(events: DataFrame) -> tuple[DataFrame, dict[Place, int]]:
    """Evaluate events, and count them by topic and partition.

    Cost: two Spark jobs.
    """
    found = events.localCheckpoint(eager=True)
    rows = found.groupBy(columns.column(TOPIC), columns.column(PARTITION)).count().collect()
    return found, {(topic, partition): number for topic, partition, number in rows}
