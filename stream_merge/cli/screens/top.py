"""Output of `stream-merge top`: a row for each running query, a line for each endpoint without any."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stream_merge.jobs.watch.screen import escape_line, header, phases
from stream_merge.metrics.scraped import State, Status

_STATES: Mapping[State, str] = {
    "ended": "bold red",
    "failing": "bold red",
    "no broker": "bold red",
    "starting": "yellow",
    "behind": "yellow",
    "running": "green",
    "idle": "green",
}
_NUMBERS = ("events/s", "lag", "behind", "committed", "s/batch")
_COUNTS = ("failed", "conflicts", "quarantined")
_PHASES, _WIDE = 3, 140
"""Phases shown, and the least width of the terminal."""
_PLAIN = 108
"""Least width of the terminal for all other columns."""
_LEFT_OUT = frozenset({"target", "committed", "conflicts"})


def drawn(statuses: Mapping[str, list[Status] | str], *, at: str, width: int) -> RenderableType:
    """The screen: for each endpoint the status of its queries, or why there is none."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    names = ["query", "target", "state", *_NUMBERS, "engine", *_COUNTS]
    names += ["phases"] if width >= _WIDE else []
    names = [name for name in names if width >= _PLAIN or name not in _LEFT_OUT]
    names = ["endpoint", *names] if len(statuses) > 1 else names
    for name in names:
        is_number = name in (*_NUMBERS, *_COUNTS)
        table.add_column(
            header(name, width), justify="right" if is_number else "left", no_wrap=is_number, overflow="fold"
        )
    lines = []
    for url, queries in statuses.items():
        host = url.rpartition("://")[2].removesuffix("/metrics")
        for status in queries if isinstance(queries, list) else []:
            cells = {"endpoint": escape_line(host), **_cells(status)}
            table.add_row(*(cells[name] for name in names))
        if isinstance(queries, str) or not queries:
            lines.append(Text(f"{url}: {queries or 'answers, but no query has started'}", style="bold yellow"))
    shown = [table] if table.row_count else []
    return Group(Text(f"stream-merge top, {at}", style="dim"), *shown, *lines)


def _cells(status: Status) -> dict[str, str]:
    spent = status.seconds_per_batch
    return {
        "query": escape_line(status.query),
        "target": escape_line(status.target),
        "state": f"[{_STATES[status.state]}]{status.state}[/]",
        "events/s": _number(status.events_per_second),
        "lag": _number(status.lag),
        "behind": duration(status.behind_seconds),
        "committed": "-" if status.committed_ago is None else f"{duration(status.committed_ago)} ago",
        "s/batch": "-" if spent is None else f"{spent:.2f}",
        "engine": _engine(status),
        "failed": _count(status.failed),
        "conflicts": _count(status.conflicts) + (f" ({status.exhausted:,} gave up)" if status.exhausted else ""),
        "quarantined": _count(status.quarantined),
        "phases": phases(status.phases, most=_PHASES),
    }


def _engine(status: Status) -> str:
    """The engines of the newest batches, most frequent first, and why some went to Spark."""
    names = ", ".join(sorted(status.engines, key=lambda name: -status.engines[name]))
    return f"{names} ({', '.join(status.refusals)})" if status.refusals else names


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 10 or value % 1 == 0 else f"{value:.1f}"  # noqa: PLR2004


def _count(value: int) -> str:
    return f"[bold yellow]{value:,}[/]" if value else "[dim]0[/]"


def duration(seconds: float | None) -> str:
    """A duration in its largest unit: `12 s`, `5 min`, `3 h`, `2 d`."""
    if seconds is None:
        return "-"
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
