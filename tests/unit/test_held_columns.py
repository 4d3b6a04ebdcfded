"""How data files hold the columns of their table, by their footers: each is read once."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.types import LongType, StructField, StructType, TimestampNTZType, TimestampType

from stream_merge.tables.files.footers import Footers


class Files:
    """Data files of a table in a folder, and which of them were opened."""

    def __init__(self, folder: Path, **fields: Any) -> None:
        self.folder = folder
        self.opened: list[str] = []
        self._footers = Footers(self._open, StructType([StructField(n, t) for n, t in fields.items()]), ())

    def _open(self, path: str) -> Path:
        self.opened.append(path)
        return self.folder / path

    def problem(self, name: str, rows: pa.Table, *, int96: bool = False) -> str | None:
        pq.write_table(rows, self.folder / name, use_deprecated_int96_timestamps=int96)
        size = (self.folder / name).stat().st_size
        return [self._footers.footer(name, size).problem for _ in range(3)][-1]


def test_each_footer_is_read_once(tmp_path: Path):
    files = Files(tmp_path, id=LongType())

    assert files.problem("0", pa.table({"id": [1]})) is None
    assert files.problem("1", pa.table({"ID": [4]})) == "file '1' holds column 'id' as 'ID'"
    assert files.opened == ["0", "1"]


def test_times_kept_as_int96_are_told_by_their_column_whatever_its_name(tmp_path: Path):
    """Spark's default for instants. The path of a nested field and of a column with a dot in its name look alike."""
    rows = pa.table({"a.b": [datetime.datetime(2026, 1, 1)], "a": [{"c": 1}]})
    instants = Files(tmp_path, **{"a.b": TimestampType(), "a": StructType([StructField("c", LongType())])})

    assert instants.problem("a", rows, int96=True) is None
    assert Files(tmp_path, **{"a.b": TimestampNTZType()}).problem("b", rows, int96=True) == (
        "file 'b' holds column 'a.b' as timestamp[us], not as timestamp_ntz"
    )
