"""Streams as they run for long: whole triggers, thousands of commits, one stream for many tables."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from common import DEFAULT_CONFS, Bench, Comparison, bare_delta_rs, deduped, hand_written, sink_on, timed
from deltalake import DeltaTable
from prometheus_client import CollectorRegistry
from pyspark.sql import DataFrame, SparkSession

from stream_merge import MergeMetrics, MergeSink, MergeSinks
from stream_merge.spark.jvm import in_session, owned_session

TRIGGERS = 300
NAIVE_TRIGGERS = 20
BARE_TRIGGERS = 100


def end_to_end(bench: Bench) -> list[Comparison]:
    """Whole triggers of a rate source with 1,000 events each: the sink, a hand-written merge, bare delta-rs."""
    table = bench.table(20_000, 1)
    ours = triggers(bench, sink_on(bench.copy(table, "stream_sink"), app_id=None), TRIGGERS, {})
    naive_target = bench.copy(table, "stream_naive")

    def naive(batch: DataFrame, _: int) -> None:
        hand_written(batch.sparkSession, naive_target, deduped(batch))

    bare_table = DeltaTable(bench.copy(table, "stream_bare"))

    def bare(batch: DataFrame, batch_id: int) -> None:
        bare_delta_rs(bare_table, deduped(batch), batch_id)

    others = {
        "naive stream": triggers(bench, naive, NAIVE_TRIGGERS, DEFAULT_CONFS),
        "dedup + toArrow + bare delta-rs": triggers(bench, bare, BARE_TRIGGERS, {}),
    }
    found = []
    for label, share, limit in (("p50", 0.5, 0.35), ("p99", 0.99, 1.0)):
        candidate = quantile(ours, share)
        found += [
            Comparison(
                case=f"whole trigger, 1,000 events, 20 k rows, {label} of {len(ours)}",
                baseline=f"{other} ({len(theirs)} triggers)",
                baseline_seconds=quantile(theirs, share),
                candidate="auto",
                candidate_seconds=candidate,
                bound=f"at most {limit} s",
                holds=candidate <= limit,
            )
            for other, theirs in others.items()
        ]
    return found


def triggers(
    bench: Bench, each: Callable[[DataFrame, int], None], wanted: int, confs: dict[str, str], *, keys: int = 22_000
) -> list[float]:
    """Seconds of each whole trigger after the first ten."""
    session: SparkSession = owned_session(bench.spark)
    for key, value in {"spark.sql.streaming.numRecentProgressUpdates": "10000", **confs}.items():
        session.conf.set(key, value)
    warm_up = 10 if wanted > NAIVE_TRIGGERS else 3
    events = (
        session.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", 1_000)
        .option("numPartitions", 2)
        .load()
        .selectExpr(
            f"cast(rand() * {keys} AS bigint) AS id",
            "value + 2 AS lsn",
            "uuid() AS a",
            "value AS b",
            "'changed' AS c",
            "current_timestamp() AS ts",
            "if(rand() < 0.1, 'd', 'u') AS op",
        )
    )
    checkpoint = bench.folder / f"checkpoint_{time.monotonic_ns()}"
    query = events.writeStream.foreachBatch(each).option("checkpointLocation", str(checkpoint)).start()
    while query.isActive and len(query.recentProgress) < wanted + warm_up:
        time.sleep(0.2)
    progress = query.recentProgress
    query.stop()
    error = query.exception()
    if error is not None:
        raise error
    return [update.durationMs["triggerExecution"] / 1000 for update in progress[warm_up : warm_up + wanted]]


def quantile(values: list[float], share: float) -> float:
    """The value below which that share of all lies."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def year(bench: Bench, batches: int) -> list[Comparison]:
    """Thousands of small commits to one table: what opening and committing cost in the end, and what lies there.

    Of each call the time that is neither the batch's preparation nor the merge itself, which writes the same
    20,000 rows again each time.
    """
    target = bench.copy(bench.table(20_000, 1), "year")
    sink = sink_on(target)
    seconds: list[float] = []
    written: list[int] = []
    batch = bench.spark.range(100).selectExpr(
        "id", "0L AS lsn", "'a' AS a", "id AS b", "'c' AS c", "current_timestamp() AS ts", "'u' AS op"
    )
    rows = bench.spark.createDataFrame(batch.toArrow()).localCheckpoint()
    for number in range(batches):
        made = rows.selectExpr(f"id + {number * 37 % 19_900} AS id", f"{number + 2}L AS lsn", "a", "b", "c", "ts", "op")
        before = time.perf_counter()
        sink(made, number)
        took = time.perf_counter() - before
        result = sink.last_result
        if result is None or result.engine != "driver":
            msg = f"batch {number} was not merged in the driver: {result}"
            raise AssertionError(msg)
        seconds.append(took - result.seconds.get("prepare", 0.0) - result.metrics["executionTimeMs"] / 1000)
        written.append(result.metrics.get("numTargetRowsCopied", 0))
    tenth = max(50, batches // 20)
    first, last = statistics.median(seconds[tenth : 2 * tenth]), statistics.median(seconds[-tenth:])
    log = list((Path(target) / "_delta_log").iterdir())
    megabytes = sum(file.stat().st_size for file in log) / 1e6
    data = [file for file in Path(target).glob("*.parquet")]
    live = len(DeltaTable(target).file_uris())
    return [
        Comparison(
            case=f"open + merge + commit over {batches:,} batches",
            baseline=f"batches {tenth} to {2 * tenth}",
            baseline_seconds=first,
            candidate=f"last {tenth}",
            candidate_seconds=last,
            bound="at most 20 % more",
            holds=last <= 1.2 * first,
            phases=(
                f"log {len(log):,} files, {megabytes:,.1f} MB; live data files {live};"
                f" data files on disk {len(data):,}; rows copied per batch: early"
                f" {written[tenth]:,}, late {written[-1]:,}"
            ),
        )
    ]


TABLES = 50


def fleet(bench: Bench) -> list[Comparison]:
    """10,000 events for 50 tables: `MergeSinks`, the same one table at a time, and by hand (5 tables, times 10)."""
    table = bench.table(20_000, 1)
    metrics = MergeMetrics(CollectorRegistry())

    def sinks(label: str, parallel: int | None) -> MergeSinks:
        each: dict[str | int, MergeSink] = {
            f"t{i}": sink_on(
                bench.copy(table, f"{label}_{i}"),
                except_column_list=["op", "topic"],
                name=f"{label}{i}",
                metrics=metrics,
            )
            for i in range(TABLES)
        }
        return MergeSinks(each, route_by="topic", parallel=parallel, app_id="bench", metrics=metrics)

    side_by_side, one_by_one = sinks("parallel", None), sinks("single", 1)
    by_hand = [bench.copy(table, f"by_hand_{i}") for i in range(TABLES // 10)]
    naive = owned_session(bench.spark)
    for key, value in DEFAULT_CONFS.items():
        naive.conf.set(key, value)

    def events() -> DataFrame:
        made = bench.events(200 * TABLES, 0, 22_000, deletes=True)
        return made.selectExpr("*", f"concat('t', pmod(hash(id, a), {TABLES})) AS topic").localCheckpoint()

    def through(merge: MergeSinks, batch: DataFrame) -> float:
        return timed(lambda: merge(batch, bench.batch_id))

    def hand(batch: DataFrame) -> float:
        def all_tables() -> None:
            source = in_session(batch, naive)
            for i, target in enumerate(by_hand):
                hand_written(naive, target, deduped(source.where(f"topic = 't{i}'").drop("topic")))

        return timed(all_tables) * TABLES / len(by_hand)

    hand_seconds, single, parallel = bench.alternate(
        events, hand, partial(through, one_by_one), partial(through, side_by_side), warm_up=2
    )
    return [
        Comparison(
            case=f"{200 * TABLES:,} events for {TABLES} tables of 20 k rows",
            baseline=baseline,
            baseline_seconds=seconds,
            candidate="MergeSinks",
            candidate_seconds=parallel,
            bound="",
            holds=True,
        )
        for baseline, seconds in (("hand-written, table by table", hand_seconds), ("MergeSinks(parallel=1)", single))
    ]
