"""Which engine merges a batch, and why."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import DateType, DecimalType, StringType, TimestampNTZType, TimestampType

from stream_merge.batch import Batch
from stream_merge.config import MergeSpec
from stream_merge.costs import CostModel, Work
from stream_merge.engines.delta_rs import NativeTable
from stream_merge.engines.eligibility import Ineligible, of_batch, of_table
from stream_merge.errors import ConfigError
from stream_merge.layout import Layout
from stream_merge.memory import reservations
from stream_merge.plan import KeyBounds
from stream_merge.results import Refusal
from stream_merge.snapshot import TableSnapshot

NATIVE_BYTES_PER_FILE_BYTE = 2.5
NATIVE_BYTES_PER_EVENT_BYTE = 6
"""Resident memory of a merge by delta-rs: 20 M rows of 60 B, all touched, with 1 M events, peaked at 1.6 GB."""
NATIVE_BASE_BYTES = 128 << 20
"""What delta-rs, Arrow and its allocator hold whatever the batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The engine for one batch."""

    native: bool
    why: str
    work: Work
    refusal: Refusal | None = None
    """Why not native; None when it was chosen, or Spark was asked for."""
    reserved_bytes: int = 0
    """Memory promised to the native merge until it is over (`memory.reservations`)."""


def choose(
    *,
    spec: MergeSpec,
    layout: Layout,
    batch: Batch,
    target: NativeTable | None,
    snapshot: TableSnapshot,
    log: NativeTable | None,
    log_snapshot: TableSnapshot | None,
    costs: CostModel,
    cores: int,
) -> Choice:
    """Choose between the engines from what is known about table and batch.

    A native choice holds memory until `memory.reservations` gets it back.

    Raises:
        ConfigError: engine="native" and the batch is not for delta-rs.
    """
    events = batch.upserts + batch.deletes
    if spec.engine == "spark":
        return Choice(native=False, why="asked for", work=Work(events=events, bytes=0, cores=cores))
    refused = of_batch(layout) or of_table(target, snapshot, "the target")
    if refused is None and log_snapshot is not None:
        refused = of_table(log, log_snapshot, "the tombstone table")
    touched, rows = (0, 0) if target is None else touched_files(target, batch.bounds)
    if log is not None and log_snapshot is not None:
        remembered, entries = touched_files(log, batch.bounds)
        touched, rows = touched + remembered, rows + entries
    work = Work(events=events, bytes=touched, cores=cores)
    if refused is not None:
        return left_to_spark(spec, refused, work)
    native, spark = costs.seconds("native", work), costs.seconds("spark", work)
    estimate = (
        f"{events:,} events, {touched / 1e6:,.1f} MB in the files that the key bounds leave:"
        f" native about {native:.2f} s, spark about {spark:.2f} s"
    )
    if spec.engine == "auto" and native > spark:
        return Choice(native=False, why=estimate, work=work, refusal="cost")
    need = _memory_needed(work, rows)
    allowed = reservations.take(need, spec.native_memory_bytes)
    if allowed is not None:
        detail = f"delta-rs might need {need / 1e6:,.0f} MB of the driver's memory, of {allowed / 1e6:,.0f} MB allowed"
        return left_to_spark(spec, Ineligible(reason="memory", detail=detail), work)
    why = estimate if spec.engine == "auto" else f"asked for; {estimate}"
    return Choice(native=True, why=why, work=work, reserved_bytes=need)


def left_to_spark(spec: MergeSpec, refused: Ineligible, work: Work) -> Choice:
    """Spark, because the batch is not for delta-rs.

    Raises:
        ConfigError: under engine="native".
    """
    if spec.engine == "native":
        msg = f"engine='native' cannot merge this batch: {refused.detail}; use engine='auto' or 'spark'"
        raise ConfigError(msg, target=spec.target)
    return Choice(native=False, why=refused.detail, work=work, refusal=refused.reason)


def touched_files(table: NativeTable, bounds: KeyBounds) -> tuple[int, int]:
    """Bytes and rows of the files whose statistics do not rule out the keys within the bounds. Reads the log only."""
    files = table.files()
    keep: Any = pa.array([True] * files.num_rows, pa.bool_())
    for field, low, high in zip(bounds.fields, bounds.least, bounds.greatest, strict=True):
        least, greatest = f"min.{field.name}", f"max.{field.name}"
        if files.column_names.count(least) != 1 or files.column_names.count(greatest) != 1:
            continue  # no statistics, or a nested field of the same flattened name
        try:
            lowest, highest = _scalar(low, field.dataType, files[least]), _scalar(high, field.dataType, files[greatest])
            may_hold = pc.and_kleene(pc.less_equal(files[least], highest), pc.greater_equal(files[greatest], lowest))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError):
            continue
        keep = pc.and_(keep, pc.fill_null(may_hold, True))
    kept = files.filter(keep)
    rows = pc.sum(kept["num_records"]).as_py() if "num_records" in kept.column_names else 0
    return int(pc.sum(kept["size_bytes"]).as_py() or 0), int(rows or 0)


def _scalar(value: Any, dtype: object, like: pa.ChunkedArray) -> pa.Scalar:
    if isinstance(dtype, StringType):
        return pa.scalar(value, pa.string()).cast(like.type)
    if isinstance(dtype, DecimalType):
        return pa.scalar(Decimal(value)).cast(like.type)
    if isinstance(dtype, TimestampType):
        return pa.scalar(value, pa.timestamp("us", tz="UTC")).cast(like.type)
    if isinstance(dtype, TimestampNTZType):
        return pa.scalar(value, pa.string()).cast(pa.timestamp("us")).cast(like.type)
    if isinstance(dtype, DateType):
        return pa.scalar(value, pa.int32()).cast(pa.date32()).cast(like.type)
    return pa.scalar(value, pa.int64()).cast(like.type)


def _memory_needed(work: Work, rows: int) -> int:
    row_bytes = work.bytes / rows if rows else 256
    return int(
        NATIVE_BASE_BYTES
        + NATIVE_BYTES_PER_FILE_BYTE * work.bytes
        + NATIVE_BYTES_PER_EVENT_BYTE * row_bytes * work.events
    )
