"""Decoded records as change events for `MergeSink`: the row, its sequence, and what to do with it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from stream_merge.jobs.kafka import column_defaults
from stream_merge.jobs.kafka.batch_offsets import Place, Ranges
from stream_merge.jobs.kafka.counts import Tally
from stream_merge.jobs.kafka.decode import Decoded, evaluated
from stream_merge.jobs.kafka.guard import refuse_unavailable
from stream_merge.jobs.kafka.missing_values import (
    ABSENT,
    OLD_KEY,
    UNAVAILABLE,
    Known,
    deletes_of_null_values,
    fill,
    fill_across_key_changes,
)
from stream_merge.jobs.kafka.ordering import (
    DELETE,
    EPOCH,
    OFFSET,
    PARTITION,
    POSITION,
    SEQUENCE,
    STREAMED,
    TOPIC,
    EpochBefore,
    Placing,
)
from stream_merge.jobs.kafka.settings import QuerySettings
from stream_merge.jobs.kafka.snapshot_reads import placed
from stream_merge.jobs.kafka.unread import unread_before, unread_keys, unread_records
from stream_merge.model import names, source_batch
from stream_merge.model.source_batch import AtHand
from stream_merge.sources.decode.events import OLD_KEY as FORMER_KEY
from stream_merge.sources.decode.events import ROW
from stream_merge.sources.envelopes.base import Kind
from stream_merge.spark import columns

_ORIGIN = "$origin"
SOURCE_COLUMNS = (names.UNAVAILABLE_COLUMN, names.ORIGIN_COLUMN)
"""What these events tell the sink beside row and sequence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeEvents:
    """The upserts and deletes of a batch, as the sink takes them."""

    frame: DataFrame
    """The row's columns, `SEQUENCE`, `DELETE` and `SOURCE_COLUMNS`."""
    tally: Tally
    """Of the batch, with its null-value records as what they mean."""


def change_events(
    batch: Decoded,
    session: SparkSession,
    settings: QuerySettings,
    held: ExitStack,
    *,
    placing: Placing,
    epoch_since: int,
    ranges: Ranges | None = None,
    epoch_before: EpochBefore | None = None,
) -> ChangeEvents:
    """Whole rows in the order of their keys, null-value records resolved.

    Args:
        batch: what was decoded.
        session: to look at the target.
        settings: the query.
        held: frees what is evaluated.
        placing: of rows that a snapshot has read (`Lineage.placing`).
        epoch_since: when the epoch began, milliseconds since 1970 (`Lineage.epoch_since`).
        ranges: what a batch of a stream covers.
        epoch_before: what is of that one (`Lineage.epoch_before`).

    Raises:
        ContractError: under `unavailable: fail`, for a value that nobody has.
    """
    tally, has_nulls = batch.tally, batch.tally.total(Kind.NULL_VALUE) > 0
    events = _shaped(batch.of_kinds(Kind.UPSERT, Kind.DELETE), batch, settings, epoch_before)
    known = Known.of_query(session, settings)
    has_reads = bool(tally.reads) and _is_by_position(settings)
    moves_reads = has_reads and placing is Placing.BEHIND
    records = unread = former = None
    if has_nulls or batch.missing or moves_reads:
        records = unread_records(batch, session, settings, since=epoch_since, ranges=ranges)
        unread = None if records is None else unread_before(batch, records)
    if records is not None and (moves_reads or (batch.missing and tally.old_keys)):
        former = evaluated(unread_keys(batch, records, settings), held)
    if has_reads:
        events = placed(events, known, placing, unread=former)
    if has_nulls:
        nulls = _shaped(batch.of_kinds(Kind.NULL_VALUE), batch, settings, epoch_before)
        deletes = evaluated(deletes_of_null_values(nulls, events, known, unread), held)
        tally = tally.with_deletes(_counted_by_place(deletes))
        events = events.unionByName(deletes)
    column_defaults.warn(batch.defaults, batch.missing, settings)
    filled = column_defaults.fills(batch.defaults, settings)
    missing = {name: filled.get(name) for name in batch.missing}
    if missing and tally.old_keys:
        events = fill_across_key_changes(events, known, missing, held, unread=unread, unread_keys=former)
    elif missing:
        events = fill(events, known, missing, unread)
    if settings.unavailable == "null":
        events = events.withColumn(UNAVAILABLE, F.lit(None).cast("array<string>"))
    elif settings.unavailable == "fail" and batch.missing:
        refuse_unavailable(events, settings)
    events = events.withColumnsRenamed({UNAVAILABLE: names.UNAVAILABLE_COLUMN, _ORIGIN: names.ORIGIN_COLUMN})
    return ChangeEvents(frame=events.drop(ABSENT, TOPIC, OLD_KEY), tally=tally)


def _epoch(epoch: int, before: EpochBefore | None) -> Column:
    number = F.lit(epoch)
    for (topic, partition), end in ({} if before is None else before.ends).items():
        is_before = F.lit(True) if end is None else F.col("offset") < end
        is_of_it = (F.col("topic") == topic) & (F.col("partition") == partition) & is_before
        number = F.when(is_of_it, F.lit(before and before.epoch)).otherwise(number)
    return number


def _counted_by_place(events: DataFrame) -> dict[Place, int]:
    rows = events.groupBy(columns.column(TOPIC), columns.column(PARTITION)).count().collect()
    return {(topic, partition): number for topic, partition, number in rows}


def change_events_at_hand(batch: Decoded, settings: QuerySettings, *, placing: Placing) -> AtHand | None:
    """The same upserts and deletes in the driver; None where the batch is not there, or stored rows have a say."""
    by_position = _is_by_position(settings)
    if batch.at_hand is None or (batch.tally.reads and by_position and placing is Placing.BEHIND):
        return None
    found = batch.at_hand.select(["topic", "partition", "offset", "kind", "position", "is_snapshot", ROW])
    are_changes = pc.is_in(found["kind"], value_set=pa.array([str(Kind.UPSERT), str(Kind.DELETE)]))
    if not pc.all(are_changes).as_py():
        found = found.filter(are_changes)
    is_read = found["is_snapshot"] if by_position else pa.repeat(pa.scalar(False), found.num_rows)
    row = dict(zip(batch.row.names, found[ROW].flatten(), strict=True))
    if settings.topic_column is not None:
        row[settings.topic_column] = found["topic"]
    events = {
        **row,
        EPOCH: pa.repeat(
            pa.scalar(settings.epoch, pa.int32() if settings.epoch < 2**31 else pa.int64()), found.num_rows
        ),
        POSITION: pc.if_else(is_read, 0, found["position"]) if placing is Placing.FIRST else found["position"],
        STREAMED: pc.invert(is_read).cast(pa.int32()),
        PARTITION: found["partition"],
        OFFSET: found["offset"],
        DELETE: pc.not_equal(found["kind"], str(Kind.UPSERT)),
    }
    return AtHand(events=pa.table(events), sequence=SEQUENCE, delete=DELETE)


def _is_by_position(settings: QuerySettings) -> bool:
    """Whether events are ordered by the source's log; by Kafka's order a read is an event like any other."""
    return settings.value_format.log is not None


def _shaped(records: DataFrame, batch: Decoded, settings: QuerySettings, before: EpochBefore | None) -> DataFrame:
    """Decoded records as events: the row, its sequence, whether it is a delete, and what it does not carry."""
    row, old_key = columns.column(ROW), columns.column(FORMER_KEY)
    fields = {f.name: row.getField(f.name) for f in batch.row.fields}
    old = {key: old_key.getField(key) for key in settings.event_keys}
    if settings.topic_column is not None:
        fields[settings.topic_column] = old[settings.topic_column] = F.col("topic")
    origin = F.struct(*(F.col(f.name).cast(f.dataType).alias(f.name) for f in source_batch.ORIGIN_TYPE.fields))
    return records.select(
        *(value.alias(name) for name, value in fields.items()),
        _epoch(settings.epoch, before).alias(EPOCH),
        F.col("position").alias(POSITION),
        F.when(F.col("is_snapshot") & F.lit(_is_by_position(settings)), F.lit(0)).otherwise(F.lit(1)).alias(STREAMED),
        F.col("partition").alias(PARTITION),
        F.col("offset").alias(OFFSET),
        (F.col("kind") != str(Kind.UPSERT)).alias(DELETE),
        F.col("topic").alias(TOPIC),
        F.col("unavailable").alias(UNAVAILABLE),
        F.col("absent").alias(ABSENT),
        F.when(old_key.isNotNull(), F.struct(*(old[key].alias(key) for key in settings.keys))).alias(OLD_KEY),
        origin.alias(_ORIGIN),
    )
