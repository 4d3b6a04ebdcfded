"""Who writes a table's checkpoint after a commit by delta-rs, and forgets what is too old."""

from __future__ import annotations

import pytest

from stream_merge.tables.log.handle import write_checkpoint_if_due


class Log:
    """What delta-rs was told to do."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def create_checkpoint(self) -> None:
        self.done.append("checkpoint")

    def cleanup_metadata(self) -> None:
        self.done.append("tidied")

    def by_spark(self) -> None:
        self.done.append("by Spark")


def done(properties: dict[str, str], version: int = 10, *, has_spark: bool = True) -> list[str]:
    log = Log()
    write_checkpoint_if_due(log, version, properties, "table", by_spark=log.by_spark if has_spark else None)
    return log.done


@pytest.mark.parametrize("name", ["delta.logRetentionDuration", "delta.deletedFileRetentionDuration"])
@pytest.mark.parametrize(
    ("told", "is_read"),
    [
        ("interval 20 days", True),
        ("interval 1 week", True),
        ("interval 36 hours", True),
        ("20 days", False),
        ("INTERVAL 20 DAYS", False),
        ("interval 1 week 3 days", False),
        ("interval 20.0 days", False),
        ("interval  20 days", False),
    ],
)
def test_what_delta_rs_does_not_read_is_left_to_spark(name: str, told: str, *, is_read: bool) -> None:
    """It takes its own default for it, and forgets too early."""
    assert done({name: told}) == (["checkpoint", "tidied"] if is_read else ["by Spark"])
    assert done({name.lower(): told}) == done({name: told})
    assert done({name: told}, has_spark=False) == (["checkpoint", "tidied"] if is_read else [])


def test_a_checkpoint_is_due_at_the_tables_interval() -> None:
    assert done({}, 0) == done({}, 9) == done({"delta.checkpointInterval": "4"}, 10) == []
    assert done({}, 20) == ["checkpoint", "tidied"]
    assert done({"delta.enableExpiredLogCleanup": "FALSE"}) == ["checkpoint"]
