"""The HTML page of `stream-merge report`: numbers, plots and the newest commits."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from stream_merge.cli.screens.plots import Plot, bar_size, plots, short
from stream_merge.model.logs import counted
from stream_merge.tables.table_history import Commit, TableHistory

_NEWEST = 50
"""Commits in the table."""
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1f2933; background: #f4f6f8; margin: 0 auto; max-width: 1520px;
  padding: 24px; }
h1 { font-size: 22px; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 15px; margin: 0; }
p { margin: 0 0 18px; color: #4a5560; }
main { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 14px; }
figure, section { background: #fff; border: 1px solid #e1e6eb; border-radius: 8px; margin: 0; padding: 12px 14px; }
figure svg { width: 100%; height: auto; }
figcaption { font-size: 13px; color: #4a5560; }
section { margin-top: 14px; overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; width: 100%; font-variant-numeric: tabular-nums; margin-top: 6px; }
th, td { padding: 3px 8px; text-align: right; border-bottom: 1px solid #eef1f4; white-space: nowrap; }
th { color: #4a5560; font-weight: 600; }
.text { text-align: left; }
"""
_COLUMNS = ("inserted", "updated", "deleted", "unaffected", "collapsed", "stale", "quarantined")


def page(history: TableHistory) -> str:
    """The page as HTML that loads nothing."""
    figures = "\n".join(map(_figure, plots(history)))
    rows = "\n".join(map(_row, reversed(history.commits[-_NEWEST:])))
    title = f"stream_merge report: {escape(history.target)}"
    heads = "".join(
        f'<th scope="col"{" class=text" if name in _TEXTS else ""}>{name}</th>'
        for name in ("version", *_TEXTS, *_COLUMNS, "retries", "seconds", "files")
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{title}</h1>
<p>{escape(summary(history))} {_shares(history)}</p>
<main>
{figures}
</main>
<section>
<h2>Newest commits</h2>
<table>
<thead><tr>{heads}</tr></thead>
<tbody>
{rows}
</tbody>
</table>
</section>
</body>
</html>
"""


def summary(history: TableHistory) -> str:
    """The history in one line of numbers."""
    batches = history.batches
    seconds = [commit.seconds for commit in batches]
    events = sum(sum(commit.fates.values()) for commit in batches)
    quarantined = sum(commit.fates["quarantined"] for commit in batches)
    mean, longest = (sum(seconds) / len(seconds), max(seconds)) if seconds else (0.0, 0.0)
    files = history.files
    return (
        f"Version {history.version:,}; {counted(len(history.commits), 'commit')}{_between(history.commits)},"
        f" {counted(len(batches), 'batch')} of a sink with {counted(events, 'event')}, {quarantined:,}"
        f" quarantined; {mean:.2f} s per batch, {longest:.2f} s the longest;"
        f" {counted(sum(commit.retries for commit in batches), 'repeated attempt')};"
        f" {counted(files.files, 'file')} of {short(files.bytes)}B, {files.deleted_rows:,} rows in them deleted."
    )


def _shares(history: TableHistory) -> str:
    each = bar_size(len(history.batches))
    return f"Each bar or point stands for {each} consecutive batches." if each > 1 else ""


def _between(commits: Iterable[Commit]) -> str:
    times = [commit.at for commit in commits if commit.at is not None]
    return f" from {times[0]:%Y-%m-%d %H:%M} to {times[-1]:%Y-%m-%d %H:%M} UTC" if times else ""


def _figure(plot: Plot) -> str:
    return (
        f'<figure>\n<h2>{plot.title}</h2>\n<div role="img" aria-label="{plot.title}">{plot.svg}</div>\n'
        f"<figcaption>{plot.how_to_read}</figcaption>\n</figure>"
    )


_TEXTS = ("committed (UTC)", "what", "engine")


def _row(commit: Commit) -> str:
    what = f"batch {commit.batch_id}" if commit.is_batch else commit.operation
    texts = ("" if commit.at is None else f"{commit.at:%Y-%m-%d %H:%M:%S}", what, commit.engine)
    fates = [f"{commit.fates[fate]:,}" for fate in _COLUMNS] if commit.is_batch else [""] * len(_COLUMNS)
    rest = (f"{commit.retries}", f"{commit.seconds:.2f}") if commit.is_batch else ("", "")
    cells = [f"<td>{commit.record.version}</td>", *(f'<td class="text">{escape(text)}</td>' for text in texts)]
    cells += [f"<td>{number}</td>" for number in (*fates, *rest, f"{commit.after.files:,}")]
    return f"<tr>{''.join(cells)}</tr>"
