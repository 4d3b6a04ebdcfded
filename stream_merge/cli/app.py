"""All commands.

Exit codes: 0 done, or stopped after a micro-batch by Ctrl-C or SIGTERM; 1 the demo's table is wrong, or Spark failed;
2 change settings or environment; 3 change the data; 4 run the command again; 130 interrupted.
"""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import typer
from rich.console import Console

from stream_merge.cli.commands import jobs, tables, watching
from stream_merge.cli.panics import panics_in_the_log

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Merge change streams into Delta tables: exactly once, with every event accounted for.",
)
app.add_typer(tables.app)
app.add_typer(jobs.app)
app.add_typer(watching.app)


def run() -> None:
    """Run a command."""
    with panics_in_the_log():
        app()


def _show_version(wanted: bool) -> None:
    if wanted:
        Console().print(f"stream-merge {metadata.version('stream-merge')}", highlight=False)
        raise typer.Exit


@app.callback()
def _all_commands(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass
