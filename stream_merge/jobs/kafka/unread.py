"""Records in quarantine that stand before one which says less than a whole row: they may have said the rest."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from stream_merge.jobs.kafka.batch_offsets import Ranges
from stream_merge.jobs.kafka.decode import Decoded
from stream_merge.jobs.kafka.ordering import OFFSET, PARTITION, TOPIC
from stream_merge.jobs.kafka.settings import QuerySettings
from stream_merge.sources.decode.decoding import events
from stream_merge.sources.decode.events import ROW
from stream_merge.sources.envelopes.base import Kind
from stream_merge.spark import columns
from stream_merge.tables.side import quarantine

UNREAD = "$unread"
"""Offset of the newest of these records."""
_PLACE = {"topic": TOPIC, "partition": PARTITION, "offset": OFFSET}


def unread_records(
    batch: Decoded, session: SparkSession, settings: QuerySettings, *, since: int, ranges: Ranges | None
) -> DataFrame | None:
    """Records that nobody could read: of the batch, and in quarantine, where they were not replayed.

    Args:
        batch: what was decoded.
        session: to look at the quarantine.
        settings: the query.
        since: when the epoch began, milliseconds since 1970: records of before stand before nothing of now.
        ranges: what the batch covers of its topics. What an earlier try of it has quarantined is not looked at, so that
            its events are judged alike again. None: it is no batch of a stream.

    Returns: where each stands, and its `raw_key`; None where nothing is unread.

    Cost: a look at the quarantine's log.
    """
    kept = quarantine.records(session, settings.target.quarantine)
    if kept is None and not batch.tally.total(Kind.UNDECODABLE):
        return None
    wanted = [F.col(name) for name in (*_PLACE, "raw_key")]
    unread = batch.of_kinds(Kind.UNDECODABLE).select(*wanted)
    if kept is None:
        return unread
    is_of_now = F.col("topic").isin(list(settings.topic)) & (F.unix_millis("recorded_at") >= since)
    return unread.unionByName(kept.where(is_of_now & _is_earlier(ranges)).select(*wanted))


def unread_before(batch: Decoded, unread: DataFrame) -> DataFrame:
    """The newest unread record before each event with unavailable values, and before each null-value record.

    That is one of the same record key and partition.

    Args:
        batch: what was decoded.
        unread: `unread_records` of it.

    Returns: `TOPIC`, `PARTITION`, `OFFSET` of the events, and `UNREAD`.
    """
    wanted = [F.col(name) for name in (*_PLACE, "raw_key")]
    is_null = F.col("kind") == str(Kind.NULL_VALUE)
    says_less = is_null | F.col("unavailable").isNotNull()
    lacking = batch.of_kinds(Kind.UPSERT, Kind.NULL_VALUE).where(says_less).select(*wanted)
    e, u = lacking.alias("e"), unread.alias("u")
    same = columns.all_of(
        columns.column(name, "e") == columns.column(name, "u") for name in (*list(_PLACE)[:2], "raw_key")
    )
    is_before = columns.column("offset", "u") < columns.column("offset", "e")
    place = [columns.column(name, "e").alias(as_event) for name, as_event in _PLACE.items()]
    return e.join(u, same & is_before, "inner").groupBy(*place).agg(F.max(columns.column("offset", "u")).alias(UNREAD))


def unread_keys(batch: Decoded, unread: DataFrame, settings: QuerySettings) -> DataFrame:
    """The keys of the unread records, for events that name the key of their row otherwise than a record does.

    A header has the key in JSON, a record as its converter writes it. A record whose key cannot be read either belongs
    to no row that is known.

    Args:
        batch: what was decoded.
        unread: `unread_records` of it.
        settings: the query.

    Returns: the key columns, `PARTITION` and `OFFSET`.
    """
    places = [F.col(name) for name in _PLACE]
    # Without a value there is nothing but the key to read.
    value, time = F.lit(None).cast("binary").alias("value"), F.lit(None).cast("timestamp").alias("timestamp")
    keys = events(unread.select(*places, time, F.col("raw_key").alias("key"), value), batch.decoder)
    row = columns.column(ROW)
    fields = {key: F.col("topic") if key == settings.topic_column else row.getField(key) for key in settings.keys}
    return keys.where(F.col("kind") == str(Kind.NULL_VALUE)).select(
        *(value.alias(key) for key, value in fields.items()),
        F.col("partition").alias(PARTITION),
        F.col("offset").alias(OFFSET),
    )


def _is_earlier(ranges: Ranges | None) -> Column:
    """Whether a record stands before the batch, by its topic, partition and offset."""
    if ranges is None:
        return F.lit(True)
    return columns.any_of(
        (F.col("topic") == topic) & (F.col("partition") == partition) & (F.col("offset") < found.start)
        for topic, partitions in ranges.items()
        for partition, found in partitions.items()
    )
