"""The dedup in the driver against a plain definition of the order, over random batches. Needs no Spark session."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import DoubleType, LongType, StringType, StructField, StructType

from stream_merge.model import names
from stream_merge.shapes.arrow_order import orderable
from stream_merge.shapes.latest_per_key import latest

NAN = math.nan
SEQUENCE = StructType([StructField("c1", LongType()), StructField("c2", StructType([StructField("x", StringType())]))])
LAYOUT: Any = SimpleNamespace(
    keys=("k", "j"),
    stored=[SimpleNamespace(name=n, dtype=t) for n, t in (("k", LongType()), ("j", StringType()), ("v", DoubleType()))],
    sequence_type=SEQUENCE,
)
VALUES = [None, -1.5, -0.0, 0.0, 1.5, NAN]
"""In Spark's order, the two zeros being one."""


def rank(value: float | None) -> int:
    """Place of a value in Spark's order."""
    if value is None:
        return 0
    if math.isnan(value):
        return 5
    return 1 if value < 0 else 2 if value == 0 else 3


def order(event: dict[str, Any]) -> tuple[Any, ...]:
    """The greatest wins."""
    sequence = event[names.SEQUENCE_COLUMN]
    return (sequence["c1"], sequence["c2"]["x"], not event[names.DELETE_COLUMN], rank(event["v"]))


def test_maps_compare_by_their_entries_in_the_order_of_keys():
    """As Spark has them apart; of equal ones a tie makes no difference. Slices are the same values."""
    one, same, other = [("a", 1), ("b", None)], [("b", None), ("a", 1)], [("a", 1), ("b", 2)]
    maps = pa.array([other, one, same, other, None, []], pa.map_(pa.string(), pa.int64())).slice(1)
    left, right, greater, null, empty = orderable(maps)

    assert left == right
    assert null < empty < left < greater
    assert len({left, right, greater, null, empty}) == 4


@pytest.mark.parametrize("size", [1, 2, 5, 40, 200])
def test_the_latest_event_of_each_key_wins(seed: int, size: int):
    rng = random.Random(f"{seed} {size}")
    for _ in range(40):
        events = [
            {
                "k": rng.randrange(3),
                "j": rng.choice("ab"),
                "v": rng.choice(VALUES),
                names.SEQUENCE_COLUMN: {"c1": rng.randrange(3), "c2": {"x": rng.choice("xy")}},
                names.DELETE_COLUMN: rng.random() < 0.3,
            }
            for _ in range(size)
        ]
        schema = pa.schema(
            [
                ("k", pa.int64()),
                ("j", pa.string()),
                ("v", pa.float64()),
                (names.SEQUENCE_COLUMN, pa.struct([("c1", pa.int64()), ("c2", pa.struct([("x", pa.string())]))])),
                (names.DELETE_COLUMN, pa.bool_()),
            ]
        )
        best: dict[Any, tuple[Any, ...]] = {}
        contents: dict[Any, set[Any]] = {}
        for event in events:
            key = event["k"], event["j"]
            best[key] = max(best.get(key, order(event)), order(event))
            contents.setdefault((key, order(event)[:2]), set()).add(order(event))

        given = pa.Table.from_pylist(events, schema)
        cut = rng.randrange(size + 1)
        found = latest(pa.concat_tables([given.slice(0, cut), given.slice(cut)]), LAYOUT)

        assert {(row["k"], row["j"]): order(row) for row in found.rows.to_pylist()} == best
        assert found.rows.num_rows + found.collapsed == size
        assert found.ties == sum(len(different) - 1 for different in contents.values())


def test_values_compare_as_in_spark():
    """NULL least, NaN greatest and equal to itself, one zero; structs and arrays item by item, the shorter first."""
    structs = [
        None,
        {"a": None, "b": None},
        {"a": None, "b": 5},
        {"a": 1, "b": None},
        {"a": 1, "b": 2},
        {"a": 1, "b": 3},
        {"a": 2, "b": None},
    ]
    struct = pa.struct([("a", pa.int64()), ("b", pa.int64())])
    assert_in_order(VALUES, pa.float64(), [rank(value) for value in VALUES])
    assert_in_order([None, [], [None], [None, 1], [1], [1, None], [1, 2], [1, 2, 0], [2]], pa.list_(pa.int64()))
    assert_in_order(structs, struct)
    assert_in_order([None, [], [structs[1]], [structs[2]], [structs[2], None], [structs[4]]], pa.list_(struct))
    assert_in_order([None, {"v": None}, {"v": []}, {"v": [0]}, {"v": [1]}], pa.struct([("v", pa.list_(pa.int64()))]))


def assert_in_order(values: list[Any], dtype: pa.DataType, ranks: list[int] | None = None) -> None:
    """Each of them compares with each, wherever in whichever array it stands, as its rank or else its place says."""
    ranks = ranks or list(range(len(values)))
    one, other = orderable(pa.array(values, dtype)), orderable(pa.array(values[::-1], dtype))[::-1]
    for a, rank_a in zip(one, ranks, strict=True):
        for b, rank_b in zip(other, ranks, strict=True):
            assert (a < b, a == b, a > b) == (rank_a < rank_b, rank_a == rank_b, rank_a > rank_b)
