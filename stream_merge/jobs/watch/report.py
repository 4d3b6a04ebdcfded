"""What a run ends with: what became of every event, by query and in sum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Column, Table

from stream_merge.jobs.watch import queries, screen
from stream_merge.jobs.watch.text import escape_line
from stream_merge.model.logs import counted
from stream_merge.model.results import FATES, EventCounts, MergeResult


@dataclass(kw_only=True, slots=True)
class Merged:
    """What one query did, in sums: it may have run for months."""

    name: str
    target: str
    quarantine: str
    """Where the sink put events that it could not merge."""
    has_failed: bool = False
    micro_batches: int = 0
    events: EventCounts = field(default_factory=EventCounts)
    reasons: Counter[str] = field(default_factory=Counter)
    """Quarantined events by reason; one event can have several."""
    lost: screen.LostCommits = field(default_factory=screen.LostCommits)

    def add(self, result: MergeResult) -> None:
        """Count one more micro-batch."""
        self.micro_batches += 1
        self.events = queries.sum_of([self.events, result.events])
        self.reasons.update(result.reasons)
        self.lost.add(result)


def show(merged: Sequence[Merged], console: Console, *, was_stopped: bool) -> None:
    """Print the ledger, where the events went, and what is not as it should be.

    Args:
        merged: each query of the run.
        console: where to.
        was_stopped: somebody ended the run before everything was merged.
    """
    say = screen.Teller(console)
    alone = len(merged) == 1
    counts = queries.sum_of(one.events for one in merged)
    if counts.received:
        console.print()
        console.print(screen.ledger(counts) if alone else _by_query(merged, counts, console.width))
        console.print()
    for one in merged:
        of_query = "" if alone else f"{one.name}: "
        how = "failed" if one.has_failed else "stopped" if was_stopped else "done"
        batches = counted(one.micro_batches, "micro-batch")
        say(how, f"{of_query}{counted(one.events.received, 'event')} in {batches} merged into {one.target}")
        if one.events.quarantined:
            reasons = ", ".join(f"{number:,} {reason}" for reason, number in sorted(one.reasons.items()))
            say("quarantine", f"{of_query}{counted(one.events.quarantined, 'event')} ({reasons}) in {one.quarantine}")
        if one.events.with_unknown_fields:
            left_out = counted(one.events.with_unknown_fields, "event")
            say("left out", f"{of_query}fields that the schema lacks, of {left_out}")
        if one.lost.by_class:
            say("conflicts", f"{of_query}{one.lost.said()}")


def _by_query(merged: Sequence[Merged], counts: EventCounts, width: int) -> Table:
    """A line for each query, and one for their sum."""
    names = ("received", *FATES)
    numbers = (Column(screen.header(name, width), justify="right", no_wrap=True) for name in names)
    table = Table(Column("query", overflow="fold"), *numbers, box=None, pad_edge=False, header_style="bold")
    for title, events in [*((escape_line(one.name), one.events) for one in merged), ("[bold]sum[/]", counts)]:
        table.add_row(title, *(f"{getattr(events, name):,}" for name in names))
    return table
