"""Whether texts in Arrow are texts: Spark keeps any bytes as a string, and hands them over as they are."""

from __future__ import annotations

import pyarrow as pa


def is_legible(values: pa.ChunkedArray | pa.Table) -> bool:
    """Whether all texts, at any depth, are valid UTF-8; nothing in Python or delta-rs can read them otherwise.

    Cost: one pass over the bytes, about a second for 2 GB.
    """
    try:
        values.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True
