"""What is logged says what happened by itself, whatever logging setup shows it."""

from __future__ import annotations

import logging

import pytest

from stream_merge.model.logs import tell

log = logging.getLogger("stream_merge.test")


def test_the_message_is_the_events_name_and_its_facts(caplog: pytest.LogCaptureFixture) -> None:
    """What has a space, a quote or an equals sign is quoted; a percent sign is one."""
    tell(log.warning, "commit_conflict", target="shop.orders", batch_id=7, wait=0.25, why='100 % "full"', by=None)

    (record,) = caplog.records
    assert record.getMessage() == (
        'commit_conflict target=shop.orders batch_id=7 wait=0.250 why="100 % \\"full\\"" by=None'
    )
    fields = (record.event, record.target, record.batch_id, record.wait, record.why, record.by)  # type: ignore[attr-defined]
    assert fields == ("commit_conflict", "shop.orders", 7, 0.25, '100 % "full"', None)
    assert (record.levelname, record.filename) == ("WARNING", "test_logs.py")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a\nERROR root all is lost", '"a\\nERROR root all is lost"'),
        ("a\rb", '"a\\rb"'),
        ("a\x1b[2Jb", '"a\\u001b[2Jb"'),
        ("a\u2028b\x85c", '"a\\u2028b\\x85c"'),
        ("a\u202eb", '"a\\u202eb"'),
        ("a\ud800b", '"a\\ud800b"'),
        ("a engine=native", '"a engine=native"'),
        ("", '""'),
        ("Zürich", "Zürich"),
        ("x" * 5000, "x" * 2000 + "…"),
    ],
)
def test_a_name_cannot_begin_a_line_or_a_fact_of_its_own(
    name: str, shown: str, caplog: pytest.LogCaptureFixture
) -> None:
    tell(log.warning, "topic_missing", topic=name)

    assert [record.getMessage() for record in caplog.records] == [f"topic_missing topic={shown}"]
