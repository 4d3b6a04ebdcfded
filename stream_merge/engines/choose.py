"""Which engine merges a batch, and why; Spark, where the driver cannot or has failed."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from pyspark.sql import DataFrame

from stream_merge.engines.base import Choice, Execution, MergeJob
from stream_merge.engines.costs import DRIVER_BYTES, DRIVER_EVENTS, CostModel, Work
from stream_merge.engines.driver import engine as driver
from stream_merge.engines.driver.merger import NoLongerEligibleError
from stream_merge.engines.memory import reservations
from stream_merge.engines.spark import engine as spark
from stream_merge.errors import ConfigError
from stream_merge.model.logs import tell
from stream_merge.model.settings import MergeSpec
from stream_merge.model.snapshot import TableSnapshot
from stream_merge.shapes.layout import Layout
from stream_merge.spark import environment
from stream_merge.spark.errors import reason
from stream_merge.spark.evaluate_once import known_bytes
from stream_merge.tables.files.eligibility import Ineligible
from stream_merge.tables.log.live_files import bytes_and_rows, touched_files
from stream_merge.tables.side.tombstones import own_log, widen_schema
from stream_merge.tables.table import Tables

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Preference:
    """Which engine a job goes to, as far as logs and estimates tell."""

    in_driver: bool
    estimate: str
    """Events, bytes and expected seconds, in words."""
    obstacle: Ineligible | None = None
    """Why the driver cannot merge it; None if it can, or Spark was asked for."""


def prefer(job: MergeJob) -> Preference:
    """The cheaper engine of those that may merge the job."""
    if job.spec.engine == "spark":
        return Preference(in_driver=False, estimate="asked for")
    by_driver, by_spark = (job.costs.seconds(way, job.work) for way in (driver.mode(job), "spark"))
    asked = "" if job.spec.engine == "auto" else "asked for; "
    estimate = (
        f"{asked}{job.work.events:,} events, {job.work.bytes / 1e6:,.1f} MB in files that may hold their keys: driver"
        f" about {by_driver:.2f} s, spark about {by_spark:.2f} s"
    )
    obstacle = driver.obstacle(job)
    is_cheaper = bool(asked) or by_driver <= by_spark
    return Preference(in_driver=obstacle is None and is_cheaper, estimate=estimate, obstacle=obstacle)


def start(job: MergeJob, preference: Preference) -> Execution:
    """The engine at work on the job: Spark where the driver turns out not to be able to merge it."""
    refused = preference.obstacle
    if preference.in_driver:
        started = driver.start(job, preference.estimate)
        if isinstance(started, Execution):
            return started
        refused = started
    if job.spec.engine == "driver" and refused is not None:
        msg = f"[DRIVER_NOT_POSSIBLE] engine='driver' cannot merge this batch: {refused.detail}; use 'auto' or 'spark'"
        raise ConfigError(msg, target=job.spec.target)
    if refused is not None:
        return spark.start(job, refused.detail, refused.reason)
    return spark.start(job, preference.estimate, None if job.spec.engine == "spark" else "cost")


def fall_back(job: MergeJob, failed: Execution, error: Exception) -> Execution | None:
    """Spark instead of a driver that failed and committed nothing; None where Spark would fail, too."""
    if failed.only_spark or job.spec.engine == "driver":
        return None
    if environment.said(error) is not None:  # on the same disk, Spark would fail as well
        return None
    tell(log.warning, "driver_failed", target=job.spec.label, error=reason(error))
    failed.release()
    alone = replace(job, log=None)
    if isinstance(error, NoLongerEligibleError):
        return spark.start(alone, error.refused.detail, error.refused.reason)
    if not failed.in_driver:
        why = f"{failed.choice.why}; the driver failed on the tombstones ({reason(error)})"
        return spark.start(alone, why, failed.choice.refusal)
    return spark.start(alone, f"the driver failed ({reason(error)}), nothing was committed", "failed")


def without_work(engine: str) -> Choice:
    """The engine of a batch that left nothing to merge: the one that would have been tried first."""
    return Choice(engine="driver" if engine == "driver" else "spark", why="no merge needed")


def learn(costs: CostModel, job: MergeJob, execution: Execution, seconds: float) -> None:
    """Record how long a merge took."""
    if job.spec.engine != "spark":
        costs.learn(execution.choice.mode or "spark", job.work, seconds)


def measured(job: MergeJob) -> MergeJob:
    """The job with the logs and sizes that engines are chosen by; for `engine="spark"` nothing is read."""
    spec, tables = job.spec, job.tables
    if spec.tombstones:
        job.layout.once("log_of_types", lambda: _widen_log(job))
    table, log, log_snapshot, touched, rows = None, None, None, 0, 0
    if spec.engine != "spark":
        table = tables.target.current_driver()
        if spec.tombstones:
            log_snapshot = own_log(job.target.table_id, tables.tombstones.snapshot())
            log = tables.tombstones.cached_driver()
        for one in (table, None if log_snapshot is None else log):
            if one is not None:
                more_bytes, more_rows = bytes_and_rows(touched_files(one, job.batch.bounds))
                touched, rows = touched + more_bytes, rows + more_rows
    cores, events = job.session.sparkContext.defaultParallelism, job.batch.upserts + job.batch.deletes
    work = Work(events=events, bytes=touched, rows=rows, cores=cores)
    return replace(job, table=table, log=log, log_snapshot=log_snapshot, work=work)


def _widen_log(job: MergeJob) -> bool:
    """Widen the tombstones' table where this batch or another writer widened keys or sequence of the target."""
    table = own_log(job.target.table_id, job.tables.tombstones.snapshot())
    if table is not None:
        widen_schema(job.session, job.spec, job.target.table_id, job.layout, table)
    return True


def fits_the_driver(
    source: DataFrame,
    spec: MergeSpec,
    tables: Tables,
    costs: CostModel,
    *,
    layout: Layout,
    target: TableSnapshot | None,
) -> bool:
    """Whether the batch is to be evaluated in the driver: it is expected to be small, and may be merged there.

    A batch's size is guessed from the batch before, else from what Spark knows of a source in memory.
    """
    if not is_for_driver(spec, tables, target, layout):
        return False
    if costs.last_events is None:
        return known_bytes(source) <= DRIVER_BYTES
    return costs.last_events <= DRIVER_EVENTS


def is_for_driver(
    spec: MergeSpec,
    tables: Tables,
    target: TableSnapshot | None,
    layout: Layout | None = None,
) -> bool:
    """Whether an engine in the driver may merge into the target: batches in this layout, or any."""
    return spec.engine != "spark" and target is not None and driver.may_merge(spec, tables, target, layout)


def wants_events_at_hand(spec: MergeSpec, tables: Tables, *, need: int) -> bool:
    """Whether an engine in the driver is likely to merge a batch that takes so many bytes of memory there."""
    ceiling = reservations.allowed() if spec.driver_memory_bytes is None else spec.driver_memory_bytes
    return need <= ceiling and is_for_driver(spec, tables, tables.target.snapshot())
