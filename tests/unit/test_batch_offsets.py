"""What a batch covers of its topics, by a checkpoint's files and what the broker has. No Spark: files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stream_merge.jobs.kafka.batch_offsets import Checkpoint, Covered, Range
from stream_merge.sources.kafka.connection import TopicState


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """Batch 0 read partition 0 of a topic up to 100; batch 1 reads two partitions more, one of another topic."""

    def write(file: str, offsets: Any, *before: Any) -> None:
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(["v1", *map(json.dumps, before), json.dumps(offsets)]))

    about = {"batchWatermarkMs": 0, "batchTimestampMs": 0, "conf": {}}
    (tmp_path / "metadata").write_text('{"id":"x"}')
    write("sources/0/0", {"t": {"0": 0}})
    write("offsets/0", {"t": {"0": 100}}, about)
    write("offsets/1", {"t": {"0": 200, "1": 500}, "u": {"0": 70}}, about)
    return Checkpoint.on_disk(str(tmp_path))


@pytest.mark.parametrize(
    ("starts", "lost"),
    [
        ({0: 0, 1: 0}, {}),
        ({0: 0, 1: 300}, {1: Range(start=0, end=300)}),
        ({0: 150, 1: 0}, {0: Range(start=100, end=150)}),
    ],
    ids=["nothing is lost", "the beginning of a new partition", "some of an old one"],
)
def test_what_the_broker_has_removed_of_a_new_partition_is_lost(
    checkpoint: Checkpoint, starts: dict[int, int], lost: dict[int, Range]
) -> None:
    """Its records came since the batch before, so nobody has read them; those of a new topic may be of long ago."""
    topics = {
        "t": TopicState(topic_id="i", starts=starts, ends={0: 200, 1: 500}),
        "u": TopicState(topic_id="j", starts={0: 60}, ends={0: 70}),
    }

    ranges = checkpoint.ranges(1, {name: state.starts for name, state in topics.items()})

    assert ranges == {
        "t": {0: Range(start=100, end=200), 1: Range(start=0, end=500)},
        "u": {0: Range(start=60, end=70)},
    }
    assert Covered.by_broker(ranges, topics).lost == ({"t": lost} if lost else {})
