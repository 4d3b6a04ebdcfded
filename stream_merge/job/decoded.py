"""A micro-batch of records, read from the topic once: what each of them is, and how many there are of each kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from stream_merge import columns
from stream_merge.errors import ConfigError
from stream_merge.job.offsets import Range
from stream_merge.job.row_schema import RowSchema
from stream_merge.job.sequence import PARTITION, TOPIC
from stream_merge.sources.decoding import events
from stream_merge.sources.events import OLD_KEY, ROW
from stream_merge.sources.formats.base import Kind
from stream_merge.spark_internals import release

Place = tuple[str, int]
"""Topic and partition."""


@dataclass(kw_only=True, slots=True)
class Counts:
    """Records of one partition in one batch."""

    kinds: Counter[str] = field(default_factory=Counter)
    filtered: Counter[str] = field(default_factory=Counter)
    """Reason -> records."""

    @property
    def records(self) -> int:
        """All that the broker delivered."""
        return sum(self.kinds.values())

    def add(self, other: Counts) -> None:
        """Count another batch's, too."""
        self.kinds.update(other.kinds)
        self.filtered.update(other.filtered)


@dataclass(kw_only=True, slots=True)
class DecodedBatch:
    """The evaluated records of a batch; nothing after this reads the topic again."""

    frames: list[DataFrame]
    """Columns of `decoding.META` and the row; together each record once."""
    counts: Mapping[Place, Counts]
    highest_position: int | None
    lowest_positions: Mapping[Place, int]
    """Of each partition that has events."""
    newest_millis: int | None
    """Commit time of the newest event at the source, milliseconds since the epoch."""
    first_truncate: tuple[str, int, int] | None
    """Topic, partition and offset."""
    connector: str | None
    """Name of the source that the connector gives, of one of the events."""
    old_keys: int
    """Events that lack values and say which key their row had before."""
    row: T.StructType
    missing: list[str]
    """Columns that some event does not carry."""
    _held: list[DataFrame] = field(default_factory=list)

    def of_kinds(self, *kinds: Kind) -> DataFrame:
        """The records of some kinds, all rows in the newest columns."""
        wanted = F.col("kind").isin([str(kind) for kind in kinds])
        parts = [self._with_all_columns(frame.where(wanted)) for frame in self.frames]
        found = parts[0]
        for part in parts[1:]:
            found = found.unionByName(part)
        return found

    def total(self, kind: Kind) -> int:
        """Records of a kind in all partitions."""
        return sum(counts.kinds[str(kind)] for counts in self.counts.values())

    @property
    def records(self) -> int:
        """All that the broker delivered."""
        return sum(counts.records for counts in self.counts.values())

    def kinds(self) -> Counter[str]:
        """Records by kind."""
        found: Counter[str] = Counter()
        for counts in self.counts.values():
            found.update(counts.kinds)
        return found

    def gaps(self, topic: str, partition: int, covered: Range) -> int:
        """Offsets without a record."""
        counts = self.counts.get((topic, partition))
        return len(covered) - (0 if counts is None else counts.records)

    def null_values_are_deletes(self, resolved: Mapping[Place, int]) -> None:
        """So many null-value records of each partition delete something; the others say nothing new."""
        for place, counts in self.counts.items():
            nulls = counts.kinds.pop(str(Kind.NULL_VALUE), 0)
            meant = resolved.get(place, 0)
            counts.kinds.update({str(Kind.DELETE): meant, str(Kind.REDUNDANT): nulls - meant})

    def hold(self, frame: DataFrame) -> None:
        """Free this frame, too, when the batch is released."""
        self._held.append(frame)

    def release(self) -> None:
        """Free what was evaluated."""
        for frame in self._held:
            release(frame)

    def _with_all_columns(self, frame: DataFrame) -> DataFrame:
        """Rows that were decoded before the batch's last column was known."""
        found, old_key = frame.schema[ROW].dataType, self.frames[-1].schema[OLD_KEY].dataType
        if found == self.row:
            return frame
        if frame.schema[OLD_KEY].dataType != old_key:  # decoded before the key columns were known
            frame = frame.withColumn(OLD_KEY, F.lit(None).cast(old_key))
        row = columns.column(ROW)
        have = set(found.names) if isinstance(found, T.StructType) else set()
        fields = [
            (row.getField(f.name) if f.name in have else F.lit(None)).cast(f.dataType).alias(f.name)
            for f in self.row.fields
        ]
        grown = F.struct(*fields)
        later = [F.lit(f.name) for f in self.row.fields if f.name not in have]
        absent = F.concat(columns.or_empty(F.col("absent")), F.array(*later))
        return frame.withColumns({ROW: F.when(row.isNotNull(), grown), "absent": absent})


def refuse_unknown_keys(batch: DecodedBatch) -> None:
    """Stop for null-value records whose keys nobody can read yet.

    Raises:
        ConfigError: no event so far has a schema, and the job file declares no columns.
    """
    records = batch.total(Kind.OTHER_SCHEMA)
    if records:
        msg = (
            f"{records} null-value records came before any event whose schema says how their keys are written; declare"
            " 'columns' in the job file"
        )
        raise ConfigError(msg)


def evaluate(records: DataFrame, rows: RowSchema, max_value_bytes: int) -> DecodedBatch:
    """Decode a batch, and let new schemas of events in.

    Cost: one Spark job that reads the topic, one over the decoded records for the counts; where a schema is
    new, two more over those records that are written in it.

    Raises:
        ConfigError: a new schema does not fit the target.
    """

    def decoded(source: DataFrame) -> DataFrame:
        # A local checkpoint: a lost executor fails the batch instead of reading the topic again.
        return events(source, rows.decoder(max_value_bytes)).localCheckpoint(eager=True)

    held: list[DataFrame] = []
    before = rows.columns.names
    try:
        first = decoded(records)
        held.append(first)
        frames = [first]
        tally = _tally(first)
        if tally.new_schemas or tally.others:
            for schema_id in tally.new_schemas:
                rows.admit(schema_id)
            other = F.col("kind") == str(Kind.OTHER_SCHEMA)
            again = first.where(other).withColumnsRenamed({"raw_key": "key", "raw_value": "value"})
            second = decoded(again)
            held.append(second)
            frames = [first.where(~other), second]
            grown = set(rows.columns.names) - set(before)
            tally = tally.replaced_by(_tally(second))
            if tally.upserts_before:
                tally.missing |= grown
    except BaseException:
        for frame in held:
            release(frame)
        raise
    return DecodedBatch(
        frames=frames,
        counts=tally.counts,
        highest_position=tally.highest_position,
        lowest_positions=tally.lowest_positions,
        newest_millis=tally.newest_millis,
        first_truncate=tally.first_truncate,
        connector=tally.connector,
        old_keys=tally.old_keys,
        row=rows.columns,
        missing=sorted(tally.missing),
        _held=held,
    )


@dataclass(kw_only=True, slots=True)
class _Tally:
    counts: dict[Place, Counts] = field(default_factory=dict)
    new_schemas: list[str] = field(default_factory=list)
    highest_position: int | None = None
    lowest_positions: dict[Place, int] = field(default_factory=dict)
    newest_millis: int | None = None
    connector: str | None = None
    old_keys: int = 0
    first_truncate: tuple[str, int, int] | None = None
    missing: set[str] = field(default_factory=set)
    upserts_before: int = 0
    """Upserts of the first look, whose rows lack the columns that the second one brought."""

    @property
    def others(self) -> int:
        return sum(counts.kinds[str(Kind.OTHER_SCHEMA)] for counts in self.counts.values())

    def replaced_by(self, second: _Tally) -> _Tally:
        """With the second look instead of those that were left for it."""
        upserts = sum(counts.kinds[str(Kind.UPSERT)] for counts in self.counts.values())
        for place, counts in self.counts.items():
            counts.kinds.pop(str(Kind.OTHER_SCHEMA), None)
            again = second.counts.get(place)
            if again is not None:
                counts.kinds.update(again.kinds)
                counts.filtered.update(again.filtered)
        lowest = dict(self.lowest_positions)
        for place, position in second.lowest_positions.items():
            lowest[place] = min(position, lowest.get(place, position))
        return _Tally(
            counts=self.counts,
            lowest_positions=lowest,
            highest_position=_most(self.highest_position, second.highest_position),
            newest_millis=_most(self.newest_millis, second.newest_millis),
            connector=second.connector or self.connector,
            old_keys=self.old_keys + second.old_keys,
            first_truncate=self.first_truncate or second.first_truncate,
            missing=self.missing | second.missing,
            upserts_before=upserts,
        )


def _tally(frame: DataFrame) -> _Tally:
    """Cost: one Spark job."""
    noted = F.when(F.col("kind").isin(str(Kind.FILTERED), str(Kind.OTHER_SCHEMA)), F.col("note"))
    grouped = frame.groupBy("topic", "partition", "kind", noted.alias("note")).agg(
        F.count(F.lit(1)).alias("records"), *_extremes()
    )
    tally = _Tally()
    for row in grouped.collect():
        counts = tally.counts.setdefault((row["topic"], row["partition"]), Counts())
        counts.kinds[row["kind"]] += row["records"]
        if row["kind"] == Kind.FILTERED:
            counts.filtered[row["note"]] += row["records"]
        if row["kind"] == Kind.OTHER_SCHEMA and row["note"] is not None and row["note"] not in tally.new_schemas:
            tally.new_schemas.append(row["note"])
        if row["kind"] == Kind.TRUNCATE and tally.first_truncate is None:
            tally.first_truncate = (row["topic"], row["partition"], row["first_offset"])
        tally.highest_position = _most(tally.highest_position, row["highest_position"])
        tally.newest_millis = _most(tally.newest_millis, row["newest_millis"])
        tally.missing.update(row["missing"])
        tally.connector = row["connector"] or tally.connector
        tally.old_keys += row["old_keys"]
        if row["lowest_position"] is not None:
            place, lowest = (row["topic"], row["partition"]), row["lowest_position"]
            tally.lowest_positions[place] = min(lowest, tally.lowest_positions.get(place, lowest))
    tally.new_schemas.sort()
    return tally


def _extremes() -> list[Column]:
    lacking = [columns.or_empty(F.col(name)) for name in ("unavailable", "absent")]
    return [
        F.min("offset").alias("first_offset"),
        F.max("position").alias("highest_position"),
        F.min("position").alias("lowest_position"),
        F.max("source_millis").alias("newest_millis"),
        F.max("connector").alias("connector"),
        F.count(OLD_KEY).alias("old_keys"),
        F.flatten(F.collect_set(F.array_union(*lacking))).alias("missing"),
    ]


def counted_by_place(events: DataFrame) -> tuple[DataFrame, dict[Place, int]]:
    """Evaluate events, and count them by topic and partition.

    Cost: two Spark jobs.
    """
    found = events.localCheckpoint(eager=True)
    rows = found.groupBy(columns.column(TOPIC), columns.column(PARTITION)).count().collect()
    return found, {(topic, partition): number for topic, partition, number in rows}


def _most(one: int | None, other: int | None) -> int | None:
    return max((value for value in (one, other) if value is not None), default=None)
