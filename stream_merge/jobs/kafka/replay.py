"""Quarantined records run again through the decoder and the sink, as the job file is now, in a commit of their own."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import reduce
from typing import Self

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from stream_merge.jobs.kafka import column_defaults, decode
from stream_merge.jobs.kafka.batch import merge_sink
from stream_merge.jobs.kafka.columns import RowSchema
from stream_merge.jobs.kafka.commit_section import REPLAY_SECTION
from stream_merge.jobs.kafka.decode import DecodedBatch
from stream_merge.jobs.kafka.events import change_events
from stream_merge.jobs.kafka.lineage import Origin
from stream_merge.jobs.kafka.missing_values import Known, in_sequence
from stream_merge.jobs.kafka.ordering import (
    EPOCH,
    OFFSET,
    PARTITION,
    POSITION,
    SEQUENCE,
    STREAMED,
    Placing,
)
from stream_merge.jobs.kafka.settings import QuerySettings
from stream_merge.metrics.instruments import MergeMetrics
from stream_merge.model import names
from stream_merge.model.logs import counted, tell
from stream_merge.model.results import MergeResult
from stream_merge.model.snapshot import TableSnapshot
from stream_merge.model.source_batch import Intake
from stream_merge.shapes.contract import breaks_key
from stream_merge.sources.decode.events import PLACE
from stream_merge.sources.envelopes.base import Kind
from stream_merge.spark import columns
from stream_merge.spark.confs import WHOLE_READS, holding
from stream_merge.tables import spark_table
from stream_merge.tables.side import quarantine
from stream_merge.tables.side.replay_claims import Claim, Claims, query_claims

log = logging.getLogger(__name__)

_FOLLOWED = "$followed"
_STILL_BAD = (Kind.UNDECODABLE, Kind.TRUNCATE, Kind.OTHER_SCHEMA)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Message:
    """What a command and the job that it asks tell each other."""

    def to_json(self) -> str:
        """As a text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self | None:
        """What `to_json` gave; None where the text is none of these."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError):
            return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Request(_Message):
    """Which records of a query to replay."""

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """By which its answer is known."""
    reason: str | None = None
    """Only those with this reason."""
    partition: int | None = None
    offset: int | None = None
    """Only the record at this offset."""
    force: bool = False
    """Also those whose key may have been deleted so long ago that nobody remembers, those of an earlier epoch, and
    those of which nobody can say whether something followed (`Replayed.unsure`)."""
    settings: str | None = None
    """Digest of the query in the job file that the request comes from; None: whatever it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed(_Message):
    """What became of the records."""

    id: str
    """Of the request."""
    records: int = 0
    """Found in quarantine, not replayed before."""
    too_old: int = 0
    """Left there: deletes of their time may be forgotten, or they came before the epoch."""
    still: int = 0
    """Left there, because they cannot be read, or lack a value, as before."""
    unsure: int = 0
    """Left there, because nobody can say what has followed them: an event that `unchanged: skip` has not written, or a
    delete at a later offset where other topics, whose offsets do not compare, have filled the table."""
    merged: int = 0
    """Events that were given to the sink."""
    changed: int = 0
    """Rows that they changed; the others were older than what is stored."""
    version: int | None = None
    """Of the target; None where nothing was committed."""
    error: str | None = None
    """Why nothing was done."""
    exit_code: int | None = None
    """Of the error, where a job has answered; None: the settings have to change."""

    @property
    def marked(self) -> int:
        """Records that are done with."""
        return self.records - self.too_old - self.still - self.unsure

    def said(self) -> str:
        """In one sentence."""
        if self.error is not None:
            return self.error
        if not self.records:
            return "no such record is in quarantine with its bytes and not replayed yet"
        where = "nothing to commit" if self.version is None else f"version {self.version}"
        changed = counted(self.changed, "row")
        parts = [f"{self.marked:,} of {counted(self.records, 'record')} replayed ({changed} changed, {where})"]
        if self.still:
            parts.append(f"{self.still:,} still cannot be merged")
        if self.unsure:
            parts.append(
                f"{self.unsure:,} may be older than their rows, or than a delete: 'unchanged: skip' leaves no trace of"
                " events that change nothing, and offsets of other topics tell no order (--force replays them)"
            )
        if self.too_old:
            parts.append(
                f"{self.too_old:,} older than tombstone_retention or than the epoch, which could win over"
                " what came after them (--force replays them)"
            )
        return "; ".join(parts)


def replay(
    session: SparkSession, settings: QuerySettings, request: Request, *, metrics: MergeMetrics | None = None
) -> Replayed:
    """Replay quarantined records; those that still cannot be merged stay where they are.

    Not at the same time as a batch of the query on a local disk: the running job does it between two batches.

    Args:
        session: not used by anybody else meanwhile.
        settings: the query.
        request: which records.
        metrics: where to count.

    Raises:
        ConfigError: the target does not exist, or a schema does not fit it.
        StreamMergeError: as `MergeSink`.
    """
    finish(session, settings)
    with holding(session, WHOLE_READS):
        return _replayed(session, settings, request, metrics)


def finish(session: SparkSession, settings: QuerySettings) -> None:
    """Merge the records of a replay that was killed, before batches of the query take values from their rows.

    Raises: as `replay`.
    """
    claims = _claims(session, settings)
    left = None if claims is None else claims.open_claim()
    if claims is not None and left is not None:
        with holding(session, WHOLE_READS), claims.merging(left):
            _finish(left, claims, session, settings)
        tell(log.warning, "quarantine_replay_finished", query=settings.name, target=settings.target)


def _claims(session: SparkSession, settings: QuerySettings) -> Claims | None:
    return query_claims(session, settings.target.quarantine, settings.target, owner=settings.checkpoint)


def _replayed(
    session: SparkSession, settings: QuerySettings, request: Request, metrics: MergeMetrics | None
) -> Replayed:
    claims = _claims(session, settings)
    kept = None if claims is None else quarantine.records(session, claims.table)
    if claims is None or kept is None:
        return Replayed(id=request.id)
    origin = Origin.of_table(session, spark_table.find(session, settings.target), None, settings)
    wanted = _wanted(kept, settings, request).localCheckpoint(eager=True)
    young = _newest_of_each_offset(wanted if request.force else _young(wanted, settings, origin))
    found, count = wanted.count(), young.count()
    if not count:
        return Replayed(id=request.id, records=found, too_old=found)
    with _decoded(young, session, settings, origin) as (batch, readable):
        events, unsure = readable, 0
        if readable is not None and not request.force:
            events = _sure(readable, session, settings, placing=origin.placing_of_others)
            if events is not readable:
                batch.hold(events)
                unsure = readable.count() - events.count()
        merged = 0 if events is None else events.count()
        done = _done(batch, events).localCheckpoint(eager=True)
        batch.hold(done)
        marked, result = done.count(), None
        if marked:
            claim = claims.claim(done)
            with claims.merging(claim):
                if events is not None and merged:
                    recorded = {REPLAY_SECTION: {"id": request.id, "records": merged}}
                    intake = Intake(recorded=recorded, column_defaults=column_defaults.fills(batch.defaults, settings))
                    result = _merge(events, intake, settings, claim, metrics)
            claims.end(claim)
    return Replayed(
        id=request.id,
        records=found,
        too_old=found - count,
        still=count - marked - unsure,
        unsure=unsure,
        merged=merged,
        changed=0 if result is None else result.events.inserted + result.events.updated + result.events.deleted,
        version=None if result is None else result.version,
    )


def _finish(left: Claim, claims: Claims, session: SparkSession, settings: QuerySettings) -> None:
    """Merge the records of a replay that was killed, once.

    Where the target does not hold them yet, those that came too late meanwhile, or cannot be read any more, are open
    again.
    """
    kept, has_landed = quarantine.records(session, claims.table, replayed_at=left.moment), claims.has_landed(left)
    if kept is None:
        claims.end(left)
        return
    origin = Origin.of_table(session, spark_table.find(session, settings.target), None, settings)
    claimed = _wanted(kept, settings, Request())
    records = _newest_of_each_offset(claimed if has_landed else _young(claimed, settings, origin))
    with _decoded(records.localCheckpoint(eager=True), session, settings, origin) as (batch, readable):
        events = readable
        if events is not None and not has_landed:
            events = _sure(events, session, settings, placing=origin.placing_of_others)
            batch.hold(events)
        if events is not None and not events.isEmpty():
            intake = Intake(column_defaults=column_defaults.fills(batch.defaults, settings))
            result = _merge(events, intake, settings, left, None)
            has_landed = has_landed or (result is not None and result.outcome == "skipped_duplicate")
        claims.end(left, merged=None if has_landed else _done(batch, events))


@contextmanager
def _decoded(
    records: DataFrame, session: SparkSession, settings: QuerySettings, origin: Origin
) -> Iterator[tuple[DecodedBatch, DataFrame | None]]:
    """Records as the job file reads them now, and those of their events that the contract lets through."""
    target = spark_table.find(session, settings.target)
    rows = RowSchema.of_query(settings)
    rows.start_from(None if target is None else target.schema)
    rows.admit_declared()
    batch = decode.evaluate(_in_order(records, settings), rows, settings.limits.max_value_bytes)
    try:
        decode.refuse_unknown_keys(batch)
        events = _mergeable(batch, session, settings, target, origin)
        yield batch, events
    finally:
        batch.release()


def _merge(
    events: DataFrame, intake: Intake, settings: QuerySettings, claim: Claim, metrics: MergeMetrics | None
) -> MergeResult | None:
    sink = merge_sink(settings, app_id=claim.app_id, metrics=metrics)
    sink._calls.merge(events, 0, intake)
    return sink.last_result


def _mergeable(
    batch: DecodedBatch, session: SparkSession, settings: QuerySettings, target: TableSnapshot | None, origin: Origin
) -> DataFrame | None:
    """The events that the contract lets through: the others stay where they are, and do not come back as new rows."""
    if not batch.row.fields:
        return None
    placing, partitions = origin.placing_of_others, () if target is None else target.partition_columns
    events = change_events(batch, session, settings, placing=placing, epoch_since=origin.epoch_since())
    events = _behind_what_followed(events, session, settings, placing=placing)
    has_keys = ~breaks_key(events, settings.keys, partitions)
    events = events.where(has_keys & columns.column(names.UNAVAILABLE_COLUMN).isNull()).localCheckpoint(eager=True)
    batch.hold(events)
    return events


def _behind_what_followed(
    events: DataFrame, session: SparkSession, settings: QuerySettings, *, placing: Placing
) -> DataFrame:
    """Events with those that something has followed at the beginning of their epoch, whatever their position.

    A null-value record has no position of its own: it was remembered as a delete directly behind the event of its key
    that was known then, which these were not. So was a row that a snapshot has read (`snapshot_reads`); by the source's
    log, any other row that stands behind an event in its partition is newer, too. Not so where rows of the epoch came
    from other topics: their offsets do not compare.
    """
    if placing is Placing.AS_TOLD:
        return events
    keys, known = list(settings.keys), Known.of_query(session, settings)
    followers = [known.deletes(events)]
    if settings.value_format.log is not None:
        followers.append(known.rows(events))
    stored = [in_sequence(one, keys) for one in followers if one is not None]
    if not stored:
        return events
    # Any of them counts, not the one with the greatest sequence alone: by offsets they compare with the event.
    of_partition = (*keys, EPOCH, PARTITION)
    newest = reduce(DataFrame.unionByName, stored).groupBy(*(columns.column(name) for name in of_partition))
    beside = events.join(newest.agg(F.max(columns.column(OFFSET)).alias(_FOLLOWED)), list(of_partition), "left")
    has_followed = columns.column(_FOLLOWED) > columns.column(OFFSET)
    types = {field.name: field.dataType for field in events.schema.fields}
    first = {
        name: F.when(has_followed, F.lit(0)).otherwise(columns.column(name)).cast(types[name])
        for name in (POSITION, STREAMED)
    }
    return beside.withColumns(first).select(*(columns.column(name) for name in events.columns))


def _sure(events: DataFrame, session: SparkSession, settings: QuerySettings, *, placing: Placing) -> DataFrame:
    """Events without those of which nobody can say whether something has followed them.

    Under `unchanged: skip` an event that changes nothing is not written, so that the row's sequence stays where it was:
    behind the replayed one. Where the row stands in front of it, or at a later offset (`_behind_what_followed`), it
    loses to the row anyway. Where other topics have filled the table, an event may win over a remembered delete that
    stands at a later offset: one of another topic, whose offsets say nothing, or a null value of this one, whose
    position does not.

    Returns: the events themselves where there is nothing to doubt.
    """
    keys, known, found = list(settings.keys), Known.of_query(session, settings), events
    sequence = F.struct(*(columns.column(name) for name in SEQUENCE))
    then = columns.column(_FOLLOWED)
    rows = known.rows(events) if settings.unchanged == "skip" else None
    if rows is not None:
        found = _beside_the_newest(found, rows, keys).where(then.isNull() | (sequence <= then)).drop(_FOLLOWED)
    deletes = known.deletes(events) if placing is Placing.AS_TOLD else None
    if deletes is not None:
        is_here = (then[EPOCH] == columns.column(EPOCH)) & (then[PARTITION] == columns.column(PARTITION))
        is_open = is_here & (then[OFFSET] > columns.column(OFFSET)) & (then < sequence)
        found = _beside_the_newest(found, deletes, keys).where(then.isNull() | ~is_open).drop(_FOLLOWED)
    if found is events:
        return events
    return found.select(*(columns.column(name) for name in events.columns)).localCheckpoint(eager=True)


def _beside_the_newest(events: DataFrame, stored: DataFrame, keys: list[str]) -> DataFrame:
    """Events with the greatest sequence of their key that is stored: `_FOLLOWED`, NULL where there is none."""
    newest = F.max(F.struct(*(columns.column(name) for name in SEQUENCE))).alias(_FOLLOWED)
    by_key = in_sequence(stored, keys).groupBy(*(columns.column(key) for key in keys)).agg(newest)
    return events.join(by_key, keys, "left")


def _done(batch: DecodedBatch, events: DataFrame | None) -> DataFrame:
    """Where the records stood that are done with: merged, or found to say nothing."""
    change = (Kind.UPSERT, Kind.DELETE)
    done = batch.of_kinds(*(kind for kind in Kind if kind not in (*_STILL_BAD, *change))).select(*PLACE)
    if events is not None:
        origin = columns.column(names.ORIGIN_COLUMN)
        done = done.unionByName(events.select(*(origin[name].alias(name) for name in PLACE)))
    return done.distinct()


def _wanted(kept: DataFrame, settings: QuerySettings, request: Request) -> DataFrame:
    found = kept.where(F.col("topic").isin(list(settings.topic)))
    if request.reason is not None:
        found = found.where(F.array_contains("reasons", request.reason))
    if request.partition is not None:
        found = found.where(F.col("partition") == request.partition)
    if request.offset is not None:
        found = found.where(F.col("offset") == request.offset)
    # A record may lie there twice: when its batch was delivered again under another query.
    found = found.dropDuplicates(list(PLACE))
    values = (F.col("raw_key").alias("key"), F.col("raw_value").alias("value"))
    return found.select(*PLACE, *values, "recorded_at")


def _young(records: DataFrame, settings: QuerySettings, origin: Origin) -> DataFrame:
    """Records without those that came before the epoch, or so long ago that deletes after them may be forgotten."""
    is_too_old = F.unix_millis("recorded_at") < origin.epoch_since()
    retention = settings.tombstone_retention
    if retention is not None:
        is_older = columns.is_older(F.col("timestamp"), retention, now=F.current_timestamp())
        is_too_old |= F.coalesce(is_older, F.lit(True))
    return records.where(~is_too_old)


def _newest_of_each_offset(records: DataFrame) -> DataFrame:
    """Where a topic was made anew, two records may have stood at the same offset: one replay takes one of them."""
    offset = [name for name in PLACE if name != "timestamp"]
    newest = F.max_by(F.struct(*records.columns), "recorded_at").alias("newest")
    return records.groupBy(*offset).agg(newest).select("newest.*").drop("recorded_at")


def _in_order(records: DataFrame, settings: QuerySettings) -> DataFrame:
    """As a topic delivers them: each topic in a task of its own, by partition and offset."""
    each = [
        records.where(F.col("topic") == topic).coalesce(1).sortWithinPartitions("partition", "offset")
        for topic in settings.topic
    ]
    return reduce(DataFrame.unionByName, each)
