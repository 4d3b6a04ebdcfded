"""Clauses as values: which a batch gets, and what their conditions say in the SQL of delta-rs. Needs no Spark."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder, write_deltalake
from pyspark.sql.types import DoubleType, LongType, StructField
from stream_merge.engines.delta_rs import render

from stream_merge.model import names
from stream_merge.model.settings import MergeSpec
from stream_merge.shapes import Changes
from stream_merge.shapes.clauses import (
    Always,
    And,
    Changed,
    Condition,
    Delete,
    Insert,
    IsDelete,
    Newer,
    Not,
    Or,
    SamePosition,
    SameSequence,
    Update,
)
from stream_merge.shapes.layout import Layout, StoredColumn

NAN = float("nan")


def stored(name: str, dtype: LongType | DoubleType) -> StoredColumn:
    return StoredColumn(name=name, source_name=name, source_type=dtype, field=StructField(name, dtype))


def layout(*columns: StoredColumn) -> Layout:
    """A table of `columns` with the key `id`, ordered by `c1`, then `c2`, in the reserved column."""
    return Layout(
        stored=(stored("id", LongType()), *columns),
        keys=("id",),
        sequence_fields=(StructField("c1", LongType()), StructField("c2", LongType())),
        sequence_columns=None,
        sequence_source=(),
        deletes=None,
        new_columns=(),
        type_changes=(),
        definition="",
        case_sensitive=False,
    )


def spec(**settings: object) -> MergeSpec:
    return MergeSpec(target="/t", keys=("id",), sequence_by=("c1", "c2"), **settings)  # type: ignore[arg-type]


WITH_PRICE = layout(stored("price", DoubleType()))


def test_a_batch_gets_the_clauses_that_its_events_can_meet():
    both = Changes().clauses(WITH_PRICE, spec(), deletes=True, upserts=True)
    assert [type(clause) for clause in both] == [Delete, Update, Insert]
    assert both[1].values == {"price": "price", names.SEQUENCE_COLUMN: names.SEQUENCE_COLUMN}  # type: ignore[union-attr]
    assert both[2].values == {"id": "id", **both[1].values}  # type: ignore[union-attr]
    assert Changes().clauses(WITH_PRICE, spec(), deletes=False, upserts=True) == both[1:]
    assert Changes().clauses(WITH_PRICE, spec(), deletes=True, upserts=False) == both[:1]


@pytest.mark.parametrize(
    ("settings", "newer"),
    [
        ({}, Newer()),
        ({"skip_unchanged": True}, And(Newer(), Changed())),
        ({"position_components": 1}, And(Newer(), Or(Not(SamePosition(1)), Changed()))),
    ],
)
def test_what_a_source_repeats_is_not_written(settings: dict[str, object], newer: Condition):
    wanted = And(Not(IsDelete()), Or(newer, And(SameSequence(), Changed())))
    assert Changes().updating(spec(**settings)) == wanted


ROWS = {
    "plain": (5, 5, 1.0),
    "no sequence": (None, None, 1.0),
    "half a sequence": (5, None, 1.0),
    "NaN": (5, 5, NAN),
    "no price": (5, 5, None),
    "minus zero": (5, 5, -0.0),
}
EVENTS = {"older": (4, 9), "same": (5, 5), "newer": (5, 6), "much newer": (6, 0)}


@pytest.mark.parametrize("price", [1.0, 0.0, NAN, None], ids=str)
def test_conditions_in_the_sql_of_delta_rs_are_true_or_false_whatever_is_null(tmp_path: Path, price: float | None):
    """Python, which compares rows and events one by one, gives the same answers; and `Not` means the opposite."""
    sequence = pa.struct([("c1", pa.int64()), ("c2", pa.int64())])
    pairs = [(row, event) for row in ROWS.values() for event in EVENTS.values()]
    for name, sequences, prices in (
        ("t", [row[:2] for row, _ in pairs], [row[2] for row, _ in pairs]),
        ("s", [event for _, event in pairs], [price] * len(pairs)),
    ):
        ordered_by = [None if c1 is None and c2 is None else {"c1": c1, "c2": c2} for c1, c2 in sequences]
        columns = {
            "id": pa.array(range(len(pairs)), pa.int64()),
            "price": pa.array(prices, pa.float64()),
            names.SEQUENCE_COLUMN: pa.array(ordered_by, sequence),
            names.DELETE_COLUMN: pa.array([i % 2 == 0 for i in range(len(pairs))]),
        }
        write_deltalake(str(tmp_path / name), pa.table(columns))
    conditions: list[Condition] = [Always(), Newer(), SameSequence(), SamePosition(1), Changed(), IsDelete()]
    conditions += [Not(one) for one in conditions]
    conditions += [Changes().updating(spec(position_components=1)), Changes().updating(spec(skip_unchanged=True))]
    answers = ", ".join(f"{render.condition(one, WITH_PRICE)} AS a{i}" for i, one in enumerate(conditions))
    tables = (
        QueryBuilder().register("t", DeltaTable(str(tmp_path / "t"))).register("s", DeltaTable(str(tmp_path / "s")))
    )

    answered = pa.table(tables.execute(f"SELECT {answers} FROM t JOIN s ON t.id = s.id ORDER BY t.id").read_all())

    for i, one in enumerate(conditions):
        expected = [holds(one, row, event, price, is_delete=n % 2 == 0) for n, (row, event) in enumerate(pairs)]
        assert answered[f"a{i}"].to_pylist() == expected, one


def holds(  # noqa: PLR0911 - a case per kind of condition
    condition: Condition, row: tuple[object, ...], event: tuple[int, int], price: object, *, is_delete: bool
) -> bool:
    """The condition's meaning, in Python."""

    def inner(one: Condition) -> bool:
        return holds(one, row, event, price, is_delete=is_delete)

    match condition:
        case Always():
            return True
        case Newer():
            c1, c2, _ = row
            return c1 is None or event[0] > c1 or (event[0] == c1 and (c2 is None or event[1] > c2))  # type: ignore[operator]
        case SameSequence():
            return event == row[:2]
        case SamePosition(1):
            return event[0] == row[0]
        case Changed():
            known = row[2]
            both_nan = price != price and known != known  # noqa: PLR0124 - only NaN differs from itself
            return not both_nan and price != known
        case IsDelete():
            return is_delete
        case Not(one):
            return not inner(one)
        case And(all_of):
            return all(inner(one) for one in all_of)
        case Or(any_of):
            return any(inner(one) for one in any_of)
    raise AssertionError(condition)
