"""Queries are watched, stopped between micro-batches, and shown without a number cut short."""

from __future__ import annotations

import os
import signal
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from stream_merge import EventCounts, MergeResult
from stream_merge.jobs.watch import queries, screen


def result(batch_id: int = 0, **changes: Any) -> MergeResult:
    fates = {"quarantined": 1, "collapsed": 22, "stale": 333, "unaffected": 4_444, "inserted": 5, "updated": 12_345}
    fields = {
        "target": "orders",
        "query": "orders",
        "batch_id": batch_id,
        "outcome": "committed",
        "engine": "spark",
        "mode": None,
        "version": 1_234,
        "attempts": 1,
        "conflicts": {},
        "plan": "",
        "events": EventCounts(received=sum(fates.values()), **fates),
        "seconds": {"merge": 1.25, "prepare": 0.5, "recheck": 0.01},
    }
    return MergeResult(**{**fields, **changes})


def test_the_first_ctrl_c_asks_and_the_second_interrupts() -> None:
    said: list[str] = []

    with queries.stop_on_signal(said.append) as stopping:
        assert not stopping.is_set()
        os.kill(os.getpid(), signal.SIGINT)
        assert stopping.wait(5)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert len(said) == 1
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_sigterm_stops_like_ctrl_c() -> None:
    with queries.stop_on_signal(lambda _: None) as stopping:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopping.wait(5)


@pytest.mark.parametrize("width", [80, 120, 160])
@pytest.mark.parametrize("several", [False, True])
def test_a_terminal_shows_every_number_whole(width: int, several: bool) -> None:
    file = StringIO()
    console = Console(file=file, width=width, force_terminal=True, color_system=None, legacy_windows=False)

    with screen.Screen(console, batches=2, several_streams=several) as shown:
        shown.add("one", result(conflicts={"ConcurrentAppendException": 1}, attempts=2))

    last = file.getvalue().rsplit("merging", 2)[-2]
    for number in ("17,150", "4,444", "12,345", "1.8"):
        assert number in last
    assert ("merge 1.2, prepare 0.5" in last) == (width == 160)
    assert "…" not in last


def test_elsewhere_each_micro_batch_is_a_line() -> None:
    file = StringIO()

    with screen.Screen(Console(file=file, width=80)) as shown:
        shown.add("orders", result(3, conflicts={"ConcurrentAppendException": 2}))

    assert file.getvalue() == (
        "batch 3: 17,150 events (1 quarantined, 22 collapsed, 333 stale, 4,444 unaffected, 5 inserted, 12,345 updated),"
        " committed, version 1234, 1.8 s (merge 1.2, prepare 0.5), 2 lost commits\n"
    )


@pytest.mark.parametrize("is_terminal", [False, True])
def test_names_are_shown_as_they_are(is_terminal: bool) -> None:
    """Brackets are no markup, which could end the job, and control characters no commands."""
    file = StringIO()
    console = Console(file=file, width=160, force_terminal=is_terminal, color_system=None, legacy_windows=False)
    name = "a[/b][red]\x1b[2J\nc"

    with screen.Screen(console, several_streams=True) as shown:
        shown.add(name, result())
    screen.print_status(console, name, name)
    done = screen.Merged(name=name, target=name, quarantine=name)
    done.add(result())
    screen.show_merged([done, done], console, was_stopped=False)

    said = file.getvalue()
    assert r"a[/b][red]\x1b[2J\nc batch 0: 17,150 events" in said or is_terminal
    assert said.count(r"a[/b][red]\x1b[2J\nc") >= 8
    assert "\x1b[2J\n" not in said


def test_lost_commits_are_summed_by_class() -> None:
    lost = {"ConcurrentAppendException": 2, "MetadataChangedException": 1}
    merged = screen.Merged(name="orders", target="t/orders", quarantine="t/bad")
    assert merged.conflicts() == "no commit was lost to another writer"
    merged.add(result(conflicts=lost, seconds={"backoff": 1.5}))
    merged.add(result(conflicts={}, seconds={}))

    assert merged.conflicts() == (
        "3 lost commits (2 ConcurrentAppendException, 1 MetadataChangedException) in 1 micro-batch,"
        " retried after 1.5 s of waiting in all"
    )


def shown(*merged: screen.Merged, width: int = 80) -> str:
    file = StringIO()
    screen.show_merged(merged, Console(file=file, width=width), was_stopped=False)
    return file.getvalue()


def test_a_run_ends_with_what_became_of_every_event() -> None:
    results = [result(0, reasons={"undecodable": 1}), result(1, reasons={"null_key": 1})]
    orders = screen.Merged(name="orders", target="t/orders", quarantine="t/bad")
    for one in results:
        orders.add(one)

    lines = [line.rstrip() for line in shown(orders).splitlines()]

    assert lines[1] == "     2  quarantined  unreadable, or broke the contract; kept in quarantine"
    assert lines[-4:] == [
        "34,300  received     the sum of the above",
        "",
        "  done        34,300 events in 2 micro-batches merged into t/orders",
        "  quarantine  2 events (1 null_key, 1 undecodable) in t/bad",
    ]


def test_a_run_of_several_queries_ends_with_a_line_for_each_and_their_sum() -> None:
    orders = screen.Merged(name="orders", target="t/orders", quarantine="t/bad")
    for one in (result(0, reasons={"null_key": 2}), result(1)):
        orders.add(one)
    failed = screen.Merged(name="[red]", target="t/[red]", quarantine="t/q", has_failed=True)

    assert [line.rstrip() for line in shown(orders, failed).splitlines()] == [
        "",
        "query   events  quar.  coll.  stale  unaff.  ins.    upd.  del.",
        "orders  34,300      2     44    666   8,888    10  24,690     0",
        "[red]        0      0      0      0       0     0       0     0",
        "sum     34,300      2     44    666   8,888    10  24,690     0",
        "",
        "  done        orders: 34,300 events in 2 micro-batches merged into t/orders",
        "  quarantine  orders: 2 events (2 null_key) in t/bad",
        "  failed      [red]: 0 events in 0 micro-batches merged into t/[red]",
    ]
