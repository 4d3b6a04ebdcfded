"""What a batch of records holds, added up: by kind and partition, and where its events stand in the source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from stream_merge.jobs.kafka.batch_offsets import Place, Range
from stream_merge.sources.decode.events import OLD_KEY
from stream_merge.sources.envelopes.base import Kind
from stream_merge.spark import columns

K = TypeVar("K")

_GROUP = ("topic", "partition", "kind", "server", "note")
_NOTED = [str(Kind.FILTERED), str(Kind.OTHER_SCHEMA)]
"""Kinds of which the note is a reason or a schema, few of which there are."""
_CHANGES = {str(Kind.UPSERT), str(Kind.DELETE), str(Kind.NULL_VALUE)}
_REACHED, _REACHED_BY_CHANGE = "reached", "reached_by_change"
"""The later one of an event's own position and of the last commit before it. Of a healthy source it never falls back
within a partition, unless the connector delivers again: changes come by commit, those of a transaction in the order of
the log, and all of them lie before their commit. The own position alone falls back by what the server has written while
a transaction was open. Rows that a snapshot has read do not count for the highest: they stand at the log's end of then,
and changes of transactions that were open lie before it, and come after it."""
_EXTREMES = {
    "first_offset": ("offset", "min"),
    "highest_position": (_REACHED_BY_CHANGE, "max"),
    "lowest_position": (_REACHED, "min"),
    "newest_millis": ("source_millis", "max"),
    "has_reads": ("is_snapshot", "max"),
    "has_only_reads": ("is_snapshot", "min"),
    "connector": ("connector", "max"),
}
"""What is asked of each group: name -> column and function."""


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

    def __add__(self, other: Counts) -> Counts:
        """Of two batches."""
        return Counts(kinds=self.kinds + other.kinds, filtered=self.filtered + other.filtered)


@dataclass(kw_only=True, slots=True)
class Tally:
    """What a batch holds, added up; complete once it is given away."""

    counts: dict[Place, Counts] = field(default_factory=dict)
    """Records of each topic and partition."""
    noted: set[str] = field(default_factory=set)
    """What records in unknown schemas note (`null_values.schemas`)."""
    highest_positions: dict[Place, int] = field(default_factory=dict)
    """How far the source's log had come: of each partition that has changes, not only rows that a snapshot has read."""
    lowest_positions: dict[Place, int] = field(default_factory=dict)
    """The same of the event that tells least, be it such a row."""
    newest_millis: dict[str, int] = field(default_factory=dict)
    """Topic -> commit time of its newest event at the source, milliseconds since 1970."""
    reads: set[Place] = field(default_factory=set)
    """Where there are rows that a snapshot has read."""
    streamed: set[Place] = field(default_factory=set)
    """Where there are changes that the connector has streamed."""
    servers: dict[str, dict[str, dict[int, int]]] = field(default_factory=dict)
    """Topic -> server that wrote changes -> partition -> offset of its first one there."""
    connector: str | None = None
    """Name of the source that the connector gives, of one of the events."""
    old_keys: int = 0
    """Events that lack values and say which key their row had before."""
    first_truncate: tuple[str, int, int] | None = None
    """Topic, partition and offset."""
    missing: set[str] = field(default_factory=set)
    """Columns that some event does not carry."""
    upserts_before: int = 0
    """Upserts of the first look, whose rows lack the columns that the second one brought."""

    @property
    def records(self) -> int:
        """All that the broker delivered."""
        return sum(counts.records for counts in self.counts.values())

    def total(self, kind: Kind) -> int:
        """Records of a kind in all partitions."""
        return sum(counts.kinds[str(kind)] for counts in self.counts.values())

    def kinds(self) -> Counter[str]:
        """Records by kind."""
        return sum((counts.kinds for counts in self.counts.values()), Counter())

    def gaps(self, place: Place, covered: Range) -> int:
        """Offsets without a record."""
        counts = self.counts.get(place)
        return len(covered) - (0 if counts is None else counts.records)

    def with_deletes(self, resolved: Mapping[Place, int]) -> Tally:
        """So many null-value records of each partition delete something; the others say nothing new."""
        counts = {}
        for place, own in self.counts.items():
            kinds, meant = own.kinds.copy(), resolved.get(place, 0)
            nulls = kinds.pop(str(Kind.NULL_VALUE), 0)
            kinds.update({str(Kind.DELETE): meant, str(Kind.REDUNDANT): nulls - meant})
            counts[place] = replace(own, kinds=kinds)
        return replace(self, counts=counts)

    def replaced_by(self, second: Tally) -> Tally:
        """With the second look instead of those that were left for it."""
        upserts = self.total(Kind.UPSERT)
        for place, counts in self.counts.items():
            counts.kinds.pop(str(Kind.OTHER_SCHEMA), None)
            again = second.counts.get(place)
            if again is not None:
                counts.kinds.update(again.kinds)
                counts.filtered.update(again.filtered)
        return Tally(
            counts=self.counts,
            lowest_positions=furthest(self.lowest_positions, second.lowest_positions, min),
            highest_positions=furthest(self.highest_positions, second.highest_positions),
            newest_millis=furthest(self.newest_millis, second.newest_millis),
            reads=self.reads | second.reads,
            streamed=self.streamed | second.streamed,
            servers=_earliest(self.servers, second.servers),
            connector=second.connector or self.connector,
            old_keys=self.old_keys + second.old_keys,
            first_truncate=self.first_truncate or second.first_truncate,
            missing=self.missing | second.missing,
            upserts_before=upserts,
        )


def of_frame(events: DataFrame) -> Tally:
    """Of events as rows.

    Cost: one Spark job.
    """
    noted = F.when(F.col("kind").isin(*_NOTED), F.col("note"))
    reached = F.greatest("position", "last_commit")  # without NULL where either is known
    found = events.withColumns({_REACHED: reached, _REACHED_BY_CHANGE: F.when(~F.col("is_snapshot"), reached)})
    grouped = found.groupBy(*_GROUP[:-1], noted.alias("note")).agg(F.count(F.lit(1)).alias("records"), *_extremes())
    return _added_up(row.asDict() for row in grouped.collect())


def of_table(events: pa.Table) -> Tally:
    """The same, of events in the driver; none of them may lack a value."""
    is_noted = pc.is_in(events["kind"], value_set=pa.array(_NOTED))
    note = pc.if_else(is_noted, events["note"], pa.scalar(None, pa.string()))
    asked = [(column, function) for column, function in _EXTREMES.values()]
    reached = pc.max_element_wise(events["position"], events["last_commit"])
    by_change = pc.if_else(events["is_snapshot"], pa.scalar(None, pa.int64()), reached)
    found = events.set_column(events.column_names.index("note"), "note", note)
    found = found.append_column(_REACHED, reached).append_column(_REACHED_BY_CHANGE, by_change)
    groups = found.group_by(list(_GROUP))
    told = groups.aggregate([([], "count_all"), *asked])
    named = {f"{column}_{function}": name for name, (column, function) in _EXTREMES.items()}
    named["count_all"] = "records"
    rows = told.rename_columns([named.get(name, name) for name in told.column_names]).to_pylist()
    return _added_up({**row, "old_keys": 0, "missing": []} for row in rows)


def _added_up(rows: Iterable[Mapping[str, Any]]) -> Tally:
    """Rows: one for each topic, partition, kind and noted reason."""
    tally = Tally()
    for row in rows:
        place = (row["topic"], row["partition"])
        counts = tally.counts.setdefault(place, Counts())
        counts.kinds[row["kind"]] += row["records"]
        if row["kind"] == Kind.FILTERED:
            counts.filtered[row["note"]] += row["records"]
        if row["kind"] == Kind.OTHER_SCHEMA and row["note"] is not None:
            tally.noted.add(row["note"])
        if row["kind"] == Kind.TRUNCATE and tally.first_truncate is None:
            tally.first_truncate = (*place, row["first_offset"])
        if row["server"] is not None:
            first = {row["topic"]: {row["server"]: {row["partition"]: row["first_offset"]}}}
            tally.servers = _earliest(tally.servers, first)
        tally.missing.update(row["missing"])
        tally.connector = row["connector"] or tally.connector
        tally.old_keys += row["old_keys"]
        if row["lowest_position"] is not None:
            tally.lowest_positions = furthest(tally.lowest_positions, {place: row["lowest_position"]}, min)
        if row["highest_position"] is not None:
            tally.highest_positions = furthest(tally.highest_positions, {place: row["highest_position"]})
        if row["kind"] in _CHANGES:
            tally.reads.update([place] if row["has_reads"] else ())
            tally.streamed.update(() if row["has_only_reads"] else [place])
        if row["newest_millis"] is not None:
            tally.newest_millis = furthest(tally.newest_millis, {row["topic"]: row["newest_millis"]})
    return tally


def _earliest(*found: dict[str, dict[str, dict[int, int]]]) -> dict[str, dict[str, dict[int, int]]]:
    """`Tally.servers` of several."""
    together: dict[str, dict[str, dict[int, int]]] = {}
    for one in found:
        for topic, of_topic in one.items():
            for server, offsets in of_topic.items():
                servers = together.setdefault(topic, {})
                servers[server] = furthest(servers.get(server, {}), offsets, min)
    return together


def _extremes() -> list[Column]:
    lacking = [columns.or_empty(F.col(name)) for name in ("unavailable", "absent")]
    functions = {"min": F.min, "max": F.max}
    return [
        *(functions[function](column).alias(name) for name, (column, function) in _EXTREMES.items()),
        F.count(OLD_KEY).alias("old_keys"),
        F.flatten(F.collect_set(F.array_union(*lacking))).alias("missing"),
    ]


def furthest(numbers: Mapping[K, int], others: Mapping[K, int], of: Callable[[int, int], int] = max) -> dict[K, int]:
    """The greatest number of each key, or the least."""
    return {**numbers, **{key: of(number, numbers.get(key, number)) for key, number in others.items()}}
