"""Quarantined records run again through the decoder and the sink, as the job file is now, in a commit of their own."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import reduce
from typing import Any, Self

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from stream_merge.jobs.kafka import column_defaults, decode
from stream_merge.jobs.kafka.batch import merge_sink
from stream_merge.jobs.kafka.columns import RowSchema
from stream_merge.jobs.kafka.commit_section import REPLAY_SECTION
from stream_merge.jobs.kafka.decode import Decoded, evaluated
from stream_merge.jobs.kafka.events import change_events
from stream_merge.jobs.kafka.guard import refuse_unreadable
from stream_merge.jobs.kafka.lineage import Lineage, read_lineage
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
    lineage = read_lineage(session, spark_table.find(session, settings.target), settings)
    with ExitStack() as held:
        wanted = evaluated(_wanted(kept, settings, request), held)
        young = _newest_of_each_offset(wanted if request.force else _young(wanted, settings, lineage))
        found, count = wanted.count(), young.count()
        if not count:
            return Replayed(id=request.id, records=found, too_old=found)
        read = _read(young, session, settings, lineage, held, sure_only=not request.force)
        merged = 0 if read.events is None else read.events.count()
        done = evaluated(read.done(), held)
        marked, result = done.count(), None
        if marked:
            claim = claims.claim(done)
            with claims.merging(claim):
                if merged:
                    recorded = {REPLAY_SECTION: {"id": request.id, "records": merged}}
                    result = _merge(read, settings, claim, recorded=recorded, metrics=metrics)
            claims.end(claim)
    return Replayed(
        id=request.id,
        records=found,
        too_old=found - count,
        still=count - marked - read.unsure,
        unsure=read.unsure,
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
    lineage = read_lineage(session, spark_table.find(session, settings.target), settings)
    claimed = _wanted(kept, settings, Request())
    records = _newest_of_each_offset(claimed if has_landed else _young(claimed, settings, lineage))
    with ExitStack() as held:
        read = _read(evaluated(records, held), session, settings, lineage, held, sure_only=not has_landed)
        if read.events is not None and not read.events.isEmpty():
            result = _merge(read, settings, left)
            has_landed = has_landed or (result is not None and result.outcome == "skipped_duplicate")
        claims.end(left, merged=None if has_landed else read.done())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Read:
    """Quarantined records as the job file reads them now."""

    batch: Decoded
    events: DataFrame | None
    """Those that are merged; None where nobody knows the columns of a row."""
    unsure: int
    """As `Replayed.unsure`."""

    def done(self) -> DataFrame:
        """Where the records stood that are done with: merged, or found to say nothing."""
        change = (Kind.UPSERT, Kind.DELETE)
        done = self.batch.of_kinds(*(kind for kind in Kind if kind not in (*_STILL_BAD, *change))).select(*PLACE)
        if self.events is not None:
            origin = columns.column(names.ORIGIN_COLUMN)
            done = done.unionByName(self.events.select(*(origin[name].alias(name) for name in PLACE)))
        return done.distinct()


def _read(
    records: DataFrame,
    session: SparkSession,
    settings: QuerySettings,
    lineage: Lineage,
    held: ExitStack,
    *,
    sure_only: bool,
) -> _Read:
    """Decode records; of their events those that the contract lets through.

    The others stay where they are, and do not come back as new rows.
    """
    target = spark_table.find(session, settings.target)
    rows = RowSchema.of_query(settings)
    rows.start_from(None if target is None else target.schema)
    rows.admit_declared()
    batch = decode.evaluate(_in_order(records, settings), rows, held)
    refuse_unreadable(batch, settings)
    if not batch.row.fields:
        return _Read(batch=batch, events=None, unsure=0)
    placing, partitions = lineage.placing_of_others, () if target is None else target.partition_columns
    changes = change_events(batch, session, settings, held, placing=placing, epoch_since=lineage.epoch_since)
    events = _behind_what_followed(changes.frame, session, settings, placing=placing)
    has_keys = ~breaks_key(events, settings.keys, partitions)
    readable = evaluated(events.where(has_keys & columns.column(names.UNAVAILABLE_COLUMN).isNull()), held)
    sure = _sure(readable, session, settings, placing=placing) if sure_only else readable
    if sure is readable:
        return _Read(batch=batch, events=readable, unsure=0)
    sure = evaluated(sure, held)
    return _Read(batch=batch, events=sure, unsure=readable.count() - sure.count())


def _merge(
    read: _Read,
    settings: QuerySettings,
    claim: Claim,
    *,
    recorded: Mapping[str, Any] | None = None,
    metrics: MergeMetrics | None = None,
) -> MergeResult | None:
    intake = Intake(recorded=recorded or {}, column_defaults=column_defaults.fills(read.batch.defaults, settings))
    sink = merge_sink(settings, app_id=claim.app_id, metrics=metrics)
    if read.events is not None:
        sink._calls.merge(read.events, 0, intake)
    return sink.last_result


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
    return found.select(*(columns.column(name) for name in events.columns))


def _beside_the_newest(events: DataFrame, stored: DataFrame, keys: list[str]) -> DataFrame:
    """Events with the greatest sequence of their key that is stored: `_FOLLOWED`, NULL where there is none."""
    newest = F.max(F.struct(*(columns.column(name) for name in SEQUENCE))).alias(_FOLLOWED)
    by_key = in_sequence(stored, keys).groupBy(*(columns.column(key) for key in keys)).agg(newest)
    return events.join(by_key, keys, "left")


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


def _young(records: DataFrame, settings: QuerySettings, lineage: Lineage) -> DataFrame:
    """Records without those that came before the epoch, or so long ago that deletes after them may be forgotten."""
    is_too_old = F.unix_millis("recorded_at") < lineage.epoch_since
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
