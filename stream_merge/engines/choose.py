"""Which engine merges a batch, and why."""

from __future__ import annotations

from dataclasses import dataclass

from stream_merge.engines.costs import CostModel, Work
from stream_merge.engines.memory import reservations
from stream_merge.errors import ConfigError
from stream_merge.model.results import Refusal
from stream_merge.model.settings import MergeSpec
from stream_merge.model.snapshot import TableSnapshot
from stream_merge.shapes.batch import Batch
from stream_merge.shapes.layout import Layout
from stream_merge.tables.delta_rs.eligibility import Ineligible, of_batch, of_files, of_table
from stream_merge.tables.delta_rs.table import NativeTable
from stream_merge.tables.delta_rs.touched_files import size_of, touched_files

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
    version: int = -1
    """Of the target, as delta-rs was chosen for it."""
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
    touched, rows = (0, 0) if target is None else size_of(touched_files(target, batch.bounds))
    if log is not None and log_snapshot is not None:
        remembered, entries = size_of(touched_files(log, batch.bounds))
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
    refused = None if target is None else of_files(target, snapshot, "the target", batch.bounds)
    if refused is None and log is not None and log_snapshot is not None:
        refused = of_files(log, log_snapshot, "the tombstone table")
    if refused is not None:
        return left_to_spark(spec, refused, work)
    need = _memory_needed(work, rows)
    allowed = reservations.take(need, spec.native_memory_bytes)
    if allowed is not None:
        detail = f"delta-rs might need {need / 1e6:,.0f} MB of the driver's memory, of {allowed / 1e6:,.0f} MB allowed"
        return left_to_spark(spec, Ineligible(reason="memory", detail=detail), work)
    why = estimate if spec.engine == "auto" else f"asked for; {estimate}"
    version = -1 if target is None else target.version
    return Choice(native=True, why=why, work=work, version=version, reserved_bytes=need)


def left_to_spark(spec: MergeSpec, refused: Ineligible, work: Work) -> Choice:
    """Spark, because the batch is not for delta-rs.

    Raises:
        ConfigError: under engine="native".
    """
    if spec.engine == "native":
        msg = f"engine='native' cannot merge this batch: {refused.detail}; use engine='auto' or 'spark'"
        raise ConfigError(msg, target=spec.target)
    return Choice(native=False, why=refused.detail, work=work, refusal=refused.reason)


def _memory_needed(work: Work, rows: int) -> int:
    row_bytes = work.bytes / rows if rows else 256
    return int(
        NATIVE_BASE_BYTES
        + NATIVE_BYTES_PER_FILE_BYTE * work.bytes
        + NATIVE_BYTES_PER_EVENT_BYTE * row_bytes * work.events
    )
