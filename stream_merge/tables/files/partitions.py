"""Partition values: texts in the log, typed in rows (Delta protocol, "Partition Value Serialization")."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.types import BooleanType, DataType, DateType, StringType, StructType

from stream_merge.model.snapshot import name_in_files
from stream_merge.shapes.arrow_order import holds_null_of_partitions
from stream_merge.spark.versions import arrow_type


def typed(text: str | None, dtype: DataType) -> pa.Scalar:
    """A partition value of the log in the table's type; an empty text is NULL."""
    wanted = arrow_type(dtype)
    if text is None or text == "":
        return pa.scalar(None, wanted)
    if isinstance(dtype, BooleanType):
        if text not in ("true", "false"):
            msg = f"partition value {text!r} is not a boolean"
            raise ValueError(msg)
        return pa.scalar(text == "true", wanted)
    if isinstance(dtype, DateType):
        return pa.scalar(_days(text), pa.int32()).cast(wanted)
    if isinstance(dtype, StringType):
        return pa.scalar(text, wanted)
    if _WHOLE.fullmatch(text) is None:
        msg = f"partition value {text!r} is not a whole number"
        raise ValueError(msg)
    return pa.scalar(int(text), wanted)


def spelled(value: Any) -> str | None:
    """A partition value as the log spells it."""
    if value is None:
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, datetime.date):
        return value.isoformat()
    return str(value) or None


_WHOLE = re.compile(r"[+-]?[0-9]+")
"""Python's `int` accepts more."""

_DATE = re.compile(r"([+-]?\d{4,})-(\d\d)-(\d\d)", re.ASCII)
_EPOCH = datetime.date(1970, 1, 1)
_CYCLE_YEARS, _CYCLE_DAYS = 400, 146_097
"""The calendar repeats; Python has no year beyond 9999, Spark writes `+12000-02-29`."""


def _days(text: str) -> int:
    """Days since 1970 of a date in Spark's spelling."""
    match = _DATE.fullmatch(text)
    if match is None:
        msg = f"partition value {text!r} is not a date"
        raise ValueError(msg)
    cycles, year = divmod(int(match[1]) - 2000, _CYCLE_YEARS)
    day = datetime.date(2000 + year, int(match[2]), int(match[3]))
    return (day - _EPOCH).days + cycles * _CYCLE_DAYS


def _texts(values: pa.ChunkedArray) -> list[str | None]:
    if not pa.types.is_date32(values.type):
        return [spelled(value) for value in values.to_pylist()]
    return [None if days is None else _spelled_date(days) for days in values.cast(pa.int32()).to_pylist()]


def _spelled_date(days: int) -> str:
    cycles, day = divmod(days, _CYCLE_DAYS)
    within = _EPOCH + datetime.timedelta(days=day)
    year = within.year + cycles * _CYCLE_YEARS
    sign = "+" if year > datetime.MAXYEAR else "-" if year < 0 else ""
    return f"{sign}{abs(year):04}-{within:%m-%d}"


def split(
    rows: pa.Table, schema: StructType, partition_columns: Sequence[str]
) -> Iterator[tuple[Mapping[str, str | None], pa.Table]]:
    """Rows by their partition: `partitionValues` (under the names that files have), and the rows without them."""
    if not rows.num_rows:
        return
    if not partition_columns:
        yield {}, rows
        return
    fields = [field for field in schema.fields if field.name in partition_columns]
    texts = [_texts(rows[field.name]) for field in fields]
    numbers: dict[tuple[str | None, ...], list[int]] = {}
    for number, values in enumerate(zip(*texts, strict=True)):
        numbers.setdefault(values, []).append(number)
    others = rows.drop_columns(list(partition_columns))
    for values, of_partition in numbers.items():
        taken = others if len(numbers) == 1 else others.take(pa.array(of_partition, pa.int64()))
        yield {name_in_files(field): value for field, value in zip(fields, values, strict=True)}, taken


def holds_odd_text(rows: pa.Table, partition_columns: Sequence[str]) -> str | None:
    """A partition column with a text that Spark would store as NULL or spell differently; None where there is none."""
    for name in partition_columns:
        values = rows[name]
        if pa.types.is_string(values.type) and holds_null_of_partitions(values):
            return name
    return None
