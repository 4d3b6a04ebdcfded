"""What commits of a job say of their batches, and what stops a query before one. No Spark: values alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stream_merge import ContractError
from stream_merge.jobs.kafka.batch_offsets import Covered, Range
from stream_merge.jobs.kafka.commit_section import recorded
from stream_merge.jobs.kafka.counts import Counts, Tally
from stream_merge.jobs.kafka.guard import refuse_other_topics
from stream_merge.jobs.kafka.lineage import Lineage
from stream_merge.jobs.kafka.ordering import Placing
from stream_merge.jobs.kafka.settings import load
from stream_merge.sources.kafka.connection import TopicState

JOB = """
kafka: {bootstrap: "b:9092"}
queries: [{name: orders, topic: orders, target: tables/orders, keys: id, checkpoint: c/orders}]
"""
PLACE = ("orders", 0)


@pytest.fixture
def new(tmp_path: Path) -> Lineage:
    """Of a table that the first batch creates, at a topic of one partition."""
    (tmp_path / "job.yaml").write_text(JOB)
    (query,) = load(tmp_path / "job.yaml", environment={}).queries
    return Lineage(query=query, is_of_new_table=True, since=7).at({"orders": state(1)})


def state(partitions: int, topic_id: str = "i") -> TopicState:
    ends = dict.fromkeys(range(partitions), 100)
    return TopicState(topic_id=topic_id, starts=dict.fromkeys(ends, 0), ends=ends)


def covered(start: int, end: int, *lost: int) -> Covered:
    gone = {"orders": {0: Range(start=lost[0], end=lost[1])}} if lost else {}
    return Covered(ranges={"orders": {0: Range(start=start, end=end)}}, lost=gone)


def tally(*, position: int | None = None, **kinds: int) -> Tally:
    found = Tally(counts={PLACE: Counts(kinds=Counter(kinds))})
    if position is not None:
        found.highest_positions, found.streamed = {PLACE: position}, {PLACE}
    return found


def partition(lineage: Lineage, offsets: Covered, found: Tally) -> dict[str, Any]:
    said: dict[str, Any] = lineage.section(offsets, found)["topics"]["orders"]["partitions"]["0"]
    return said


def test_batches_without_a_commit_are_accounted_for_by_the_next_one_once(new: Lineage) -> None:
    waiting = new.behind(covered(0, 4, 0, 3), tally(upsert=1), is_committed=False)
    waiting = waiting.behind(covered(4, 6), tally(upsert=1, heartbeat=1), is_committed=False)

    said = partition(waiting, covered(6, 9, 6, 7), tally(delete=2, position=50))
    after = waiting.behind(covered(6, 9, 6, 7), tally(delete=2, position=50), is_committed=True)

    assert said == {
        "range": [0, 9],
        "first": True,
        "records": {"delete": 2, "heartbeat": 1, "upsert": 2},
        "lost": [0, 3],
        "also_lost": [[6, 7]],
        "position": 50,
    }
    assert partition(after, covered(9, 10), tally(upsert=1, position=40)) == {
        "range": [9, 10],
        "records": {"upsert": 1},
        "position": 50,
    }


def test_offsets_that_an_earlier_run_has_read_without_a_commit_are_uncounted(new: Lineage) -> None:
    before = new.behind(covered(0, 4), tally(upsert=4), is_committed=True)
    restarted = replace(before, last=before.last)

    assert partition(restarted, covered(6, 9), tally(upsert=3))["uncounted"] == 2


def test_a_commit_says_what_a_restart_reads(new: Lineage) -> None:
    """The lineage behind a batch is that of the section in its commit."""
    offsets, found = covered(0, 4), tally(upsert=4, position=50)

    after = new.behind(offsets, found, is_committed=True)

    assert after.last == recorded(new.section(offsets, found))
    assert (after.last.ends, after.last.positions) == ({PLACE: 4}, {PLACE: 50})


def test_reads_of_a_snapshot_come_first_until_the_epoch_has_a_change(new: Lineage) -> None:
    reads = Tally(counts={PLACE: Counts(kinds=Counter(upsert=3))}, reads={PLACE})
    after_reads = new.behind(covered(0, 3), reads, is_committed=True)
    after_change = after_reads.behind(covered(3, 4), tally(upsert=1, position=9), is_committed=False)

    assert new.placing(reads) is after_reads.placing(reads) is Placing.FIRST
    assert after_change.placing(reads) is new.placing(tally(upsert=1, position=9)) is Placing.BEHIND
    assert new.placing(tally(undecodable=1)) is Placing.BEHIND
    assert replace(new, other_topics=True).placing(reads) is Placing.AS_TOLD


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (state(1, "other"), r"\[TOPIC_RECREATED\].*was re-created \(id i, now other\).*'epoch: 1'"),
        (state(1), None),
    ],
)
def test_a_topic_that_was_made_anew_stops_the_query(new: Lineage, now: TopicState, said: str | None) -> None:
    after = new.behind(covered(0, 4), tally(upsert=4, position=50), is_committed=True)

    if said is None:
        refuse_other_topics(after, {"orders": now})
    else:
        with pytest.raises(ContractError, match=said):
            refuse_other_topics(after, {"orders": now})


def test_more_partitions_move_keys_for_as_long_as_the_epoch_lasts(new: Lineage) -> None:
    """By the source's log they still compare; only the place of a snapshot's reads is no longer known."""
    after = new.behind(covered(0, 4), tally(upsert=4), is_committed=True)
    wider = {"orders": state(2)}

    refuse_other_topics(after, wider)

    assert after.at(wider).keys_moved
    assert not replace(after, query=after.query.model_copy(update={"epoch": 1})).at(wider).keys_moved
