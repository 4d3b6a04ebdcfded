"""Values of a data file as values of the table: its names, its types, NULL for what the file lacks."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import ArrayType, DataType, MapType, StructType, TimestampType

from stream_merge.model.snapshot import name_in_files
from stream_merge.spark.versions import arrow_type

_UTC = pa.timestamp("us", tz="UTC")


def conformed(values: pa.Array, dtype: DataType) -> pa.Array:
    """Values in the table's type; the file was found to hold them so that nothing is lost (`footers.is_readable`).

    Args:
        values: of one column, by names in files.
        dtype: Spark's type of the column, with names of the schema.

    Raises:
        pa.ArrowInvalid, pa.ArrowNotImplementedError: a value is not one of that type after all.
    """
    wanted = arrow_type(dtype)
    if values.type == wanted and not _is_renamed(dtype):
        return values
    if isinstance(dtype, StructType):
        return _struct(values, dtype, wanted)
    if isinstance(dtype, MapType):
        keys, items = conformed(_span(values, values.keys), dtype.keyType), _span(values, values.items)
        return pa.Array.from_buffers(
            wanted,
            len(values),
            _list_buffers(values),
            children=[
                pa.StructArray.from_arrays(
                    [keys, conformed(items, dtype.valueType)], fields=[wanted.key_field, wanted.item_field]
                )
            ],
        )
    if isinstance(dtype, ArrayType):
        elements = conformed(_span(values, values.values), dtype.elementType)
        return pa.Array.from_buffers(wanted, len(values), _list_buffers(values), children=[elements])
    if isinstance(dtype, TimestampType) and values.type == pa.timestamp("us"):
        return values.view(pa.int64()).view(_UTC)  # instants, as INT96 has them: nothing to convert
    return values.cast(wanted)


def _is_renamed(dtype: DataType) -> bool:
    """Whether a field inside has another name in files: two of them may have each other's."""
    if isinstance(dtype, StructType):
        return any(name_in_files(field) != field.name or _is_renamed(field.dataType) for field in dtype.fields)
    if isinstance(dtype, MapType):
        return _is_renamed(dtype.keyType) or _is_renamed(dtype.valueType)
    return isinstance(dtype, ArrayType) and _is_renamed(dtype.elementType)


def _struct(values: pa.StructArray, dtype: StructType, wanted: pa.StructType) -> pa.Array:
    held = {values.type.field(i).name: i for i in range(values.type.num_fields)}
    children = []
    for field in dtype.fields:
        at = held.get(name_in_files(field))
        if at is None:
            children.append(pa.nulls(len(values), arrow_type(field.dataType)))
        else:
            children.append(conformed(values.field(at), field.dataType))
    mask = values.is_null() if values.null_count else None
    return pa.StructArray.from_arrays(children, fields=list(wanted), mask=mask)


def _list_buffers(values: pa.Array) -> list[pa.Buffer | None]:
    """Validity and offsets of lists or maps, from 0 on; large lists have wider ones."""
    offsets = pc.subtract(values.offsets, values.offsets[0]).cast(pa.int32())
    validity = pc.is_valid(values).buffers()[1] if values.null_count else None
    return [validity, offsets.buffers()[1]]


def _span(values: pa.Array, children: pa.Array) -> pa.Array:
    """Of all children those that the lists or maps of a slice are about."""
    if not len(values):
        return children.slice(0, 0)
    start, end = values.offsets[0].as_py(), values.offsets[-1].as_py()
    return children.slice(start, end - start)
