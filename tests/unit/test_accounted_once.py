"""The offsets of a batch are told by one of its commits alone. No Spark: the commits' metadata."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stream_merge.cli.screens.versions import _offsets
from stream_merge.jobs.kafka.history import _step
from stream_merge.merge.commit_tags import CommitTags
from stream_merge.model.names import Role
from stream_merge.model.snapshot import MAINTENANCE_METADATA, CommitRecord
from stream_merge.spark.streaming import Caller

SECTION = {"topics": {"t": {"id": "1", "partitions": {"0": {"range": [100, 200], "records": {"upsert": 100}}}}}}


def marks() -> CommitTags:
    return CommitTags(
        caller=Caller(query="orders", identity="orders/1"),
        batch_id=3,
        target="orders",
        run=lambda attempt: attempt(1),
        judge=None,
        recorded={"fingerprint": "f"},
        accounted={"kafka": SECTION},
        user_metadata=None,
    )


def ours(role: Role) -> dict[str, Any]:
    metadata = marks().tag(role, engine="driver", plan="").user_metadata
    found: dict[str, Any] = json.loads(metadata)["stream_merge"]
    return found


def step(section: dict[str, Any]) -> tuple[int, int, int | None]:
    metadata = json.dumps({"stream_merge": section, "user": None})
    found = _step(CommitRecord(version=7, timestamp_ms=None, user_metadata=metadata, metrics={}))
    return found.offsets, sum(found.records.values()), found.batch_id


def test_the_commit_that_undoes_rows_accounts_for_no_offsets() -> None:
    target, recheck = ours("target"), ours("recheck")

    assert step(target) == (100, 100, 3)
    assert step(recheck) == (0, 0, 3)  # and is a batch's
    assert "kafka" not in recheck
    assert (target["fingerprint"], recheck["fingerprint"]) == ("f", "f")


def test_nor_does_one_of_an_older_version_that_says_them_once_more() -> None:
    assert step({**ours("recheck"), "kafka": SECTION}) == (0, 0, 3)


@pytest.mark.parametrize(
    ("metadata", "said"),
    [(MAINTENANCE_METADATA, "(maintenance)"), (None, "(no offsets)"), ('{"stream_merge": 1}', "(no offsets)")],
)
def test_a_version_of_no_batch_is_called_what_is_known_of_it(metadata: str | None, said: str) -> None:
    commit = CommitRecord(version=7, timestamp_ms=None, user_metadata=metadata, metrics={})

    assert commit.ours is None
    assert (_step(commit).batch_id, _offsets(_step(commit))) == (None, said)
