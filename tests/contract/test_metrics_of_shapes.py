"""Every SQL metric of Delta's MERGE is moved by some shape's merge, and Prometheus gets the sums.

Needs a JVM: Delta counts, in one MERGE per batch on Spark.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from engines import under_test
from prometheus_client import CollectorRegistry
from pyspark.sql import SparkSession
from since import since

from stream_merge import MergeMetrics, MergeSink
from stream_merge.metrics.catalogue import DELTA_MERGE_METRICS
from stream_merge.shapes import (
    Clauses,
    InsertOnly,
    Snapshot,
    when_matched,
    when_not_matched,
    when_not_matched_by_source,
)
from stream_merge.testing import batch, run

SCHEMA = "id bigint, v bigint, p string"


def filled(spark: SparkSession, target: str, *keys: int, partitioned: bool = False, vectors: bool = False) -> None:
    """Rows (key, 0, "a" or "b") of a table with the change feed on, in one file for each partition."""
    rows = [(key, 0, "ab"[key % 2] if partitioned else "a") for key in keys]
    writer = batch(spark, SCHEMA, *rows).coalesce(1).write.format("delta")
    writer = writer.partitionBy("p") if partitioned else writer
    properties = {"delta.enableChangeDataFeed": "true", "delta.enableDeletionVectors": str(vectors).lower()}
    writer.options(**properties).save(target)


@since((4, 0), "all metrics")
@pytest.mark.smoke
def test_every_metric_is_moved_and_exported_as_the_sum(spark: SparkSession, tmp_path: Path):
    """Those of deletion vectors need a table that has them, those of partitions one that is partitioned."""
    registry = CollectorRegistry()
    sums: dict[str, Counter[str]] = {}

    def deliver(name: str, batches: list[tuple[Any, ...]], **own: Any) -> list[dict[str, int]]:
        settings = {"target": str(tmp_path / name), "app_id": name, "keys": "id", "engine": "spark", **own}
        sink = under_test(MergeSink(metrics=MergeMetrics(registry=registry), **settings))
        merged = [run(sink, batch(spark, SCHEMA, *rows), number).metrics for number, rows in enumerate(batches)]
        sums[name] = Counter()
        for metrics in merged:
            sums[name].update(metrics)
        return [dict(metrics) for metrics in merged]

    filled(spark, str(tmp_path / "clauses"), *range(8), partitioned=True)
    clauses = [
        when_matched("s.v < 0").delete(),
        when_matched().update_all(),
        when_not_matched().insert_all(),
        when_not_matched_by_source("t.id = 4").update({"v": "t.v - 1"}),
        when_not_matched_by_source("t.id IN (5, 6)").delete(),
    ]
    (clauses_did,) = deliver("clauses", [((0, -1, "a"), (1, 1, "b"), (2, 1, "a"), (9, 1, "c"))], shape=Clauses(clauses))
    filled(spark, str(tmp_path / "snapshot"), *range(6), vectors=True)
    copy = [(key, 0, "a") for key in range(6)]
    marked, again, gone = deliver(
        "snapshot",
        [((0, 1, "a"), *copy[1:]), ((0, 1, "a"), (1, 1, "a"), *copy[2:]), ((0, 1, "a"), (1, 1, "a"))],
        shape=Snapshot(max_delete_share=1.0),
    )
    filled(spark, str(tmp_path / "changes"), 0, 1)
    events = ((0, 1, "a"), (1, 1, "d"), (2, 1, "a"))
    (changes_did,) = deliver("changes", [events], sequence_by="v", apply_as_deletes="p = 'd'")
    filled(spark, str(tmp_path / "insert-only"), 0, 1)
    (inserted,) = deliver("insert-only", [((1, 1, "a"), (7, 1, "a"))], shape=InsertOnly())

    rows = (
        "MatchedUpdated",
        "NotMatchedBySourceUpdated",
        "Updated",
        "MatchedDeleted",
        "NotMatchedBySourceDeleted",
        "Deleted",
        "Inserted",
        "Copied",
    )
    assert [clauses_did[f"numTargetRows{name}"] for name in rows] == [2, 1, 3, 1, 2, 3, 1, 2]
    partitions = ("AfterSkipping", "RemovedFrom", "AddedTo")
    assert [clauses_did[f"numTargetPartitions{name}"] for name in partitions] == [2, 2, 3]
    vectors = ("Added", "Updated", "Removed")
    assert [[did[f"numTargetDeletionVectors{name}"] for name in vectors] for did in (marked, again, gone)] == [
        [1, 0, 0],
        [0, 1, 0],
        [0, 0, 1],
    ]
    assert [inserted[f"numTargetRows{name}"] for name in rows] == [0] * 6 + [1, 0]
    assert [inserted[name] for name in ("numSourceRowsInSecondScan", "numTargetFilesRemoved")] == [0, 0]
    assert [changes_did[f"numTargetRows{name}"] for name in rows] == [1, 0, 1, 1, 0, 1, 1, 0]
    assert set(DELTA_MERGE_METRICS) == {name for moved in sums.values() for name, value in moved.items() if value > 0}

    for sink, moved in sums.items():
        for name, row in DELTA_MERGE_METRICS.items():
            series = row.name + ("_sum" if row.type == "histogram" else "")
            exported = registry.get_sample_value(series, {"query": "direct", "target": sink})
            assert exported is not None, (sink, name)
            assert abs(exported - moved[name] * row.factor) < 1e-9, (sink, name)
