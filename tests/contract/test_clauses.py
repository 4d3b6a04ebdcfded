"""Clauses of one's own: what a bare MERGE of Delta with the same clauses makes of the same table.

Needs a JVM: Delta's MERGE, its metrics and its change feed are what is tested, and conditions are Spark's SQL.
"""

from __future__ import annotations

from typing import Any

import pytest
from deliveries import ChangeStream, ledger
from pyspark.sql import SparkSession

from stream_merge import ConfigError, ContractError
from stream_merge.shapes import Clauses, when_matched, when_not_matched, when_not_matched_by_source
from stream_merge.testing import batch

SCHEMA = "id bigint, op string, v int, name string"


def stream_of(spark: SparkSession, target: str, *clauses: Any, **settings: Any) -> ChangeStream:
    own = {"keys": ["id"], "shape": Clauses(list(clauses)), "except_column_list": ["op"], **settings}
    return ChangeStream(spark, target, SCHEMA, **own)


def test_the_first_clause_that_holds_counts_and_every_column_of_the_source_is_there(
    spark: SparkSession, tmp_table: str
):
    stream = stream_of(
        spark,
        tmp_table,
        when_matched("s.op = 'd'").delete(),
        when_matched("s.v > t.v").update({"v": "s.v + t.v", "name": "concat(t.name, '+', s.OP)"}),
        when_not_matched("s.op != 'd'").insert_all(),
    )
    stream.deliver((1, "u", 1, "one"), (2, "u", 2, "two"), (3, "u", 3, "three"))

    result = stream.deliver((1, "d", 9, "x"), (2, "u", 5, "x"), (3, "u", 3, "x"), (4, "d", 1, "x"), (5, "i", 1, "five"))

    assert stream.rows() == [(2, 7, "two+u"), (3, 3, "three"), (5, 1, "five")]
    assert ledger(result) == {"received": 5, "unaffected": 2, "inserted": 1, "updated": 1, "deleted": 1}
