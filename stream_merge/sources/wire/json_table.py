"""Many JSON texts as one table: where that is provably what reading each of them strictly gives, else not at all."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

_NULLS = (":null", ": null")
"""As compact writers and Python's write it."""
FEWEST = 256
"""So many records that are not all as expected are read one by one."""
_NOTHING = pa.null()
_SMALL_EXPONENT = "[0-9][eE]-[0-9]{2}"
_LARGEST_BYTES = 2**30
"""Of one table's texts; Arrow counts the bytes of strings with 31 bits."""


def read(texts: pa.Array, schema: pa.Schema) -> pa.StructArray | None:
    """Read objects that have no fields but those of a schema.

    Where this gives a table, `strict_json.parse` of each text gives the same values, but that a field which is
    not there is NULL. Each text has to begin with a brace and to end with one, and a line feed parts them: closing
    brace, line feed, opening brace stand nowhere inside of a JSON value, so each text begins a row, and with as many
    rows as texts each of them is one object. Arrow's reader (26) refuses fields that are there twice, numbers that
    the type does not hold and, told so, fields that the schema has not. Not so with decimals: of exponents below -38
    it makes zeros, so none of two digits are given to it; and precision and scale must not be above 38 together.

    Args:
        texts: binary.
        schema: of the objects.

    Returns:
        A row per text; None where one of them is not such an object, or may not be.
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


def holds_decimal(dtype: pa.DataType) -> bool:
    """Whether there are decimals in it, at any depth."""
    return pa.types.is_decimal(dtype) or any(holds_decimal(dtype.field(i).type) for i in range(dtype.num_fields))


def read_parts(texts: pa.Array, schema: pa.Schema, first: int = 0) -> Iterator[tuple[int, pa.StructArray]]:
    """As `read`; where not all can be read so, the halves that can, each with the place where it begins."""
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
    """Which objects surely have all fields of their row: the table alone cannot tell null from a missing field.

    A text has as many nulls as it says `:null` or `: null` outside of strings. Of rows without NULL nothing is missing;
    of the others those are not sure that have other white space there, objects in arrays, or the same in a string.

    Args:
        texts: binary, as `read` took them.
        rows: as `read` gave them.
        row: the part of `rows` that is asked about.
        optional: fields of `rows` that may well be missing.
        spared: objects of which nobody wants to know; those that may lack something count as if they did.
    """
    found = row.is_valid()
    for values in row.flatten():
        found = pc.and_(found, values.is_valid())
    unsure = pc.invert(found) if spared is None else pc.invert(pc.or_(found, spared))
    if not pc.any(unsure).as_py():
        return found
    asked = texts.filter(unsure)
    said = functools.reduce(pc.add, (pc.count_substring(asked, null.encode()) for null in _NULLS))
    asked_rows = rows.filter(unsure)
    nulls, others_say_it = _nulls(asked_rows, optional)
    for name in optional:  # a null of its own may stand in the place of one that is missing
        is_null = pc.and_(asked_rows.field(name).is_null(), pc.match_substring(asked, f'"{name}"'))
        others_say_it = pc.or_(others_say_it, is_null)
    return pc.replace_with_mask(found, unsure, pc.and_(pc.equal(said, nulls), pc.invert(others_say_it)))


def _nulls(rows: pa.StructArray, optional: frozenset[str] = frozenset()) -> tuple[pa.Array, pa.Array]:
    """Per row: NULL fields of objects that are there, and whether anything else in it may say `:null`."""
    there = rows.is_valid()
    found = pa.repeat(pa.scalar(0, pa.int32()), len(rows))
    unsure = pa.repeat(pa.scalar(any(null in field.name for field in rows.type for null in _NULLS)), len(rows))
    for field, values in zip(rows.type, rows.flatten(), strict=True):  # NULL where the row is
        if field.name not in optional:
            found = pc.add(found, pc.and_(there, values.is_null()).cast(pa.int32()))
        if pa.types.is_struct(field.type):
            inside, inner_unsure = _nulls(values)
            found, unsure = pc.add(found, inside), pc.or_(unsure, inner_unsure)
        else:
            unsure = pc.or_(unsure, _may_say_null(values))
    return found, unsure


def _may_say_null(values: pa.Array) -> pa.BooleanArray:
    """Which values that are no objects hold a string with these characters, or objects with NULL fields."""
    if pa.types.is_string(values.type):
        found = functools.reduce(pc.or_, (pc.match_substring(values, null) for null in _NULLS))
        return pc.fill_null(found, False)
    if pa.types.is_list(values.type):
        items = values.flatten()
        unsure = items.is_valid() if pa.types.is_struct(items.type) else _may_say_null(items)
        rows = pc.list_parent_indices(values).filter(unsure)
        return pc.is_in(pa.arange(0, len(values)).cast(rows.type), value_set=pc.unique(rows))
    return pa.repeat(pa.scalar(False), len(values))


def shape_of(samples: Sequence[Any], known: pa.DataType = _NOTHING) -> pa.DataType:
    """A type that holds these JSON values and what is known already; what cannot be told or joined is left out.

    Args:
        samples: as `strict_json.parse` gives them.
        known: an earlier answer.
    """
    for sample in samples:
        shape = _shape(sample)
        both = None if shape is None else _joined(known, shape)
        known = known if both is None else both
    return known


def _joined(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """A type that holds what either holds."""
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
    # No floats: NaN is a number for Arrow's reader, and no JSON. No arrays: they take part in nothing that is read.
    return {bool: pa.bool_(), int: pa.int64(), str: pa.string()}.get(type(sample))
