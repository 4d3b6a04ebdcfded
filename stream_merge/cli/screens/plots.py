"""Plots of a table's history as inline SVG, with matplotlib (extra `report`)."""

from __future__ import annotations

import io
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.category import StrCategoryLocator
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from stream_merge.model.results import ENGINES, FATES, PHASES
from stream_merge.tables.table_history import Commit, TableHistory

_MOST_BARS = 100
"""Most bars of a plot: consecutive commits share a bar."""
_MANY_BARS = 40
"""Least bars of a plot that cuts off rare high ones."""
_TICKS = 6
_SECONDS = "seconds per batch"
_COMMON = 0.95
"""Share of the bars of seconds that are not cut off."""
_BYTES = (1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9)
"""Bounds of the classes of file sizes."""
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "stream-merge",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.edgecolor": "#b8c0c8",
    "axes.labelcolor": "#4a5560",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#e6eaee",
    "xtick.color": "#4a5560",
    "ytick.color": "#4a5560",
    "legend.frameon": False,
    "legend.fontsize": 8,
}
# Paul Tol's "bright" and "light" schemes, for colour-blind readers.
_BRIGHT = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")
_BLUE, _RED, _GREEN, _YELLOW, _CYAN, _PURPLE, _GREY = _BRIGHT
_FATES = {
    "inserted": _GREEN,
    "updated": _BLUE,
    "deleted": _RED,
    "unaffected": _GREY,
    "collapsed": _CYAN,
    "stale": _YELLOW,
    "quarantined": _PURPLE,
}
_ENGINES = {"driver": _BLUE, "spark": _RED}
_PHASES = {
    "read": "#77aadd",
    "prepare": _CYAN,
    "quarantine": _PURPLE,
    "tombstones": _YELLOW,
    "plan": "#bbcc33",
    "merge": _BLUE,
    "backoff": _RED,
    "other": _GREY,
}
"""Phases before the commit: `recheck` and `maintenance` follow it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """One plot of the page."""

    title: str
    how_to_read: str
    svg: str


@dataclass(frozen=True, slots=True)
class _Groups:
    """Consecutive commits that share a bar."""

    members: Sequence[Sequence[Commit]]

    @classmethod
    def split(cls, commits: Sequence[Commit]) -> _Groups:
        size = bar_size(len(commits))
        return cls([commits[start : start + size] for start in range(0, len(commits), size)])

    def sums(self, count: Callable[[Commit], Mapping[str, float]], names: Sequence[str]) -> dict[str, list[float]]:
        """Name -> sum in each group, without names that never occur."""
        totals: list[Counter[str]] = []
        for group in self.members:
            total: Counter[str] = Counter()
            for commit in group:
                total.update(count(commit))
            totals.append(total)
        return {name: row for name in names if any(row := [float(total[name]) for total in totals])}

    def means(self, count: Callable[[Commit], Mapping[str, float]], names: Sequence[str]) -> dict[str, list[float]]:
        """`sums` divided by the number of commits."""
        return {
            name: [total / len(group) for total, group in zip(row, self.members, strict=True)]
            for name, row in self.sums(count, names).items()
        }


def plots(history: TableHistory) -> Iterator[Plot]:
    """All plots, in the order of the page."""
    batches = _Groups.split(history.batches)
    commits = _Groups.split(history.commits)
    vectors = partial(_two_lines, first="vectors", label="files with a vector", second="deleted_rows", color=_RED)
    with mpl.rc_context(_STYLE):
        yield Plot(
            title="Batch time",
            how_to_read="The line is the mean time of a batch up to its commit, a dot the longest one, on a logarithmic"
            " scale: dots far above the line are single slow batches, a rising line is a trend.",
            svg=_drawn(_batch_time, batches),
        )
        yield Plot(
            title="Phases",
            how_to_read="Mean seconds of a batch by phase: the widest colour is where to look first; of many bars those"
            " of rare slow batches end at the top.",
            svg=_stacked(batches, batches.means(lambda commit: commit.phases, PHASES), _SECONDS, _PHASES),
        )
        yield Plot(
            title="Rows by fate",
            how_to_read="What became of the events; much grey or cyan means that many of them change nothing.",
            svg=_stacked(batches, batches.sums(lambda commit: commit.fates, FATES), "events", _FATES),
        )
        yield Plot(
            title="Engines",
            how_to_read="Batches by the engine that merged them: driver takes tenths of a second, spark takes seconds.",
            svg=_stacked(batches, batches.sums(lambda one: {one.engine: 1}, ENGINES), "batches", _ENGINES),
        )
        yield Plot(
            title="Conflicts and retries",
            how_to_read="Commits lost to other writers, by Delta's class; each cost a further attempt of its batch.",
            svg=_stacked(batches, batches.sums(lambda one: one.conflicts, _names(batches)), "lost commits", {}),
        )
        yield Plot(
            title="Files",
            how_to_read="Data files after each commit, and their bytes: files that grow faster than bytes are small"
            " ones, and a drop is compaction.",
            svg=_drawn(partial(_two_lines, first="files", label="files", second="bytes", color=_YELLOW), commits),
        )
        yield Plot(
            title="File sizes now",
            how_to_read="Data files of the newest version by size: many on the left ask for compaction.",
            svg=_drawn(lambda axes, _: _sizes(axes, history.sizes), commits),
        )
        yield Plot(
            title="Deletion vectors",
            how_to_read="Files with a deletion vector, and rows that vectors mark as deleted: readers read and discard"
            " these rows until compaction.",
            svg=_drawn(vectors, commits if any(one.after.vectors for one in history.commits) else _Groups([])),
        )
        reasons = _quarantined(history, commits)
        yield Plot(
            title="Quarantine",
            how_to_read="Quarantined events by reason; stream-merge quarantine show has the events.",
            svg=_stacked(commits, reasons, "events", {}),
        )


def bar_size(commits: int) -> int:
    """Commits per bar."""
    return -(-commits // _MOST_BARS) or 1


def _names(groups: _Groups) -> list[str]:
    return sorted({name for group in groups.members for commit in group for name in commit.conflicts})


def _quarantined(history: TableHistory, groups: _Groups) -> dict[str, list[float]]:
    """Reason -> events in each group: a call quarantines before it commits."""
    ends = [at for group in groups.members if (at := group[-1].at) is not None]
    rows: dict[str, list[float]] = {}
    for one in history.quarantined:
        row = rows.setdefault(one.reason, [0.0] * len(groups.members))
        row[min(bisect_left(ends, one.at), len(row) - 1)] += one.events
    return rows


def _batch_time(axes: Axes, groups: _Groups) -> None:
    means = [sum(commit.seconds for commit in group) / len(group) for group in groups.members]
    longest = [max(commit.seconds for commit in group) for group in groups.members]
    axes.plot(longest, ".", color=_RED, label="longest", markersize=4)
    axes.plot(means, "-", color=_BLUE, label="mean", linewidth=1.6)
    axes.set_ylabel(_SECONDS)
    axes.set_yscale("log", subs=[])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))


def _two_lines(axes: Axes, groups: _Groups, *, first: str, label: str, second: str, color: str) -> None:
    """Attributes of the files after each group: the first in files, the second with its own axis on the right."""
    first_values, values = ([getattr(group[-1].after, one) for group in groups.members] for one in (first, second))
    axes.plot(first_values, color=_BLUE, label=label, linewidth=1.6)
    axes.set_ylabel("files")
    right, name = axes.twinx(), second.replace("_", " ")
    right.plot(values, color=color, label=name, linewidth=1.6)
    right.set_ylabel(name)
    right.grid(visible=False)
    right.set_ylim(bottom=0)
    right.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axes.plot([], color=color, label=name)  # one legend for both


def _sizes(axes: Axes, sizes: Sequence[int]) -> None:
    counts = Counter(bisect_right(_BYTES, size) for size in sizes)
    names = [f"<{short(bound)}B" for bound in _BYTES] + [f"≥{short(_BYTES[-1])}B"]
    axes.bar(names, [counts[place] for place in range(len(names))], color=_BLUE, width=0.7)
    axes.set_ylabel("files")


def _stacked(groups: _Groups, rows: Mapping[str, Sequence[float]], unit: str, colors: Mapping[str, str]) -> str:
    def draw(axes: Axes, groups: _Groups) -> None:
        edges = [place - 0.5 for place in range(len(groups.members) + 1)]
        painted = [colors.get(name, _BRIGHT[place % len(_BRIGHT)]) for place, name in enumerate(rows)]
        steps = [[*row, row[-1]] for row in rows.values()]
        axes.stackplot(edges, steps, labels=list(rows), colors=painted, step="post")
        axes.set_ylabel(unit)
        if unit == _SECONDS:  # a first batch takes a hundred times as long as those after it
            sums = sorted(map(sum, zip(*rows.values(), strict=True)))
            if len(sums) >= _MANY_BARS:
                axes.set_ylim(top=min(1.05 * sums[-1], 2 * sums[int(_COMMON * (len(sums) - 1))]))

    return _drawn(draw, groups if rows else _Groups([]))


def _drawn(draw: Callable[[Axes, _Groups], None], groups: _Groups) -> str:
    """SVG of a plot over groups of commits, with their times below."""
    figure = Figure(figsize=(6.2, 2.5), layout="constrained")
    axes = figure.add_subplot()
    if not groups.members:
        axes.text(0.5, 0.5, "none", ha="center", va="center", transform=axes.transAxes, color="#8a949e", size=13)
        axes.set_axis_off()
        return _svg(figure)
    draw(axes, groups)
    if axes.get_yscale() == "linear":
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=axes.get_ylabel() != _SECONDS))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    if not isinstance(axes.xaxis.get_major_locator(), StrCategoryLocator):
        _times(axes, groups)
    if axes.get_legend_handles_labels()[0]:
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=7, handlelength=1)
    return _svg(figure)


def _times(axes: Axes, groups: _Groups) -> None:
    """Label the groups by times of their first commits, or by versions without times."""
    places = sorted({round(place * (len(groups.members) - 1) / (_TICKS - 1)) for place in range(_TICKS)})
    firsts = [groups.members[place][0] for place in places]
    times = [first.at for first in firsts]
    ends = [at for at in (times[0], times[-1]) if at is not None]
    axes.set_xlim(-0.7, len(groups.members) - 0.3)
    axes.set_xticks(
        places,
        [
            _time(at, ends) if at is not None else f"v{one.record.version}"
            for at, one in zip(times, firsts, strict=True)
        ],
    )


def _time(at: datetime, ends: Sequence[datetime]) -> str:
    return f"{at:%H:%M:%S}" if (ends[-1] - ends[0]).days < 1 else f"{at:%b %d}\n{at:%H:%M}"


def _svg(figure: Figure) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    # Ids must differ between the drawings of a page; those of groups are unused.
    text = re.sub(r'<g id="[^"]*"', "<g", text[text.index("<svg") :])
    return re.sub(
        r'<svg[^>]* viewBox="([^"]+)"[^>]*>',
        r'<svg viewBox="\1" xmlns:xlink="http://www.w3.org/1999/xlink">',
        text,
        count=1,
    )


def short(value: float) -> str:
    """A number of at most three digits, with k, M, G or T."""
    for bound, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= bound:
            return f"{value / bound:.3g}{unit}"
    return f"{value:.3g}"
