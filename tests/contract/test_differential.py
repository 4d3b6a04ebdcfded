"""Random histories through the sink and through an oracle in plain Python: both must agree on everything.

`make soak` runs many more, and longer ones; --seed repeats a run.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder
from engines import under_test
from grouped import sink_with
from oracle import Account, Event, Oracle, ordered, replayed_feed
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from stream_merge.model.results import FATES, EventCounts
from stream_merge.tables.files import rows as table_rows
from stream_merge.tables.side import tombstones

pytestmark = [pytest.mark.engines("auto", "spark", "rewrite", "random"), pytest.mark.generated]

HISTORIES = int(os.environ.get("STREAM_MERGE_HISTORIES", "1"))
"""How many histories of each kind and shape."""
EVENTS = int(os.environ.get("STREAM_MERGE_EVENTS", "60"))
KEYS = 12
BATCHES = max(4, EVENTS // 15)
SEQUENCE = "__stream_merge_sequence"
FEED_COLUMNS = ("_commit_version", "_change_type", "_commit_timestamp")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One kind of source: its columns, and how a key, a moment and chance make an event of it."""

    name: str
    schema: str
    columns: tuple[str, ...]
    keys: tuple[str, ...]
    options: Mapping[str, Any]
    sequence_by: Callable[[], str | list[str] | Column]
    key: Callable[[int], dict[str, Any]]
    moment: Callable[[int], dict[str, Any]]
    no_key: dict[str, Any]
    no_moment: dict[str, Any]
    payload: Callable[[random.Random], dict[str, Any]]
    sequence_of: Callable[[Event], tuple[Any, ...]]
    not_stored: tuple[str, ...] = ("op",)
    unknown: tuple[str, ...] = ()
    """Columns of a target that was there before."""
    there_before: tuple[dict[str, Any], ...] = ()
    before_schema: str = ""
    apply_as_deletes: str = "op = 'd'"

    @property
    def stored(self) -> tuple[str, ...]:
        return tuple(name for name in self.columns if name not in self.not_stored)

    def oracle(self) -> Oracle:
        oracle = Oracle(
            keys=self.keys,
            stored=self.stored,
            sequence_of=self.sequence_of,
            is_delete=lambda event: event["op"] == "d",
            unknown=self.unknown,
        )
        for row in self.there_before:
            oracle.adopt(row)
        return oracle

    def event(self, rng: random.Random, *, key: int | None, moment: int | None, delete: bool) -> Event:
        values = self.payload(rng)
        if delete and rng.random() < 0.5:
            values = dict.fromkeys(values)
        values |= self.no_key if key is None else self.key(key)
        values |= self.no_moment if moment is None else self.moment(moment)
        return {**values, "op": "d" if delete else rng.choice(["c", "u", None])}


def text(rng: random.Random) -> str | None:
    return rng.choice(["", "a", "ä", "zz", "𝄞", None])


FLAT = Shape(
    name="flat",
    schema="id bigint, lsn bigint, name string, score double, op string",
    columns=("id", "lsn", "name", "score", "op"),
    keys=("id",),
    options={},
    sequence_by=lambda: "lsn",
    key=lambda key: {"id": key - 4},
    moment=lambda moment: {"lsn": moment},
    no_key={"id": None},
    no_moment={"lsn": None},
    payload=lambda rng: {
        "name": text(rng),
        "score": rng.choice([0.0, -0.0, float("nan"), float("inf"), -1.5, None]),
    },
    sequence_of=lambda event: (event["lsn"],),
)

NESTED = Shape(
    name="nested",
    schema=(
        "`tenant id` string, no int, labels map<string,int>, ts int, lsn int, op string,"
        " address struct<street:string,tags:array<string>,extra:map<string,struct<x:int>>>"
    ),
    columns=("tenant id", "no", "labels", "ts", "lsn", "op", "address"),
    keys=("tenant id", "no"),
    options={"table_properties": {"delta.columnMapping.mode": "name"}},
    sequence_by=lambda: ["ts", "lsn"],
    key=lambda key: {"tenant id": "ab"[key % 2], "no": key // 2},
    moment=lambda moment: {"ts": moment // 4, "lsn": moment % 4},
    no_key={"tenant id": "a", "no": None},
    no_moment={"ts": 3, "lsn": None},
    payload=lambda rng: {
        "labels": rng.choice([{"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": None}, {}, None]),
        "address": rng.choice(
            [
                (text(rng), ["x", None], {"p": (1,), "q": (None,)}),
                (text(rng), [], {"q": (None,), "p": (1,)}),
                (None, None, {"p": None}),
                (None, None, None),
                None,
            ]
        ),
    },
    sequence_of=lambda event: (event["ts"], event["lsn"]),
    not_stored=("op", "ts"),
)

MOVING = Shape(
    name="moving",
    schema="pos struct<file:string,offset:int>, id string, region string, amount decimal(12,2), op string",
    columns=("pos", "id", "region", "amount", "op"),
    keys=("id",),
    options={"partition_by": ["region"]},
    sequence_by=lambda: F.col("pos"),
    key=lambda key: {"id": f"k{key}"},
    moment=lambda moment: {"pos": (f"log.{moment // 10:03}", moment % 10)},
    no_key={"id": None},
    no_moment={"pos": ("log.001", None)},
    payload=lambda rng: {
        "region": rng.choice(["north", "south/1", " =%", None]),
        "amount": rng.choice([Decimal("1.00"), Decimal("-2.50"), None]),
    },
    sequence_of=lambda event: event["pos"],
    not_stored=("op", "pos"),
)

ADOPTED = Shape(
    name="adopted",
    schema="id int, value string, lsn int, op string",
    columns=("id", "value", "lsn", "op"),
    keys=("id",),
    options={},
    sequence_by=lambda: F.col("lsn") * 10 + 1,
    key=lambda key: {"id": key},
    moment=lambda moment: {"lsn": moment},
    no_key={"id": None},
    no_moment={"lsn": None},
    payload=lambda rng: {"value": text(rng)},
    sequence_of=lambda event: (None if event["lsn"] is None else event["lsn"] * 10 + 1,),
    not_stored=("op", "lsn"),
    unknown=("note",),
    there_before=({"id": 1, "value": "old", "note": "kept"}, {"id": 2, "value": None, "note": None}),
    before_schema="id int, value string, note string",
)

SHAPES = (FLAT, NESTED, MOVING, ADOPTED)


def history(rng: random.Random, shape: Shape, *, ties: bool) -> list[Event]:
    """Events with late, duplicate, deleted, revived, keyless and unsequenced ones; and, if wanted, tied ones."""
    events: list[Event] = []
    known: dict[tuple[int, int], Event] = {}
    for step in range(EVENTS):
        key: int | None = rng.randrange(KEYS)
        moment: int | None = max(1, step // 2 + rng.randint(-3, 1))
        kind = rng.choices(["on time", "late", "tied", "duplicate", "keyless", "unsequenced"], [9, 6, 7, 2, 1, 1])[0]
        if kind in ("late", "tied") and known:
            key, moment = rng.choice(list(known)[-3 * KEYS : -KEYS // 2] or list(known))
            moment -= rng.randint(1, 3) if kind == "late" and moment > 3 else 0
        elif kind == "keyless":
            key = None
        elif kind == "unsequenced":
            moment = None
        event = shape.event(rng, key=key, moment=moment, delete=rng.random() < 0.3)
        if kind == "duplicate" and events:
            event = rng.choice(events)
        elif key is not None and moment is not None:
            first = known.setdefault((key, moment), event)
            event = event if ties else first
        events.append(event)
    return events


def cut(rng: random.Random, events: Sequence[Event]) -> list[list[Event]]:
    """The events as micro-batches of random sizes, now and then an empty one."""
    at = sorted(rng.randrange(len(events) + 1) for _ in range(BATCHES - 1))
    return [list(events[i:j]) for i, j in zip([0, *at], [*at, len(events)], strict=True)]


def echoes(rng: random.Random, shape: Shape, oracle: Oracle) -> list[Event]:
    """For every key that has a row or a remembered delete an event at its moment, or just before."""
    found = []
    for key in range(KEYS):
        stored = tuple(shape.key(key)[name] for name in shape.keys)
        last = oracle.rows[stored][0] if stored in oracle.rows else oracle.deletes.get(stored)
        for moment in range(1, EVENTS):
            if shape.sequence_of(shape.moment(moment)) == last:
                earlier = rng.choice([0, 0, 1])
                found.append(shape.event(rng, key=key, moment=moment - earlier, delete=rng.random() < 0.4))
    return found


@dataclass(kw_only=True)
class Run:
    """One history on its way through sink and oracle."""

    spark: SparkSession
    shape: Shape
    table: Path
    app_id: str | None
    oracle: Oracle = field(init=False)
    delivered: list[list[Event]] = field(default_factory=list)
    quarantined: int = 0

    def __post_init__(self) -> None:
        self.oracle = self.shape.oracle()
        if self.shape.there_before:
            names = list(self.shape.there_before[0])
            rows = [tuple(row[name] for name in names) for row in self.shape.there_before]
            frame = self.spark.createDataFrame(rows, self.shape.before_schema)
            frame.write.format("delta").option("delta.enableChangeDataFeed", "true").save(str(self.table))
        sink = sink_with(
            target=str(self.table),
            keys=self.shape.keys,
            sequence_by=self.shape.sequence_by(),
            apply_as_deletes=self.shape.apply_as_deletes,
            except_column_list=[name for name in self.shape.columns if name not in self.shape.stored],
            app_id=self.app_id,
            **self.shape.options,
        )
        self.sink = under_test(sink)

    def deliver(self, events: list[Event]) -> None:
        """The next batch: the ledger must say what the oracle says, and the table what its rows say."""
        expected = self.oracle.apply(events)
        batch_id = len(self.delivered)
        self.delivered.append(events)
        self.quarantined += expected.quarantined
        version = self.version()
        first = not any(self.delivered[:-1])
        with self._failing_with(f"batch {batch_id}", events):
            self._call(events, batch_id)
            assert_ledger(self.sink.last_result.events, expected)
            self.assert_rows()
            self._assert_growth(expected, since=version, first=first)

    def replay(self, batch_id: int) -> None:
        """A batch again: nothing changes, and nothing is counted where a transaction id shows it."""
        version = self.version()
        events = self.delivered[batch_id]
        recorded = self.app_id is not None and self._is_recorded(batch_id)
        with self._failing_with(f"replay of batch {batch_id} after {len(self.delivered) - 1}", events):
            self._call(events, batch_id)
            if recorded:
                assert self.sink.last_result.outcome == "skipped_duplicate"
                assert self.sink.last_result.events == EventCounts()
            else:
                # Such a replay may be the first call that records the id: Spark's MERGE commits without a change, too.
                assert (
                    sum(getattr(self.sink.last_result.events, fate) for fate in ("inserted", "updated", "deleted")) == 0
                )
            self.assert_rows()
            assert self._changes(since=version) == []
            assert self.version() - version <= 1

    def assert_rows(self) -> None:
        """The table is what the oracle says, as delta-rs reads it: a tenth of the time that Spark needs."""
        if self.version() < 0:
            assert self.oracle.rows == {}
            return
        builder = QueryBuilder().register("target", DeltaTable(str(self.table)))
        found = pa.table(builder.execute("SELECT * FROM target"))
        columns = [[plain(value, column.type) for value in column.to_pylist()] for column in found.columns]
        self._assert_equal([dict(zip(found.column_names, row, strict=True)) for row in zip(*columns, strict=True)])

    def assert_end(self) -> None:
        """The table as Spark reads it; its change feed, replayed from version 0, is the table, too.

        Every pre-image was there.
        """
        self._assert_equal([as_dict(row) for row in self.read().collect()])
        feed = self.spark.read.format("delta").option("readChangeFeed", "true").option("startingVersion", 0)
        changes = []
        for row in feed.load(str(self.table)).collect():
            values = as_dict(row)
            version, change, _ = (values.pop(name) for name in FEED_COLUMNS)
            changes.append((version, change, values))
        with self._failing_with("the change feed", []):
            assert ordered(replayed_feed(changes, self.shape.keys)) == ordered(self.expected_rows())

    def _assert_equal(self, rows: list[dict[str, Any]]) -> None:
        assert len(rows) == len(self.oracle.rows), f"rows {rows!r}, expected {self.oracle.table()!r}"
        assert ordered(self.keyed(rows)) == ordered(self.expected_rows())

    def assert_quarantine(self) -> None:
        """Every event that breaks the contract is there once, whatever was replayed."""
        folder = self.table.parent / f"__stream_merge_quarantine_{self.table.name}"
        found = self.spark.read.format("delta").load(str(folder)).count() if folder.exists() else 0
        assert found == self.quarantined

    def expected_rows(self) -> dict[tuple[Any, ...], dict[str, Any]]:
        kept_apart = any(column.name == SEQUENCE for column in DeltaTable(str(self.table)).schema().fields)
        return {
            key: {**row, SEQUENCE: sequence} if kept_apart else row for key, (sequence, row) in self.oracle.rows.items()
        }

    def rows_from_the_source(self) -> dict[tuple[Any, ...], dict[str, Any]]:
        """Without the columns that the source lacks: they go with the row when a delete comes before a newer upsert."""
        return {
            key: {name: value for name, value in row.items() if name not in self.shape.unknown}
            for key, row in self.expected_rows().items()
        }

    def keyed(self, rows: list[dict[str, Any]]) -> dict[tuple[Any, ...], dict[str, Any]]:
        return {tuple(row[key] for key in self.shape.keys): row for row in rows}

    def read(self) -> DataFrame:
        return self.spark.read.format("delta").load(str(self.table))

    def version(self) -> int:
        return max((int(commit.stem) for commit in self._commits()), default=-1)

    def _call(self, events: list[Event], batch_id: int) -> None:
        rows = [tuple(event[name] for name in self.shape.columns) for event in events]
        self.sink(self.spark.createDataFrame(rows, self.shape.schema), batch_id)

    def _assert_growth(self, expected: Account, *, since: int, first: bool) -> None:
        """One version for a batch that changes rows, none for any other."""
        grown = self.version() - since
        setup = range(3) if first else range(1)
        if expected.changed:
            assert grown - 1 in setup
            assert self.sink.last_result.version == self.version()
            assert self.sink.last_result.outcome == "committed"
            return
        assert self.sink.last_result.outcome == ("no_change" if expected.received else "empty")
        assert self._changes(since=since) == []
        assert grown in setup

    def _is_recorded(self, batch_id: int) -> bool:
        """Whether the target's log holds the batch's id, or a later one."""
        recorded = [
            a["txn"]["version"] for a in self._actions(since=-1) if "txn" in a and "target" in a["txn"]["appId"]
        ]
        return bool(recorded) and max(recorded) >= batch_id

    def _changes(self, *, since: int) -> list[str]:
        """Files of the change feed."""
        return [action["cdc"]["path"] for action in self._actions(since=since) if "cdc" in action]

    def _actions(self, *, since: int) -> list[dict[str, Any]]:
        newer = [commit for commit in self._commits() if int(commit.stem) > since]
        return [json.loads(line) for commit in newer for line in commit.read_text().splitlines()]

    def _commits(self) -> list[Path]:
        return sorted((self.table / "_delta_log").glob("*[0-9].json"))

    @contextmanager
    def _failing_with(self, where: str, events: list[Event]) -> Iterator[None]:
        try:
            yield
        except BaseException as err:
            err.add_note(f"shape {self.shape.name}, {where}, table {self.table}, events {events!r}")
            raise


def as_dict(row: Any) -> dict[str, Any]:
    return dict(zip(row.__fields__, row, strict=True))


def plain(value: Any, kind: pa.DataType) -> Any:
    """An Arrow value as the oracle has it: structs are tuples, maps are dicts."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return tuple(plain(value[field.name], field.type) for field in kind)
    if pa.types.is_map(kind):
        return {plain(key, kind.key_type): plain(item, kind.item_type) for key, item in value}
    if pa.types.is_list(kind):
        return [plain(item, kind.value_type) for item in value]
    return value


def assert_ledger(counted: EventCounts, expected: Account) -> None:
    exact = ("received", "quarantined", "collapsed", "ties", "inserted", "updated", "deleted")
    assert {name: getattr(counted, name) for name in exact} == {name: getattr(expected, name) for name in exact}
    assert counted.received == sum(getattr(counted, fate) for fate in FATES)
    assert counted.stale + counted.unaffected == expected.stale_or_unaffected
    assert expected.stale_at_least <= counted.stale <= expected.stale_at_most


@pytest.fixture(params=range(HISTORIES), ids=lambda number: f"history{number}")
def rng(request: pytest.FixtureRequest, seed: int) -> random.Random:
    """Chance of its own for each test, from the seed that the report's header prints."""
    return random.Random(f"{seed}/{request.node.name}")


@pytest.fixture(params=SHAPES, ids=lambda shape: shape.name)
def shape(request: pytest.FixtureRequest) -> Shape:
    return request.param


def test_any_history_with_ties_and_replays_ends_as_the_oracle_says(
    spark: SparkSession, shape: Shape, rng: random.Random, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Rows and ledger after every batch, change feed and quarantine at the end; a replayed id changes nothing."""
    # A log of deletes that is tidied every other batch must mean the same as one that never is.
    monkeypatch.setattr(tombstones, "TIDY_FILES", rng.choice([2, 64]))
    monkeypatch.setattr(table_rows, "MOST_KEPT_ROWS", rng.choice([0, table_rows.MOST_KEPT_ROWS]))
    run = Run(spark=spark, shape=shape, table=tmp_path / "table", app_id="differential")
    for batch_id, events in enumerate(cut(rng, history(rng, shape, ties=True))):
        run.deliver(events)
        if rng.random() < 0.4:
            run.replay(batch_id)
        if batch_id and rng.random() < 0.25:
            run.replay(rng.randrange(batch_id))

    run.deliver(echoes(rng, shape, run.oracle))
    run.replay(BATCHES)
    run.assert_end()
    run.assert_quarantine()


def test_any_two_cuts_of_a_history_without_ties_end_alike(
    spark: SparkSession, shape: Shape, rng: random.Random, tmp_path: Path
):
    """Order of arrival and batch borders do not matter; without a transaction id guards alone absorb replays."""
    events = history(rng, shape, ties=False)
    one = Run(spark=spark, shape=shape, table=tmp_path / "one", app_id=None)
    other = Run(spark=spark, shape=shape, table=tmp_path / "other", app_id="cut-otherwise")
    for batch_id, batch in enumerate(cut(rng, events)):
        one.deliver(batch)
        if rng.random() < 0.3:
            one.replay(rng.randrange(batch_id + 1))
    rng.shuffle(events)
    for batch in cut(rng, events):
        other.deliver(batch)

    assert ordered(one.rows_from_the_source()) == ordered(other.rows_from_the_source())
    for run in (one, other):
        run.assert_end()
