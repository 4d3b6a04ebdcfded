"""What became of each event of a batch adds up, whatever the merge tells of its rows. No Spark: numbers alone."""

from __future__ import annotations

import logging
from typing import Any, cast

import pytest

from stream_merge.engines.base import MergeReport
from stream_merge.merge.event_fates import settle
from stream_merge.model.results import FATES, EventCounts
from stream_merge.shapes.batch import Batch


def batch(*, upserts: int = 0, deletes: int = 0) -> Batch:
    """Each event has a key of its own, and keeps the contract."""
    return Batch(
        rows=cast(Any, None),
        received=upserts + deletes,
        quarantined=0,
        reasons={},
        collapsed=0,
        ties=0,
        upserts=upserts,
        deletes=deletes,
        delete_events=deletes,
        bounds=cast(Any, None),
    )


def settled(events: Batch, report: MergeReport, **repaired: int) -> EventCounts:
    return settle(events, report, refused=0, repaired=repaired, undecodable=0)


@pytest.mark.parametrize(
    ("rows", "fates"),
    [
        (MergeReport(inserted=150), {"inserted": 100}),
        (MergeReport(inserted=60, updated=60), {"inserted": 60, "updated": 40}),
        (MergeReport(inserted=150, updated=150, deleted=150), {"inserted": 100}),
        (MergeReport(updated=90, deleted=30), {"updated": 70, "deleted": 30}),
        (MergeReport(deleted=130), {"deleted": 100}),
    ],
)
def test_no_more_events_changed_a_row_than_there_were(
    rows: MergeReport, fates: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    """A stage of Spark's that runs again counts its rows again; a key that the target holds twice has two rows."""
    caplog.set_level(logging.WARNING, "stream_merge")

    assert settled(batch(upserts=60, deletes=40), rows) == EventCounts(received=100, **fates)
    (record,) = caplog.records
    assert record.getMessage() == (
        f"more_rows_than_events surplus_rows={rows.inserted + rows.updated + rows.deleted - 100} events=100"
        ' cause="the target holds keys twice, or Spark ran a stage of the merge again and counted its rows once more"'
    )


def test_rows_without_an_event_of_their_key_are_no_surplus(caplog: pytest.LogCaptureFixture) -> None:
    """Of clauses by source."""
    caplog.set_level(logging.WARNING, "stream_merge")
    report = MergeReport(updated=2, deleted=9, metrics={"numTargetRowsNotMatchedBySourceDeleted": 9})

    assert settled(batch(upserts=3), report) == EventCounts(received=3, updated=2, unaffected=1)
    assert caplog.records == []


@pytest.mark.parametrize("inserted", [0, 3, 5, 8])
@pytest.mark.parametrize("deleted", [0, 2, 5, 8])
@pytest.mark.parametrize("undone", [0, 1, 5, 20])
def test_what_the_recheck_undoes_was_no_delete(inserted: int, deleted: int, undone: int) -> None:
    """Its own rows may be counted again, too."""
    found = settled(batch(upserts=5, deletes=5), MergeReport(inserted=inserted, deleted=deleted), total=undone)

    assert min(getattr(found, fate) for fate in FATES) == 0
    assert found.deleted == min(deleted, 10 - inserted)
    assert found.stale == min(undone, 10 - found.deleted)
