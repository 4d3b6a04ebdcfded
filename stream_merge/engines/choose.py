"""Which engine merges a batch, and why; and which one takes it over when that one fails."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from pyspark.sql import DataFrame, SparkSession

from stream_merge.engines import ENGINES
from stream_merge.engines.base import Choice, Engine, Execution, MergeJob
from stream_merge.engines.costs import DRIVER_BYTES, DRIVER_EVENTS, CostModel, Work
from stream_merge.engines.driver.merger import NoLongerEligibleError
from stream_merge.engines.memory import reservations
from stream_merge.errors import ConfigError
from stream_merge.model.logs import tell
from stream_merge.model.results import Refusal
from stream_merge.model.settings import MergeSpec
from stream_merge.model.snapshot import TableSnapshot
from stream_merge.shapes.batch import Batch
from stream_merge.shapes.layout import Layout
from stream_merge.spark import environment
from stream_merge.spark.errors import reason
from stream_merge.spark.evaluate_once import known_bytes
from stream_merge.tables.files.eligibility import Ineligible
from stream_merge.tables.log.candidate_files import size_of, touched_files
from stream_merge.tables.side.tombstones import own_log, widen_schema
from stream_merge.tables.table import Tables

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranking:
    """The engines that a job is offered to, in this order."""

    engines: tuple[Engine, ...]
    estimate: str
    """What is known of the job, in words."""
    refused: Ineligible | None
    """Why one is not among them that would come before Spark, or why none in the driver is; None where all is by the
    estimate."""


def rank(job: MergeJob) -> Ranking:
    """Put the engines into order by what they are expected to take."""
    wanted = job.spec.engine
    if wanted == "spark":
        return Ranking(engines=tuple(one for one in ENGINES if not one.in_driver), estimate="asked for", refused=None)
    seconds = {one.name: job.costs.seconds(one.way(job), job.work) for one in ENGINES}
    asked = sorted((one for one in ENGINES if wanted == "auto" or one.in_driver), key=lambda one: seconds[one.name])
    obstacles = {one.name: one.obstacle(job) for one in asked}
    expected = ", ".join(f"{name} about {taken:.2f} s" for name, taken in seconds.items())
    work = f"{job.work.events:,} events, {job.work.bytes / 1e6:,.1f} MB in files that may hold their keys"
    return Ranking(
        engines=tuple(one for one in asked if obstacles[one.name] is None),
        estimate=f"{'' if wanted == 'auto' else 'asked for; '}{work}: {expected}",
        refused=_refused(asked, obstacles),
    )


def _refused(asked: Sequence[Engine], obstacles: Mapping[str, Ineligible | None]) -> Ineligible | None:
    """What keeps the job from an engine that it would go to: not of one that costs more than Spark beside others."""
    is_one_left = any(one.in_driver and obstacles[one.name] is None for one in asked)
    wanted = takewhile(lambda one: one.in_driver, asked) if is_one_left else asked
    return next((found for one in wanted if (found := obstacles[one.name]) is not None), None)


def start(job: MergeJob, ranking: Ranking) -> Execution:
    """The first engine that can have the job, at work on it.

    Raises:
        ConfigError: engine="driver", and none can that works in the driver.
    """
    refused = ranking.refused
    for engine in ranking.engines:
        why, refusal = ranking.estimate, None
        if not engine.in_driver:
            why, refusal = _why_not_in_the_driver(ranking, refused)
        found = engine.start(job, why, refusal)
        if isinstance(found, Execution):
            return found
        refused = found
    detail = "there is no such engine" if refused is None else refused.detail
    msg = (
        f"[DRIVER_NOT_POSSIBLE] engine={job.spec.engine!r} cannot merge this batch: {detail}; use engine='auto' or"
        " 'spark'"
    )
    raise ConfigError(msg, target=job.spec.target)


def _why_not_in_the_driver(ranking: Ranking, refused: Ineligible | None) -> tuple[str, Refusal | None]:
    if refused is not None:
        return refused.detail, refused.reason
    return ranking.estimate, "cost" if any(one.in_driver for one in ranking.engines) else None


def take_over(job: MergeJob, failed: Execution, error: Exception) -> Execution | None:
    """Leave everything to Spark after an engine failed and left nothing behind; None where that is no way out."""
    last = next((one for one in ENGINES if not one.in_driver), None)
    if failed.only_spark or last is None or job.spec.engine == "driver":
        return None
    if environment.said(error) is not None:  # on the same disk, Spark would fail as well
        return None
    tell(log.warning, "driver_failed", target=job.spec.label, error=reason(error))
    failed.release()
    alone = replace(job, log=None)  # by delta-rs
    if isinstance(error, NoLongerEligibleError):
        found = last.start(alone, error.refused.detail, error.refused.reason)
    elif failed.choice.engine == last.name:
        why = f"{failed.choice.why}; the driver failed on the tombstones ({reason(error)})"
        found = last.start(alone, why, failed.choice.refusal)
    else:
        found = last.start(alone, f"the driver failed ({reason(error)}), nothing was committed", "failed")
    return found if isinstance(found, Execution) else None


def without_work(engine: str) -> Choice:
    """The engine of a batch that left nothing to merge: the one that would have been tried first."""
    return Choice(engine="driver" if engine == "driver" else "spark", why="no merge needed")


def learn(costs: CostModel, job: MergeJob, execution: Execution, seconds: float) -> None:
    """Note what a merge took."""
    if job.spec.engine != "spark":
        costs.learn(execution.choice.mode or "spark", job.work, seconds)


def job_of(
    session: SparkSession,
    spec: MergeSpec,
    tables: Tables,
    costs: CostModel,
    *,
    layout: Layout,
    batch: Batch,
    target: TableSnapshot,
    now_micros: int,
    inside_at: int | None = None,
) -> MergeJob:
    """Look at everything that engines are chosen by.

    Cost: the tables' logs alone; for `engine="spark"` nothing.
    """
    if spec.tombstones:
        layout.once("log_of_types", lambda: _widen_log(session, spec, tables, layout, target))
    table, log, log_snapshot, touched, rows = None, None, None, 0, 0
    if spec.engine != "spark":
        table = tables.target.current_driver()
        if spec.tombstones:
            log_snapshot = own_log(target.table_id, tables.tombstones.snapshot())
            log = tables.tombstones.cached_driver()
        for one in (table, None if log_snapshot is None else log):
            if one is not None:
                more_bytes, more_rows = size_of(touched_files(one, batch.bounds))
                touched, rows = touched + more_bytes, rows + more_rows
    return MergeJob(
        session=session,
        spec=spec,
        tables=tables,
        costs=costs,
        layout=layout,
        batch=batch,
        target=target,
        now_micros=now_micros,
        table=table,
        log=log,
        inside_at=inside_at,
        log_snapshot=log_snapshot,
        work=Work(
            events=batch.upserts + batch.deletes,
            bytes=touched,
            rows=rows,
            cores=session.sparkContext.defaultParallelism,
        ),
    )


def _widen_log(session: SparkSession, spec: MergeSpec, tables: Tables, layout: Layout, target: TableSnapshot) -> bool:
    """Keys and sequence of the target may have been widened, by this batch or by somebody."""
    found = own_log(target.table_id, tables.tombstones.snapshot())
    if found is not None:
        widen_schema(session, spec, target.table_id, layout, found)
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
    """Whether the batch is to be evaluated in the driver: it will be small, and may be merged there.

    Nobody knows a batch's size before it is read. The batch before is the best guess, else what
    Spark knows of a source that is in memory already.
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
    if spec.engine == "spark" or target is None:
        return False
    return any(
        engine.in_driver and (layout is None or engine.takes(layout)) and engine.reads(spec, tables, target)
        for engine in ENGINES
    )


def wants_events_at_hand(spec: MergeSpec, tables: Tables, *, need: int) -> bool:
    """Whether an engine in the driver is likely to merge a batch that takes so many bytes of memory there."""
    ceiling = reservations.allowed() if spec.driver_memory_bytes is None else spec.driver_memory_bytes
    return need <= ceiling and is_for_driver(spec, tables, tables.target.snapshot())
