"""A round of upkeep of one table: OPTIMIZE within a budget, and VACUUM; by Spark, which knows every table feature."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial

from pyspark.sql import SparkSession

from stream_merge.errors import ConfigError
from stream_merge.model import names
from stream_merge.model.logs import tell
from stream_merge.model.maintenance import Maintenance
from stream_merge.model.results import Upkeep, UpkeepOutcome
from stream_merge.model.settings import MergeSpec
from stream_merge.model.snapshot import TableSnapshot
from stream_merge.model.table_ref import TableRef
from stream_merge.shapes.layout import Layout
from stream_merge.spark import columns, places
from stream_merge.spark.confs import TIMESTAMP_CONF, TIMESTAMP_MICROS, WHOLE_READS, holding
from stream_merge.spark.console import silent
from stream_merge.spark.data_files import DataFile, data_files
from stream_merge.spark.errors import reason
from stream_merge.tables import compaction, locks, retry, spark_table
from stream_merge.tables.compaction import TARGET_BYTES, Compaction
from stream_merge.tables.side import location
from stream_merge.tables.spark_table import delta_table, find, named_location, newest

log = logging.getLogger(__name__)

MIN_FILE_CONF = "spark.databricks.delta.optimize.minFileSize"
MAX_FILE_CONF = "spark.databricks.delta.optimize.maxFileSize"
DELETED_CONF = "spark.databricks.delta.optimize.maxDeletedRowsRatio"
RETENTION_CHECK_CONF = "spark.databricks.delta.retentionDurationCheck.enabled"
OWN_RETENTION_CONF = "spark.databricks.delta.vacuum.retentionWindowIgnore.enabled"
"""Unless it is off, VACUUM takes the table's own retention, whatever it is told but 0 hours (Delta 4.4)."""
LISTING_CONF = "spark.sql.sources.parallelPartitionDiscovery.parallelism"
"""VACUUM lists a table in so many tasks; Spark's default of 10,000 takes a minute on two cores, for any table."""
RETENTION_PROPERTY = "delta.deletedFileRetentionDuration"
_DEFAULT_RETENTION = "interval 1 week"
_INTERVAL = re.compile(r"(interval\s+)?(\d+\s+[a-z]+\s*)+", re.IGNORECASE)

_REMEDY = "raise budget_seconds, or run stream-merge maintain"
_WORSE: tuple[UpkeepOutcome, ...] = ("nothing", "done", "behind", "lost", "over_budget", "failed")

BYTES_PER_SECOND = 20e6
"""What a table's first round expects; later ones know (2 cores, Parquet with snappy: 15 to 40 MB)."""
FIXED_SECONDS = 1.5
BETWEEN_VACUUMS = timedelta(days=1)
"""VACUUM lists the whole table: not more often."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """A table beside a target, which nobody else looks after."""

    table: TableRef
    packs: bool
    """Whether its small files are put together; the remembered deletes are by whoever writes them."""


def beside(tombstones: TableRef | None, quarantine: TableRef | None) -> list[Beside]:
    """The tables of a sink beside its target, of those that it has."""
    of_both = ((tombstones, False), (quarantine, True))
    return [Beside(table=table, packs=packs) for table, packs in of_both if table is not None]


class TableUpkeep:
    """Looks after one table, and learns how fast its files are written.

    Args:
        target: as the sink was told.
        wanted: what to do.
        beside: tables of the sink's own, looked after whenever the target is vacuumed.
    """

    def __init__(self, target: TableRef, wanted: Maintenance, beside: Sequence[Beside] = ()) -> None:
        self._target = target
        self._wanted = wanted
        self._beside = tuple(beside)
        self._bytes_per_second = BYTES_PER_SECOND
        self._vacuumed_at: float | None = None
        self._vacuum_seconds = 0.0

    def round(self, session: SparkSession) -> Upkeep:
        """Do what is due, in one or two commits without changes of data.

        Cost: a job over the log; where something is due, OPTIMIZE of the files that were picked, and VACUUM.
        Raises: nothing: what fails is logged and left for the next round.
        """
        started = time.perf_counter()
        wanted = self._wanted
        found = self.put_together(session) if wanted.optimize else Upkeep(outcome="nothing")
        after = wanted.vacuum_after
        if after is not None and self._is_vacuum_due():
            left = wanted.budget_seconds - (time.perf_counter() - started)
            found = both(found, _guarded(lambda: self._vacuumed(session, after, left)))
        say = log.warning if found.outcome in ("failed", "over_budget") else log.info
        tell(say, "table_upkeep", table=self._target, **asdict(found), seconds=round(time.perf_counter() - started, 3))
        if found.vacuumed:
            for table in self._beside:
                _look_after(session, table, wanted.budget_seconds - (time.perf_counter() - started))
        return found

    def put_together(self, session: SparkSession) -> Upkeep:
        """The part of a round that writes files again."""
        return _guarded(lambda: self._optimized(session))

    def _optimized(self, session: SparkSession) -> Upkeep:
        table = delta_table(session, self._target)
        files = data_files(session, newest(session, self._target))
        detail = table.detail().select("clusteringColumns").first()
        clustered = bool(detail and detail["clusteringColumns"])
        most_bytes = max(0.0, (self._wanted.budget_seconds - FIXED_SECONDS) * self._bytes_per_second)
        target_bytes = int(session.conf.get(MAX_FILE_CONF, str(TARGET_BYTES)) or TARGET_BYTES)
        if clustered or self._wanted.zorder_by:
            return self._reordered(session, files, most_bytes, target_bytes, clustered=clustered)
        return self._compacted(
            session, compaction.due(files, most_bytes=most_bytes, target_bytes=target_bytes), target_bytes
        )

    def _compacted(self, session: SparkSession, plan: Compaction, target_bytes: int) -> Upkeep:
        if not plan.files and not plan.purge:
            return _left(plan.beyond, self._bytes_per_second)
        identifier, statements = self._target.sql, []
        if plan.files:
            statements.append(f"OPTIMIZE {identifier}")
        if plan.purge:
            statements.append(f"REORG TABLE {identifier} APPLY (PURGE)")
        # Files with removed rows are left to the second one: OPTIMIZE leaves one alone that is the only one in its
        # partition (Delta 4.4).
        confs = {MAX_FILE_CONF: str(target_bytes), MIN_FILE_CONF: str(plan.smaller_than), DELETED_CONF: "1.0"}
        return self._rewritten(session, confs, statements, plan.bytes)

    def _reordered(
        self, session: SparkSession, files: list[DataFile], most_bytes: float, target_bytes: int, *, clustered: bool
    ) -> Upkeep:
        """Delta picks the files itself where rows are to lie together: what is not clustered, or all of them."""
        wanted = [file for file in files if not (clustered and file.is_clustered)]
        needed = sum(file.bytes for file in wanted)
        if len(wanted) < max(compaction.FEWEST_FILES, 2 * needed / target_bytes):
            # Clustered files neither REORG nor OPTIMIZE … FULL writes again, whatever rows they have lost (Delta 4.4).
            if clustered:
                return Upkeep(outcome="nothing")
            return self._compacted(session, compaction.due(files, most_bytes=most_bytes, target_bytes=0), target_bytes)
        if needed > most_bytes:
            return _left(needed, self._bytes_per_second)
        together = ", ".join(names.quote(name) for name in self._wanted.zorder_by)
        statement = f"OPTIMIZE {self._target.sql}" + (f" ZORDER BY ({together})" if together else "")
        return self._rewritten(session, {MAX_FILE_CONF: str(target_bytes)}, [statement], needed)

    def _rewritten(
        self, session: SparkSession, confs: Mapping[str, str], statements: Iterable[str], expected_bytes: int
    ) -> Upkeep:
        started = time.perf_counter()
        found = Upkeep(outcome="nothing")
        with holding(session, {TIMESTAMP_CONF: TIMESTAMP_MICROS, **WHOLE_READS, **confs}):
            for statement in statements:
                found = both(found, _guarded(partial(_counted, session, statement)))
                if found.outcome in ("lost", "failed"):
                    return found
        seconds = time.perf_counter() - started
        if seconds > 2 * FIXED_SECONDS:  # else most of it was no writing
            observed = expected_bytes / (seconds - FIXED_SECONDS)
            self._bytes_per_second = (self._bytes_per_second * observed) ** 0.5
        return found

    def _is_vacuum_due(self) -> bool:
        since = None if self._vacuumed_at is None else time.monotonic() - self._vacuumed_at
        return since is None or since >= BETWEEN_VACUUMS.total_seconds()

    def _vacuumed(self, session: SparkSession, after: timedelta, seconds_left: float) -> Upkeep:
        if self._vacuum_seconds >= seconds_left:
            last = f", which took {self._vacuum_seconds:,.0f} s last time" if self._vacuum_seconds else ""
            return Upkeep(outcome="over_budget", detail=f"{seconds_left:.0f} s are left for VACUUM{last}; {_REMEDY}")
        snapshot = find(session, self._target)
        problem = (
            None if snapshot is None else retention_problem(session, self._target, snapshot.properties, self._wanted)
        )
        if problem is not None:  # the property has been changed since the sink looked first
            return Upkeep(outcome="failed", detail=problem)
        started = time.perf_counter()
        confs = {OWN_RETENTION_CONF: "false", **_listing(session)}
        if self._wanted.force:
            confs[RETENTION_CHECK_CONF] = "false"
        with holding(session, confs), silent(session):
            delta_table(session, self._target).vacuum(after.total_seconds() / 3600)
        self._vacuumed_at, self._vacuum_seconds = time.monotonic(), time.perf_counter() - started
        return Upkeep(outcome="done", vacuumed=True)


def _look_after(session: SparkSession, beside: Beside, seconds_left: float) -> None:
    """Put its small files together and delete what it has not needed for its own retention; what fails is logged.

    Each batch with a delete or a broken event adds a file there, and packs leave theirs behind: some 100 a day.
    """

    def vacuumed() -> Upkeep:
        if find(session, beside.table) is None:
            return Upkeep(outcome="nothing")
        with holding(session, _listing(session)), silent(session):
            delta_table(session, beside.table).vacuum()
        return Upkeep(outcome="done", vacuumed=True)

    found = _guarded(vacuumed)
    if beside.packs and found.vacuumed and seconds_left > 0:
        found = both(found, TableUpkeep(beside.table, Maintenance(budget_seconds=seconds_left)).put_together(session))
    say = log.warning if found.outcome == "failed" else log.info
    tell(say, "table_upkeep", table=beside.table, **asdict(found))


def _listing(session: SparkSession) -> dict[str, str]:
    return {LISTING_CONF: str(4 * session.sparkContext.defaultParallelism)}


def _guarded(part: Callable[[], Upkeep]) -> Upkeep:
    """What became of a part of a round, also where it raised."""
    try:
        return part()
    except Exception as err:
        lost = retry.conflict_class(err)
        return Upkeep(outcome="failed" if lost is None else "lost", detail=reason(err))


def _counted(session: SparkSession, statement: str) -> Upkeep:
    """What a statement that writes files again has done."""
    row = session.sql(statement).first()
    removed, added = (0, 0) if row is None else (row["metrics"]["numFilesRemoved"], row["metrics"]["numFilesAdded"])
    return Upkeep(outcome="done" if removed else "nothing", removed_files=removed, added_files=added)


def both(one: Upkeep, other: Upkeep) -> Upkeep:
    """What became of two parts of a round: the worse outcome, and why."""
    return Upkeep(
        outcome=max(one.outcome, other.outcome, key=_WORSE.index),
        removed_files=one.removed_files + other.removed_files,
        added_files=one.added_files + other.added_files,
        vacuumed=one.vacuumed or other.vacuumed,
        detail="; ".join(detail for detail in (one.detail, other.detail) if detail),
    )


def retention_problem(
    session: SparkSession, target: TableRef, properties: Mapping[str, str], wanted: Maintenance
) -> str | None:
    """Why `vacuum_after` would delete what readers may still need, or None.

    Delta forgets when a file was removed once the table's own time for it is over, and VACUUM then takes the file for
    one that was never part of the table: its age alone counts (Delta 4.4, `InMemoryLogReplay` and
    `Snapshot.minFileRetentionTimestamp`).
    """
    if wanted.vacuum_after is None or wanted.force:
        return None
    kept = properties.get(RETENTION_PROPERTY, _DEFAULT_RETENTION)
    seconds = _seconds(session, kept)
    if seconds is None:
        return (
            f"[INVALID_RETENTION] {RETENTION_PROPERTY}={kept!r} of {target!r} is not a comparable interval; correct it,"
            " or set force=True"
        )
    if wanted.vacuum_after.total_seconds() == seconds:
        return None
    if wanted.vacuum_after.total_seconds() > seconds:
        alter = f"ALTER TABLE {target.sql} SET TBLPROPERTIES ('{RETENTION_PROPERTY}' = '…')"
        return (
            f"[INVALID_RETENTION] vacuum_after={wanted.vacuum_after} is longer than {RETENTION_PROPERTY}={kept!r} of"
            f" {target!r}, so VACUUM would delete removed files too early; use that interval, or set the property:"
            f" {alter}"
        )
    return (
        f"[INVALID_RETENTION] vacuum_after={wanted.vacuum_after} is shorter than {RETENTION_PROPERTY}={kept!r} of"
        f" {target!r}, so time travel and slow readers would lose files; use that interval, set the property, or"
        " force=True"
    )


def problems(
    session: SparkSession, spec: MergeSpec, wanted: Maintenance, layout: Layout, found: TableSnapshot | None
) -> list[str]:
    """Why a sink's upkeep would do harm, or nothing at all.

    Args:
        session: any.
        spec: what the sink was told; a missing target is made by it.
        wanted: what is to be done.
        layout: how the sink's batches map onto the target.
        found: the target; None while there is none.
    """
    target = spec.target
    properties = spec.table_properties if found is None else found.properties
    known = list(dict.fromkeys([*(c.name for c in layout.stored), *([] if found is None else found.schema.names)]))
    missing = [
        name for name in wanted.zorder_by if columns.resolve(name, known, case_sensitive=layout.case_sensitive) is None
    ]
    problem = retention_problem(session, target, properties, wanted)
    listed = [] if problem is None else [problem]
    if missing:
        listed.append(f"[COLUMN_NOT_FOUND] zorder_by names {missing!r}, not in {target!r}; its columns are {known!r}")
    parts = spec.partition_by if found is None else found.partition_columns
    within = {columns.resolve(name, parts, case_sensitive=False) for name in wanted.zorder_by} - {None}
    if within:
        listed.append(
            f"[CONFLICTING_SETTINGS] zorder_by names {sorted(filter(None, within))!r}, by which {target!r} is"
            " partitioned; remove it from zorder_by"
        )
    elif wanted.zorder_by and spec.cluster_by:
        listed.append(
            f"[CONFLICTING_SETTINGS] zorder_by cannot be used on {target!r}, which is clustered (cluster_by); remove it"
        )
    return listed


def _seconds(session: SparkSession, interval: str) -> float | None:
    """An interval as table properties have it, in seconds; None where it is none."""
    if _INTERVAL.fullmatch(interval.strip()) is None:
        return None
    text = interval.strip() if interval.strip().lower().startswith("interval") else f"interval {interval.strip()}"
    epoch = "timestamp_ntz'1970-01-01 00:00:00'"  # without a zone, whose clocks may change meanwhile
    row = session.sql(f"SELECT timestampdiff(SECOND, {epoch}, {epoch} + {text}) AS seconds").first()
    return None if row is None else float(row["seconds"])


def _left(needed: int, bytes_per_second: float) -> Upkeep:
    if not needed:
        return Upkeep(outcome="nothing")
    detail = f"{needed / 1e6:,.0f} MB would take about {FIXED_SECONDS + needed / bytes_per_second:,.0f} s"
    return Upkeep(outcome="over_budget", detail=f"{detail}; {_REMEDY}")


def maintained(session: SparkSession, target: TableRef, wanted: Maintenance) -> Upkeep:
    """One round now, by hand, with the table on a local disk kept from jobs of other processes meanwhile.

    Raises:
        ConfigError: there is no such table, another process has it, or what is wanted would take away what its readers
            may need.
    """
    location = named_location(session, target)
    if location is None:
        places.expect_scheme(target, spark_table.location(session, target))
    with locks.only_writer(target, "stream-merge maintain", location):
        locks.expect_alone(target, location)
        return _maintained(session, target, wanted)


def _maintained(session: SparkSession, target: TableRef, wanted: Maintenance) -> Upkeep:
    snapshot = find(session, target)
    if snapshot is None:
        msg = f"[TABLE_NOT_FOUND] there is no Delta table at {target!r}; use a sink's target"
        raise ConfigError(msg, target=target)
    problem = retention_problem(session, target, snapshot.properties, wanted)
    if problem is not None:
        raise ConfigError(problem, target=target)
    own = (location.locate(session, target, snapshot), target.quarantine)
    return TableUpkeep(target, wanted, beside(*own)).round(session)
