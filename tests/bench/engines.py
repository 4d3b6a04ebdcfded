"""The sink beside the merge that people write by hand, over sizes of table and batch and patterns of keys.

All sides merge the same batches into copies of one table, alternately, in one JVM.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from common import DEFAULT_CONFS, Bench, Comparison, deduped, hand_written, sink_on, timed
from pyspark.sql import DataFrame

from stream_merge.spark.jvm import in_session, owned_session


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One table, one kind of batch."""

    name: str
    rows: int
    files: int
    events: int
    recent: float | None
    """Keys from this newest share of the table; None: uniform."""
    bound: float
    """How many times faster than the hand-written merge `auto` has to be."""
    spark_bound: float
    """The same for the Spark engine alone, without tombstones."""


CASES = (
    Case(name="20 k rows, 1 k events", rows=20_000, files=1, events=1_000, recent=None, bound=20, spark_bound=2.5),
    Case(name="5 M, 10 k, recent", rows=5_000_000, files=16, events=10_000, recent=0.05, bound=12, spark_bound=1.8),
    Case(name="5 M, 10 k, random", rows=5_000_000, files=16, events=10_000, recent=None, bound=4, spark_bound=1.3),
    Case(name="5 M, 1 M, random", rows=5_000_000, files=16, events=1_000_000, recent=None, bound=3, spark_bound=1.0),
)


@dataclass(kw_only=True, slots=True)
class Side:
    """One way to merge a batch."""

    name: str
    merge: Callable[[DataFrame, int], object]
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    @property
    def median(self) -> float:
        """Median of the counted rounds."""
        return statistics.median(self.seconds)


BY_HAND, BY_SINK = "by hand", "auto"
VECTORS, PLAIN = "vectors", "plain"
BASELINE = {VECTORS: f"{BY_HAND}, {VECTORS}", PLAIN: f"{BY_HAND}, {PLAIN}"}
"""Kind of table -> the hand-written MERGE with default confs on such a table."""
ON_SPARK = f"spark, no tombstones, {PLAIN}"


def sides_of(bench: Bench, table: Path) -> list[Side]:
    """By hand with default confs and with the preset, and `auto`: each on a table with vectors and on one without.

    Beside them the Spark engine without tombstones, on a table without vectors.
    """

    def copied(label: str) -> str:
        target = bench.copy(table, label.replace(" ", "_").replace(",", ""))
        return bench.with_vectors(target) if label.endswith(VECTORS) else target

    def by_hand(label: str, confs: dict[str, str]) -> Side:
        session = owned_session(bench.spark)
        for key, value in confs.items():
            session.conf.set(key, value)
        target = copied(label)
        return Side(name=label, merge=lambda df, _: hand_written(session, target, deduped(in_session(df, session))))

    def by_sink(label: str, engine: str, *, tombstones: bool) -> Side:
        sink = sink_on(copied(label), engine=engine, tombstones=tombstones)
        return Side(name=label, merge=lambda df, batch_id: (sink(df, batch_id), sink.last_result)[1])

    sides = []
    for kind, baseline in BASELINE.items():
        sides += [
            by_hand(baseline, DEFAULT_CONFS),
            by_hand(f"{BY_HAND}, preset, {kind}", {}),
            by_sink(f"{BY_SINK}, {kind}", "auto", tombstones=True),
        ]
    return [*sides, by_sink(ON_SPARK, "spark", tombstones=False)]


def measure(bench: Bench, case: Case, table: Path, *, runs: int, warm_up: int) -> dict[str, Side]:
    """Merge the same batches on all sides; each starts with another one in each round."""
    sides = sides_of(bench, table)
    low = 0 if case.recent is None else int(case.rows * (1 - case.recent))
    high = int(case.rows * 1.1) if case.recent is None else int(case.rows * (1 + case.recent / 10))
    for number in range(runs + warm_up):
        batch = bench.events(case.events, low, high, deletes=True)
        for side in sides[number % len(sides) :] + sides[: number % len(sides)]:
            took = timed(lambda side=side, batch=batch: side.merge(batch, bench.batch_id))
            if number >= warm_up:
                side.seconds.append(took)
    return {side.name: side for side in sides}


def rows_of(case: Case, sides: dict[str, Side]) -> list[Comparison]:
    """The case as rows of the bench's table: each beside the hand-written merge with default confs on such a table."""
    bounds = {f"{BY_SINK}, {kind}": case.bound for kind in BASELINE} | {ON_SPARK: case.spark_bound}
    found = []
    for side in sides.values():
        baseline = next(sides[by_hand] for kind, by_hand in BASELINE.items() if side.name.endswith(kind))
        if side is baseline:
            continue
        bound = bounds.get(side.name)
        found.append(
            Comparison(
                case=case.name,
                baseline=baseline.name,
                baseline_seconds=baseline.median,
                candidate=side.name,
                candidate_seconds=side.median,
                bound="" if bound is None else f"at least {bound:g} x faster",
                holds=bound is None or baseline.median >= bound * side.median,
            )
        )
    return found


def plot(found: list[Comparison], path: Path) -> None:
    """Bars of how many times faster than the hand-written merge, one group per case."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - only where a picture is wanted

    cases = list(dict.fromkeys(row.case for row in found))
    names = list(dict.fromkeys(row.candidate for row in found))
    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        faster = [1 / next(r.ratio for r in found if (r.case, r.candidate) == (case, name)) for case in cases]
        bars = axes.bar([x + i * width for x in range(len(cases))], faster, width, label=name)
        axes.bar_label(bars, fmt="%.1f")
    axes.axhline(1, color="black", linewidth=1)
    axes.set_yscale("log")
    axes.set_xticks([x + 0.4 - width / 2 for x in range(len(cases))], cases)
    axes.set_ylabel("times faster than the hand-written merge")
    axes.legend()
    figure.savefig(path, dpi=120)
