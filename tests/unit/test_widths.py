"""How wide rows are, told from the log and from footers."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake
from stream_merge.tables.delta_rs.widths import NARROW_BYTES

from stream_merge.tables.log.handle import NativeTable, open_table


def table_of(folder: Path, *texts: str, rows: int = 500) -> NativeTable:
    for text in texts:
        written = pa.table({"id": range(rows), "name": [f"{text}{i}{text}" for i in range(rows)]})
        write_deltalake(folder, written, mode="append")
    native = open_table(str(folder))
    assert native is not None
    return native


def test_long_rows_in_a_short_file(tmp_path: Path):
    native = table_of(tmp_path, "", "x" * 20_000)
    files = native.files()
    assert max(files["size_bytes"].to_pylist()) < 500 * 20_000

    assert 40_000 < native.widths.of(files) < 41_000


def test_no_footer_is_read_of_narrow_rows_and_none_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    native = table_of(tmp_path / "narrow", "")
    opened: list[str] = []

    def noted(path: str, _: int) -> pa.NativeFile:
        opened.append(path)
        return NativeTable.opened(native, path)

    monkeypatch.setattr(native.widths, "_open", noted)
    assert 0 < native.widths.of(native.files()) <= NARROW_BYTES
    assert opened == []

    native = table_of(tmp_path / "wide", "x" * 20_000)
    monkeypatch.setattr(native.widths, "_open", noted)
    assert native.widths.of(native.files()) == native.widths.of(native.files())
    assert opened == native.files()["path"].to_pylist()


def test_files_of_which_the_log_tells_no_rows_are_looked_into(tmp_path: Path):
    native = table_of(tmp_path, "some text", "")
    files = native.files()

    assert native.widths.of(files.slice(0, 0)) == 0
    assert native.widths.of(files.drop_columns(["num_records"])) > 0
    nobody_knows = files.set_column(
        files.column_names.index("num_records"), "num_records", pa.nulls(files.num_rows, pa.int64())
    )
    assert native.widths.of(nobody_knows) > 0
