"""What would make the merges into a table cheaper, told from its history and the statistics of its files."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from stream_merge.model import names
from stream_merge.model.counted import counted
from stream_merge.model.snapshot import VECTORS_PROPERTY, is_on
from stream_merge.tables.compaction import TARGET_BYTES

OPTIMIZE_WRITE_PROPERTY = "delta.autoOptimize.optimizeWrite"
STATS_COLUMNS_PROPERTY = "delta.dataSkippingStatsColumns"
INDEXED_COLUMNS_PROPERTY = "delta.dataSkippingNumIndexedCols"
MAX_FILE_CONF = "spark.databricks.delta.optimize.maxFileSize"

SMALL_BYTES = 16_000_000
"""A file below it costs a merge more to open than to read (2 cores, Parquet with snappy on a local disk)."""
MANY_SMALL_FILES = 100
"""So many are worth a round of upkeep whatever the merges do; `Maintenance` leaves fewer than 40 behind."""
MEASURED = "10,000 random keys in 5 M rows on a local disk: 0.5 s in place of 17 s by Spark"
"""The driver beside Spark, 2 cores (docs/why.md)."""
MANY_ADDED_FILES = 8
"""Files that one merge adds; fewer are what its shuffle leaves on a small machine."""
COPIED_PER_CHANGED = 20
COPIED_PER_MERGE = 100_000
"""Below these two writing rows again takes less than what a merge takes anyway (0.1 s per 100,000 rows)."""
SPARED_SHARE = 0.5
SPARED_FILES = 4
"""Clustering is advised where it leaves at least so many files, and such a share of them, out of a merge."""

_COLUMN = re.compile(r"\s*(`(?:[^`]|``)+`|[^,`]+)")
"""One of a list with commas between."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MergedRows:
    """The newest merges of a table in sum, those alone that changed a row."""

    merges: int = 0
    changed: int = 0
    """Rows inserted, updated and deleted."""
    copied: int = 0
    """Rows that stayed as they were and were written again, with the files that they lie in."""
    by_spark: int = 0
    """How many of the merges Spark did."""
    copied_by_spark: int = 0
    added_files: int = 0
    """By Spark's merges, as are the bytes."""
    added_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class KeySpread:
    """Where the keys that one merge changed may lie."""

    key: str
    files: int
    """Files whose statistics do not rule them out."""
    rows: float
    """Rows of the table between the least and the greatest of them, if each file's keys are spread evenly between its
    own least and greatest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableFacts:
    """A table as its log describes it."""

    target: str
    files: int
    bytes: int
    rows: int
    """0 where the log does not tell."""
    small_files: int
    """Those below `SMALL_BYTES` that upkeep would put together now (`compaction.put_together`)."""
    is_partitioned: bool = False
    is_native: bool = False
    """Whether the native engine may write the table, which a clustered one is not for."""
    keys: tuple[str, ...] = ()
    """Those that the sink recorded, of types that have bounds, and that are no partition columns."""
    properties: Mapping[str, str] = field(default_factory=dict)
    merged: MergedRows = MergedRows()
    without_statistics: Mapping[str, int] = field(default_factory=dict)
    """Key column, with types that could have them -> files that have no least and greatest value of it, if any."""
    spreads: Sequence[KeySpread] = ()
    """Of the newest merge whose change files the table still has; one for each key column that can be measured."""


def advice(facts: TableFacts) -> tuple[str, ...]:
    """What to do, a sentence each; nothing where the figures do not ask for it."""
    rules = (_statistics, _clustering, _vectors, _file_size, _written_files, _small_files)
    return tuple(sentence for rule in rules for sentence in rule(facts))


def _is_copying(merged: MergedRows) -> bool:
    return merged.copied >= max(COPIED_PER_CHANGED * merged.changed, COPIED_PER_MERGE * merged.merges, 1)


def _did(merged: MergedRows) -> str:
    each = round(merged.copied / max(merged.changed, 1))
    return f"{_merges(merged.merges)} wrote {counted(each, 'row')} again for each row changed"


def _merges(count: int) -> str:
    return "the newest merge" if count == 1 else f"the newest {count:,} merges"


def _statistics(facts: TableFacts) -> Iterable[str]:
    """Without the statistics of a key its bounds leave no file unread."""
    lacking = facts.without_statistics
    if not lacking:
        return
    listed, indexed = (facts.properties.get(name) for name in (STATS_COLUMNS_PROPERTY, INDEXED_COLUMNS_PROPERTY))
    named = None if listed is None else {_plain(column) for column in _COLUMN.findall(listed)}
    to_come = [key for key in lacking if (indexed != "-1" if named is None else key.lower() not in named)]
    keys = " and ".join(f"{files:,} of key {key!r}" for key, files in lacking.items())
    if not to_come:
        yield (
            f"of {counted(facts.files, 'file')} some have no statistics, {keys}, so a merge reads them whatever its"
            f" keys are; files written from now on have them, and these do once they are written again:"
            f" {_ordered(facts, next(iter(lacking)))}"
        )
        return
    if listed is not None:
        why = f" ({STATS_COLUMNS_PROPERTY}={listed!r})"
        set_to = f"{STATS_COLUMNS_PROPERTY}' = '{', '.join([listed, *map(names.quote, to_come)])}"
    else:  # a list in place of a number would take the statistics from all other columns
        why = "" if indexed is None else f" ({INDEXED_COLUMNS_PROPERTY}={indexed})"
        set_to = f"{INDEXED_COLUMNS_PROPERTY}' = '-1"
    yield (
        f"of {counted(facts.files, 'file')} some have no statistics, {keys}{why}, so a merge reads them whatever its"
        f" keys are: {_alter(facts)} SET TBLPROPERTIES ('{set_to}'); files written from then on have them"
    )


def _plain(column: str) -> str:
    """A column of the property's list as Delta compares it."""
    column = column.strip()
    return (column[1:-1].replace("``", "`") if column.startswith("`") else column).lower()


def _clustering(facts: TableFacts) -> Iterable[str]:
    """Keys of a narrow range that lie in files which hold all kinds of keys."""
    if not facts.rows or not facts.files or not _is_copying(facts.merged):
        return
    rows_per_file = facts.rows / facts.files
    expected = [(math.ceil(spread.rows / rows_per_file) + 1, spread) for spread in facts.spreads]
    if not expected:
        return
    then, spread = min(expected, key=lambda one: one[0])
    now = spread.files
    if now - then < SPARED_FILES or then > (1 - SPARED_SHARE) * now:
        return
    yield (
        f"{_did(facts.merged)}, and by their statistics {now:,} of {counted(facts.files, 'file')} may hold the keys"
        f" of the newest one; ordered by {spread.key!r} they would lie in about {then:,} (rows between its least and"
        f" its greatest key over rows per file, and one): {_ordered(facts, spread.key)}"
    )


def _ordered(facts: TableFacts, key: str) -> str:
    """How to have a table ordered by a column, in files of the size that merges are best served with."""
    table, quoted = names.sql_identifier(facts.target), names.quote(key)
    session = f"in a session with {MAX_FILE_CONF}={TARGET_BYTES}"
    if facts.is_partitioned or facts.is_native:
        # Delta clusters no partitioned table, and delta-rs writes no clustered one.
        return f"OPTIMIZE {table} ZORDER BY ({quoted}) {session}"
    return f"{_alter(facts)} CLUSTER BY ({quoted}) and OPTIMIZE {table} FULL {session}"


def _vectors(facts: TableFacts) -> Iterable[str]:
    """Spark writes whole files again where it may not mark rows as removed."""
    merged = facts.merged
    if is_on(facts.properties, VECTORS_PROPERTY) or not _is_copying(merged):
        return
    if merged.copied_by_spark >= COPIED_PER_MERGE * max(merged.by_spark, 1):
        yield (
            f"{_did(merged)}, {merged.copied_by_spark:,} in all by Spark; with deletion vectors they stay where they"
            f" are ({MEASURED}): {_alter(facts)} SET TBLPROPERTIES ('{VECTORS_PROPERTY}' = 'true'), if all who read"
            " the table know them, with maintenance=Maintenance() so that removed rows leave the files in time"
        )


def _file_size(facts: TableFacts) -> Iterable[str]:
    """A changed row costs as many rows as its file has."""
    merged = facts.merged
    mean = facts.bytes / max(facts.files, 1)
    smaller = math.ceil(facts.bytes / TARGET_BYTES)
    if mean < 2 * TARGET_BYTES or not facts.keys or not _is_copying(merged):
        return
    each = merged.changed / merged.merges
    if each <= smaller / 2:  # with more changed rows than files every file is written again, whatever its size
        yield (
            f"{_did(merged)}, {each:,.0f} in each, and files have {mean / 2**20:,.0f} MiB on average; in files of"
            f" {TARGET_BYTES >> 20} MiB it would be {mean / TARGET_BYTES:.1f} x less:"
            f" {_ordered(facts, facts.keys[0])}"
        )


def _written_files(facts: TableFacts) -> Iterable[str]:
    """Spark writes a file for each task of its last shuffle, and for each partition of the table in it."""
    merged = facts.merged
    if (
        is_on(facts.properties, OPTIMIZE_WRITE_PROPERTY)
        or not merged.by_spark
        or merged.added_files < MANY_ADDED_FILES * merged.by_spark
    ):
        return
    mean = merged.added_bytes / merged.added_files
    if mean < SMALL_BYTES:
        yield (
            f"{counted(merged.by_spark, 'merge')} by Spark added {counted(merged.added_files, 'file')} of"
            f" {mean / 1e6:,.1f} MB on average, {merged.added_files / merged.by_spark:.0f} each; a shuffle before"
            f" the write combines them: {_alter(facts)} SET TBLPROPERTIES ('{OPTIMIZE_WRITE_PROPERTY}' = 'true')"
        )


def _small_files(facts: TableFacts) -> Iterable[str]:
    """Each file costs a look at it in each merge that its statistics do not rule out."""
    if facts.small_files >= MANY_SMALL_FILES:
        yield (
            f"{facts.small_files:,} of {facts.files:,} files are smaller than {SMALL_BYTES / 1e6:,.0f} MB:"
            f" stream-merge maintain {facts.target} compacts them now, and maintenance=Maintenance() from time to"
            " time"
        )


def _alter(facts: TableFacts) -> str:
    return f"ALTER TABLE {names.sql_identifier(facts.target)}"
