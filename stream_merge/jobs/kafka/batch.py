"""One query's batch function: what a topic brought in, decoded once, merged in one commit, with its offsets."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from kafka.errors import AuthorizationError, UnsupportedVersionError
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from stream_merge.errors import ContractError
from stream_merge.jobs.kafka import column_defaults, decode, lost_offsets
from stream_merge.jobs.kafka.batch_offsets import Checkpoint, Ranges
from stream_merge.jobs.kafka.columns import RowSchema
from stream_merge.jobs.kafka.commit_section import SECTION
from stream_merge.jobs.kafka.decode import DecodedBatch
from stream_merge.jobs.kafka.events import SOURCE_COLUMNS, change_events, change_events_at_hand
from stream_merge.jobs.kafka.exit_codes import is_outage
from stream_merge.jobs.kafka.lag import Progress
from stream_merge.jobs.kafka.lineage import Origin
from stream_merge.jobs.kafka.newest_records import newest
from stream_merge.jobs.kafka.ordering import DELETE, POSITION_COMPONENTS, SEQUENCE
from stream_merge.jobs.kafka.settings import QuerySettings
from stream_merge.jobs.shapes import shape_from_settings
from stream_merge.model import names
from stream_merge.model.logs import tell
from stream_merge.model.results import MergeResult
from stream_merge.model.settings import Create, Driver, Tombstones
from stream_merge.model.source_batch import Intake, MostUndecodable, Undecodable
from stream_merge.sink import MergeSink
from stream_merge.sources.decode.arrow_files import workers_are_here
from stream_merge.sources.decode.events import Records
from stream_merge.sources.envelopes.base import Kind
from stream_merge.sources.kafka.connection import Cluster
from stream_merge.spark.jvm import owned_session
from stream_merge.spark.streaming import caller_named
from stream_merge.tables import spark_table
from stream_merge.tables.side import quarantine
from stream_merge.tables.side.replay_claims import UNFINISHED, query_claims

log = logging.getLogger(__name__)

_MIXED_OFFSETS = (
    "the table holds events of other topics, and offsets of one topic do not compare with those of another: where they"
    " are of the same keys, raise 'epoch' by one"
)
_EVENT_BYTES = 300
"""Of a decoded event, until a batch has told."""
_COPIES = 4
"""Of a batch in the driver while the latest event of each key is looked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Read:
    """What a batch brings."""

    batch: DecodedBatch
    ranges: Ranges
    lost: Ranges
    events: DataFrame | None
    """None where nobody knows the columns of a row yet, so that there is no event either."""
    intake: Intake


class TopicSink:
    """Pass it to `foreachBatch` of a stream of Kafka records.

    Guarantees: each offset range is read once; every record ends as an event of the ledger, as a row of the
    quarantine table, or in one of the counts of the commit.
    """

    def __init__(
        self, settings: QuerySettings, sink: MergeSink, *, cluster: Cluster, progress: Progress, turn: threading.Lock
    ) -> None:
        self._settings = settings
        self._turn = turn
        self._cluster = cluster
        self._progress = progress
        self._sink = sink
        self._rows = RowSchema.of_query(settings)
        self._checkpoint: Checkpoint | None = None
        self._origin: Origin | None = None
        self._has_looked_at_columns = False
        self._events_were_plain = True
        self._event_bytes: float = _EVENT_BYTES

    @property
    def last_result(self) -> MergeResult | None:
        """What the last batch did."""
        return self._sink.last_result

    def __call__(self, batch_df: DataFrame, batch_id: int) -> None:
        """Decode and merge one batch of records.

        Raises:
            ContractError: a truncate, or too large a share of undecodable records; nothing is written.
            StreamMergeError: as `MergeSink`.
        """
        with self._turn:
            self._merge(batch_df, batch_id)

    def look_again(self) -> None:
        """Somebody else has written to the target: its columns may be others at the next batch."""
        self._has_looked_at_columns = False

    def _merge(self, batch_df: DataFrame, batch_id: int) -> None:
        began = time.perf_counter()
        with ExitStack() as held:
            with self._sink._calls.reading(batch_df, batch_id, began, is_outage):
                self._look_around(batch_df)
                known = self._rows.columns
                read = self._read(batch_df, batch_id, held)
            intake = replace(read.intake, began=began)
            if read.events is not None:
                self._sink._calls.merge(read.events, batch_id, intake)
            else:
                self._sink._calls.account(batch_df, batch_id, intake)
            result = None if read.events is None else self._sink.last_result
            self._known_origin().committed(read.ranges, read.batch, read.lost, result)
            self._progress.merged(read.ranges, read.batch, read.lost, result)
            if self._rows.columns != known or self._rows.defaults:
                self.look_again()

    def _read(self, batch_df: DataFrame, batch_id: int, held: ExitStack) -> _Read:
        """What the batch brings, or why it is not merged.

        Args:
            batch_df: the records.
            batch_id: which batch.
            held: what has to be given back when the batch is done.
        """
        topics = self._cluster.topics(self._settings.topic)
        origin = self._known_origin()
        origin.expect_same_topics(topics)
        ranges = self._known_checkpoint(batch_df).ranges(
            batch_id, {name: state.starts for name, state in topics.items()}
        )
        gone = lost_offsets.lost(ranges, topics)
        if self._settings.on_data_loss == "stop":
            lost_offsets.refuse(gone, self._settings.target)
        batch = self._decoded(batch_df, ranges)
        held.callback(batch.release)
        self._stop_for_truncate(batch, batch_id)
        self._stop_for_share(batch, batch_id)
        decode.refuse_unknown_keys(batch)
        origin.expect_same_servers(batch)
        origin.expect_no_regression(batch, ranges)
        undecodable = self._undecodable(batch, batch_df, batch_id)
        if undecodable is not None:
            tell(
                log.warning,
                "records_quarantined",
                query=self._settings.name,
                batch_id=batch_id,
                undecodable=undecodable.events,
                records=batch.records,
                remedy="'stream-merge quarantine show' says why",
            )
        if not batch.row.fields:
            intake = Intake(calls="every", undecodable=undecodable)
            return _Read(batch=batch, ranges=ranges, lost=gone, events=None, intake=intake)
        placing, epoch_before = origin.placing(batch), origin.epoch_before(batch)
        events = change_events(
            batch,
            batch_df.sparkSession,
            self._settings,
            placing=placing,
            epoch_since=origin.epoch_since(),
            ranges=ranges,
            epoch_before=epoch_before,
        )
        intake = Intake(
            calls="every",
            recorded={SECTION: origin.recorded(ranges, batch, gone)},
            at_hand=None if epoch_before.ends else change_events_at_hand(batch, self._settings, placing=placing),
            undecodable=undecodable,
            column_defaults=column_defaults.fills(batch.defaults, self._settings),
        )
        return _Read(batch=batch, ranges=ranges, lost=gone, events=events, intake=intake)

    def _decoded(self, batch_df: DataFrame, ranges: Ranges) -> DecodedBatch:
        """In the driver where delta-rs will merge it there, and so it was with the batch before."""
        most_bytes, rows, last = self._settings.limits.max_value_bytes, self._rows, self.last_result
        records = sum(len(found) for partitions in ranges.values() for found in partitions.values())
        need = int(records * self._event_bytes * _COPIES)
        if not (
            workers_are_here(batch_df.sparkSession)
            and rows.known
            and self._events_were_plain
            and (last is None or last.refusal is None)
            and self._sink._calls.wants_events_at_hand(batch_df, need=need)
        ):
            batch = decode.evaluate(batch_df, rows, most_bytes)
            self._events_were_plain = decode.is_plain(batch)
            return batch
        batch = decode.evaluate_here(batch_df, rows, most_bytes)
        self._events_were_plain = batch.at_hand is not None
        if batch.at_hand is not None and batch.records:
            size = batch.at_hand.nbytes
            self._event_bytes = size / batch.records
            if not self._sink._calls.wants_events_at_hand(batch_df, need=size * _COPIES):
                batch.at_hand = None  # they are larger than those before; Spark reads the files
        return batch

    # -- what is there -----------------------------------------------------------------------

    def _look_around(self, batch_df: DataFrame) -> None:
        """At the first batch: the target's columns, and where its last recorded batch ended.

        A replay that was killed may have left records that count as merged, and are not.
        """
        if self._has_looked_at_columns:
            return
        session, target = batch_df.sparkSession, self._settings.target
        place = target.quarantine
        claims = query_claims(owned_session(session), place, target, owner=self._settings.checkpoint)
        if claims is not None and claims.settle() is not None:
            tell(log.warning, "quarantine_replay_unfinished", query=self._settings.name, remedy=UNFINISHED)
        found = spark_table.find(session, target)
        self._rows.start_from(None if found is None else found.schema)
        self._rows.look_ahead_in(self._newest)
        if self._origin is None:
            self._rows.admit_declared()
            who = caller_named(batch_df, app_id=None, name=self._settings.name)
            started = self._known_checkpoint(batch_df).initial()
            self._origin = Origin.of_table(session, found, who.identity, self._settings, started=started)
            self._progress.may_have_gaps = self._may_have_gaps()
            if self._origin.mixes_offsets:
                tell(log.warning, "other_topics_by_offset", query=self._settings.name, remedy=_MIXED_OFFSETS)
        self._has_looked_at_columns = found is not None

    def _newest(self) -> Records:
        return newest(self._cluster.connection, self._cluster.topics(self._settings.topic))

    def _may_have_gaps(self) -> frozenset[str] | None:
        """The topics that are compacted or written in transactions; None where the broker does not tell."""
        if self._settings.transactional:
            return frozenset(self._settings.topic)
        try:
            return frozenset(self._cluster.compacted(self._settings.topic))
        except (AuthorizationError, UnsupportedVersionError) as err:
            tell(log.warning, "compaction_unknown", topics=self._settings.topic, error=type(err).__name__)
            return None

    def _known_checkpoint(self, batch_df: DataFrame) -> Checkpoint:
        if self._checkpoint is None:
            self._checkpoint = Checkpoint.in_session(batch_df.sparkSession, self._settings.checkpoint)
        return self._checkpoint

    def _known_origin(self) -> Origin:
        if self._origin is None:
            msg = "the target has not been looked at yet"
            raise AssertionError(msg)
        return self._origin

    # -- what stops the job ------------------------------------------------------------------

    def _stop_for_truncate(self, batch: DecodedBatch, batch_id: int) -> None:
        if batch.first_truncate is None:
            return
        topic, partition, offset = batch.first_truncate
        if self._settings.on_truncate == "ignore":
            tell(log.warning, "truncate_ignored", topic=topic, partition=partition, offset=offset)
            return
        msg = (
            f"[SOURCE_TRUNCATED] topic {topic!r}, partition {partition}, offset {offset} truncates the source table"
            f" of {self._settings.target!r}; set 'on_truncate: ignore', let the job pass it, stop it, delete older rows"
        )
        raise ContractError(msg, reasons={"truncate": 1}, target=self._settings.target, batch_id=batch_id)

    def _stop_for_share(self, batch: DecodedBatch, batch_id: int) -> None:
        bad, records = batch.total(Kind.UNDECODABLE), batch.records
        most = MostUndecodable(share=self._settings.limits.max_quarantine_share, setting="max_quarantine_share")
        if not most.is_exceeded(bad, records):
            return
        example = batch.of_kinds(Kind.UNDECODABLE).select("topic", "partition", "offset", "note").first()
        where = (
            "" if example is None else f"; {example[0]!r}, partition {example[1]}, offset {example[2]}: {example[3]}"
        )
        raise most.error(bad, records, target=self._settings.target, batch_id=batch_id, example=where)

    # -- what goes where ---------------------------------------------------------------------

    def _undecodable(self, batch: DecodedBatch, batch_df: DataFrame, batch_id: int) -> Undecodable | None:
        events = batch.total(Kind.UNDECODABLE)
        if not events:
            return None
        query = caller_named(batch_df, app_id=None, name=None).query
        known: dict[str, Any] = {
            "reasons": F.array(F.lit("undecodable")),
            "query": F.lit(query),
            "batch_id": F.lit(batch_id),
            "recorded_at": F.current_timestamp(),
            "error": F.col("note"),
        }
        same = ("topic", "partition", "offset", "timestamp", "raw_key", "raw_value")
        known |= {name: F.col(name) for name in same}
        rows = batch.of_kinds(Kind.UNDECODABLE).select(
            *(known.get(f.name, F.lit(None)).cast(f.dataType).alias(f.name) for f in quarantine.SCHEMA.fields)
        )
        return Undecodable(rows=rows, events=events)


def merge_sink(settings: QuerySettings, **more: Any) -> MergeSink:
    """The sink behind a query's batch function."""
    shape = shape_from_settings(settings.shape)
    sink = MergeSink(
        target=settings.target,
        keys=settings.keys,
        sequence_by=SEQUENCE,
        except_column_list=[*SEQUENCE, DELETE],
        tombstones=Tombstones(retention_seconds=settings.tombstone_retention if shape.remembers_deletes else None),
        schema_evolution=settings.schema_evolution,
        engine=settings.engine,
        create=Create(properties=settings.table_properties),
        target_filter=settings.target_filter,
        driver=Driver(single_writer=settings.single_writer),
        shape=shape,
        maintenance=None if settings.maintenance is None else settings.maintenance.maintenance(),
        name=settings.name,
        **more,
    )
    sink._calls.for_source(
        *SOURCE_COLUMNS,
        deletes=names.quote(DELETE),
        position_components=POSITION_COMPONENTS,
        skip_unchanged=settings.unchanged == "skip",
    )
    return sink
