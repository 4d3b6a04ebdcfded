"""The latest event of each key in a batch, in one total order: on Spark, and on Arrow for batches in the driver.

The second definition of the rule pays: a window in Spark costs 0.1 to 0.2 s per batch however small it is, Arrow
milliseconds. The random histories of the tests check both against one oracle.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from stream_merge.model import names
from stream_merge.shapes.arrow_order import arrays, orderable
from stream_merge.shapes.layout import Layout
from stream_merge.spark import columns

RANK_COLUMN = "__stream_merge_rank"
TIE_COLUMN = "__stream_merge_tie"
ADDED_COLUMNS = (RANK_COLUMN, TIE_COLUMN)


def ranked(events: DataFrame, layout: Layout) -> DataFrame:
    """Number the events of each key from the latest to the oldest.

    The order is total: greater sequence first; at equal sequence an upsert before a delete; then the stored columns in
    the source's order, the greater value first and NULL last, map entries sorted by key. So a replay of the batch picks
    the same event. Each invalid event stays the first of its own. In a full copy a second event of a key is an error,
    whichever it is: values are not compared.

    Requires: the rows of `contract.checked`.
    Returns: the same rows with their rank (1 = latest) and whether the event is a tie: same key and sequence as the
        event before it in the order, but another operation or other stored values.
    Cost: one shuffle and one sort by key; no aggregation state, so a hot key cannot exhaust memory.
    """
    return events.select("*", *layout.once("dedup", lambda: _ranks(layout)))


def _ranks(layout: Layout) -> list[Column]:
    valid = columns.column(names.REASONS_COLUMN).isNull()
    keys = [columns.column(key) for key in layout.keys]
    of_key = Window.partitionBy(*keys, columns.column(names.ALONE_COLUMN))
    if layout.is_whole:
        return [F.row_number().over(of_key.orderBy(*keys)).alias(RANK_COLUMN), F.lit(False).alias(TIE_COLUMN)]
    sequence = columns.column(names.SEQUENCE_COLUMN)
    deletes = columns.column(names.DELETE_COLUMN)
    beside = () if layout.whole is None else layout.whole.carried
    compared = [(c.name, c.dtype) for c in layout.stored] + [(c.travels_as, c.dtype) for c in beside]
    payload = [columns.canonical(columns.column(name), dtype) for name, dtype in compared]
    content = F.struct(deletes, *(value.alias(f"p{i}") for i, value in enumerate(payload)))

    per_key = of_key.orderBy(sequence.desc(), deletes.asc(), *(value.desc() for value in payload))
    same_sequence: Column = F.lag(sequence).over(per_key).eqNullSafe(sequence)
    other_content: Column = ~F.lag(content).over(per_key).eqNullSafe(content)
    return [
        F.row_number().over(per_key).alias(RANK_COLUMN),
        (valid & same_sequence & other_content).alias(TIE_COLUMN),
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Latest:
    """The latest event of each key."""

    rows: pa.Table
    collapsed: int
    """Older events of a key that were left out."""
    ties: int


def latest(events: pa.Table, layout: Layout) -> Latest:
    """The latest of the valid events of each key (rows of `contract.checked` without reasons); see `ranked`."""
    count = events.num_rows
    if count <= 1:
        return Latest(rows=events, collapsed=0, ties=0)
    flat = _flat(events, layout)
    keys = [name for name in flat.column_names if name.startswith("k")]
    sequence = [name for name in flat.column_names if name.startswith("q")]
    order = [*((name, "ascending") for name in keys), *((name, "descending") for name in sequence)]
    rows = pc.sort_indices(flat, sort_keys=order).cast(pa.int64())
    ordered = flat.take(rows)
    same_key = _as_before(ordered, keys)
    first = pc.indices_nonzero(pa.concat_arrays([pa.array([True]), pc.invert(same_key)]))
    if len(first) == count:
        return Latest(rows=events, collapsed=0, ties=0)
    taken = rows.take(first)
    runs = list(_runs(pc.indices_nonzero(pc.and_(same_key, _as_before(ordered, sequence))).to_pylist()))
    ties = 0
    if runs:
        inside = rows.take(pa.array([row for start, end in runs for row in range(start, end)])).to_pylist()
        ties, winners = _winners(_contents(events, inside, layout), inside, runs)
        # Only the first row of a key can win: runs further down belong to events that are collapsed anyway.
        positions = pc.index_in(first, pa.array([start for start, _ in runs]))
        taken = pc.if_else(pc.is_valid(positions), pa.array(winners, pa.int64()).take(positions), taken)
    return Latest(rows=events.take(taken), collapsed=count - len(taken), ties=ties)


def _winners(contents: list[tuple[object, ...]], rows: list[int], runs: list[tuple[int, int]]) -> tuple[int, list[int]]:
    """Number of ties, and the winning row of each run; contents and rows follow one another, run by run."""
    ties, winners, first = 0, [], 0
    for start, end in runs:
        tied = contents[first : first + end - start]
        ties += len(set(tied)) - 1
        winners.append(rows[first + tied.index(max(tied))])
        first += end - start
    return ties, winners


def _flat(events: pa.Table, layout: Layout) -> pa.Table:
    """Keys and scalar components of the sequence as plain columns, in one piece each, which sorts faster.

    Components that are equal in all events, such as a job's epoch, are left out.
    """
    flat = {f"k{i}": events[key].combine_chunks() for i, key in enumerate(layout.keys)}
    parts = enumerate(arrays(events[names.SEQUENCE_COLUMN]))
    flat |= {f"q{i}": part for i, part in parts if not pc.all(pc.equal(part, part[0]), skip_nulls=False).as_py()}
    return pa.table(flat)


def _as_before(ordered: pa.Table, columns: list[str]) -> pa.Array:
    """For each row but the first, whether these columns equal those of the row before."""
    same = pa.array([True] * (ordered.num_rows - 1), pa.bool_())
    for name in columns:
        values = ordered[name].combine_chunks()
        if isinstance(values, pa.ChunkedArray):
            values = pa.concat_arrays(values.chunks)
        same = pc.and_(same, pc.equal(values.slice(1), values.slice(0, len(values) - 1)))
    return same


def _runs(as_the_one_before: list[int]) -> Iterator[tuple[int, int]]:
    """Positions [start, end) of neighbours with the same key and sequence; given p where row p + 1 equals row p."""
    start = end = -1
    for position in as_the_one_before:
        if position != end - 1:
            if start >= 0:
                yield start, end
            start = position
        end = position + 2
    if start >= 0:
        yield start, end


def _contents(events: pa.Table, rows: list[int], layout: Layout) -> list[tuple[object, ...]]:
    """What decides between events of one key and sequence: upsert before delete, then the greater columns."""
    tied = events.take(pa.array(rows, pa.int64()))
    upsert = [not delete for delete in tied[names.DELETE_COLUMN].to_pylist()]
    return list(zip(upsert, *(orderable(tied[c.name]) for c in layout.stored), strict=True))
