"""One query's batch function: what a topic brought in, decoded once, merged in one commit, with its offsets."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from kafka.errors import AuthorizationError, UnsupportedVersionError
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from stream_merge.jobs.kafka import column_defaults, decode
from stream_merge.jobs.kafka.batch_offsets import Checkpoint, Covered
from stream_merge.jobs.kafka.columns import RowSchema
from stream_merge.jobs.kafka.commit_section import SECTION
from stream_merge.jobs.kafka.decode import Decoded
from stream_merge.jobs.kafka.events import SOURCE_COLUMNS, change_events, change_events_at_hand
from stream_merge.jobs.kafka.exit_codes import is_outage
from stream_merge.jobs.kafka.guard import guard, refuse_lost, refuse_other_topics
from stream_merge.jobs.kafka.lag import Progress
from stream_merge.jobs.kafka.lineage import Lineage, read_lineage
from stream_merge.jobs.kafka.newest_records import newest
from stream_merge.jobs.kafka.ordering import DELETE, POSITION_COMPONENTS, SEQUENCE
from stream_merge.jobs.kafka.settings import QuerySettings
from stream_merge.jobs.shapes import shape_from_settings
from stream_merge.model import names
from stream_merge.model.logs import tell
from stream_merge.model.results import MergeResult
from stream_merge.model.settings import Create, Driver, Tombstones
from stream_merge.model.source_batch import Intake, Undecodable
from stream_merge.sink import MergeSink
from stream_merge.sources.decode.arrow_files import workers_are_here
from stream_merge.sources.decode.events import PLACE
from stream_merge.sources.envelopes.base import Kind
from stream_merge.sources.kafka.connection import Cluster
from stream_merge.spark.streaming import caller_named
from stream_merge.tables import spark_table
from stream_merge.tables.side import quarantine

log = logging.getLogger(__name__)

_MIXED_OFFSETS = (
    "the table holds events of other topics, and offsets of one topic do not compare with those of another: where they"
    " are of the same keys, raise 'epoch' by one"
)
_EVENT_BYTES = 300
"""Of a decoded event, until a batch has told."""
_COPIES = 4
"""Of a batch in the driver while the latest event of each key is looked for."""


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
        self._lineage: Lineage | None = None
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
        with self._turn, ExitStack() as held:
            self._merge(batch_df, batch_id, held)

    def look_again(self) -> None:
        """Somebody else has written to the target: its columns may be others at the next batch."""
        self._has_looked_at_columns = False

    def _merge(self, batch_df: DataFrame, batch_id: int, held: ExitStack) -> None:
        began, calls, settings = time.perf_counter(), self._sink._calls, self._settings
        with calls.reading(batch_df, batch_id, began, is_outage):
            lineage, topics = self._look_around(batch_df), self._cluster.topics(settings.topic)
            refuse_other_topics(lineage, topics)
            lineage, known = lineage.at(topics), self._rows.columns
            starts = {name: state.starts for name, state in topics.items()}
            covered = Covered.by_broker(self._known_checkpoint(batch_df).ranges(batch_id, starts), topics)
            refuse_lost(covered.lost, settings)
            batch = self._decoded(batch_df, covered, held)
            guard(batch, lineage, covered, batch_id)
            intake = Intake(calls="every", began=began, undecodable=self._undecodable(batch, batch_df, batch_id))
            events = None
            if batch.row.fields:  # else nobody knows the columns of a row yet, so that there is no event either
                placing, before = lineage.placing(batch.tally), lineage.epoch_before(batch.tally)
                events = change_events(
                    batch,
                    batch_df.sparkSession,
                    settings,
                    held,
                    placing=placing,
                    epoch_since=lineage.epoch_since,
                    ranges=covered.ranges,
                    epoch_before=before,
                )
                intake = replace(
                    intake,
                    recorded={SECTION: lineage.section(covered, events.tally)},
                    at_hand=None if before.ends else change_events_at_hand(batch, settings, placing=placing),
                    column_defaults=column_defaults.fills(batch.defaults, settings),
                )
        if events is None:
            calls.account(batch_df, batch_id, intake)
        else:
            calls.merge(events.frame, batch_id, intake)
        tally, result = (batch.tally, None) if events is None else (events.tally, self.last_result)
        is_committed = result is not None and (result.version is not None or result.outcome == "skipped_duplicate")
        self._lineage = lineage.behind(covered, tally, is_committed=is_committed)
        self._progress.merged(covered, tally, result)
        if self._rows.columns != known or self._rows.defaults:
            self.look_again()

    def _decoded(self, batch_df: DataFrame, covered: Covered, held: ExitStack) -> Decoded:
        """In the driver where an engine will merge it there, and so it was with the batch before."""
        rows, last, calls = self._rows, self.last_result, self._sink._calls
        offsets = sum(len(offsets) for _, offsets in covered.places())
        if not (
            workers_are_here(batch_df.sparkSession)
            and rows.known
            and self._events_were_plain
            and (last is None or last.refusal is None)
            and calls.wants_events_at_hand(batch_df, need=int(offsets * self._event_bytes * _COPIES))
        ):
            batch = decode.evaluate(batch_df, rows, held)
            self._events_were_plain = decode.is_plain(batch)
            return batch
        batch = decode.evaluate_here(batch_df, rows, held)
        self._events_were_plain = batch.at_hand is not None
        if batch.at_hand is not None and batch.tally.records:
            size = batch.at_hand.nbytes
            self._event_bytes = size / batch.tally.records
            if not calls.wants_events_at_hand(batch_df, need=size * _COPIES):
                return replace(batch, at_hand=None)  # they are larger than those before; Spark reads the files
        return batch

    # -- what is there -----------------------------------------------------------------------

    def _look_around(self, batch_df: DataFrame) -> Lineage:
        """The lineage; at the first batch, and behind another writer, look at the columns of the target, too."""
        lineage = self._lineage
        if lineage is None or not self._has_looked_at_columns:
            session, target = batch_df.sparkSession, self._settings.target
            found = spark_table.find(session, target)
            self._rows.start_from(None if found is None else found.schema)
            self._rows.look_ahead_in(
                lambda: newest(self._cluster.connection, self._cluster.topics(self._settings.topic))
            )
            if lineage is None:
                self._rows.admit_declared()
                who = caller_named(batch_df, app_id=None, name=self._settings.name)
                started = self._known_checkpoint(batch_df).initial()
                lineage = read_lineage(session, found, self._settings, identity=who.identity, started=started)
                self._progress.may_have_gaps = self._may_have_gaps()
                if lineage.mixes_offsets:
                    tell(log.warning, "other_topics_by_offset", query=self._settings.name, remedy=_MIXED_OFFSETS)
            self._has_looked_at_columns = found is not None
        self._lineage = lineage
        return lineage

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

    def _undecodable(self, batch: Decoded, batch_df: DataFrame, batch_id: int) -> Undecodable | None:
        events = batch.tally.total(Kind.UNDECODABLE)
        if not events:
            return None
        tell(
            log.warning,
            "records_quarantined",
            query=self._settings.name,
            batch_id=batch_id,
            undecodable=events,
            records=batch.tally.records,
            remedy="'stream-merge quarantine show' says why",
        )
        known: dict[str, Any] = {
            "reasons": F.array(F.lit("undecodable")),
            "query": F.lit(caller_named(batch_df, app_id=None, name=None).query),
            "batch_id": F.lit(batch_id),
            "recorded_at": F.current_timestamp(),
            "error": F.col("note"),
        }
        known |= {name: F.col(name) for name in (*PLACE, "raw_key", "raw_value")}
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
