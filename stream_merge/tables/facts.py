"""What a table's log tells of its files and of the merges into it: the figures that advice stands on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructField

from stream_merge.model import names
from stream_merge.model.snapshot import CommitRecord, TableSnapshot, name_in_files
from stream_merge.model.table_ref import TableRef
from stream_merge.shapes.key_bounds import boundable
from stream_merge.spark.data_files import DataFile
from stream_merge.tables.advice import SMALL_BYTES, KeySpread, MergedRows, TableFacts
from stream_merge.tables.compaction import put_together
from stream_merge.tables.delta_rs.changed_keys import changed_bounds, spread_of
from stream_merge.tables.delta_rs.data_files import ambiguous
from stream_merge.tables.delta_rs.panics import NativePanicError
from stream_merge.tables.delta_rs.table import NativeTable
from stream_merge.tables.delta_rs.touched_files import size_of

_MOST_LOOKED_AT = 3
"""Merges whose change files are looked for: where the newest have none, VACUUM has taken those of the others too."""


def facts_of(
    table: NativeTable, snapshot: TableSnapshot, commits: Sequence[CommitRecord], *, target: TableRef, is_native: bool
) -> TableFacts:
    """Put together what is known of a table without reading a row of it.

    Cost: the log, and the footers of the change files of one merge.

    Args:
        table: up to date.
        snapshot: of it.
        commits: its newest, newest first.
        target: what the table is called.
        is_native: whether the native engine may write it.
    """
    files = table.files()
    size, rows = size_of(files)
    keys = boundable(_keys(snapshot))
    return TableFacts(
        target=target,
        files=files.num_rows,
        bytes=size,
        rows=rows,
        small_files=sum(file.bytes < SMALL_BYTES for file in put_together(_data_files(files))),
        is_partitioned=bool(snapshot.partition_columns),
        is_native=is_native,
        keys=tuple(key.name for key in keys),
        properties=snapshot.properties,
        merged=merged_rows(commits),
        without_statistics={key.name: missing for key in keys if (missing := _without_statistics(files, key))},
        spreads=_spreads(table, keys, commits),
    )


def _data_files(files: pa.Table) -> list[DataFile]:
    """As upkeep sees them, with what deletion vectors have removed left out of account."""
    columns = (files[name] for name in files.column_names if name.startswith("partition."))
    # By number: Python cannot hold every value.
    numbered = (column.combine_chunks().dictionary_encode().indices.to_pylist() for column in columns)
    sizes = files["size_bytes"].to_pylist()
    return [
        DataFile(str(partition), size, deleted_share=0.0, is_clustered=False)
        for size, *partition in zip(sizes, *numbered, strict=True)
    ]


def merged_rows(commits: Sequence[CommitRecord]) -> MergedRows:
    """The sum of the merges among these commits that a sink did and that changed a row."""
    sums = dict.fromkeys(("merges", "changed", "copied", "by_spark", "copied_by_spark"), 0)
    added_files = added_bytes = 0
    for commit in commits:
        if commit.ours is None or not _changed(commit):
            continue
        copied = commit.metrics.get("numTargetRowsCopied", 0)
        sums["merges"] += 1
        sums["changed"] += _changed(commit)
        sums["copied"] += copied
        if commit.ours.get("engine") == "spark":
            sums["by_spark"] += 1
            sums["copied_by_spark"] += copied
            added_files += commit.metrics.get("numTargetFilesAdded", 0)
            added_bytes += commit.metrics.get("numTargetBytesAdded", 0)
    return MergedRows(**sums, added_files=added_files, added_bytes=added_bytes)


def _changed(commit: CommitRecord) -> int:
    return sum(commit.metrics.get(f"numTargetRows{what}", 0) for what in ("Inserted", "Updated", "Deleted"))


def _keys(snapshot: TableSnapshot) -> tuple[StructField, ...]:
    """The recorded keys, but for partition columns, which need no statistics, and those whose own nobody can tell."""
    recorded = json.loads(snapshot.properties.get(names.KEYS_PROPERTY, "[]"))
    fields = {field.name: field for field in snapshot.schema.fields}
    found = (fields[key] for key in recorded if key in fields and key not in snapshot.partition_columns)
    several = ambiguous(snapshot.schema)
    return tuple(key for key in found if name_in_files(key) not in several)


def _without_statistics(files: pa.Table, key: StructField) -> int:
    """Files with no least or no greatest value of a key column. One that holds nothing but NULL has none, rightly."""
    least, nulls = f"min.{name_in_files(key)}", f"null_count.{name_in_files(key)}"
    if least not in files.column_names:
        return int(files.num_rows)
    missing: Any = pc.is_null(files[least])
    if nulls in files.column_names:
        missing = pc.and_(missing, pc.fill_null(pc.not_equal(files[nulls], files["num_records"]), True))
    return int(pc.sum(missing).as_py() or 0)


def _spreads(table: NativeTable, keys: Sequence[StructField], commits: Sequence[CommitRecord]) -> tuple[KeySpread, ...]:
    """Of the newest merge whose change files can be looked into."""
    looked_at = 0
    for commit in commits:
        if commit.ours is None or not commit.metrics.get("numTargetRowsCopied"):
            continue
        found = tuple(spread for key in keys if (spread := _spread(table, key, commit.version)) is not None)
        looked_at += 1
        if found or looked_at == _MOST_LOOKED_AT:
            return found
    return ()


def _spread(table: NativeTable, key: StructField, version: int) -> KeySpread | None:
    try:
        bounds = changed_bounds(table, version, name_in_files(key))
    except (OSError, ValueError, OverflowError, pa.ArrowException, NativePanicError):
        return None  # the log is tidied, VACUUM has taken the file, or Python cannot hold the value
    found = None if bounds is None else spread_of(table.files(), name_in_files(key), bounds)
    return None if found is None else KeySpread(key=key.name, files=found[0], rows=found[1])
