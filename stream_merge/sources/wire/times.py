"""How dates and times are written in JSON, and the Delta types that hold them exactly."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pyarrow as pa
from pyspark.sql import types as T

from stream_merge.sources.wire import many as M
from stream_merge.sources.wire.encodings import Encoding, refuse, scalar, shown
from stream_merge.sources.wire.strict_json import UndecodableError

_EPOCH = datetime(1970, 1, 1)
_LEAST_MICROS = (datetime.min - _EPOCH) // timedelta(microseconds=1)
_MOST_MICROS = (datetime.max - _EPOCH) // timedelta(microseconds=1)
"""Years 1 to 9999: what both Spark and Arrow's readers agree on."""
_DAY_MICROS = 86_400_000_000


def date_of_days() -> Encoding:
    """Days since 1970-01-01."""

    def one(value: int) -> int:
        if not _LEAST_MICROS <= value * _DAY_MICROS <= _MOST_MICROS:
            refuse(f"{value} days since 1970 is not within the years 1 to 9999")
        return value

    many = M.days(-(-_LEAST_MICROS // _DAY_MICROS), _MOST_MICROS // _DAY_MICROS)
    return scalar(T.DateType(), pa.date32(), one, int, wire=pa.int32(), many=many)


def date_of_text() -> Encoding:
    """ISO 8601, `2026-11-21`, also with Debezium's `Z` behind it."""

    def one(value: str) -> date:
        try:
            return date.fromisoformat(value.removesuffix("Z"))
        except ValueError:
            msg = f"{shown(value)} is not a date"
            raise UndecodableError(msg) from None

    return scalar(T.DateType(), pa.date32(), one, str, wire=pa.string(), many=M.dates_of_text)


def timestamp_of(units_per_second: int) -> Encoding:
    """Units since 1970-01-01 00:00 on a clock without zone (milli-, micro- or nanoseconds)."""

    def one(value: int) -> int:
        micros, rest = divmod(value * 1_000_000, units_per_second)
        if rest:
            refuse(f"{value} nanoseconds is not a whole number of microseconds")
        return _within(micros, value)

    many = M.micros(units_per_second, _LEAST_MICROS, _MOST_MICROS)
    return scalar(T.TimestampNTZType(), pa.timestamp("us"), one, int, wire=pa.int64(), many=many)


_ISO = re.compile(
    r"(?P<date>\d{4,}-\d\d-\d\d)[T ](?P<time>\d\d:\d\d(?::\d\d(?:\.(?P<fraction>\d{1,9}))?)?)"
    r"(?P<zone>Z|[+-]\d\d:?\d\d(?::\d\d)?)?"
)


def timestamp_of_text(*, with_zone: bool) -> Encoding:
    """ISO 8601; with a zone (Debezium's ZonedTimestamp) a moment, without one a reading of a clock."""
    dtype: T.DataType = T.TimestampType() if with_zone else T.TimestampNTZType()

    def one(value: str) -> int:
        found = _ISO.fullmatch(value)
        zone = found["zone"] if found else None
        # Debezium's IsoTimestamp puts a Z behind readings of a clock, which says nothing there.
        if found is None or (with_zone and zone is None) or (not with_zone and zone not in (None, "Z")):
            kind = "a time with zone" if with_zone else "a time without zone"
            refuse(f"{shown(value)} is not {kind}")
        fraction = (found["fraction"] or "").ljust(6, "0")
        if fraction[6:].strip("0"):
            refuse(f"{value!r} is not a whole number of microseconds")
        whole = f"{found['date']}T{found['time'].partition('.')[0]}"
        try:
            moment = datetime.fromisoformat(whole + (zone or "") if with_zone else whole)
            if with_zone:
                moment = moment.astimezone(UTC).replace(tzinfo=None)
        except (ValueError, OverflowError):
            msg = f"{shown(value)} is not a time within the years 1 to 9999"
            raise UndecodableError(msg) from None
        return (moment - _EPOCH) // timedelta(microseconds=1) + int(fraction[:6])

    arrow = pa.timestamp("us", tz="UTC") if with_zone else pa.timestamp("us")
    many = M.moments_of_text(_LEAST_MICROS, _MOST_MICROS, with_zone=with_zone)
    return scalar(dtype, arrow, one, str, wire=pa.string(), many=many)


def clock_time(units_per_second: int) -> Encoding:
    """Units since midnight as text `hh:mm:ss[.ffffff]`, the same whatever the unit; up to 24:00:00."""

    def one(value: int) -> str:
        micros, rest = divmod(value * 1_000_000, units_per_second)
        if rest or not 0 <= micros <= _DAY_MICROS:
            refuse(f"{value} is not a time of day in whole microseconds")
        return clock_text(micros)

    return scalar(T.StringType(), pa.string(), one, int, wire=pa.int64())


def clock_text(micros: int) -> str:
    """Microseconds since midnight as `hh:mm:ss[.ffffff]`, without zeros behind the last digit."""
    seconds, fraction = divmod(micros, 1_000_000)
    text = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    return f"{text}.{fraction:06}".rstrip("0") if fraction else text


def _within(micros: int, value: Any) -> int:
    if not _LEAST_MICROS <= micros <= _MOST_MICROS:
        refuse(f"{shown(value)} is not a time within the years 1 to 9999")
    return micros
