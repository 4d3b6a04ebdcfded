"""All commands; every error that a person can act on is one sentence and an exit code.

Exit codes: 0 done, or stopped after a micro-batch by Ctrl-C or SIGTERM; 1 the demo's table is not what it must be,
or Spark failed; 2 the settings or the environment have to change; 3 the data has to change; 4 run the same command
again; 130 interrupted in the middle.
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
    """Run the command that the arguments name."""
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
