"""Which engine merges a batch, and why; and which one takes it over when that one fails."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from stream_merge.engines import ENGINES
from stream_merge.engines.base import Choice, Engine, Execution, MergeJob
from stream_merge.engines.costs import CostModel
from stream_merge.engines.driver.merger import NoLongerEligibleError
from stream_merge.errors import ConfigError
from stream_merge.model.logs import tell
from stream_merge.model.results import Refusal
from stream_merge.spark import environment
from stream_merge.spark.errors import reason
from stream_merge.tables.whitelist import Ineligible

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
