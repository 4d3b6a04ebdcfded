"""How wide a table's rows are before files compress them: a short file may hold long rows."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

NARROW_BYTES = 128
"""Rows that take no more in their file are taken to be narrow, without a look into it."""
_MOST_KNOWN = 10_000


class Widths:
    """Bytes of a row as files encode it before they compress it; what was read is kept.

    Args:
        opened: opens a data file by its path in the log and its size in bytes.
    """

    def __init__(self, opened: Callable[[str, int], pa.NativeFile]) -> None:
        self._open = opened
        self._known: dict[tuple[str, int], float] = {}

    def of(self, files: pa.Table) -> float:
        """Of the rows of that file which has the widest ones by the log; 0 where there is none.

        Cost: the footer of that file, unless its rows are narrow; once.

        Args:
            files: `NativeTable.files`, or some of them.
        """
        if not files.num_rows:
            return 0.0
        sizes = files["size_bytes"]
        told = "num_records" in files.column_names
        rows = pc.max_element_wise(pc.fill_null(files["num_records"], 1), 1) if told else pa.repeat(1, len(sizes))
        widths = pc.divide(sizes.cast(pa.float64()), rows.cast(pa.float64()))
        widest = pc.index(widths, pc.max(widths)).as_py()
        if told and widths[widest].as_py() <= NARROW_BYTES:
            return float(widths[widest].as_py())
        path, size = files["path"][widest].as_py(), sizes[widest].as_py()
        if (path, size) not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            with self._open(path, size) as source, pq.ParquetFile(source) as file:
                self._known[path, size] = row_bytes(file.metadata)
        return self._known[path, size]


def row_bytes(footer: pq.FileMetaData) -> float:
    """Of a row of a file on average, as it is encoded but not compressed."""
    groups = (footer.row_group(i) for i in range(footer.num_row_groups))
    return float(sum(group.total_byte_size for group in groups) / max(footer.num_rows, 1))
