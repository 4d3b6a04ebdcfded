"""`demo`, `files`, `explain` and `maintain`: commands about a table."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from stream_merge.cli.commands import shared
from stream_merge.cli.screens.versions import show_explained
from stream_merge.demo.run import DemoSettings
from stream_merge.demo.run import run as run_demo
from stream_merge.errors import ConfigError
from stream_merge.jobs.files.run import FilesSettings
from stream_merge.jobs.files.run import replay_quarantine as replay_files
from stream_merge.jobs.files.run import run as run_files
from stream_merge.jobs.shapes import read_clauses
from stream_merge.jobs.spelling import as_options
from stream_merge.metrics.push import expect_gateway, push
from stream_merge.metrics.server import Access
from stream_merge.model.locations import hadoop_uri
from stream_merge.model.logs import counted
from stream_merge.model.results import MaintenanceRun
from stream_merge.model.settings import Maintenance
from stream_merge.model.table_ref import TableRef
from stream_merge.shapes import Changes, Shape, Snapshot, from_name, known_shapes
from stream_merge.shapes.clause_builders import plain_name
from stream_merge.sources.files import reader
from stream_merge.tables.explain import explain as explain_table
from stream_merge.tables.maintenance import maintain as maintain_table

app = typer.Typer()

_ASSIGNMENT = re.compile(r"\s*(?P<column>`(?:[^`]|``)+`|[^=`]*[^=`\s])\s*=\s*(?P<value>.*\S)\s*", re.DOTALL)
"""`COLUMN=SQL`; backticks around a name that holds an equals sign."""

_DEMO = DemoSettings()
_SHORT_LIVED = {
    # In a run of a minute the second compiler took a third of all CPU time (2 cores). Without it, Java 17 reserves only
    # 48 MB for compiled code, too little for Spark.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=256m"
}


class _MayStandAlone(TyperCommand):
    """Reads `--schema-evolution` without a value as `true`, for which Typer has no option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        option = "--schema-evolution"
        given = [
            f"{option}=true" if arg == option and after not in ("true", "widen") else arg
            for arg, after in zip(args, [*args[1:], ""], strict=True)
        ]
        return super().parse_args(ctx, given)


def _shape(name: str) -> str:
    if name not in known_shapes():
        msg = f"{name!r} is not one of {', '.join(known_shapes())}"
        raise typer.BadParameter(msg)
    return name


def _meaning(context: typer.Context, shape: str, clauses: Path | None, arguments: Mapping[str, Any]) -> Shape:
    """The shape from `--shape` or `--clauses`, with arguments of a snapshot; None: default."""
    given = {name: value for name, value in arguments.items() if value is not None}
    named = " and ".join(f"--{name.replace('_', '-')}" for name in given)
    if clauses is not None:
        if not shared.is_default(context, "shape"):
            msg = "[CONFLICTING_SETTINGS] --shape and --clauses exclude each other; remove one of them"
            raise ConfigError(msg)
        if given:
            msg = f"[CONFLICTING_SETTINGS] {named} cannot be used with --clauses; remove one of them"
            raise ConfigError(msg)
        return read_clauses(clauses)
    if shape == Snapshot.name:
        return _snapshot(given)
    if given:
        msg = f"[CONFLICTING_SETTINGS] --shape {shape} excludes {named}; set --shape {Snapshot.name}, or remove {named}"
        raise ConfigError(msg)
    return from_name(shape)


def _snapshot(given: Mapping[str, Any]) -> Snapshot:
    if given.get("delete_missing") is False and "max_delete_share" in given:
        msg = (
            "[CONFLICTING_SETTINGS] --no-delete-missing keeps missing rows, so --max-delete-share has no effect; remove"
            " one of them"
        )
        raise ConfigError(msg)
    flags = given.get("missing")
    return Snapshot(**{**given, "missing": None if flags is None else _assignments("--missing", flags)})


def _assignments(option: str, pairs: Sequence[str]) -> dict[str, str]:
    """Values from `COLUMN=SQL`, each column once."""
    values: dict[str, str] = {}
    for pair in pairs:
        parts = _ASSIGNMENT.fullmatch(pair)
        if parts is None:
            msg = f"[INVALID_SETTING] {option} {pair!r} sets no column; write {option} deleted_at=current_timestamp()"
            raise ConfigError(msg)
        name = plain_name(parts["column"])
        if name in values:
            msg = f"[INVALID_SETTING] {option} sets {name!r} twice; remove one of the two"
            raise ConfigError(msg)
        values[name] = parts["value"]
    return values


@app.command()
def demo(
    context: typer.Context,
    *,
    seed: Annotated[int, typer.Option(help="The same seed generates the same events.")] = _DEMO.seed,
    events: Annotated[int, typer.Option(min=10, help="Events to deliver.")] = _DEMO.events,
    keys: Annotated[int, typer.Option(min=1, help="Number of distinct orders.")] = _DEMO.keys,
    batches: Annotated[int, typer.Option(min=1, help="Micro-batches per writer.")] = _DEMO.batches,
    conflict: Annotated[
        bool, typer.Option("--conflict", help="Let a second query merge half of the events at the same time.")
    ] = _DEMO.conflict,
    keep: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep table and checkpoint in this folder; the next run continues there."),
    ] = _DEMO.keep,
    metrics_port: shared.MetricsPort = shared.METRICS_PORT,
    hold: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Keep table and /metrics up after the end.")
    ] = _DEMO.hold_seconds,
) -> None:
    """Merge a generated change stream and compare the table with the expected state.

    Needs only Java. The stream has late, duplicate, out-of-order and broken events.
    """
    shared.log_to_screen(logging.CRITICAL)
    settings = DemoSettings(
        seed=seed,
        events=events,
        keys=keys,
        batches=batches,
        conflict=conflict,
        keep=keep,
        hold_seconds=hold,
    )
    with (
        shared.errors_as_sentences(),
        shared.metrics_server(metrics_port, is_wish=shared.is_default(context, "metrics_port")) as server,
        shared.session_starter("stream-merge demo", _SHORT_LIVED) as start,
    ):
        as_expected = run_demo(settings, console=shared.OUT, start_session=start, metrics_url=server.url)
    if not as_expected:
        raise typer.Exit(shared.FAILED)


@app.command(cls=_MayStandAlone)
def files(
    context: typer.Context,
    *,
    source: Annotated[
        str,
        typer.Option(
            metavar="DIR", help="Folder of change files, read at any depth; with --shape snapshot one full copy."
        ),
    ],
    format: Annotated[reader.Format, typer.Option(help="json: one object per line; csv: RFC 4180.")],
    keys: Annotated[str, typer.Option(metavar="COLUMNS", help="Columns that identify a row, separated by commas.")],
    target: Annotated[
        TableRef,
        typer.Option(
            parser=TableRef, metavar="PATH", help="The Delta table; created from the first files if it is missing."
        ),
    ],
    checkpoint: Annotated[str, typer.Option(metavar="DIR", help="Checkpoint folder; use one per target.")],
    sequence_by: Annotated[
        str | None, typer.Option(metavar="COLUMNS", help="Columns that order the changes of a row; the greatest wins.")
    ] = None,
    shape: Annotated[
        str,
        typer.Option(parser=_shape, metavar="|".join(known_shapes()), help="What the changes mean for the table."),
    ] = Changes.name,
    clauses: Annotated[
        Path | None,
        typer.Option(metavar="YAML", help="A list of clauses in place of a shape: when, condition, then, set, except."),
    ] = None,
    max_delete_share: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="With --shape snapshot: fail if a larger share of rows is missing, from 0 to 1; by default 0.2.",
        ),
    ] = None,
    min_rows: Annotated[
        int | None,
        typer.Option(metavar="NUMBER", help="With --shape snapshot: fail if it has fewer rows; by default 1."),
    ] = None,
    delete_missing: Annotated[
        bool | None,
        typer.Option(
            "--delete-missing/--no-delete-missing",
            help="With --shape snapshot: delete rows that are missing from it; on by default.",
        ),
    ] = None,
    missing: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN=SQL",
            help="With --shape snapshot: set this in rows missing from it instead of deleting them; repeatable, and the"
            " first is the flag, such as deleted_at=current_timestamp().",
        ),
    ] = None,
    within: Annotated[
        str | None,
        typer.Option(
            metavar="SQL",
            help="With --shape snapshot: the part of the table that it copies, such as \"t.day = '2024-06-01'\".",
        ),
    ] = None,
    apply_as_deletes: Annotated[
        str | None, typer.Option(metavar="SQL", help="Which changes are deletes, such as \"op = 'd'\".")
    ] = None,
    columns: Annotated[str | None, typer.Option(metavar="COLUMNS", help="The only columns to store.")] = None,
    except_columns: Annotated[str | None, typer.Option(metavar="COLUMNS", help="Columns not to store.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Merge everything that is available, then exit.")] = False,
    schema: Annotated[
        str | None,
        typer.Option(metavar="DDL", help="Types, such as 'id BIGINT, at TIMESTAMP'; else inferred once, then kept."),
    ] = None,
    schema_evolution: Annotated[
        Literal["true", "widen"] | None,
        typer.Option(
            metavar="[widen]", help="Add columns to the target that it lacks; with widen also make types wider."
        ),
    ] = None,
    target_filter: Annotated[
        str | None,
        typer.Option(
            metavar="SQL", help='Where rows of the changes\' keys are, such as "t.day >= current_date() - 7".'
        ),
    ] = None,
    single_writer: Annotated[
        bool,
        typer.Option(
            "--single-writer",
            help="No other process writes to the table; lets the driver merge small batches on object stores.",
        ),
    ] = False,
    table_property: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Property of a target that is created, such as delta.enableDeletionVectors=false; repeatable.",
        ),
    ] = None,
    header: Annotated[bool, typer.Option("--header/--no-header", help="CSV: files start with column names.")] = True,
    delimiter: Annotated[str, typer.Option(help="CSV: field separator.")] = ",",
    max_files_per_trigger: Annotated[
        int | None,
        typer.Option(min=1, metavar="NUMBER", help="Files per micro-batch; by default all that are available."),
    ] = None,
    quarantine_target: Annotated[
        TableRef | None,
        typer.Option(
            parser=TableRef, metavar="PATH", help="Quarantine table for broken events; by default next to the target."
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Label of metrics; by default the name of the table.")] = None,
    replay_quarantine: Annotated[
        bool,
        typer.Option(
            "--replay-quarantine", help="Merge quarantined records of these files that are readable now, then exit."
        ),
    ] = False,
    max_quarantine_share: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            metavar="SHARE",
            help="Stop if more of the records of a batch of 1,000 or more are undecodable.",
        ),
    ] = 0.5,
    metrics_port: shared.MetricsPort = shared.METRICS_PORT,
    metrics_host: Annotated[
        str, typer.Option(metavar="HOST", help="Serve /metrics on this address; 0.0.0.0 is every one of the machine.")
    ] = "127.0.0.1",
    metrics_certificate: Annotated[
        str | None, typer.Option(metavar="PEM", help="Serve HTTPS with this certificate chain and private key.")
    ] = None,
    metrics_token: Annotated[
        str | None, typer.Option(metavar="FILE", help="File with the bearer token that /metrics then needs.")
    ] = None,
    pushgateway: Annotated[
        str | None, typer.Option(metavar="URL", help="With --once: push the metrics there at the end.")
    ] = None,
    logs: Annotated[
        Literal["text", "json"], typer.Option(help="Lines of JSON replace all other output, on stderr.")
    ] = "text",
    jars_in: shared.Jars = None,
    conf: shared.Confs = None,
    debug: shared.Debug = False,
) -> None:
    """Merge a folder of change files into a Delta table, until it is stopped or --once.

    Unreadable lines go to the quarantine table. Move files into the folder with a rename: each file is read once.
    Exit codes: 0 stopped or done; 1 Spark failed; 2 fix an option or the environment; 3 fix the data; 4 run it again.
    """
    shared.log_to_screen(logging.WARNING)
    if logs == "json":
        shared.log_as_json()
    with shared.errors_as_sentences(debug=debug, spell=as_options):
        settings = FilesSettings(
            folder=reader.Folder(path=hadoop_uri(source), format=format, header=header, delimiter=delimiter),
            target=target,
            checkpoint=hadoop_uri(checkpoint.rstrip("/")),
            keys=shared.names("--keys", keys),
            sequence_by=() if sequence_by is None else shared.names("--sequence-by", sequence_by),
            shape=_meaning(
                context,
                shape,
                clauses,
                {
                    "delete_missing": delete_missing,
                    "missing": missing or None,
                    "within": within,
                    "max_delete_share": max_delete_share,
                    "min_rows": min_rows,
                },
            ),
            apply_as_deletes=apply_as_deletes,
            columns=None if columns is None else shared.names("--columns", columns),
            except_columns=None if except_columns is None else shared.names("--except-columns", except_columns),
            quarantine_target=quarantine_target,
            schema_evolution="widen" if schema_evolution == "widen" else schema_evolution is not None,
            table_properties=shared.properties("--table-property", table_property or []),
            target_filter=target_filter,
            single_writer=single_writer,
            name=name,
            schema=schema,
            max_files_per_trigger=max_files_per_trigger,
            max_quarantine_share=max_quarantine_share,
            once=once,
        )
        places = (source, target, checkpoint, quarantine_target or target)
        if pushgateway is not None:
            expect_gateway(pushgateway)
        with (
            shared.metrics_server(
                0 if replay_quarantine else metrics_port,  # where a job is scraped, that one is seen to be down
                metrics_host,
                Access(certificate_file=metrics_certificate, token_file=metrics_token),
                is_wish=shared.is_default(context, "metrics_port"),
            ) as server,
            shared.session_starter(
                f"stream-merge files {settings.label}", shared.session_confs(conf, jars_in, places)
            ) as start,
        ):
            if replay_quarantine:
                replay_files(settings, console=shared.OUT, start_session=start)
            else:
                try:
                    run_files(
                        settings,
                        console=shared.OUT,
                        start_session=lambda: server.health.follow(start()),
                        metrics_url=server.url,
                    )
                finally:
                    if once and pushgateway is not None:
                        push(pushgateway, [settings.label])


@app.command()
def explain(
    target: Annotated[
        TableRef, typer.Argument(parser=TableRef, metavar="TABLE", help="Path or URI of a sink's target.")
    ],
    *,
    last: Annotated[
        int, typer.Option(min=1, max=1_000_000, metavar="NUMBER", help="How many versions to read, newest first.")
    ] = 20,
) -> None:
    """Show which engine merged the newest batches of a table, why, what changed, and how to make merges cheaper.

    Reads the table's log and the footers of change files. Needs no Java.
    """
    with shared.errors_as_sentences():
        show_explained(explain_table(target, last=last), target, console=shared.OUT)


@app.command()
def maintain(
    target: Annotated[
        TableRef, typer.Argument(parser=TableRef, metavar="TABLE", help="Path, URI or catalog name of a sink's target.")
    ],
    *,
    optimize: Annotated[bool, typer.Option("--optimize/--no-optimize", help="Compact small files.")] = True,
    vacuum: Annotated[
        bool, typer.Option("--vacuum", help="Delete files unused for the table's delta.deletedFileRetentionDuration.")
    ] = False,
    jars_in: shared.Jars = None,
    conf: shared.Confs = None,
    debug: shared.Debug = False,
) -> None:
    """Compact a table's small files and delete files it no longer needs, once, while no sink writes to it.

    Exit codes: 0 done, or nothing to do; 1 not done, with the reason; 2 fix an option; 4 another process writes to the
    table, or the store is unavailable: run it again later.
    """
    shared.log_to_screen(logging.ERROR)
    with shared.errors_as_sentences(debug=debug):
        wanted = Maintenance(optimize=optimize, vacuum=vacuum)
        with shared.session_starter(
            f"stream-merge maintain {target}", shared.session_confs(conf, jars_in, [target])
        ) as start:
            run = maintain_table(start(), target, wanted)
    shared.OUT.print(_sentence(run), markup=False, highlight=False, soft_wrap=True)
    if run.outcome not in ("done", "nothing"):
        raise typer.Exit(shared.FAILED)


def _sentence(run: MaintenanceRun) -> str:
    """The result of a maintenance run."""
    done = [f"compacted {counted(run.removed_files, 'file')} into {run.added_files:,}"] if run.removed_files else []
    done += ["deleted files that the table no longer needs"] if run.vacuumed else []
    match run.outcome:
        case "done" | "nothing":
            return "; ".join(done) or "nothing to do"
        case "lost":
            reason = f"not done: another writer was faster ({run.detail}); run it again"
        case _:
            reason = f"failed: {run.detail}"
    return "; ".join([reason, *done])
