"""Arrow as delta-rs (1.6) gives and takes it: views of texts and binary values, and no parts of nested arrays."""

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


def unsliced(rows: pa.Table) -> pa.Table:
    """The rows in arrays of their own: where a struct in a struct is part of one, delta-rs (1.6) ends the process."""
    parted = any(
        _is_part(chunk) for column in rows.columns if pa.types.is_nested(column.type) for chunk in column.chunks
    )
    return rows.take(pa.arange(0, rows.num_rows)) if parted else rows


def _is_part(values: pa.Array) -> bool:
    """Whether an array, or one in it, begins within another."""
    if values.offset:
        return True
    if pa.types.is_struct(values.type):
        return any(_is_part(values.field(i)) for i in range(values.type.num_fields))
    if pa.types.is_map(values.type):
        return _is_part(values.keys) or _is_part(values.items)
    return pa.types.is_list(values.type) and _is_part(values.values)
