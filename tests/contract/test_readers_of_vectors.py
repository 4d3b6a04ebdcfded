"""What readers make of tables with vectors that were merged on read.

It needs a JVM: Spark makes the tables and is one of the readers. `tests/delta_log.py` is another one, and delta-rs.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from delta_log import check_table, live_rows
from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import DeltaProtocolError
from engines import DriverAlways, with_costs
from grouped import sink_with
from prometheus_client import CollectorRegistry
from pyspark.sql import SparkSession

from stream_merge import MergeMetrics
from stream_merge.tables.files.compaction_choice import TOGETHER
from stream_merge.testing import batch, change_rows, run, target_rows

COLUMNS = {
    "id": "bigint",
    "lsn": "bigint",
    "name": "string",
    "day": "date",
    "at": "timestamp",
    "amount": "decimal(20,4)",
    "share": "double",
    "is_new": "boolean",
    "raw": "binary",
    "place": "struct<street: string, number: int>",
    "tags": "array<string>",
}
KINDS: Mapping[str, tuple[int, dict[str, Any]]] = {
    "partitioned": (3, {"partition_by": ["name"]}),
    "with a checkpoint": (4, {"table_properties": {"delta.checkpointInterval": "3"}}),
    "put together": (TOGETHER + 1, {}),
}
"""How many batches, and what else the sink is told."""
UTC = datetime.UTC


class Stream:
    """A table by merges on read, and what it must have."""

    def __init__(self, spark: SparkSession, target: str, **settings: Any) -> None:
        self.spark, self.target = spark, target
        self.rows: dict[int, tuple[Any, ...]] = {}
        self._sink = sink_with(
            target=target,
            keys=["id"],
            sequence_by="lsn",
            apply_as_deletes="op = 'd'",
            except_column_list=["op"],
            tombstones=False,
            app_id="test",
            metrics=MergeMetrics(registry=CollectorRegistry()),
            **settings,
        )
        with_costs(self._sink, DriverAlways())

    def merge(self, number: int) -> None:
        """Ten keys, of which some are there, and one delete."""
        upserts = [row(key, number) for key in range(number, number + 10) if key != number + 2]
        gone = (number + 2, number, *[None] * (len(COLUMNS) - 2))
        events = [*((*one, "u") for one in upserts), (*gone, "d")]
        schema = ", ".join(f"{name} {kind}" for name, kind in {**COLUMNS, "op": "string"}.items())
        result = run(self._sink, batch(self.spark, schema, *events), number)
        assert (result.mode, result.outcome) == ("mark", "committed"), result.plan
        self.rows |= {one[0]: one for one in upserts}
        self.rows.pop(number + 2, None)


def row(key: int, number: int) -> tuple[Any, ...]:
    """Each value tells the key and the batch; every third row has NULLs."""
    if key % 3 == 0:
        return (key, number, "none", *[None] * (len(COLUMNS) - 3))
    return (
        key,
        number,
        "ab"[key % 2],
        datetime.date(2024, 1, 1 + number),
        datetime.datetime(1500 + 4 * key, 1, 1, 0, 0, number, 123456, UTC),
        Decimal(key) + Decimal("0.0001") * number,
        key / 4 if key % 5 else float("-inf"),
        key % 2 == 0,
        bytes([key, number]),
        (f"Straße {number}", key) if key % 4 else (None, None),
        [f"{key}", None] if key % 2 else [],
    )


def plain(value: Any) -> Any:
    """Rows and structs as tuples, bytes and moments alike, whoever has read them."""
    if isinstance(value, dict):
        return tuple(map(plain, value.values()))
    if isinstance(value, datetime.datetime):
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
    if isinstance(value, tuple | list):
        return tuple(map(plain, value))
    return bytes(value) if isinstance(value, bytearray) else value


def tuples(rows: pa.Table, *columns: str) -> list[Any]:
    return sorted(map(plain, rows.select([*columns, *COLUMNS]).to_pylist()), key=repr)


@pytest.mark.parametrize("kind", KINDS)
def test_readers_see_the_same_rows_and_changes(spark: SparkSession, tmp_table: str, kind: str):
    """Spark, delta-rs and the independent reader: rows of the newest version and of one before, and all changes."""
    batches, settings = KINDS[kind]
    stream, seen = Stream(spark, tmp_table, **settings), {}
    for number in range(batches):
        stream.merge(number)
        table = DeltaTable(tmp_table)
        seen[table.version()] = sorted(map(plain, stream.rows.values()), key=repr)
        found = QueryBuilder().register("t", table).execute("SELECT * FROM t")
        assert tuples(pa.table(found.read_all())) == seen[table.version()]

    rows = sorted(map(plain, stream.rows.values()), key=repr)
    assert sorted(map(plain, target_rows(spark, tmp_table, *COLUMNS)), key=repr) == rows
    assert tuples(live_rows(Path(tmp_table))) == rows
    before, expected = list(seen.items())[-2]
    of_spark = spark.read.format("delta").option("versionAsOf", before).load(tmp_table).select(*COLUMNS).collect()
    assert sorted(map(plain, of_spark), key=repr) == expected
    for version, expected in seen.items():
        found = QueryBuilder().register("t", DeltaTable(tmp_table, version=version)).execute("SELECT * FROM t")
        assert tuples(pa.table(found.read_all())) == expected

    feed = pa.table(DeltaTable(tmp_table).load_cdf(starting_version=0).read_all())
    by_spark = sorted(map(plain, change_rows(spark, tmp_table, *COLUMNS)), key=repr)
    assert tuples(feed, "_commit_version", "_change_type") == by_spark
    kinds = {one[1] for one in by_spark}
    assert kinds == {"insert", "delete", "update_preimage", "update_postimage"}
    files = check_table(Path(tmp_table)).files.values()
    assert any(add.get("deletionVector") for add in files)


def test_readers_that_do_not_know_vectors_refuse_them(spark: SparkSession, tmp_table: str):
    """None of them takes the rows that are gone for rows of the table."""
    stream = Stream(spark, tmp_table)
    for number in range(2):
        stream.merge(number)

    for read in ("to_pyarrow_dataset", "to_pyarrow_table", "to_pandas"):
        with pytest.raises(DeltaProtocolError, match="deletionVectors"):
            getattr(DeltaTable(tmp_table), read)()
