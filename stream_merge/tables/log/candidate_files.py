"""Which data files of a table may hold the keys of a batch, as far as the log tells."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import DecimalType

from stream_merge.model.snapshot import name_in_files
from stream_merge.shapes.key_bounds import KeyBounds
from stream_merge.tables.log.handle import LogHandle

_DIGITS = 15
"""Of a decimal that delta-rs (1.6) surely reads from statistics as they are: JSON's numbers may go through a float."""
_CUT = 1_000
"""Microseconds: statistics of times end at milliseconds, and the greatest may be cut, too (Delta protocol)."""


def touched_files(table: LogHandle, bounds: KeyBounds) -> pa.Table:
    """The files whose statistics do not rule out the keys within the bounds. Reads the log only."""
    files = table.files()
    # Statistics stand under the names that columns have in files.
    in_files = {field.name: name_in_files(field) for field in table.snapshot().schema.fields}
    keep: Any = pa.array([True] * files.num_rows, pa.bool_())
    for bound in bounds.columns:
        name = in_files.get(bound.name, bound.name)
        least, greatest = f"min.{name}", f"max.{name}"
        if least not in files.column_names or greatest not in files.column_names:
            continue
        dtype = bound.field.dataType
        if isinstance(dtype, DecimalType) and dtype.precision > _DIGITS:
            continue
        try:
            lowest, _ = bound.to_arrow(files[greatest].type, earlier_by=_CUT)
            _, highest = bound.to_arrow(files[least].type)
            may_hold = pc.and_kleene(pc.less_equal(files[least], highest), pc.greater_equal(files[greatest], lowest))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError):
            continue
        keep = pc.and_(keep, pc.fill_null(may_hold, True))
    return files.filter(keep)


def size_of(files: pa.Table) -> tuple[int, int]:
    """Bytes and rows of files."""
    rows = pc.sum(files["num_records"]).as_py() if "num_records" in files.column_names else 0
    return int(pc.sum(files["size_bytes"]).as_py() or 0), int(rows or 0)
