"""The driver, in both modes, beside the hand-written merge: random keys in tables of many sizes and kinds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from common import DEFAULT_CONFS, STORED, Bench, Comparison, deduped, hand_written, show, sink_on, timed
from pyspark.sql import DataFrame

from stream_merge import MergeSink
from stream_merge.model.settings import Engine
from stream_merge.model.snapshot import VECTORS_PROPERTY
from stream_merge.spark.jvm import in_session, owned_session

SIX = ("uuid() AS a", "id * 2 AS b", "'constant' AS c", "current_timestamp() AS ts")
WARM_UP = 2
ON_READ = "driver, mark"
REWRITE = "driver, rewrite"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One table, and batches of random keys."""

    said: str
    rows: int
    files: int = 16
    events: int = 10_000
    payload: Sequence[str] = SIX
    """SQL over `id`."""
    key: str = "id"
    """SQL: the key, by its number `id`."""
    cluster: bool = False
    feed: bool = True
    bounds: Mapping[str, float] = field(default_factory=dict)
    """Baseline -> how many times faster marking has to be."""
    rounds: int = 5
    sides: Sequence[str] = ("naive", "naive, preset", REWRITE, "auto", ON_READ)


CASES = (
    Case(
        said="5 M rows, 10 k random keys",
        rows=5_000_000,
        bounds={"naive": 20, "naive, preset": 10, REWRITE: 2},
    ),
    Case(said="the same, change feed off", rows=5_000_000, feed=False, bounds={"naive": 30}),
    Case(said="20 M rows in 20 files, 10 k random keys", rows=20_000_000, files=20, rounds=3),
    Case(
        said="1 M rows of 100 columns, 10 k random keys",
        rows=1_000_000,
        payload=(*SIX, *(f"concat('text-{n}-', id * {n + 1}) AS s{n}" for n in range(95))),
        rounds=3,
        bounds={"naive": 15},
    ),
    Case(
        said="2 M rows, keys of 32 characters, 10 k random",
        rows=2_000_000,
        key="md5(cast(id AS string))",
        bounds={"naive": 8, "naive, preset": 3},
    ),
    Case(
        said="1 M rows with decimal(20,4), 5 k random",
        rows=1_000_000,
        events=5_000,
        payload=(*SIX, "cast(id AS decimal(20,4)) AS d"),
        bounds={"naive": 8, "naive, preset": 3},
    ),
    Case(
        said="1 M rows with a map column, 5 k random",
        rows=1_000_000,
        events=5_000,
        payload=(*SIX, "map('k', id, 'l', id + 1) AS m"),
        bounds={"naive": 8, "naive, preset": 3},
    ),
    Case(
        said="1 M rows, liquid clustering, 5 k random",
        rows=1_000_000,
        events=5_000,
        cluster=True,
        bounds={"naive": 8, "naive, preset": 3},
    ),
    Case(said="1 M rows in 2,000 files, 1 k random", rows=1_000_000, files=2_000, events=1_000, bounds={"naive": 12}),
    Case(
        said="100 M rows in 100 files, 10 k random keys",
        rows=100_000_000,
        files=100,
        bounds={"Spark, vectors": 10},
        rounds=2,
        sides=("Spark, vectors", ON_READ),
    ),
)


def on_read(bench: Bench, numbers: Sequence[int] | None) -> list[Comparison]:
    """Each case, all sides over the same batches, each round beginning with another side."""
    found: list[Comparison] = []
    for number, case in enumerate(CASES):
        if not numbers or number in numbers:
            measured = _measured(bench, case)
            show(measured)
            found += measured
    return found


GROWTH = {5_000_000: 16, 20_000_000: 20}
"""Rows -> files."""
GROWTH_BOUNDS = {True: 1.6, False: 1.2}
"""With the change feed, and without."""


def growth_on_read(bench: Bench) -> list[Comparison]:
    """The same batch of random keys into a table of four times the rows."""
    found: list[Comparison] = []
    for feed, bound in GROWTH_BOUNDS.items():
        sinks: dict[int, MergeSink] = {}
        for rows, files in GROWTH.items():
            target = bench.copy(bench.table(rows, files), f"growth_{feed}")
            bench.spark.sql(
                f"ALTER TABLE delta.`{target}` SET TBLPROPERTIES"
                f" ({VECTORS_PROPERTY} = true, delta.enableChangeDataFeed = {str(feed).lower()})"
            )
            sinks[rows] = sink_on(target, change_data_feed=feed, engine="driver")

        def batches() -> dict[int, DataFrame]:
            return {rows: bench.events(10_000, 0, int(rows * 1.1), deletes=True) for rows in GROWTH}

        def one(rows: int, made: dict[int, DataFrame], sinks: dict[int, MergeSink] = sinks) -> float:
            return timed(lambda: sinks[rows](made[rows], bench.batch_id))

        small, large = bench.alternate(batches, *(partial(one, rows) for rows in GROWTH), warm_up=3)
        found.append(
            Comparison(
                case=f"10 k random keys, change feed {'on' if feed else 'off'}",
                baseline="5 M rows in 16 files",
                baseline_seconds=small,
                candidate="20 M rows in 20 files",
                candidate_seconds=large,
                bound=f"at most {bound} x",
                holds=large <= bound * small,
                phases=_phases(sinks),
            )
        )
    return found


def _phases(sinks: Mapping[int, MergeSink]) -> str:
    """Of the last batch of each."""
    told = []
    for rows, sink in sinks.items():
        result = sink.last_result
        if result is not None:
            taken = ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in result.seconds.items() if seconds > 0.001)
            merge = ", ".join(f"{name} {result.metrics[name]}" for name in ("scanTimeMs", "rewriteTimeMs"))
            told.append(f"{rows:,} rows: {taken}; {merge}")
    return "; ".join(told)


def _measured(bench: Bench, case: Case) -> list[Comparison]:
    table = bench.folder / f"on_read_{CASES.index(case)}"
    rows = bench.spark.range(0, case.rows, 1, case.files).selectExpr(f"{case.key} AS id", "1L AS lsn", *case.payload)
    identifier = f"delta.`{table}`"
    columns = ", ".join(f"`{name}` {dtype}" for name, dtype in rows.dtypes)
    clustered = "CLUSTER BY (id)" if case.cluster else ""
    bench.spark.sql(
        f"CREATE TABLE {identifier} ({columns}) USING delta {clustered}"
        f" TBLPROPERTIES (delta.enableChangeDataFeed = {str(case.feed).lower()}, {VECTORS_PROPERTY} = false)"
    )
    rows.write.format("delta").mode("append").save(str(table))
    sides = _sides(bench, case, table, rows.columns)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for number in range(min(case.rounds, bench.runs) + WARM_UP):
        batch = _events(bench, case)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            took = timed(lambda name=name, batch=batch: sides[name](batch, bench.batch_id))
            if number >= WARM_UP:
                seconds[name].append(took)
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    return [
        Comparison(
            case=case.said,
            baseline=baseline,
            baseline_seconds=medians[baseline],
            candidate=ON_READ,
            candidate_seconds=medians[ON_READ],
            bound="" if baseline not in case.bounds else f"at least {case.bounds[baseline]:g} x faster",
            holds=baseline not in case.bounds or medians[baseline] >= case.bounds[baseline] * medians[ON_READ],
        )
        for baseline in names
        if baseline != ON_READ
    ]


def _sides(
    bench: Bench, case: Case, table: Path, columns: Sequence[str]
) -> dict[str, Callable[[DataFrame, int], object]]:
    def copied(label: str, *, vectors: bool) -> str:
        target = bench.copy(table, label)
        return bench.with_vectors(target) if vectors else target

    def by_hand(label: str, confs: Mapping[str, str], *, vectors: bool = False) -> Callable[[DataFrame, int], object]:
        session = owned_session(bench.spark)
        for key, value in confs.items():
            session.conf.set(key, value)
        target = copied(label, vectors=vectors)
        also = [name for name in columns if name not in STORED]
        return lambda df, _: hand_written(session, target, deduped(in_session(df, session)), also=also)

    def by_sink(label: str, engine: Engine, *, vectors: bool) -> Callable[[DataFrame, int], object]:
        sink: MergeSink = sink_on(copied(label, vectors=vectors), change_data_feed=case.feed, engine=engine)
        return sink

    made = {
        "naive": lambda: by_hand("naive", DEFAULT_CONFS),
        "naive, preset": lambda: by_hand("preset", {}),
        "Spark, vectors": lambda: by_hand("vectors", {}, vectors=True),
        REWRITE: lambda: by_sink("rewrite", "driver", vectors=False),
        "auto": lambda: by_sink("auto", "auto", vectors=True),
        ON_READ: lambda: by_sink("on_read", "driver", vectors=True),
    }
    return {name: made[name]() for name in case.sides}


def _events(bench: Bench, case: Case) -> DataFrame:
    bench.batch_id += 1
    picked = bench.spark.range(case.events).selectExpr(f"cast(rand() * {case.rows * 1.1} AS bigint) AS id")
    values = (f"{case.key} AS id", f"{bench.batch_id + 1}L AS lsn", *case.payload, "if(rand() < 0.1, 'd', 'u') AS op")
    return picked.selectExpr(*values).localCheckpoint()
