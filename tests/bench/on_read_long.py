"""Merge-on-read as it runs for long: what thousands of batches leave, whole triggers, and the memory that it takes."""

from __future__ import annotations

import statistics
import time
from functools import partial
from pathlib import Path

from common import Bench, Comparison, sink_on, timed
from driver import peak_memory, resident_bytes
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from streams import quantile, triggers

ROWS, FILES, EVENTS = 5_000_000, 16, 1_000
AT_THE_ENDS = 100
SCANS = 5
CEILING = 2_000 << 20


def debt(bench: Bench, batches: int) -> list[Comparison]:
    """Batches of random keys, the sink's own compaction alone: calls, a scan of the table, and bytes on disk."""
    target = bench.with_vectors(bench.copy(bench.table(ROWS, FILES), "debt"))
    bytes_before = _bytes(Path(target))
    sink = sink_on(target)
    seconds: list[float] = []
    engines: set[str] = set()
    rounds = 0
    for _ in range(batches):
        batch = bench.events(EVENTS, 0, int(ROWS * 1.1), deletes=True)
        seconds.append(timed(partial(sink, batch, bench.batch_id)))
        if sink.last_result is not None:
            engines.add(sink.last_result.engine)
            rounds += sink.last_result.maintenance is not None
    left = None if sink.last_result is None else sink.last_result.read_debt
    scan = _scan(bench.spark, target)
    bench.spark.conf.set("spark.databricks.delta.retentionDurationCheck.enabled", "false")
    bench.spark.sql(f"VACUUM delta.`{target}` RETAIN 0 HOURS")
    bytes_left = _bytes(Path(target))
    fresh = bench.copy(Path(target), "fresh")
    bench.spark.sql(f"REORG TABLE delta.`{fresh}` APPLY (PURGE)")
    bench.spark.sql(f"OPTIMIZE delta.`{fresh}`")
    bench.spark.sql(f"VACUUM delta.`{fresh}` RETAIN 0 HOURS")
    fresh_scan = _scan(bench.spark, fresh)
    first, last = (statistics.median(part) for part in (seconds[5 : 5 + AT_THE_ENDS], seconds[-AT_THE_ENDS:]))
    case = f"{batches:,} batches of {EVENTS:,} random keys, {ROWS:,} rows"
    return [
        Comparison(
            case=case,
            baseline=f"first {AT_THE_ENDS}",
            baseline_seconds=first,
            candidate=f"last {AT_THE_ENDS}",
            candidate_seconds=last,
            bound="at most 1.3 x",
            holds=last <= 1.3 * first,
            phases=f"by {', '.join(sorted(engines))}; {rounds} rounds, slowest call {max(seconds[5:]):.2f} s; {left}",
        ),
        Comparison(
            case="a scan of all columns by Spark in the end",
            baseline="freshly optimized",
            baseline_seconds=fresh_scan,
            candidate="as it is",
            candidate_seconds=scan,
            bound="at most 1.3 x",
            holds=scan <= 1.3 * fresh_scan,
        ),
        Comparison(
            case="MB on disk after VACUUM",
            baseline="freshly optimized",
            baseline_seconds=_bytes(Path(fresh)) / 1e6,
            candidate="as it is",
            candidate_seconds=bytes_left / 1e6,
            bound="at most 1.5 x",
            holds=bytes_left <= 1.5 * _bytes(Path(fresh)),
            phases=f"{bytes_before / 1e6:,.0f} MB at first",
        ),
    ]


def random_stream(bench: Bench) -> list[Comparison]:
    """Whole triggers of a rate source, 1,000 events with random keys in 5 M rows."""
    target = bench.with_vectors(bench.copy(bench.table(ROWS, FILES), "random_stream"))
    taken = triggers(bench, sink_on(target, app_id=None), 300, {}, keys=int(ROWS * 1.1))
    return [
        Comparison(
            case=f"whole trigger, {EVENTS:,} random keys in {ROWS:,} rows, {label} of {len(taken)}",
            baseline="bar",
            baseline_seconds=limit,
            candidate="auto",
            candidate_seconds=quantile(taken, share),
            bound=f"at most {limit} s",
            holds=quantile(taken, share) <= limit,
        )
        for label, share, limit in (("p50", 0.5, 0.45), ("p99", 0.99, 1.2))
    ]


def memory_on_read(bench: Bench) -> list[Comparison]:
    """Peak memory of Python under a ceiling: large batches, a large table, large rows."""
    rows_20m = bench.table(20_000_000, 20)
    large = bench.folder / "large_rows"
    frame = bench.spark.range(0, 2_000, 1, 8)
    frame = frame.selectExpr("id", "1L AS lsn", f"{_TEXT} AS a", "id AS b", "'c' AS c", "current_timestamp() AS ts")
    frame.write.format("delta").option("delta.enableChangeDataFeed", "true").save(str(large))

    def large_events(count: int) -> DataFrame:
        bench.batch_id += 1
        return (
            bench.spark.range(0, count, 1, 8)
            .selectExpr(
                "id * 3 AS id",
                f"{bench.batch_id + 1}L AS lsn",
                f"{_TEXT} AS a",
                "id AS b",
                "'changed' AS c",
                "current_timestamp() AS ts",
                "'u' AS op",
            )
            .localCheckpoint()
        )

    return [
        _peak_of(bench, "20 M rows, 100 k random", rows_20m, bench.events(100_000, 0, 20_000_000, deletes=True)),
        _peak_of(bench, "20 M rows, 1 M random", rows_20m, bench.events(1_000_000, 0, 20_000_000, deletes=True)),
        _peak_of(bench, "2,000 rows of 1 MB, 50 of them", large, large_events(50)),
        _peak_of(bench, "2,000 rows of 1 MB, 400 of them", large, large_events(400)),
    ]


_TEXT = "repeat(concat(uuid(), id), 27000)"
"""About 1 MB, and small in a file: the worst case for whoever estimates rows by the size of their file."""


def _peak_of(bench: Bench, case: str, table: Path, batch: DataFrame) -> Comparison:
    target = bench.with_vectors(bench.copy(table, "memory"))
    sink = sink_on(target, driver_memory_bytes=CEILING)
    sink(bench.events(10, 0, 10, deletes=False), bench.batch_id)
    started = resident_bytes()
    bench.batch_id += 1
    with peak_memory() as peak:
        took = timed(partial(sink, batch, bench.batch_id))
    result = sink.last_result
    engine, refusal = ("", None) if result is None else (result.engine, result.refusal)
    above = peak[0] - started
    return Comparison(
        case=f"peak memory above the start in MiB, {case}",
        baseline="ceiling",
        baseline_seconds=CEILING / 2**20,
        candidate=f"{engine} ({refusal or 'chosen'}), {took:.1f} s",
        candidate_seconds=above / 2**20,
        bound="below the ceiling",
        holds=above <= CEILING,
        phases="" if result is None else result.plan,
    )


def _scan(spark: SparkSession, target: str) -> float:
    """Median seconds of reading every column of every row."""
    taken = []
    for _ in range(SCANS):
        started = time.perf_counter()
        # Delta 4.4 does not write a table with deletion vectors to a sink that takes nothing.
        spark.read.format("delta").load(target).agg(F.max(F.hash("*"))).collect()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


def _bytes(folder: Path) -> int:
    """Of the data files and deletion vectors."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and "_delta_log" not in file.parts)
