"""The text of CSV records, taken apart as RFC 4180 says, or refused."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from stream_merge.sources.wire.encodings import refuse
from stream_merge.sources.wire.strict_json import UndecodableError, text_of

_ESCAPED = {r"\t": "\t", r"\r": "\r", r"\b": "\b", r"\f": "\f", r"\\": "\\"}
"""How people write delimiters that a shell does not let through, and Spark takes them."""


class Split(NamedTuple):
    """Records, taken apart."""

    columns: list[pa.StringArray]
    """The fields of each; NULL for an unquoted empty one."""
    errors: dict[int, str]
    """Record -> why it has no such fields; they are NULL."""


def delimiter_of(written: str) -> str:
    """The characters that a delimiter stands for."""
    return _ESCAPED.get(written, written)


def split(records: pa.BinaryArray, delimiter: str, width: int) -> Split:
    """Take records apart: those without quotes all at once, the others one by one."""
    plain = pc.invert(pc.match_substring(records, b'"'))
    texts = _text(records.filter(plain))
    if texts is None:
        plain, texts = pa.repeat(pa.scalar(False), len(records)), pa.array([], pa.string())
    lists = pc.split_pattern(texts, delimiter)
    fits = pc.equal(pc.list_value_length(lists), width)
    errors: dict[int, str] = {}
    at = pc.indices_nonzero(plain).cast(pa.int64())
    if not pc.all(fits).as_py():
        for i in pc.indices_nonzero(pc.invert(fits)).to_pylist():
            errors[at[i].as_py()] = _other_width(len(lists[i]), width)
        at, lists = at.filter(fits), lists.filter(fits)
    flat = lists.flatten()
    first = pc.multiply(pa.arange(0, len(at)), width)
    columns = [_unquoted(flat.take(pc.add(first, n))) for n in range(width)]
    if len(at) == len(records):
        return Split(columns, errors)
    rest = pc.indices_nonzero(pc.invert(plain)).to_pylist()
    found: list[list[str | None]] = []
    for i, record in zip(rest, records.take(pa.array(rest, pa.int64())).to_pylist(), strict=True):
        try:
            found.append(_fields(record, delimiter, width))
        except UndecodableError as err:
            errors[i] = str(err)
            found.append([None] * width)
    place = pc.index_in(pa.arange(0, len(records)), value_set=pa.concat_arrays([at, pa.array(rest, pa.int64())]))
    others = [pa.array([row[n] for row in found], pa.string()) for n in range(width)]
    return Split([pa.concat_arrays(both).take(place) for both in zip(columns, others, strict=True)], errors)


def fields_of(text: str, delimiter: str) -> list[str | None]:
    """The fields of one record; None for an unquoted empty one.

    Raises:
        UndecodableError: a quote is not closed, or something stands behind it.
    """
    if '"' not in text:
        return [part or None for part in text.split(delimiter)]
    found: list[str | None] = []
    place, pattern = 0, _pattern(delimiter)
    while True:
        field = pattern.match(text, place)
        if field is None:
            refuse(f"the quote at character {place + 1} is not closed, or something but a delimiter stands behind it")
        quoted = field["quoted"]
        found.append(field["plain"] or None if quoted is None else quoted.replace('""', '"'))
        if not field["end"]:
            return found
        place = field.end()


def _fields(record: bytes, delimiter: str, width: int) -> list[str | None]:
    found = fields_of(text_of(record), delimiter)
    return found if len(found) == width else refuse(_other_width(len(found), width))


def _other_width(found: int, width: int) -> str:
    return f"the record has {found} field(s), the schema {width}"


@functools.cache
def _pattern(delimiter: str) -> re.Pattern[str]:
    end = re.escape(delimiter)
    return re.compile(rf'(?:"(?P<quoted>[^"]*(?:""[^"]*)*)"|(?P<plain>(?!")(?:(?!{end})[\s\S])*))(?P<end>{end}|\Z)')


def _text(records: pa.BinaryArray) -> pa.StringArray | None:
    try:
        return records.cast(pa.string())
    except pa.ArrowException:  # not UTF-8
        return None


def _unquoted(texts: pa.StringArray) -> pa.StringArray:
    return pc.if_else(pc.equal(texts, ""), pa.scalar(None, pa.string()), texts)
