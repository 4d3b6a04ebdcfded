"""Clauses as values: which a batch gets. Needs no Spark."""

from __future__ import annotations

import pytest
from pyspark.sql.types import DoubleType, LongType, StructField

from stream_merge.model import names
from stream_merge.model.settings import MergeSpec
from stream_merge.shapes import Changes
from stream_merge.shapes.clauses import (
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
