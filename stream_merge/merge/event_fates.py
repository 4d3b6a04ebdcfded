"""The fate of each event of a batch: the sum is exact."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping

from stream_merge.engines.base import MergeReport
from stream_merge.merge.retrying import Ledger
from stream_merge.model.logs import tell
from stream_merge.model.results import UNDECODABLE, EventCounts
from stream_merge.shapes.batch import Batch

log = logging.getLogger(__name__)

_SURPLUS = "the target holds keys twice, or Spark ran a stage of the merge again and counted its rows once more"


def all_reasons(batch: Batch | None, undecodable: int) -> Counter[str]:
    """Quarantined events by reason, undecodable ones included."""
    reasons = Counter({} if batch is None else batch.reasons)
    if undecodable:
        reasons[UNDECODABLE] += undecodable
    return reasons


def _by_events(report: MergeReport) -> tuple[int, int]:
    """Rows that events have updated and deleted: without those that have no event."""
    missing = (report.metrics.get(f"numTargetRowsNotMatchedBySource{what}", 0) for what in ("Updated", "Deleted"))
    updated, deleted = missing
    return report.updated - updated, report.deleted - deleted


def _within(merged: int, report: MergeReport) -> tuple[int, int, int]:
    """Events that inserted, updated and deleted a row, where the merge counted more rows than it had events.

    It counts the rows of a key that the target holds twice, and Spark's accumulators count again with a stage that runs
    again.
    """
    inserted, updated, deleted = report.inserted, *_by_events(report)
    surplus = inserted + updated + deleted - merged
    if surplus <= 0:
        return inserted, updated, deleted
    tell(log.warning, "more_rows_than_events", surplus_rows=surplus, events=merged, cause=_SURPLUS)
    inserted = min(inserted, merged)
    deleted = min(deleted, merged - inserted)
    return inserted, merged - inserted - deleted, deleted


def landed_as(
    batch: Batch, report: MergeReport, *, refused: int, repaired: Mapping[str, int], undecodable: int
) -> Ledger:
    """The fates of a batch's events, if nothing more happens to them after the commit."""
    events = settle(batch, report, refused=refused, repaired=repaired, undecodable=undecodable)
    return events, {} if report.already_applied else dict(all_reasons(batch, undecodable))


def settle(
    batch: Batch | None,
    report: MergeReport | None,
    *,
    refused: int,
    repaired: Mapping[str, int],
    undecodable: int,
) -> EventCounts:
    """The fates of a batch's events, from the evaluation, the tombstones, the merge and the re-check.

    `batch` is None when a duplicate was not evaluated or no event could be decoded; `report` is None when no merge was
    needed; `repaired` has the rows that the re-check removed, in `total` and by their first fate.
    """
    if report is None or report.already_applied:
        return EventCounts()
    if batch is None:
        return EventCounts(received=undecodable, quarantined=undecodable)
    merged = batch.upserts + batch.deletes - refused
    inserted, updated, deleted = _within(merged, report)
    unaffected = merged - inserted - updated - deleted
    undone = min(repaired.get("total", 0), merged - deleted)  # of a deleted row the re-check finds none
    less_inserted = min(repaired.get("inserted", 0), inserted, undone)
    less_updated = min(repaired.get("updated", 0), updated, undone - less_inserted)
    less_unaffected = min(unaffected, undone - less_inserted - less_updated)
    rest = undone - less_inserted - less_updated - less_unaffected
    more_inserted = min(rest, inserted - less_inserted)
    return EventCounts(
        received=batch.received + undecodable,
        quarantined=batch.quarantined + undecodable,
        collapsed=batch.collapsed,
        stale=refused + undone,
        unaffected=unaffected - less_unaffected,
        inserted=inserted - less_inserted - more_inserted,
        updated=updated - less_updated - (rest - more_inserted),
        deleted=deleted,
        ties=batch.ties,
        with_unknown_fields=0 if batch.left_out is None else batch.left_out.events,
    )
