"""The running table on a real terminal: what is said beside it stays readable, and leaves no copy of it behind."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import terminal
from rich.console import Console

from stream_merge.jobs.watch.screen import Screen

PROGRAM = """
import logging, sys, time
from stream_merge.cli.commands import shared
from stream_merge.model.logs import tell
from stream_merge.model.results import EventCounts, MergeResult
from stream_merge.jobs.watch.screen import Screen

log = logging.getLogger("stream_merge.jobs.kafka.batch")
shared.log_to_screen(logging.WARNING)

def merged(batch_id, quarantined):
    events = EventCounts(received=5 + quarantined, inserted=5, quarantined=quarantined)
    return MergeResult(target="t", query="q", batch_id=batch_id, outcome="committed", engine="driver", mode="mark",
                       version=batch_id, attempts=1, conflicts={}, plan="", events=events, seconds={"merge": 0.1})

with Screen(shared.OUT) as shown:
    shown.add("q", merged(0, 0))
    time.sleep(0.5)
    tell(log.warning, "records_quarantined", query="q", batch_id=1, remedy="'stream-merge quarantine show' says why",
         why="x" * 150)
    shown.add("q", merged(1, 7))
    time.sleep(0.5)
    tell(log.warning, "broker_away", error="KafkaTimeoutError")
    print("one line of the JVM", file=sys.stderr)
    time.sleep(0.5)
    MORE
"""
WARNING = (
    "WARNING stream_merge.jobs.kafka.batch records_quarantined query=q batch_id=1"
    " remedy=\"'stream-merge quarantine show' says why\" why=" + "x" * 150
)
AWAY = "WARNING stream_merge.jobs.kafka.batch broker_away error=KafkaTimeoutError"


def test_warnings_stand_whole_above_one_table() -> None:
    seen = terminal.run(PROGRAM.replace("MORE", ""))

    assert "".join(seen[:3]) == WARNING
    assert seen[3:5] == [AWAY, "one line of the JVM"]
    assert [line.split()[:2] for line in seen[5:8]] == [["batch", "events"], ["0", "5"], ["1", "12"]]
    assert seen[8].startswith("broker: does not answer since ")
    assert seen[8].endswith(" (KafkaTimeoutError); it is waited for")
    assert seen[9] == "quarantine: holds 7 events of this run, with the reasons"
    assert "2 so far" in seen[10]
    assert len(seen) == 11


def test_a_broker_that_is_back_is_no_trouble_any_more() -> None:
    seen = terminal.run(PROGRAM.replace("MORE", 'tell(log.warning, "broker_back", seconds=63)'), never="[dim]")

    assert "WARNING stream_merge.jobs.kafka.batch broker_back seconds=63" in seen
    assert [line for line in seen if line.startswith("broker:")] == []


def test_a_query_is_behind_until_its_first_batch() -> None:
    """On a terminal below the table; elsewhere in one line."""
    more = 'shown.behind("p", 9000); shown.behind("r", 1200); shown.behind("r", 1234); shown.add("p", merged(0, 0))'
    seen = terminal.run(PROGRAM.replace("MORE", more), never="[dim]")
    plain = Console(file=StringIO(), width=80)
    with Screen(plain) as shown:
        shown.behind("r", 1234)
        shown.behind("r", 1200)

    assert [line for line in seen if "behind" in line] == ["r: 1,234 events behind, no batch yet"]
    assert plain.file.getvalue() == "r: 1,234 events behind, no batch yet\n"


def test_where_errors_go_to_a_file_warnings_are_there_and_not_on_the_screen(tmp_path: Path) -> None:
    seen = terminal.run(PROGRAM.replace("MORE", ""), errors_to=tmp_path / "errors")

    assert (tmp_path / "errors").read_text() == f"{WARNING}\n{AWAY}\none line of the JVM\n"
    assert seen[0].split()[:2] == ["batch", "events"]
    assert len(seen) == 6
