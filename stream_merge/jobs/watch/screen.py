"""Output of running queries: a live table on a terminal, a line per micro-batch elsewhere; totals at the end."""

from __future__ import annotations

import logging
import re
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from rich import markup
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from stream_merge.jobs.watch import queries
from stream_merge.model.logs import counted
from stream_merge.model.results import FATES, PHASES, EventCounts, MergeResult, Phase

_LOG = logging.getLogger("stream_merge")
_ROWS = 12
"""Micro-batches in the table."""
_PLAIN_WIDTH, _WIDE_WIDTH = 108, 140
"""Least widths of a terminal for full words, and for phases beside them."""
_PHASES_IN_TABLE = 3
_NEGLIGIBLE_SECONDS = 0.05
"""Phases shorter than this are not named."""

_STYLES = {"inserted": "green", "updated": "cyan", "deleted": "red", "stale": "yellow", "quarantined": "magenta"}
_SHORT = {
    "quarantined": "quar.",
    "collapsed": "coll.",
    "unaffected": "unaff.",
    "inserted": "ins.",
    "updated": "upd.",
    "deleted": "del.",
    "received": "events",
    "version": "vers.",
    "seconds": "secs.",
}
_EXPLAINED = {
    "quarantined": "unreadable, or broke the contract; kept in quarantine",
    "collapsed": "older than another event of the key in the same micro-batch",
    "stale": "refused: a remembered delete is newer",
    "unaffected": "changed nothing: duplicates, events older than the row, deletes of absent keys",
    "inserted": "made a new row",
    "updated": "changed a row",
    "deleted": "removed a row",
}
_COMMANDS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters other than the line feed, and those that change the direction of writing."""


def escape(text: str) -> str:
    """Text for `Console.print`: without rich's markup, and with control characters as their escapes."""
    return markup.escape(_COMMANDS.sub(lambda match: match.group().encode("unicode_escape").decode(), text))


def escape_line(text: str) -> str:
    """`escape` on one line."""
    return escape(text).replace("\n", "\\n")


def whole_table(*names: str) -> Table:
    """A table that folds its cells instead of cutting them short."""
    return Table(*(Column(name, overflow="fold") for name in names))


def print_status(console: Console, about: str, text: str, *, good: bool | None = None) -> None:
    """Print a line about a subject, with a check mark or a cross where `good` judges it."""
    mark = {None: " ", True: "[green]✓[/]", False: "[bold red]✗[/]"}[good]
    subject = escape_line(about.ljust(12))
    console.print(f"{mark} [bold]{subject}[/]{escape_line(text)}", highlight=False, soft_wrap=True)


class Screen:
    """The running table of micro-batches, of which `batches` are expected (None: unknown)."""

    def __init__(self, console: Console, *, batches: int | None = None, several_streams: bool = False) -> None:
        self._console = console
        self._several_streams = several_streams
        self._recent: deque[tuple[str, MergeResult]] = deque(maxlen=_ROWS)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.completed} so far" if batches is None else "{task.completed} of {task.total}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._progress.add_task("merging", total=batches)
        self._quarantined = 0
        self._notes: dict[str, str] = {}
        self._listener = _Listener(self)
        shares_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._live = Live(
            get_renderable=self._render, console=console, refresh_per_second=5, redirect_stderr=shares_terminal
        )

    def __enter__(self) -> Self:
        """Start drawing, on a terminal."""
        if self._console.is_terminal:
            _LOG.addHandler(self._listener)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop drawing; the table stays."""
        if self._console.is_terminal:
            _LOG.removeHandler(self._listener)
            self._progress.stop_task(self._task)
            self._live.stop()

    def add(self, stream: str, result: MergeResult) -> None:
        """Show one more micro-batch."""
        self._recent.append((stream, result))
        self._quarantined += result.events.quarantined
        self.note(_topics(stream), None)
        self.note(stream, None)
        self._progress.advance(self._task)
        if not self._console.is_terminal:
            self._console.print(self._line(stream, result), highlight=False, soft_wrap=True)

    def behind(self, stream: str, events: int) -> None:
        """Show the lag of a stream without micro-batch; once where there is no terminal."""
        text = f"{events:,} events behind, no batch yet"
        if stream not in self._notes and not self._console.is_terminal:
            self._console.print(f"{escape_line(stream)}: {text}", highlight=False, soft_wrap=True)
        self.note(stream, text)

    def note(self, about: str, text: str | None) -> None:
        """Show a line below the table until it is replaced, or removed by None; elsewhere the log has it."""
        if text is None:
            self._notes.pop(about, None)
        else:
            self._notes[about] = text

    def _render(self) -> RenderableType:
        notes = dict(self._notes)
        if self._quarantined:
            notes["quarantine"] = f"holds {counted(self._quarantined, 'event')} of this run, with the reasons"
        lines = (Text(f"{about}: {text}", style="bold yellow") for about, text in notes.items())
        return Group(self._table(), *lines, self._progress)

    def _table(self) -> Table:
        width = self._console.width
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
        if self._several_streams:
            table.add_column("query", no_wrap=True)
        for name in ("batch", "events", *FATES, "tries", "version", "seconds"):
            column = header(name, width)
            table.add_column(column, justify="right", style=_STYLES.get(name, ""), min_width=len(column))
        if width >= _WIDE_WIDTH:
            table.add_column("where the time went", no_wrap=True, style="dim")
        for stream, result in list(self._recent):  # drawn by a thread of rich's, while others come
            cells = [escape_line(stream)] if self._several_streams else []
            cells += [str(result.batch_id), f"{result.events.received:,}"]
            cells += [_count(getattr(result.events, fate)) for fate in FATES]
            cells += [_tries(result), _version(result), f"{result.duration_seconds:.1f}"]
            if width >= _WIDE_WIDTH:
                cells.append(phases(result.seconds, most=_PHASES_IN_TABLE))
            table.add_row(*cells)
        return table

    def _line(self, stream: str, result: MergeResult) -> str:
        where = f"{escape_line(stream)} batch" if self._several_streams else "batch"
        fates = ", ".join(f"{getattr(result.events, fate):,} {fate}" for fate in FATES if getattr(result.events, fate))
        conflicts = f", {counted(sum(result.conflicts.values()), 'lost commit')}" if result.conflicts else ""
        return (
            f"{where} {result.batch_id}: {counted(result.events.received, 'event')} ({fates or 'nothing to do'}),"
            f" {result.outcome}, version {_version(result)}, {result.duration_seconds:.1f} s"
            f" ({phases(result.seconds)}){conflicts}"
        )


def header(name: str, width: int) -> str:
    """The name of a column of numbers on a terminal of `width` columns."""
    return name if width >= _PLAIN_WIDTH else _SHORT.get(name, name)


class _Listener(logging.Handler):
    """Shows logged conditions that last below the table."""

    def __init__(self, screen: Screen) -> None:
        super().__init__(logging.WARNING)
        self._screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        """Show or remove the line of an event."""
        fields = record.__dict__
        match fields.get("event"):
            case "broker_away":
                at = time.strftime("%H:%M:%S", time.localtime(record.created))
                self._screen.note("broker", f"does not answer since {at} ({fields['error']}); it is waited for")
            case "broker_back":
                self._screen.note("broker", None)
            case "topic_missing":
                self._screen.note(_topics(fields["query"]), f"the broker has no {fields['topics']!r}; waiting for it")


def _topics(query: str) -> str:
    return f"topics of {query}"


def ledger(counts: EventCounts) -> Table:
    """The events by fate, with the sum."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(justify="right")
    table.add_column()
    table.add_column(style="dim")
    for fate in FATES:
        table.add_row(f"{getattr(counts, fate):,}", f"[{_STYLES.get(fate, 'default')}]{fate}[/]", _EXPLAINED[fate])
    table.add_row(f"[bold]{counts.received:,}[/]", "[bold]received[/]", "the sum of the above")
    return table


@dataclass(kw_only=True, slots=True)
class Merged:
    """Sums of what one query did: it may have run for months."""

    name: str
    target: str
    quarantine: str
    """Table of events that could not be merged."""
    has_failed: bool = False
    micro_batches: int = 0
    events: EventCounts = field(default_factory=EventCounts)
    reasons: Counter[str] = field(default_factory=Counter)
    """Quarantined events by reason; one event can have several."""
    lost_commits: Counter[str] = field(default_factory=Counter)
    """Commits lost to other writers, by Delta's class."""
    conflicting_batches: int = 0
    waited_seconds: float = 0.0

    def add(self, result: MergeResult) -> None:
        """Count one more micro-batch."""
        self.micro_batches += 1
        self.events = queries.total([self.events, result.events])
        self.reasons.update(result.reasons)
        self.lost_commits.update(result.conflicts)
        self.conflicting_batches += bool(result.conflicts)
        self.waited_seconds += result.seconds.get("backoff", 0.0)

    def conflicts(self) -> str:
        """The lost commits in one sentence."""
        if not self.lost_commits:
            return "no commit was lost to another writer"
        named = ", ".join(f"{times} {name}" for name, times in sorted(self.lost_commits.items()))
        return (
            f"{counted(self.lost_commits.total(), 'lost commit')} ({named}) in"
            f" {counted(self.conflicting_batches, 'micro-batch')}, retried after"
            f" {self.waited_seconds:.1f} s of waiting in all"
        )


def show_merged(merged: Sequence[Merged], console: Console, *, was_stopped: bool) -> None:
    """Print the ledger of a run and the totals of each query; `was_stopped`: before everything was merged."""
    alone = len(merged) == 1
    counts = queries.total(one.events for one in merged)
    if counts.received:
        console.print()
        console.print(ledger(counts) if alone else _by_query(merged, counts, console.width))
        console.print()
    for one in merged:
        query = "" if alone else f"{one.name}: "
        how = "failed" if one.has_failed else "stopped" if was_stopped else "done"
        batches = counted(one.micro_batches, "micro-batch")
        events = counted(one.events.received, "event")
        print_status(console, how, f"{query}{events} in {batches} merged into {one.target}")
        if one.events.quarantined:
            reasons = ", ".join(f"{number:,} {reason}" for reason, number in sorted(one.reasons.items()))
            events = counted(one.events.quarantined, "event")
            print_status(console, "quarantine", f"{query}{events} ({reasons}) in {one.quarantine}")
        if one.events.with_unknown_fields:
            events = counted(one.events.with_unknown_fields, "event")
            print_status(console, "left out", f"{query}fields that the schema lacks, of {events}")
        if one.lost_commits:
            print_status(console, "conflicts", f"{query}{one.conflicts()}")


def _by_query(merged: Sequence[Merged], counts: EventCounts, width: int) -> Table:
    """The ledger with a line for each query, and one for their sum."""
    names = ("received", *FATES)
    numbers = (Column(header(name, width), justify="right", no_wrap=True) for name in names)
    table = Table(Column("query", overflow="fold"), *numbers, box=None, pad_edge=False, header_style="bold")
    for title, events in [*((escape_line(one.name), one.events) for one in merged), ("[bold]sum[/]", counts)]:
        table.add_row(title, *(f"{getattr(events, name):,}" for name in names))
    return table


def _count(number: int) -> str:
    return f"{number:,}" if number else "[dim]·[/]"


def _version(result: MergeResult) -> str:
    return "-" if result.version is None else str(result.version)


def _tries(result: MergeResult) -> str:
    return f"[bold yellow]{result.attempts}[/]" if result.conflicts else str(result.attempts)


def phases(seconds: Mapping[Phase, float], most: int | None = None) -> str:
    """The phases of a batch, the longest first, without negligible ones."""
    named = {phase: spent for phase in PHASES if (spent := seconds.get(phase, 0.0)) >= _NEGLIGIBLE_SECONDS}
    return ", ".join(f"{phase} {spent:.1f}" for phase, spent in sorted(named.items(), key=lambda item: -item[1])[:most])
