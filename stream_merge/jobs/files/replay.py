"""Replay of quarantined records of a folder's files with the current schema and options."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import unquote

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from stream_merge.model import names
from stream_merge.model.logs import counted
from stream_merge.model.table_ref import TableRef
from stream_merge.shapes.contract import breaks_key
from stream_merge.sink import MergeSink
from stream_merge.sources.files.reader import Folder
from stream_merge.sources.files.schema import Schema
from stream_merge.spark import columns
from stream_merge.spark.hadoop_files import matching_paths
from stream_merge.tables.side import quarantine
from stream_merge.tables.side.replay_claims import query_claims

_PLACE = ("topic", "offset", "timestamp", "raw_value")
"""Fields of the origin that identify a quarantined record."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """Result of a replay."""

    records: int = 0
    """Quarantined records that were not replayed before."""
    marked: int = 0
    """Records that were merged."""
    changed: int = 0
    """Rows that they changed; the others were older than the stored row."""
    version: int | None = None
    """The target's version; None if nothing was committed."""

    def summary(self) -> str:
        """The result in one sentence."""
        if not self.records:
            return "no record of these files is in quarantine with its bytes and not replayed yet"
        where = "nothing to commit" if self.version is None else f"version {self.version}"
        changed = counted(self.changed, "row")
        done = f"{self.marked:,} of {counted(self.records, 'record')} replayed ({changed} changed, {where})"
        still = self.records - self.marked
        return f"{done}; {still:,} still cannot be merged" if still else done


def mergeable(
    events: DataFrame, *, keys: tuple[str, ...], sequence_by: tuple[str, ...], partitioned_by: tuple[str, ...]
) -> DataFrame:
    """The events that a sink would merge, not quarantine again; it refuses missing columns itself."""
    types = {field.name: field.dataType for field in events.schema.fields}
    broken = [
        columns.column(names.CORRUPT_COLUMN).isNotNull(),
        breaks_key(events, keys, partitioned_by),
        *(columns.holds_null(columns.column(name), types[name]) for name in columns.resolved(events, sequence_by)),
    ]
    return events.where(~columns.any_of(broken))


def replay(
    session: SparkSession,
    folder: Folder,
    schema: Schema,
    make_sink: Callable[[str], MergeSink],
    *,
    before: Schema | None,
    quarantine_table: TableRef,
    target: TableRef,
    checkpoint: str,
    mergeable: Callable[[DataFrame], DataFrame],
) -> Replayed:
    """Merge quarantined records that are readable now, and mark them.

    Guarantees: a replay after a crash at any point has the same result (`replay_claims`).

    Args:
        session: exclusive meanwhile, as the checkpoint.
        folder: of the records' files; other records stay.
        schema: to read with.
        make_sink: creates the sink with an `app_id`.
        mergeable: selects the events to merge.
        before: schema of earlier runs, with the order of columns in CSV files that are gone.
        quarantine_table: of the target.
        target: of the sink.
        checkpoint: of the runs.
    """
    claims = query_claims(session, quarantine_table, target, owner=checkpoint)
    if claims is None:
        return Replayed()
    left = claims.open_claim()
    if left is not None:
        with claims.merging(left):
            quarantined, files = _records(session, folder, quarantine_table, replayed_at=left.moment)
            merged = None
            if quarantined is not None:
                good = mergeable(_decoded(quarantined, files, folder, schema, before))
                sink = make_sink(left.app_id)
                sink(good, 0)
                merged = _newly_merged(sink, good)
            claims.end(left, merged=merged)
    quarantined, files = _records(session, folder, quarantine_table)
    if quarantined is None:
        return Replayed()
    events = _decoded(quarantined, files, folder, schema, before)
    good = mergeable(events)
    records, marked = events.count(), good.count()
    if not marked:
        return Replayed(records=records)
    claim = claims.claim(_places(good))
    with claims.merging(claim):
        sink = make_sink(claim.app_id)
        sink(good, 0)
    claims.end(claim)
    result = sink.last_result
    counts = None if result is None else result.events
    return Replayed(
        records=records,
        marked=marked,
        changed=0 if counts is None else counts.inserted + counts.updated + counts.deleted,
        version=None if result is None else result.version,
    )


def _places(events: DataFrame) -> DataFrame:
    origin = columns.column(names.ORIGIN_COLUMN)
    return events.select(*(origin[name].alias(name) for name in _PLACE))


def _newly_merged(sink: MergeSink, events: DataFrame) -> DataFrame | None:
    """The places of events that were merged now; None where the target has held the batch since the replay before."""
    result = sink.last_result
    return None if result is not None and result.outcome == "skipped_duplicate" else _places(events)


def _records(
    session: SparkSession, folder: Folder, table: TableRef, *, replayed_at: Column | None = None
) -> tuple[DataFrame | None, list[str]]:
    """Quarantined records of the folder (None without), replayed at that time or never, and their files."""
    records = quarantine.records_of_files(session, table, replayed_at=replayed_at)
    files = [] if records is None else _source_files(records, session, folder)
    return (records if files else None), files


def _decoded(records: DataFrame, files: list[str], folder: Folder, schema: Schema, before: Schema | None) -> DataFrame:
    """The records of these files decoded by the current schema, read once.

    The order of columns in CSV records is that of the header, in `raw_key` where it was not the schema's.
    """
    inputs = {"topic": "path", "offset": "line", "timestamp": "modified", "raw_value": "value"}
    records = records.where(F.col("topic").isin(files))
    alike: dict[tuple[tuple[int, ...] | None, bytes | None], list[str]] = {(None, None): files}
    if folder.format == "csv" and folder.header:
        alike = {}
        for file, raw in records.select("topic", "raw_key").distinct().collect():
            header = None if raw is None else bytes(raw)  # a bytearray before Spark 4.1
            order = folder.header_order(records.sparkSession, schema, unquote(file), header=header, before=before)
            alike.setdefault((order, header), []).append(file)
    parts = []
    for (order, header), theirs in alike.items():
        alike_records = records.where(F.col("topic").isin(theirs) & F.col("raw_key").eqNullSafe(F.lit(header)))
        wanted = alike_records.select(*(F.col(name).alias(inputs[name]) for name in _PLACE))
        part = wanted.distinct().withColumn("file", F.lit(None).cast("bigint"))
        parts.append(folder.decoded(part, schema, has_header=False, order=order))
    return functools.reduce(DataFrame.unionByName, parts).localCheckpoint(eager=True)


def _source_files(records: DataFrame, session: SparkSession, folder: Folder) -> list[str]:
    """The files of quarantined records that belong to the folder."""
    pattern = re.compile(matching_paths(session, folder.path) + r"(/.*)?", re.DOTALL)
    paths = [row[0] for row in records.select("topic").distinct().collect()]
    return [path for path in paths if pattern.fullmatch(re.sub(r"^(\w+):/(//)?(?=[^/])", r"\1:/", unquote(path)))]
