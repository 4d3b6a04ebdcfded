"""Which event of a key wins inside a batch, on Arrow: `latest_per_key_spark` for batches that fit the driver.

A second definition of one rule, worth its maintenance: a window in Spark costs 0.1 to 0.2 s per batch
however small it is, this costs milliseconds. The random histories of the tests hold both to one oracle.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from stream_merge.model import names
from stream_merge.shapes.arrow_order import arrays, orderable
from stream_merge.shapes.layout import Layout


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
    rows = pc.sort_indices(flat, sort_keys=_order(flat)).cast(pa.int64())
    ordered = flat.take(rows)
    keys = [name for name in flat.column_names if name.startswith("k")]
    sequence = [name for name in flat.column_names if name.startswith("q")]
    same_key = _as_before(ordered, keys)
    first = pc.indices_nonzero(pa.concat_arrays([pa.array([True]), pc.invert(same_key)]))
    if len(first) == count:
        return Latest(rows=events, collapsed=0, ties=0)
    taken = rows.take(first)
    runs = list(_runs(pc.indices_nonzero(pc.and_(same_key, _as_before(ordered, sequence))).to_pylist()))
    ties = 0
    if runs:
        inside = rows.take(pa.array([place for start, end in runs for place in range(start, end)])).to_pylist()
        ties, winners = _winners(_contents(events, inside, layout), inside, runs)
        # Only the first row of a key can win: runs further down belong to events that are collapsed anyway.
        places = pc.index_in(first, pa.array([start for start, _ in runs]))
        taken = pc.if_else(pc.is_valid(places), pa.array(winners, pa.int64()).take(places), taken)
    return Latest(rows=events.take(taken), collapsed=count - len(taken), ties=ties)


def _winners(contents: list[tuple[object, ...]], rows: list[int], runs: list[tuple[int, int]]) -> tuple[int, list[int]]:
    """Number of ties, and the winning row of each run; contents and rows follow one another, run by run."""
    ties, winners, seen = 0, [], 0
    for start, end in runs:
        length = end - start
        tied = contents[seen : seen + length]
        ties += len(set(tied)) - 1
        winners.append(rows[seen + tied.index(max(tied))])
        seen += length
    return ties, winners


def _flat(events: pa.Table, layout: Layout) -> pa.Table:
    """Keys and scalar components of the sequence as plain columns, in one piece each, which sorts faster.

    Components that are equal in all events, such as a job's epoch, are left out.
    """
    flat = {f"k{i}": events[key].combine_chunks() for i, key in enumerate(layout.keys)}
    parts = enumerate(arrays(events[names.SEQUENCE_COLUMN]))
    flat |= {f"q{i}": part for i, part in parts if not pc.all(pc.equal(part, part[0]), skip_nulls=False).as_py()}
    return pa.table(flat)


def _order(flat: pa.Table) -> list[tuple[str, str]]:
    direction = {"k": "ascending", "q": "descending"}
    return [(name, direction[name[0]]) for name in flat.column_names]


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
