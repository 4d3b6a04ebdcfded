"""What the sink costs beside a bare MERGE, and the preset beside default confs.

    make bench                      both comparisons, printed as a table
    make bench ARGS="--json FILE"   and written as JSON

All sides of a comparison run alternately in one JVM on copies of one table, so that the machine's
noise hits them alike. Ratios count; seconds are only as good as the machine.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from delta.tables import DeltaTable
from prometheus_client import CollectorRegistry
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from rich.console import Console
from rich.table import Table

from stream_merge import MergeMetrics, MergeSink
from stream_merge.engines.spark import MATERIALIZE_CONF
from stream_merge.results import PHASES, Phase
from stream_merge.session import local_session
from stream_merge.spark_internals import in_session, owned_session

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
        """A table of that many rows ordered by key, in files of equal size."""
        path = self.folder / f"rows_{rows}"
        frame = self.spark.range(0, rows, 1, files).selectExpr(
            "id", "1L AS lsn", "uuid() AS a", "id * 2 AS b", "'constant' AS c", "current_timestamp() AS ts"
        )
        frame.write.format("delta").option("delta.enableChangeDataFeed", "true").save(str(path))
        return path

    def copy(self, table: Path, label: str) -> str:
        """The same files under another path."""
        path = table.with_name(f"{table.name}_{label}")
        shutil.copytree(table, path)
        return str(path)

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

    def alternate(
        self, make: Callable[[], DataFrame], one: Callable[[DataFrame], float], other: Callable[[DataFrame], float]
    ) -> tuple[float, float]:
        """Medians of both sides over the same batches, after two warm-up rounds."""
        seconds: tuple[list[float], list[float]] = ([], [])
        for round_number in range(self.runs + 2):
            batch = make()
            sides = [(0, one), (1, other)]
            for side, run in sides if round_number % 2 else reversed(sides):
                took = run(batch)
                if round_number >= 2:
                    seconds[side].append(took)
        return statistics.median(seconds[0]), statistics.median(seconds[1])


def timed(action: Callable[[], object]) -> float:
    """Seconds of wall time."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def deduped(events: DataFrame) -> DataFrame:
    """The hand-written dedup."""
    latest = Window.partitionBy("id").orderBy(F.col("lsn").desc())
    return events.withColumn("rank", F.row_number().over(latest)).where("rank = 1").drop("rank")


def hand_written(session: SparkSession, target: str, source: DataFrame, bounds: str = "") -> object:
    """A MERGE as people write it in `foreachBatch`."""
    values = {name: f"s.{name}" for name in STORED}
    return (
        DeltaTable.forPath(session, target)
        .alias("t")
        .merge(source.alias("s"), f"t.id = s.id{bounds}")
        .whenMatchedDelete("s.op = 'd' AND s.lsn > t.lsn")
        .whenMatchedUpdate("s.op <> 'd' AND s.lsn >= t.lsn", values)
        .whenNotMatchedInsert("s.op <> 'd'", values)
        .execute()
    )


def sink_and_bare(
    bench: Bench,
    case: str,
    table: Path,
    events: Callable[[], DataFrame],
    *,
    tombstones: bool,
    bound: Callable[[float], float],
) -> Comparison:
    """The sink's call beside a MERGE that gets the deduped rows for free."""
    bare_table, sink_table = bench.copy(table, "bare"), bench.copy(table, "sink")
    session = owned_session(bench.spark)
    session.conf.set(MATERIALIZE_CONF, "none")  # as the sink does for its evaluated rows
    sink = MergeSink(
        target=sink_table,
        keys="id",
        sequence_by="lsn",
        apply_as_deletes="op = 'd'",
        except_column_list=["op"],
        tombstones=tombstones,
        app_id="bench",
        metrics=MergeMetrics(CollectorRegistry()),
    )

    def bare(batch: DataFrame) -> float:
        source = in_session(deduped(batch).localCheckpoint(), session)
        least, greatest = source.agg(F.min("id"), F.max("id")).collect()[0]
        return timed(lambda: hand_written(session, bare_table, source, f" AND t.id BETWEEN {least} AND {greatest}"))

    phases: dict[Phase, list[float]] = {phase: [] for phase in PHASES}

    def through_sink(batch: DataFrame) -> float:
        took = timed(lambda: sink(batch, bench.batch_id))
        for phase, seconds in sink.last_result.seconds.items() if sink.last_result else ():
            phases[phase].append(seconds)
        return took

    bare_seconds, sink_seconds = bench.alternate(events, bare, through_sink)
    limit = bound(bare_seconds)
    return Comparison(
        case=case,
        baseline="bare MERGE of the deduped rows",
        baseline_seconds=bare_seconds,
        candidate="sink",
        candidate_seconds=sink_seconds,
        bound=f"at most {limit:.2f} s",
        holds=sink_seconds <= limit,
        phases=", ".join(f"{phase} {statistics.median(s):.3f}" for phase, s in phases.items() if max(s) >= 0.001),
    )


def default_and_preset(bench: Bench, table: Path, events: Callable[[], DataFrame]) -> Comparison:
    """The hand-written merge under default confs beside the same under the preset."""
    sides = {}
    for label, confs in (("default", DEFAULT_CONFS), ("preset", {})):
        session = owned_session(bench.spark)
        for key, value in confs.items():
            session.conf.set(key, value)
        sides[label] = (session, bench.copy(table, label))

    def merge(label: str) -> Callable[[DataFrame], float]:
        session, target = sides[label]
        return lambda batch: timed(lambda: hand_written(session, target, deduped(in_session(batch, session))))

    default_seconds, preset_seconds = bench.alternate(events, merge("default"), merge("preset"))
    return Comparison(
        case="20 k rows, 1,000 events, hand-written",
        baseline="default confs",
        baseline_seconds=default_seconds,
        candidate="small_batches preset",
        candidate_seconds=preset_seconds,
        bound="at least 3 x faster",
        holds=default_seconds >= 3 * preset_seconds,
    )


def main() -> None:
    """Run the comparisons and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=9, help="counted rounds per comparison")
    parser.add_argument("--rows", type=int, default=5_000_000, help="rows of the large table")
    parser.add_argument("--only", choices=("large", "tiny", "preset"), help="one comparison alone")
    parser.add_argument("--json", type=Path, help="also write the results here")
    args = parser.parse_args()
    spark = local_session("stream_merge bench", memory="4g")
    found: list[Comparison] = []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(spark, Path(folder), args.runs)
        tiny = bench.table(20_000, 1)
        if args.only in (None, "preset"):
            found.append(default_and_preset(bench, tiny, lambda: bench.events(1_000, 0, 22_000, deletes=True)))
        if args.only in (None, "tiny"):
            found.append(
                sink_and_bare(
                    bench,
                    "20 k rows, 1,000 upserts, empty tombstones",
                    tiny,
                    lambda: bench.events(1_000, 0, 22_000, deletes=False),
                    tombstones=True,
                    bound=lambda bare: bare + 0.35,
                )
            )
        if args.only in (None, "large"):
            large = bench.table(args.rows, 16)
            recent = int(args.rows * 0.95)
            found.append(
                sink_and_bare(
                    bench,
                    f"{args.rows:,} rows, 10,000 recent events, tombstones off",
                    large,
                    lambda: bench.events(10_000, recent, args.rows + args.rows // 200, deletes=True),
                    tombstones=False,
                    bound=lambda bare: 1.15 * bare + 0.3,
                )
            )
    spark.stop()
    show(found)
    if args.json:
        args.json.write_text(json.dumps([{**asdict(row), "ratio": row.ratio} for row in found], indent=2) + "\n")


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
            console.print(f"{row.case}: sink = {row.phases}")


if __name__ == "__main__":
    main()
