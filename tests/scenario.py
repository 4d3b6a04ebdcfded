"""A small change stream with every step of a batch in it, and the ways in which tests deliver it.

Apart from the tests, so that a child process can deliver exactly what its test delivers.
"""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from grouped import sink_with
from prometheus_client import CollectorRegistry
from pyspark.sql import DataFrame, SparkSession

from stream_merge import MergeSink
from stream_merge.engines.base import MergeReport
from stream_merge.engines.driver.merger import DriverMerger
from stream_merge.engines.spark.merger import SparkMerger
from stream_merge.metrics.instruments import MergeMetrics
from stream_merge.model.settings import Engine
from stream_merge.shapes import Clauses, InsertOnly, Snapshot, when_matched, when_not_matched

SCHEMA = "id int, lsn int, op string, name string"
BATCHES = (
    "(1, 10, 'c', 'one'), (2, 10, 'c', 'two'), (3, 10, 'c', 'three'), (2, 20, 'd', null), (9, 20, 'd', null)",
    "(1, 30, 'u', 'one again'), (2, 30, 'c', 'two revived'), (3, 30, 'd', null), (9, 5, 'c', 'late'),"
    " (5, 30, 'c', 'five'), (6, 30, 'c', 'raced'), (null, 30, 'c', 'no key'), (7, null, 'c', 'no sequence')",
    "(1, 40, 'u', 'one at last'), (5, 25, 'u', 'late'), (8, 40, 'c', 'eight')",
)
"""Updates, inserts and deletes; in the second batch also a revived key, a ghost and two invalid events."""
SHAPES: dict[str, dict[str, Any]] = {
    "changes": {"apply_as_deletes": "op = 'd'"},
    "clauses": {
        "shape": Clauses(
            [
                when_matched("s.op = 'd' AND s.lsn > t.lsn").delete(),
                when_matched("s.lsn > t.lsn").update({"lsn": "s.lsn", "name": "concat(t.name, ' > ', s.name)"}),
                when_not_matched("s.op <> 'd'").insert_all(),
            ]
        )
    },
    "insert-only": {"shape": InsertOnly()},
}
"""What a sink for this stream is told of its shape."""
RIVAL_ID = "rival"
RIVAL = "(6, 40, 'd', null)"
"""What another writer merges while the second batch is on its way: its row is not there yet."""
COPY = "(1, 10, 'c', 'one'), (2, 20, 'c', 'two again'), (5, 20, 'c', 'five')"
"""A copy of the whole source, as a snapshot: beside the rows of `filled_by_others` one is equal, one differs, one is
new, and two are missing."""


def sink(table: str, *, shape: str = "changes", **settings: Any) -> MergeSink:
    """A sink for this stream; it counts for itself."""
    columns = {} if "column_list" in settings else {"except_column_list": ["op"]}
    return sink_with(
        target=table,
        keys=["id"],
        sequence_by="lsn",
        metrics=MergeMetrics(registry=CollectorRegistry()),
        **SHAPES[shape],
        **columns,
        **settings,
    )


def snapshot_sink(table: str, engine: Engine = "auto") -> MergeSink:
    """A sink that takes a batch for a copy of the whole source; it counts for itself."""
    metrics = MergeMetrics(registry=CollectorRegistry())
    return sink_with(
        target=table,
        keys=["id"],
        except_column_list=["op"],
        shape=Snapshot(max_delete_share=0.5),
        app_id="crash",
        engine=engine,
        metrics=metrics,
    )


def filled_by_others(session: SparkSession, table: str) -> None:
    """A table that no sink has seen yet."""
    rows = events(session, "(1, 10, 'c', 'one'), (2, 10, 'c', 'two'), (3, 10, 'c', 'three'), (4, 10, 'c', 'four')")
    rows.drop("op").write.format("delta").option("delta.enableChangeDataFeed", "true").save(table)


def events(session: SparkSession, values: str) -> DataFrame:
    """A batch from SQL literals, which need no Python worker."""
    casts = ", ".join(f"cast({name} as {kind}) {name}" for name, kind in (c.split() for c in SCHEMA.split(", ")))
    return session.sql(f"SELECT {casts} FROM VALUES {values} AS t(id, lsn, op, name)")


def write_files(folder: Path, batches: Sequence[str]) -> None:
    """Add one file per batch to the folder that a query reads, in this order."""
    names = [column.split()[0] for column in SCHEMA.split(", ")]
    folder.mkdir(exist_ok=True)
    there = len(list(folder.iterdir()))
    for number, values in enumerate(batches, start=there):
        file = folder / f"{number:04}.json"
        rows = ast.literal_eval(f"[{values.replace('null', 'None')}]")
        file.write_text("\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in rows))
        os.utime(file, (1_000_000 + number, 1_000_000 + number))


def stream(session: SparkSession, source: Path, checkpoint: Path, each: Callable[[DataFrame, int], None]) -> str:
    """Run a query over the new files of a folder, one per batch; its id."""
    files = session.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(str(source))
    writer = files.writeStream.foreachBatch(each).option("checkpointLocation", str(checkpoint))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    return query.id


def race(session: SparkSession, table: str) -> None:
    """Let a rival delete a key between a batch's look at the remembered deletes and its merge, once."""
    merges = {engine: engine.merge for engine in (SparkMerger, DriverMerger)}

    def overtaken(self: Any, *args: Any) -> MergeReport:
        for engine, merge in merges.items():
            engine.merge = merge
        sink(table, app_id=RIVAL_ID)(events(session, RIVAL), 0)
        return self.merge(*args)

    for engine in merges:
        engine.merge = overtaken
