"""What the driver says of pairs of events and rows: each value compared by an oracle in Python, one by one."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
    VariantType,
)

from stream_merge.engines.driver import conditions
from stream_merge.engines.driver import values as module
from stream_merge.engines.driver.conditions import holds
from stream_merge.engines.driver.values import check_alike, differ
from stream_merge.model import names
from stream_merge.shapes.clauses import (
    Always,
    And,
    Changed,
    Condition,
    HasValue,
    Holds,
    IsDelete,
    Newer,
    Not,
    Opaque,
    Or,
    SamePosition,
    SameSequence,
)
from stream_merge.shapes.layout import Layout, StoredColumn

NAN = math.nan
ENTRIES = pa.map_(pa.string(), pa.int64())
POINT = pa.struct([("x", pa.float64()), ("y", pa.int64())])
PLACED = pa.map_(pa.float64(), POINT)
GROUPED = pa.map_(pa.string(), ENTRIES)
LISTED = pa.map_(pa.list_(pa.int64()), pa.bool_())

DIFFERENT: list[tuple[pa.DataType, Any, Any, bool]] = [
    (pa.int64(), 1, 2, True),
    (pa.int64(), None, None, False),
    (pa.int64(), 0, None, True),
    (pa.int64(), None, 0, True),
    (pa.bool_(), False, None, True),
    (pa.float64(), NAN, NAN, False),
    (pa.float64(), 0.0, -0.0, False),
    (pa.float64(), NAN, None, True),
    (pa.float64(), None, NAN, True),
    (pa.float64(), NAN, 1.0, True),
    (pa.float64(), 1.0, NAN, True),
    (pa.float32(), NAN, NAN, False),
    (pa.string(), "", None, True),
    (pa.string(), "a", "a ", True),
    (pa.string(), "e\u0301", "é", True),
    (pa.binary(), b"", b"\x00", True),
    (pa.decimal128(38, 2), Decimal("1.10"), Decimal("1.1"), False),
    (pa.decimal128(38, 2), Decimal("99999999999999999999999999999999999.99"), Decimal(0), True),
    (POINT, {"x": NAN, "y": None}, {"x": NAN, "y": None}, False),
    (POINT, {"x": 0.0, "y": 1}, {"x": -0.0, "y": 1}, False),
    (POINT, None, {"x": None, "y": None}, True),
    (POINT, None, None, False),
    (POINT, {"x": 1.0, "y": 1}, {"x": 1.0, "y": None}, True),
    (pa.struct([("p", POINT)]), {"p": None}, {"p": {"x": None, "y": None}}, True),
    (pa.struct([("p", POINT)]), {"p": None}, None, True),
    (pa.list_(pa.float64()), [NAN, -0.0], [NAN, 0.0], False),
    (pa.list_(pa.float64()), [], None, True),
    (pa.list_(pa.float64()), [], [None], True),
    (pa.list_(pa.float64()), [1.0], [1.0, None], True),
    (pa.list_(pa.float64()), [1.0, 2.0], [2.0, 1.0], True),
    (pa.list_(pa.list_(pa.int64())), [[1], [2]], [[1, 2]], True),
    (pa.list_(pa.list_(pa.int64())), [[1], [2]], [[1, 2], []], True),
    (pa.list_(pa.list_(pa.int64())), [[1], None], [[1], []], True),
    (pa.list_(pa.list_(pa.int64())), [[1], []], [[1], []], False),
    (ENTRIES, [("a", 1), ("b", None)], [("b", None), ("a", 1)], False),
    (ENTRIES, [("a", 1), ("b", 2)], [("a", 2), ("b", 1)], True),
    (ENTRIES, [("a", 1)], [("a", None)], True),
    (ENTRIES, [("a", 1)], [("a", 1), ("b", 1)], True),
    (ENTRIES, [], None, True),
    (ENTRIES, [], [], False),
    (PLACED, [(NAN, None), (0.0, {"x": -0.0, "y": 1})], [(-0.0, {"x": 0.0, "y": 1}), (NAN, None)], False),
    (PLACED, [(NAN, None)], [(NAN, {"x": None, "y": None})], True),
    (GROUPED, [("m", [("a", 1), ("b", 2)]), ("n", None)], [("n", None), ("m", [("b", 2), ("a", 1)])], False),
    (GROUPED, [("m", []), ("n", None)], [("n", []), ("m", None)], True),
    (pa.list_(ENTRIES), [[("a", 1), ("b", 2)], None], [[("b", 2), ("a", 1)], None], False),
    (LISTED, [([], True), ([None], False)], [([None], False), ([], True)], False),
    (LISTED, [([1, 2], True), ([12], None)], [([12], True), ([1, 2], None)], True),
]  # fmt: skip


def differs(one: pa.Array, other: pa.Array) -> pa.BooleanArray:
    """Whether values at the same position differ, of arrays that are checked to be alike."""
    check_alike("the values", one.type, other.type)
    return differ(one, other)


@pytest.mark.parametrize(("dtype", "one", "other", "expected"), DIFFERENT, ids=str)
def test_values_differ_as_in_spark(dtype: pa.DataType, one: Any, other: Any, expected: bool):
    """Also beside others that are the same, and the other way round."""
    ones, others = pa.array([one, None, one, one], dtype), pa.array([one, None, other, one], dtype)
    assert differs(ones, others).to_pylist() == [False, False, expected, False]
    assert differs(others, ones).to_pylist() == [False, False, expected, False]
    assert differs(ones.slice(2, 1), others.slice(2, 1)).to_pylist() == [expected]
    assert equal(one, other, dtype) is not expected


SCALARS: dict[pa.DataType, list[Any]] = {
    pa.int64(): [0, 1, -(2**63)],
    pa.int8(): [0, -1],
    pa.bool_(): [True, False],
    pa.float64(): [0.0, -0.0, NAN, 1.5, math.inf],
    pa.float32(): [0.0, -0.0, NAN],
    pa.decimal128(20, 4): [Decimal("1.5"), Decimal("-1.5")],
    pa.string(): ["", "a", "\U0001f600"],
    pa.binary(): [b"", b"\xff"],
    pa.date32(): [date(1, 1, 1), date(9999, 12, 31)],
    pa.timestamp("us", "UTC"): [0, 253402300799999999],
    pa.timestamp("us"): [0, -1],
}


@pytest.mark.parametrize("turn", range(40))
def test_values_of_any_type_differ_as_one_by_one(seed: int, turn: int):
    """Sliced arrays, and NULLs that hide values beneath them; half of the pairs are copies."""
    rng = random.Random(f"{seed} {turn}")
    dtype, count = any_type(rng, 3), 400
    one, fresh = (any_values(rng, dtype, count) for _ in range(2))
    copied = [rng.random() < 0.6 for _ in range(count)]
    other = pa.concat_arrays([fresh.slice(0, 5), one, fresh]).take(
        pa.array([0, 1, 2, *(5 + i if copy else 5 + count + i for i, copy in enumerate(copied))])
    )
    other, start = other.slice(3), rng.randrange(10)
    expected = [not equal(a, b, dtype) for a, b in zip(one.to_pylist(), other.to_pylist(), strict=True)]
    assert differs(one, other).to_pylist() == expected
    assert differs(other.slice(start, 300), one.slice(start, 300)).to_pylist() == expected[start : start + 300]
    assert not any(differs(one, one).to_pylist())
    dirty = fresh.slice(start, 200), one.slice(7, 200)
    pairs = zip(*(values.to_pylist() for values in dirty), strict=True)
    assert differs(*dirty).to_pylist() == [not equal(a, b, dtype) for a, b in pairs]


def any_type(rng: random.Random, depth: int) -> pa.DataType:
    kind = rng.choice(["struct", "list", "map"]) if depth and rng.random() < 0.8 else "scalar"
    if kind == "scalar":
        return rng.choice(list(SCALARS))
    parts = [any_type(rng, depth - 1) for _ in range(2)]
    if kind == "list":
        return pa.list_(parts[0])
    return pa.map_(*parts) if kind == "map" else pa.struct([("a", parts[0]), ("B", parts[1])])


def any_values(rng: random.Random, dtype: pa.DataType, count: int, nulls: float = 0.2) -> pa.Array:
    """Few values of each type, so that many are equal; NULL lists, maps and structs have something beneath."""
    if dtype in SCALARS:
        found = [None if rng.random() < nulls else rng.choice(SCALARS[dtype]) for _ in range(count)]
        return pa.array(found, dtype)
    mask = pa.array([rng.random() < nulls for _ in range(count)], pa.bool_())
    if pa.types.is_struct(dtype):
        parts = [any_values(rng, field.type, count) for field in dtype]
        return pa.StructArray.from_arrays(parts, fields=list(dtype), mask=mask)
    ends = [0]
    for _ in range(count):
        ends.append(ends[-1] + rng.choice([0, 1, 1, 2, 3]))
    offsets = pa.array(ends, pa.int32())
    if pa.types.is_list(dtype):
        return pa.ListArray.from_arrays(offsets, any_values(rng, dtype.value_type, ends[-1]), type=dtype, mask=mask)
    keys = any_values(rng, dtype.key_type, ends[-1], nulls=0)
    return pa.MapArray.from_arrays(offsets, keys, any_values(rng, dtype.item_type, ends[-1]), type=dtype, mask=mask)


def equal(one: Any, other: Any, dtype: pa.DataType) -> bool:  # noqa: PLR0911 - a case per kind of type
    """Whether `columns.differs` finds no difference, in Python."""
    if one is None or other is None:
        return one is other
    if pa.types.is_floating(dtype):
        return bool(one == other) or (math.isnan(one) and math.isnan(other))
    if pa.types.is_struct(dtype):
        return all(equal(one[field.name], other[field.name], field.type) for field in dtype)
    if pa.types.is_list(dtype):
        return len(one) == len(other) and all(equal(a, b, dtype.value_type) for a, b in zip(one, other, strict=True))
    if pa.types.is_map(dtype):
        left = list(other)
        for key, value in one:
            same = (
                i for i, (k, v) in enumerate(left) if equal(key, k, dtype.key_type) and equal(value, v, dtype.item_type)
            )
            if (place := next(same, None)) is None:
                return False
            del left[place]
        return not left
    return bool(one == other)


def test_every_nan_is_the_same():
    """Whatever its other bits: as a column, and as what tells maps from each other."""
    bits = (0x7FF8000000000000, 0xFFF8000000000001)
    one, other = (
        pa.array(order, pa.uint64()).cast(pa.int64(), safe=False).view(pa.float64()) for order in (bits, bits[::-1])
    )
    assert differs(one, other).to_pylist() == [False, False]
    values = pa.array(["a", "b"]), pa.array(["b", "a"])
    maps = [pa.MapArray.from_arrays(pa.array([0, 2], pa.int32()), one, named) for named in values]
    assert differs(*maps).to_pylist() == [False]
    ordered_by = [pa.table({names.SEQUENCE_COLUMN: pa.StructArray.from_arrays([nan], ["c1"])}) for nan in (one, other)]
    assert holds(Newer(), layout(sequence=[DoubleType()]), *ordered_by).to_pylist() == [False, False]


def test_texts_compare_by_their_bytes_whether_they_are_utf_8_or_not():
    one, other = (pa.array(texts, pa.binary()).view(pa.string()) for texts in ([b"\xff", b"\xfe"], [b"\xff", b"\xff"]))
    assert differs(one, other).to_pylist() == [False, True]
    keys = one, one.take(pa.array([1, 0]))
    maps = [pa.MapArray.from_arrays(pa.array([0, 2], pa.int32()), two, pa.nulls(2, pa.int64())) for two in keys]
    assert differs(*maps).to_pylist() == [False]
    ordered_by = [pa.table({names.SEQUENCE_COLUMN: pa.StructArray.from_arrays([two], ["c1"])}) for two in (other, one)]
    assert holds(Newer(), layout(sequence=[StringType()]), *ordered_by).to_pylist() == [False, True]


def test_structs_are_compared_by_the_names_of_their_fields():
    one = pa.array([{"x": 1.0, "y": 2}, {"x": 1.0, "y": 2}], POINT)
    other = pa.array([{"y": 2, "x": 1.0}, {"y": 1, "x": 2.0}], pa.struct([("y", pa.int64()), ("x", pa.float64())]))
    assert differs(one, other).to_pylist() == [False, True]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.int64(), pa.int32()),
        (pa.decimal128(10, 2), pa.decimal128(10, 3)),
        (pa.timestamp("us", "UTC"), pa.timestamp("us")),
        (pa.timestamp("us"), pa.timestamp("ns")),
        (POINT, pa.struct([("x", pa.float64())])),
        (pa.list_(pa.int64()), pa.list_(pa.int32())),
        (ENTRIES, pa.map_(pa.string(), pa.int32())),
        (ENTRIES, pa.map_(pa.binary(), pa.int64())),
        (pa.string(), pa.large_string()),
        (pa.large_string(), pa.large_string()),
        (pa.list_(pa.null()), pa.list_(pa.null())),
        (pa.dictionary(pa.int32(), pa.string()), pa.dictionary(pa.int32(), pa.string())),
        (pa.duration("us"), pa.duration("us")),
    ],
    ids=str,
)  # fmt: skip
def test_values_that_are_not_known_to_compare_as_in_spark_are_not_compared(one: pa.DataType, other: pa.DataType):
    with pytest.raises(TypeError, match="does not compare with"):
        differs(pa.nulls(1, one), pa.nulls(1, other))


def test_what_entries_items_and_zones_are_called_makes_no_difference():
    one = pa.array([[1]], pa.list_(pa.field("element", pa.int64(), nullable=False)))
    assert differs(one, pa.array([[1]], pa.list_(pa.field("item", pa.int64())))).to_pylist() == [False]
    moments = [pa.array([0], pa.timestamp("us", zone)) for zone in ("UTC", "Etc/UTC")]
    assert differs(*moments).to_pylist() == [False]


def stored(name: str, dtype: DataType, source_type: DataType | None = None) -> StoredColumn:
    source = dtype if source_type is None else source_type
    return StoredColumn(name=name, source_name=name, source_type=source, field=StructField(name, dtype))


def layout(
    *columns: StoredColumn,
    sequence: Sequence[DataType] = (LongType(),),
    kept_in: tuple[str, ...] | None = None,
    new: tuple[str, ...] = (),
) -> Layout:
    return Layout(
        stored=columns,
        keys=("id",),
        sequence_fields=tuple(StructField(f"c{i}", dtype) for i, dtype in enumerate(sequence, 1)),
        sequence_columns=kept_in,
        sequence_source=(),
        deletes=None,
        new_columns=new,
        type_changes=(),
        definition="",
        case_sensitive=False,
    )


def by_value(value: Any) -> Any:
    return (value is not None, value)


def by_float(value: Any) -> Any:
    return (
        value is not None,
        value is not None and math.isnan(value),
        0.0 if value is None or math.isnan(value) else value,
    )


def by_bytes(value: Any) -> Any:
    return (value is not None, None if value is None else value.encode())


def by_items(value: Any) -> Any:
    return (value is not None, [by_value(item) for item in value or ()])


ORDERED: dict[str, tuple[DataType, pa.DataType, list[Any], Callable[[Any], Any]]] = {
    "bigint": (LongType(), pa.int64(), [-1, 0, 2**53, 2**53 + 1], by_value),
    "boolean": (BooleanType(), pa.bool_(), [False, True], by_value),
    "double": (DoubleType(), pa.float64(), [-math.inf, -0.0, 0.0, 1.5, math.inf, NAN], by_float),
    "decimal": (DecimalType(20, 2), pa.decimal128(20, 2), [Decimal("-1.5"), Decimal("1.25"), Decimal("1.5")], by_value),
    "string": (StringType(), pa.string(), ["", "B", "a", "a\x00", "é", "\uffff", "\U0001f600"], by_bytes),
    "binary": (BinaryType(), pa.binary(), [b"", b"\x00", b"\x7f", b"\x80", b"\xff"], by_value),
    "date": (DateType(), pa.date32(), [date(1, 1, 1), date(1970, 1, 1), date(9999, 12, 31)], by_value),
    "timestamp": (TimestampType(), pa.timestamp("us"), [datetime(1, 1, 1), datetime(9999, 12, 31)], by_value),
    "array": (ArrayType(LongType()), pa.list_(pa.int64()), [[], [None], [None, 1], [1], [1, 0], [2]], by_items),
}


@pytest.mark.parametrize("first", ORDERED)
@pytest.mark.parametrize("kept_in", [None, ("a", "b")], ids=["reserved column", "own columns"])
def test_sequences_compare_component_by_component(seed: int, first: str, kept_in: tuple[str, ...] | None):
    """Those of rows may be NULL, in part or as a whole; the second component is a struct within a struct."""
    rng = random.Random(f"{seed} {first}")
    dtype, arrow, values, order = ORDERED[first]
    nested = pa.struct([(".x", pa.int64()), ("y", pa.struct([("z", arrow)]))])
    sequence = (
        dtype,
        StructType([StructField(".x", LongType()), StructField("y", StructType([StructField("z", dtype)]))]),
    )
    ordered_by = pa.struct([("c1", arrow), ("c2", nested)])

    def one(nulls: float) -> Any:
        def maybe(value: Any) -> Any:
            return None if rng.random() < nulls else value

        c2 = {".x": maybe(rng.choice([0, 1])), "y": maybe({"z": maybe(rng.choice(values))})}
        return {"c1": maybe(rng.choice(values)), "c2": maybe(c2)}

    events, rows = [one(0) for _ in range(600)], [one(0.15) for _ in range(600)]
    rows = [event if rng.random() < 0.2 else row for event, row in zip(events, rows, strict=True)]
    if kept_in is None:
        rows = [None if rng.random() < 0.1 else row for row in rows]
        of_rows = {
            names.SEQUENCE_COLUMN: pa.chunked_array([pa.array(rows[:50], ordered_by), pa.array(rows[50:], ordered_by)])
        }
    else:
        of_rows = {"a": pa.array([r["c1"] for r in rows], arrow), "b": pa.array([r["c2"] for r in rows], nested)}
    of_events = pa.table({names.SEQUENCE_COLUMN: pa.array(events, ordered_by)})

    def scalars(value: Any) -> list[Any]:
        value = value or {"c1": None, "c2": None}
        c2 = value["c2"] or {".x": None, "y": None}
        return [order(value["c1"]), by_value(c2[".x"]), order((c2["y"] or {"z": None})["z"])]

    def answers(condition: Condition) -> list[bool]:
        return holds(condition, layout(sequence=sequence, kept_in=kept_in), of_events, pa.table(of_rows)).to_pylist()

    pairs = [(scalars(event), scalars(row)) for event, row in zip(events, rows, strict=True)]
    for condition, expected in (
        (Newer(), [event > row for event, row in pairs]),
        (SameSequence(), [event == row for event, row in pairs]),
        (SamePosition(2), [event == row for event, row in pairs]),
        (SamePosition(1), [event[:1] == row[:1] for event, row in pairs]),
    ):
        assert answers(condition) == expected
        assert answers(Not(condition)) == [not answer for answer in expected]
        assert {True, False} == set(expected)


WIDE = (
    stored("id", LongType()),
    stored("tags", MapType(StringType(), LongType())),
    stored("price", DoubleType()),
    stored("places", ArrayType(StructType([StructField("x", DoubleType()), StructField("y", LongType())]))),
)
WIDE_TYPES = {"id": pa.int64(), "tags": ENTRIES, "price": pa.float64(), "places": pa.list_(POINT)}


def wide_pairs(rng: random.Random, count: int) -> tuple[pa.Table, pa.Table]:
    """In several pieces, which begin elsewhere in events than in rows; most columns of a pair are the same."""
    both: list[dict[str, Any]] = [{}, {}]
    for name, dtype in WIDE_TYPES.items():
        event, row = (any_values(rng, dtype, count) for _ in range(2))
        chosen = pa.array([i if rng.random() < 0.8 else count + i for i in range(count)])
        for of_side, values in zip(both, (event, pa.concat_arrays([event, row]).take(chosen)), strict=True):
            cut = rng.randrange(count)
            of_side[name] = pa.chunked_array([values.slice(0, cut), values.slice(cut)])
    for of_side in both:
        of_side[names.SEQUENCE_COLUMN] = pa.array([{"c1": rng.choice([1, 2, 3])} for _ in range(count)])
    both[0][names.DELETE_COLUMN] = pa.array([rng.random() < 0.4 for _ in range(count)])
    events, rows = (pa.table(of_side) for of_side in both)
    return events, rows


def judged(condition: Condition, event: dict[str, Any], row: dict[str, Any]) -> bool:  # noqa: PLR0911
    match condition:
        case Always():
            return True
        case IsDelete():
            return bool(event[names.DELETE_COLUMN])
        case Newer():
            return bool(event[names.SEQUENCE_COLUMN]["c1"] > row[names.SEQUENCE_COLUMN]["c1"])
        case SameSequence():
            return bool(event[names.SEQUENCE_COLUMN] == row[names.SEQUENCE_COLUMN])
        case Changed():
            return not all(equal(event[name], row[name], dtype) for name, dtype in WIDE_TYPES.items())
        case Not(inner):
            return not judged(inner, event, row)
        case And(parts):
            return all(judged(part, event, row) for part in parts)
        case Or(parts):
            return any(judged(part, event, row) for part in parts)
    raise AssertionError(condition)


def any_condition(rng: random.Random, depth: int) -> Condition:
    if not depth or rng.random() < 0.2:
        return rng.choice([Always(), IsDelete(), Newer(), SameSequence(), Changed(), Changed()])
    if rng.random() < 0.2:
        return Not(any_condition(rng, depth - 1))
    parts = [any_condition(rng, depth - 1) for _ in range(rng.randrange(4))]
    return And(*parts) if rng.random() < 0.5 else Or(*parts)


UPDATING = And(Not(IsDelete()), Or(And(Newer(), Changed()), And(SameSequence(), Changed())))


@pytest.mark.parametrize("most_bytes", [0, conditions.MOST_BYTES], ids=["in pieces", "in one"])
@pytest.mark.parametrize("turn", range(12))
def test_conditions_of_conditions_hold_as_one_by_one(
    monkeypatch: pytest.MonkeyPatch, seed: int, turn: int, most_bytes: int
):
    """Columns too large for Arrow to hold in one piece are compared piece by piece."""
    monkeypatch.setattr(conditions, "MOST_BYTES", most_bytes)
    rng = random.Random(f"{seed} {turn}")
    events, rows = (table.slice(3) for table in wide_pairs(rng, 80))
    pairs = list(zip(events.to_pylist(maps_as_pydicts=None), rows.to_pylist(maps_as_pydicts=None), strict=True))
    for condition in (Changed(), UPDATING, *(any_condition(rng, 3) for _ in range(8))):
        expected = [judged(condition, event, row) for event, row in pairs]
        for wanted, answers in ((condition, expected), (Not(condition), [not one for one in expected])):
            found = holds(wanted, layout(*WIDE), events, rows)
            assert (found.type, found.null_count, found.to_pylist()) == (pa.bool_(), 0, answers)


def test_no_pairs_get_no_answers():
    events, rows = wide_pairs(random.Random(1), 5)
    for condition in (UPDATING, Changed(), Newer(), SameSequence(), Always(), Or(), IsDelete()):
        for none in (events.slice(0, 0), pa.Table.from_batches([], events.schema)):
            assert holds(condition, layout(*WIDE), none, rows.slice(0, 0)).to_pylist() == []


def test_events_without_a_row_are_asked_about_themselves_alone():
    events = pa.table({names.DELETE_COLUMN: [True, False]})
    for condition, expected in (
        (Always(), [True, True]),
        (Not(IsDelete()), [False, True]),
        (And(Always(), IsDelete()), [True, False]),
        (Or(Not(Always()), IsDelete()), [True, False]),
    ):
        assert holds(condition, layout(), events, None).to_pylist() == expected


@pytest.mark.parametrize("condition", [Newer(), SameSequence(), SamePosition(1), Changed()], ids=str)
def test_there_has_to_be_a_row_to_compare_with(condition: Condition):
    """Also where nothing would have to be looked at: a column is new, or what stands before decides."""
    events = pa.table({names.DELETE_COLUMN: [True]})
    for asked in (condition, Or(Always(), Not(condition))):
        with pytest.raises(AssertionError, match="there is none"):
            holds(asked, layout(stored("a", LongType()), new=("a",)), events, None)


@pytest.mark.parametrize("condition", [Opaque("s.a > t.a"), Holds("t.a > 1"), HasValue("a")], ids=str)
def test_what_only_spark_can_say_is_left_to_it(condition: Condition):
    events = pa.table({"a": [1], names.DELETE_COLUMN: [True]})
    for asked in (condition, And(Not(IsDelete()), condition), Or(Always(), condition)):
        for rows in (events, None):
            with pytest.raises(AssertionError, match="Spark alone"):
                holds(asked, layout(), events, rows)


@pytest.mark.parametrize(("new", "expected"), [("a", True), ("a.x", True), ("ab", False), ("b.a", False)])
def test_a_column_or_a_field_of_one_that_the_target_is_to_get_is_a_change(new: str, expected: bool):
    """As `engines.spark.render` says: the row cannot have its value."""
    table = pa.table({"a": [1, 2]})
    assert holds(Changed(), layout(stored("a", LongType()), new=(new,)), table, table).to_pylist() == [expected] * 2


def test_fields_that_the_sources_structs_lack_are_the_rows_own():
    """An update keeps them; a NULL struct and one of NULLs are still two."""
    inner = StructType([StructField("x", LongType()), StructField("y", LongType())])
    dtype = StructType([StructField("p", inner), StructField("q", LongType())])
    source = StructType([StructField("P", StructType([StructField("X", LongType())]))])
    arrow = pa.struct([("p", pa.struct([("x", pa.int64()), ("y", pa.int64())])), ("q", pa.int64())])
    lacking = pa.struct([("p", pa.struct([("x", pa.int64())]))])
    events = [{"p": {"x": 1}}, {"p": {"x": 1}}, {"p": None}, {"p": {"x": None}}, None, None, {"p": None}]
    rows = [
        {"p": {"x": 1, "y": 2}, "q": 3},
        {"p": {"x": 2, "y": 2}, "q": 3},
        {"p": {"x": None, "y": 2}, "q": 3},
        {"p": {"x": None, "y": 2}, "q": 3},
        {"p": None, "q": None},
        None,
        {"p": None, "q": 3},
    ]
    for held in (arrow, lacking):  # conformed to the target as it is, or as it was when they were evaluated
        answers = holds(
            Changed(),
            layout(stored("a", dtype, source)),
            pa.table({"a": pa.array(events, held)}),
            pa.table({"a": pa.array(rows, arrow)}),
        )
        assert answers.to_pylist() == [False, True, True, False, True, False, False]


@pytest.mark.parametrize(
    "dtype",
    [
        VariantType(),
        StringType("UTF8_LCASE"),
        StructType([StructField("x", ArrayType(VariantType()))]),
        MapType(StringType("UNICODE_CI"), LongType()),
        MapType(LongType(), VariantType()),
    ],
    ids=str,
)
def test_columns_whose_values_arrow_compares_otherwise_are_refused(dtype: DataType):
    """Even where no pair has to be compared, and whatever Arrow makes of them."""
    table = pa.table(
        {"a": pa.array([], pa.string()), names.SEQUENCE_COLUMN: pa.array([], pa.struct([("c1", pa.string())]))}
    )
    with pytest.raises(TypeError, match=r"column 'a'.* is not known to compare as in Spark"):
        holds(Changed(), layout(stored("a", dtype)), table, table)
    with pytest.raises(TypeError, match=r"component 1 of the sequence.* is not known to compare as in Spark"):
        holds(Newer(), layout(sequence=[dtype]), table, table)


@pytest.mark.parametrize("dtype", [LongType(), ArrayType(LongType())], ids=str)
def test_event_and_row_have_to_be_of_one_type(dtype: DataType):
    ours, theirs = (pa.int64(), pa.int32()) if dtype == LongType() else (pa.list_(pa.int64()), pa.list_(pa.int32()))
    events, rows = (
        pa.table({"a": pa.nulls(1, arrow), names.SEQUENCE_COLUMN: pa.nulls(1, pa.struct([("c1", arrow)]))})
        for arrow in (ours, theirs)
    )
    with pytest.raises(TypeError, match=r"column 'a': .*int64.* does not compare with .*int32"):
        holds(Changed(), layout(stored("a", dtype)), events, rows)
    with pytest.raises(TypeError, match=r"component 1 of the sequence: .*int64.* does not compare with .*int32"):
        holds(Newer(), layout(sequence=[dtype]), events, rows)


def test_what_breaks_the_contract_has_no_answer():
    sequence = pa.array([{"c1": 1}, {"c1": None}], pa.struct([("c1", pa.int64())]))
    table = pa.table({names.SEQUENCE_COLUMN: sequence, names.DELETE_COLUMN: [True, None]})
    for condition in (Newer(), SameSequence(), SamePosition(1)):
        with pytest.raises(ValueError, match=r"1 event\(s\) lack its sequence"):
            holds(condition, layout(), table, table)
    with pytest.raises(ValueError, match=r"1 event\(s\) lack whether it is a delete"):
        holds(IsDelete(), layout(), table, table)
    with pytest.raises(ValueError, match="2 events and 1 rows"):
        holds(Always(), layout(), table, table.slice(1))
    with pytest.raises(AssertionError, match="no sequence is kept"):
        holds(Newer(), layout(kept_in=()), table, table)


def test_what_parts_of_a_condition_leave_open_is_not_compared(monkeypatch: pytest.MonkeyPatch):
    """Nested values cost the most: of each map only pairs whose flat columns are the same are looked into."""
    events = pa.table(
        {"id": [1, 2, 3], "tags": pa.array([[("a", 1)]] * 3, ENTRIES), names.DELETE_COLUMN: [True, False, False]}
    )
    rows = pa.table({"id": [1, 2, 4], "tags": pa.array([[("a", 1)]] * 3, ENTRIES)})
    looked_into: list[int] = []
    compare = module._maps_differ

    def noted(one: pa.MapArray, other: pa.MapArray) -> pa.BooleanArray:
        looked_into.append(len(one))
        return compare(one, other)

    monkeypatch.setattr(module, "_maps_differ", noted)
    both = layout(stored("tags", MapType(StringType(), LongType())), stored("id", LongType()))
    assert holds(And(Not(IsDelete()), Changed()), both, events, rows).to_pylist() == [False, False, True]
    assert holds(Or(IsDelete(), Changed()), both, events, rows).to_pylist() == [True, False, True]
    assert looked_into == [1, 1]
