"""Which tombstones refuse an event, which an upsert revives, which are obsolete: over Arrow, for any engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from stream_merge.model import names
from stream_merge.shapes.arrow_order import arrays, orderable
from stream_merge.spark.versions import arrow_frame

_ROW, _EVENT = "__stream_merge_row", "__stream_merge_event"


@dataclass(frozen=True, kw_only=True, slots=True)
class Hits:
    """The events of a batch whose key has a tombstone."""

    version: int | None = None
    """Version of the tombstones' table that was at least read; None while there is none."""
    refusing: pa.Table = field(default_factory=lambda: pa.table({}))
    """Keys and `__stream_merge_sequence` of the tombstones that refuse an event, which is older."""
    overtaken: pa.Table = field(default_factory=lambda: pa.table({}))
    """Keys and sequences of the tombstones whose key an upsert brings back."""
    refused_rows: Sequence[int] = ()
    """Row numbers of the refused events, in the table that was judged."""
    types: StructType = field(default_factory=StructType)
    """Types of keys and tombstone sequence, for Spark."""

    @property
    def refused(self) -> int:
        """Events that are older than the tombstone of their key."""
        return int(self.refusing.num_rows)

    @property
    def revived(self) -> int:
        """Upserts that are not older: they bring their key back."""
        return int(self.overtaken.num_rows)

    def live(self, events: pa.Table) -> pa.Table:
        """The judged events that no tombstone refuses."""
        if not self.refused:
            return events
        keep = [True] * events.num_rows
        for row in self.refused_rows:
            keep[row] = False
        return events.filter(pa.array(keep))

    def refusals(self, session: SparkSession) -> DataFrame:
        """`refusing`, for Spark."""
        return arrow_frame(session, self.refusing, self.types)

    def beyond(self, seen: Hits | None) -> Hits:
        """Hits without the events that others of the same batch refused already."""
        if seen is None or not seen.refused or not self.refused:
            return self
        keys = self.types.names[:-1]
        known = set(_groups(seen.refusing, keys))
        new = [row for row, key in enumerate(_groups(self.refusing, keys)) if key not in known]
        return replace(self, refusing=self.refusing.take(pa.array(new, pa.int64())), refused_rows=())

    def __add__(self, other: Hits) -> Hits:
        """Hits of different keys together."""
        both = {
            name: pa.concat_tables([getattr(self, name), getattr(other, name)]) for name in ("refusing", "overtaken")
        }
        return replace(self, **both, refused_rows=())


def judge(entries: pa.Table, events: pa.Table, pairs: pa.Table, *, version: int, types: StructType) -> Hits:
    """Which events the tombstones refuse, and which revive their key.

    `pairs`: row numbers of an entry and an event of one key (`paired`, `paired_rows`).
    """
    taken = entries.take(pairs[_ROW])
    newest = _newest(pairs[_EVENT].to_pylist(), taken)
    order = sorted(event for event, (_, is_mark, _) in newest.items() if not is_mark)
    theirs = events.select([names.SEQUENCE_COLUMN, names.DELETE_COLUMN]).take(pa.array(order, pa.int64()))
    deletes = theirs[names.DELETE_COLUMN].to_pylist()
    refused, refusing, overtaken = [], [], []
    for event, sequence, is_delete in zip(order, orderable(theirs[names.SEQUENCE_COLUMN]), deletes, strict=True):
        tombstone, _, row = newest[event]
        if tombstone > sequence:
            refused.append(event)
            refusing.append(row)
        elif not is_delete:
            overtaken.append(row)
    tombstones = taken.select(types.names)
    return Hits(
        version=version,
        refusing=tombstones.take(pa.array(refusing, pa.int64())),
        overtaken=tombstones.take(pa.array(overtaken, pa.int64())),
        refused_rows=refused,
        types=types,
    )


def paired(entries: pa.Table, events: pa.Table, keys: Sequence[str]) -> pa.Table:
    """The pairs of an entry and an event of one key, except a delete and its own entry, which is neither."""
    one = entries.select(keys).append_column(_ROW, pa.arange(0, entries.num_rows))
    other = events.select(keys).append_column(_EVENT, pa.arange(0, events.num_rows))
    # Most keys of the larger one are not in the smaller; a set is cheaper to look into than a join is to build.
    first = keys[0]
    if one.num_rows > other.num_rows:
        one = one.filter(pc.is_in(one[first], value_set=other[first].combine_chunks()))
    else:
        other = other.filter(pc.is_in(other[first], value_set=one[first].combine_chunks()))
    pairs = one.join(other, list(keys), join_type="inner").select([_ROW, _EVENT])
    own = pc.and_(
        events[names.DELETE_COLUMN].take(pairs[_EVENT]), pc.invert(entries[names.REVIVED_COLUMN].take(pairs[_ROW]))
    )
    of_entries, of_events = (
        table[names.SEQUENCE_COLUMN].take(at) for table, at in ((entries, pairs[_ROW]), (events, pairs[_EVENT]))
    )
    for theirs, its in zip(arrays(of_entries), arrays(of_events), strict=True):
        own = pc.and_(own, pc.fill_null(pc.equal(theirs, its), False))
    return pairs.filter(pc.invert(own))


def paired_rows(rows: pa.Table, keys: Sequence[str]) -> pa.Table:
    """The pairs where each row holds an entry and the event of its key, identified by the key's first row."""
    first: dict[Hashable, int] = {}
    events = [first.setdefault(key, row) for row, key in enumerate(_groups(rows, keys))]
    return pa.table({_ROW: pa.arange(0, rows.num_rows), _EVENT: pa.array(events, pa.int64())})


def standing(entries: pa.Table, keys: Sequence[str]) -> pa.Table:
    """The newest delete of each key that no upsert has overtaken."""
    newest = _newest(_groups(entries, keys), entries)
    return entries.take(pa.array(sorted(row for _, is_mark, row in newest.values() if not is_mark), pa.int64()))


def overtaking(entries: pa.Table, keys: Sequence[str]) -> pa.Table:
    """The newest entry of each key that has older ones, or is a mark: what it overtakes counts no more."""
    groups = _groups(entries, keys)
    count, newest = Counter(groups), _newest(groups, entries)
    rows = sorted(row for key, (_, is_mark, row) in newest.items() if is_mark or count[key] > 1)
    return entries.take(pa.array(rows, pa.int64()))


def _newest(groups: Sequence[Hashable], entries: pa.Table) -> dict[Any, tuple[Any, bool, int]]:
    """The newest entry of each group: sequence, whether it is a mark, row; with one sequence a mark wins."""
    sequences, marks = orderable(entries[names.SEQUENCE_COLUMN]), entries[names.REVIVED_COLUMN].to_pylist()
    newest: dict[Any, tuple[Any, bool, int]] = {}
    for row, (group, sequence, is_mark) in enumerate(zip(groups, sequences, marks, strict=True)):
        if group not in newest or newest[group][:2] < (sequence, is_mark):
            newest[group] = (sequence, is_mark, row)
    return newest


def _groups(rows: pa.Table, keys: Sequence[str]) -> list[Hashable]:
    return list(zip(*(orderable(rows[key]) for key in keys), strict=True))
