"""Whole columns of values from Arrow's JSON reader, equal to `Encoding.one` of each.

Each function returns None where it is not sure of a value; the column is then read value by value.
"""

from __future__ import annotations

import sys
from array import array
from binascii import Error, a2b_base64
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

Many = Callable[[pa.Array], pa.Array | None]

WIDEST = 38
"""Digits of the widest decimal."""
_MICROS_PER_SECOND = 1_000_000
_DATE = r"^\d{4}-\d\d-\d\dZ?$"
_CLOCK = r"^\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d{1,6})?"
_ZONE = r"(Z|[+-](0\d|1[0-4])(:?[0-5]\d)?)"


def as_they_are(values: pa.Array) -> pa.Array:
    """Values that the JSON reader has read in the column's type."""
    return values


def one_by_one(values: pa.Array, *, one: Callable[[Any], Any], dtype: pa.DataType) -> pa.Array | None:
    """Values that are converted one at a time."""
    try:
        return pa.array([None if value is None else one(value) for value in values.to_pylist()], dtype)
    except (pa.ArrowException, ValueError, OverflowError):
        return None


def floats(values: pa.Array, *, bits: int, exact: int) -> pa.Array | None:
    """Numbers read as doubles; integers of at least `exact` could have lost digits."""
    unsure = pc.or_(pc.invert(pc.is_finite(values)), pc.equal(values.view(pa.int64()), -(2**63)))  # or -0.0
    large = pc.greater_equal(pc.abs(values), exact)
    unsure = pc.or_(unsure, pc.and_(large, pc.equal(pc.floor(values), values)))
    if pc.any(unsure).as_py():
        return None
    if bits == 64:  # noqa: PLR2004
        return values
    narrow = values.cast(pa.float32())
    return narrow if pc.all(pc.is_finite(narrow)).as_py() is not False else None


def decimals(values: pa.Array, *, precision: int, scale: int) -> pa.Array | None:
    """Decimals in range: the JSON reader (Arrow 26) accepts 100000000 as decimal(10,2), eleven digits.

    Precision and scale together are at most WIDEST: else the reader could have wrapped.
    """
    end = Decimal(10) ** (precision - scale)
    return values if within(values, -end, end, are_in=False) else None


def decimals_from_bytes(values: pa.Array, *, precision: int, scale: int) -> pa.Array | None:
    """Base64 of unscaled integers."""
    most = 10**precision
    if pc.any(pc.equal(pc.binary_length(values), 0)).as_py():
        return None
    try:
        numbers = _small_integers(values)
        if numbers is None:
            raw = [None if v is None else a2b_base64(v, strict_mode=True) for v in values.to_pylist()]
            whole = [None if v is None else int.from_bytes(v, "big", signed=True) for v in raw]
            numbers = pa.array(whole, pa.decimal128(WIDEST, 0))
    except (Error, pa.ArrowException, ValueError):
        return None
    if not within(numbers, 1 - most, most - 1):
        return None
    return numbers.cast(pa.decimal128(WIDEST, 0)).view(pa.decimal128(precision, scale))


_SMALL, _DIGITS = pa.array([4, 8, None], pa.int32()), 12
"""Lengths of base64 texts of at most six bytes; length of that of nine bytes."""


def _small_integers(texts: pa.StringArray) -> pa.Int64Array | None:
    """Big-endian integers of at most six bytes from base64; None where one may be larger.

    Each text is padded with zeros to nine bytes; eight of them are an int64, and shifts extract its own bytes and sign.

    Raises: `binascii.Error` for characters that are not base64.
    """
    length = pc.binary_length(texts)
    if not pc.all(pc.is_in(length, value_set=_SMALL)).as_py():
        return None
    padding = pc.subtract(length, pc.binary_length(pc.ascii_rtrim(texts, "=")))
    if pc.any(pc.or_(pc.greater(padding, 2), pc.not_equal(padding, pc.count_substring(texts, "=")))).as_py():
        return None
    padded = pc.ascii_lpad(pc.replace_substring(texts, "=", "A"), _DIGITS, "A")
    every = pc.fill_null(padded, "A" * _DIGITS)
    joined = pc.binary_join(pa.ListArray.from_arrays(pa.array([0, len(every)], pa.int32()), every), "")[0]
    raw = pa.py_buffer(a2b_base64(joined.as_buffer(), strict_mode=True))
    eight = pc.binary_slice(pa.Array.from_buffers(pa.binary(9), len(texts), [None, raw]), 1, 9)
    big_endian = array("q", eight.buffers()[1].to_pybytes()[: 8 * len(texts)])
    if sys.byteorder == "little":
        big_endian.byteswap()
    wide = pa.Array.from_buffers(pa.int64(), len(texts), [None, pa.py_buffer(big_endian)])
    free = pc.subtract(64, pc.multiply(6, length))  # bits before the integer's own
    top = pc.shift_left(wide, free)
    return pc.shift_right(top, pc.add(free, pc.multiply(8, padding)))


def days(values: pa.Array, *, least: int, most: int) -> pa.Array | None:
    """Days since 1970, within a range."""
    return values.view(pa.date32()) if within(values, least, most) else None


_DAYS = tuple((end - date(1970, 1, 1)).days for end in (date.min, date.max))
"""Range of Python's dates, in days since 1970."""


def dates_from_text(values: pa.Array) -> pa.Array | None:
    """`yyyy-mm-dd`, with a `Z` or without."""
    if not all_match(values, _DATE):
        return None
    try:
        dates = pc.utf8_rtrim(values, "Z").cast(pa.date32())
    except pa.ArrowException:
        return None
    return dates if within(dates.view(pa.int32()), *_DAYS) else None


def micros(
    values: pa.Array, *, units_per_second: int, least: int, most: int, with_zone: bool = False
) -> pa.Array | None:
    """Units since 1970, within a range of microseconds: a time on a clock without zone, or an instant."""
    try:
        if units_per_second <= _MICROS_PER_SECOND:
            numbers = pc.multiply_checked(values, _MICROS_PER_SECOND // units_per_second)
        else:
            each = units_per_second // _MICROS_PER_SECOND
            numbers = pc.divide(values, each)
            if pc.any(pc.not_equal(pc.multiply(numbers, each), values)).as_py():
                return None
    except pa.ArrowException:
        return None
    dtype = pa.timestamp("us", tz="UTC") if with_zone else pa.timestamp("us")
    return numbers.view(dtype) if within(numbers, least, most) else None


def timestamps_from_text(
    values: pa.Array, *, least: int, most: int, with_zone: bool, zone: str | None
) -> pa.Array | None:
    """ISO 8601 to the microsecond, in the usual spelling; see `times.timestamp_from_text`."""
    clock, moment = pa.timestamp("us"), pa.timestamp("us", tz="UTC")
    try:
        if not with_zone and all_match(values, f"{_CLOCK}Z?$"):
            read = pc.utf8_rtrim(values, "Z").cast(clock)
        elif with_zone and all_match(values, f"{_CLOCK}{_ZONE}$"):
            read = values.cast(moment)
        elif with_zone and zone is not None and all_match(values, f"{_CLOCK}$"):
            read = pc.assume_timezone(values.cast(clock), zone, ambiguous="raise", nonexistent="raise").cast(moment)
        else:
            return None
    except pa.ArrowException:
        return None
    return read if within(read.view(pa.int64()), least, most) else None


def all_match(values: pa.Array, pattern: str) -> bool:
    """Whether all texts other than NULL match."""
    return pc.all(pc.match_substring_regex(values, pattern)).as_py() is not False


def within(values: pa.Array, least: Any, most: Any, *, are_in: bool = True) -> bool:
    """Whether all values other than NULL are in a range, which includes its ends if `are_in`."""
    ends = pc.min_max(values)
    low, high = ends["min"].as_py(), ends["max"].as_py()
    if low is None:
        return True
    return bool(least <= low and high <= most) if are_in else bool(least < low and high < most)
