"""Rows of keys in Parquet files: found wherever they lie and however a file holds them, with the table's values."""

from __future__ import annotations

import datetime
import json
import random
import re
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyroaring import BitMap64
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
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from stream_merge.model.snapshot import HIVE_NULL
from stream_merge.shapes.key_bounds import KeyBound, KeyBounds
from stream_merge.spark.versions import arrow_type
from stream_merge.tables.files import eligibility, partitions
from stream_merge.tables.files.find import EVENT, FILE, POSITION, Candidate, conformed, find, live_rows, odd_names
from stream_merge.tables.files.footers import Footers, is_readable
from stream_merge.tables.files.table import TableFiles, table_files
from stream_merge.tables.log.handle import open_table
from stream_merge.tables.log.live_files import UnreadableLogError

UTC = pa.timestamp("us", tz="UTC")
LOCAL = pa.timestamp("us")
LONG, TEXT = LongType(), StringType()
NOWHERE: Mapping[str, str | None] = {}
LARGE = pa.large_list(pa.int64())
EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def schema(**columns: DataType) -> StructType:
    return StructType([StructField(name, dtype) for name, dtype in columns.items()])


def mapped(name: str, dtype: DataType, physical: str) -> StructField:
    """A column under column mapping."""
    return StructField(name, dtype, True, {"delta.columnMapping.physicalName": physical})


def micros(*moment: int) -> int:
    return (datetime.datetime(*moment, tzinfo=datetime.UTC) - EPOCH) // datetime.timedelta(microseconds=1)


class Files:
    """Data files of a table."""

    def __init__(self, root: Path, of: StructType, partition_columns: Sequence[str] = ()) -> None:
        self.root = root
        self.schema = of
        self.footers = Footers(root.joinpath, of, partition_columns)
        self.candidates: list[Candidate] = []
        self.room_for: Callable[[int], object] = [].append

    def write(
        self, rows: pa.Table, name: str | None = None, partition: Mapping[str, str | None] = NOWHERE, **how: Any
    ) -> Candidate:
        path = name or f"{len(self.candidates)}.parquet"
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(rows, file, **how)
        found = Candidate(path=path, footer=self.footers.footer(path, file.stat().st_size), partition=partition, add={})
        self.candidates.append(found)
        return found

    def table(self, *keys: str, **events: pa.Array) -> pa.Table:
        """The rows of the events' keys, in the order of files."""
        found = find(
            self.root, self.candidates, pa.table(events), keys or list(events), self.schema, room_for=self.room_for
        )
        assert found.column_names == [EVENT, FILE, POSITION, *self.schema.names]
        assert found.select(self.schema.names).schema.types == [arrow_type(f.dataType) for f in self.schema.fields]
        found.validate(full=True)
        self._expect_among_all(found, keys or list(events), pa.table(events))
        return in_order(found)

    def _expect_among_all(self, found: pa.Table, keys: Sequence[str], events: pa.Table) -> None:
        """With all other rows wanted, too, each row of the files is there, and those of the keys are the same."""
        every = find(self.root, self.candidates, events, keys, self.schema, others=True, room_for=[].append)
        with_event = every[EVENT].is_valid()
        assert in_order(every.filter(with_event)).equals(in_order(found))
        others = [
            tuple(row.values()) for row in every.filter(pc.invert(with_event)).select([FILE, POSITION]).to_pylist()
        ]
        places = {tuple(row.values()) for row in found.select([FILE, POSITION]).to_pylist()}
        rows = [(f, row) for f, one in enumerate(self.candidates) for row in range(one.footer.rows)]
        assert sorted(others) == sorted(set(rows) - places)
        self._expect_rewritten_alike(events, keys)

    def _expect_rewritten_alike(self, events: pa.Table, keys: Sequence[str]) -> None:
        """Arrow, which reads files that are written again, has the rows that DuckDB has."""
        none = events.slice(0, 0)
        every = find(self.root, self.candidates, none, keys, self.schema, others=True, room_for=[].append)
        for number, one in enumerate(self.candidates):
            rows = pa.concat_tables([none_of(self.schema), *live_rows(self.root, one, BitMap64(), self.schema)])
            rows.validate(full=True)
            theirs = in_order(every.filter(pc.equal(every[FILE], number))).select(self.schema.names)
            assert rows.combine_chunks().equals(theirs.combine_chunks()), one.path

    def find(self, *keys: str, **events: pa.Array) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.table(*keys, **events).to_pylist()
        return rows

    def places(self, *keys: str, **events: pa.Array) -> list[tuple[int, ...]]:
        """Event, file and position of each row."""
        return [tuple(row.values()) for row in self.table(*keys, **events).select([EVENT, FILE, POSITION]).to_pylist()]


def none_of(columns: StructType) -> pa.Table:
    return pa.schema([(field.name, arrow_type(field.dataType)) for field in columns.fields]).empty_table()


def in_order(rows: pa.Table) -> pa.Table:
    """Rows in the order of files."""
    order = rows.select([FILE, POSITION, EVENT])
    return rows.take(pc.sort_indices(order, sort_keys=[(name, "ascending") for name in order.column_names]))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "ta ble"


def longs(*values: int | None) -> pa.Array:
    return pa.array(values, pa.int64())


# -- rows and their places ----------------------------------------------------------------------


def test_rows_of_keys_in_several_files(root):
    """Positions are those in the file; a key may have several rows, or none."""
    files = Files(root, schema(id=LONG, name=TEXT))
    files.write(pa.table({"id": longs(5, 1, 2), "name": ["five", "one", None]}))
    files.write(pa.table({"id": longs(1, None), "name": ["uno", "nobody"]}))

    assert files.find(id=longs(2, 9, 1)) == [
        {EVENT: 2, FILE: 0, POSITION: 1, "id": 1, "name": "one"},
        {EVENT: 0, FILE: 0, POSITION: 2, "id": 2, "name": None},
        {EVENT: 2, FILE: 1, POSITION: 0, "id": 1, "name": "uno"},
    ]


def test_nothing_to_look_into(root):
    files = Files(root, schema(id=LONG, name=TEXT))
    assert files.find(id=longs(1)) == []
    files.write(pa.table({"id": longs(), "name": pa.array([], pa.string())}))

    assert files.find(id=longs(1)) == []


@pytest.mark.parametrize("turn", range(3))
def test_positions_in_files_of_many_row_groups(root, seed, turn):
    """The reader skips row groups by their statistics; positions count them all the same."""
    rng = random.Random(f"{seed} {turn}")
    count = 20_000
    ids = sorted(range(count), key=(lambda _: rng.random()) if turn else None)
    files = Files(root, schema(id=LONG, name=TEXT))
    for _ in range(2):
        files.write(pa.table({"id": longs(*ids), "name": list(map(str, ids))}), row_group_size=rng.randrange(50, 3000))
    wanted = [*rng.sample(range(count), 5), count + 1] if turn < 2 else rng.sample(range(count), 5000)

    found = files.find(id=longs(*wanted))

    assert sorted((row[FILE], row["id"]) for row in found) == sorted(
        (file, one) for file in (0, 1) for one in wanted if one < count
    )
    for row in found:
        assert ids[row[POSITION]] == row["id"] == int(row["name"]) == wanted[row[EVENT]]


def test_threads_do_not_see_each_others_events(root):
    """All of a process share one database."""
    files = Files(root, schema(id=LONG, name=TEXT))
    files.write(pa.table({"id": longs(*range(1000)), "name": list(map(str, range(1000)))}))
    start = threading.Barrier(4)

    def look(thread: int) -> None:
        start.wait()
        for turn in range(20):
            keys = range(thread, 1000, 7 + turn)
            assert [row["id"] for row in files.find(id=longs(*keys))] == list(keys)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(look, range(4)))


# -- keys of every type -------------------------------------------------------------------------

TIMES = [
    micros(9999, 12, 31, 23, 59, 59, 999999),
    micros(1500, 1, 1),
    micros(1, 1, 1),
    -1,
    0,
    micros(2024, 1, 1, 12, 30, 15, 123456),
    micros(2262, 4, 11, 23, 47, 16, 854776),
    micros(9999, 12, 31) + 365 * 86_400_000_000 * 200_000,
]
KEYS: dict[str, tuple[DataType, pa.Array]] = {
    "tinyint": (ByteType(), pa.array([-128, 0, 127], pa.int8())),
    "smallint": (ShortType(), pa.array([-(2**15), 0, 2**15 - 1], pa.int16())),
    "int": (IntegerType(), pa.array([-(2**31), 0, 2**31 - 1], pa.int32())),
    "bigint": (LONG, longs(-(2**63), 0, 2**53 + 1, 2**63 - 1)),
    "string": (
        TEXT,
        pa.array(["", "é", "e\u0301", "a\0b", "\U0001f600", "\uffff", "ﬀ", "x" * 3000, "A", "a", " a", "a ", "NULL"]),
    ),
    "decimal(20,4)": (
        DecimalType(20, 4),
        pa.array(map(Decimal, ["9999999999999999.9999", "-0.0001", "0", "1.5"]), pa.decimal128(20, 4)),
    ),
    "decimal(38,0)": (
        DecimalType(38, 0),
        pa.array(map(Decimal, ["9" * 38, f"-{'9' * 38}", "0", "9007199254740993"]), pa.decimal128(38, 0)),
    ),
    "decimal(9,2)": (DecimalType(9, 2), pa.array(map(Decimal, ["9999999.99", "-9999999.99"]), pa.decimal128(9, 2))),
    "date": (
        DateType(),
        pa.array([-719162, -171000, 0, 2932896, 95_000_000, 2**31 - 1, 1 - 2**31], pa.int32()).cast(pa.date32()),
    ),
    "timestamp": (TimestampType(), longs(*TIMES).cast(UTC)),
    "timestamp_ntz": (TimestampNTZType(), longs(*TIMES).cast(LOCAL)),
    "binary": (BinaryType(), pa.array([b"", b"\0", b"\xff\xfe", b"\x80" * 300, b"a"], pa.binary())),
    "boolean": (BooleanType(), pa.array([True, False])),
}


@pytest.mark.parametrize("dictionary", [True, False])
@pytest.mark.parametrize("kind", KEYS)
def test_keys_of_each_type(root, kind, dictionary):
    """Each at its own place and nowhere else, in several row groups; NULL is nobody's key."""
    dtype, values = KEYS[kind]
    files = Files(root, schema(k=dtype, n=LONG))
    held = pa.concat_arrays([values, pa.nulls(1, values.type)])
    for turn in (held, held.take(pa.array(range(len(held) - 1, -1, -1)))):
        rows = pa.table({"k": turn, "n": pa.array(range(len(held)), pa.int64())})
        files.write(rows, row_group_size=2, use_dictionary=dictionary)

    found = files.table("k", k=values)

    last = len(values)
    expected = [(i, 0, i) for i in range(last)] + [(last - i, 1, i) for i in range(1, last + 1)]
    assert list(zip(*(found[name].to_pylist() for name in (EVENT, FILE, POSITION)), strict=True)) == expected
    assert found["k"].combine_chunks().equals(values.take(found[EVENT].combine_chunks()))


@pytest.mark.parametrize("ends", [2**63 - 1, 1 - 2**63], ids=["last", "first"])
@pytest.mark.parametrize("kind", ["timestamp", "timestamp_ntz"])
def test_the_ends_of_time_are_keys(root, kind, ends):
    """DuckDB takes these two for infinity and its opposite; Spark writes them: `timestamp_micros`."""
    dtype, _ = KEYS[kind]
    values = longs(ends).cast(arrow_type(dtype))
    files = Files(root, schema(k=dtype, v=dtype))
    files.write(pa.table({"k": values, "v": values}))

    assert files.places(k=values) == [(0, 0, 0)]
    assert files.table("k", k=values)["v"].cast(pa.int64()).to_pylist() == [ends]


def test_times_of_files_that_hold_them_in_any_way(root):
    """INT96, as Spark writes by default, INT64 of instants, and INT64 of which Arrow's schema names another zone."""
    files = Files(root, schema(t=TimestampType(), n=LONG))
    moments, numbers = longs(*TIMES).cast(UTC), longs(*range(len(TIMES)))
    files.write(pa.table({"t": moments, "n": numbers}), use_deprecated_int96_timestamps=True)
    files.write(pa.table({"t": moments, "n": numbers}))
    files.write(pa.table({"t": moments.cast(pa.timestamp("us", tz="Europe/Berlin")), "n": numbers}))
    found = files.table("t", t=moments)

    assert [one.footer.problem for one in files.candidates] == [None] * 3
    assert files.places("t", t=moments) == [(i, file, i) for file in range(3) for i in range(len(TIMES))]
    assert found["t"].cast(pa.int64()).to_pylist() == [TIMES[event] for event in found[EVENT].to_pylist()]


def test_instants_inside_of_other_types(root):
    """INT96 in structs, lists and maps."""
    inside = StructType([StructField("t", TimestampType())])
    dtypes = {"s": inside, "a": ArrayType(TimestampType()), "m": MapType(TEXT, inside)}
    files = Files(root, schema(id=LONG, **dtypes))
    moments = longs(TIMES[0], TIMES[1]).cast(UTC)
    struct = pa.StructArray.from_arrays([moments], ["t"])
    rows = pa.table(
        {
            "id": longs(1, 2),
            "s": struct,
            "a": pa.ListArray.from_arrays(pa.array([0, 2, 2], pa.int32()), moments),
            "m": pa.MapArray.from_arrays(pa.array([0, 1, 2], pa.int32()), pa.array(["x", "y"]), struct),
        }
    )
    files.write(rows, use_deprecated_int96_timestamps=True)
    files.write(rows)
    found = files.table(id=longs(2, 1))

    for file in (0, 1):
        held = found.slice(2 * file, 2).select(list(dtypes)).combine_chunks()
        assert held.equals(rows.select(list(dtypes)).cast(held.schema)), file


def test_composite_keys(root):
    files = Files(root, schema(a=LONG, b=TEXT, c=TimestampType()))
    moments = longs(TIMES[0], TIMES[0], TIMES[5]).cast(UTC)
    files.write(pa.table({"b": ["x", None, "y"], "c": moments, "a": longs(1, 1, 2)}))
    rows = pa.table({"b": ["y", "x", "x"], "c": moments, "a": longs(1, 1, 1)})
    files.write(rows, use_deprecated_int96_timestamps=True)
    events = {"c": longs(TIMES[0], TIMES[5], TIMES[5]).cast(UTC), "a": longs(1, 2, 2), "b": pa.array(["x", "y", "x"])}

    assert files.places("a", "b", "c", **events) == [(0, 0, 0), (1, 0, 2), (0, 1, 1)]


# -- files of other types -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "held"),
    [
        (LONG, [pa.int8(), pa.int16(), pa.int32(), pa.int64()]),
        (IntegerType(), [pa.int8(), pa.int16(), pa.int32()]),
        (DecimalType(20, 4), [pa.decimal128(5, 0), pa.decimal128(10, 2), pa.decimal128(18, 4), pa.decimal128(20, 4)]),
        (DecimalType(38, 10), [pa.decimal128(3, 1), pa.decimal128(28, 0), pa.decimal128(38, 10)]),
    ],
    ids=repr,
)
def test_keys_whose_type_was_widened(root, wanted, held):
    """Delta's type widening leaves old files as they are."""
    files = Files(root, schema(k=wanted, v=wanted))
    for dtype in held:
        values = pa.array([1, -99], pa.int64()).cast(pa.decimal128(19, 0)).cast(dtype)
        files.write(pa.table({"k": values, "v": values.take(pa.array([1, 0]))}))
    events = pa.array([7, -99, 1], pa.int64()).cast(pa.decimal128(19, 0)).cast(arrow_type(wanted))
    found = files.find("k", k=events)

    assert [one.footer.problem for one in files.candidates] == [None] * len(held)
    assert [(row[EVENT], row[FILE], row[POSITION]) for row in found] == [
        (event, file, position) for file in range(len(held)) for event, position in ((2, 0), (1, 1))
    ]
    assert all((row["k"], row["v"]) in ((1, -99), (-99, 1)) for row in found)


READABLE: list[tuple[DataType, pa.DataType, bool]] = [
    (LONG, pa.int32(), True),
    (LONG, pa.uint32(), False),
    (IntegerType(), pa.int64(), False),
    (ByteType(), pa.int16(), False),
    (DoubleType(), pa.float32(), True),
    (DoubleType(), pa.int32(), False),
    (FloatType(), pa.float64(), False),
    (LONG, pa.float64(), False),
    (DecimalType(10, 2), pa.decimal128(10, 3), False),
    (DecimalType(10, 2), pa.decimal128(9, 0), False),
    (DecimalType(10, 2), pa.decimal128(8, 0), True),
    (DecimalType(10, 0), pa.int32(), False),
    (TEXT, pa.large_string(), True),
    (TEXT, pa.dictionary(pa.int32(), pa.string()), True),
    (TEXT, pa.binary(), False),
    (BinaryType(), pa.large_binary(), True),
    (BinaryType(), pa.string(), False),
    (BinaryType(), pa.binary(4), False),
    (DateType(), LOCAL, False),
    (TimestampType(), UTC, True),
    (TimestampType(), LOCAL, False),
    (TimestampType(), pa.timestamp("ns", tz="UTC"), False),
    (TimestampType(), pa.timestamp("ms", tz="UTC"), False),
    (TimestampType(), pa.int64(), False),
    (TimestampNTZType(), LOCAL, True),
    (TimestampNTZType(), UTC, False),
    (TimestampNTZType(), pa.timestamp("ns"), False),
    (TimestampNTZType(), pa.date32(), False),
    (ArrayType(LONG), pa.list_(pa.int32()), True),
    (ArrayType(IntegerType()), pa.list_(pa.int64()), False),
    (ArrayType(LONG), pa.int64(), False),
    (MapType(TEXT, LONG), pa.map_(pa.string(), pa.int8()), True),
    (MapType(TEXT, LONG), pa.map_(pa.int64(), pa.int64()), False),
    (MapType(TEXT, LONG), pa.list_(pa.struct([("key", pa.string()), ("value", pa.int64())])), False),
    (schema(a=LONG), pa.struct([("a", pa.int32()), ("dropped", pa.uint8())]), True),
    (schema(a=LONG), pa.struct([("a", pa.float64())]), False),
    (schema(a=LONG), pa.int64(), False),
]


@pytest.mark.parametrize(
    ("wanted", "values"),
    [
        (TEXT, pa.array(["a", None, "é", ""], pa.large_string())),
        (TEXT, pa.array(["a", None, "a", "é"]).dictionary_encode()),
        (BinaryType(), pa.array([b"", None, b"\x00\xff"], pa.large_binary())),
        (DecimalType(10, 2), pa.array([1, None, -99999999], pa.decimal128(8, 0))),
        (ArrayType(LONG), pa.array([[1, None], None, [], [3]], pa.list_(pa.int32()))),
        (ArrayType(LONG), pa.array([[1, None], None, [], [3]], pa.large_list(pa.int64()))),
        (
            ArrayType(ArrayType(TEXT)),
            pa.array([[["a"], None], None, [[], ["b", "c"]]], pa.list_(pa.large_list(pa.string()))),
        ),
        (schema(a=ArrayType(LONG)), pa.array([{"a": [1]}, None, {"a": None}], pa.struct([("a", LARGE)]))),
        (MapType(TEXT, ArrayType(LONG)), pa.array([[("a", [1])], None, [("b", None)]], pa.map_(pa.string(), LARGE))),
    ],
    ids=str,
)
def test_values_that_other_writers_call_otherwise_are_read_alike(root, wanted, values):
    """Arrow keeps its own types beside those of Parquet: large ones and dictionaries."""
    files = Files(root, schema(id=LONG, v=wanted))
    rows = pa.table({"id": pa.array(range(len(values)), pa.int64()), "v": values})
    files.write(rows)
    files.write(pa.concat_tables([rows.slice(1), rows]), row_group_size=2)

    assert [one.footer.problem for one in files.candidates] == [None, None]
    assert [row["v"] for row in files.find("id", id=longs(1, 2))][:2] == values.to_pylist()[1:3]


@pytest.mark.parametrize(("wanted", "held", "expected"), READABLE, ids=str)
def test_which_types_are_read_without_loss(wanted, held, expected):
    assert is_readable(held, wanted, is_int96=False) is expected
    assert is_readable(pa.list_(held), ArrayType(wanted), is_int96=False) is expected


def test_times_without_a_zone_are_instants_in_int96_alone():
    assert is_readable(LOCAL, TimestampType(), is_int96=True)
    assert not is_readable(LOCAL, TimestampNTZType(), is_int96=True)


@pytest.mark.parametrize(
    ("rows", "how", "said"),
    [
        (pa.table({"id": ["1"]}), {}, "holds column 'id' as string, not as bigint"),
        (pa.table([longs(1), longs(2)], names=["id", "id"]), {}, "two columns of one name"),
        (pa.table({"id": longs(1), "t": longs(1).cast(LOCAL)}), {}, "'t' as timestamp[us], not as timestamp"),
        (
            pa.table({"id": longs(1), "n": longs(1).cast(LOCAL)}),
            {"use_deprecated_int96_timestamps": True},
            "holds column 'n'",
        ),
        (
            pa.table({"id": longs(1)}).replace_schema_metadata({"org.apache.spark.legacyDateTime": ""}),
            {},
            "calendar of Spark 2",
        ),
        (
            pa.table({"id": longs(1)}).replace_schema_metadata({"org.apache.spark.version": "2.4.8"}),
            {},
            "calendar of Spark 2",
        ),
    ],
    ids=["type", "twice", "no instants", "instants", "legacy times", "Spark 2"],
)
def test_files_that_are_refused(root, rows, how, said):
    """Named, so that somebody finds them; the batch is Spark's."""
    files = Files(root, schema(id=LONG, t=TimestampType(), n=TimestampNTZType()))
    found = files.write(rows, "p=x/odd.parquet", **how)

    assert found.footer.problem is not None
    assert said in found.footer.problem
    refused = eligibility.files_obstacle([found], "the target")
    assert refused is not None
    assert refused.reason == "column"
    assert "'p=x/odd.parquet'" in refused.detail


@pytest.mark.parametrize("count", [1, 2, 60])
def test_binary_keys_in_files_with_bloom_filters(root, seed, count):
    """One value is looked up there: a single event, or the tenant that all events have."""
    rng = random.Random(seed)
    keys = [rng.randbytes(16) for _ in range(200)]
    tenants = [keys[0]] * 100 + [keys[1]] * 100
    files = Files(root, schema(tenant=BinaryType(), k=BinaryType()))
    files.write(pa.table({"tenant": tenants, "k": keys}), bloom_filter_options={"tenant": True, "k": True})

    wanted = {"tenant": pa.array(tenants[7 : 7 + count]), "k": pa.array(keys[7 : 7 + count])}

    assert files.places(**wanted) == [(n, 0, 7 + n) for n in range(count)]
    assert files.places("k", k=wanted["k"]) == [(n, 0, 7 + n) for n in range(count)]


def test_files_whose_writer_took_bounds_of_texts_with_a_sign_are_refused(root):
    """As parquet-mr 1.8 did: the least text is the one that is not ASCII, and DuckDB would miss even the others."""
    files = Files(root, schema(k=TEXT))
    rows = pa.table({"k": ["a", "b", "ä"]})
    plain = files.write(rows, store_schema=False, compression="none", use_dictionary=False)
    file = root / "old.parquet"
    file.write_bytes(as_of_old(root / plain.path, least="a", greatest="ä"))

    found = Files(root, schema(k=TEXT)).footers.footer(file.name, file.stat().st_size)

    assert pq.read_table(file).equals(rows)
    assert plain.footer.problem is None
    assert found.problem == "file 'old.parquet' has bounds of texts or binary that an old writer took in another order"


def as_of_old(file: Path, *, least: str, greatest: str) -> bytes:
    """A file of one column with its bounds in the fields that Parquet has given up, and an old writer's name."""
    raw = file.read_bytes()
    (length,) = struct.unpack("<I", raw[-8:-4])
    body, footer = raw[: -8 - length], raw[-8 - length : -8]
    low, high = (text.encode() for text in (least, greatest))
    # Thrift's compact form of Statistics: null_count, max_value, min_value and whether they are exact, in this order.
    now = re.escape(b"\x36\x00\x28%c%b\x18%c%b" % (len(high), high, len(low), low)) + rb"(?:\x11\x11|\x12\x12)?\x00"
    then = b"\x18%c%b\x18%c%b\x16\x00\x00" % (1, b"b", len(high), high)  # max, min, null_count
    footer, changed = re.subn(now, lambda _: then, footer)
    assert changed == 1
    writer = re.search(rb"parquet-cpp-arrow version [\d.]+", footer)
    assert writer is not None
    footer = footer.replace(writer[0], b"parquet-mr version 1.8.1".ljust(len(writer[0])))
    return body + footer + struct.pack("<I", len(footer)) + b"PAR1"


def test_fields_whose_names_differ_in_case_are_refused(root):
    """Spark reads them as the table's; as columns that a file lacks they would be written back as NULL."""
    inner = StructType([StructField("x", LONG), StructField("y", LONG)])
    files = Files(root, schema(id=LONG, s=inner, many=ArrayType(inner)))
    of_file = pa.struct([("X", pa.int64()), ("y", pa.int64())])
    odd = files.write(pa.table({"id": longs(1), "s": pa.array([{"X": 5, "y": 6}], of_file)}))
    deep = files.write(pa.table({"id": longs(1), "many": pa.array([[{"X": 5, "y": 6}]], pa.list_(of_file))}))
    fine = files.write(pa.table({"id": longs(1), "s": pa.array([{"y": 6}], pa.struct([("y", pa.int64())]))}))

    assert "holds column 's' as struct<X: int64, y: int64>" in str(odd.footer.problem)
    assert "holds column 'many'" in str(deep.footer.problem)
    assert fine.footer.problem is None


def test_a_footer_is_read_once(root):
    files = Files(root, schema(id=LONG))
    found = files.write(pa.table({"id": longs(1, 2)}))
    size = (root / found.path).stat().st_size
    (root / found.path).unlink()

    assert files.footers.footer(found.path, size) is found.footer
    assert found.footer.rows == 2
    with pytest.raises(OSError, match=r"0\.parquet"):
        files.footers.footer(found.path, size + 1)


def test_a_file_that_is_no_parquet_is_an_error(root):
    files = Files(root, schema(id=LONG))
    root.mkdir()
    (root / "x").write_bytes(b"PAR1 and no more")

    with pytest.raises(pa.ArrowInvalid):
        files.footers.footer("x", 16)


# -- columns that files lack, or call otherwise -------------------------------------------------


def test_a_column_that_a_file_lacks_is_null(root):
    """Added since; one that was dropped since is not looked at, whatever its type."""
    files = Files(root, schema(id=LONG, new=DecimalType(20, 4), name=TEXT))
    files.write(pa.table({"name": ["one"], "gone": pa.array([1], pa.uint8()), "id": longs(1)}))
    files.write(pa.table({"id": longs(1), "name": ["uno"], "new": pa.array([Decimal(2)], pa.decimal128(20, 4))}))

    assert [(row["name"], row["new"]) for row in files.find(id=longs(1))] == [("one", None), ("uno", Decimal(2))]


def test_a_key_that_a_file_lacks_is_null_in_all_its_rows(root):
    files = Files(root, schema(id=LONG, name=TEXT))
    files.write(pa.table({"name": ["one"]}))
    files.write(pa.table({"id": longs(1), "name": ["uno"]}))

    assert files.places(id=longs(1)) == [(0, 1, 0)]


def test_columns_whose_names_differ_in_case(root):
    """Spark finds them all the same (`spark.sql.caseSensitive` is off); Delta takes over such files (CONVERT).

    Either the row is found, or the file is refused: to take the key for NULL would insert it a second time.
    """
    files = Files(root, schema(id=LONG, name=TEXT))
    found = files.write(pa.table({"ID": longs(1), "Name": ["one"]}))

    assert found.footer.problem is not None or [row["name"] for row in files.find(id=longs(1))] == ["one"]


def test_columns_under_column_mapping(root):
    """By their physical names, at any depth, also where a column has the name that another one has in files."""
    inner = StructType([mapped("x", LONG, "col-x"), mapped("y", LONG, "x")])
    of = StructType([mapped("b", LONG, "a"), mapped("a", TEXT, "b"), mapped("s", inner, "col-s")])
    files = Files(root, of)
    held = pa.array([{"x": 5, "col-x": 6}, None], pa.struct([("x", pa.int64()), ("col-x", pa.int64())]))
    files.write(pa.table({"a": longs(1, 2), "b": ["one", "two"], "s": ["old", "old"], "col-s": held}))

    assert files.find("a", a=pa.array(["two", "one"])) == [
        {EVENT: 1, FILE: 0, POSITION: 0, "b": 1, "a": "one", "s": {"x": 6, "y": 5}},
        {EVENT: 0, FILE: 0, POSITION: 1, "b": 2, "a": "two", "s": None},
    ]


@pytest.mark.parametrize("nesting", ["struct", "list", "map", "struct of struct"])
def test_fields_that_changed_names_with_each_other(root, nesting):
    """RENAME thrice and ALTER COLUMN FIRST on a table that was raised to column mapping: its files have the old names.

    By its names alone the file's type is the table's.
    """
    dtype: DataType = StructType([mapped("a", LONG, "b"), mapped("b", LONG, "a")])
    held: pa.DataType = pa.struct([("a", pa.int64()), ("b", pa.int64())])
    value: Any = {"a": 1, "b": 2}
    expected: Any = {"a": 2, "b": 1}
    if nesting == "list":
        dtype, held, value, expected = ArrayType(dtype), pa.list_(held), [value], [expected]
    elif nesting == "map":
        dtype, held = MapType(TEXT, dtype), pa.map_(pa.string(), held)
        value, expected = [("k", value)], [("k", expected)]
    elif nesting == "struct of struct":
        dtype, held = StructType([mapped("s", dtype, "s")]), pa.struct([("s", held)])
        value, expected = {"s": value}, {"s": expected}
    files = Files(root, StructType([mapped("id", LONG, "id"), mapped("v", dtype, "v")]))
    files.write(pa.table({"id": longs(1), "v": pa.array([value], held)}))

    assert [row["v"] for row in files.find(id=longs(1))] == [expected]


ODD_NAMES = ["c0", "k0", "rowid", "a.b", 'a"b', "é", "select", "t", "e", "[x]"]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names_of_columns(root, name):
    files = Files(root, schema(id=LONG, **{name: TEXT}))
    files.write(pa.table({"id": longs(1), name: ["one"]}))

    assert [row[name] for row in files.find("id", id=longs(1))] == ["one"]
    assert files.places(name, **{name: pa.array(["two", "one"])}) == [(1, 0, 0)]


def test_names_that_the_reader_of_files_uses():
    assert odd_names(["id", "Filename", "file_row_number", "FILE_INDEX", "file"]) == [
        "Filename",
        "file_row_number",
        "FILE_INDEX",
    ]


# -- nested evolution ---------------------------------------------------------------------------


def test_fields_that_were_added_dropped_and_widened(root):
    now = schema(
        id=LONG,
        s=schema(a=LONG, new=TEXT, deep=schema(x=LONG, y=LONG)),
        l=ArrayType(schema(a=LONG, new=TEXT)),
        m=MapType(TEXT, schema(a=LONG, new=TEXT)),
    )
    files = Files(root, now)
    old = pa.struct([("gone", pa.int8()), ("deep", pa.struct([("x", pa.int32())])), ("a", pa.int16())])
    one = pa.struct([("a", pa.int32()), ("gone", pa.string())])
    files.write(
        pa.table(
            {
                "id": longs(1, 2, 3),
                "s": pa.array([{"gone": 1, "a": 7, "deep": {"x": 5}}, None, {"gone": None, "deep": None}], old),
                "l": pa.array([[{"a": 1}, None], [], None], pa.list_(one)),
                "m": pa.array([[("k", {"a": 1}), ("l", None)], [], None], pa.map_(pa.string(), one)),
            }
        )
    )
    rows = files.find(id=longs(1, 2, 3))

    assert [row["s"] for row in rows] == [
        {"a": 7, "new": None, "deep": {"x": 5, "y": None}},
        None,
        {"a": None, "new": None, "deep": None},
    ]
    assert [row["l"] for row in rows] == [[{"a": 1, "new": None}, None], [], None]
    assert [row["m"] for row in rows] == [[("k", {"a": 1, "new": None}), ("l", None)], [], None]


@pytest.mark.parametrize("turn", range(10))
def test_slices_are_conformed_as_the_whole(seed, turn):
    """Offsets and bitmaps that start somewhere, and NULLs that hide values beneath them."""
    rng = random.Random(f"{seed} {turn}")
    dtype = MapType(TEXT, ArrayType(schema(x=LONG, y=MapType(LONG, TEXT))))
    held = pa.map_(pa.string(), pa.list_(pa.struct([("x", pa.int32()), ("y", pa.map_(pa.int8(), pa.string()))])))

    def maybe(value: Any) -> Any:
        return None if rng.random() < 0.3 else value

    def point() -> Any:
        return {"x": maybe(rng.randrange(9)), "y": maybe([(k, maybe("v")) for k in range(rng.randrange(3))])}

    def entries() -> Any:
        return [(f"k{k}", maybe([maybe(point()) for _ in range(rng.randrange(3))])) for k in range(rng.randrange(4))]

    values = pa.array([maybe(entries()) for _ in range(60)], held)
    for _ in range(20):
        some = values.slice(rng.randrange(61), rng.randrange(20))
        found = conformed(some, dtype)
        found.validate(full=True)
        assert found.type == arrow_type(dtype)
        assert found.to_pylist() == some.to_pylist()


def test_a_value_that_does_not_fit_is_an_error():
    with pytest.raises(pa.ArrowInvalid):
        conformed(longs(2**40), IntegerType())
    with pytest.raises(pa.ArrowInvalid):
        conformed(pa.array([Decimal("1.23")]), DecimalType(10, 1))


# -- partitions ---------------------------------------------------------------------------------


def test_partitions_with_odd_values(root):
    """Folders as Spark and delta-rs escape them, whose names say nothing: the log does. NULL is a value of rows."""
    files = Files(root, schema(p=TEXT, id=LONG, day=DateType()), ["p", "day"])
    texts = ["a", "p=q/r", "it's", "%25", "ü", " ", None]
    for number, text in enumerate(texts):
        partition = {"p": text, "day": "0999-12-31" if number % 2 else None}
        files.write(pa.table({"id": longs(1, 2)}), f"p=other/day=1/it's %25 ü {number}.parquet", partition)

    assert [(row[FILE], row["p"], row["day"]) for row in files.find(id=longs(2))] == [
        (number, text, datetime.date(999, 12, 31) if number % 2 else None) for number, text in enumerate(texts)
    ]


@pytest.mark.parametrize("name", ["p[ab].parquet", "p?.parquet", "p*.parquet", "x[1]/0.parquet", "**/0.parquet"])
def test_a_file_whose_name_stands_for_others_is_not_taken_for_them(root, name):
    """Names that DuckDB takes for patterns (Delta's CONVERT keeps them): refused, or the very file is read.

    `p[ab].parquet` stands for the file beside it, which would be read twice, and it itself never.
    """
    files = Files(root, schema(id=LONG, name=TEXT))
    odd = files.write(pa.table({"id": longs(1), "name": ["mine"]}), name)
    matching = name.replace("[ab]", "a").replace("[1]", "1").replace("?", "a").replace("*", "a")
    beside = files.write(pa.table({"id": longs(1), "name": ["beside"]}), matching)
    if eligibility.files_obstacle([odd, beside], "the target") is not None:
        return

    assert [(row[FILE], row["name"]) for row in files.find(id=longs(1))] == [(0, "mine"), (1, "beside")]


@pytest.mark.parametrize(
    ("dtype", "text", "values"),
    [
        (TEXT, "é", ["e\u0301", "é", ""]),
        (LONG, "-5", [5, -5, None]),
        (DateType(), "2024-02-29", [datetime.date(2024, 3, 1), datetime.date(2024, 2, 29), None]),
        (BooleanType(), "false", [True, False, None]),
    ],
    ids=repr,
)
def test_keys_that_are_partition_columns(root, dtype, text, values):
    """Alone, or with others; a partition of NULL holds no key."""
    files = Files(root, schema(p=dtype, id=LONG), ["p"])
    for partition in (text, None, ""):
        files.write(pa.table({"id": longs(1, 2)}), partition={"p": partition})
    keys = pa.array(values[:2], arrow_type(dtype))

    assert files.places("p", p=keys) == [(1, 0, 0), (1, 0, 1)]
    assert files.places("p", "id", p=keys, id=longs(2, 2)) == [(1, 0, 1)]
    assert files.places("id", "p", p=keys, id=longs(2, 3)) == []


def test_keys_in_several_partition_columns(root):
    files = Files(root, schema(a=TEXT, b=IntegerType(), id=LONG), ["a", "b"])
    for a, b in (("x", "1"), ("x", "2"), ("y", "1"), (None, "1")):
        files.write(pa.table({"id": longs(7)}), partition={"a": a, "b": b})
    events = {"a": pa.array(["x", "y", "x"]), "b": pa.array([2, 1, 1], pa.int32()), "id": longs(7, 8, 7)}

    assert files.places("a", "b", "id", **events) == [(2, 0, 0), (0, 1, 0)]


def test_partitions_under_column_mapping(root):
    """`partitionValues` has physical names; a file may hold the column besides, which says nothing."""
    files = Files(root, StructType([mapped("p", LONG, "col-p"), mapped("id", LONG, "p")]), ["p"])
    files.write(pa.table({"p": longs(1, 2), "col-p": longs(99, 99)}), partition={"col-p": "3"})

    assert files.find("p", "id", p=longs(3), id=longs(2)) == [{EVENT: 0, FILE: 0, POSITION: 1, "p": 3, "id": 2}]


PARTITIONS: list[tuple[DataType, Any, str | None]] = [
    (TEXT, "a", "a"),
    (TEXT, None, None),
    (LONG, -(2**63), "-9223372036854775808"),
    (ByteType(), 0, "0"),
    (BooleanType(), False, "false"),
    (BooleanType(), True, "true"),
    (DateType(), datetime.date(1, 1, 1), "0001-01-01"),
    (DateType(), datetime.date(9999, 12, 31), "9999-12-31"),
]


@pytest.mark.parametrize(("dtype", "value", "text"), PARTITIONS, ids=repr)
def test_values_of_partitions_as_texts(dtype, value, text):
    assert partitions.spelled(value) == text
    assert partitions.typed(text, dtype).equals(pa.scalar(value, arrow_type(dtype)))


@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        (LONG, "1.0"),
        (LONG, "1_0"),
        (LONG, "\u0661"),
        (ByteType(), "300"),
        (BooleanType(), "True"),
        (DateType(), "2024-02-30"),
        (DateType(), "yesterday"),
    ],
    ids=repr,
)
def test_texts_that_are_no_values(dtype, text):
    """An error, not some other value."""
    with pytest.raises((ValueError, pa.ArrowException)):
        partitions.typed(text, dtype)


@pytest.mark.parametrize(
    "text", ["0001-01-01", "1582-10-04", "1970-01-01", "9999-12-31", "+12000-02-29", "-0044-03-15"]
)
def test_dates_of_any_year_are_partition_values(text):
    """As Spark spells them; Python has none beyond the year 9999."""
    day = partitions.typed(text, DateType())
    rows = pa.table({"p": pa.array([day.cast(pa.int32()).as_py()], pa.int32()).cast(pa.date32()), "id": longs(1)})

    ((values, _),) = partitions.split(rows, schema(p=DateType(), id=LONG), ["p"])
    assert values == {"p": text}


def test_rows_by_their_partition():
    """In the order of their first rows, under the names in files."""
    of = StructType([mapped("p", TEXT, "col-p"), StructField("id", LONG), StructField("day", DateType())])
    day = datetime.date(2024, 1, 1)
    rows = pa.table({"p": ["b", None, "b", "a"], "id": longs(1, 2, 3, 4), "day": [day, None, day, day]})

    assert [(dict(values), part.to_pydict()) for values, part in partitions.split(rows, of, ["day", "p"])] == [
        ({"col-p": "b", "day": "2024-01-01"}, {"id": [1, 3]}),
        ({"col-p": None, "day": None}, {"id": [2]}),
        ({"col-p": "a", "day": "2024-01-01"}, {"id": [4]}),
    ]
    assert [(values, part) for values, part in partitions.split(rows, of, [])] == [({}, rows)]
    assert list(partitions.split(rows.slice(0, 0), of, ["p"])) == []


@pytest.mark.parametrize(("text", "odd"), [("", True), (HIVE_NULL, True), ("a", False), (None, False)])
def test_texts_that_spark_keeps_as_null_are_left_to_it(text, odd):
    rows = pa.table({"p": pa.array(["x", text], pa.string()), "q": pa.array(["", None], pa.string()), "n": longs(1, 2)})

    assert partitions.holds_odd_text(rows, ["n", "p"]) == ("p" if odd else None)
    assert (eligibility.events_obstacle(rows, ["p", "elsewhere"]) is not None) is odd


# -- which files are looked into ----------------------------------------------------------------


class Table:
    """A table whose log is written by hand."""

    def __init__(self, root: Path, of: StructType, **properties: str) -> None:
        self.files = Files(root, of)
        features = ["deletionVectors", "columnMapping", "timestampNtz"]
        self.put(
            {
                "protocol": {
                    "minReaderVersion": 3,
                    "minWriterVersion": 7,
                    "readerFeatures": features,
                    "writerFeatures": features,
                }
            },
            {
                "metaData": {
                    "id": "a8f5",
                    "format": {"provider": "parquet", "options": {}},
                    "schemaString": of.json(),
                    "partitionColumns": [],
                    "configuration": properties,
                    "createdTime": 1,
                }
            },
        )

    def put(self, *actions: Mapping[str, Any]) -> None:
        log = self.files.root / "_delta_log"
        log.mkdir(parents=True, exist_ok=True)
        lines = [{"commitInfo": {"timestamp": 1, "operation": "WRITE"}}, *actions]
        file = log / f"{len(list(log.iterdir())):020}.json"
        file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    def append(self, rows: pa.Table, name: str | None = None, **stats: Any) -> Candidate:
        found = self.files.write(rows, name)
        size = (self.files.root / found.path).stat().st_size
        body = {"path": found.path, "partitionValues": {}, "size": size, "modificationTime": 1, "dataChange": True}
        told = json.dumps({"numRecords": rows.num_rows, **stats})
        self.put({"add": {**body, "stats": told}})
        return found

    def touched(self, **bounds: tuple[Any, Any]) -> list[str]:
        native = open_table(str(self.files.root))
        assert native is not None
        columns = tuple(
            KeyBound(field=self.files.schema[name], least=least, greatest=greatest)
            for name, (least, greatest) in bounds.items()
        )
        snapshot = native.snapshot()
        found = table_files(native, snapshot).touched(native, snapshot, KeyBounds(columns=columns))
        assert all(one.add["path"] == one.path for one in found)
        return [one.path for one in found]


def test_files_whose_statistics_rule_a_key_out_are_not_looked_into(root):
    table = Table(root, schema(id=LONG))
    for low in (0, 10):
        stats = {"minValues": {"id": low}, "maxValues": {"id": low + 9}, "nullCount": {"id": 0}}
        table.append(pa.table({"id": longs(low, low + 9)}), **stats)
    table.append(pa.table({"id": longs(3)}))

    assert sorted(table.touched(id=(12, 15))) == ["1.parquet", "2.parquet"]
    assert sorted(table.touched(id=(9, 10))) == ["0.parquet", "1.parquet", "2.parquet"]
    assert sorted(table.touched()) == ["0.parquet", "1.parquet", "2.parquet"]


@pytest.mark.parametrize("kind", [TimestampType(), TimestampNTZType()], ids=repr)
@pytest.mark.parametrize("moment", [micros(2024, 1, 1, 12, 30, 15, 123456), micros(1969, 12, 31, 23, 59, 59, 999999)])
def test_statistics_of_times_are_cut_off_at_milliseconds(root, kind, moment):
    """By Spark and by ourselves: the greatest key of a file may be up to a millisecond above what they say."""
    table = Table(root, schema(k=kind))
    cut = EPOCH + datetime.timedelta(milliseconds=moment // 1000)
    told = f"{cut:%Y-%m-%dT%H:%M:%S}.{cut.microsecond // 1000:03}" + ("Z" if isinstance(kind, TimestampType) else "")
    file = table.append(
        pa.table({"k": longs(moment).cast(arrow_type(kind))}),
        minValues={"k": told},
        maxValues={"k": told},
        nullCount={"k": 0},
    )

    assert table.touched(k=(moment, moment)) == [file.path]


@pytest.mark.parametrize("dtype", [DecimalType(38, 0), DecimalType(20, 4), DecimalType(15, 4)], ids=repr)
def test_decimals_of_any_digits_are_looked_for(root, dtype):
    """Their statistics are numbers of JSON, which a reader may take for floats."""
    table = Table(root, schema(k=dtype))
    digits = "1" * (dtype.precision - dtype.scale - 1) + "7"
    value = Decimal(f"{digits}.{'3' * dtype.scale}" if dtype.scale else digits)
    held = pa.table({"k": pa.array([value], pa.decimal128(dtype.precision, dtype.scale))})
    file = table.append(held)
    commit = sorted((root / "_delta_log").iterdir())[-1]
    told = f'{{\\"numRecords\\":1,\\"minValues\\":{{\\"k\\":{value}}},\\"maxValues\\":{{\\"k\\":{value}}}}}'
    commit.write_text(commit.read_text().replace('{\\"numRecords\\": 1}', told))

    assert table.touched(k=(str(value), str(value))) == [file.path]


def test_statistics_are_those_of_the_column_whatever_others_are_called_in_files(root):
    """Under column mapping they have physical names, and `id` may be what another column once was called."""
    of = StructType([mapped("old_id", LONG, "id"), mapped("id", LONG, "new_id")])
    for number, field in enumerate(of.fields):
        field.metadata["delta.columnMapping.id"] = number + 1
    table = Table(root, of, **{"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": "2"})
    file = table.append(
        pa.table({"id": longs(1, 2), "new_id": longs(100, 200)}),
        minValues={"id": 1, "new_id": 100},
        maxValues={"id": 2, "new_id": 200},
        nullCount={"id": 0, "new_id": 0},
    )

    assert table.touched(id=(100, 100)) == [file.path]


def test_a_physical_name_that_the_reader_of_files_uses_is_refused(root):
    """A column that was renamed keeps its name in files."""
    of = StructType([mapped("id", LONG, "id"), mapped("source", TEXT, "filename")])
    for number, field in enumerate(of.fields):
        field.metadata["delta.columnMapping.id"] = number + 1
    mapping = {"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": "2"}
    Table(root, of, **mapping, **{"delta.enableDeletionVectors": "true"})
    native = open_table(str(root))
    assert native is not None
    refused = eligibility.table_obstacle(native, native.snapshot(), "the target")

    assert refused is not None
    assert refused.reason == "column"


def test_an_invariant_inside_a_struct_is_left_to_spark_with_vectors_and_without(root):
    rule = {"delta.invariants": '{"expression": {"expression": "s.a >= 7/10"}}'}
    inner = StructType([StructField("a", IntegerType(), nullable=True, metadata=rule)])
    Table(root, schema(id=LONG, s=inner), **{"delta.enableDeletionVectors": "true"})
    native = open_table(str(root))
    assert native is not None
    vectored, plain = native.snapshot(), replace(native.snapshot(), properties={})

    for refused in (
        eligibility.table_obstacle(native, vectored, "the target"),
        eligibility.table_obstacle(native, plain, "the target"),
    ):
        assert refused is not None
        assert "column 's' of the target has an invariant" in refused.detail


def test_columns_that_only_their_ids_tell(root):
    """Under column mapping by id a file may call a column anything (Delta protocol, "Column Mapping"): refused."""
    of = StructType([mapped("id", LONG, "id")])
    of["id"].metadata["delta.columnMapping.id"] = 1
    field = pa.field("called_otherwise", pa.int64(), metadata={"PARQUET:field_id": "1"})
    mapping = {"delta.columnMapping.mode": "id", "delta.columnMapping.maxColumnId": "1"}
    table = Table(root, of, **mapping, **{"delta.enableDeletionVectors": "true"})
    found = table.append(pa.table([longs(7)], schema=pa.schema([field])))
    native = open_table(str(root))
    assert native is not None
    snapshot = native.snapshot()
    refused = eligibility.table_obstacle(native, snapshot, "the target") or eligibility.files_obstacle(
        table_files(native, snapshot).touched(native, snapshot, KeyBounds()), "the target"
    )

    assert refused is not None or table.files.places(id=longs(7)) == [(0, 0, 0)], found


def test_a_log_that_delta_rs_reads_otherwise_is_an_error(root):
    """Two readers that differ: one of them is wrong."""
    table = Table(root, schema(id=LONG))
    table.append(pa.table({"id": longs(1)}))
    native = open_table(str(root))
    assert native is not None
    snapshot = native.snapshot()
    on_read = TableFiles(native, snapshot)
    on_read.live.at(1)
    on_read.live.follow(2, [{"remove": {"path": "0.parquet"}}])
    table.append(pa.table({"id": longs(2)}))
    native.refresh()

    with pytest.raises(UnreadableLogError, match="has 0 files by its log, and 2 as delta-rs reads it"):
        on_read.touched(native, native.snapshot(), KeyBounds())


def test_a_table_is_kept_with_its_handle(root):
    table = Table(root, schema(id=LONG))
    table.append(pa.table({"id": longs(1)}))
    native = open_table(str(root))
    assert native is not None
    snapshot = native.snapshot()

    assert table_files(native, snapshot) is table_files(native, snapshot)


def test_footers_are_looked_at_again_when_the_schema_has_changed(root):
    """What was readable may not be so any more."""
    table = Table(root, schema(id=LONG, v=LONG))
    file = table.append(pa.table({"id": longs(1), "v": longs(1)}))
    native = open_table(str(root))
    assert native is not None
    before = native.snapshot()
    on_read = table_files(native, before)
    assert [one.footer.problem for one in on_read.touched(native, before, KeyBounds())] == [None]
    metadata = json.loads((root / "_delta_log" / f"{0:020}.json").read_text().splitlines()[2])
    metadata["metaData"]["schemaString"] = schema(id=LONG, v=TEXT).json()
    table.put(metadata)
    native.refresh()
    after = native.snapshot()
    problems = [one.footer.problem for one in table_files(native, after).touched(native, after, KeyBounds())]

    assert problems == [f"file {file.path!r} holds column 'v' as int64, not as string"]
