"""Footers of data files: row counts, widths, and whether the driver reads them as Spark does."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.types import (
    ArrayType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from stream_merge.model.snapshot import name_in_files
from stream_merge.spark.versions import arrow_type

_MOST_KNOWN = 100_000
GLOB = re.compile(r"[*?\[{]")
"""Patterns of DuckDB in the path of a file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Footer:
    """What the driver needs to know of a file before it reads rows."""

    rows: int
    row_bytes: float
    """Average bytes of a row, encoded but not compressed."""
    types: Types
    problem: str | None
    """Why its values cannot be read as Spark reads them."""


class Footers:
    """The footers of a table's files; they never change, so each is read once."""

    def __init__(
        self, opened: Callable[[str], Path | pa.NativeFile], schema: StructType, partition_columns: Sequence[str]
    ) -> None:
        self._opened = opened
        self._fields = [field for field in schema.fields if field.name not in partition_columns]
        self._has_times = has_times(schema)
        self._known: dict[tuple[str, int], Footer] = {}
        self._types: dict[Types, Types] = {}

    def read(self, files: Iterable[tuple[str, int]], *, at_once: int) -> None:
        """Read the footers that are not cached, several at once."""
        unknown = [file for file in files if file not in self._known]
        if at_once > 1 and len(unknown) > 1:
            with ThreadPoolExecutor(min(at_once, len(unknown))) as threads:
                list(threads.map(self.footer, *zip(*unknown, strict=True)))

    def footer(self, path: str, size: int) -> Footer:
        """The footer of a file by its decoded path and its size in bytes."""
        footer = self._known.get((path, size))
        if footer is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            footer = self._known[path, size] = self._read(path)
        return footer

    def _read(self, path: str) -> Footer:
        with pq.ParquetFile(self._opened(path), coerce_int96_timestamp_unit="us") as file:
            if GLOB.search(path):
                odd = f"file {path!r} has a name that stands for others, too"
                return Footer(rows=0, row_bytes=0, types=(), problem=odd)
            columns = columns_of_file(file)
            old = self._has_times and counts_days_otherwise(file.metadata.metadata or {})
            problem = "has dates or times in the calendar of Spark 2" if old else columns.problem(self._fields)
            groups = (file.metadata.row_group(i) for i in range(file.num_row_groups))
            return Footer(
                rows=file.metadata.num_rows,
                row_bytes=sum(group.total_byte_size for group in groups) / max(file.metadata.num_rows, 1),
                types=self._types.setdefault(columns.types, columns.types),  # one copy for all files that a writer made
                problem=None if problem is None else f"file {path!r} {problem}",
            )


_LEGACY_KEYS = (b"org.apache.spark.legacyINT96", b"org.apache.spark.legacyDateTime")
_SPARK_VERSION = b"org.apache.spark.version"
_FIRST_WITHOUT_LEGACY = (3, 1)


def inner_types(dtype: DataType) -> list[DataType]:
    """The types directly inside a struct, array or map."""
    if isinstance(dtype, ArrayType):
        return [dtype.elementType]
    if isinstance(dtype, MapType):
        return [dtype.keyType, dtype.valueType]
    return [field.dataType for field in dtype.fields] if isinstance(dtype, StructType) else []


def has_times(dtype: DataType) -> bool:
    """Whether a date or a time is anywhere in a type."""
    return isinstance(dtype, DateType | TimestampType | TimestampNTZType) or any(map(has_times, inner_types(dtype)))


def counts_days_otherwise(metadata: Mapping[bytes, bytes]) -> bool:
    """Whether a file's metadata say that dates and times before 1900 are in the calendar of Spark 2."""
    if any(key in metadata for key in _LEGACY_KEYS):
        return True
    version = metadata.get(_SPARK_VERSION)
    return version is not None and tuple(map(int, version.decode().split(".")[:2])) < _FIRST_WITHOUT_LEGACY


_WIDER: Mapping[type[DataType], tuple[pa.DataType, ...]] = {
    ByteType: (),
    ShortType: (pa.int8(),),
    IntegerType: (pa.int8(), pa.int16()),
    LongType: (pa.int8(), pa.int16(), pa.int32()),
    FloatType: (),
    DoubleType: (pa.float32(),),
}
"""Types in a file of a column that was widened since (Delta's type widening), where nothing is lost."""
_INT96 = "INT96"
_OF_BYTES = frozenset({"BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY", _INT96})
_COMPARES_RIGHT = re.compile(r"parquet-mr version 1\.\d{2}|parquet-rs|parquet-cpp-arrow|DuckDB")
"""Writers whose bounds of bytes are those that readers use."""
_COMPARES_WITH_A_SIGN = re.compile(r"parquet-mr(?!-)( version [01]\.\d(?!\d)|$)|parquet-cpp version [01]\.[0-2](?!\d)")
"""Older ones: parquet-mr 1.9 (Spark 2.3, Hive 2) and before, parquet-cpp 1.2 and before."""

_LISTS = (
    pa.types.is_list,
    pa.types.is_large_list,
    pa.types.is_fixed_size_list,
    pa.types.is_list_view,
    pa.types.is_large_list_view,
)

Types: TypeAlias = tuple[tuple[str, pa.DataType], ...]
"""Columns of a file in order: name in the file, and Arrow's type; INT96 as microseconds without a zone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredColumns:
    """The columns of a file, as it stores them."""

    types: Types
    int96: frozenset[str]
    """Which columns hold INT96."""
    bounds_mislead: bool
    """Whether its bounds of texts or binary are not those that readers use."""

    def problem(self, fields: Sequence[StructField]) -> str | None:
        """Why these are not the columns of the file's table, as a clause; missing columns are not a problem."""
        types = dict(self.types)
        spelled = {name.lower(): name for name in types}
        if len(spelled) != len(self.types):
            return "holds two columns of one name"
        for field in fields:
            name = name_in_files(field)
            if spelled.get(name.lower(), name) != name:
                return f"holds column {field.name!r} as {spelled[name.lower()]!r}"  # to Spark they are the same
            if name in types and not is_readable(types[name], field.dataType, is_int96=name in self.int96):
                return f"holds column {field.name!r} as {types[name]}, not as {field.dataType.simpleString()}"
        return "has bounds of texts or binary that an old writer took in another order" if self.bounds_mislead else None


def columns_of_file(file: pq.ParquetFile) -> StoredColumns:
    """The columns of a file that was opened with `coerce_int96_timestamp_unit="us"`."""
    # A path says `a.b` of the column `a.b`, too: leaves are told apart by their number.
    names = [field.name for field in file.schema_arrow for _ in range(_leaves(field.type))]
    int96 = (name for i, name in enumerate(names) if file.schema.column(i).physical_type == _INT96)
    return StoredColumns(
        types=tuple((field.name, field.type) for field in file.schema_arrow),
        int96=frozenset(int96),
        bounds_mislead=_bounds_mislead(file.metadata),
    )


def _leaves(dtype: pa.DataType) -> int:
    """How many columns of Parquet a column of Arrow is."""
    if isinstance(dtype, pa.BaseExtensionType):
        return _leaves(dtype.storage_type)
    if pa.types.is_struct(dtype) or pa.types.is_map(dtype):
        inner = [dtype.key_type, dtype.item_type] if pa.types.is_map(dtype) else [field.type for field in dtype]
        return sum(map(_leaves, inner))
    return _leaves(dtype.value_type) if any(is_one(dtype) for is_one in _LISTS) else 1


def _bounds_mislead(metadata: pq.FileMetaData) -> bool:
    """Whether a reader that uses all bounds may skip row groups that have a value.

    Very old writers compared bytes with a sign, and wrote only bounds of texts that no reader may use since (Parquet's
    `Statistics.min` and `max`); DuckDB (1.5) uses them. Arrow does not show theirs, and shows that others are none.
    """
    writer = metadata.created_by or ""
    if _COMPARES_RIGHT.match(writer):
        return False
    of_bytes = [i for i in range(metadata.num_columns) if metadata.schema.column(i).physical_type in _OF_BYTES]
    if _COMPARES_WITH_A_SIGN.match(writer):
        return bool(of_bytes)
    shown = (
        metadata.row_group(group).column(i).statistics for group in range(metadata.num_row_groups) for i in of_bytes
    )
    return any(statistics is not None and not statistics.has_min_max and statistics.num_values for statistics in shown)


def is_readable(stored: pa.DataType, wanted: DataType, *, is_int96: bool) -> bool:
    """Whether all values of a file's column are exactly values of the table's type.

    `is_int96`: times in the column are INT96, as Spark writes them by default: instants without a zone.
    """
    inner = partial(is_readable, is_int96=is_int96)
    if isinstance(wanted, StructType):
        if not pa.types.is_struct(stored):
            return False
        fields = {name_in_files(field): field.dataType for field in wanted.fields}
        names = [stored.field(i).name for i in range(stored.num_fields)]
        if _differ_in_case([*fields, *names]):
            return False
        return all(name not in fields or inner(stored.field(i).type, fields[name]) for i, name in enumerate(names))
    if isinstance(wanted, MapType):
        is_map = pa.types.is_map(stored)
        return is_map and inner(stored.key_type, wanted.keyType) and inner(stored.item_type, wanted.valueType)
    if isinstance(wanted, ArrayType):
        is_list = pa.types.is_list(stored) or pa.types.is_large_list(stored)
        return is_list and inner(stored.value_type, wanted.elementType)
    return _is_readable_leaf(stored, wanted, is_int96=is_int96)


def _differ_in_case(names: Iterable[str]) -> bool:
    """Whether two names differ in case only, which Spark ignores when it reads files."""
    different = set(names)
    return len({name.lower() for name in different}) < len(different)


def _is_readable_leaf(stored: pa.DataType, wanted: DataType, *, is_int96: bool) -> bool:
    if pa.types.is_dictionary(stored):
        stored = stored.value_type
    if pa.types.is_large_string(stored) or pa.types.is_string_view(stored):
        stored = pa.string()
    if pa.types.is_large_binary(stored) or pa.types.is_binary_view(stored):
        stored = pa.binary()
    if isinstance(wanted, DecimalType) and pa.types.is_decimal(stored):
        whole = wanted.precision - wanted.scale
        return bool(stored.scale <= wanted.scale and stored.precision - stored.scale <= whole)
    is_microseconds = pa.types.is_timestamp(stored) and stored.unit == "us"
    if isinstance(wanted, TimestampType):
        # A zone that Arrow's own copy of the schema names does not change the instant.
        return is_microseconds and (is_int96 or stored.tz is not None)
    if isinstance(wanted, TimestampNTZType):
        return is_microseconds and stored.tz is None and not is_int96
    return bool(stored == arrow_type(wanted)) or stored in _WIDER.get(type(wanted), ())
