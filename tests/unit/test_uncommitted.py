"""What the next commit of a job accounts for beside its own batch. No Spark: values alone."""

from __future__ import annotations

from collections import Counter

from stream_merge.jobs.kafka.batch_offsets import Range
from stream_merge.jobs.kafka.counts import Counts
from stream_merge.jobs.kafka.uncommitted import Uncommitted

PLACE = ("orders", 0)


def counts(**kinds: int) -> Counts:
    return Counts(kinds=Counter(kinds))


def test_batches_without_a_commit_are_accounted_for_by_the_next_one_once() -> None:
    left = Uncommitted()
    left.add({"orders": {0: Range(start=0, end=4)}}, {PLACE: counts(upsert=1)}, {"orders": {0: Range(start=0, end=3)}})
    left.add({"orders": {0: Range(start=4, end=6)}}, {PLACE: counts(upsert=1, heartbeat=1)}, {})
    now, gone = Range(start=6, end=9), Range(start=6, end=7)

    assert left.start(PLACE, before=now) == 0
    assert left.counts(PLACE, beside=counts(delete=2)).kinds == {"upsert": 2, "heartbeat": 1, "delete": 2}
    assert left.lost(PLACE, beside=gone) == [Range(start=0, end=3), gone]
    assert left.start(("orders", 1), before=now) == 6

    left.clear()
    assert left.start(PLACE, before=now) == 6
    assert left.counts(PLACE, beside=None).kinds == {}
    assert left.lost(PLACE, beside=None) == []
