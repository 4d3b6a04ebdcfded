"""What the table knew of a key before this batch: values that events leave out, and what null-value records mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql import types as T

from stream_merge.jobs.kafka.decode import evaluated
from stream_merge.jobs.kafka.ordering import (
    COMPONENTS,
    DELETE,
    EPOCH,
    OFFSET,
    PARTITION,
    POSITION,
    SEQUENCE,
    STREAMED,
    TOPIC,
)
from stream_merge.jobs.kafka.settings import QuerySettings
from stream_merge.jobs.kafka.unread import UNREAD
from stream_merge.model import names
from stream_merge.model.table_ref import TableRef
from stream_merge.shapes import key_bounds
from stream_merge.spark import columns
from stream_merge.tables import spark_table
from stream_merge.tables.side import location

UNAVAILABLE, ABSENT = "$unavailable", "$absent"
OLD_KEY = "$old_key"
"""Key that the row of an event had before; a struct of the key columns, or NULL."""
_PLACE = (TOPIC, PARTITION, OFFSET)
_SEQUENCE = "$sequence"
_IS_EVENT = "$is_event"
_LIFE = "$life"
_CARRIED = "$carried:"
_OVERTAKEN = "$overtaken"
_FOUND = "$found"


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """A target and its remembered deletes, for as long as one batch is prepared."""

    session: SparkSession
    target: TableRef
    keys: tuple[str, ...]
    tombstone_retention: float | None
    """Seconds that the sink remembers deletes; None: for ever."""

    @classmethod
    def of_query(cls, session: SparkSession, settings: QuerySettings) -> Known:
        """Those of a query."""
        return cls(
            session=session,
            target=settings.target,
            keys=settings.keys,
            tombstone_retention=settings.tombstone_retention,
        )

    def rows(self, wanted: DataFrame) -> DataFrame | None:
        """The stored rows of some keys, with their sequence; None where there is no table.

        Cost: one Spark job for the bounds of the keys; the scan is left to whoever runs the frame.
        """
        if spark_table.find(self.session, self.target) is None:
            return None
        return self._matching(spark_table.rows(self.session, self.target), wanted)

    def deletes(self, wanted: DataFrame) -> DataFrame | None:
        """The newest remembered delete of each of some keys; None where nothing is remembered."""
        entries = location.deletes(self.session, self.target, retention_seconds=self.tombstone_retention)
        found = None if entries is None else self._matching(entries, wanted)
        if found is None:
            return None
        by_key = found.groupBy(*_columns(self.keys))
        return by_key.agg(F.max(names.SEQUENCE_COLUMN).alias(names.SEQUENCE_COLUMN))

    def _matching(self, stored: DataFrame, wanted: DataFrame) -> DataFrame | None:
        spelled = {key: columns.resolve(key, stored.columns, case_sensitive=False) for key in self.keys}
        if None in spelled.values():
            return None  # the sink says what is wrong with such a table
        stored = stored.withColumnsRenamed({found: key for key, found in spelled.items() if found is not None})
        # In the events' types: where a key is about to be widened, those of the table cannot hold all bounds.
        fields = tuple(T.StructField(key, wanted.schema[key].dataType) for key in self.keys)
        aggregates = key_bounds.bound_aggregates(fields, F.lit(True)) if key_bounds.boundable(fields) else None
        ends = None if aggregates is None else wanted.agg(*aggregates).first()
        bounds = key_bounds.key_bounds(fields, {} if ends is None else ends.asDict())
        bounded = stored.alias("t").where(bounds.condition(self.session, "t"))
        return bounded.join(wanted.select(*_columns(self.keys)).distinct(), list(self.keys), "left_semi")


Missing = Mapping[str, str | bytes | None]
"""Columns that some event does not carry -> value of an event from before the column, for Spark to cast; None: NULL."""


def fill(events: DataFrame, known: Known, missing: Missing, unread: DataFrame | None = None) -> DataFrame:
    """Give events the values that they do not carry, from the newest version of their row before them.

    That is the newest one, among the batch's events of the key, the stored row and up to the newest
    delete before the event, that carries the column (Debezium leaves out unchanged TOAST values; a column
    may be younger than an event's schema).

    Args:
        events: the row's columns, `SEQUENCE`, `DELETE`, `UNAVAILABLE` and `ABSENT` (names of columns, or NULL).
        known: where rows and deletes are stored.
        missing: as `Missing`.
        unread: `unread_before` of the batch. What stood before such a record does not supply a value: the record may
            have brought another one.

    Returns:
        The same columns; `UNAVAILABLE` names those that no source supplies, and is NULL where there are none.
        Those that are absent and have no source have the value of `missing`.
    """
    lacks = F.col(UNAVAILABLE).isNotNull() | F.col(ABSENT).isNotNull()
    keys = list(known.keys)
    # As columns of their own: Spark 3.5 cannot tell those of a union from themselves in a join.
    affected = events.where(lacks).select(*(columns.column(key).alias(key) for key in keys)).distinct()
    history = _history(events, affected, known)
    in_order = Window.partitionBy(*_columns(keys)).orderBy(F.col(_SEQUENCE), (~F.col(DELETE)).cast("int"))
    lives = history.withColumn(_LIFE, F.sum(F.col(DELETE).cast("int")).over(in_order))
    in_life = Window.partitionBy(*_columns(keys), F.col(_LIFE)).orderBy(F.col(_SEQUENCE))
    gaps = F.concat(columns.or_empty(F.col(UNAVAILABLE)), columns.or_empty(F.col(ABSENT)))
    for name in missing:
        carries = ~F.col(DELETE) & ~F.array_contains(gaps, name)
        place = [F.col(_SEQUENCE)[part].alias(name) for part, name in zip(COMPONENTS[-2:], _PLACE[1:], strict=True)]
        value = F.when(carries, F.struct(columns.column(name).alias("value"), *place))
        lives = lives.withColumn(_CARRIED + name, F.last(value, ignorenulls=True).over(in_life))
    # A stored row or a remembered delete that is newer makes the event stale, whatever it lacks.
    overtaken = F.max(F.when(~F.col(_IS_EVENT), F.col(_SEQUENCE))).over(Window.partitionBy(*_columns(keys)))
    lives = lives.withColumn(_OVERTAKEN, F.coalesce(overtaken > F.col(_SEQUENCE), F.lit(False)))
    lives = lives.where(F.col(_IS_EVENT))
    if unread is not None:
        lives = lives.join(unread, list(_PLACE), "left").withColumns(
            {_CARRIED + name: _carried_after_unread(name) for name in missing}
        )
    values = {}
    for name, default in missing.items():
        carried = columns.column(_CARRIED + name)
        is_older = carried.isNull() & F.array_contains(columns.or_empty(F.col(ABSENT)), name)
        otherwise = F.lit(default).cast(events.schema[name].dataType)
        values[name] = F.when(is_older, otherwise).otherwise(carried.getField("value"))
    filled = lives.withColumns(values)
    unsupplied = [F.when(columns.column(_CARRIED + name).isNull(), F.lit(name)) for name in missing]
    left = F.array_intersect(columns.or_empty(F.col(UNAVAILABLE)), F.array_compact(F.array(*unsupplied)))
    filled = filled.withColumn(UNAVAILABLE, F.when(~F.col(DELETE) & ~F.col(_OVERTAKEN) & (F.size(left) > 0), left))
    untouched = events.join(affected, keys, "left_anti")
    return untouched.select(*_columns(events.columns)).unionByName(filled.select(*_columns(events.columns)))


def _carried_after_unread(name: str) -> Column:
    """What is carried of an unavailable column, unless a record that nobody could read stands between."""
    carried, partition, offset = columns.column(_CARRIED + name), columns.column(PARTITION), columns.column(UNREAD)
    is_after = (carried.getField(PARTITION) == partition) & (carried.getField(OFFSET) >= offset)
    counts = offset.isNull() | ~F.array_contains(columns.or_empty(F.col(UNAVAILABLE)), name) | is_after
    return F.when(counts, carried)


_MOST_KEY_CHANGES = 20
"""Changes of a row's key within one batch that are followed; the values of longer chains count as unavailable."""


def fill_across_key_changes(
    events: DataFrame,
    known: Known,
    missing: Missing,
    held: ExitStack,
    *,
    unread: DataFrame | None = None,
    unread_keys: DataFrame | None = None,
) -> DataFrame:
    """As `fill`, and where a row's key was changed, from the row under the old key, in the batch or the table.

    Args:
        events: as for `fill`, and `OLD_KEY`.
        known: as for `fill`.
        missing: as for `fill`.
        held: frees what is evaluated.
        unread: as for `fill`.
        unread_keys: `unread_keys` of the batch, for rows under their old key.

    Cost: for each change of a row's key two Spark jobs and those of `fill`.
    """
    filled = fill(events, known, missing, unread)
    for _ in range(_MOST_KEY_CHANGES):
        filled = evaluated(filled, held)
        lacking = filled.where(F.col(UNAVAILABLE).isNotNull() & F.col(OLD_KEY).isNotNull())
        supplied = evaluated(_from_old_keys(filled, lacking, known, missing, unread_keys), held)
        if supplied.isEmpty():
            break
        place = [columns.column(name) for name in _PLACE]
        others = filled.join(supplied.select(*place), list(_PLACE), "left_anti")
        filled = fill(others.unionByName(supplied.select(*_columns(filled.columns))), known, missing, unread)
    return filled


def _from_old_keys(
    events: DataFrame, lacking: DataFrame, known: Known, missing: Missing, unread_keys: DataFrame | None
) -> DataFrame:
    """Those of the lacking events that get a value from the row that their old key had before them."""
    own_names = (*missing, UNAVAILABLE, DELETE)
    old_keys = lacking.select(*(F.col(OLD_KEY).getField(key).alias(key) for key in known.keys)).distinct()
    row, event = _history(events, old_keys, known).alias("r"), lacking.alias("e")
    same_row = columns.all_of(
        columns.column(key, "r") == columns.column(OLD_KEY, "e").getField(key) for key in known.keys
    )
    # Of the sequence only epoch and position: the old key may lie in another partition, whose offsets do not compare,
    # and the delete that belongs to the key change stands at the position of the create.
    sequence = columns.column(_SEQUENCE, "r")
    stands = F.struct(
        columns.column(EPOCH, "e").alias(COMPONENTS[0]), columns.column(POSITION, "e").alias(COMPONENTS[1])
    )
    before = F.struct(*(sequence[part].alias(part) for part in COMPONENTS[:2])) < stands
    own = [columns.column(name, "r").alias(name) for name in own_names]
    own += [sequence[part].alias(name) for part, name in zip(COMPONENTS[-2:], _PLACE[1:], strict=True)]
    newest = F.max_by(F.struct(*own), sequence).alias(_FOUND)
    place = [columns.column(name, "e") for name in _PLACE]
    found = event.join(row, same_row & before, "inner").groupBy(*place).agg(newest).where(~F.col(_FOUND)[DELETE])
    lacks, lacked_there = columns.or_empty(F.col(UNAVAILABLE)), columns.or_empty(F.col(_FOUND)[UNAVAILABLE])
    given, left = F.array_except(lacks, lacked_there), F.array_intersect(lacks, lacked_there)
    values = {
        name: F.when(F.array_contains(given, name), F.col(_FOUND)[name]).otherwise(columns.column(name))
        for name in missing
    }
    supplied = lacking.join(found, list(_PLACE), "inner").where(F.size(given) > 0)
    if unread_keys is not None:
        supplied = supplied.alias("e").join(unread_keys.alias("u"), _stands_between(known.keys), "left_anti")
    supplied = supplied.withColumns({**values, UNAVAILABLE: F.when(F.size(left) > 0, left)})
    return supplied.select(*_columns(lacking.columns))


def _stands_between(keys: Sequence[str]) -> Column:
    """Whether a record that nobody could read may stand between the row under an old key and the event.

    One in another partition may: offsets of two partitions do not compare.
    """
    same_row = columns.all_of(columns.column(key, "u") == columns.column(OLD_KEY, "e").getField(key) for key in keys)
    partition, offset = columns.column(PARTITION, "u"), columns.column(OFFSET, "u")
    row = columns.column(_FOUND, "e")
    is_before_row = (partition == row.getField(PARTITION)) & (offset < row.getField(OFFSET))
    is_behind = (partition == columns.column(PARTITION, "e")) & (offset > columns.column(OFFSET, "e"))
    return same_row & ~is_before_row & ~is_behind


def _history(events: DataFrame, affected: DataFrame, known: Known) -> DataFrame:
    """All that is known of the affected keys: events of the batch, the stored row, the remembered delete."""
    sequence = F.struct(*(columns.column(name).alias(part) for name, part in zip(SEQUENCE, COMPONENTS, strict=True)))
    found = events.join(affected, list(known.keys), "left_semi")
    found = found.withColumns({_SEQUENCE: sequence, _IS_EVENT: F.lit(True)})
    for earlier, is_delete in ((known.rows(affected), False), (known.deletes(affected), True)):
        if earlier is not None:
            found = found.unionByName(_as_event(earlier, found.schema, is_delete=is_delete))
    return found


def _as_event(stored: DataFrame, wanted: T.StructType, *, is_delete: bool) -> DataFrame:
    """Stored rows in the shape of events; columns that they lack are absent, those that events lack are left out."""
    parts = zip(_stored_sequence(stored), COMPONENTS, strict=True)
    sequence = F.struct(*(part.alias(name) for part, name in parts))
    own = [f.name for f in wanted.fields if not f.name.startswith("$")]
    have = {name: columns.resolve(name, stored.columns, case_sensitive=False) for name in own}
    lacks = [F.lit(name) for name, found in have.items() if found is None]
    made: dict[str, Column] = {
        _SEQUENCE: sequence,
        _IS_EVENT: F.lit(False),
        DELETE: F.lit(is_delete),
        ABSENT: F.array(*lacks) if lacks else F.lit(None),
    }
    made |= {name: columns.column(found) for name, found in have.items() if found is not None}
    return stored.select(*(made.get(f.name, F.lit(None)).cast(f.dataType).alias(f.name) for f in wanted.fields))


def in_sequence(stored: DataFrame, keys: Sequence[str]) -> DataFrame:
    """Keys and `SEQUENCE` of stored rows or remembered deletes."""
    parts = zip(SEQUENCE, _stored_sequence(stored), strict=True)
    return stored.select(*_columns(keys), *(part.alias(name) for name, part in parts))


def _stored_sequence(stored: DataFrame) -> list[Column]:
    """Its components; a row that was there before the first run has none, and is the oldest of all."""
    has_sequence = names.SEQUENCE_COLUMN in stored.columns
    parts = [F.col(names.SEQUENCE_COLUMN)[part] if has_sequence else F.lit(None) for part in COMPONENTS]
    return [F.coalesce(part, F.lit(-1)) for part in parts]


def deletes_of_null_values(
    nulls: DataFrame, events: DataFrame, known: Known, unread: DataFrame | None = None
) -> DataFrame:
    """Null-value records that delete something, with the sequence of the delete.

    Such a record has no position of its own. It stands behind the newest event of its key at a lower offset
    of its partition, of the batch or stored, wherever the batch begins. Behind a row of an earlier epoch, or one from
    before the first run, it stands at the very beginning of its own epoch: offsets and positions of then do not
    compare. One before which nothing is known of its key but a record that nobody could read, and that a delete is
    remembered, stands behind that delete; and where there is none, at that beginning, too.

    Args:
        nulls: the row's columns (only keys have values), `EPOCH`, `PARTITION`, `OFFSET`.
        events: upserts and deletes of the batch: the row's columns, `SEQUENCE`, `DELETE`.
        known: where rows and deletes are stored.
        unread: `unread_before` of the batch.

    Returns:
        The columns of `events`, one row for each null-value record that means something.
    """
    keys = list(known.keys)
    earlier = events.select(*_columns([*keys, *SEQUENCE]))
    stored = known.rows(nulls)
    if stored is not None:
        earlier = earlier.unionByName(in_sequence(stored, keys))
    behind = _behind_the_newest(nulls, earlier, keys)
    deletes = _placed_deletes(behind, events.schema)
    if unread is None:
        return deletes
    others = nulls.join(unread, list(_PLACE), "left_semi").join(behind, list(_PLACE), "left_anti")
    first = {POSITION: F.lit(0), STREAMED: F.lit(0), DELETE: F.lit(True)}
    gone = known.deletes(others)
    if gone is not None:
        behind_deletes = _behind_the_newest(others, in_sequence(gone, keys), keys)
        deletes = deletes.unionByName(_placed_deletes(behind_deletes, events.schema))
        others = others.join(behind_deletes, list(_PLACE), "left_anti")
    return deletes.unionByName(_with(first, others, events.schema))


def _behind_the_newest(nulls: DataFrame, earlier: DataFrame, keys: list[str]) -> DataFrame:
    """Those of the null-value records that something of their key precedes, and `_FOUND`, the newest of it."""
    n, e = nulls.alias("n"), earlier.alias("e")
    same_key = columns.all_of(columns.column(key, "n") == columns.column(key, "e") for key in keys)
    same_partition = columns.column(PARTITION, "n") == columns.column(PARTITION, "e")
    before = (same_partition & (columns.column(OFFSET, "e") < columns.column(OFFSET, "n"))) | (
        columns.column(EPOCH, "e") < columns.column(EPOCH, "n")
    )
    newest = F.max(F.struct(*(columns.column(name, "e").alias(name) for name in SEQUENCE))).alias(_FOUND)
    own = [columns.column(name, "n") for name in nulls.columns]
    # Grouped by where the record stands, which is unique; other columns of a group are all equal.
    place = [columns.column(name, "n") for name in _PLACE]
    rest = [F.first(column).alias(name) for column, name in zip(own, nulls.columns, strict=True) if name not in _PLACE]
    return n.join(e, same_key & before, "inner").groupBy(*place).agg(newest, *rest)


def _placed_deletes(behind: DataFrame, wanted: T.StructType) -> DataFrame:
    """Deletes directly behind what was found; of an earlier epoch, at the very beginning of their own."""
    is_of_now = F.col(_FOUND)[EPOCH] == columns.column(EPOCH)
    given = {name: F.when(is_of_now, F.col(_FOUND)[name]).otherwise(F.lit(0)) for name in (POSITION, STREAMED)}
    return _with({**given, DELETE: F.lit(True)}, behind, wanted)


def _with(given: Mapping[str, Column], found: DataFrame, wanted: T.StructType) -> DataFrame:
    """The wanted columns: those that are given, else as they are found, else NULL."""
    have = {**{name: columns.column(name) for name in found.columns}, **given}
    return found.select(*(have.get(f.name, F.lit(None)).cast(f.dataType).alias(f.name) for f in wanted.fields))


def _columns(wanted: Sequence[str]) -> list[Column]:
    return [columns.column(name) for name in wanted]
