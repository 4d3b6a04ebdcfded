"""What the footer of a data file tells: how many rows it has, how wide, and whether they can be read as Spark does."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.types import StructType

from stream_merge.tables.delta_rs.data_files import counts_days_otherwise, holds_times
from stream_merge.tables.delta_rs.held_columns import Types, columns_of_file

_MOST_KNOWN = 100_000
GLOB = re.compile(r"[*?\[{]")
"""What DuckDB takes for a pattern in the path of a file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Footer:
    """What is to be known of a file before its rows are read."""

    rows: int
    row_bytes: float
    """Of a row on average, as it is encoded but not compressed."""
    types: Types
    """Its columns in order: name in the file, and type as Arrow has it; INT96 as microseconds without a zone."""
    problem: str | None
    """Why its values cannot be read as Spark reads them."""


class Footers:
    """The footers of a table's files; they never change, so each is read once.

    Args:
        opened: gives a file by its decoded path as Parquet's readers take it.
        schema: of the table; one that has changed needs another object.
        partition_columns: which of its columns are in no file.
    """

    def __init__(
        self, opened: Callable[[str], Path | pa.NativeFile], schema: StructType, partition_columns: Sequence[str]
    ) -> None:
        self._opened = opened
        self._fields = [field for field in schema.fields if field.name not in partition_columns]
        self._holds_times = holds_times(schema)
        self._known: dict[tuple[str, int], Footer] = {}
        self._types: dict[Types, Types] = {}

    def read(self, files: Iterable[tuple[str, int]], *, at_once: int) -> None:
        """Read those footers that are not known yet, several at once.

        Raises:
            OSError, pa.ArrowException: a file cannot be read.
        """
        unknown = [file for file in files if file not in self._known]
        if at_once > 1 and len(unknown) > 1:
            with ThreadPoolExecutor(min(at_once, len(unknown))) as threads:
                list(threads.map(self.of, *zip(*unknown, strict=True)))

    def of(self, path: str, size: int) -> Footer:
        """The footer of a file by its decoded path and its size in bytes.

        Raises:
            OSError, pa.ArrowException: the file cannot be read.
        """
        found = self._known.get((path, size))
        if found is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            found = self._known[path, size] = self._read(path)
        return found

    def _read(self, path: str) -> Footer:
        with pq.ParquetFile(self._opened(path), coerce_int96_timestamp_unit="us") as file:
            if GLOB.search(path):
                return Footer(
                    rows=0, row_bytes=0, types=(), problem=f"file {path!r} has a name that stands for others, too"
                )
            held = columns_of_file(file)
            old = self._holds_times and counts_days_otherwise(file.metadata.metadata or {})
            problem = "has dates or times in the calendar of Spark 2" if old else held.problem(self._fields)
            return Footer(
                rows=file.metadata.num_rows,
                row_bytes=_row_bytes(file.metadata),
                types=self._types.setdefault(held.types, held.types),  # one copy for all files that a writer made
                problem=None if problem is None else f"file {path!r} {problem}",
            )


def _row_bytes(footer: pq.FileMetaData) -> float:
    """Of a row of a file on average, as it is encoded but not compressed."""
    groups = (footer.row_group(i) for i in range(footer.num_row_groups))
    return float(sum(group.total_byte_size for group in groups) / max(footer.num_rows, 1))
