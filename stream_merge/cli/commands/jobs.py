"""`run`, `check`, `history`, `stop`, `quarantine` and `jars`: commands about jobs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from pyspark.sql import SparkSession

from stream_merge.cli.commands import shared
from stream_merge.cli.screens import versions
from stream_merge.errors import ConfigError, located
from stream_merge.jobs.kafka import control, jars, quarantine_queries
from stream_merge.jobs.kafka import run as run_job
from stream_merge.jobs.kafka.check import check as check_job
from stream_merge.jobs.kafka.check import refuse_places
from stream_merge.jobs.kafka.exit_codes import Verdict, worst_of
from stream_merge.jobs.kafka.history import trail
from stream_merge.jobs.kafka.replay import Replayed, Request, replay
from stream_merge.jobs.kafka.run import JobResult
from stream_merge.jobs.kafka.settings import JobSettings, QuerySettings, load
from stream_merge.jobs.spelling import as_settings
from stream_merge.jobs.watch import queries, screen
from stream_merge.jobs.watch.screen import escape
from stream_merge.metrics.push import push
from stream_merge.metrics.server import MetricsServer
from stream_merge.model.logs import counted, tell
from stream_merge.model.results import MergeResult
from stream_merge.model.table_ref import TableRef
from stream_merge.session import is_submitted
from stream_merge.spark.downloads import azure_confs, for_places, s3_confs
from stream_merge.tables import locks, spark_table

app = typer.Typer()
quarantine = typer.Typer(no_args_is_help=True, help="Events that a job could not merge.")
app.add_typer(quarantine, name="quarantine")

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.2

JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="The job file (YAML).")]
JobOrTable = Annotated[
    str, typer.Argument(metavar="JOB_OR_TABLE", help="The job file (YAML), or a table written by 'files' or by a sink.")
]


@app.command()
def run(
    job: JobFile,
    *,
    once: Annotated[bool, typer.Option("--once", help="Merge everything that is available, then exit.")] = False,
    jars_in: shared.Jars = None,
    conf: shared.Confs = None,
    debug: shared.Debug = False,
) -> None:
    """Run the queries of a job file until Ctrl-C, SIGTERM or 'stream-merge stop'.

    Exit codes: 0 stopped or done; 2 fix the job file or the environment; 3 fix the data; 4 run it again.
    """
    shared.log_to_screen(logging.WARNING)
    with shared.errors_as_sentences(debug=debug):
        settings = load(job)
        if settings.logs == "json":
            shared.log_as_json()
        refuse_places(settings)
        result = JobResult(failures=control.taken(settings.queries))
        if len(result.failures) < len(settings.queries):
            own = shared.confs(conf or [])
            if not is_submitted():
                own = for_places(jars.conf(jars_in, own), _places(settings.queries))
            with (
                shared.metrics_server(
                    settings.metrics.port,
                    settings.metrics.host,
                    settings.metrics.access(),
                    is_wish="port" not in settings.metrics.model_fields_set,
                ) as server,
                shared.session_starter(f"stream-merge {job.stem}", own) as start,
            ):
                result = _run(settings, start, server, once=once)
            if once and settings.metrics.pushgateway is not None:
                push(settings.metrics.pushgateway, [query.name for query in settings.queries])
    for name, error in result.failures.items():
        named = f"query {name!r}"
        about = None if named in str(error) else named
        shared.complain(error, about=about, debug=debug, spell=partial(as_settings, name))
    if result.verdict.value:
        raise typer.Exit(result.verdict.value)


def _run(settings: JobSettings, start: Callable[[], SparkSession], server: MetricsServer, *, once: bool) -> JobResult:
    tell(log.info, "job_started", queries=[query.name for query in settings.queries], metrics=server.url)
    status = partial(screen.print_status, shared.OUT)
    for query in settings.queries:
        status(query.name, f"{', '.join(query.topic)} into {query.target}")
    status("metrics", server.url)
    status("Spark", "starting")
    session = start()
    merged = {
        query.name: screen.Merged(name=query.name, target=query.target, quarantine=query.target.quarantine)
        for query in settings.queries
    }
    with (
        queries.stop_on_signal(partial(status, "stop")) as stopping,
        screen.Screen(shared.OUT, several_streams=len(settings.queries) > 1) as shown,
    ):

        def arrived(name: str, batch: MergeResult) -> None:
            merged[name].add(batch)
            shown.add(name, batch)

        result = run_job(
            settings,
            session,
            once=once,
            stopping=stopping,
            on_result=arrived,
            on_lag=shown.behind,
            health=server.health,
        )
    for name in result.failures:
        merged[name].has_failed = True
    screen.show_merged(list(merged.values()), shared.OUT, was_stopped=stopping.is_set() or not once)
    return result


@app.command()
def check(job: JobFile, *, jars_in: shared.Jars = None) -> None:
    """Check settings, broker, topics, tables, checkpoints, folders, the metrics port and the newest records.

    Reports every problem at once and leaves nothing behind. With --jars it checks that the folder has the jars that
    'run' needs. Needs no Java. Exit codes: 0 no problem; 2 problems.
    """
    with shared.errors_as_sentences():
        findings = list(check_job(load(job), jars_in=jars_in))
    for finding in findings:
        mark = "[red]problem[/]" if finding.is_problem else "ok"
        where = "job" if finding.query is None else finding.query
        shared.OUT.print(
            f"{mark:<7} {escape(where)}, {finding.about}: {escape(finding.said)}", highlight=False, soft_wrap=True
        )
    if any(finding.is_problem for finding in findings):
        raise typer.Exit(shared.CONFIGURATION)


@quarantine.command(name="list")
def list_quarantined(job: JobOrTable) -> None:
    """Count quarantined events by reason, topic (or file) and partition. Needs no Java."""
    with shared.errors_as_sentences():
        for query in _quarantines(job, None):
            quarantine_queries.show_summary(
                query, quarantine_queries.summary(query), quarantine_queries.replayable(query), console=shared.OUT
            )


@quarantine.command()
def show(
    job: JobOrTable,
    *,
    query: Annotated[str | None, typer.Option(help="Name of a query; by default the first one.")] = None,
    reason: Annotated[str | None, typer.Option(help="Only events with this reason.")] = None,
    offset: Annotated[int | None, typer.Option(help="Only the record at this offset.")] = None,
    last: Annotated[
        int, typer.Option(min=1, max=1_000_000, metavar="NUMBER", help="Number of events, newest first.")
    ] = 10,
) -> None:
    """Show quarantined events with their bytes and reasons. Needs no Java."""
    with shared.errors_as_sentences():
        (one, *_) = _quarantines(job, query)
        quarantine_queries.show_events(
            quarantine_queries.events(one, reason=reason, offset=offset, most=last), console=shared.OUT
        )


@quarantine.command(name="replay")
def replay_quarantined(
    job: JobFile,
    *,
    query: Annotated[str | None, typer.Option(help="Name of a query; by default all of them.")] = None,
    reason: Annotated[str | None, typer.Option(help="Only records with this reason.")] = None,
    partition: Annotated[int | None, typer.Option(help="Only records of this partition.")] = None,
    offset: Annotated[int | None, typer.Option(help="Only the record at this offset.")] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Also replay records older than tombstone_retention or the epoch, and those that may be older than the"
            " stored row, which cannot be told with 'unchanged: skip' or with rows of several topics.",
        ),
    ] = False,
    alone: Annotated[
        bool,
        typer.Option("--alone", help="No other process runs the query. Required with checkpoints on object stores."),
    ] = False,
    jars_in: shared.Jars = None,
    conf: shared.Confs = None,
    debug: shared.Debug = False,
) -> None:
    """Decode and merge quarantined records again with the current job file, and mark those that succeed.

    A running job does this between two micro-batches; otherwise this command starts Spark. Events older than the stored
    row change nothing. Exit codes are those of 'run'.
    """
    shared.log_to_screen(logging.WARNING)
    failed: set[Verdict] = set()
    with shared.errors_as_sentences(debug=debug):
        chosen = _chosen(load(job), query)
        if not alone:
            control.expect_askable(chosen)
        own = shared.session_confs(conf, jars_in, _places(chosen))
        with shared.session_starter(f"stream-merge replay {job.stem}", own) as start:
            for one in chosen:
                request = Request(reason=reason, partition=partition, offset=offset, force=force, settings=one.digest())
                answer = _replayed(one, request, start)
                if answer.error is not None:
                    failed.add(Verdict(answer.exit_code or shared.CONFIGURATION))
                line = located(one.name, as_settings(one.name, answer.said()))
                shared.OUT.print(escape(line), highlight=False, soft_wrap=True)
    if failed:
        raise typer.Exit(worst_of(failed).value)


def _places(chosen: Sequence[QuerySettings]) -> list[str]:
    return [place for query in chosen for place in (query.target, query.checkpoint)]


def _replayed(query: QuerySettings, request: Request, start: Callable[[], SparkSession]) -> Replayed:
    """Replay by the running job, however long its batch takes; without one, or after its end, by this process."""
    tables = (query.target, query.target.quarantine)
    if not any(map(_may_exist, tables)):  # no folders for locks where nothing has run
        return Replayed(id=request.id)
    is_asked = False
    while True:
        with control.held(query) as is_ours:
            if is_ours:
                location = None if query.target.path is not None else spark_table.location(start(), query.target)
                with locks.only_writer(query.target, f"quarantine replay of query {query.name!r}", location):
                    answer = control.replay_answer(query, request) or replay(start(), query, request)
                if is_asked:
                    control.answer_replay(query, answer)
                return answer
        if not is_asked:
            shared.OUT.print(
                f"{escape(query.name)}: asking the running job to replay between two micro-batches", highlight=False
            )
            is_asked = True
            control.ask_for_replay(query, request)
        is_waiting = control.replay_is_asked(query, request)
        reply = control.replay_answer(query, request)
        if reply is not None:
            return reply
        if not is_waiting:  # another command replaced the request or took its answer
            control.ask_for_replay(query, request)
        time.sleep(_POLL_SECONDS)


def _may_exist(table: TableRef) -> bool:
    """Whether a table exists, or only Spark or a store knows."""
    return table.local is None or table.local.exists()


def _quarantines(job_or_table: str, name: str | None) -> Sequence[quarantine_queries.Table]:
    file = Path(job_or_table)
    if file.is_file() or file.suffix in (".yaml", ".yml"):
        return _chosen(load(file), name)
    return [quarantine_queries.NamedTable(name=job_or_table, target=TableRef(job_or_table))]


def _chosen(settings: JobSettings, name: str | None) -> list[QuerySettings]:
    wanted = [query for query in settings.queries if name in (None, query.name)]
    if not wanted:
        msg = f"[INVALID_SETTING] --query {name!r} must be one of {[query.name for query in settings.queries]!r}"
        raise ConfigError(msg)
    return wanted


@app.command()
def history(
    job: JobFile,
    *,
    query: Annotated[str | None, typer.Option(help="Name of a query; by default all of them.")] = None,
) -> None:
    """Show which offsets each table version contains; the last line is planned, not committed. Needs no Java."""
    with shared.errors_as_sentences():
        for one in _chosen(load(job), query):
            versions.show_history(trail(one), one, console=shared.OUT)


@app.command()
def stop(job: JobFile) -> None:
    """Stop a running job after its current micro-batches, through files next to its checkpoints on a local disk."""
    with shared.errors_as_sentences():
        for name, path in control.request_stop(load(job)):
            shared.OUT.print(f"asked {escape(name)} to stop ({escape(str(path))})", highlight=False)


@app.command(name="jars")
def fetch_jars(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Target folder; created if it is missing.")],
    *,
    s3: Annotated[
        bool,
        typer.Option("--s3", help="Also download Spark's file system for S3."),
    ] = False,
    azure: Annotated[
        bool,
        typer.Option("--azure", help="Also download Spark's file system for Azure."),
    ] = False,
    conf: shared.Confs = None,
    debug: shared.Debug = False,
) -> None:
    """Download the jars that jobs need: Delta and Spark's Kafka connector.

    For machines without network ('run --jars DIR') and for clusters ('spark-submit.sh'); elsewhere Spark downloads them
    when 'run' starts. Needs Java.
    """
    with shared.errors_as_sentences(debug=debug):
        wanted = jars.conf_to_fetch(shared.confs(conf or []))
        for is_wanted, stores_confs in ((s3, s3_confs), (azure, azure_confs)):
            wanted = stores_confs(wanted) if is_wanted else wanted
        with shared.session_starter("stream-merge jars", wanted) as start:
            copies = jars.fetch(start(), folder)
        shared.OUT.print(f"{counted(len(copies), 'jar')} in {escape(str(folder))}", highlight=False, soft_wrap=True)
