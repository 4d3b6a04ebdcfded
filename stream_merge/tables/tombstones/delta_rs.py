"""Which deletes are remembered, and which events they refuse, by delta-rs: the entries of `tombstones.spark`."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructField, StructType

from stream_merge.errors import MergeFailedError
from stream_merge.model import names
from stream_merge.model.logs import tell
from stream_merge.model.settings import MergeSpec
from stream_merge.shapes.arrow_order import orderable
from stream_merge.shapes.key_bounds import KeyBounds
from stream_merge.shapes.layout import Layout
from stream_merge.shapes.sequence import arrays
from stream_merge.spark import columns
from stream_merge.spark.versions import of_arrow
from stream_merge.tables import retry
from stream_merge.tables.delta_rs import sql
from stream_merge.tables.delta_rs.append import append_once
from stream_merge.tables.delta_rs.kept import MOST_KEPT_ROWS
from stream_merge.tables.delta_rs.table import NativeTable
from stream_merge.tables.side_commits import SideCommit
from stream_merge.tables.tombstones import rules
from stream_merge.tables.tombstones.base import Hits

log = logging.getLogger(__name__)

_ROW, _EVENT = "__stream_merge_row", "__stream_merge_event"
TIDY_ENTRIES = 100_000
"""A log with more entries is only packed, unless it has doubled since it was last packed or cleared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeHits(Hits):
    """The events of a batch whose key has a tombstone."""

    entries: pa.Table | None = None
    """Keys and `__stream_merge_sequence` of the tombstones that were hit."""
    refused_rows: Sequence[int] = field(default=())
    """Events (row numbers) that are refused, and in the same order their tombstones (rows of `entries`)."""
    refused_by: Sequence[int] = field(default=())
    revived_by: Sequence[int] = field(default=())
    """Tombstones (rows of `entries`) that an upsert overtakes."""
    types: StructType = field(default_factory=StructType)
    """Of keys and tombstone sequence, for Spark."""

    def live(self, events: pa.Table) -> pa.Table:
        """The events, the very ones that were looked for, that no tombstone refuses."""
        if not self.refused:
            return events
        keep = [True] * events.num_rows
        for row in self.refused_rows:
            keep[row] = False
        return events.filter(pa.array(keep))

    def refused_entries(self) -> pa.Table:
        """Keys and tombstone sequence of the refused events."""
        return self._entries(self.refused_by)

    def revived_entries(self) -> pa.Table:
        """Keys and tombstone sequence of the keys that an upsert brings back."""
        return self._entries(self.revived_by)

    def refusals(self, session: SparkSession) -> DataFrame:
        """As `refused_entries`, for Spark."""
        return of_arrow(session, self.refused_entries(), self.types)

    def _entries(self, rows: Sequence[int]) -> pa.Table:
        if self.entries is None:
            msg = "no tombstone was hit"
            raise ValueError(msg)
        return self.entries.take(pa.array(rows, pa.int64())).select(self.types.names)


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeLog:
    """The log's table, as one batch needs it."""

    newest: Callable[[], NativeTable | None]
    """Up to date; None while there is none."""
    held: Callable[[], NativeTable | None]
    """As this batch has seen it last; None where it has not."""
    start: Callable[[], None]
    """Creates it (by Spark: once in a target's life)."""


class NativeTombstones:
    """Works on the tombstones of one batch.

    Args:
        log: where they are remembered.
        spec: what the sink was told.
        target_id: Delta table id of the target.
        layout: how the batch's columns map onto the target.
        events: of the batch, one row per key, with at least keys, sequence and whether it is a delete.
        bounds: least and greatest keys.
        now_micros: time of the call, microseconds since the epoch.
    """

    def __init__(
        self,
        *,
        log: NativeLog,
        spec: MergeSpec,
        target_id: str,
        layout: Layout,
        events: pa.Table,
        bounds: KeyBounds,
        now_micros: int,
    ) -> None:
        self._table = log
        self._spec = spec
        self._target_id = target_id
        self._layout = layout
        self._events = events
        self._bounds = bounds
        self._now = now_micros

    def version(self) -> int | None:
        """The log's newest version, or None while there is none for this target."""
        found = self._find()
        return None if found is None else found.version

    def remember(self, commit: SideCommit) -> None:
        """Append the batch's deletes; the log is created before the first one."""
        if self._at_hand() is None:
            self._table.start()
            self._table.newest()  # one of a dropped target is held as it was before it was emptied
        self._append(self._rows(self._events.filter(self._events[names.DELETE_COLUMN]), revived=False), commit)

    def forget(self, hits: NativeHits, commit: SideCommit) -> None:
        """Mark these tombstones as overtaken, up to their own sequence: newer ones stay.

        Where a commit takes requests, the next one of the log brings the marks along, since nothing depends on them: of
        a tombstone without one an older event is `stale`, and with one it is `unaffected`, by the newer row.
        """
        marks = self._rows(hits.revived_entries(), revived=True)
        found = self._at_hand()
        if found is None or not found.postpone(marks, owner=self._target_id):
            self._append(marks, commit)

    def hits(self) -> NativeHits:
        """The tombstones of the batch's keys.

        Where a look at the log takes requests, by the last one of this batch: the re-check sees what has come since.
        """
        found = self._at_hand()
        if found is not None:
            found.refresh_if_free()
        return self._hits(self._events, found)

    def late_hits(self, seen: NativeHits | None) -> NativeHits:
        """The tombstones of the upserts that were merged."""
        merged = self._events if seen is None else seen.live(self._events)
        return self._hits(merged.filter(pc.invert(merged[names.DELETE_COLUMN])), self._find())

    def _hits(self, events: pa.Table, found: NativeTable | None) -> NativeHits:
        if found is None or not found.files().num_rows:
            return NativeHits(version=None if found is None else found.version)
        keys = list(self._layout.keys)
        entries = self._entries(found)
        postponed = found.postponed(self._target_id)
        if postponed is not None:
            marks = postponed.select(entries.column_names)
            entries = pa.concat_tables([entries, marks.cast(_with_types_of(marks.schema, entries.schema))])
        entries = entries.cast(_with_types_of(entries.schema, events.schema))
        pairs = _without_their_own(_pairs(entries.select(keys), events.select(keys)), entries, events)
        judged = _judged(entries, events, pairs, found.version)
        return replace(judged, types=self._types)

    @property
    def _types(self) -> StructType:
        """Of keys and sequence, as Spark has them."""
        keys = [StructField(f.name, columns.nullable(f.dataType)) for f in self._layout.key_fields]
        return StructType([*keys, StructField(names.SEQUENCE_COLUMN, columns.nullable(self._layout.sequence_type))])

    def _entries(self, found: NativeTable) -> pa.Table:
        """Entries that may concern keys within the bounds: from memory where the log is small."""
        wanted = [*self._layout.keys, names.SEQUENCE_COLUMN, names.REVIVED_COLUMN]
        if _entries_of(found) <= MOST_KEPT_ROWS:
            return self._counting(found.rows()).select(wanted)
        conditions = [*sql.bounds(self._bounds, "log"), *self._unexpired()]
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        return found.query(f"SELECT {', '.join(map(sql.quote, wanted))} FROM log{where}")

    def _counting(self, entries: pa.Table) -> pa.Table:
        """The entries that still count."""
        if self._oldest_micros is None:
            return entries
        oldest = pa.scalar(self._oldest_micros, pa.timestamp("us", tz="UTC"))
        return entries.filter(pc.greater_equal(entries[names.RECORDED_AT_COLUMN], oldest))

    def tidy(self) -> None:
        """Pack small files when there are many; drop overtaken and expired entries when the log has doubled.

        A commit that another writer makes meanwhile wins; the log is then tidied later.
        """
        found = self._at_hand()
        if found is not None and found.files().num_rows >= rules.TIDY_FILES:
            found = self._find()  # somebody else may have tidied it up meanwhile
        if found is None or found.files().num_rows < rules.TIDY_FILES:
            return
        before = found.files().num_rows
        try:
            self._clear(found) if self._worth_clearing(found) else found.pack()
        except Exception as err:
            if retry.conflict_class(err) is None:
                raise
            tell(log.info, "side_table_tidied_later", table=self._spec.tombstone_target)
        else:
            tell(log.info, "tombstones_tidied", table=self._spec.tombstone_target, files=before)

    def _worth_clearing(self, found: NativeTable) -> bool:
        counts = found.files()["num_records"].to_pylist()
        known = [count for count in counts if count is not None]
        return bool(sum(known) <= TIDY_ENTRIES or 2 * max(known, default=0) <= sum(known))

    def _clear(self, found: NativeTable) -> None:
        """Keep the newest delete of each key that no upsert has overtaken; a small log is in memory."""
        if _entries_of(found) <= MOST_KEPT_ROWS:
            found.replace(standing(self._counting(found.rows()), self._layout.keys))
            return
        keys = ", ".join(sql.quote(key) for key in self._layout.keys)
        order = ", ".join(f"{sql.column('log', *path)} DESC" for path in sql.sequence_paths(self._layout))
        # Of two entries with the same sequence the revival counts.
        ranked = f"ROW_NUMBER() OVER (PARTITION BY {keys} ORDER BY {order}, {sql.quote(names.REVIVED_COLUMN)} DESC)"
        unexpired = self._unexpired()
        where = f" WHERE {' AND '.join(unexpired)}" if unexpired else ""
        kept = found.query(
            f"SELECT * FROM (SELECT *, {ranked} AS {_ROW} FROM log{where})"
            f" WHERE {_ROW} = 1 AND NOT {sql.quote(names.REVIVED_COLUMN)}"
        )
        found.replace(kept.drop_columns([_ROW]))

    def _rows(self, events: pa.Table, *, revived: bool) -> pa.Table:
        """Of the log, for keys and sequences."""
        count = events.num_rows
        rows = events.select([*self._layout.keys, names.SEQUENCE_COLUMN])
        rows = rows.append_column(names.REVIVED_COLUMN, pa.array([revived] * count, pa.bool_()))
        recorded_at = pa.array([self._now] * count, pa.timestamp("us", tz="UTC"))
        return rows.append_column(names.RECORDED_AT_COLUMN, recorded_at)

    def _append(self, rows: pa.Table, commit: SideCommit) -> None:
        table, at_hand = self._spec.tombstone_target, self._at_hand()
        if at_hand is None:
            msg = f"[TABLE_NOT_FOUND] {table!r} disappeared during batch {commit.batch_id}; restart the query"
            raise MergeFailedError(msg, target=table, batch_id=commit.batch_id)
        append_once(rows, table, self._find, commit, at_hand=at_hand)

    def _find(self) -> NativeTable | None:
        return self._of_target(self._table.newest())

    def _at_hand(self) -> NativeTable | None:
        """As `_find`, at the version that this batch has seen last: a commit on an older one loses."""
        held = self._table.held()
        return self._find() if held is None else self._of_target(held)

    def _of_target(self, found: NativeTable | None) -> NativeTable | None:
        if found is None or rules.log_of(self._target_id, found.snapshot()) is None:
            return None
        found.postponed(self._target_id)  # marks of a table that was dropped would overtake deletes of this one
        return found

    @property
    def _oldest_micros(self) -> int | None:
        """When the oldest entry that still counts was recorded, microseconds since the epoch; None: all count."""
        retention = self._spec.tombstone_retention_seconds
        return None if retention is None else self._now - int(retention * 1_000_000)

    def _unexpired(self) -> list[str]:
        if self._oldest_micros is None:
            return []
        recorded_at = sql.column("log", names.RECORDED_AT_COLUMN)
        return [f"{recorded_at} >= arrow_cast({self._oldest_micros}, 'Timestamp(Microsecond, Some(\"UTC\"))')"]


def standing(entries: pa.Table, keys: Sequence[str]) -> pa.Table:
    """The newest delete of each key that no upsert has overtaken; of two entries with one sequence the mark counts."""
    places = zip(orderable(entries[names.SEQUENCE_COLUMN]), entries[names.REVIVED_COLUMN].to_pylist(), strict=True)
    owners = zip(*(orderable(entries[key]) for key in keys), strict=True)
    newest: dict[tuple[Any, ...], tuple[tuple[Any, bool], int]] = {}
    for row, (key, place) in enumerate(zip(owners, places, strict=True)):
        if key not in newest or newest[key][0] < place:
            newest[key] = (place, row)
    return entries.take(pa.array(sorted(row for (_, mark), row in newest.values() if not mark), pa.int64()))


def _judged(entries: pa.Table, events: pa.Table, pairs: pa.Table, version: int) -> NativeHits:
    """Which events the tombstones refuse, and which revive their key.

    Args:
        entries: of the log.
        events: of the batch.
        pairs: row numbers of an entry and an event of one key.
        version: of the log.
    """
    hit = pairs[_ROW].to_pylist()
    if not hit:
        return NativeHits(version=version)
    marks = entries[names.REVIVED_COLUMN].take(pairs[_ROW]).to_pylist()
    sequences = orderable(entries[names.SEQUENCE_COLUMN].take(pairs[_ROW]))
    newest: dict[int, tuple[Any, int]] = {}
    overtaken: dict[int, Any] = {}
    for event, entry, mark, sequence in zip(pairs[_EVENT].to_pylist(), hit, marks, sequences, strict=True):
        if mark:
            overtaken[event] = max(overtaken.get(event, sequence), sequence)
        elif event not in newest or newest[event][0] < sequence:
            newest[event] = (sequence, entry)
    standing = {
        event: found for event, found in newest.items() if event not in overtaken or overtaken[event] < found[0]
    }
    order = sorted(standing)
    taken = pa.array(order, pa.int64())
    theirs = orderable(events[names.SEQUENCE_COLUMN].take(taken))
    deletes = events[names.DELETE_COLUMN].take(taken).to_pylist()
    refused = [(e, standing[e][1]) for e, s in zip(order, theirs, strict=True) if standing[e][0] > s]
    stale = {event for event, _ in refused}
    revived = [standing[e][1] for e, d in zip(order, deletes, strict=True) if e not in stale and not d]
    return NativeHits(
        refused=len(refused),
        revived=len(revived),
        version=version,
        entries=entries,
        refused_rows=[event for event, _ in refused],
        refused_by=[entry for _, entry in refused],
        revived_by=revived,
    )


def _pairs(entries: pa.Table, events: pa.Table) -> pa.Table:
    """Entries and events (row numbers `_ROW` and `_EVENT`) of the same key.

    Args:
        entries: keys.
        events: keys.
    """
    key = entries.column_names[0]
    one = entries.append_column(_ROW, pa.arange(0, entries.num_rows))
    other = events.append_column(_EVENT, pa.arange(0, events.num_rows))
    # Most keys of the larger one are not in the smaller; a set is cheaper to look into than a join is to build.
    if one.num_rows > other.num_rows:
        one = one.filter(pc.is_in(one[key], value_set=other[key].combine_chunks()))
    else:
        other = other.filter(pc.is_in(other[key], value_set=one[key].combine_chunks()))
    return one.join(other, entries.column_names, join_type="inner").select([_ROW, _EVENT])


def _without_their_own(pairs: pa.Table, entries: pa.Table, events: pa.Table) -> pa.Table:
    """The pairs but for those of a delete and what remembers this very delete: it neither refuses nor is overtaken."""
    entry, event = pairs[_ROW], pairs[_EVENT]
    own = pc.and_(events[names.DELETE_COLUMN].take(event), pc.invert(entries[names.REVIVED_COLUMN].take(entry)))
    one, other = (table[names.SEQUENCE_COLUMN].take(at) for table, at in ((entries, entry), (events, event)))
    for theirs, its in zip(arrays(one), arrays(other), strict=True):
        own = pc.and_(own, pc.fill_null(pc.equal(theirs, its), False))
    return pairs.filter(pc.invert(own))


def _entries_of(found: NativeTable) -> float:
    """How many entries a log has; endless where its statistics do not say."""
    counts = found.files()["num_records"]
    return math.inf if counts.null_count else pc.sum(counts).as_py() or 0


def _with_types_of(schema: pa.Schema, wanted: pa.Schema) -> pa.Schema:
    """The schema with the types of equally named columns: delta-rs answers with other encodings."""
    types = {field.name: field.type for field in wanted}
    return pa.schema([pa.field(field.name, types.get(field.name, field.type)) for field in schema])
