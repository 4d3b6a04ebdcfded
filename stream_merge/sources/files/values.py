"""How a column of a Spark type is written in a JSON line and in a CSV field, and read exactly or refused.

The rules are those of topics (`sources.wire.encodings`); what only files have is here: times without a zone, dates with
one digit, any JSON value as text, and numbers that are text.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from decimal import Decimal, InvalidOperation
from typing import Any, TypeVar
from zoneinfo import ZoneInfo

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T

from stream_merge.sources.wire import encodings as E
from stream_merge.sources.wire import many as M
from stream_merge.sources.wire.encodings import Encoding, json_text, refuse, scalar, shown
from stream_merge.sources.wire.strict_json import UndecodableError

_R = TypeVar("_R")

_BITS: dict[type[T.DataType], int] = {T.ByteType: 8, T.ShortType: 16, T.IntegerType: 32, T.LongType: 64}
_FLOAT_BITS: dict[type[T.DataType], int] = {T.FloatType: 32, T.DoubleType: 64}
_EPOCH = datetime(1970, 1, 1)
_MICRO = timedelta(microseconds=1)
_LEAST, _MOST = (datetime.min - _EPOCH) // _MICRO, (datetime.max - _EPOCH) // _MICRO
"""Years 1 to 9999."""


def of_json(dtype: T.DataType, zone: str) -> Encoding:
    """How a JSON value of that type is written: numbers as numbers, dates and times as text, bytes as base64.

    Args:
        dtype: of the column.
        zone: time zone of the session; a TIMESTAMP without zone is a reading of a clock there.

    Raises:
        UndecodableError: JSON has no way to write such a value.
    """
    match dtype:
        case T.ArrayType():
            return E.array_of(of_json(dtype.elementType, zone))
        case T.MapType(keyType=T.StringType()):
            return E.map_of(of_json(dtype.valueType, zone))
        case T.StructType():
            if len(set(dtype.names)) < len(dtype.names):
                refuse(f"{dtype.simpleString()} has a field twice")
            return E.struct_of({field.name: of_json(field.dataType, zone) for field in dtype.fields})
        case T.DecimalType():
            return E.decimal_of_text(dtype.precision, dtype.scale)
        case _:
            return _JSON[type(dtype)]() if type(dtype) in _JSON else _time(dtype, zone, "a line of JSON")


def of_csv(dtype: T.DataType, zone: str, *, keeps_spelling: bool = False) -> Encoding:
    """How a CSV field of that type is written; as `of_json`.

    Args:
        dtype: of the column.
        zone: as for `of_json`.
        keeps_spelling: nobody has said that it is a number, so one that would be stored otherwise is refused.
    """
    if keeps_spelling and isinstance(dtype, T.NumericType):
        return _as_spelled(of_csv(dtype, zone))
    if isinstance(dtype, T.DecimalType):
        exact = E.decimal_of_text(dtype.precision, dtype.scale)
        return _from_text(exact, lambda text: exact.one(_number(text)), _decimals(dtype))
    return _CSV[type(dtype)]() if type(dtype) in _CSV else _time(dtype, zone, "a field of CSV")


def _from_text(inner: Encoding, one: Callable[[str], Any], many: M.Many) -> Encoding:
    """Spaces around a value that is no text say nothing."""

    def all_at_once(texts: pa.Array) -> pa.Array | None:
        return many(pc.ascii_trim_whitespace(texts))

    return scalar(inner.dtype, inner.arrow, lambda text: one(text.strip()), str, wire=pa.string(), many=all_at_once)


RESPELLED = r"^\s*([+]|-?0[0-9])"
"""Numbers that lose something as such: 007, and +49."""


def _as_spelled(inner: Encoding) -> Encoding:
    def one(text: str) -> Any:
        if re.match(RESPELLED, text):
            refuse(
                f"{shown(text)} would be stored as a number, without its {'plus' if '+' in text else 'zeros'}, though"
                " only earlier files say that the column is one; pass --schema with the column's type"
            )
        return inner.one(text)

    def many(texts: pa.Array) -> pa.Array | None:
        found = pc.any(pc.match_substring_regex(texts, RESPELLED)).as_py()
        return None if found or inner.many is None else inner.many(texts)

    return scalar(inner.dtype, inner.arrow, one, str, wire=pa.string(), many=many)


def _csv_integer(bits: int) -> Encoding:
    inner = E.integer(bits)
    return _from_text(inner, lambda text: inner.one(_integer(text)), _integers(inner.arrow))


def _csv_floating(bits: int) -> Encoding:
    inner = E.floating(bits)
    return _from_text(inner, lambda text: inner.one(_floating(text)), _floats(inner))


def _csv_binary() -> Encoding:
    """The field's own bytes."""
    return scalar(T.BinaryType(), pa.binary(), str.encode, str, wire=pa.string(), many=lambda t: t.cast(pa.binary()))


def _json_text() -> Encoding:
    """A JSON string; any other value as its JSON text, numbers with all their digits."""

    def one(value: Any) -> str:
        return value if isinstance(value, str) else json_text(value)

    kinds = (str, int, float, Decimal, bool, list, dict)
    return scalar(T.StringType(), pa.string(), one, *kinds, wire=pa.string(), many=M.as_they_are)


# -- numbers in text ---------------------------------------------------------------------------

_INTEGER = re.compile(r"[+-]?[0-9]{1,4000}")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,5})?")
_NOT_NUMBERS = {"nan": "NaN", "inf": "Infinity", "infinity": "Infinity"}
_BOOLEANS = {
    **dict.fromkeys(("t", "true", "y", "yes", "1"), True),
    **dict.fromkeys(("f", "false", "n", "no", "0"), False),
}


def _boolean(text: str) -> bool:
    found = _BOOLEANS.get(text.lower())
    return found if found is not None else refuse(f"{shown(text)} is not a boolean")


def _booleans(texts: pa.Array) -> pa.Array | None:
    lower = pc.ascii_lower(texts)
    found = pc.is_in(lower, value_set=pa.array([name for name, value in _BOOLEANS.items() if value]))
    known = pc.is_in(lower, value_set=pa.array([*_BOOLEANS, None]))
    return pc.if_else(texts.is_valid(), found, pa.scalar(None, pa.bool_())) if pc.all(known).as_py() else None


def _integer(text: str) -> int:
    return int(text) if _INTEGER.fullmatch(text) else refuse(f"{shown(text)} is not an integer")


def _integers(dtype: pa.DataType) -> M.Many:
    def many(texts: pa.Array) -> pa.Array | None:
        return _cast(texts, dtype) if M.all_match(texts, "^-?[0-9]{1,19}$") else None

    return many


def _number(text: str) -> Decimal:
    try:
        return Decimal(text) if _NUMBER.fullmatch(text) else refuse(f"{shown(text)} is not a number")
    except InvalidOperation:
        refuse(f"{shown(text)} is not a number")


def _decimals(dtype: T.DecimalType) -> M.Many:
    whole, scale = dtype.precision - dtype.scale, dtype.scale
    behind = rf"(\.[0-9]{{1,{scale}}})?" if scale else ""

    def many(texts: pa.Array) -> pa.Array | None:
        if not whole or not M.all_match(texts, f"^-?[0-9]{{1,{whole}}}{behind}$"):
            return None
        return _cast(texts, pa.decimal128(dtype.precision, scale))

    return many


def _floating(text: str) -> int | Decimal | str:
    name = _NOT_NUMBERS.get(text.lstrip("+-").lower())
    if name is not None:
        return f"-{name}" if text.startswith("-") and name != "NaN" else name
    return int(text) if _INTEGER.fullmatch(text) else _number(text)


def _floats(inner: Encoding) -> M.Many:
    def many(texts: pa.Array) -> pa.Array | None:
        if not M.all_match(texts, r"^-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]{1,5})?$"):
            return None
        found = _cast(texts, pa.float64())
        return None if found is None or inner.many is None else inner.many(found)

    return many


def _cast(texts: pa.Array, dtype: pa.DataType) -> pa.Array | None:
    try:
        return texts.cast(dtype)
    except pa.ArrowException:
        return None


# -- dates and times ---------------------------------------------------------------------------

_DATE = r"(?P<year>[0-9]{4})-(?P<month>[0-9]{1,2})-(?P<day>[0-9]{1,2})"
_CLOCK = r"(?P<hour>[0-9]{1,2}):(?P<minute>[0-9]{1,2})(?::(?P<second>[0-9]{1,2})(?:\.(?P<fraction>[0-9]{1,9}))?)?"
_ZONE = r"(?P<zone>Z|UTC|(?P<sign>[+-])(?P<hours>[0-9]{1,2})(?::?(?P<minutes>[0-9]{2})(?::?(?P<seconds>[0-9]{2}))?)?)"
_ONLY_DATE = re.compile(f"{_DATE}Z?")
_TIME = re.compile(f"{_DATE}(?:[T ]{_CLOCK}(?: ?{_ZONE})?)?")
_PARTS = ("year", "month", "day", "hour", "minute", "second")
_WELL_WRITTEN = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?"
_OFFSET = r"(Z|[+-](0[0-9]|1[0-4])(:?[0-5][0-9])?)"


def _time(dtype: T.DataType, zone: str, where: str) -> Encoding:
    match dtype:
        case T.DateType():
            return scalar(dtype, pa.date32(), _date, str, wire=pa.string(), many=M.dates_of_text)
        case T.TimestampType():
            one, many = _moment(zone), _moments(zone)
            return scalar(dtype, pa.timestamp("us", tz="UTC"), one, str, wire=pa.string(), many=many)
        case T.TimestampNTZType():
            return scalar(dtype, pa.timestamp("us"), _reading, str, wire=pa.string(), many=_readings)
        case _:
            refuse(f"{where} holds no {dtype.simpleString()}")


def _date(text: str) -> date:
    found = _ONLY_DATE.fullmatch(text.strip())
    if found is None:
        refuse(f"{shown(text)} is not a date")
    return _existing(lambda: date(*(int(found[part]) for part in ("year", "month", "day"))), text)


def _reading(text: str) -> int:
    """What a clock without zone shows; a `Z` behind it says nothing."""
    clock, zone = _parsed(text)
    if zone not in (None, "Z"):
        refuse(f"{shown(text)} is not a time without zone")
    return (clock - _EPOCH) // _MICRO


def _readings(texts: pa.Array) -> pa.Array | None:
    if not M.all_match(texts, f"{_WELL_WRITTEN}Z?$"):
        return None
    return _within(_cast(pc.utf8_rtrim(texts, "Z"), pa.timestamp("us")))


def _moment(zone: str) -> Callable[[str], int]:
    def one(text: str) -> int:
        clock, offset = _parsed(text)
        if offset is None:
            return (_there(clock, zone, text) - _EPOCH) // _MICRO
        found = _TIME.fullmatch(text.strip())
        shift = _shift(found) if found is not None else timedelta()
        return _existing(lambda: (clock - shift) - _EPOCH, text) // _MICRO

    return one


def _moments(zone: str) -> M.Many:
    utc = pa.timestamp("us", tz="UTC")

    def many(texts: pa.Array) -> pa.Array | None:
        if M.all_match(texts, f"{_WELL_WRITTEN}{_OFFSET}$"):
            return _within(_cast(texts, utc))
        if not M.all_match(texts, f"{_WELL_WRITTEN}$"):
            return None
        clocks = _cast(texts, pa.timestamp("us"))
        if clocks is None:
            return None
        try:
            return _within(pc.assume_timezone(clocks, zone, ambiguous="raise", nonexistent="raise").cast(utc))
        except pa.ArrowException:
            return None

    return many


def _parsed(text: str) -> tuple[datetime, str | None]:
    """What the clock shows, and the zone that is written behind it."""
    found = _TIME.fullmatch(text.strip())
    if found is None:
        refuse(f"{shown(text)} is not a time")
    fraction = (found["fraction"] or "").ljust(6, "0")
    if fraction[6:].strip("0"):
        refuse(f"{shown(text)} is not a whole number of microseconds")
    year, month, day, hour, minute, second = (int(found[part] or 0) for part in _PARTS)
    micros = int(fraction[:6])
    return _existing(lambda: datetime(year, month, day, hour, minute, second, micros), text), found["zone"]


def _shift(found: re.Match[str]) -> timedelta:
    hours, minutes, seconds = (int(found[part] or 0) for part in ("hours", "minutes", "seconds"))
    ahead = timedelta(hours=hours, minutes=minutes, seconds=seconds)
    if ahead > timedelta(hours=18):
        refuse(f"{found['zone']!r} is not a zone")
    return -ahead if found["sign"] == "-" else ahead


def _there(clock: datetime, zone: str, text: str) -> datetime:
    """The moment at which a clock of that zone shows this; in UTC, without zone."""
    there = _zone(zone)
    if there is None:
        refuse(f"{shown(text)} has no zone, and that of the session ({zone}) is not known here")
    moments = _existing(lambda: {_in_utc(clock, there, fold) for fold in (0, 1)}, text)
    showing = [moment for moment in moments if _shown_at(moment, there) == clock]
    if len(showing) != 1:
        refuse(f"{shown(text)} has no zone, and clocks in {zone} show it {'twice' if showing else 'never'}")
    return showing[0]


def _shown_at(moment: datetime, there: tzinfo) -> datetime:
    return moment.replace(tzinfo=UTC).astimezone(there).replace(tzinfo=None)


def _in_utc(clock: datetime, there: tzinfo, fold: int) -> datetime:
    return clock.replace(tzinfo=there, fold=fold).astimezone(UTC).replace(tzinfo=None)


def _zone(name: str) -> tzinfo | None:
    offset = re.fullmatch(r"([+-])(\d{1,2}):(\d\d)", name)
    if offset:
        ahead = timedelta(hours=int(offset[2]), minutes=int(offset[3]))
        return timezone(-ahead if offset[1] == "-" else ahead)
    try:
        return UTC if name in ("UTC", "Z", "GMT", "Etc/UTC") else ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        return None


def _existing(make: Callable[[], _R], text: str) -> _R:
    try:
        return make()
    except (ValueError, OverflowError):
        msg = f"{shown(text)} is not a date or time within the years 1 to 9999"
        raise UndecodableError(msg) from None


def _within(moments: pa.Array | None) -> pa.Array | None:
    if moments is None:
        return None
    return moments if M.within(moments.view(pa.int64()), _LEAST, _MOST) else None


_JSON: dict[type[T.DataType], Callable[[], Encoding]] = {
    T.BooleanType: E.boolean,
    **{dtype: functools.partial(E.integer, bits) for dtype, bits in _BITS.items()},
    **{dtype: functools.partial(E.floating, bits) for dtype, bits in _FLOAT_BITS.items()},
    T.StringType: _json_text,
    T.BinaryType: E.binary,
}
_CSV: dict[type[T.DataType], Callable[[], Encoding]] = {
    T.BooleanType: lambda: _from_text(E.boolean(), _boolean, _booleans),
    **{dtype: functools.partial(_csv_integer, bits) for dtype, bits in _BITS.items()},
    **{dtype: functools.partial(_csv_floating, bits) for dtype, bits in _FLOAT_BITS.items()},
    T.StringType: E.string,
    T.BinaryType: _csv_binary,
}
