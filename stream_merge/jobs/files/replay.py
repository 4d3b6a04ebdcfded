"""Quarantined records of a folder's files, run again with the schema and the options of now."""

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
from stream_merge.tables.replay_claims import query_claims
from stream_merge.tables.side import quarantine

_PLACE = ("topic", "offset", "timestamp", "raw_value")
"""What tells quarantined records of files apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """Result of a replay."""

    records: int = 0
    """In quarantine, not replayed before."""
    marked: int = 0
    """Merged, so that they are done with."""
    changed: int = 0
    """Rows that they changed; the others were older than what is stored."""
    version: int | None = None
    """Of the target; None where nothing was committed."""

    def summary(self) -> str:
        """The result in one sentence."""
        if not self.records:
            return "no record of these files is in quarantine with its bytes and not replayed yet"
        where = "nothing to commit" if self.version is None else f"version {self.version}"
        changed = counted(self.changed, "row")
        done = f"{self.marked:,} of {counted(self.records, 'record')} replayed ({changed} changed, {where})"
        still = self.records - self.marked
        return f"{done}; {still:,} still cannot be merged" if still else done


@dataclass(frozen=True, kw_only=True, slots=True)
class Contract:
    """What a sink asks of events: those that break it would come back to the quarantine as new rows."""

    keys: tuple[str, ...]
    sequence_by: tuple[str, ...]
    partitioned_by: tuple[str, ...]
    """Columns of the target."""

    def holds(self, events: DataFrame) -> Column:
        """Whether the sink would merge an event; names that are not there are left for it to refuse."""
        types = {field.name: field.dataType for field in events.schema.fields}
        sequence = columns.resolved(events, self.sequence_by)
        return ~columns.any_of(
            [
                columns.column(names.CORRUPT_COLUMN).isNotNull(),
                breaks_key(events, self.keys, self.partitioned_by),
                *(columns.holds_null(columns.column(name), types[name]) for name in sequence),
            ]
        )


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
    contract: Contract,
) -> Replayed:
    """Merge quarantined records that can be read by now, and mark them; the others stay as they are.

    Guarantees: a crash at any point and another replay end the same (`replay_claims`). Nobody else may merge over the
    checkpoint meanwhile.

    Args:
        session: not used by anybody else meanwhile.
        folder: where the files of the records were; other records stay.
        schema: what to read.
        make_sink: the sink with an `app_id`.
        before: what the runs over the checkpoint read; it tells the order of columns in CSV files that are gone.
        quarantine_table: where the records are.
        target: of the sink.
        checkpoint: of the runs.
        contract: records that break it stay.

    Raises:
        ContractError: a CSV file has other columns than the schema.
    """
    claims = query_claims(session, quarantine_table, target, owner=checkpoint)
    if claims is None:
        return Replayed()
    left = claims.settle()
    if left is not None:
        with claims.finishing(left):
            kept, files = _records(session, folder, quarantine_table, replayed_at=left.moment)
            if kept is not None:
                events = _decoded(kept, files, folder, schema, before)
                make_sink(left.app_id)(events.where(contract.holds(events)), 0)
    kept, files = _records(session, folder, quarantine_table)
    if kept is None:
        return Replayed()
    events = _decoded(kept, files, folder, schema, before)
    good = events.where(contract.holds(events))
    records, marked = events.count(), good.count()
    if not marked:
        return Replayed(records=records)
    origin = columns.column(names.ORIGIN_COLUMN)
    with claims.taken(good.select(*(origin[name].alias(name) for name in _PLACE))) as app_id:
        sink = make_sink(app_id)
        sink(good, 0)
    result = sink.last_result
    counts = None if result is None else result.events
    return Replayed(
        records=records,
        marked=marked,
        changed=0 if counts is None else counts.inserted + counts.updated + counts.deleted,
        version=None if result is None else result.version,
    )


def _records(
    session: SparkSession, folder: Folder, table: TableRef, *, replayed_at: Column | None = None
) -> tuple[DataFrame | None, list[str]]:
    """Quarantined records that were replayed then, or never, and the folder's files among theirs; None for no file."""
    kept = quarantine.records_of_files(session, table, replayed_at=replayed_at)
    files = [] if kept is None else _source_files(kept, session, folder)
    return (kept if files else None), files


def _decoded(kept: DataFrame, files: list[str], folder: Folder, schema: Schema, before: Schema | None) -> DataFrame:
    """The records of these files, read once, as the schema has them now.

    Records of CSV files have no names: the header tells their order, which is in `raw_key` where it was not the
    schema's.
    """
    place = {"topic": "path", "offset": "line", "timestamp": "modified", "raw_value": "value"}
    of_files = kept.where(F.col("topic").isin(files))
    alike: dict[tuple[tuple[int, ...] | None, bytes | None], list[str]] = {(None, None): files}
    if folder.format == "csv" and folder.header:
        alike = {}
        for file, raw in of_files.select("topic", "raw_key").distinct().collect():
            header = None if raw is None else bytes(raw)  # a bytearray until Spark 4.1, which is no key of a dict
            order = folder.header_order(kept.sparkSession, schema, unquote(file), header=header, before=before)
            alike.setdefault((order, header), []).append(file)
    parts = []
    for (order, header), theirs in alike.items():
        of_these = of_files.where(F.col("topic").isin(theirs) & F.col("raw_key").eqNullSafe(F.lit(header)))
        wanted = of_these.select(*(F.col(name).alias(place[name]) for name in _PLACE))
        records = wanted.distinct().withColumn("file", F.lit(None).cast("bigint"))
        parts.append(folder.decoded(records, schema, has_header=False, order=order))
    return functools.reduce(DataFrame.unionByName, parts).localCheckpoint(eager=True)


def _source_files(kept: DataFrame, session: SparkSession, folder: Folder) -> list[str]:
    """The files of quarantined records that are or were in the folder."""
    pattern = re.compile(matching_paths(session, folder.path) + r"(/.*)?", re.DOTALL)
    paths = [row[0] for row in kept.select("topic").distinct().collect()]
    return [path for path in paths if pattern.fullmatch(re.sub(r"^(\w+):/(//)?(?=[^/])", r"\1:/", unquote(path)))]
