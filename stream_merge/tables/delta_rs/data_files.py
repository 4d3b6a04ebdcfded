"""Which data files of a table delta-rs would read or remove wrongly: by their paths, and by how they were written."""

from __future__ import annotations

import datetime
import string
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from urllib.parse import quote, unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql.types import ArrayType, DataType, DateType, MapType, StructType, TimestampNTZType, TimestampType

from stream_merge.model.snapshot import name_in_files

_OLD_CALENDAR = datetime.date(1900, 1, 1)
"""Before it Spark 2 and its legacy modes count days and hours otherwise (`spark.sql.parquet.*RebaseMode*`)."""
_EPOCH = datetime.date(1970, 1, 1)
_FIRST_NANOSECOND, _LAST_NANOSECOND = datetime.date(1677, 9, 22), datetime.date(2262, 4, 11)
NANOSECONDS = (_FIRST_NANOSECOND - _EPOCH).days * 86_400_000_000, (_LAST_NANOSECOND - _EPOCH).days * 86_400_000_000 - 1
"""Microseconds since 1970 that 64 bits of nanoseconds hold: delta-rs 1.6 reads INT96 as such, and the rest wraps."""
DAYS = -96_000_000, 95_000_000
"""Days since 1970 that delta-rs can spell: it panics beyond the year 262,142 (chrono)."""

_NOT_ENCODED = "".join(c for c in string.printable if c.isalnum()) + "/=_.-~+&!@$,;()'"
"""What delta-rs 1.6 leaves as it is when it encodes the path of a file that it removes, as far as it was tried."""
_SURELY_PLAIN = r"^[A-Za-z0-9_=.\-][A-Za-z0-9/_=.\-]*$"

_LEGACY_KEYS = (b"org.apache.spark.legacyINT96", b"org.apache.spark.legacyDateTime")
_SPARK_VERSION = b"org.apache.spark.version"
_FIRST_WITHOUT_LEGACY = (3, 1)
_MOST_KNOWN = 100_000


def named(files: pa.Table) -> Iterator[tuple[str, int]]:
    """Files by what tells them apart for ever: their path in the log, and their size in bytes (`NativeTable.files`)."""
    yield from zip(files["path"].to_pylist(), files["size_bytes"].to_pylist(), strict=True)


def misnamed(files: pa.Table) -> str | None:
    """A path among these files that delta-rs would not find again in the log when it removes the file.

    The log's paths are URLs. delta-rs decodes them and encodes them its own way; Spark leaves `ä` as it is, so that
    the file that delta-rs removes is another one for every reader, and the removed rows stay.

    Args:
        files: `NativeTable.files`.
    """
    odd = files["path"].filter(pc.invert(pc.match_substring_regex(files["path"], _SURELY_PLAIN)))
    return next((path for path in odd.to_pylist() if not _is_plain(path)), None)


def _is_plain(path: str) -> bool:
    return not path.startswith("/") and path == quote(unquote(path), safe=_NOT_ENCODED)


class Times:
    """Whether delta-rs reads the dates and times of a table's files as Spark does; what it found is kept.

    Args:
        opened: opens a data file by its path in the log and its size in bytes.
    """

    def __init__(self, opened: Callable[[str, int], pa.NativeFile]) -> None:
        self._open = opened
        self._known: dict[tuple[str, int], str | None] = {}

    def trust(self, files: pa.Table) -> None:
        """Take these as they should be: delta-rs has just written them, and what it writes it reads."""
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known.update(dict.fromkeys(named(files)))

    def misread(self, files: pa.Table, schema: StructType) -> str | None:
        """Why delta-rs would read a file among these wrongly; None where it reads all as Spark does.

        Cost: the log's statistics; files for which they do not tell are looked into, once each.

        Args:
            files: `NativeTable.files`.
            schema: of the table.
        """
        unclear = _unclear(files, schema)
        for path, size in named(unclear):
            if (path, size) not in self._known:
                if len(self._known) >= _MOST_KNOWN:
                    self._known.clear()
                self._known[path, size] = self._look_into(path, size)
            found = self._known[path, size]
            if found is not None:
                return f"file {path!r} {found}"
        return None

    def _look_into(self, path: str, size: int) -> str | None:
        with self._open(path, size) as source, pq.ParquetFile(source, coerce_int96_timestamp_unit="us") as file:
            if counts_days_otherwise(file.metadata.metadata or {}):
                return "holds dates or times in the calendar of Spark 2, which delta-rs does not know"
            leaves = [file.schema.column(i) for i in range(len(file.schema))]
            nanoseconds = sorted({leaf.path for leaf in leaves if leaf.physical_type == "INT96"})
            if any(exceeds(values, NANOSECONDS) for values in _read(file, nanoseconds)):
                return f"keeps {nanoseconds!r} as INT96, with times outside of 1677 to 2262, which delta-rs misreads"
            days = sorted({leaf.path for leaf in leaves if leaf.logical_type.type == "DATE"})
            if any(exceeds(values, DAYS) for values in _read(file, days)):
                return f"holds dates in {days!r} that delta-rs cannot spell"
        return None


def times(columns: Iterable[pa.Array]) -> Iterator[pa.Array]:
    """The dates and times in these columns, at any depth."""
    for values in columns:
        if pa.types.is_temporal(values.type):
            yield values
        elif pa.types.is_struct(values.type):
            yield from times(values.flatten())
        elif pa.types.is_map(values.type):
            yield from times([values.keys, values.items])
        elif pa.types.is_list(values.type):
            yield from times([values.flatten()])


def exceeds(values: pa.Array, bounds: tuple[int, int]) -> bool:
    """Whether a value lies outside: days of dates, microseconds of times."""
    ends = pc.min_max(values.cast(pa.int32() if pa.types.is_date32(values.type) else pa.int64()))
    least, greatest = ends["min"].as_py(), ends["max"].as_py()
    return least is not None and bool(least < bounds[0] or greatest > bounds[1])


def _read(file: pq.ParquetFile, names: list[str]) -> Iterator[pa.Array]:
    for name in names:
        for batch in file.iter_batches(columns=[name]):
            yield from times(batch.columns)


def _unclear(files: pa.Table, schema: StructType) -> pa.Table:
    """The files for which the log does not say that all their dates and times are near enough."""
    clear = pa.array([True] * files.num_rows, pa.bool_())
    for name, dtype in _times_of(schema):
        if f"partition.{name}" in files.column_names:
            continue
        if any(files.column_names.count(f"{what}.{name}") != 1 for what in ("min", "max", "null_count")):
            return files
        least, greatest = files[f"min.{name}"], files[f"max.{name}"]
        last = datetime.date.max if isinstance(dtype, DateType) else _LAST_NANOSECOND
        near = pc.and_kleene(
            pc.greater_equal(least, _like(_OLD_CALENDAR, least)), pc.less(greatest, _like(last, greatest))
        )
        empty = pc.equal(files[f"null_count.{name}"], files["num_records"])
        clear = pc.and_(clear, pc.or_(pc.fill_null(near, False), pc.fill_null(empty, False)))
    return files.filter(pc.invert(clear))


def _like(day: datetime.date, values: pa.ChunkedArray) -> pa.Scalar:
    return pa.scalar(day, pa.date32()).cast(values.type)


def _times_of(dtype: DataType, prefix: str = "") -> Iterator[tuple[str, DataType]]:
    """Dates and times anywhere in a type; inside of arrays and maps under names that no statistics have."""
    if isinstance(dtype, StructType):
        for field in dtype.fields:
            name = name_in_files(field)
            yield from _times_of(field.dataType, f"{prefix}.{name}" if prefix else name)
    elif isinstance(dtype, ArrayType):
        yield from _times_of(dtype.elementType, f"{prefix}[]")
    elif isinstance(dtype, MapType):
        yield from _times_of(dtype.keyType, f"{prefix}[]")
        yield from _times_of(dtype.valueType, f"{prefix}[]")
    elif isinstance(dtype, DateType | TimestampType | TimestampNTZType):
        yield prefix, dtype


def ambiguous(schema: StructType) -> frozenset[str]:
    """The names in files that several columns have once they are flattened: `a.b`, and `b` inside of the struct `a`."""
    return frozenset(name for name, n in Counter(_names_of(schema)).items() if n > 1)


def unambiguous(files: pa.Table, schema: StructType) -> pa.Table:
    """Files without those statistics that may be of several columns: of `a.b`, or of `b` inside of the struct `a`.

    Args:
        files: as delta-rs flattens them (1.6).
        schema: of the table.
    """
    several = {f"{kind}.{name}" for name in ambiguous(schema) for kind in ("min", "max", "null_count")}
    return files.select([i for i, name in enumerate(files.column_names) if name not in several]) if several else files


def _names_of(dtype: StructType, prefix: str = "") -> Iterator[str]:
    for field in dtype.fields:
        name = f"{prefix}{name_in_files(field)}"
        yield name
        if isinstance(field.dataType, StructType):
            yield from _names_of(field.dataType, f"{name}.")


def holds_times(schema: StructType) -> bool:
    """Whether a date or a time is anywhere in a table."""
    return next(_times_of(schema), None) is not None


def holds_days(schema: StructType) -> bool:
    """The same of those that Spark moves from one calendar to another: not of times without a zone."""
    return any(not isinstance(dtype, TimestampNTZType) for _, dtype in _times_of(schema))


def counts_days_otherwise(metadata: Mapping[bytes, bytes]) -> bool:
    """Whether a file's metadata say that dates and times before 1900 are in the calendar of Spark 2."""
    if any(key in metadata for key in _LEGACY_KEYS):
        return True
    version = metadata.get(_SPARK_VERSION)
    return version is not None and tuple(map(int, version.decode().split(".")[:2])) < _FIRST_WITHOUT_LEGACY
