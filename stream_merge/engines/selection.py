"""The engine of one batch: chosen, built, replaced when it fails, and learnt from."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from stream_merge.engines.base import Engine
from stream_merge.engines.choose import Choice, choose, left_to_spark
from stream_merge.engines.costs import CostModel, favours_deletion_vectors
from stream_merge.engines.delta_rs.merger import NativeEngine
from stream_merge.engines.memory import reservations
from stream_merge.engines.mixed import MixedEngine
from stream_merge.engines.spark.merger import SparkEngine
from stream_merge.model.logs import tell
from stream_merge.model.results import Refusal
from stream_merge.model.settings import MergeSpec
from stream_merge.model.snapshot import TableSnapshot
from stream_merge.shapes.batch import Batch
from stream_merge.shapes.layout import Layout
from stream_merge.shapes.newest import Newest, stored
from stream_merge.spark import environment
from stream_merge.spark.errors import exceeds_driver_results, reason
from stream_merge.spark.evaluate_once import known_bytes
from stream_merge.tables.delta_rs.eligibility import Ineligible, of_batch, of_events, of_log, of_table
from stream_merge.tables.reader import Store
from stream_merge.tables.tombstones.delta_rs import NativeTombstones
from stream_merge.tables.tombstones.rules import log_of
from stream_merge.tables.tombstones.spark import Tombstones

log = logging.getLogger(__name__)

DRIVER_EVENTS = 100_000
DRIVER_BYTES = 16 << 20
"""Up to these sizes a batch is evaluated in the driver."""


class Selector:
    """Chooses between the engines for one batch."""

    def __init__(self, spec: MergeSpec, store: Store, costs: CostModel) -> None:
        self._spec = spec
        self._store = store
        self._costs = costs
        self._choice: Choice | None = None
        self._deletion_vectors: bool | None = None
        self._log_natively = False

    @property
    def name(self) -> str:
        """Which engine runs the merge, or would have."""
        if self._choice is None:
            return "native" if self._spec.engine == "native" else "spark"
        return "native" if self._choice.native else "spark"

    @property
    def why(self) -> str:
        """The choice in one sentence."""
        if self._choice is None:
            return f"{self.name}: no merge needed"
        how = {None: "", True: "; with deletion vectors", False: "; copy-on-write"}[self._deletion_vectors]
        return f"{self.name}: {self._choice.why}{how}"

    @property
    def refusal(self) -> Refusal | None:
        """Why not native; None when it is, or was not to be."""
        return None if self._choice is None else self._choice.refusal

    def choose(
        self, session: SparkSession, layout: Layout, batch: Batch, target: TableSnapshot, now_micros: int
    ) -> None:
        """Choose the engine for a batch with events to merge.

        Raises:
            ConfigError: engine="native" and the batch is not for delta-rs.
        """
        self._session, self._layout, self._batch = session, layout, batch
        self._target, self._now_micros = target, now_micros
        spec = self._spec
        if spec.tombstones:
            layout.once("log_of_types", self._bring_log_along)
        log_table, log_snapshot = None, None
        if spec.engine != "spark" and spec.tombstones:
            log_table = self._store.native(session, spec.tombstone_target)
            found = self._store.find(session, spec.tombstone_target) if log_table is None else log_table.snapshot()
            log_snapshot = log_of(target.table_id, found)
        self._choice = choose(
            spec=spec,
            layout=layout,
            batch=batch,
            target=None if spec.engine == "spark" else self._store.handle(session, spec.target),
            snapshot=target,
            log=log_table,
            log_snapshot=log_snapshot,
            costs=self._costs,
            cores=session.sparkContext.defaultParallelism,
        )
        self._log_natively = (
            spec.engine == "auto"
            and batch.upserts + batch.deletes <= DRIVER_EVENTS
            and log_table is not None
            and log_snapshot is not None
            and of_log(layout, log_table, log_snapshot) is None
            and self._costs.remembers_natively
        )

    def _bring_log_along(self) -> bool:
        """Keys and sequence of the target may have been widened, by this batch or by somebody."""
        session, spec = self._session, self._spec
        found = log_of(self._target.table_id, self._store.find(session, spec.tombstone_target))
        if found is not None:
            Tombstones(session, spec, self._target.table_id, self._layout).bring_along(found)
        return True

    def fits_the_driver(self, source: DataFrame, layout: Layout, target: TableSnapshot | None) -> bool:
        """Whether the batch is to be evaluated in the driver: it will be small, and delta-rs may merge it.

        Nobody knows a batch's size before it is read. The batch before is the best guess, else what
        Spark knows of a source that is in memory already.
        """
        if not self.reads_natively(source.sparkSession, target, layout):
            return False
        if self._costs.last_events is None:
            return known_bytes(source) <= DRIVER_BYTES
        return self._costs.last_events <= DRIVER_EVENTS

    def reads_natively(self, session: SparkSession, target: TableSnapshot | None, layout: Layout | None = None) -> bool:
        """Whether delta-rs may merge into the target: batches in this layout, or any."""
        if self._spec.engine == "spark" or target is None or target.read_by != "native":
            return False
        if layout is not None and of_batch(layout) is not None:
            return False
        return of_table(self._store.handle(session, self._spec.target), target, "target") is None

    def note_size(self, received: int) -> None:
        """Remember how large the batch was."""
        self._costs.last_events = received

    def engine(self) -> Engine[Any]:
        """The chosen engine with the batch's events at hand."""
        choice = self._chosen()
        now = F.timestamp_micros(F.lit(self._now_micros))
        session, spec, layout, batch = self._session, self._spec, self._layout, self._batch
        if not choice.native:
            return self._on_spark(choice, now)
        unfit = self._unfit_events()
        if unfit is not None:
            self.release()
            self._choice = left_to_spark(spec, unfit, choice.work)
            return self.engine()
        target = self._store.handle(session, spec.target)
        if target is None:
            msg = f"target {spec.target!r} was readable by delta-rs a moment ago"
            raise AssertionError(msg)
        return NativeEngine(
            spec=spec,
            target=target,
            tombstones=self._native_log() if spec.tombstones else None,
            layout=layout,
            events=self._events,
            bounds=batch.bounds,
            chosen_at=choice.version,
        )

    def _on_spark(self, choice: Choice, now: Column) -> Engine[Any]:
        session, layout, batch = self._session, self._layout, self._batch
        if choice.work.bytes and self._target.properties.get("delta.enableDeletionVectors") == "true":
            self._deletion_vectors = favours_deletion_vectors(choice.work)
        spark = SparkEngine(
            session=session,
            spec=self._spec,
            layout=layout,
            batch=batch,
            target_id=self._target.table_id,
            now=now,
            stored_newest=lambda: self._stored_newest(session, layout),
            deletion_vectors=self._deletion_vectors,
        )
        if not self._log_natively:
            return spark
        try:
            events = batch.rows.keys()
        except Exception as err:
            if not exceeds_driver_results(err):
                raise
            self._log_natively = False
            return spark
        if of_events(events, ()) is not None:
            self._log_natively = False
            return spark
        return MixedEngine(
            spark=spark,
            session=session,
            tombstones=self._native_log(),
            layout=layout,
            events=events,
            bounds=batch.bounds,
        )

    def _stored_newest(self, session: SparkSession, layout: Layout) -> Newest | None:
        files = self._store.statistics(session, self._spec.target)
        return None if files is None else stored(files, layout)

    def _native_log(self) -> NativeTombstones:
        session, spec = self._session, self._spec
        return NativeTombstones(
            open_log=lambda: self._store.native(session, spec.tombstone_target, must_read=True),
            start=Tombstones(session, spec, self._target.table_id, self._layout).start,
            spec=spec,
            target_id=self._target.table_id,
            layout=self._layout,
            now_micros=self._now_micros,
        )

    def _unfit_events(self) -> Ineligible | None:
        """Bring the events into the driver; why that cannot be, or why delta-rs must not have them."""
        try:
            self._events = self._batch.rows.arrow()
        except Exception as err:
            if not exceeds_driver_results(err):
                raise
            return Ineligible(reason="memory", detail="the events exceed spark.driver.maxResultSize")
        return of_events(self._events, self._target.partition_columns)

    def fall_back(self, error: Exception) -> bool:
        """Leave everything to Spark after delta-rs failed and left nothing behind; False where that is no way out."""
        choice = self._chosen()
        if not (choice.native or self._log_natively) or self._spec.engine == "native":
            return False
        if environment.said(error) is not None:  # on the same disk, Spark would fail as well
            return False
        self._log_natively = False
        tell(log.warning, "native_engine_failed", target=self._spec.label, error=reason(error))
        self.release()
        if not choice.native:
            self._choice = replace(choice, why=f"{choice.why}; delta-rs failed on the tombstones ({reason(error)})")
            return True
        why = f"delta-rs failed ({reason(error)}), nothing was committed"
        self._choice = Choice(native=False, why=why, work=choice.work, refusal="failed")
        return True

    def learn(self, seconds: float) -> None:
        """Note what the merge took."""
        if self._choice is not None and self._spec.engine != "spark":
            self._costs.learn(self.name, self._choice.work, seconds)

    def release(self) -> None:
        """Give back the memory that the merge was promised."""
        if self._choice is not None and self._choice.reserved_bytes:
            reservations.give_back(self._choice.reserved_bytes)
            self._choice = replace(self._choice, reserved_bytes=0)

    def _chosen(self) -> Choice:
        if self._choice is None:
            msg = "no engine has been chosen yet"
            raise AssertionError(msg)
        return self._choice
