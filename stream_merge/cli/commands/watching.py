"""`top` and `report`: commands that show running jobs and tables, without Java."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.live import Live

from stream_merge.cli.commands.shared import AGAIN, METRICS_PORT, OUT, errors_as_sentences
from stream_merge.cli.screens.top import drawn
from stream_merge.errors import ConfigError
from stream_merge.jobs.watch.screen import escape
from stream_merge.metrics.scraped import Endpoint, Scrape, Status, UnreachableError, Watched
from stream_merge.model.logs import counted
from stream_merge.model.table_ref import TableRef
from stream_merge.tables.table_history import table_history

app = typer.Typer()


@app.command()
def top(
    urls: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="URL...", show_default=False, help=f"By default http://127.0.0.1:{METRICS_PORT}/metrics."
        ),
    ] = None,
    *,
    once: Annotated[bool, typer.Option("--once", help="Print one table, then exit.")] = False,
    every: Annotated[float, typer.Option(min=0.2, metavar="SECONDS", help="Time between two scrapes.")] = 2.0,
    ca_file: Annotated[Path | None, typer.Option(metavar="PEM", help="Root certificate of https endpoints.")] = None,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with the bearer token of the endpoints.")
    ] = None,
) -> None:
    """Show running jobs from their /metrics: state, rate, lag, phases, engine, conflicts, quarantine. Needs no Java.

    Rates are of the last minute, with --once of the time since the process started. Ctrl-C ends it. Exit codes: 0 done;
    4 with --once, an endpoint gave no metrics.
    """
    given = dict.fromkeys(urls or [f"http://127.0.0.1:{METRICS_PORT}/metrics"])
    watched = {Endpoint(url=url, ca_file=ca_file, token_file=token_file): Watched() for url in given}
    with ThreadPoolExecutor(len(watched)) as threads, suppress(KeyboardInterrupt):
        if once:
            statuses = _scrape(watched, threads)
            OUT.print(_drawn(statuses))
            if any(isinstance(one, str) for one in statuses.values()):
                raise typer.Exit(AGAIN)
            return
        with Live(console=OUT, auto_refresh=False) as live:
            while True:
                live.update(_drawn(_scrape(watched, threads)), refresh=True)
                time.sleep(every)


def _drawn(statuses: Mapping[str, list[Status] | str]) -> RenderableType:
    return drawn(statuses, at=time.strftime("%H:%M:%S"), width=OUT.width)


def _scrape(watched: Mapping[Endpoint, Watched], threads: ThreadPoolExecutor) -> dict[str, list[Status] | str]:
    """URL -> status of its queries, or why there is none; scraped in parallel."""

    def one(endpoint: Endpoint) -> list[Status] | str:
        try:
            return watched[endpoint].add(Scrape.parse(endpoint.scrape(), at=time.time()))
        except UnreachableError as err:
            return str(err)

    return dict(zip((endpoint.url for endpoint in watched), threads.map(one, watched), strict=True))


@app.command()
def report(
    target: Annotated[
        TableRef, typer.Argument(parser=TableRef, metavar="TABLE", help="Path or URI of a sink's target.")
    ],
    *,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page; by default the table's name and -report.html.")
    ] = None,
    last: Annotated[
        int, typer.Option(min=1, max=1_000_000, metavar="NUMBER", help="How many commits to read, newest first.")
    ] = 1000,
) -> None:
    """Write a page with plots of a table's history: batch time, rows, engines, phases, conflicts, files, quarantine.

    One HTML file that loads nothing. Reads the table's log and its quarantine. Needs no Java, and matplotlib:
    pip install 'stream-merge[cli,report]'.
    """
    with errors_as_sentences():
        try:
            from stream_merge.cli.screens.report import page  # noqa: PLC0415 - fails without the extra
        except ModuleNotFoundError as err:
            msg = f"[EXTRA_NOT_INSTALLED] report needs {err.name}; run: pip install 'stream-merge[cli,report]'"
            raise ConfigError(msg) from err
        history = table_history(target, last=last)
        file = out or Path(f"{target.plain.rpartition('/')[2]}-report.html")
        if file.is_dir() or not file.absolute().parent.is_dir():
            msg = f"[INVALID_SETTING] --out {str(file)!r} must be a file in a folder that exists"
            raise ConfigError(msg)
        file.write_text(page(history), encoding="utf-8")
    OUT.print(f"{escape(str(file))}: {counted(len(history.commits), 'commit')}", highlight=False, soft_wrap=True)
