"""Reports a call of a sink: as its result, as metrics, and in the log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from stream_merge.engines.base import Choice
from stream_merge.engines.choose import without_work
from stream_merge.errors import ConfigError, MergeFailedError, StreamMergeError, located
from stream_merge.merge.call import BatchCall, Done
from stream_merge.merge.clock import Observed, PhaseClock
from stream_merge.merge.event_fates import all_reasons, settle
from stream_merge.metrics.instruments import MergeMetrics
from stream_merge.model.logs import tell
from stream_merge.model.results import FailedBatch, MergeResult, Outcome
from stream_merge.model.settings import MergeSpec
from stream_merge.spark import environment
from stream_merge.spark.errors import reason

log = logging.getLogger(__name__)


class Named(Protocol):
    """A sink's settings, or a router of several sinks."""

    @property
    def label(self) -> str:
        """Name in metrics and logs."""

    @property
    def target(self) -> str | None:
        """The table; None for several."""


@contextmanager
def failures_reported(
    of: Named,
    metrics: MergeMetrics,
    clock: PhaseClock,
    *,
    query: str,
    batch_id: int,
    observed: Observed | None = None,
    landed: Callable[[], bool] = lambda: False,
    passes: Callable[[Exception], bool] = lambda _: False,
) -> Iterator[None]:
    """Count and log what the block raises, and notify observers.

    `landed`: whether the target holds the batch although the block raised; `passes`: errors that are not a failure of a
    batch. A full disk becomes a `ConfigError`, an unavailable store a `MergeFailedError`.
    """
    try:
        yield
    except Exception as err:
        if passes(err):
            raise
        error = type(err).__name__
        metrics.observe_failure(
            FailedBatch(target=of.label, query=query, batch_id=batch_id, error=error, seconds=clock.seconds())
        )
        code = err.code if isinstance(err, StreamMergeError) else None
        where = {"target": of.label, "query": query, "batch_id": batch_id}
        tell(log.warning, "micro_batch_failed", **where, error=error, reason=reason(err), code=code)
        what = f"batch {batch_id}" if of.target is None else f"batch {batch_id} for {of.target!r}"
        if landed():
            what = f"batch {batch_id} is in {of.target!r}, but a later step failed"
        raised = _raised(err, what, target=of.target, batch_id=batch_id)
        if observed is not None:
            observed.ended(lambda: {"error": raised})
        if raised is err:
            raise
        raise raised from err


def _raised(err: Exception, what: str, *, target: str | None, batch_id: int) -> Exception:
    """The error itself, or one sentence for an error of the machine or the store."""
    refused, away = environment.said(err), environment.away(err)
    problem = refused or away
    if isinstance(err, StreamMergeError) or problem is None:
        return err
    msg = located(what, problem)
    kind = MergeFailedError if refused is None else ConfigError
    return kind(msg, target=target, batch_id=batch_id)


def merge_result(call: BatchCall, done: Done) -> MergeResult:
    """The result of a call."""
    report, undecodable = done.merged.report, call.intake.undecodable_events
    choice = done.merged.choice or done.choice or without_work(call.spec.engine)
    events = settle(
        done.batch,
        report,
        refused=done.merged.refused,
        repaired=done.merged.repaired,
        undecodable=undecodable,
    )
    outcome: Outcome = "committed"
    if report.already_applied:
        outcome = "skipped_duplicate"
    elif not events.received and report.version is None:
        outcome = "empty"
    elif not report.inserted + report.updated + report.deleted:
        outcome = "no_change"
    return MergeResult(
        target=call.spec.label,
        query=call.caller.query,
        batch_id=call.batch_id,
        outcome=outcome,
        engine=choice.engine,
        mode=choice.mode,
        version=done.version,
        attempts=call.retrying.merges,
        conflicts=dict(call.retrying.conflicts),
        plan=_plan(done, choice, call.spec),
        refusal=choice.refusal,
        events=events,
        reasons={} if report.already_applied else dict(all_reasons(done.batch, undecodable)),
        metrics=dict(report.metrics),
        seconds=call.clock.seconds(),
        maintenance=done.maintenance,
        read_debt=done.read_debt,
    )


def _plan(done: Done, choice: Choice, spec: MergeSpec) -> str:
    if done.batch is None or done.was_applied:
        return "no merge needed"
    bounded = ", ".join(bound.name for bound in done.batch.bounds.columns) or "no column"
    within = "" if spec.target_filter is None else f", within {spec.target_filter}"
    return f"{choice}; file skipping by key bounds on {bounded}{within}"


def publish(result: MergeResult, metrics: MergeMetrics) -> None:
    """Count and log the result of a call."""
    metrics.observe(result)
    shown = ("target", "query", "batch_id", "outcome", "version", "events", "seconds", "attempts")
    tell(log.info, "micro_batch_merged", **{name: getattr(result, name) for name in shown})
