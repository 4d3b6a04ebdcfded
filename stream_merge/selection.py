"""The engine of one batch: chosen, built, replaced when it fails, and learnt from."""

from __future__ import annotations

import logging
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from stream_merge import columns, names
from stream_merge.batch import Batch
from stream_merge.choice import Choice, choose
from stream_merge.config import MergeSpec
from stream_merge.costs import CostModel
from stream_merge.engines.base import Engine
from stream_merge.engines.log_rules import log_of
from stream_merge.engines.native import NativeEngine
from stream_merge.engines.native_log import NativeTombstones
from stream_merge.engines.spark import SparkEngine
from stream_merge.engines.spark_log import Tombstones
from stream_merge.layout import Layout
from stream_merge.results import Refusal
from stream_merge.snapshot import TableSnapshot
from stream_merge.spark_internals import reason
from stream_merge.store import Store

log = logging.getLogger(__name__)


class Selector:
    """Chooses between the engines for one batch."""

    def __init__(self, spec: MergeSpec, store: Store, costs: CostModel) -> None:
        self._spec = spec
        self._store = store
        self._costs = costs
        self._choice: Choice | None = None

    @property
    def name(self) -> str:
        """Which engine runs the merge, or would have."""
        if self._choice is None:
            return "native" if self._spec.engine == "native" else "spark"
        return "native" if self._choice.native else "spark"

    @property
    def why(self) -> str:
        """The choice in one sentence."""
        return f"{self.name}: {'no merge needed' if self._choice is None else self._choice.why}"

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
        log_table, log_snapshot = None, None
        if spec.engine != "spark" and spec.tombstones:
            log_table = self._store.native(session, spec.tombstone_target)
            found = self._store.find(session, spec.tombstone_target) if log_table is None else log_table.snapshot()
            log_snapshot = log_of(target.table_id, found)
        self._choice = choose(
            spec=spec,
            layout=layout,
            batch=batch,
            target=self._store.native(session, spec.target),
            snapshot=target,
            log=log_table,
            log_snapshot=log_snapshot,
            costs=self._costs,
            cores=session.sparkContext.defaultParallelism,
        )

    def engine(self) -> Engine[Any]:
        """The chosen engine with the batch's events at hand."""
        choice = self._chosen()
        now = F.timestamp_micros(F.lit(self._now_micros))
        session, spec, layout, batch = self._session, self._spec, self._layout, self._batch
        if not choice.native:
            return SparkEngine(
                session=session, spec=spec, layout=layout, batch=batch, target_id=self._target.table_id, now=now
            )
        target = self._store.native(session, spec.target)
        if target is None:
            msg = f"target {spec.target!r} was readable by delta-rs a moment ago"
            raise AssertionError(msg)
        tombstones = NativeTombstones(
            open_log=lambda: self._store.native(session, spec.tombstone_target),
            start=Tombstones(session, spec, self._target.table_id, layout).start,
            spec=spec,
            target_id=self._target.table_id,
            layout=layout,
            now_micros=self._now_micros,
        )
        return NativeEngine(
            target=target,
            tombstones=tombstones if spec.tombstones else None,
            layout=layout,
            events=arrow_events(batch, layout),
            bounds=batch.bounds,
        )

    def fall_back(self, error: Exception) -> bool:
        """Take Spark after a native failure that left nothing behind; False where that is no way out."""
        choice = self._chosen()
        if not choice.native or self._spec.engine == "native":
            return False
        log.warning("native_engine_failed", extra={"target": self._spec.label, "error": reason(error)})
        why = f"delta-rs failed ({reason(error)}), nothing was committed"
        self._choice = Choice(native=False, why=why, work=choice.work, refusal="failed")
        return True

    def learn(self, seconds: float) -> None:
        """Note what the merge took."""
        if self._choice is not None and self._spec.engine != "spark":
            self._costs.learn(self.name, self._choice.work, seconds)

    def _chosen(self) -> Choice:
        if self._choice is None:
            msg = "no engine has been chosen yet"
            raise AssertionError(msg)
        return self._choice


def arrow_events(batch: Batch, layout: Layout) -> pa.Table:
    """The latest event of each key: stored columns, `__stream_merge_sequence`, `__stream_merge_delete`, in the driver.

    Cost: one Spark job over the evaluated rows; no shuffle.
    """
    wanted = layout.once(
        "arrow_columns",
        lambda: [
            columns.column(name)
            for name in (*(c.name for c in layout.stored), names.SEQUENCE_COLUMN, names.DELETE_COLUMN)
        ],
    )
    events = batch.latest.select(*wanted).toArrow()
    return events.cast(pa.schema([pa.field(f.name, _for_delta(f.type)) for f in events.schema]))


def _for_delta(dtype: pa.DataType) -> pa.DataType:
    """The type as Delta keeps it: times in UTC, nothing NOT NULL inside."""
    if pa.types.is_timestamp(dtype) and dtype.tz is not None:
        return pa.timestamp("us", tz="UTC")
    if pa.types.is_struct(dtype):
        return pa.struct([pa.field(f.name, _for_delta(f.type)) for f in dtype])
    if pa.types.is_list(dtype):
        return pa.list_(pa.field(dtype.value_field.name, _for_delta(dtype.value_type)))
    return dtype
