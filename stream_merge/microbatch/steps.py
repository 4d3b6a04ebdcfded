"""The steps of one call, in the order that makes a crash at any point harmless."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence

from pyspark.sql import DataFrame

from stream_merge.engines.base import MergeReport
from stream_merge.engines.selection import Selector
from stream_merge.errors import ContractError, MergeFailedError
from stream_merge.microbatch import meaning
from stream_merge.microbatch.call import BatchCall
from stream_merge.microbatch.commit import Committing
from stream_merge.microbatch.ledger import settle
from stream_merge.microbatch.merging import Merging, record_first
from stream_merge.model.logs import tell
from stream_merge.model.results import MergeResult, Outcome
from stream_merge.model.snapshot import CommitRecord, TableSnapshot
from stream_merge.model.source_batch import Intake
from stream_merge.shapes.batch import Batch, evaluate, evaluate_at_hand, evaluate_in_driver
from stream_merge.shapes.matching import Layouts
from stream_merge.spark.jvm import in_session
from stream_merge.spark.streaming import keeps_state, run_through
from stream_merge.tables import fitness, quarantine, quarantining, spark_table
from stream_merge.tables.delivery import Delivery
from stream_merge.tables.tombstones.rules import log_of

log = logging.getLogger(__name__)


class MicroBatch:
    """One batch on its way into the target.

    Order of writes: quarantine, remembered deletes, target, re-check, forgotten tombstones. Every
    one of them is idempotent, and a target that is found committed does not skip those after it.
    """

    def __init__(
        self,
        call: BatchCall,
        *,
        source: DataFrame,
        committing: Committing,
        layouts: Layouts,
        selector: Selector,
        first_call: bool,
        intake: Intake,
        delivery: Delivery | None,
    ) -> None:
        self._call = call
        self._spec = call.spec
        self._source = source
        self._session = call.session
        self._batch_id = call.batch_id
        self._caller = call.caller
        self._clock = call.clock
        self._committing = committing
        self._layouts = layouts
        self._store = call.store
        self._selector = selector
        self._first_call = first_call
        self._intake = intake
        self._delivery = delivery
        self._now_micros = _now_micros()
        self._batch: Batch | None = None
        self._found: TableSnapshot | None = None
        self._merging: Merging | None = None
        self._applied_before = False
        self._recorded_version: int | None = None

    # -- steps, in order ---------------------------------------------------------------------

    def read_schemas(self) -> None:
        """Check everything that can be checked before the first event is read; nothing is written."""
        spec = self._spec
        with self._clock.phase("plan"):
            self._found = self._store.find(self._session, spec.target)
            self._applied_before = self._is_applied()
            if self._applied_before:
                self._expect_whole()
            self._layout = self._layouts.plan(self._source, None if self._found is None else self._found.schema)
            fitness.check_target(self._session, self._found, spec, self._layout)
            self.check_quarantine()
            self._check_tombstones()

    def check_quarantine(self) -> None:
        """Before the first write: whether the quarantine can take what it may have to."""
        if self._first_call and self._spec.on_invalid == "quarantine":
            quarantine.check(self._session, self._spec.quarantine_table)

    def _check_tombstones(self) -> None:
        """Before the first write: whether the remembered deletes are in a format that this version reads."""
        if self._first_call and self._spec.tombstones and self._found is not None:
            log_of(self._found.table_id, self._store.find(self._session, self._spec.tombstone_target))

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

    def keep_state(self) -> None:
        """Read an applied batch that nobody has read where stateful operators made it.

        Their state of this batch was lost in the crash, and without it no later batch can start.
        """
        if self._batch is None and keeps_state(self._source):
            with self._clock.phase("prepare"):
                run_through(self._source)

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
            tell(log.warning, "batch_too_large_for_the_driver", target=self._spec.label, batch_id=self._batch_id)
        return found

    def refuse_invalid_if_told_to(self) -> None:
        """Under on_invalid="fail", and for deletes where none may come, raise before anything is written."""
        batch = self._evaluated()
        if batch.delete_events and self._spec.only_inserts and self._layout.whole is None:
            msg = (
                f"{batch.delete_events} of {batch.received} events of batch {self._batch_id} for {self._spec.target!r}"
                " are deletes, and its shape deletes nothing; leave them out of the source, or merge it as changes,"
                " into a table and with a checkpoint of its own"
            )
            raise ContractError(msg, reasons={}, target=self._spec.target, batch_id=self._batch_id)
        meaning.refuse(batch, self._layout, self._spec, undecodable=self._undecodable, batch_id=self._batch_id)
        if batch.quarantined and self._spec.on_invalid == "fail":
            reasons = ", ".join(f"{reason}: {n}" for reason, n in batch.reasons.items())
            msg = (
                f"{batch.quarantined} of {batch.received} events of batch {self._batch_id} for {self._spec.target!r}"
                f" break the contract ({reasons}); fix the source, or use on_invalid='quarantine'"
            )
            raise ContractError(msg, reasons=batch.reasons, target=self._spec.target, batch_id=self._batch_id)

    def prepare_target(self) -> None:
        """Create a missing target, or give an existing one what the sink needs on it."""
        if not self._evaluated().received:
            return
        spec, layout = self._spec, self._layout
        properties = spark_table.target_properties(spec, layout)
        with self._clock.phase("plan"):
            if self._found is None:
                self._found = spark_table.create(
                    self._session,
                    spec.target,
                    layout.target_fields,
                    properties={**spec.table_properties, **properties},
                    partition_by=spec.partition_by,
                    cluster_by=spec.cluster_by,
                )
                self._expect_same_layout(self._found)
            self._found = spark_table.prepared(self._session, spec.target, self._found, layout, properties)
            if layout.type_changes:  # delta-rs, too, has to see that the table is not for it any more
                self._found = self._store.find(self._session, spec.target) or self._found

    def quarantine_undecodable(self) -> None:
        """Write what never became an event to the quarantine table, once per batch."""
        found = self._intake.undecodable
        if found is None:
            return
        with self._clock.phase("quarantine"):
            rows, commit = in_session(found.rows, self._session), self._committing.undecodable()
            quarantine.write_undecodable(rows, self._spec.quarantine_table, commit=commit)

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
                commit=self._committing.beside("quarantine", table_id=self._existing().table_id),
            )

    def choose_engine(self) -> None:
        """Pick the engine for a batch that has events to merge, and bring them to where it works."""
        batch = self._evaluated()
        if not batch.upserts + batch.deletes:
            return
        target = self._existing()
        with self._clock.phase("plan"):
            self._selector.choose(self._session, self._layout, batch, target, self._now_micros)
        with self._clock.phase("prepare"):
            engine = self._selector.engine()
        self._merging = Merging(
            self._call,
            batch=batch,
            target=target,
            engine=engine,
            selector=self._selector,
            committing=self._committing,
            already_applied=self._applied_before,
        )

    def remember_deletes(self) -> None:
        """Add the batch's deletes to the tombstones, before the target shows their effect."""
        if self._merging is not None:
            self._merging.remember_deletes()

    def merge(self) -> None:
        """Merge what no tombstone refuses, in one commit."""
        if self._merging is not None:
            self._merging.merge()

    def record_first_batch(self) -> None:
        """Commit the transaction id alone where a query's first batch at the target changes no row.

        By it a target without any id of a query that has merged before is known to be lost or replaced.
        """
        report, found = self._report(), self._found
        if found is None or self.already_applied or not self._evaluated().received:
            return
        if report is None or report.version is not None or not self._committing.is_first(found):
            return
        with self._clock.phase("merge"):
            self._recorded_version = record_first(self._session, self._spec.target, self._committing, found.version)

    def note_query(self) -> None:
        """Tell the checkpoint that the query's batches are given to this sink, also where none had events for it."""
        if self._delivery is not None:
            self._delivery.note(None)

    def note_target(self) -> None:
        """Tell the checkpoint that the query has merged into this very table."""
        if self._delivery is not None and self._found is not None and self._version is not None:
            self._delivery.note(self._found)

    def recheck(self) -> None:
        """Undo upserts that a delete refuses which another writer remembered while this batch merged."""
        if self._merging is not None:
            self._merging.recheck()

    def forget_revived(self) -> None:
        """Mark the tombstones that this batch's upserts have overtaken."""
        if self._merging is not None:
            self._merging.forget_revived()

    def release(self) -> None:
        """Free what the call has materialised or was promised."""
        self._selector.release()
        if self._batch is not None:
            self._batch.rows.release()
        if self._merging is not None:
            self._merging.release()

    @property
    def already_applied(self) -> bool:
        """Whether the target's transaction id showed the batch, before this call or while it merged."""
        return self._applied_before if self._merging is None else self._merging.already_applied

    @property
    def is_in_target(self) -> bool:
        """Whether the target holds what this call had to merge; False also where nobody knows yet."""
        report = self._report()
        return self.already_applied or (report is not None and report.version is not None)

    def result(self) -> MergeResult:
        """The ledger and everything else worth knowing."""
        report, merging = self._report(), self._merging
        events = settle(
            self._batch,
            report,
            refused=0 if merging is None else merging.refused,
            repaired={} if merging is None else merging.repaired,
            undecodable=self._undecodable,
        )
        outcome: Outcome = "committed"
        if self.already_applied:
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
            engine=(merging and merging.merged_by) or self._selector.name,
            version=self._version,
            attempts=self._committing.attempts,
            conflicts=dict(self._committing.conflicts),
            plan=self._plan(),
            refusal=self._selector.refusal,
            events=events,
            reasons={} if self.already_applied else self._reasons(),
            metrics={} if report is None else dict(report.metrics),
            seconds=self._clock.seconds(),
        )

    # -- how ---------------------------------------------------------------------------------

    def _is_applied(self) -> bool:
        if self._delivery is not None:
            return self._delivery.is_applied(self._found, self._batch_id, self._history)
        return self._found is not None and self._committing.is_recorded(self._found)

    def _expect_whole(self) -> None:
        """Stop again where the batch stopped after a commit that had left rows behind, which nobody would notice."""
        for version in self._committing.native_versions(self._existing(), self._history):
            table = self._store.readable(self._session, self._spec.target)
            if table is not None:
                table.expect_removed(version)

    def _history(self, newer_than: int, up_to: int) -> Sequence[CommitRecord]:
        return self._store.history(self._session, self._spec.target, newer_than=newer_than, up_to=up_to)

    @property
    def _version(self) -> int | None:
        """Of the target, that this call has committed."""
        report = self._report()
        return self._recorded_version if report is None or report.version is None else report.version

    @property
    def _undecodable(self) -> int:
        return 0 if self._intake.undecodable is None else self._intake.undecodable.events

    def _reasons(self) -> dict[str, int]:
        """Quarantined events by reason, those included that are not in the batch."""
        reasons = Counter({} if self._batch is None else self._batch.reasons)
        if self._undecodable:
            reasons["undecodable"] += self._undecodable
        return dict(reasons)

    def _report(self) -> MergeReport | None:
        """What was merged; None before, and where nothing was left to merge."""
        if self._merging is not None:
            return self._merging.report
        return None if self._applied_before else MergeReport()

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
        fitness.check_target(self._session, created, self._spec, layout)
        self._layout = layout

    def _plan(self) -> str:
        batch = self._batch
        if batch is None or self._report() is None:
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
