"""Tombstones, the deletes of a target as one batch needs them: in the driver, or by Spark.

The tombstone table is an append-only log beside the target: one entry per delete (keys, sequence, time) and, when an
upsert brought a key back, one entry that marks it as revived. Appends never conflict with each other and cost a fifth
of a MERGE (0.2 s against 1 s, Delta 4.4 on Spark 4.2); their files are compacted now and then.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import BooleanType, StructField, StructType, TimestampType

from stream_merge.errors import ConfigError, MergeFailedError
from stream_merge.model import names
from stream_merge.model.logs import tell
from stream_merge.model.settings import MergeSpec
from stream_merge.model.snapshot import TableSnapshot
from stream_merge.shapes import widening
from stream_merge.shapes.batch import Batch, as_stored
from stream_merge.shapes.layout import Layout
from stream_merge.spark import columns
from stream_merge.spark.errors import reason
from stream_merge.spark.evaluate_once import materialised, release
from stream_merge.spark.versions import arrow_frame, arrow_table
from stream_merge.tables import backoff, create_table, spark_table
from stream_merge.tables.files.rows import rewrite, rows, rows_with_keys
from stream_merge.tables.side import late_events
from stream_merge.tables.side.late_events import Hits
from stream_merge.tables.side.side_table import DriverSideTable, Rows, SideCommit, SideTable

log = logging.getLogger(__name__)

BROADCAST_EVENTS = 100_000
"""Up to this many events the batch's keys are broadcast to the scan of the log."""
MOST_JUDGED = 1_000_000
"""So many pairs of an entry and an event are brought to the driver at a time."""
TIDY_FILES = 64
"""The table is compacted when it has this many files."""
TIDY_ENTRIES = 100_000
"""A table with more entries is only compacted, unless it has doubled since it was last compacted or cleared."""
MOST_CLEARED = 1_000_000
"""A table with more entries keeps overtaken ones."""

_ONE_BEGINS = threading.Lock()
_KEY, _SEQUENCE = "__stream_merge_key_{}", "__stream_merge_of_event"
"""Names that no key has."""


def own_log(target_id: str, snapshot: TableSnapshot | None) -> TableSnapshot | None:
    """The tombstones' table, if it belongs to this very target: one that was dropped and re-created starts without."""
    if snapshot is None or snapshot.properties.get(names.TARGET_ID_PROPERTY) != target_id:
        return None
    version = snapshot.properties.get(names.FORMAT_PROPERTY)
    if version not in (None, names.FORMAT_VERSION):
        msg = (
            f"[VERSION_MISMATCH] the tombstone table at {snapshot.location!r} has format {version!r} of another version"
            f" of stream_merge, this one supports {names.FORMAT_VERSION!r}; upgrade stream_merge"
        )
        raise ConfigError(msg)
    return snapshot


@dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """One batch, and the target that it is for."""

    session: SparkSession
    spec: MergeSpec
    target_id: str
    layout: Layout
    batch: Batch
    now_micros: int


class Tombstones(ABC, Generic[Rows]):
    """The tombstones of one batch's keys."""

    def __init__(self, table: SideTable[Rows], scope: Scope) -> None:
        self._table: SideTable[Rows] = table
        self._session, self._spec, self._target_id = scope.session, scope.spec, scope.target_id
        self._layout, self._batch, self._now = scope.layout, scope.batch, scope.now_micros
        self._keys = list(scope.layout.keys)
        retention = scope.spec.tombstone_retention_seconds
        self._oldest = None if retention is None else scope.now_micros - int(retention * 1_000_000)
        """Time of the oldest entry that counts, microseconds since the epoch; None: all count."""

    def version(self) -> int | None:
        """Newest version of the tombstones' table; None while there is none for this target."""
        snapshot = self._table.snapshot()
        return None if snapshot is None else snapshot.version

    def remember(self, commit: SideCommit) -> None:
        """Append the batch's deletes; the table is created before the first one."""
        if self._table.snapshot(newest=False) is None:
            begin(self._session, self._spec, self._target_id, self._layout)
            self._table.snapshot()  # one of a dropped target is cached as it was before it was emptied
        self._table.append_once(self._entries(self._events(are_deletes=True), revived=False), commit)

    def hits(self) -> Hits:
        """The tombstones of the batch's keys.

        In the driver, where a refresh takes requests, at the version that this batch has read: the re-check sees what
        is newer.
        """
        return self._judged(self._table.snapshot(newest=False), self._events())

    def late_hits(self, seen: Hits | None) -> Hits:
        """The tombstones of the merged upserts, without those of events refused before."""
        return self._judged(self._table.snapshot(), self._events(are_deletes=False)).beyond(seen)

    def forget(self, hits: Hits, commit: SideCommit) -> None:
        """Mark the tombstones of revived keys as overtaken, up to their own sequence: newer ones stay.

        Must follow the target's commit: until then the tombstone is all that refuses older events.
        """
        self._table.append_once(self._entries(hits.overtaken, revived=True), commit)

    def tidy(self) -> None:
        """Compact small files when there are many; drop overtaken and expired entries when the table has doubled.

        A commit that another writer makes meanwhile wins; the table is then compacted later.
        """
        files = 0
        for newest in (False, True):  # somebody else may have tidied it meanwhile
            snapshot = self._table.snapshot(newest=newest)
            files = 0 if snapshot is None else snapshot.files or 0
            if files < TIDY_FILES:
                return
        try:
            counts = self._entries_by_file()
            is_cleared = sum(counts) <= TIDY_ENTRIES or 2 * max(counts, default=0) <= sum(counts)
            self._compact(clears=is_cleared, judges=sum(counts) <= MOST_CLEARED)
        except Exception as err:
            conflict = backoff.conflict_class(err)
            if conflict is None:
                raise
            tell(log.info, "side_table_tidied_later", table=self._table.name, conflict=conflict)
        else:
            tell(log.info, "tombstones_tidied", table=self._table.name, files=files)

    @property
    def _types(self) -> StructType:
        """Types of keys and sequence, as Spark has them."""
        fields = [*self._layout.key_fields, StructField(names.SEQUENCE_COLUMN, self._layout.sequence_type)]
        return StructType([StructField(field.name, columns.nullable(field.dataType)) for field in fields])

    def _judged(self, snapshot: TableSnapshot | None, events: Rows) -> Hits:
        none = Hits(version=None if snapshot is None else snapshot.version)
        if snapshot is None or snapshot.files == 0:
            return none
        judged = [
            late_events.judge(entries, matched, pairs, version=snapshot.version, types=self._types)
            for entries, matched, pairs in self._matched(events)
        ]
        return functools.reduce(Hits.__add__, judged) if judged else none

    @abstractmethod
    def _events(self, *, are_deletes: bool | None = None) -> Rows:
        """Keys, sequence and whether it is a delete, of each event; None: of all."""

    @abstractmethod
    def _entries(self, events: Rows | pa.Table, *, revived: bool) -> Rows:
        """Rows of the table, for keys and sequences."""

    @abstractmethod
    def _matched(self, events: Rows) -> Iterable[tuple[pa.Table, pa.Table, pa.Table]]:
        """Entries that count, events, and the pairs of an entry and an event of one key; no key twice."""

    @abstractmethod
    def _entries_by_file(self) -> Sequence[int]:
        """Number of entries in each file of the table."""

    @abstractmethod
    def _compact(self, *, clears: bool, judges: bool) -> None:
        """Compact small files; `clears` drops expired entries, `judges` overtaken ones, too."""


class DriverTombstones(Tombstones[pa.Table]):
    """Tombstones by the driver; `events` are `Rows.arrow` or `Rows.keys` of the batch."""

    def __init__(self, table: DriverSideTable, events: pa.Table, scope: Scope) -> None:
        super().__init__(table, scope)
        self._log = table
        self._all = events

    def _events(self, *, are_deletes: bool | None = None) -> pa.Table:
        if are_deletes is None:
            return self._all
        is_delete = self._all[names.DELETE_COLUMN]
        return self._all.filter(is_delete if are_deletes else pc.invert(is_delete))

    def _entries(self, events: pa.Table, *, revived: bool) -> pa.Table:
        count = events.num_rows
        rows = events.select([*self._keys, names.SEQUENCE_COLUMN])
        rows = rows.append_column(names.REVIVED_COLUMN, pa.array([revived] * count, pa.bool_()))
        recorded_at = pa.array([self._now] * count, pa.timestamp("us", tz="UTC"))
        return rows.append_column(names.RECORDED_AT_COLUMN, recorded_at)

    def hits(self) -> Hits:  # noqa: D102
        handle = self._log.table(newest=False)
        if handle is not None:
            handle.refresh_if_free()
        return super().hits()

    def _matched(self, events: pa.Table) -> Iterator[tuple[pa.Table, pa.Table, pa.Table]]:
        wanted = [*self._keys, names.SEQUENCE_COLUMN, names.REVIVED_COLUMN]
        entries = rows_with_keys(self._log.expected(), events, self._keys, self._batch.bounds)
        entries = self._unexpired(entries).select(wanted)
        yield entries, events, late_events.paired(entries, events, self._keys)

    def _unexpired(self, entries: pa.Table) -> pa.Table:
        if self._oldest is None:
            return entries
        oldest = pa.scalar(self._oldest, pa.timestamp("us", tz="UTC"))
        return entries.filter(pc.greater_equal(entries[names.RECORDED_AT_COLUMN], oldest))

    def _entries_by_file(self) -> list[int]:
        return [count or 0 for count in self._log.expected().files()["num_records"].to_pylist()]

    def _compact(self, *, clears: bool, judges: bool) -> None:
        handle = self._log.expected()
        if not clears or not (judges or self._oldest is not None):
            rewrite(handle)
            return
        entries = self._unexpired(rows(handle))
        rewrite(handle, late_events.standing(entries, self._keys) if judges else entries)


class SparkTombstones(Tombstones[DataFrame]):
    """Tombstones by Spark, for any table and any number of events."""

    def _events(self, *, are_deletes: bool | None = None) -> DataFrame:
        events, is_delete = self._batch.rows.latest(), columns.column(names.DELETE_COLUMN)
        return events if are_deletes is None else events.where(is_delete if are_deletes else ~is_delete)

    def _entries(self, events: DataFrame | pa.Table, *, revived: bool) -> DataFrame:
        rows = arrow_frame(self._session, events, self._types) if isinstance(events, pa.Table) else events
        return rows.select(
            *(columns.column(key) for key in self._keys),
            columns.column(names.SEQUENCE_COLUMN),
            F.lit(revived).alias(names.REVIVED_COLUMN),
            F.timestamp_micros(F.lit(self._now)).alias(names.RECORDED_AT_COLUMN),
        ).coalesce(1)

    def _matched(self, events: DataFrame) -> Iterator[tuple[pa.Table, pa.Table, pa.Table]]:
        """One row for each entry of an event's key, but for a delete's own entry.

        Cost: one Spark job over the files of the log within the bounds; one more for a million pairs.
        """
        bounds = self._batch.bounds.condition(self._session, "log")
        entries = self._unexpired().alias("log").where(bounds)
        keys = [_KEY.format(i) for i in range(len(self._keys))]
        is_delete = columns.column(names.DELETE_COLUMN)
        batch = events.select(
            *(columns.column(key).alias(own) for key, own in zip(self._keys, keys, strict=True)),
            columns.column(names.SEQUENCE_COLUMN).alias(_SEQUENCE),
            is_delete,
        )
        if self._batch.upserts + self._batch.deletes <= BROADCAST_EVENTS:
            batch = F.broadcast(batch)
        sequence, mark = columns.column(names.SEQUENCE_COLUMN), columns.column(names.REVIVED_COLUMN)
        same = columns.all_of(
            columns.column(key, "log") == F.col(own) for key, own in zip(self._keys, keys, strict=True)
        )
        pairs = entries.join(batch, same).where(~(is_delete & ~mark & sequence.eqNullSafe(F.col(_SEQUENCE))))
        wanted = [F.col(own).alias(key) for key, own in zip(self._keys, keys, strict=True)]
        rows, counted = materialised(
            pairs.select(*wanted, sequence, mark, F.col(_SEQUENCE), is_delete), F.count(F.lit(1)).alias("pairs")
        )
        parts = math.ceil(counted["pairs"] / MOST_JUDGED)
        part_of_key = F.pmod(F.hash(*(columns.column(key) for key in self._keys)), F.lit(max(parts, 1)))
        try:
            for number in range(parts):
                part = as_stored(arrow_table(rows if parts == 1 else rows.where(part_of_key == number)))
                matched = part.select([*self._keys, _SEQUENCE, names.DELETE_COLUMN])
                matched = matched.rename_columns([*self._keys, names.SEQUENCE_COLUMN, names.DELETE_COLUMN])
                yield part, matched, late_events.paired_rows(part, self._keys)
        finally:
            release(rows)

    def _unexpired(self) -> DataFrame:
        rows = spark_table.rows(self._session, self._table.name)
        return rows if self._oldest is None else rows.where(~self._is_expired())

    def _is_expired(self) -> Column:
        return columns.column(names.RECORDED_AT_COLUMN) < F.timestamp_micros(F.lit(self._oldest))

    def _entries_by_file(self) -> list[int]:
        rows = spark_table.rows(self._session, self._table.name)
        return [row[1] for row in rows.groupBy(F.input_file_name()).count().collect()]

    def _compact(self, *, clears: bool, judges: bool) -> None:
        """Entries appended meanwhile are never lost: only what is older than an entry that was read goes."""
        if clears and judges:
            self._delete_overtaken(late_events.overtaking(as_stored(arrow_table(self._unexpired())), self._keys))
        if self._oldest is not None:
            spark_table.delta_table(self._session, self._table.name).delete(self._is_expired())
        self._session.sql(f"OPTIMIZE {self._table.name.sql}")

    def _delete_overtaken(self, newest: pa.Table) -> None:
        """Delete the entries (`t`) that the newest one of their key (`s`) overtakes, in one commit."""
        wanted = [*self._types.names, names.REVIVED_COLUMN]
        types = StructType([*self._types, StructField(names.REVIVED_COLUMN, BooleanType())])
        source = arrow_frame(self._session, newest.select(wanted), types).alias("s")
        entry, other = (columns.column(names.SEQUENCE_COLUMN, frame) for frame in ("t", "s"))
        is_overtaken = (entry < other) | (columns.column(names.REVIVED_COLUMN, "s") & (entry <= other))
        same_keys = columns.all_of(columns.column(k, "t") == columns.column(k, "s") for k in self._keys)
        log_table = spark_table.delta_table(self._session, self._table.name).alias("t")
        log_table.merge(source, same_keys & is_overtaken).whenMatchedDelete().execute()


def without_refused(events: DataFrame, hits: Hits | None, layout: Layout, session: SparkSession) -> DataFrame:
    """The events, one per key, that no tombstone refuses."""
    if hits is None or not hits.refused:
        return events
    refused = hits.refusals(session).select(*(columns.column(key) for key in layout.keys))
    if hits.refused <= BROADCAST_EVENTS:
        refused = F.broadcast(refused)
    same = columns.all_of(columns.column(key, "e") == columns.column(key, "r") for key in layout.keys)
    return events.alias("e").join(refused.alias("r"), same, "left_anti")


def begin(session: SparkSession, spec: MergeSpec, target_id: str, layout: Layout) -> None:
    """Create the tombstones' table of a target; one that belongs to a dropped target is emptied."""

    def command() -> None:
        with _ONE_BEGINS:
            left_over = spark_table.find(session, spec.tombstone_target)
            if own_log(target_id, left_over) is None:
                _begin(session, spec, target_id, layout, left_over)

    backoff.commit(command, spec.retry, target=spec.tombstone_target)


def _begin(
    session: SparkSession, spec: MergeSpec, target_id: str, layout: Layout, left_over: TableSnapshot | None
) -> None:
    table = spec.tombstone_target
    fields = [
        *(StructField(f.name, f.dataType) for f in layout.key_fields),
        StructField(names.SEQUENCE_COLUMN, layout.sequence_type),
        StructField(names.REVIVED_COLUMN, BooleanType()),
        StructField(names.RECORDED_AT_COLUMN, TimestampType()),
    ]
    properties = {
        **create_table.recorded_properties(layout),
        names.TARGET_ID_PROPERTY: target_id,
        names.BEGINNING_PROPERTY: uuid4().hex,
    }
    if left_over is None:
        create_table.create_plain(session, table, fields, properties=properties)
        return
    if names.TARGET_ID_PROPERTY not in left_over.properties:
        msg = (
            f"[SIDE_TABLE_NAME_TAKEN] {table!r}, the name of the tombstone table of"
            f" {spec.target!r}, is a table that no sink has created; rename it, or drop it"
        )
        raise ConfigError(msg, target=spec.target)
    former = left_over.properties.get(names.TARGET_ID_PROPERTY)
    tell(log.warning, "tombstones_of_dropped_target_discarded", table=table, target_id=former)
    once = f"stream_merge begins {target_id} after {left_over.properties.get(names.BEGINNING_PROPERTY, '')}"
    create_table.start_over(session, table, fields, properties=properties, once=once)


def widen_schema(
    session: SparkSession, spec: MergeSpec, target_id: str, layout: Layout, snapshot: TableSnapshot
) -> None:
    """Widen the types of keys and sequence to the target's.

    The table is rewritten in one commit: its entries stay valid, and it stays a plain table, which the driver can
    write; it could not with type widening.
    """
    if _widened(spec, layout, snapshot.schema) is None:
        return
    table = spec.tombstone_target

    def command() -> None:
        now = own_log(target_id, spark_table.find(session, table))
        wanted = None if now is None else _widened(spec, layout, now.schema)
        if now is None or wanted is None:
            return
        try:
            spark_table.rewrite(spark_table.rows(session, table).to(wanted), table)
        except Exception as err:
            if backoff.conflict_class(err) is not None:
                raise
            msg = f"[WRITE_FAILED] the types of tombstone table {table!r} cannot be widened: {reason(err)}"
            raise MergeFailedError(msg, target=table) from err
        changed = ", ".join(map(str, widening.changes(now.schema, wanted)))
        tell(log.warning, "tombstones_widened", table=table, columns=changed)

    backoff.commit(command, spec.retry, target=table)


def _widened(spec: MergeSpec, layout: Layout, schema: StructType) -> StructType | None:
    """The table's columns in wider types, or None where its types suffice."""
    own = {**{f.name: f.dataType for f in layout.key_fields}, names.SEQUENCE_COLUMN: layout.sequence_type}
    fields = {f.name: StructField(f.name, f.dataType) for f in schema.fields}  # without ids of column mapping
    for name, dtype in own.items():
        known = fields.get(name)
        wider = None if known is None else widening.widest(dtype, known.dataType)
        if known is None or wider is None:
            has = "no such column" if known is None else known.dataType.simpleString()
            msg = (
                f"[TYPE_MISMATCH] column {name!r} of {spec.target!r} is {dtype.simpleString()}, but tombstone"
                f" table {spec.tombstone_target!r} has {has}; change it back in the target, or drop the tombstone"
                " table, which forgets its deletes"
            )
            raise ConfigError(msg, target=spec.target)
        fields[name] = StructField(name, columns.nullable(columns.merged(dtype, wider)))
    wanted = StructType(list(fields.values()))
    return None if wanted.simpleString() == schema.simpleString() else wanted
