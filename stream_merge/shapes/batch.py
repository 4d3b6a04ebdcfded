"""The evaluation of a micro-batch: contract, latest event per key, counts and key bounds in a single pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.errors import PySparkNotImplementedError, PySparkTypeError
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DateType,
    DecimalType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from stream_merge.model import names, source_batch
from stream_merge.model.results import REASONS
from stream_merge.model.source_batch import AtHand
from stream_merge.shapes import arrow_order, contract, latest_per_key, surely_changes
from stream_merge.shapes.key_bounds import KeyBounds, bound_aggregates, boundable, key_bounds
from stream_merge.shapes.layout import Layout
from stream_merge.shapes.surely_changes import GreatestSequence
from stream_merge.spark import columns
from stream_merge.spark.errors import exceeds_driver_results
from stream_merge.spark.evaluate_once import materialised, release
from stream_merge.spark.versions import arrow_frame, arrow_table, arrow_type


class LeftOut(NamedTuple):
    """Fields of records that the schema given for them lacks."""

    events: int
    """How many have such fields, with a value."""
    fields: tuple[str, ...]
    """Some of their names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The evaluated events of one batch: nothing after this reads the source again."""

    rows: _SparkRows | _DriverRows
    received: int
    quarantined: int
    reasons: dict[str, int]
    collapsed: int
    ties: int
    upserts: int
    """Keys whose latest event is an upsert."""
    deletes: int
    """Keys whose latest event is a delete."""
    delete_events: int
    """Valid events that are deletes, the latest of their key or not."""
    bounds: KeyBounds
    """Empty where rows without an event are concerned: they may be in any file."""
    left_out: LeftOut | None = None
    """None from sources without this column."""
    tied_keys: tuple[str, ...] = ()
    """Up to two keys, as JSON, with several different events that no sequence orders; of a full copy with several
    events, different or not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _SparkRows:
    """The evaluated rows on the executors."""

    frame: DataFrame
    layout: Layout
    observed: GreatestSequence | None

    def latest(self) -> DataFrame:
        """One valid event per key, as a frame."""
        return self.frame.where(columns.column(names.REASONS_COLUMN).isNull())

    def invalid(self) -> DataFrame:
        """The events that break the contract, as a frame."""
        return self.frame.where(columns.column(names.REASONS_COLUMN).isNotNull())

    def invalid_at_hand(self) -> pa.Table | None:
        """The events that break the contract, where they are in the driver; else None."""
        return None

    def arrow(self) -> pa.Table:
        """One valid event per key, in the driver: stored columns, sequence and whether it is a delete."""
        return self._stored(_merged)

    def keys(self) -> pa.Table:
        """One valid event per key, in the driver: keys, sequence and whether it is a delete."""
        return self._stored(_keys)

    def _stored(self, selected: Callable[[Layout], list[str]]) -> pa.Table:
        """The latest events in the driver; one Spark job without a shuffle."""
        wanted = self.layout.once(selected.__name__, lambda: [columns.column(name) for name in selected(self.layout)])
        return as_stored(arrow_table(self.latest().select(*wanted)))

    def greatest(self) -> GreatestSequence | None:
        """The greatest sequence of the upserts, where it compares with a table's statistics."""
        return self.observed

    def release(self) -> None:
        release(self.frame)


@dataclass(frozen=True, kw_only=True, slots=True)
class _DriverRows:
    """The evaluated rows in the driver, with the methods of `_SparkRows`."""

    session: SparkSession
    layout: Layout
    events: pa.Table
    refused: pa.Table

    def latest(self) -> DataFrame:
        return arrow_frame(self.session, self.events, _schema(self.layout))

    def invalid(self) -> DataFrame:
        return arrow_frame(self.session, self.refused, _QUARANTINED)

    def invalid_at_hand(self) -> pa.Table | None:
        return self.refused

    def arrow(self) -> pa.Table:
        return self.events

    def keys(self) -> pa.Table:
        return self.events.select(_keys(self.layout))

    def greatest(self) -> GreatestSequence | None:
        return surely_changes.in_driver(self.events, self.layout)

    def release(self) -> None:
        """Nothing to free."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _LargeRows(_DriverRows):
    """Valid rows that are too many to be sent from the driver: Spark reads and evaluates the source itself."""

    source: DataFrame
    _evaluated: list[Batch] = field(default_factory=list)

    def latest(self) -> DataFrame:
        if not self._evaluated:
            self._evaluated.append(evaluate(self.source, self.layout))
        return self._evaluated[0].rows.latest()

    def release(self) -> None:
        for batch in self._evaluated:
            batch.rows.release()


MOST_SENT, MOST_SENT_BYTES = 100_000, 64 << 20
"""Most that the driver sends to Spark through the heap of its JVM."""
MOST_BYTES = 2**31 - 1
"""Arrow counts the bytes of a column's texts with 31 bits when it takes rows out of them."""
_QUARANTINED = StructType(
    [
        StructField(names.REASONS_COLUMN, ArrayType(StringType())),
        StructField(names.EVENT_COLUMN, StringType()),
        StructField(names.CORRUPT_COLUMN, StringType()),
        StructField(names.ORIGIN_COLUMN, source_batch.ORIGIN_TYPE),
    ]
)
_NONE_REFUSED = pa.schema([pa.field(f.name, arrow_type(f.dataType)) for f in _QUARANTINED.fields]).empty_table()


def _schema(layout: Layout) -> StructType:
    stored = [StructField(c.name, columns.nullable(c.dtype)) for c in layout.stored]
    sequence = StructField(names.SEQUENCE_COLUMN, columns.nullable(layout.sequence_type))
    return StructType([*stored, sequence, StructField(names.DELETE_COLUMN, BooleanType())])


def _merged(layout: Layout) -> list[str]:
    return [*(c.name for c in layout.stored), names.SEQUENCE_COLUMN, names.DELETE_COLUMN]


def _keys(layout: Layout) -> list[str]:
    return [*layout.keys, names.SEQUENCE_COLUMN, names.DELETE_COLUMN]


def evaluate_in_driver(source: DataFrame, layout: Layout) -> Batch | None:
    """Evaluate the source exactly once, into the driver: for small batches of types that Arrow compares as Spark does.

    Cost: one Spark job without a shuffle; a second one over the events in the driver where one breaks the contract.
    Returns: None where the events are too large for the driver or for Arrow; nothing of them is kept then.
    """
    try:
        if not layout.once("is_plain", lambda: _is_plain(source, layout)):
            return _judged_by_spark(source, layout)
        events = as_stored(arrow_table(source.select(*layout.once("plain", lambda: _plain(source, layout)))))
    except Exception as err:
        if not exceeds_driver_results(err):
            raise
        return None
    if events.nbytes > MOST_BYTES:
        return None
    parts = tuple(map(_SEQUENCE_PART.format, range(len(layout.sequence_fields))))
    valid = _valid(AtHand(events=events, sequence=parts, delete=names.DELETE_COLUMN), layout)
    if valid is None:
        at_hand = arrow_frame(source.sparkSession, events.select(source.columns), source.schema)
        return _judged_by_spark(at_hand, layout)
    return _in_driver(source.sparkSession, layout, valid, _NONE_REFUSED)


_SEQUENCE_PART = "__stream_merge_sequence_{}"


def _is_plain(source: DataFrame, layout: Layout) -> bool:
    """Whether events come as they are stored, so that the contract can be checked without Spark."""
    if layout.whole is not None or names.SOURCE_COLUMNS.intersection(source.columns) or not _is_stored(layout):
        return False
    if any(columns.is_padded(column.field) for column in layout.stored):
        return False
    try:
        for field in source.schema.fields:
            arrow_type(field.dataType)
            if columns.nullable(field.dataType) != field.dataType:
                return False  # PySpark (4.2) cannot collect a NULL struct whose fields are NOT NULL
    except (PySparkTypeError, PySparkNotImplementedError, ValueError, TypeError):
        return False
    return not any(isinstance(field.dataType, StructType) for field in layout.sequence_fields)


def _plain(source: DataFrame, layout: Layout) -> list[Column]:
    deletes = F.lit(False) if layout.deletes is None else layout.deletes
    return [
        *map(columns.column, source.columns),
        *(part.alias(_SEQUENCE_PART.format(i)) for i, part in enumerate(layout.sequence_source)),
        F.coalesce(deletes, F.lit(False)).alias(names.DELETE_COLUMN),
    ]


def _is_stored(layout: Layout) -> bool:
    return all(column.is_stored_as_it_is for column in layout.stored)


def _judged_by_spark(source: DataFrame, layout: Layout) -> Batch | None:
    """Evaluate events into the driver with the contract checked by Spark, which writes broken ones as JSON."""
    judged = arrow_table(contract.judged(source, layout))
    if judged.nbytes > MOST_BYTES:
        return None
    broken = judged[names.REASONS_COLUMN].is_valid()
    refused = judged.filter(broken).select(_QUARANTINED.names)
    valid = as_stored(judged.filter(pc.invert(broken)).select(_merged(layout)))
    batch = _in_driver(source.sparkSession, layout, valid, refused)
    if names.LEFT_OUT_COLUMN not in source.columns:
        return batch
    left_out = judged[names.LEFT_OUT_COLUMN]
    ends = pc.min_max(left_out).as_py()
    return replace(batch, left_out=_left_out(len(left_out) - left_out.null_count, ends["min"], ends["max"]))


def evaluate_at_hand(source: DataFrame, at_hand: AtHand, layout: Layout) -> Batch | None:
    """Evaluate events that are in the driver already, without a Spark job.

    Cost: no Spark job.
    Returns: None where Spark has to read them: an event breaks the contract, a value is stored in another type, or
        they are too large for Arrow.
    """
    if at_hand.events.nbytes > MOST_BYTES or not _is_stored(layout):
        return None
    valid = _valid(at_hand, layout)
    if valid is None:
        return None
    found = _in_driver(source.sparkSession, layout, valid, _NONE_REFUSED)
    rows = found.rows.arrow()
    if rows.num_rows <= MOST_SENT and rows.nbytes <= MOST_SENT_BYTES:
        return found
    large = _LargeRows(session=source.sparkSession, layout=layout, events=rows, refused=_NONE_REFUSED, source=source)
    return replace(found, rows=large)


def _valid(at_hand: AtHand, layout: Layout) -> pa.Table | None:
    """The events as they are merged; None where one breaks the contract, or only Spark can tell."""
    events, parts = at_hand.events, at_hand.sequence
    if not all(column.source_name in events.column_names for column in layout.stored):
        return None
    stored = {c.name: events[c.source_name] for c in layout.stored}
    sequence = {f.name: events[part] for part, f in zip(parts, layout.sequence_fields, strict=True)}
    types = {f.name: arrow_type(f.dataType) for f in layout.sequence_fields}
    needed = [*(stored[key] for key in layout.keys), *sequence.values(), events[at_hand.delete]]
    if {name: part.type for name, part in sequence.items()} != types or any(c.null_count for c in needed):
        return None
    texts = [stored[key] for key in layout.texts_in_partitions]
    if not all(map(_is_kept_in_partitions, texts)):
        return None
    ordered_by = pa.Table.from_pydict(sequence).to_struct_array()
    every = {**stored, names.SEQUENCE_COLUMN: ordered_by, names.DELETE_COLUMN: events[at_hand.delete]}
    return as_stored(pa.Table.from_pydict(every))


def _is_kept_in_partitions(key: pa.ChunkedArray) -> bool:
    """Whether Delta surely stores each value as a partition's; else the contract decides on Spark."""
    is_text = pa.types.is_string(key.type)
    return is_text and not arrow_order.holds_null_of_partitions(key) and arrow_order.is_legible(key)


def _in_driver(session: SparkSession, layout: Layout, valid: pa.Table, refused: pa.Table) -> Batch:
    newest = latest_per_key.latest(valid, layout)
    deletes = int(pc.sum(newest.rows[names.DELETE_COLUMN]).as_py() or 0)
    reasons = [reason for listed in refused[names.REASONS_COLUMN].to_pylist() for reason in listed]
    return Batch(
        rows=_DriverRows(session=session, layout=layout, events=newest.rows, refused=refused),
        received=valid.num_rows + refused.num_rows,
        quarantined=refused.num_rows,
        reasons={reason: n for reason in REASONS if (n := reasons.count(reason))},
        collapsed=newest.collapsed,
        ties=newest.ties,
        upserts=newest.rows.num_rows - deletes,
        deletes=deletes,
        delete_events=int(pc.sum(valid[names.DELETE_COLUMN]).as_py() or 0),
        bounds=_bounds(valid, layout),
    )


def _bounds(valid: pa.Table, layout: Layout) -> KeyBounds:
    observed: dict[str, Any] = {}
    for i, key in enumerate(boundable(layout.key_fields)):
        values = valid[key.name]
        if isinstance(key.dataType, StringType):
            values = values.cast(pa.binary())  # not every string of Spark's is UTF-8
        elif isinstance(key.dataType, TimestampType | TimestampNTZType):
            values = values.cast(pa.int64())
        elif isinstance(key.dataType, DateType):
            values = values.cast(pa.int32())
        least, greatest = (pc.min_max(values)[end].as_py() for end in ("min", "max"))
        if isinstance(key.dataType, StringType | DecimalType) and least is not None:
            ends = (least, greatest)
            least, greatest = (end.decode(errors="replace") if isinstance(end, bytes) else str(end) for end in ends)
        observed |= {f"least_{i}": least, f"greatest_{i}": greatest}
    return key_bounds(layout.key_fields, observed)


def as_stored(events: pa.Table) -> pa.Table:
    """Events in the types in which Delta stores them."""
    return events.cast(pa.schema([pa.field(f.name, _for_delta(f.type)) for f in events.schema]))


def _for_delta(dtype: pa.DataType) -> pa.DataType:
    """Delta's type: times in UTC, nothing NOT NULL inside."""
    if pa.types.is_timestamp(dtype) and dtype.tz is not None:
        return pa.timestamp("us", tz="UTC")
    if pa.types.is_struct(dtype):
        return pa.struct([pa.field(f.name, _for_delta(f.type)) for f in dtype])
    if pa.types.is_list(dtype):
        return pa.list_(pa.field(dtype.value_field.name, _for_delta(dtype.value_type)))
    return dtype


def evaluate(source: DataFrame, layout: Layout) -> Batch:
    """Evaluate the source exactly once.

    Cost: one Spark job with one shuffle (adaptive execution submits the shuffle as a job of its own).
    """
    ranked = contract.checked(source, layout).transform(lambda events: latest_per_key.ranked(events, layout))
    first = layout.once("first", lambda: columns.column(latest_per_key.RANK_COLUMN) == 1)
    tells_left_out = names.LEFT_OUT_COLUMN in source.columns
    unkept = (*latest_per_key.ADDED_COLUMNS, names.ALONE_COLUMN, names.LEFT_OUT_COLUMN)
    rows, counts = materialised(
        ranked,
        *layout.once("counts", lambda: _counts(layout)),
        *(_left_out_counts() if tells_left_out else ()),
        keep=lambda observed: observed.where(first).drop(*unkept),
    )
    return Batch(
        rows=_SparkRows(frame=rows, layout=layout, observed=surely_changes.observed(layout, counts)),
        received=counts["received"],
        quarantined=counts["quarantined"],
        reasons={reason: n for reason in REASONS if (n := counts[f"reason_{reason}"])},
        collapsed=counts["collapsed"],
        ties=counts["ties"],
        upserts=counts["upserts"],
        deletes=counts["deletes"],
        delete_events=counts["delete_events"],
        bounds=KeyBounds() if layout.concerns_missing else key_bounds(layout.key_fields, counts),
        left_out=_left_out(*(counts[name] for name in _LEFT_OUT)) if tells_left_out else None,
        tied_keys=tuple(sorted({counts[end] for end in _TIED if counts.get(end) is not None})),
    )


_TIED = ("least_tied", "greatest_tied")
_LEFT_OUT = ("left_out", "least_left_out", "greatest_left_out")


def _left_out_counts() -> list[Column]:
    """Count of left out fields, and two of the lists of names: all could exceed the driver."""
    listed = columns.column(names.LEFT_OUT_COLUMN)
    return [end(listed).alias(name) for end, name in zip((F.count, F.min, F.max), _LEFT_OUT, strict=True)]


def _left_out(events: int, least: str | None, greatest: str | None) -> LeftOut:
    listed = (text.split(", ") for text in (least, greatest) if text is not None)
    return LeftOut(events, tuple(sorted({name for fields in listed for name in fields})))


def _counts(layout: Layout) -> list[Column]:
    valid = columns.column(names.REASONS_COLUMN).isNull()
    first = columns.column(latest_per_key.RANK_COLUMN) == 1
    delete = columns.column(names.DELETE_COLUMN)
    reasons = columns.column(names.REASONS_COLUMN)
    is_unordered = layout.whole is not None and not layout.whole.is_ordered
    return [
        F.count(F.lit(1)).alias("received"),
        F.count_if(~valid).alias("quarantined"),
        F.count_if(valid & ~first).alias("collapsed"),
        F.count_if(columns.column(latest_per_key.TIE_COLUMN)).alias("ties"),
        F.count_if(valid & first & ~delete).alias("upserts"),
        F.count_if(valid & first & delete).alias("deletes"),
        F.count_if(valid & delete).alias("delete_events"),
        *(F.count_if(F.array_contains(reasons, reason)).alias(f"reason_{reason}") for reason in REASONS),
        *bound_aggregates(layout.key_fields, valid),
        *surely_changes.aggregates(layout, valid & first & ~delete),
        *(_tied(layout, columns.column(latest_per_key.TIE_COLUMN)) if is_unordered else ()),
        *(_tied(layout, valid & ~first) if layout.is_whole else ()),
    ]


def _tied(layout: Layout, is_tied: Column) -> list[Column]:
    """Two of the keys of such events: all could exceed the driver."""
    key = F.to_json(F.struct(*(columns.column(name) for name in layout.keys)))
    tied = F.when(is_tied, key)
    return [end(tied).alias(name) for end, name in zip((F.min, F.max), _TIED, strict=True)]
