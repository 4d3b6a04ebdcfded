"""Sequences of every type that has an order, at its ends, on Spark alone: what is older stays out."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from deliveries import from_sql, ledger
from prometheus_client import CollectorRegistry
from pyspark.sql import SparkSession

from stream_merge import MergeMetrics, MergeSink
from stream_merge.testing import run, target_rows

NINES = "9" * 38
APART = {"except_column_list": ["op", "at"]}
"""The sequence is kept in the reserved column."""


@pytest.mark.parametrize(
    ("dtype", "ascending", "settings"),
    [
        ("decimal(38,0)", (f"'-{NINES}'", "-1", "0", f"'{NINES}'"), {}),
        ("decimal(38,38)", (f"'-0.{NINES}'", "0", f"'0.{'0' * 37}1'", f"'0.{NINES}'"), APART),
        (
            "timestamp",
            (
                "timestamp_micros(-9223372036854775807)",
                "'0000-12-31 23:59:59.999999Z'",
                "'1969-12-31 23:59:59.999999Z'",
                "timestamp_micros(0)",
                "timestamp_micros(9223372036854775806)",
                "timestamp_micros(9223372036854775807)",
            ),
            {},
        ),
        ("timestamp_ntz", ("'-0001-01-01 00:00:00'", "'1969-12-31 23:59:59.999999'", "'+12000-01-01 00:00:00'"), APART),
        ("date", ("'-0001-01-01'", "'1582-10-04'", "'1970-01-01'", "'+12000-02-29'"), {}),
        ("string", ("''", "'10'", "'9'", "'a'", "'é'", "'\\uffff'", "'\\U0001F600'"), APART),
        ("double", ("'-Infinity'", "-1.7e308", "'-0.0'", "4.9e-324", "'Infinity'", "'NaN'"), {}),
        ("boolean", ("false", "true"), APART),
        (
            "struct<a: decimal(38,0), b: timestamp_ntz, c: string>",
            (
                f"struct('-{NINES}', '-0001-01-01 00:00:00', 'z')",
                f"struct('{NINES}', '-0001-01-01 00:00:00', 'z')",
                f"struct('{NINES}', '+12000-01-01 00:00:00', '')",
                f"struct('{NINES}', '+12000-01-01 00:00:00', 'a')",
            ),
            {},
        ),
        (
            "struct<a: double, b: struct<c: date>>",
            (
                "struct(-1, struct('9999-12-31'))",
                "struct('-0.0', struct('0001-01-01'))",
                "struct(0, struct('0001-01-02'))",
            ),
            APART,
        ),
        ("array<int>", ("array()", "array(-1, 9)", "array(0)", "array(0, -1)"), {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_value_is_newer_than_the_one_before_it(
    spark: SparkSession, tmp_table: str, dtype: str, ascending: tuple[str, ...], settings: dict[str, Any]
):
    """In a batch, against the row, against the remembered delete, which the same value revives."""
    steps = list(pairwise(ascending))
    count = len(steps)
    whole = {"apply_as_deletes": "op = 'd'", "except_column_list": ["op"], "engine": "spark", **settings}
    sink = MergeSink(
        target=tmp_table, keys=["id"], sequence_by="at", metrics=MergeMetrics(registry=CollectorRegistry()), **whole
    )

    types = {"id": "string", "at": dtype, "op": "string", "note": "string"}

    def events(name: str, at: int, op: str) -> list[dict[str, str]]:
        """An event for each step, before (0) or behind it (1)."""
        return [
            {"id": f"'{name} {number}'", "at": step[at], "op": f"'{op}'", "note": f"'{op}'"}
            for number, step in enumerate(steps)
        ]

    def merge(batch_id: int, *some: list[dict[str, str]]) -> dict[str, int]:
        rows = [row for each in some for row in each]
        return ledger(run(sink, from_sql(spark, rows, types), batch_id))

    merge(
        0, events("newer", 0, "old"), events("older", 1, "old"), events("deleted", 0, "old"), events("kept", 1, "old")
    )
    first = merge(
        1,
        [*events("newer", 1, "new"), *events("newer", 0, "late")],
        events("older", 0, "late"),
        [*events("deleted", 1, "d"), *events("revived", 1, "d")],
        events("kept", 0, "d"),
    )
    second = merge(2, events("deleted", 0, "late"), events("revived", 1, "new"), events("newer", 1, "new"))

    assert first == {
        "received": 6 * count,
        "collapsed": count,
        "unaffected": 3 * count,
        "updated": count,
        "deleted": count,
    }
    assert second == {"received": 3 * count, "stale": count, "inserted": count, "unaffected": count}
    expected = {"newer": "new", "older": "old", "revived": "new", "kept": "old"}
    assert target_rows(spark, tmp_table, "id", "note") == sorted(
        (f"{name} {number}", note) for name, note in expected.items() for number in range(count)
    )
