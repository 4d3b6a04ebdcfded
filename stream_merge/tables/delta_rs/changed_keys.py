"""Where the keys that a merge changed lie: told from the footers of its change files and the log's statistics."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from stream_merge.tables.delta_rs.table import NativeTable


def changed_bounds(table: NativeTable, version: int, column: str) -> pa.Array | None:
    """The least and the greatest value of a column among the rows in a commit's change files.

    Cost: the commit's file in the log, and the footer of each change file (`_change_data`).

    Args:
        table: with a change feed.
        version: of the commit.
        column: as it is called in the files.

    Returns: both, in this order; None where the commit has no change files, or their footers do not tell.
    """
    ends: list[Any] = []
    for path in _change_files(table.commit(version)):
        with table.opened(path) as source, pq.ParquetFile(source) as file:
            found = _ends(file.metadata, column)
        if found is None:
            return None
        ends += found
    return pa.array([min(ends), max(ends)]) if ends else None


def _change_files(commit: bytes) -> list[str]:
    return [json.loads(line)["cdc"]["path"] for line in commit.splitlines() if line.startswith(b'{"cdc"')]


def _ends(footer: pq.FileMetaData, column: str) -> list[Any] | None:
    """Least and greatest value of each row group; None where one does not tell."""
    ends: list[Any] = []
    for i in range(footer.num_row_groups):
        group = footer.row_group(i)
        chunks = (group.column(j) for j in range(group.num_columns))
        statistics = next((chunk.statistics for chunk in chunks if chunk.path_in_schema == column), None)
        if statistics is None or not statistics.has_min_max:
            return None
        ends += [statistics.min, statistics.max]
    return ends


def spread_of(files: pa.Table, column: str, bounds: pa.Array) -> tuple[int, float] | None:
    """How many files may hold values within the bounds, and about how many rows do.

    The second takes the values of a file to be spread evenly between its least and its greatest.

    Args:
        files: `NativeTable.files`.
        column: numbers, dates or times, as it is called in the files.
        bounds: least and greatest value.

    Returns: None where a file has no statistics, or its values cannot be measured.
    """
    wanted = (f"min.{column}", f"max.{column}", "num_records")
    if any(files.column_names.count(name) != 1 or files[name].null_count for name in wanted):
        return None
    least, greatest, rows = (files[name] for name in wanted)
    try:
        low, high = _measured(bounds.cast(least.type))
        lows, highs = _measured(least), _measured(greatest)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError):
        return None
    touched, inside = 0, 0.0
    for first, last, count in zip(lows, highs, rows.to_pylist(), strict=True):
        if first <= high and last >= low:
            touched += 1
            inside += count * _share(first, last, low, high)
    return touched, inside


def _measured(values: pa.Array | pa.ChunkedArray) -> list[float]:
    """As numbers on a line; texts are not measured.

    Raises:
        pa.ArrowInvalid, pa.ArrowNotImplementedError: they cannot be.
    """
    if pa.types.is_date32(values.type):
        values = values.cast(pa.int32())
    elif pa.types.is_timestamp(values.type):
        values = values.cast(pa.int64())
    elif not (pa.types.is_integer(values.type) or pa.types.is_decimal(values.type)):
        msg = f"{values.type} cannot be measured"
        raise pa.ArrowInvalid(msg)
    found: list[float] = pc.cast(values, pa.float64()).to_pylist()
    return found


def _share(first: float, last: float, low: float, high: float) -> float:
    if last <= first:
        return 1.0
    return (min(last, high) - max(first, low)) / (last - first)
