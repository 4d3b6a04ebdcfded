"""Columns of decoded records: position, metadata and the row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import pyarrow as pa
from pyspark.sql import types as T

from stream_merge.sources.envelopes.base import Format

PLACE = ("topic", "partition", "offset", "timestamp")
"""Position of a record, in the names of Spark's Kafka source."""
META = T.StructType(
    [
        T.StructField("kind", T.StringType()),
        T.StructField("note", T.StringType()),
        T.StructField("raw_key", T.BinaryType()),
        T.StructField("raw_value", T.BinaryType()),
        T.StructField("raw_old_key", T.BinaryType()),
        T.StructField("position", T.LongType()),
        T.StructField("last_commit", T.LongType()),
        T.StructField("server", T.StringType()),
        T.StructField("is_snapshot", T.BooleanType()),
        T.StructField("source_millis", T.LongType()),
        T.StructField("connector", T.StringType()),
        T.StructField("unavailable", T.ArrayType(T.StringType())),
        T.StructField("absent", T.ArrayType(T.StringType())),
    ]
)
"""Metadata of each record. `raw_` columns are NULL unless the record may be read again; `position`, `last_commit` and
`server` are those of `LogPosition`; `unavailable` names the columns whose value the source left out of the event,
`absent` those that the event's own schema lacks."""
OLD_KEY = "old_key"
"""Column with the row's former key, where an event with unavailable values has it; else NULL."""
ROW = "row"
"""Column with the decoded row; of deletes only the keys."""
MOST_MILLIS = 2**53


class Records(NamedTuple):
    """Records of a topic, a row each, in the order of their offsets."""

    keys: pa.BinaryArray
    values: pa.BinaryArray
    partitions: pa.Int32Array
    old_keys: pa.BinaryArray | None = None
    """The header with the row's former key; None: of none."""
    raw_keys: pa.BinaryArray | None = None
    """The keys before they were transcoded; None: `keys`."""
    raw_values: pa.BinaryArray | None = None
    """The values before they were transcoded; None: `values`."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Format of records and the columns to decode them into."""

    format: Format
    columns: T.StructType
    """Columns of the row, in the target's types."""
    keys: tuple[str, ...]
    known: frozenset[str]
    """Ids of the schemas whose columns are all in `columns`; others are `Kind.OTHER_SCHEMA`."""
    broken: Mapping[str, str] = field(default_factory=dict)
    """Id -> problem of schemas whose events are undecodable."""
    max_value_bytes: int
    may_be_framed: bool = False
    """Whether JSON may have the header of a schema registry's converter before it."""

    @property
    def schema(self) -> T.StructType:
        """`META`, `OLD_KEY` and `ROW`."""
        return T.StructType([*META.fields, T.StructField(OLD_KEY, self.key_columns), T.StructField(ROW, self.columns)])

    @property
    def key_columns(self) -> T.StructType:
        """The keys among `columns`."""
        return T.StructType([fld for fld in self.columns.fields if fld.name in self.keys])


def is_time(millis: int | None) -> bool:
    """Whether these are valid milliseconds since 1970."""
    return millis is not None and 0 <= millis < MOST_MILLIS
