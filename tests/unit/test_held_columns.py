"""How data files hold the columns of their table, by their footers: each is read once."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.types import LongType, StructField, StructType, TimestampNTZType, TimestampType

from stream_merge.model.snapshot import TableSnapshot
from stream_merge.tables.files import footers
from stream_merge.tables.files.footers import HeldColumns


class Files:
    """Data files of a table in a folder, and which of them were opened."""

    def __init__(self, folder: Path, **fields: Any) -> None:
        self.folder = folder
        self.opened: list[str] = []
        self.columns = HeldColumns(self._open, at_once=2)
        schema = StructType([StructField(name, dtype) for name, dtype in fields.items()])
        self.snapshot = TableSnapshot(
            table_id="t",
            version=0,
            location=str(folder),
            schema=schema,
            partition_columns=(),
            properties={},
            files=None,
            transaction=lambda _: None,
        )

    def _open(self, path: str, _: int) -> pa.NativeFile:
        self.opened.append(path)
        return pa.OSFile(str(self.folder / path))

    def write(self, name: str, rows: pa.Table, *, int96: bool = False) -> None:
        pq.write_table(rows, self.folder / name, use_deprecated_int96_timestamps=int96)

    def named(self) -> pa.Table:
        names = sorted(os.listdir(self.folder))
        return pa.table({"path": names, "size_bytes": [os.path.getsize(self.folder / name) for name in names]})

    def misread(self) -> str | None:
        return self.columns.misread(self.named(), self.snapshot)


def test_each_footer_is_read_once_however_many_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What is kept of files that are not asked about any more has a limit; those of a batch have none."""
    monkeypatch.setattr(footers, "_MOST_KNOWN", 2)
    files = Files(tmp_path, id=LongType())
    for number in range(4):
        files.write(f"{number}", pa.table({"id": [number]}))

    assert [files.misread() for _ in range(3)] == [None] * 3
    assert sorted(files.opened) == ["0", "1", "2", "3"]
    files.write("4", pa.table({"ID": [4]}))
    assert files.misread() == "file '4' holds column 'id' as 'ID'"
    assert files.opened.count("4") == len(files.opened) - 4 == 1


def test_files_that_nobody_asks_about_any_more_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A table whose files are all delta-rs' own: each commit replaces one, for as long as the handle is kept."""
    monkeypatch.setattr(footers, "_MOST_KNOWN", 2)
    files = Files(tmp_path, id=LongType())
    for number in range(9):
        files.columns.trust(pa.table({"path": [f"{number}"], "size_bytes": [1]}))
        files.columns.misread(pa.table({"path": [f"{number}"], "size_bytes": [1]}), files.snapshot)

    assert (len(files.columns._known) <= 2, files.opened) == (True, [])


def test_what_delta_rs_has_written_is_not_looked_into(tmp_path: Path):
    files = Files(tmp_path, id=LongType())
    files.write("own", pa.table({"id": [1]}))
    files.columns.trust(files.named())

    assert (files.misread(), files.opened) == (None, [])


def test_times_kept_as_int96_are_told_by_their_column_whatever_its_name(tmp_path: Path):
    """Spark's default for instants. The path of a nested field and of a column with a dot in its name look alike."""
    moment = datetime.datetime(2026, 1, 1)
    files = Files(tmp_path, **{"a.b": TimestampType(), "a": StructType([StructField("c", LongType())])})
    files.write("a", pa.table({"a.b": [moment], "a": [{"c": 1}]}), int96=True)
    without_zone = Files(tmp_path, **{"a.b": TimestampNTZType()})

    assert files.misread() is None
    assert without_zone.misread() == "file 'a' holds column 'a.b' as timestamp[us], not as timestamp_ntz"
