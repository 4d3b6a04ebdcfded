"""`stream-merge files`: merges a folder of change files, once or continuously."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

from pyspark.sql import SparkSession
from rich.console import Console
from rich.status import Status

from stream_merge.errors import ConfigError, HeldError
from stream_merge.jobs.files.batches import FullCopy, PlannedRead
from stream_merge.jobs.files.replay import Replayed, mergeable, replay
from stream_merge.jobs.watch import queries, screen
from stream_merge.jobs.watch.screen import escape_line
from stream_merge.metrics.instruments import default_metrics
from stream_merge.model import locations
from stream_merge.model.logs import tell
from stream_merge.model.results import MergeResult
from stream_merge.model.settings import Create, Driver, SchemaEvolution
from stream_merge.model.snapshot import TableSnapshot
from stream_merge.model.source_batch import MostUndecodable
from stream_merge.model.table_ref import TableRef
from stream_merge.session import is_submitted
from stream_merge.shapes import Changes, Shape
from stream_merge.sink import MergeSink
from stream_merge.sources.files import reader
from stream_merge.sources.files.reader import Folder
from stream_merge.sources.files.schema import Schema, parse, record, recorded
from stream_merge.spark import places, preflight
from stream_merge.spark.checkpoint import Checkpoint
from stream_merge.spark.confs import WHOLE_READS, holding
from stream_merge.spark.hadoop_files import GLOB
from stream_merge.tables import fitness, locks, spark_table
from stream_merge.tables.applied_batches import expect_same_table

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class FilesSettings:
    """Source and merge settings; the latter are those of `MergeSink`."""

    folder: Folder
    target: TableRef
    checkpoint: str
    keys: tuple[str, ...]
    sequence_by: tuple[str, ...] = ()
    apply_as_deletes: str | None = None
    columns: tuple[str, ...] | None = None
    except_columns: tuple[str, ...] | None = None
    quarantine_target: TableRef | None = None
    schema_evolution: SchemaEvolution = False
    table_properties: Mapping[str, str] = field(default_factory=dict)
    target_filter: str | None = None
    single_writer: bool = False
    shape: Shape = field(default_factory=Changes)
    name: str | None = None
    schema: str | None = None
    """Spark DDL. None: the schema recorded in the checkpoint, else inferred."""
    max_files_per_trigger: int | None = None
    """None: all available files."""
    max_quarantine_share: float = 0.5
    """Largest share of undecodable records in a batch."""
    once: bool = False
    """End when all available files have been merged."""

    @property
    def label(self) -> str:
        """Query name and label of metrics."""
        return self.name if self.name is not None else self.target.last

    @property
    def quarantine(self) -> TableRef:
        """The quarantine table."""
        return self.quarantine_target or self.target.quarantine


def run(
    settings: FilesSettings, *, console: Console, start_session: Callable[[], SparkSession], metrics_url: str
) -> list[MergeResult]:
    """Merge the files; returns the results of the newest micro-batches."""
    if settings.shape.is_whole and not (settings.once and settings.max_files_per_trigger is None):
        msg = (
            f"[CONFLICTING_SETTINGS] --shape {settings.shape.name} merges the full copy in --source and exits: set"
            " --once, without --max-files-per-trigger; call it for each copy"
        )
        raise ConfigError(msg, target=settings.target)
    sink = _sink(settings)  # checks the settings before Spark starts
    closed = places.not_writable(settings.checkpoint) or preflight.occupied(settings.target)
    closed = closed or _missing(settings.folder.path)
    if closed is not None:
        raise ConfigError(closed, target=settings.target)
    if locations.local_path(settings.checkpoint) is not None:
        _expect_files(Checkpoint.on_disk(settings.checkpoint))
    status = partial(screen.print_status, console)
    starting = console.status("starting Spark (the first time, Delta's jars are downloaded: about 90 MB)")
    with _locked_table(settings, start_session, starting) as (session, table):
        with console.status(f"reading the files in {escape_line(settings.folder.path)}"):
            copy = FullCopy(session, settings.folder) if settings.shape.is_whole else None
            folder = settings.folder if copy is None else copy.source
            schema, origin = _schema(session, settings, folder)
            if copy is None:
                events = folder.events(session, schema, max_files_per_trigger=settings.max_files_per_trigger)
            else:
                events = folder.rows(session, schema)
            fitness.expect_fitting(events, sink._calls.spec, table)
            if schema != recorded(session, settings.checkpoint):
                record(session, settings.checkpoint, schema)
        status("schema", f"{schema} ({origin})")
        status("metrics", metrics_url)
        tell(log.info, "job_started", queries=[settings.label], metrics=metrics_url)
        # Also without new files: a process without series looks like one without a job.
        default_metrics().prepare(settings.label, sink._calls.spec.label)
        merged = screen.Merged(name=settings.label, target=settings.target, quarantine=settings.quarantine)
        with queries.stop_on_signal(partial(status, "stop")) as stopping, screen.Screen(console) as shown:

            def arrived(name: str, result: MergeResult) -> None:
                merged.add(result)
                shown.add(name, result)

            try:
                if copy is None:
                    each = PlannedRead(
                        sink,
                        schema,
                        is_parquet=folder.format == "parquet",
                        most_undecodable=MostUndecodable(
                            share=settings.max_quarantine_share, setting="--max-quarantine-share"
                        ),
                    )
                    stream = queries.Stream(
                        name=settings.label, events=events, sink=each, checkpoint=settings.checkpoint
                    )
                    results = queries.run(
                        [stream], once=settings.once, stopping=stopping, on_result=arrived, keep=queries.MOST_KEPT
                    )
                else:
                    results = [copy.merge(sink, events, schema, label=settings.label)]
                    arrived(settings.label, results[0])
            except queries.QueryFailedError as err:
                failure = reader.failure(settings.folder.path, err.trace, err.reason)
                raise failure or err from err
    screen.show_merged([merged], console, was_stopped=stopping.is_set())
    return results


def replay_quarantine(
    settings: FilesSettings, *, console: Console, start_session: Callable[[], SparkSession]
) -> Replayed:
    """Merge the files' quarantined records that are readable now, and mark them."""
    if settings.shape.is_whole:
        msg = (
            f"[SHAPE_NEEDS_FULL_COPY] quarantined records are not a snapshot of {settings.target!r}; repair the file in"
            " the source and run again without --replay-quarantine"
        )
        raise ConfigError(msg, target=settings.target)
    if settings.shape.concerns_missing:
        msg = (
            f"[SHAPE_NEEDS_FULL_COPY] quarantined records are not all rows of {settings.target!r}, so"
            " not_matched_by_source clauses would match the others; put repaired files into the source"
        )
        raise ConfigError(msg, target=settings.target)
    _sink(settings)  # checks the settings before Spark starts
    status = partial(screen.print_status, console)
    with _locked_table(settings, start_session, console.status("starting Spark")) as (session, table):
        if table is None:
            msg = (
                f"[TABLE_NOT_FOUND] target {settings.target!r} to replay into does not exist; merge the files first"
                " (with a new checkpoint, if the table was dropped)"
            )
            raise ConfigError(msg, target=settings.target)
        schema, origin = _schema(session, settings, settings.folder)
        status("schema", f"{schema} ({origin})")
        with console.status("replaying"), holding(session, WHOLE_READS):
            replayed = replay(
                session,
                settings.folder,
                schema,
                partial(_sink, settings),
                before=recorded(session, settings.checkpoint),
                quarantine_table=settings.quarantine,
                target=settings.target,
                checkpoint=settings.checkpoint,
                mergeable=partial(
                    mergeable,
                    keys=settings.keys,
                    sequence_by=settings.sequence_by,
                    partitioned_by=table.partition_columns,
                ),
            )
    status("replayed", replayed.summary())
    return replayed


@contextmanager
def _locked_table(
    settings: FilesSettings, start_session: Callable[[], SparkSession], starting: Status
) -> Iterator[tuple[SparkSession, TableSnapshot | None]]:
    """A session and the table, None if it does not exist; the checkpoint and, on a local disk, the table are locked."""
    who, lock = f"query {settings.label!r}", locations.beside_folder(settings.checkpoint, "lock")
    with ExitStack() as stack:
        if lock is not None:
            holder = stack.enter_context(locks.locked(lock, who))
            if holder is not None:
                msg = (
                    f"[CHECKPOINT_LOCKED] {holder} is using checkpoint {settings.checkpoint!r}; end that process, or"
                    " use another checkpoint"
                )
                raise HeldError(msg, target=settings.target)
        stack.enter_context(locks.only_writer(settings.target, who))
        with starting:
            session = start_session()
        preflight.refuse_forgetful_catalog(session, settings.target)
        location = spark_table.named_location(session, settings.target)
        if location is not None:
            stack.enter_context(locks.only_writer(settings.target, who, location))
        yield session, _expect_table(session, settings)


def _sink(settings: FilesSettings, app_id: str | None = None) -> MergeSink:
    return MergeSink(
        target=settings.target,
        keys=settings.keys,
        sequence_by=settings.sequence_by,
        apply_as_deletes=settings.apply_as_deletes,
        column_list=settings.columns,
        except_column_list=settings.except_columns,
        quarantine_target=settings.quarantine_target,
        schema_evolution=settings.schema_evolution,
        create=Create(properties=settings.table_properties),
        target_filter=settings.target_filter,
        driver=Driver(single_writer=settings.single_writer),
        shape=settings.shape,
        name=settings.name,
        app_id=app_id,
    )


def _missing(source: str) -> str | None:
    """The problem of a missing source; None where only Hadoop knows: for a pattern, or by its confs."""
    local = locations.local_path(source)
    if local is None or local.exists() or GLOB.search(source) or is_submitted() or "HADOOP_CONF_DIR" in os.environ:
        return None
    return f"[SOURCE_NOT_FOUND] source {source!r} does not exist; create the folder, or correct the path"


def _expect_files(checkpoint: Checkpoint) -> None:
    """Refuse the checkpoint of a query that does not read files."""
    if checkpoint.reads_files() is False:
        msg = (
            f"[CHECKPOINT_MISMATCH] checkpoint {checkpoint.path!r} belongs to a query that does not read files, such as"
            " one of 'stream-merge run'; use a new checkpoint"
        )
        raise ConfigError(msg)


def _expect_table(session: SparkSession, settings: FilesSettings) -> TableSnapshot | None:
    """The table, checked also where there is no first batch; None if it does not exist."""
    location = spark_table.location(session, settings.target)
    places.expect_scheme(settings.target, location)
    checkpoint = Checkpoint.in_session(session, settings.checkpoint)
    _expect_files(checkpoint)
    table = spark_table.find(session, settings.target)
    problem = table and fitness.keys_problem(table, settings.target, settings.keys, case_sensitive=False)
    if problem:
        raise ConfigError(problem, target=settings.target)
    expect_same_table(
        checkpoint,
        table,
        name=settings.name,
        label=settings.label,
        target=settings.target,
        location=location if table is None else table.location,
    )
    return table


def _schema(session: SparkSession, settings: FilesSettings, folder: Folder) -> tuple[Schema, str]:
    """The schema and its origin; later runs use the recorded one."""
    if settings.schema is not None:
        return parse(settings.schema), "as given"
    known = recorded(session, settings.checkpoint)
    if known is not None:
        return known, "as in the runs before over this checkpoint; --schema changes it"
    return folder.infer(session), "inferred from the files that are there; --schema overrides it"
