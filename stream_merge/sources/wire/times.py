"""Encodings of dates and times in JSON and text, with the Delta types that hold them exactly."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from functools import partial
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
from pyspark.sql import types as T

from stream_merge.sources.wire import many as M
from stream_merge.sources.wire.encodings import Encoding, refuse, scalar, shown
from stream_merge.sources.wire.strict_json import UndecodableError

_EPOCH = datetime(1970, 1, 1)
_LEAST_MICROS = (datetime.min - _EPOCH) // timedelta(microseconds=1)
_MOST_MICROS = (datetime.max - _EPOCH) // timedelta(microseconds=1)
"""Years 1 to 9999: Spark and Arrow's readers agree on them."""
_DAY_MICROS = 86_400_000_000
_CLOCK_MICROS = 839 * 3_600_000_000
"""More than any TIME of MariaDB 10 and MySQL 8."""


def date_from_days() -> Encoding:
    """Days since 1970-01-01."""

    def one(value: int) -> int:
        if not _LEAST_MICROS <= value * _DAY_MICROS <= _MOST_MICROS:
            refuse(f"{value} days since 1970 is not within the years 1 to 9999")
        return value

    many = partial(M.days, least=-(-_LEAST_MICROS // _DAY_MICROS), most=_MOST_MICROS // _DAY_MICROS)
    return scalar(T.DateType(), pa.date32(), one, int, wire=pa.int32(), many=many)


def date_from_text() -> Encoding:
    """ISO 8601, `2026-11-21`; also `2026-1-5`, and with Debezium's `Z` at the end."""

    def one(value: str) -> date:
        text = value.strip().removesuffix("Z")
        parts = _DATE.fullmatch(text)
        try:
            return date(*map(int, parts.groups())) if parts else date.fromisoformat(text)
        except (ValueError, OverflowError):
            msg = f"{shown(value)} is not a date"
            raise UndecodableError(msg) from None

    return scalar(T.DateType(), pa.date32(), one, str, wire=pa.string(), many=M.dates_from_text)


def timestamp_from_units(units_per_second: int, *, with_zone: bool = False) -> Encoding:
    """Units since 1970-01-01 00:00 (milli-, micro- or nanoseconds): a time on a clock without zone, or an instant."""

    def one(value: int) -> int:
        micros, rest = divmod(value * 1_000_000, units_per_second)
        if rest:
            refuse(f"{value} nanoseconds is not a whole number of microseconds")
        return _within(micros, value)

    many = partial(
        M.micros, units_per_second=units_per_second, least=_LEAST_MICROS, most=_MOST_MICROS, with_zone=with_zone
    )
    if with_zone:
        return scalar(T.TimestampType(), pa.timestamp("us", tz="UTC"), one, int, wire=pa.int64(), many=many)
    return scalar(T.TimestampNTZType(), pa.timestamp("us"), one, int, wire=pa.int64(), many=many)


def timestamp_from_text(*, with_zone: bool, zone: str | None = None) -> Encoding:
    """ISO 8601, with a space or a `T` before the time.

    A TIMESTAMP (Debezium's ZonedTimestamp) without zone is in `zone`, or refused; a TIMESTAMP_NTZ (Debezium's
    IsoTimestamp) may end with `Z`.
    """
    dtype: T.DataType = T.TimestampType() if with_zone else T.TimestampNTZType()
    kind = "a time without zone" if not with_zone else "a time with zone" if zone is None else "a time"

    def one(value: str) -> int:
        parts = _TIME.fullmatch(value.strip())
        written = None if parts is None else parts["zone"]
        is_moment = written is not None or zone is not None
        if parts is None or (not is_moment if with_zone else written not in (None, "Z")):
            refuse(f"{shown(value)} is not {kind}")
        fraction = (parts["fraction"] or "").ljust(6, "0")
        if fraction[6:].strip("0"):
            refuse(f"{shown(value)} is not a whole number of microseconds")
        try:
            year, month, day, hour, minute, second = (int(parts[name] or 0) for name in _PARTS)
            clock = datetime(year, month, day, hour, minute, second, int(fraction[:6]))
            if with_zone:
                clock = clock - _shift(parts) if written is not None else _in_utc(clock, zone or "", value)
        except (ValueError, OverflowError) as err:
            if isinstance(err, UndecodableError):
                raise
            msg = f"{shown(value)} is not a time within the years 1 to 9999"
            raise UndecodableError(msg) from None
        return (clock - _EPOCH) // timedelta(microseconds=1)

    arrow = pa.timestamp("us", tz="UTC") if with_zone else pa.timestamp("us")
    many = partial(M.timestamps_from_text, least=_LEAST_MICROS, most=_MOST_MICROS, with_zone=with_zone, zone=zone)
    return scalar(dtype, arrow, one, str, wire=pa.string(), many=many)


_DATE = re.compile(r"([0-9]{4,})-([0-9]{1,2})-([0-9]{1,2})")
_TIME = re.compile(
    r"(?P<year>[0-9]{4,})-(?P<month>[0-9]{1,2})-(?P<day>[0-9]{1,2})"
    r"(?:[T ](?P<hour>[0-9]{1,2}):(?P<minute>[0-9]{1,2})(?::(?P<second>[0-9]{1,2})(?:\.(?P<fraction>[0-9]{1,9}))?)?"
    r"(?: ?(?P<zone>Z|UTC|(?P<sign>[+-])(?P<hours>[0-9]{1,2})(?::?(?P<minutes>[0-9]{2})(?::?(?P<seconds>[0-9]{2}))?)?"
    r"))?)?"
)
_PARTS = ("year", "month", "day", "hour", "minute", "second")


def _shift(parts: re.Match[str]) -> timedelta:
    """Offset of a text's zone from UTC."""
    hours, minutes, seconds = (int(parts[name] or 0) for name in ("hours", "minutes", "seconds"))
    ahead = timedelta(hours=hours, minutes=minutes, seconds=seconds)
    if ahead > timedelta(hours=18):
        refuse(f"{parts['zone']!r} is not a zone")
    return -ahead if parts["sign"] == "-" else ahead


def _in_utc(clock: datetime, zone: str, text: str) -> datetime:
    """A local time of a zone in UTC, without zone."""
    local = _zone(zone)
    if local is None:
        refuse(f"{shown(text)} has no zone, and that of the session ({zone}) is not known here")
    moments = {clock.replace(tzinfo=local, fold=fold).astimezone(UTC) for fold in (0, 1)}
    showing = [moment for moment in moments if moment.astimezone(local).replace(tzinfo=None) == clock]
    if len(showing) != 1:
        refuse(f"{shown(text)} has no zone, and clocks in {zone} show it {'twice' if showing else 'never'}")
    return showing[0].replace(tzinfo=None)


def _zone(name: str) -> tzinfo | None:
    offset = re.fullmatch(r"([+-])(\d{1,2}):(\d\d)", name)
    if offset:
        ahead = timedelta(hours=int(offset[2]), minutes=int(offset[3]))
        return timezone(-ahead if offset[1] == "-" else ahead)
    try:
        return UTC if name in ("UTC", "Z", "GMT", "Etc/UTC") else ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        return None


def clock_time(units_per_second: int) -> Encoding:
    """Units since midnight as text `hh:mm:ss[.ffffff]`; MySQL's TIME goes from -838:59:59 to 838:59:59.999999."""

    def one(value: int) -> str:
        micros, rest = divmod(value * 1_000_000, units_per_second)
        if rest or abs(micros) >= _CLOCK_MICROS:
            refuse(f"{value} is not a time of less than 839 hours in whole microseconds")
        return clock_text(micros)

    return scalar(T.StringType(), pa.string(), one, int, wire=pa.int64())


def clock_text(micros: int) -> str:
    """Microseconds since midnight as `[-]hh:mm:ss[.ffffff]`, without trailing zeros."""
    seconds, fraction = divmod(abs(micros), 1_000_000)
    text = f"{'-' if micros < 0 else ''}{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    return f"{text}.{fraction:06}".rstrip("0") if fraction else text


def _within(micros: int, value: Any) -> int:
    if not _LEAST_MICROS <= micros <= _MOST_MICROS:
        refuse(f"{shown(value)} is not a time within the years 1 to 9999")
    return micros
