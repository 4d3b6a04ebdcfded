"""The steps of one call, in the order that makes a crash at any point harmless."""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from pyspark.sql import DataFrame

from stream_merge import fate, names, quarantine, quarantining, retry, tables
from stream_merge.batch import Batch, evaluate, evaluate_at_hand, evaluate_in_driver
from stream_merge.clock import PhaseClock
from stream_merge.commits import SideCommit
from stream_merge.config import MergeSpec
from stream_merge.engines.base import CommitTag, Engine, Hits, MergeReport
from stream_merge.engines.log_rules import log_of
from stream_merge.errors import CommitConflictError, ContractError, MergeFailedError, StreamMergeError
from stream_merge.identity import Caller
from stream_merge.intake import Intake
from stream_merge.layout import Layouts
from stream_merge.ledger import settle
from stream_merge.metrics import MergeMetrics
from stream_merge.results import MergeResult, Outcome
from stream_merge.selection import Selector
from stream_merge.snapshot import TableSnapshot, is_applied
from stream_merge.spark_internals import reason
from stream_merge.store import Store

T = TypeVar("T")

log = logging.getLogger(__name__)


class MicroBatch:
    """One batch on its way into the target.

    Order of writes: quarantine, remembered deletes, target, re-check, forgotten tombstones. Every
    one of them is idempotent, and a target that is found committed does not skip those after it.
    """

    def __init__(
        self,
        *,
        spec: MergeSpec,
        source: DataFrame,
        batch_id: int,
        caller: Caller,
        clock: PhaseClock,
        metrics: MergeMetrics,
        layouts: Layouts,
        store: Store,
        selector: Selector,
        sleep: Callable[[float], None],
        user_metadata: str | None,
        first_call: bool,
        intake: Intake,
    ) -> None:
        self._spec = spec
        self._source = source
        self._session = source.sparkSession
        self._batch_id = batch_id
        self._caller = caller
        self._clock = clock
        self._metrics = metrics
        self._layouts = layouts
        self._store = store
        self._selector = selector
        self._sleep = sleep
        self._user_metadata = user_metadata
        self._first_call = first_call
        self._intake = intake
        self._now_micros = _now_micros()
        self._chosen: Engine[Any] | None = None
        self._merged_by: str | None = None
        self._refused_by_merge = 0
        self._attempts = 0
        self._conflicts: Counter[str] = Counter()
        self._batch: Batch | None = None
        self._found: TableSnapshot | None = None
        self._report: MergeReport | None = None
        self._hits: Hits | None = None
        self._repaired: dict[str, int] = {}
        self.already_applied = False

    # -- steps, in order ---------------------------------------------------------------------

    def read_schemas(self) -> None:
        """Check everything that can be checked before the first event is read; nothing is written."""
        spec = self._spec
        with self._clock.phase("plan"):
            self._found = self._store.find(self._session, spec.target)
            self._layout = self._layouts.plan(self._source, None if self._found is None else self._found.schema)
            tables.check_target(self._found, spec, self._layout, case_sensitive=self._layout.case_sensitive)
            if self._first_call and spec.on_invalid == "quarantine":
                quarantine.check(self._session, spec.quarantine_table)
            self.already_applied = self._found is not None and self._is_recorded(self._found)

    def evaluate_if_deletes_are_remembered(self) -> None:
        """Read the events of an applied batch only if a remembered delete could still concern them."""
        if not self._spec.tombstones:
            return
        with self._clock.phase("tombstones"):
            found = self._store.find(self._session, self._spec.tombstone_target)
            log = log_of(self._existing().table_id, found)
        if log is not None and log.files != 0:
            self.evaluate()
            self.choose_engine()

    def evaluate(self) -> None:
        """Contract, latest event per key, counts and key bounds: the only evaluation of the source."""
        with self._clock.phase("prepare"):
            self._batch = self._evaluated_in_driver() or evaluate(self._source, self._layout)
            self._selector.note_size(self._batch.received)

    def _evaluated_in_driver(self) -> Batch | None:
        """The batch in the driver, or None where it should not or could not go there; then nothing of it is kept."""
        at_hand = self._intake.at_hand
        if at_hand is not None and self._selector.reads_natively(self._session, self._found, self._layout):
            found = evaluate_at_hand(self._source, at_hand, self._layout)
            if found is not None:
                return found
        if not self._selector.fits_the_driver(self._source, self._layout, self._found):
            return None
        found = evaluate_in_driver(self._source, self._layout)
        if found is None:
            log.warning(
                "batch_too_large_for_the_driver", extra={"target": self._spec.label, "batch_id": self._batch_id}
            )
        return found

    def refuse_invalid_if_told_to(self) -> None:
        """Under on_invalid="fail", raise before anything is written."""
        batch = self._evaluated()
        if batch.quarantined and self._spec.on_invalid == "fail":
            reasons = ", ".join(f"{reason}: {n}" for reason, n in batch.reasons.items())
            msg = (
                f"{batch.quarantined} of {batch.received} events of batch {self._batch_id} for {self._spec.target!r}"
                f" break the contract ({reasons}); mend the source, or use on_invalid='quarantine'"
            )
            raise ContractError(msg, reasons=batch.reasons, target=self._spec.target, batch_id=self._batch_id)

    def prepare_target(self) -> None:
        """Create a missing target, or give an existing one what the sink needs on it."""
        if not self._evaluated().received:
            return
        spec, layout = self._spec, self._layout
        properties = tables.target_properties(spec, layout)
        with self._clock.phase("plan"):
            if self._found is None:
                self._found = tables.create(
                    self._session,
                    spec.target,
                    layout.target_fields,
                    properties={**spec.table_properties, **properties},
                    partition_by=spec.partition_by,
                    cluster_by=spec.cluster_by,
                )
                self._expect_same_layout(self._found)
            self._found = tables.prepared(self._session, spec.target, self._found, layout, properties)

    def quarantine_undecodable(self) -> None:
        """Write what never became an event to the quarantine table, once per batch."""
        if self._intake.undecodable is None:
            return
        with self._clock.phase("quarantine"):
            app_id = quarantine.undecodable_id(self._caller, self._spec.target)
            commit = SideCommit(app_id=app_id, batch_id=self._batch_id, run=self._run)
            quarantine.write_undecodable(self._intake.undecodable, self._spec.quarantine_table, commit=commit)

    def quarantine_invalid(self) -> None:
        """Write the events that break the contract to the quarantine table, once per batch."""
        batch = self._evaluated()
        if not batch.quarantined:
            return
        with self._clock.phase("quarantine"):
            quarantining.write(
                batch,
                self._spec,
                self._store,
                self._session,
                query=self._caller.query,
                now_micros=self._now_micros,
                commit=self._side_commit("quarantine"),
            )

    def choose_engine(self) -> None:
        """Pick the engine for this batch, and bring the events to where it works."""
        batch = self._evaluated()
        if not batch.upserts + batch.deletes:
            return
        with self._clock.phase("plan"):
            self._selector.choose(self._session, self._layout, batch, self._existing(), self._now_micros)
        with self._clock.phase("prepare"):
            self._chosen = self._selector.engine()

    def remember_deletes(self) -> None:
        """Add the batch's deletes to the tombstones, before the target shows their effect."""
        batch = self._evaluated()
        if not (batch.deletes and self._spec.tombstones):
            return
        with self._clock.phase("tombstones"):
            commit = self._side_commit("tombstones-add")
            self._on_either_engine(lambda: self._engine.remember(commit))

    def merge(self) -> None:
        """Merge what no tombstone refuses, in one commit; each attempt reads tombstones and table afresh."""
        batch = self._evaluated()
        if not batch.upserts + batch.deletes:
            self._report = MergeReport()
            return
        since = self._existing().version
        self._report = self._run(lambda number: self._attempt(number, since))
        if self._report.already_applied:
            # Whoever applied it may have seen fewer tombstones than this attempt: all upserts are checked again.
            self.already_applied = True
            self._drop_hits()

    def recheck(self) -> None:
        """Undo upserts that a delete refuses which another writer remembered while this batch merged."""
        if not self._spec.tombstones or self._batch is None or not self._batch.upserts:
            return
        with self._clock.phase("recheck"):
            if not self.already_applied:
                version = self._on_either_engine(self._log_version)
                if version == (self._hits or self._engine.no_hits()).version:
                    return
            late = self._on_either_engine(lambda: self._engine.find_late_hits(self._hits or self._engine.no_hits()))
            if late.refused:
                self._repair(late)
            if self.already_applied:
                self._hits = late
            else:
                late.release()

    def forget_revived(self) -> None:
        """Mark the tombstones that this batch's upserts have overtaken, and tidy the log now and then."""
        if not self._spec.tombstones or self._batch is None or self._chosen is None:
            return
        with self._clock.phase("tombstones"):
            revived = self._hits is not None and self._hits.revived > 0
            if revived:
                self._on_either_engine(self._forget)
            if self._batch.deletes or revived:
                self._tidy()

    def _forget(self) -> None:
        if self._hits is None:  # the other engine found them
            self._hits = self._engine.find_hits()
        if self._hits.revived:
            self._engine.forget(self._hits, self._side_commit("tombstones-forget"))

    def _tidy(self) -> None:
        """Housekeeping of the log: the batch is done without it, and the next one tries again."""
        try:
            self._engine.tidy()
        except Exception as err:
            log.warning("tombstones_not_tidied", extra={"target": self._spec.label, "error": reason(err)})

    def release(self) -> None:
        """Free what the call has materialised or was promised."""
        self._selector.release()
        if self._batch is not None:
            self._batch.rows.release()
        if self._hits is not None:
            self._hits.release()

    @property
    def is_in_target(self) -> bool:
        """Whether the target holds what this call had to merge; False also where nobody knows yet."""
        return self.already_applied or (self._report is not None and self._report.version is not None)

    def result(self) -> MergeResult:
        """The ledger and everything else worth knowing."""
        report = self._report
        applied_before = self.already_applied or (report is not None and report.already_applied)
        events = settle(self._batch, report, refused=self._refused, repaired=self._repaired)
        outcome: Outcome = "committed"
        if applied_before:
            outcome = "skipped_duplicate"
        elif not events.received:
            outcome = "empty"
        elif not (report and report.inserted + report.updated + report.deleted):
            outcome = "no_change"
        return MergeResult(
            target=self._spec.label,
            query=self._caller.query,
            batch_id=self._batch_id,
            outcome=outcome,
            engine=self._merged_by or self._selector.name,
            version=None if report is None else report.version,
            attempts=self._attempts,
            conflicts=dict(self._conflicts),
            plan=self._plan(),
            refusal=self._selector.refusal,
            events=events,
            reasons={} if applied_before or self._batch is None else self._batch.reasons,
            metrics={} if report is None else dict(report.metrics),
            seconds=self._clock.seconds(),
        )

    # -- how ---------------------------------------------------------------------------------

    def _attempt(self, number: int, since: int) -> MergeReport:
        batch = self._evaluated()
        self._attempts = number
        self._metrics.attempt(self._caller.query, self._spec.label)
        with self._clock.phase("tombstones"):
            hits = self._on_either_engine(self._fresh_hits)
        if batch.upserts + batch.deletes == hits.refused:
            # After a lost attempt the winner may have been a twin of this call that knew of no refusal.
            return MergeReport(already_applied=number > 1 and self._is_recorded(self._look_again()))
        tag = self._tag("target")
        with self._clock.phase("merge"):
            started = time.perf_counter()
            try:
                report = self._engine.merge(hits, tag)
            except Exception as err:
                return self._decided(err, tag, since)
            self._merged_by = self._engine.name
            if report.version is not None:
                self._selector.learn(time.perf_counter() - started)
            return report

    def _on_either_engine(self, action: Callable[[], T]) -> T:
        """Do something with the remembered deletes; where delta-rs cannot, Spark does it and the rest of the batch."""
        try:
            return action()
        except MergeFailedError as err:
            if not self._selector.fall_back(err):
                raise
        except StreamMergeError:
            raise
        except Exception as err:
            if not self._selector.fall_back(err):
                msg = f"reading or writing the remembered deletes of {self._spec.target!r} failed: {reason(err)}"
                raise MergeFailedError(msg, target=self._spec.target, batch_id=self._batch_id) from err
        if self._report is not None:
            self._refused_by_merge = self._refused
        self._drop_hits()
        self._chosen = self._selector.engine()
        return action()

    def _decided(self, err: Exception, tag: CommitTag, since: int) -> MergeReport:
        """What became of an attempt that raised; one that failed natively and did not land is tried on Spark, once."""
        try:
            return fate.decide(err, self._engine, self._spec.target, tag, since=since)
        except MergeFailedError:
            if self._selector.name != "native" or not self._selector.fall_back(err):
                raise
        self._drop_hits()
        self._chosen = self._selector.engine()
        hits, tag = self._fresh_hits(), self._tag("target")
        try:
            return self._engine.merge(hits, tag)
        except Exception as again:
            return fate.decide(again, self._engine, self._spec.target, tag, since=since)

    def _fresh_hits(self) -> Hits:
        """The tombstones that concern the batch, looked for again when the log has moved on."""
        if not self._spec.tombstones:
            none: Hits = self._engine.no_hits()
            return none
        if self._hits is None or self._engine.log_version() != self._hits.version:
            self._drop_hits()
            self._hits = self._engine.find_hits()
        found: Hits = self._hits
        return found

    def _log_version(self) -> int | None:
        return self._engine.log_version()

    def _drop_hits(self) -> None:
        if self._hits is not None:
            self._hits.release()
            self._hits = None

    @property
    def _refused(self) -> int:
        return self._refused_by_merge if self._hits is None else self._hits.refused

    @property
    def _engine(self) -> Engine[Any]:
        if self._chosen is None:
            msg = "no engine has been chosen yet"
            raise AssertionError(msg)
        return self._chosen

    def _repair(self, late: Hits) -> None:
        tag = self._tag("recheck")
        since = self._existing().version

        def attempt(_: int) -> MergeReport:
            try:
                return self._engine.repair(late, tag)
            except Exception as err:
                return fate.decide(err, self._engine, self._spec.target, tag, since=since)

        repair = self._run(attempt)
        if repair.deleted and self._report is not None:
            self._repaired = self._fates_of(late, self._report, repair.deleted)

    def _fates_of(self, late: Hits, report: MergeReport, deleted: int) -> dict[str, int]:
        """What the repaired events had been counted as, from the change feed of the merge."""
        found: dict[str, int] = {}
        if report.version is not None and self._spec.change_data_feed:
            found = dict(self._engine.counted_as(late, report.version))
        return {**found, "total": deleted}

    def _run(self, attempt: Callable[[int], T]) -> T:
        return retry.run(attempt, self._spec.retry, sleep=self._wait, on_conflict=self._lost)

    def _lost(self, error: CommitConflictError) -> None:
        self._conflicts[error.conflict] += 1
        self._metrics.conflict(self._caller.query, self._spec.label, error.conflict)

    def _wait(self, seconds: float) -> None:
        with self._clock.phase("backoff"):
            self._sleep(seconds)
        self._metrics.backoff(self._caller.query, self._spec.label, seconds)

    def _tag(self, role: names.Role) -> CommitTag:
        token = uuid.uuid4().hex
        ours = {
            "identity": self._caller.identity,
            "batch_id": self._batch_id,
            "role": role,
            "engine": self._engine.name,
            "plan": self._selector.why,
            "token": token,
            **self._intake.recorded,
        }
        metadata = json.dumps({"stream_merge": ours, "user": self._user_metadata})
        return CommitTag(app_id=self._caller.app_id(role), batch_id=self._batch_id, user_metadata=metadata, token=token)

    def _side_commit(self, role: names.Role) -> SideCommit:
        app_id = self._caller.app_id(role, about=self._existing().table_id)
        return SideCommit(app_id=app_id, batch_id=self._batch_id, run=self._run)

    def _is_recorded(self, found: TableSnapshot) -> bool:
        return is_applied(found.transaction, self._caller.app_id("target"), self._batch_id)

    def _look_again(self) -> TableSnapshot:
        return self._store.find(self._session, self._spec.target) or self._existing()

    def _expect_same_layout(self, created: TableSnapshot) -> None:
        """Another writer may have created the table meanwhile; then its schema counts."""
        layout = self._layouts.plan(self._source, created.schema)
        before = [(c.name, c.dtype.simpleString()) for c in self._layout.stored]
        if [(c.name, c.dtype.simpleString()) for c in layout.stored] != before:
            msg = (
                f"target {self._spec.target!r} was created by another writer with other column types while batch"
                f" {self._batch_id} was read; nothing was written, run the batch again"
            )
            raise MergeFailedError(msg, target=self._spec.target, batch_id=self._batch_id)
        tables.check_target(created, self._spec, layout, case_sensitive=layout.case_sensitive)
        self._layout = layout

    def _plan(self) -> str:
        batch = self._batch
        if batch is None or self._report is None:
            return "no merge needed"
        bounded = ", ".join(f.name for f in batch.bounds.fields) or "no column"
        return f"{self._selector.why}; file skipping by key bounds on {bounded}"

    def _evaluated(self) -> Batch:
        if self._batch is None:
            msg = "the batch has not been evaluated yet"
            raise AssertionError(msg)
        return self._batch

    def _existing(self) -> TableSnapshot:
        if self._found is None:
            msg = "the target has not been prepared yet"
            raise AssertionError(msg)
        return self._found


def _now_micros() -> int:
    return time.time_ns() // 1000
