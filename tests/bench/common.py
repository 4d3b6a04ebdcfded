"""What the comparisons share: tables, batches, the hand-written merge, and how a result looks."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import deltalake as delta_rs
import pyarrow.compute as pc
from delta.tables import DeltaTable
from grouped import sink_with
from prometheus_client import CollectorRegistry
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from rich.console import Console
from rich.table import Table

from stream_merge import MergeMetrics, MergeSink
from stream_merge.engines.spark.commit import MATERIALIZE_CONF
from stream_merge.model.snapshot import VECTORS_PROPERTY
from stream_merge.spark.jvm import owned_session

T = TypeVar("T")

STORED = ("id", "lsn", "a", "b", "c", "ts")
DEFAULT_CONFS = {
    "spark.sql.shuffle.partitions": "200",
    "spark.databricks.delta.snapshotPartitions": "50",
}
"""What a session has that nobody prepared for small batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One row of the result."""

    case: str
    baseline: str
    baseline_seconds: float
    candidate: str
    candidate_seconds: float
    bound: str
    holds: bool
    phases: str = ""
    """Where the sink's seconds go, medians."""

    @property
    def ratio(self) -> float:
        """Candidate over baseline."""
        return self.candidate_seconds / self.baseline_seconds


class Bench:
    """One JVM, one temporary folder, tables copied for each side."""

    def __init__(self, spark: SparkSession, folder: Path, runs: int) -> None:
        self.spark = spark
        self.folder = folder
        self.runs = runs
        self.batch_id = 0

    def table(self, rows: int, files: int) -> Path:
        """A table of that many rows ordered by key, in files of equal size; made once."""
        path = self.folder / f"rows_{rows}_{files}"
        if path.exists():
            return path
        frame = self.spark.range(0, rows, 1, files).selectExpr(
            "id", "1L AS lsn", "uuid() AS a", "id * 2 AS b", "'constant' AS c", "current_timestamp() AS ts"
        )
        frame.write.format("delta").option("delta.enableChangeDataFeed", "true").save(str(path))
        return path

    def copy(self, table: Path, label: str) -> str:
        """The same files under another path; what an earlier case left there goes."""
        path = table.with_name(f"{table.name}_{label}")
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(table, path)
        return str(path)

    def with_vectors(self, target: str) -> str:
        """The table, which may have deletion vectors from now on."""
        self.spark.sql(f"ALTER TABLE delta.`{target}` SET TBLPROPERTIES ({VECTORS_PROPERTY} = true)")
        return target

    def events(self, count: int, low: int, high: int, *, deletes: bool) -> DataFrame:
        """A batch as a stream delivers it: evaluated rows of unknown size, keys uniform in [low, high)."""
        self.batch_id += 1
        op = "if(rand() < 0.1, 'd', 'u')" if deletes else "'u'"
        return (
            self.spark.range(count)
            .selectExpr(
                f"cast({low} + rand() * {high - low} AS bigint) AS id",
                f"{self.batch_id + 1}L AS lsn",
                "uuid() AS a",
                "id AS b",
                "'changed' AS c",
                "current_timestamp() AS ts",
                f"{op} AS op",
            )
            .localCheckpoint()
        )

    def session_by_hand(self) -> SparkSession:
        """For a MERGE that gets evaluated rows, which Delta need not put aside first; nor does the sink let it."""
        session: SparkSession = owned_session(self.spark)
        session.conf.set(MATERIALIZE_CONF, "none")
        return session

    def alternate(self, make: Callable[[], T], *sides: Callable[[T], float], warm_up: int = 2) -> list[float]:
        """Median of each side over the same batches, after some warm-up.

        Every other round goes backwards and each pair starts with another side, so that each side comes as often behind
        another one as before it: what a large merge has written is still on its way to the disk when the next begins.
        """
        seconds: list[list[float]] = [[] for _ in sides]
        for round_number in range(self.runs + warm_up):
            batch = make()
            order = [(turn + round_number // 2) % len(sides) for turn in range(len(sides))]
            for side in reversed(order) if round_number % 2 else order:
                took = sides[side](batch)
                if round_number >= warm_up:
                    seconds[side].append(took)
        return [statistics.median(of_side) for of_side in seconds]


def sink_on(target: str, **settings: Any) -> MergeSink:
    """A sink for the bench's events, with tombstones unless told otherwise; it counts for itself."""
    wanted = {
        "keys": "id",
        "app_id": "bench",
        "metrics": MergeMetrics(CollectorRegistry()),
        "except_column_list": ["op"],
        **settings,
    }
    return sink_with(target=target, sequence_by="lsn", apply_as_deletes="op = 'd'", **wanted)


def timed(action: Callable[[], object]) -> float:
    """Seconds of wall time."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def deduped(events: DataFrame) -> DataFrame:
    """The hand-written dedup."""
    latest = Window.partitionBy("id").orderBy(F.col("lsn").desc())
    return events.withColumn("rank", F.row_number().over(latest)).where("rank = 1").drop("rank")


def hand_written(
    session: SparkSession, target: str, source: DataFrame, bounds: str = "", also: Sequence[str] = ()
) -> object:
    """A MERGE as people write it in `foreachBatch`; `also` names columns that the table has beside `STORED`."""
    values = {name: f"s.{name}" for name in (*STORED, *also)}
    return (
        DeltaTable.forPath(session, target)
        .alias("t")
        .merge(source.alias("s"), f"t.id = s.id{bounds}")
        .whenMatchedDelete("s.op = 'd' AND s.lsn > t.lsn")
        .whenMatchedUpdate("s.op <> 'd' AND s.lsn >= t.lsn", values)
        .whenNotMatchedInsert("s.op <> 'd'", values)
        .execute()
    )


def bare_delta_rs(table: delta_rs.DeltaTable, source: DataFrame, batch_id: int) -> None:
    """The same MERGE by delta-rs with nothing around it: no contract, no remembered deletes, no counts."""
    values = {name: f"s.{name}" for name in STORED}
    events = source.toArrow()
    ids = pc.min_max(events["id"]).as_py()
    table.update_incremental()
    (
        table.merge(
            events,
            f"t.id = s.id AND t.id >= {ids['min']} AND t.id <= {ids['max']}",
            source_alias="s",
            target_alias="t",
            commit_properties=delta_rs.CommitProperties(app_transactions=[delta_rs.Transaction("bare", batch_id)]),
        )
        .when_matched_delete("s.op = 'd' AND s.lsn > t.lsn")
        .when_matched_update(values, "s.op <> 'd' AND s.lsn >= t.lsn")
        .when_not_matched_insert(values, "s.op <> 'd'")
        .execute()
    )


def show(found: list[Comparison]) -> None:
    """Print the comparisons as a table."""
    table = Table("case", "baseline", "s", "candidate", "s", "ratio", "bound", "holds", title="medians, side by side")
    for row in found:
        table.add_row(
            row.case,
            row.baseline,
            f"{row.baseline_seconds:.3f}",
            row.candidate,
            f"{row.candidate_seconds:.3f}",
            f"{row.ratio:.2f}",
            row.bound,
            "yes" if row.holds else "NO",
        )
    console = Console(width=160)
    console.print(table)
    for row in found:
        if row.phases:
            console.print(f"{row.case}: {row.candidate} = {row.phases}")
