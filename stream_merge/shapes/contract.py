"""The contract: which events may be merged, and the reasons against the others."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, StringType

from stream_merge.model import names, source_batch
from stream_merge.model.snapshot import HIVE_NULL
from stream_merge.shapes.layout import Layout
from stream_merge.spark import columns
from stream_merge.spark.versions import is_valid_utf8

_WHOLE_EVENT = {
    "ignoreNullFields": "false",
    # Spark's defaults end at milliseconds (4.2).
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}


def checked(batch_df: DataFrame, layout: Layout) -> DataFrame:
    """Check every event of a batch; nothing is dropped. Each invalid event has a number of its own.

    Returns:
        One row per event: the stored columns in the target's names and types, those beside them that the shape's
        clauses may name (`Layout.whole`), the sequence as a struct, whether the event is a delete, the reasons against
        it (NULL when it is valid) and, for an invalid one only, the event as JSON or why the record could not be read,
        and where it came from.

    Cost: a projection; no scan, no shuffle.
    """
    return judged(batch_df, layout).select("*", layout.once("alone", _event_number))


def judged(batch_df: DataFrame, layout: Layout) -> DataFrame:
    """The rows of `checked` without the numbers."""
    return batch_df.select(*layout.once("contract", lambda: _projection(batch_df.columns, layout)))


def _event_number() -> Column:
    invalid = columns.column(names.REASONS_COLUMN).isNotNull()
    return F.when(invalid, F.monotonically_increasing_id()).alias(names.ALONE_COLUMN)


def _projection(source_names: list[str], layout: Layout) -> list[Column]:
    corrupt = corrupt_because(source_names)
    valid_sequence = F.struct(
        *(value.alias(field.name) for value, field in zip(layout.sequence_source, layout.sequence_fields, strict=True))
    )
    reasons = _reasons(layout, source_names, corrupt)
    carried = () if layout.whole is None else layout.whole.carried
    return [
        *layout.stored_values,
        *(columns.column(one.name).alias(one.travels_as) for one in carried),
        valid_sequence.alias(names.SEQUENCE_COLUMN),
        F.coalesce(F.lit(False) if layout.deletes is None else layout.deletes, F.lit(False)).alias(names.DELETE_COLUMN),
        reasons.alias(names.REASONS_COLUMN),
        F.when(reasons.isNotNull() & corrupt.isNull(), event_text(source_names)).alias(names.EVENT_COLUMN),
        corrupt.alias(names.CORRUPT_COLUMN),
        F.when(reasons.isNotNull(), origin(source_names)).alias(names.ORIGIN_COLUMN),
        *(columns.column(name) for name in source_names if name == names.LEFT_OUT_COLUMN),
    ]


def event_text(source_names: list[str]) -> Column:
    """A whole event as JSON, as the quarantine stores it."""
    source_columns = [columns.column(name) for name in source_names if name not in names.SOURCE_COLUMNS]
    return F.to_json(F.struct(*source_columns), _WHOLE_EVENT)


def corrupt_because(source_names: list[str]) -> Column:
    """Why a record could not be read; NULL for all others, and from sources without this column."""
    if names.CORRUPT_COLUMN in source_names:
        return columns.column(names.CORRUPT_COLUMN)
    return F.lit(None).cast("string")


def origin(source_names: list[str]) -> Column:
    """An event's position in its topic or file; NULL from sources without this column."""
    known = columns.column(names.ORIGIN_COLUMN) if names.ORIGIN_COLUMN in source_names else F.lit(None)
    return known.cast(source_batch.ORIGIN_TYPE)


def breaks_key(events: DataFrame, keys: Sequence[str], partition_columns: Sequence[str]) -> Column:
    """Whether an event without a layout lacks a key, or has one that the target's partitions cannot store."""
    types = {field.name: field.dataType for field in events.schema.fields}
    present, partitions = (columns.resolved(events, listed) for listed in (keys, partition_columns))
    texts = [name for name in present if name in partitions and isinstance(types[name], StringType | BinaryType)]
    lacking = [columns.column(name).isNull() for name in present]
    return columns.any_of([*lacking, *(_is_lost_in_partitions(columns.column(name)) for name in texts)])


def _is_lost_in_partitions(key: Column) -> Column:
    """Whether Delta stores NULL, or another text, as the partition value for this one (4.4).

    Such a key would never match again, and be inserted with each event.
    """
    text = key.cast("string")
    return text.isin("", HIVE_NULL) | ~is_valid_utf8(text)


def _reasons(layout: Layout, source_names: list[str], corrupt: Column) -> Column:
    """All reasons that hold; an undecodable record has only that one."""
    named = {c.name: c.source_name for c in layout.stored}
    null_key = columns.any_of(
        [
            *(columns.column(named[key]).isNull() for key in layout.keys),
            *(_is_lost_in_partitions(columns.column(named[key])) for key in layout.texts_in_partitions),
        ]
    )
    null_sequence = columns.any_of(
        columns.holds_null(value, field.dataType)
        for value, field in zip(layout.sequence_source, layout.sequence_fields, strict=True)
    )
    holding = {"null_key": null_key, "null_sequence": null_sequence}
    if names.UNAVAILABLE_COLUMN in source_names:
        holding["unavailable_value"] = columns.column(names.UNAVAILABLE_COLUMN).isNotNull()
    broken = F.array_compact(F.array(*(F.when(holds, F.lit(reason)) for reason, holds in holding.items())))
    return F.when(corrupt.isNotNull(), F.array(F.lit("undecodable"))).when(columns.any_of(holding.values()), broken)
