"""Many JSON texts as one table, where that provably equals reading each strictly."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

_NULLS = (":null", ": null")
"""Null fields in compact JSON and in Python's."""
FEWEST = 256
"""Fewest records that are tried as one table."""
_NOTHING = pa.null()
_HEADER, _HEADER_BYTES = b"\x00", 5
_LONGEST = 2**31 - 1
"""Bytes of a text: without an end, Arrow (26) fails to slice some arrays (Negative buffer resize)."""
_SMALL_EXPONENT = "[0-9][eE]-[0-9]{2}"
_LARGEST_BYTES = 2**30
"""Limit of one table's texts; Arrow counts the bytes of strings with 31 bits."""


def read(texts: pa.Array, schema: pa.Schema) -> pa.StructArray | None:
    """A row per object (binary texts), whose fields are all in a schema; None where a text may be another value.

    The values equal `strict_json.parse` of each text, except that missing fields are NULL. Each text begins and ends
    with a brace, and a line feed separates them: brace, line feed, brace occurs nowhere inside a JSON value, so with as
    many rows as texts each text is one object. Arrow's reader (26) refuses duplicate fields, numbers that the type does
    not hold and, by option, unknown fields. Not with decimals: exponents below -38 give zeros, so those of two digits
    are excluded; and precision and scale must not exceed 38 together.
    """
    if not len(texts) or texts.nbytes > _LARGEST_BYTES or not pc.all(_looks_whole(texts)).as_py():
        return None
    if (
        any(holds_decimal(field.type) for field in schema)
        and pc.any(pc.match_substring_regex(texts, _SMALL_EXPONENT)).as_py()
    ):
        return None
    try:
        lines = pa.ListArray.from_arrays(pa.array([0, len(texts)], pa.int32()), texts.cast(pa.string()))  # or not UTF-8
        text = pc.binary_join(lines, "\n")[0].as_buffer()
        table = pyarrow.json.read_json(
            pa.BufferReader(text),
            read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=text.size + 1),
            parse_options=pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="error"),
        )
    except pa.ArrowException:
        return None
    if table.num_rows != len(texts) or table.schema != schema:
        return None
    rows = table.to_struct_array()
    return rows.chunk(0) if rows.num_chunks == 1 else pa.concat_arrays(rows.chunks)


def unframed(texts: pa.BinaryArray) -> pa.BinaryArray:
    """Texts without the header of Confluent's JSON Schema converter (7.9): a byte that JSON never has, and an id."""
    is_framed = pc.starts_with(texts, _HEADER)
    if not pc.any(is_framed).as_py():
        return texts
    return pc.if_else(is_framed, pc.binary_slice(texts, _HEADER_BYTES, _LONGEST), texts)


def holds_decimal(dtype: pa.DataType) -> bool:
    """Whether a type has decimals at any depth."""
    return pa.types.is_decimal(dtype) or any(holds_decimal(dtype.field(i).type) for i in range(dtype.num_fields))


def read_parts(texts: pa.Array, schema: pa.Schema, first: int = 0) -> Iterator[tuple[int, pa.StructArray]]:
    """`read`, of the halves that can be read where not all can; each with the index of its first text."""
    rows = read(texts, schema)
    if rows is not None:
        yield first, rows
    elif len(texts) >= 2 * FEWEST:
        half = len(texts) // 2
        yield from read_parts(texts.slice(0, half), schema, first)
        yield from read_parts(texts.slice(half), schema, first + half)


def _looks_whole(texts: pa.Array) -> pa.BooleanArray:
    return pc.and_(pc.starts_with(texts, b"{"), pc.ends_with(texts, pattern=b"}"))


def lack_nothing(
    texts: pa.Array,
    rows: pa.StructArray,
    row: pa.StructArray,
    optional: frozenset[str] = frozenset(),
    *,
    spared: pa.BooleanArray | None = None,
) -> pa.BooleanArray:
    """Which objects surely have all fields of their row: in the table a missing field is NULL, too.

    A text has as many nulls as `:null` or `: null` outside of strings. Rows without NULL are sure; of the others not
    those with other white space there, objects in arrays, or such a string.

    Args:
        texts: argument of `read`.
        rows: its result.
        row: the part of `rows` to check.
        optional: fields of `rows` that may be missing.
        spared: objects that need no check.
    """
    is_sure = row.is_valid()
    for values in row.flatten():
        is_sure = pc.and_(is_sure, values.is_valid())
    unsure = pc.invert(is_sure) if spared is None else pc.invert(pc.or_(is_sure, spared))
    if not pc.any(unsure).as_py():
        return is_sure
    texts, rows = texts.filter(unsure), rows.filter(unsure)
    written = functools.reduce(pc.add, (pc.count_substring(texts, null.encode()) for null in _NULLS))
    nulls, is_ambiguous = _nulls(rows, optional)
    for name in optional:  # its null may be counted for a missing field
        is_null = pc.and_(rows.field(name).is_null(), pc.match_substring(texts, f'"{name}"'))
        is_ambiguous = pc.or_(is_ambiguous, is_null)
    return pc.replace_with_mask(is_sure, unsure, pc.and_(pc.equal(written, nulls), pc.invert(is_ambiguous)))


def _nulls(rows: pa.StructArray, optional: frozenset[str] = frozenset()) -> tuple[pa.Array, pa.Array]:
    """Per row: the number of NULL fields in its objects, and whether anything else in it may contain `:null`."""
    is_valid = rows.is_valid()
    nulls = pa.repeat(pa.scalar(0, pa.int32()), len(rows))
    unsure = pa.repeat(pa.scalar(any(null in field.name for field in rows.type for null in _NULLS)), len(rows))
    for field, values in zip(rows.type, rows.flatten(), strict=True):  # NULL where the row is
        if field.name not in optional:
            nulls = pc.add(nulls, pc.and_(is_valid, values.is_null()).cast(pa.int32()))
        if pa.types.is_struct(field.type):
            inside, inner_unsure = _nulls(values)
            nulls, unsure = pc.add(nulls, inside), pc.or_(unsure, inner_unsure)
        else:
            unsure = pc.or_(unsure, _may_say_null(values))
    return nulls, unsure


def _may_say_null(values: pa.Array) -> pa.BooleanArray:
    """Which values, not objects, contain a string with `:null`, or objects with NULL fields."""
    if pa.types.is_string(values.type):
        return pc.fill_null(functools.reduce(pc.or_, (pc.match_substring(values, null) for null in _NULLS)), False)
    if pa.types.is_list(values.type):
        items = values.flatten()
        unsure = items.is_valid() if pa.types.is_struct(items.type) else _may_say_null(items)
        rows = pc.list_parent_indices(values).filter(unsure)
        return pc.is_in(pa.arange(0, len(values)).cast(rows.type), value_set=pc.unique(rows))
    return pa.repeat(pa.scalar(False), len(values))


def infer_shape(samples: Sequence[Any], known: pa.DataType = _NOTHING) -> pa.DataType:
    """A type that holds these JSON values and an earlier result; values of unknown or other types are left out."""
    for sample in samples:
        shape = _shape(sample)
        both = None if shape is None else _joined(known, shape)
        known = known if both is None else both
    return known


def _joined(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """A type that holds the values of both, or None."""
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if not (pa.types.is_struct(one) and pa.types.is_struct(other)):
        return None
    types = {field.name: field.type for field in one}
    for field in other:
        both = _joined(types.get(field.name, _NOTHING), field.type)
        if both is None:
            return None
        types[field.name] = both
    return pa.struct(list(types.items()))


def _shape(sample: Any) -> pa.DataType | None:
    if sample is None:
        return pa.null()
    if isinstance(sample, Mapping):
        types = {name: _shape(value) for name, value in sample.items()}
        if None in types.values() or not all(name.isprintable() for name in types):  # JSON can write half a character
            return None
        return pa.struct(list(types.items()))
    # No floats: Arrow's reader accepts NaN. No arrays: nothing reads them.
    return {bool: pa.bool_(), int: pa.int64(), str: pa.string()}.get(type(sample))
