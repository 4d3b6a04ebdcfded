"""Tables of more columns than anybody reads: what a merge builds of them stays low, however many there are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from decimal import Decimal
from itertools import product
from typing import Any

import pytest
from deliveries import ChangeStream, ledger
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F

from stream_merge.spark import columns

Join = Callable[[Iterable[Column]], Column]
JOINS: tuple[Join, ...] = (columns.all_of, columns.any_of)


@pytest.mark.parametrize("join", JOINS)
def test_thousands_of_conditions_make_no_deep_tree(spark: SparkSession, join: Join):
    """Spark walks an expression by recursion, and only the JVM has the stack that ends."""
    conditions = [F.col("id") == F.lit(1)] * 4_000

    assert [row.id for row in spark.range(2).where(join(conditions)).collect()] == [1]


def test_joined_conditions_are_all_there(spark: SparkSession):
    """None to three that are TRUE, FALSE or NULL: Spark says what they are together."""
    cases = [case for count in range(4) for case in product((True, False, None), repeat=count)]
    joined = [join(F.lit(value).cast("boolean") for value in case) for case in cases for join in JOINS]

    found = spark.range(1).select(*(each.alias(f"c{i}") for i, each in enumerate(joined))).collect()[0]

    expected = [(_decided(case, by=False), _decided(case, by=True)) for case in cases]
    assert list(zip(found[::2], found[1::2], strict=True)) == expected


def _decided(case: tuple[bool | None, ...], *, by: bool) -> bool | None:
    if by in case:
        return by
    return None if None in case else not by


VALUES: dict[str, Callable[[int], Any]] = {
    "bigint": int,
    "string": str,
    "double": float,
    "timestamp": lambda number: datetime.fromtimestamp(number, UTC),
    "decimal(12,4)": lambda number: Decimal(number).scaleb(-2),
}
WIDTH = 400


@pytest.mark.parametrize("engine", ["spark", "driver"])
def test_hundreds_of_columns_of_mixed_types_are_merged_like_three(spark: SparkSession, tmp_table: str, engine: str):
    """On the engines themselves: what could end is what JVM and delta-rs make of so many columns.

    Wide enough for each chain of conditions to be one of many, narrow enough to take seconds.
    """
    kinds = [list(VALUES)[place % len(VALUES)] for place in range(WIDTH)]
    payload = ", ".join(f"c{place} {kind}" for place, kind in enumerate(kinds))
    stream = ChangeStream(
        spark,
        tmp_table,
        f"id bigint, lsn bigint, op string, {payload}",
        keys="id",
        sequence_by="lsn",
        apply_as_deletes="op = 'd'",
        except_column_list=["op"],
        engine=engine,
    )

    def event(key: int, lsn: int, number: int, last: int | None = None, op: str = "u") -> tuple[Any, ...]:
        numbers = [number] * (WIDTH - 1) + [number if last is None else last]
        return (key, lsn, op, *(VALUES[kind](each) for kind, each in zip(kinds, numbers, strict=True)))

    stream.deliver(*(event(key, 1, key) for key in range(1, 4)))
    second = [event(1, 1, 1, last=7), event(2, 2, 9), event(3, 2, 0, op="d"), event(4, 1, 4)]
    changed = stream.deliver(*second)
    again = stream.deliver(*second)

    assert (changed.engine, ledger(changed)) == (engine, {"received": 4, "updated": 2, "deleted": 1, "inserted": 1})
    assert (again.outcome, ledger(again)["received"]) == ("no_change", 4)
    last = f"c{WIDTH - 1}"
    assert stream.rows("id", "c0", last) == [
        (1, 1, Decimal("0.0700")),
        (2, 9, Decimal("0.0900")),
        (4, 4, Decimal("0.0400")),
    ]
