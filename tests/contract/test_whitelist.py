"""Every type at every place for which the driver merges: values at the edges, both engines in turn, in both modes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import engines
import pyarrow as pa
import pytest
from deliveries import from_sql
from deltalake import DeltaTable, QueryBuilder
from grouped import sink_with
from prometheus_client import CollectorRegistry
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from stream_merge import MergeMetrics
from stream_merge.merge.calls import TIMESTAMP_CONF
from stream_merge.model.names import quote
from stream_merge.model.results import Mode
from stream_merge.spark.versions import SPARK, arrow_frame, from_ddl
from stream_merge.tables.files.eligibility import PROVEN, Role
from stream_merge.testing import run

pytestmark = pytest.mark.generated

Values = Mapping[str, Sequence[str]]
LAST_MOMENT = 2**63 - 1 if SPARK >= (4, 0) else 2**63 - 1_001
"""Delta 3.3 adds a millisecond to what statistics say of the greatest time, and cannot read where that is none."""
SCALARS: dict[type[DataType], Values] = {
    BooleanType: {"boolean": ("false", "true")},
    ByteType: {"tinyint": ("-128", "0", "127")},
    ShortType: {"smallint": ("-32768", "0", "32767")},
    IntegerType: {"int": ("-2147483648", "0", "2147483647")},
    LongType: {"bigint": ("-9223372036854775808", "0", "9223372036854775807")},
    DecimalType: {
        "decimal(15,4)": ("-99999999999.9999", "-1.25", "0", "0.0001"),
        "decimal(18,0)": ("-999999999999999999", "0", "999999999999999999"),
    },
    DateType: {"date": ("'0001-01-01'", "'1582-10-04'", "'1969-12-31'", "'9999-12-31'", "'+12000-02-29'")},
    TimestampType: {
        "timestamp": (
            "timestamp_micros(-70000000000000001)",
            "'0001-01-01 00:00:00.000001Z'",
            "'1677-09-21 00:12:43.145223Z'",
            "'2026-03-29 01:30:00Z'",
            "'9999-12-31 23:59:59.999999Z'",
            f"timestamp_micros({LAST_MOMENT})",
        )
    },
    TimestampNTZType: {
        "timestamp_ntz": (
            "'-0001-01-01 00:00:00.000001'",
            "'1582-10-04 00:00:00'",
            "'2026-03-29 02:30:00'",
            "'9999-12-31 23:59:59.999999'",
            "'+12000-02-29 00:00:00.5'",
        )
    },
    StringType: {"string": ("''", "'\\u0000'", "' %/= '", f"'{'z' * 80}'", "'é'", "'\\uffff'", "'\\U0001F600'")},
    BinaryType: {"binary": ("X''", "X'00FF'", "X'80'")},
    FloatType: {"float": ("'-Infinity'", "'-0.0'", "1.4e-45", "3.4028235e38", "'NaN'")},
    DoubleType: {"double": ("'-Infinity'", "'-0.0'", "4.9e-324", "1.7e308", "'NaN'")},
}
"""Edges of the types that have no other inside, in ascending order."""
PARTITIONS: dict[type[DataType], Values] = {
    # What a path can hold in ASCII; empty and other texts are for `test_written_files`.
    StringType: {
        "string": (
            "'a b'",
            "'a/b=%25 %:?#'",
            "' '",
            "'it\\'s+&~!@$,;()'",
            "'\"<>[]{}^|*'",
            f"'{'z' * 99}'",
        ),
    },
}
"""Edges of partition values, where they are others."""
PAYLOADS: dict[type[DataType], Values] = {
    ArrayType: {"array<int>": ("array()", "array(1, NULL)")},
    StructType: {"struct<x: int, y: string>": ("struct(1, '')", "struct(NULL, NULL)")},
    MapType: {"map<string, int>": ("map()", "map('', 1, 'é', NULL)")},
}
NESTED: dict[type[DataType], Values] = {
    ArrayType: {"array<array<int>>": ("array(array(), NULL)", "array(array(1, NULL))")},
    StructType: {"array<struct<x: struct<y: int>>>": ("array(struct(struct(1)))", "array(struct(struct(NULL)), NULL)")},
    MapType: {"array<map<int, string>>": ("array(map(), NULL)", "array(map(1, ''), map(2, NULL))")},
}
CARRIED: dict[type[DataType], tuple[str, str]] = {
    ArrayType: ("array<{0}>", "array({0}, NULL)"),
    StructType: ("struct<x: {0}>", "struct({0})"),
    MapType: ("map<{0}, {0}>", "map({0}, {0})"),
}


@dataclass(frozen=True, kw_only=True)
class Edges:
    """A column of values at the edges, and for which cell of the whitelist it stands."""

    kind: type[DataType]
    place: Role
    dtype: str
    values: tuple[str, ...]

    def at(self, index: int) -> str:
        """A value as SQL; the one before the first is NULL but for keys and sequences."""
        found = self.values if self.place in ("key", "sequence") else ("NULL", *self.values)
        return f"CAST({found[index % len(found)]} AS {self.dtype})"


def columns(place: Role) -> dict[str, Edges]:
    """Columns for each type that the whitelist has at a place."""
    found: dict[str, Edges] = {}
    for kind in (kind for kind, places in PROVEN.items() if place in places):
        for dtype, values in _values(kind, place):
            found[f"{place}_{len(found)}"] = Edges(kind=kind, place=place, dtype=dtype, values=tuple(values))
    return found


def _values(kind: type[DataType], place: Role) -> Iterator[tuple[str, Iterable[str]]]:
    if place == "carried" and kind in CARRIED:
        # One column with each scalar inside this type: what is carried is neither compared nor looked up.
        dtypes, holding = CARRIED[kind]
        last = [(dtype, f"CAST({values[-1]} AS {dtype})") for one in SCALARS.values() for dtype, values in one.items()]
        fields = ", ".join(f"f{number}: {dtypes.format(dtype)}" for number, (dtype, _) in enumerate(last))
        yield f"struct<{fields}>", [f"struct({', '.join(holding.format(value) for _, value in last)})"]
    elif place == "nested" and kind in SCALARS:
        for dtype, values in SCALARS[kind].items():
            cast = [f"CAST({value} AS {dtype})" for value in values]
            yield f"struct<x: {dtype}, y: array<{dtype}>>", [f"struct({one}, array({one}, NULL))" for one in cast]
    else:
        elsewhere = {"partition": PARTITIONS, "payload": PAYLOADS, "nested": NESTED}.get(place, {})
        yield from (elsewhere.get(kind) or SCALARS[kind]).items()


Event = dict[str, str]
"""Values of a row by column, as SQL."""


@dataclass(kw_only=True)
class History:
    """A table that all engines merge into in turn, and what it and its change feed must hold."""

    spark: SparkSession
    path: Path
    types: dict[str, str]
    """Of all stored columns."""
    settings: dict[str, Any]
    mode: str
    """Of the driver's merges."""
    partition_by: Sequence[str] = ()
    rows: dict[str, Event] = field(default_factory=dict)
    """By the text of their id."""
    feed: list[tuple[str, Event]] = field(default_factory=list)
    batches: int = 0

    def start(self, rows: Iterable[Event]) -> None:
        """Let Spark write the table, one file per row and partition."""
        self.rows = {row["id"]: row for row in rows}
        self.feed = [("insert", row) for row in self.rows.values()]
        apart = self._frame(self.rows.values()).coalesce(1).repartition(len(self.rows))
        writer = apart.write.format("delta").option("delta.enableChangeDataFeed", "true")
        writer = writer.option("delta.enableDeletionVectors", str(self.mode == "mark").lower())
        writer.partitionBy(*self.partition_by).save(str(self.path))

    def merge(
        self, engine: str, upserts: Sequence[Event], refused: Sequence[Event] = (), deletes: Sequence[str] = ()
    ) -> None:
        """Merge these events; `refused` are older than their rows, `deletes` are ids."""
        events = [{**event, "op": "'u'"} for event in (*upserts, *refused)]
        events += [{**self.rows[deleted], **self._newest(upserts), "op": "'d'"} for deleted in deletes]
        wanted = [name for name in self.types if name in events[0]]
        sink = sink_with(
            target=str(self.path),
            engine="spark" if engine == "spark" else "auto",
            apply_as_deletes="op = 'd'",
            except_column_list=["op"],
            app_id="whitelist",
            metrics=MergeMetrics(CollectorRegistry()),
            **self.settings,
        )
        engines.with_costs(sink, engines.Only(engine))
        result = run(
            sink, self._frame([{name: event[name] for name in (*wanted, "op")} for event in events]), self.batches
        )
        self.batches += 1
        assert engines.way(result) == ("spark" if engine == "spark" else self.mode), result.plan
        for event in upserts:
            before = self.rows.get(event["id"])
            after = {**dict.fromkeys(self.types, "NULL"), **(before or {}), **event}
            self.feed += [("update_preimage", before), ("update_postimage", after)] if before else [("insert", after)]
            self.rows[event["id"]] = after
        self.feed += [("delete", self.rows.pop(deleted)) for deleted in deletes]

    def _newest(self, upserts: Sequence[Event]) -> Event:
        return {name: upserts[0][name] for name in self.settings["sequence_by"]}

    def check(self, *, delta_rs_finds_the_feed: bool = True) -> None:
        """Rows and change feed are what they must be, for Spark and for delta-rs."""
        distinct = list({_key(row): row for row in (*self.rows.values(), *(row for _, row in self.feed))}.values())
        spelled = dict(zip(map(_key, distinct), told(self._frame(distinct).coalesce(1)), strict=True))
        rows = [spelled[_key(row)] for row in self.rows.values()]
        feed = [(change.encode().hex().upper(), *spelled[_key(row)]) for change, row in self.feed]
        for found in (self.spark.read.format("delta").load(str(self.path)), self._rows_of_delta_rs()):
            assert_same(told(found.select(*self._columns())), rows, self.types)
        reader = self.spark.read.format("delta").option("readChangeFeed", "true").option("startingVersion", 0)
        feeds = [reader.load(str(self.path))]
        if delta_rs_finds_the_feed:
            feeds.append(self.feed_of_delta_rs())
        for found in feeds:
            columns = ["_change_type", *self._columns()]
            assert_same(told(found.select(*columns)), feed, {"_change_type": "string", **self.types})

    def _rows_of_delta_rs(self) -> DataFrame:
        table = QueryBuilder().register("t", DeltaTable(str(self.path)))
        return self._in_spark(pa.table(table.execute("SELECT * FROM t").read_all()), {})

    def feed_of_delta_rs(self) -> DataFrame:
        """The whole change feed by delta-rs."""
        changes = DeltaTable(str(self.path)).load_cdf(starting_version=0)
        return self._in_spark(pa.table(changes.read_all()), {"_change_type": "string"})

    def _in_spark(self, found: pa.Table, more: Mapping[str, str]) -> DataFrame:
        types = {**self.types, **more}
        chosen = found.select(list(types))
        plain = chosen.cast(pa.schema([pa.field(f.name, viewless(f.type)) for f in chosen.schema]))
        return arrow_frame(
            self.spark, plain, from_ddl(", ".join(f"{quote(name)} {dtype}" for name, dtype in types.items()))
        )

    def _columns(self) -> list[str]:
        return [quote(name) for name in self.types]

    def _frame(self, rows: Iterable[Event]) -> DataFrame:
        return from_sql(self.spark, rows, {**self.types, "op": "string"})


def _key(row: Event) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(row.items()))


def told(frame: DataFrame) -> list[tuple[str | None, ...]]:
    """Every row as text that tells -0.0 from 0.0, and knows years beyond 9999."""
    exact = {"string": F.hex, "binary": F.hex, "timestamp": F.unix_micros}
    return [
        tuple(row)
        for row in frame.select(
            *(exact.get(dtype, lambda c: c)(F.col(quote(name))).cast("string") for name, dtype in frame.dtypes)
        )
        .na.fill("NULL")
        .collect()
    ]


def assert_same(found: list[tuple[Any, ...]], expected: list[tuple[Any, ...]], types: Mapping[str, str]) -> None:
    """The same rows in whatever order; says which columns differ."""
    assert len(found) == len(expected)
    for place, (name, dtype) in enumerate(types.items()):
        assert sorted(row[place] for row in found) == sorted(row[place] for row in expected), f"{name} {dtype}"
    assert sorted(found) == sorted(expected)


def viewless(dtype: pa.DataType) -> pa.DataType:
    """The type without views, which Spark does not read."""
    if pa.types.is_string_view(dtype):
        return pa.string()
    if pa.types.is_binary_view(dtype):
        return pa.binary()
    if pa.types.is_struct(dtype):
        return pa.struct([pa.field(f.name, viewless(f.type)) for f in dtype])
    if pa.types.is_map(dtype):
        return pa.map_(viewless(dtype.key_type), viewless(dtype.item_type))
    if pa.types.is_list(dtype):
        return pa.list_(pa.field(dtype.value_field.name, viewless(dtype.value_type)))
    return dtype


@pytest.fixture(scope="module")
def elsewhere(spark: SparkSession) -> Iterator[SparkSession]:
    """A session far from UTC, whose files keep all of a timestamp."""
    confs = {"spark.sql.session.timeZone": "Asia/Kathmandu", TIMESTAMP_CONF: "TIMESTAMP_MICROS"}
    before = {name: spark.conf.get(name) for name in confs}
    for name, value in confs.items():
        spark.conf.set(name, value)
    yield spark
    for name, value in before.items():
        spark.conf.set(name, value)


ROWS = 8
IN_TURN = ("driver", "spark", "driver")
MODES = pytest.mark.parametrize("mode", get_args(Mode))


@MODES
def test_keys_payloads_and_carried_columns(elsewhere: SparkSession, tmp_path: Path, mode: str):
    """Each batch takes every other row, so that bounds of each key leave some files and not others."""
    keys, carried = columns("key"), columns("carried")
    moving = columns("payload") | columns("nested")
    every = keys | carried | moving
    types = {"id": "bigint", "lsn": "bigint"} | {name: edges.dtype for name, edges in every.items()}
    history = History(
        spark=elsewhere,
        path=tmp_path / "table",
        types=types,
        settings={"keys": ["id", *keys], "sequence_by": ["lsn"]},
        mode=mode,
    )

    def event(number: int, lsn: int) -> Event:
        fixed = {name: edges.at(number) for name, edges in keys.items()}
        return {"id": str(number), "lsn": str(lsn), **fixed, **{n: e.at(number + lsn) for n, e in moving.items()}}

    history.start({**event(number, 0), **{n: e.at(number) for n, e in carried.items()}} for number in range(ROWS))
    for lsn, engine in enumerate(IN_TURN, start=1):
        numbers = [number for number in range(ROWS + lsn) if number % 4 != lsn - 1 and number % 2 == lsn % 2]
        stale = [event(number, -1) for number in range(ROWS) if number % 4 == lsn - 1 and str(number) in history.rows]
        history.merge(engine, [event(number, lsn) for number in numbers], stale[:1], deletes=[str(lsn + 3)])

    history.check()


@MODES
def test_sequences(elsewhere: SparkSession, tmp_path: Path, mode: str):
    """Of each type a row whose sequence grows, and one whose sequence sinks and which therefore stays."""
    sequence = columns("sequence")
    types = {"id": "string", "note": "int"} | {name: edges.dtype for name, edges in sequence.items()}
    history = History(
        spark=elsewhere,
        path=tmp_path / "table",
        types=types,
        settings={"keys": ["id"], "sequence_by": list(sequence)},
        mode=mode,
    )

    def event(name: str, position: int, note: int) -> Event:
        """At that position among the edges of one column, at the first one of all others."""
        last = len(sequence[name].values) - 1
        at = {other: edges.at(0) for other, edges in sequence.items()}
        return {"note": str(note), **at, name: sequence[name].at(min(max(position, 0), last))}

    def rising(note: int) -> list[Event]:
        return [{"id": f"'{name} up'", **event(name, note, note)} for name in sequence]

    def sinking(note: int) -> list[Event]:
        tops = {name: len(edges.values) - 1 for name, edges in sequence.items()}
        return [{"id": f"'{name} down'", **event(name, tops[name] - note, note)} for name in sequence]

    history.start([*rising(0), *sinking(0)])
    for note, engine in enumerate(IN_TURN, start=1):
        history.merge(engine, rising(note), sinking(note))

    history.check()


@MODES
def test_partitions(elsewhere: SparkSession, tmp_path: Path, mode: str):
    """Rows move from partition to partition, one partition column is a key, and values come back."""
    partitions = columns("partition")
    types = {"id": "bigint", "lsn": "bigint", "day": "date"} | {name: e.dtype for name, e in partitions.items()}
    history = History(
        spark=elsewhere,
        path=tmp_path / "table",
        types=types,
        settings={"keys": ["id", "day"], "sequence_by": ["lsn"]},
        mode=mode,
        partition_by=["day", *partitions],
    )

    def event(number: int, lsn: int) -> Event:
        moved = {name: edges.at(number + lsn // 2) for name, edges in partitions.items()}
        return {"id": str(number), "lsn": str(lsn), "day": f"DATE'20{number:02}-01-01'", **moved}

    history.start(event(number, 0) for number in range(ROWS))
    for lsn, engine in enumerate(IN_TURN, start=1):
        history.merge(
            engine, [event(number, lsn) for number in range(lsn % 2, ROWS + 1, 2)], deletes=["1"] * (lsn == 2)
        )

    history.check(delta_rs_finds_the_feed=False)
    with pytest.raises(Exception, match=r"%25.*not found"):
        # Whoever wrote it: delta-rs 1.6 takes the paths of change and data files as they are, `%20` for a blank, and
        # names the one that it looks for first.
        history.feed_of_delta_rs()


def test_every_entry_of_the_whitelist_is_tried():
    """Whoever adds one has to say which values are at its edges."""
    tried = {(edges.kind, place) for place in _EVERY_PLACE for edges in columns(place).values()}

    assert tried == {(kind, place) for kind, places in PROVEN.items() for place in places}
    assert not {place for _, place in tried} - set(_EVERY_PLACE)


_EVERY_PLACE: tuple[Role, ...] = ("key", "sequence", "payload", "nested", "carried", "partition")
