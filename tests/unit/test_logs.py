"""What is logged says what happened by itself, whatever logging setup shows it."""

from __future__ import annotations

import json
import logging
from datetime import datetime
from typing import Any

import pytest

from stream_merge import ConfigError, EventCounts
from stream_merge.model.logs import JsonFormatter, tell
from stream_merge.model.snapshot import expect_not_replaced

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
        ("a engine=driver", '"a engine=driver"'),
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


def _line(record: logging.LogRecord) -> dict[str, Any]:
    line = JsonFormatter().format(record)
    assert "\n" not in line
    found: dict[str, Any] = json.loads(line)
    return found


def test_a_line_of_json_has_stable_fields_and_the_facts_as_values(caplog: pytest.LogCaptureFixture) -> None:
    events = EventCounts(received=2, inserted=2)
    tell(log.warning, "micro_batch_merged", batch_id=7, events=events, seconds={"merge": 0.25}, by=None, raw=b"\x00a")

    found = _line(caplog.records[0])

    assert list(found)[:4] == ["ts", "level", "logger", "event"]
    assert datetime.fromisoformat(found["ts"]).timestamp() == pytest.approx(caplog.records[0].created, abs=0.001)
    assert (found["level"], found["logger"], found["event"]) == ("WARNING", "stream_merge.test", "micro_batch_merged")
    assert (found["events"]["received"], found["seconds"], found["raw"]) == (2, {"merge": 0.25}, "2 bytes")
    assert found.keys() - {"ts", "level", "logger", "event"} == {"batch_id", "events", "seconds", "by", "raw"}


def test_what_others_log_is_a_line_of_json_too(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("kafka").warning("no answer from %s\nfor long", "broker")

    found = _line(caplog.records[0])

    assert (found["logger"], found["event"], found["message"]) == ("kafka", "log", "no answer from broker\nfor long")


def test_an_error_has_type_code_message_and_stack(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError) as caught:
        expect_not_replaced("a", "b", target="t", batch_id=1)
    tell(log.error, "command_failed", exc_info=caught.value)
    tell(log.error, "metrics_error", exc_info=ValueError("x" * 5000))

    ours, other = (_line(record)["exception"] for record in caplog.records)

    assert (ours["type"], ours["code"]) == ("ConfigError", "TARGET_REPLACED")
    assert ours["message"].startswith("[TARGET_REPLACED] target 't' was replaced")
    assert "in expect_not_replaced" in ours["stack"]
    assert (other["type"], other["code"], len(other["message"])) == ("ValueError", None, 2001)
