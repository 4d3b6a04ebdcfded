"""`maintain`: one round of upkeep of a table, by hand."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Annotated

import typer

from stream_merge.cli.commands.shared import (
    FAILED,
    OUT,
    Confs,
    Debug,
    Jars,
    errors_as_sentences,
    log_to_screen,
    names,
    session_confs,
    session_starter,
)
from stream_merge.jobs.units import seconds_by_unit
from stream_merge.model.counted import counted
from stream_merge.model.maintenance import Maintenance
from stream_merge.model.results import Upkeep
from stream_merge.model.table_ref import TableRef
from stream_merge.tables.upkeep import maintained

app = typer.Typer()

_DEFAULT = Maintenance()


def _age(text: str) -> timedelta:
    """A time with its unit."""
    try:
        return timedelta(seconds=seconds_by_unit(text))
    except ValueError as err:
        raise typer.BadParameter(str(err)) from err


@app.command()
def maintain(
    target: Annotated[
        TableRef, typer.Argument(parser=TableRef, metavar="TABLE", help="Path, URI or catalog name of a sink's target.")
    ],
    *,
    optimize: Annotated[
        bool, typer.Option("--optimize/--no-optimize", help="Compact small files, within the budget.")
    ] = _DEFAULT.optimize,
    zorder_by: Annotated[str | None, typer.Option(metavar="COLUMNS", help="Columns to Z-order by.")] = None,
    vacuum_after: Annotated[
        timedelta | None,
        typer.Option(parser=_age, metavar="TIME", help="Delete files unused for this long, such as '7 days'."),
    ] = None,
    budget_seconds: Annotated[
        float, typer.Option(min=0.001, metavar="SECONDS", help="Time budget; files are selected to fit it.")
    ] = 3600.0,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Allow --vacuum-after other than the table's own retention; below it readers lose files."
        ),
    ] = False,
    jars_in: Jars = None,
    conf: Confs = None,
    debug: Debug = False,
) -> None:
    """Compact a table's small files and delete files it no longer needs, once, while no sink writes to it.

    Exit codes: 0 done, or nothing to do; 1 not done, with the reason; 2 fix an option; 4 another process writes to the
    table, or the store is unavailable: run it again later.
    """
    log_to_screen(logging.ERROR)
    with errors_as_sentences(debug=debug):
        wanted = Maintenance(
            optimize=optimize,
            zorder_by=() if zorder_by is None else names("--zorder-by", zorder_by),
            vacuum_after=vacuum_after,
            budget_seconds=budget_seconds,
            force=force,
        )
        with session_starter(f"stream-merge maintain {target}", session_confs(conf, jars_in, [target])) as start:
            found = maintained(start(), target, wanted)
    OUT.print(_sentence(found), markup=False, highlight=False, soft_wrap=True)
    if found.outcome not in ("done", "nothing"):
        raise typer.Exit(FAILED)


def _sentence(found: Upkeep) -> str:
    vacuumed = "; files that it no longer needs are deleted" if found.vacuumed else ""
    match found.outcome:
        case "done" if found.removed_files:
            return f"{_compacted(found)}{vacuumed}"
        case "done":
            return f"no files are worth compacting{vacuumed}"
        case "nothing":
            return "nothing to do"
        case "over_budget":
            return f"not done: {found.detail}{_all_the_same(found)}"
        case "lost":
            return f"not done: another writer was faster ({found.detail}); run it again{_all_the_same(found)}"
        case _:
            return f"failed: {found.detail}{_all_the_same(found)}"


def _compacted(found: Upkeep) -> str:
    return f"compacted {counted(found.removed_files, 'file')} into {found.added_files:,}"


def _all_the_same(found: Upkeep) -> str:
    """What a round has done beside the part that did not come off."""
    done = [_compacted(found)] if found.removed_files else []
    done += ["files that the table no longer needs are deleted"] if found.vacuumed else []
    return f"; what was done: {', and '.join(done)}" if done else ""
