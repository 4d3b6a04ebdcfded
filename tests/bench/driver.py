"""What the driver costs on tables without deletion vectors: beside each engine alone, with growth, in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from common import Bench, Comparison, sink_on, timed
from pyspark.sql import DataFrame

from stream_merge import MergeSink

GRID_TABLES = {20_000: 1, 1_000_000: 8, 5_000_000: 16}
"""Rows to files."""
GRID_EVENTS = (1_000, 100_000)


def grid(bench: Bench) -> list[Comparison]:
    """`auto` beside the better of the two engines forced by hand: table size x batch size x key pattern."""
    found = []
    for rows, files in GRID_TABLES.items():
        table = bench.table(rows, files)
        for events in GRID_EVENTS:
            for pattern, low in (("recent keys", int(rows * 0.95)), ("random keys", 0)):
                sinks = {
                    engine: sink_on(bench.copy(table, f"grid_{engine}"), engine=engine)
                    for engine in ("auto", "driver", "spark")
                }
                make = partial(bench.events, events, low, int(rows * 1.01) + 1, deletes=True)
                auto, driver, spark = bench.alternate(make, *(_through(bench, s) for s in sinks.values()), warm_up=3)
                better = min(driver, spark)
                limit = max(1.15 * better, better + 0.05)
                found.append(
                    Comparison(
                        case=f"{rows:,} rows, {events:,} events, {pattern}",
                        baseline="driver forced" if driver <= spark else "spark forced",
                        baseline_seconds=better,
                        candidate="auto",
                        candidate_seconds=auto,
                        bound=f"at most {limit:.2f} s",
                        holds=auto <= limit,
                        phases=f"driver forced {driver:.3f}, spark forced {spark:.3f}",
                    )
                )
    return found


GROWTH_ROWS = (1_000_000, 5_000_000, 20_000_000)
NEWEST = 250_000


def growth(bench: Bench) -> list[Comparison]:
    """10,000 events on the newest rows of tables of growing size and files of equal size."""
    sinks = {rows: sink_on(str(bench.table(rows, rows // NEWEST))) for rows in GROWTH_ROWS}

    def batches() -> dict[int, DataFrame]:
        return {rows: bench.events(10_000, rows - NEWEST, rows, deletes=True) for rows in GROWTH_ROWS}

    def one(rows: int, made: dict[int, DataFrame]) -> float:
        return timed(lambda: sinks[rows](made[rows], bench.batch_id))

    smallest, *larger = bench.alternate(batches, *(partial(one, rows) for rows in GROWTH_ROWS), warm_up=3)
    limit = max(1.5 * smallest, smallest + 0.05)
    return [
        Comparison(
            case=f"10,000 events on the newest {NEWEST:,} rows",
            baseline=f"{GROWTH_ROWS[0]:,} rows",
            baseline_seconds=smallest,
            candidate=f"{rows:,} rows",
            candidate_seconds=seconds,
            bound=f"at most {limit:.2f} s",
            holds=seconds <= limit,
        )
        for rows, seconds in zip(GROWTH_ROWS[1:], larger, strict=True)
    ]


CEILING = 1_500 << 20
LOWEST = {"recent": 19_750_000, "random": 0}
MEMORY_CASES = (
    (10_000, "recent"),
    (100_000, "recent"),
    (300_000, "recent"),
    (1_000_000, "recent"),
    (10_000, "random"),
    (1_000_000, "random"),
)
"""What goes to Spark takes minutes on 20 M rows; one case of each size that must."""


def memory(bench: Bench) -> list[Comparison]:
    """Peak memory of Python under a ceiling, with batches that grow until they must go to Spark."""
    table = bench.table(20_000_000, 80)
    target = str(table)
    lines: list[str] = []
    highest = 0.0
    started = resident_bytes()
    for events, pattern in MEMORY_CASES:
        batch = bench.events(events, LOWEST[pattern], 20_000_000, deletes=True)
        sink = sink_on(target, native_memory_bytes=CEILING, engine="auto")
        with peak_memory() as peak:
            took = timed(partial(sink, batch, bench.batch_id))
        result = sink.last_result
        engine = "" if result is None else f"{result.engine} ({result.refusal or 'chosen'})"
        above = peak[0] - started
        if result is not None and result.engine == "driver":
            highest = max(highest, above)
        lines.append(f"{events:,} {pattern}: {engine}, {took:.1f} s, peak +{above / 2**20:,.0f} MiB")
    return [
        Comparison(
            case="peak memory above the start in MiB, 20 M rows",
            baseline="ceiling",
            baseline_seconds=CEILING / 2**20,
            candidate="merges in the driver",
            candidate_seconds=highest / 2**20,
            bound="below the ceiling",
            holds=highest <= CEILING,
            phases="; ".join(lines),
        )
    ]


def _through(bench: Bench, sink: MergeSink) -> Callable[[DataFrame], float]:
    return lambda batch: timed(lambda: sink(batch, bench.batch_id))


def resident_bytes() -> int:
    """Of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """The highest resident memory of this process while the block runs, looked at every 10 ms."""
    highest = [resident_bytes()]
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            highest[0] = max(highest[0], resident_bytes())
            time.sleep(0.01)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield highest
    finally:
        over.set()
        watcher.join()
