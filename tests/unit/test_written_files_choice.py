"""Whether a file's times show that nanoseconds can hold them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.types import StructField, StructType, TimestampType

from stream_merge.tables.files import footers

UTC_MICROS = pa.timestamp("us", "UTC")
NEAR, FAR = datetime(2262, 4, 10, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)
SHAPES: Mapping[str, tuple[pa.DataType, Any]] = {
    "plain": (UTC_MICROS, lambda value: value),
    "struct": (pa.struct([("x", UTC_MICROS)]), lambda value: {"x": value}),
    "array": (pa.list_(UTC_MICROS), lambda value: [None, value]),
    "map": (pa.map_(pa.string(), UTC_MICROS), lambda value: [("x", value)]),
    "key of a map": (pa.map_(UTC_MICROS, pa.string()), lambda value: [(value, "x")]),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_file_is_judged_by_its_times_where_the_log_does_not_tell(tmp_path: Path, shape: str):
    """INT96 is what delta-rs reads through nanoseconds; a data file never changes, so one look will do."""
    dtype, holding = SHAPES[shape]
    opened: list[str] = []

    def opens(path: str, _: int) -> pa.NativeFile:
        opened.append(path)
        return pa.OSFile(str(tmp_path / path))

    times = footers.Times(opens)
    schema = StructType([StructField("t", TimestampType())])

    def verdict(name: str, value: datetime, *, int96: bool) -> str | None:
        rows = pa.table({"t": pa.array([None, holding(value)], dtype)})
        pq.write_table(rows, tmp_path / name, use_deprecated_int96_timestamps=int96, coerce_timestamps=None)
        files = pa.table({"path": [name], "size_bytes": [os.path.getsize(tmp_path / name)], "num_records": [2]})
        found = times.misread(files, schema)
        assert times.misread(files, schema) == found
        return found

    assert verdict("near", NEAR, int96=True) is None
    assert verdict("micros", FAR, int96=False) is None
    assert "outside of 1677 to 2262" in (verdict("far", FAR, int96=True) or "")
    assert opened == ["near", "micros", "far"]
