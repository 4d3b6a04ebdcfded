"""Whether texts in Arrow are texts: Spark keeps any bytes as a string, and hands them over as they are."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from stream_merge.model.snapshot import HIVE_NULL


def is_legible(values: pa.ChunkedArray | pa.Table) -> bool:
    """Whether all texts, at any depth, are valid UTF-8; nothing in Python or delta-rs can read them otherwise.

    Cost: one pass over the bytes, about a second for 2 GB.
    """
    try:
        values.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def holds_null_of_partitions(texts: pa.ChunkedArray) -> bool:
    """Whether one is a text that Delta keeps NULL for as the value of a partition (4.4)."""
    return bool(pc.any(pc.is_in(texts, pa.array(["", HIVE_NULL]))).as_py())
