"""Which data files of a table delta-rs would read or remove wrongly: by their paths, and by how they were written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import pyarrow as pa
from pyspark.sql.types import ArrayType, DataType, DateType, MapType, StructType, TimestampNTZType, TimestampType

from stream_merge.model.snapshot import name_in_files

_LEGACY_KEYS = (b"org.apache.spark.legacyINT96", b"org.apache.spark.legacyDateTime")
_SPARK_VERSION = b"org.apache.spark.version"
_FIRST_WITHOUT_LEGACY = (3, 1)


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


def counts_days_otherwise(metadata: Mapping[bytes, bytes]) -> bool:
    """Whether a file's metadata say that dates and times before 1900 are in the calendar of Spark 2."""
    if any(key in metadata for key in _LEGACY_KEYS):
        return True
    version = metadata.get(_SPARK_VERSION)
    return version is not None and tuple(map(int, version.decode().split(".")[:2])) < _FIRST_WITHOUT_LEGACY
