"""Arrow as delta-rs (1.6) gives it: views of texts and binary values."""

from __future__ import annotations

import pyarrow as pa


def without_views(dtype: pa.DataType) -> pa.DataType:
    """The type without views, at any depth but inside maps."""
    if pa.types.is_string_view(dtype):
        return pa.string()
    if pa.types.is_binary_view(dtype):
        return pa.binary()
    if pa.types.is_struct(dtype):
        return pa.struct([pa.field(f.name, without_views(f.type)) for f in dtype])
    if pa.types.is_list(dtype):
        return pa.list_(pa.field(dtype.value_field.name, without_views(dtype.value_type)))
    return dtype
