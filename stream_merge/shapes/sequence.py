"""The scalars of a sequence, in the order in which they are compared: it may hold structs within structs."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.types import StructField, StructType


def leaves(dtype: StructType) -> Iterator[tuple[tuple[str, ...], StructField]]:
    """The scalar fields of a struct with the paths to them."""
    for field in dtype.fields:
        if isinstance(field.dataType, StructType):
            yield from (((field.name, *path), leaf) for path, leaf in leaves(field.dataType))
        else:
            yield (field.name,), field


def arrays(values: pa.ChunkedArray | pa.StructArray) -> Iterator[pa.Array]:
    """The values of the scalar fields of a struct, each in one piece."""
    if isinstance(values, pa.ChunkedArray):
        values = pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([], values.type)
    for part in values.flatten():
        yield from arrays(part) if pa.types.is_struct(part.type) else [part]
