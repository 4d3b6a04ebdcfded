"""What a record becomes: where it stood, what is known of it, and the row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pyspark.sql import types as T

from stream_merge.sources.envelopes.base import Format

PLACE = ("topic", "partition", "offset", "timestamp")
"""Where a record stands; Spark's Kafka source names them so."""
META = T.StructType(
    [
        T.StructField("kind", T.StringType()),
        T.StructField("note", T.StringType()),
        T.StructField("raw_key", T.BinaryType()),
        T.StructField("raw_value", T.BinaryType()),
        T.StructField("raw_old_key", T.BinaryType()),
        T.StructField("position", T.LongType()),
        T.StructField("last_commit", T.LongType()),
        T.StructField("is_snapshot", T.BooleanType()),
        T.StructField("source_millis", T.LongType()),
        T.StructField("connector", T.StringType()),
        T.StructField("unavailable", T.ArrayType(T.StringType())),
        T.StructField("absent", T.ArrayType(T.StringType())),
    ]
)
"""What is known of each record. What starts with `raw_` is kept only where somebody may have to look at them again;
`position` and `last_commit` are places in the source's log (`Database`); `unavailable` names the columns whose value
the source left out of the event, `absent` those that the event's own schema lacks; NULL where there are none."""
OLD_KEY = "old_key"
"""Column with the key that the row had before, where an event with unavailable values says so; else NULL."""
ROW = "row"
"""Column with the decoded row; for deletes only its keys."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How records are to be read, and into which columns."""

    format: Format
    columns: T.StructType
    """Columns of the row, in the target's types."""
    keys: tuple[str, ...]
    known: frozenset[str]
    """Ids of the schemas whose columns are all in `columns`; an event in another is left for a second look."""
    broken: Mapping[str, str] = field(default_factory=dict)
    """Ids of schemas that nothing can be stored in, and why: their events are undecodable."""
    max_value_bytes: int

    @property
    def schema(self) -> T.StructType:
        """Of the events: `META`, `OLD_KEY` and `ROW`."""
        return T.StructType([*META.fields, T.StructField(OLD_KEY, self.key_columns), T.StructField(ROW, self.columns)])

    @property
    def key_columns(self) -> T.StructType:
        """Those of `columns` that are keys."""
        return T.StructType([fld for fld in self.columns.fields if fld.name in self.keys])


def is_time(millis: int | None) -> bool:
    """Whether these are milliseconds since 1970 that a clock can show."""
    return millis is not None and 0 <= millis < MOST_MILLIS


MOST_MILLIS = 2**53
