"""Bytes that a merge of recent keys reads, beside those of a MERGE that says nothing of where its rows are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from common import Bench, Comparison, deduped, hand_written, sink_on, timed
from pyspark.sql import DataFrame, SparkSession

from stream_merge.spark.jvm import in_session

ROWS, DAYS, EVENTS = 5_000_000, 200, 5_000
LAST = DAYS - 1
"""The last day; each has a file of its own."""
PRUNING_RUNS = 5
"""At most: a side without pruning reads, and often writes, the whole table."""
BOUND = 4.0

PAYLOAD = ("uuid() AS a", "cast(rand() * 1e15 AS bigint) AS b", "uuid() AS c", "current_timestamp() AS ts")
"""As the columns of the other benches, with values that do not shrink."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Case:
    said: str
    key: str
    """SQL: a row's id, by its number `n` and its `day`."""
    days: str
    """SQL: the day of an event, by `pick` in [0, 1)."""
    keys: Sequence[str] = ("id",)
    partitioned: bool = False
    settings: Mapping[str, Any]
    bound: float = BOUND


CASES = (
    _Case(
        said="keys that grow with time, events of the last day: key bounds",
        key="n",
        days=str(LAST),
        settings={},
    ),
    _Case(
        said="random ids beside a day, events of two days: values of partitions",
        key="xxhash64(n)",
        days=f"if(pick < 0.5, 3, {LAST})",
        keys=("id", "day"),
        partitioned=True,
        settings={},
    ),
    _Case(
        said="keys that grow with time, events of the last day: target_filter, and its look at what is outside",
        key="n",
        days=str(LAST),
        partitioned=True,
        settings={"target_filter": f"t.day >= {LAST}"},
    ),
    _Case(
        said="random ids, events of the last day: target_filter, whose look reads every key outside",
        key="xxhash64(n)",
        days=str(LAST),
        partitioned=True,
        settings={"target_filter": f"t.day >= {LAST}"},
        bound=0.5,
    ),
)


def pruning(bench: Bench, chosen: Sequence[int] | None = None) -> list[Comparison]:
    """Sinks on Spark beside the MERGE that people write, which joins by key alone.

    Args:
        bench: where tables and batches come from.
        chosen: only these cases, from 0; None: all.
    """
    bench.runs = min(bench.runs, PRUNING_RUNS)
    return [_measured(bench, case, n) for n, case in enumerate(CASES) if not chosen or n in chosen]


def _measured(bench: Bench, case: _Case, number: int) -> Comparison:
    spark = bench.spark
    table = bench.folder / f"pruning_{number}"
    rows = spark.range(0, ROWS, 1, 8).selectExpr("id AS n", f"cast(id * {DAYS} div {ROWS} AS int) AS day")
    writer = (
        rows.selectExpr(f"{case.key} AS id", "1L AS lsn", *PAYLOAD, "day")
        .repartitionByRange(DAYS, "day")
        .write.format("delta")
        .option("delta.enableChangeDataFeed", "true")
    )
    (writer.partitionBy("day") if case.partitioned else writer).save(str(table))
    by_hand, pruned = (bench.copy(table, side) for side in ("by_hand", "pruned"))
    session = bench.session_by_hand()
    sink = sink_on(pruned, keys=list(case.keys), tombstones=False, engine="spark", **case.settings)
    reads = _Reads(spark)
    bytes_read: dict[str, list[_Bytes]] = {"hand": [], "sink": []}

    def batch() -> DataFrame:
        bench.batch_id += 1
        picked = (
            spark.range(EVENTS)
            .selectExpr("rand() AS pick", "rand() AS of_day")
            .selectExpr(f"{case.days} AS day", "of_day")
        )
        per_day = ROWS // DAYS
        numbered = picked.selectExpr("day", f"cast((day + of_day) * {per_day} AS bigint) AS n")
        stamped = numbered.selectExpr(
            f"{case.key} AS id", f"{bench.batch_id + 1}L AS lsn", *PAYLOAD, "day", "'u' AS op"
        )
        return stamped.localCheckpoint()

    def merge_by_hand(events: DataFrame) -> object:
        same_keys = "".join(f" AND t.{key} = s.{key}" for key in case.keys[1:])
        return hand_written(session, by_hand, deduped(in_session(events, session)), same_keys, also=["day"])

    def side(label: str, merge: Callable[[DataFrame], object]) -> Callable[[DataFrame], float]:
        def run(events: DataFrame) -> float:
            reads.since()
            took = timed(lambda: merge(events))
            bytes_read[label].append(reads.since())
            return took

        return run

    hand_seconds, sink_seconds = bench.alternate(
        batch,
        side("hand", merge_by_hand),
        side("sink", lambda events: sink(events, bench.batch_id)),
    )
    hand, through = (_Bytes.usual(bytes_read[label]) for label in ("hand", "sink"))
    return Comparison(
        case=f"{ROWS:,} rows, {EVENTS:,} events; {case.said}",
        baseline="MERGE by key alone",
        baseline_seconds=hand_seconds,
        candidate="the sink on Spark",
        candidate_seconds=sink_seconds,
        bound=f"at least {case.bound:g} x fewer bytes of the table read",
        holds=hand.table >= case.bound * through.table,
        phases=f"{through}, beside {hand}: {hand.table / through.table:.1f} x fewer of the table",
    )


@dataclass(frozen=True, slots=True)
class _Bytes:
    """Read by a batch: of the table (data files and log, with the little that the JVM reads beside), and of shuffles.

    A merge shuffles the rows that it writes, whatever it has pruned.
    """

    table: int
    shuffled: int

    @classmethod
    def usual(cls, batches: Sequence[_Bytes]) -> _Bytes:
        return cls(int(median(b.table for b in batches)), int(median(b.shuffled for b in batches)))

    def __str__(self) -> str:
        return f"{self.table / 1e6:.1f} MB of the table and {self.shuffled / 1e6:.1f} MB of shuffles"


class _Reads:
    """What the JVM has read since the last look.

    Told by the kernel (Linux), less what Spark says that its shuffles were. Spark's `inputBytes` are what a task's own
    thread reads; ranges of Parquet are read by others (Hadoop 3.5).
    """

    def __init__(self, spark: SparkSession) -> None:
        jvm: Any = spark._jvm
        self._counters = Path("/proc", str(jvm.java.lang.ProcessHandle.current().pid()), "io")
        self._context: Any = spark.sparkContext._jsc.sc()
        self._last = (0, 0)

    def since(self) -> _Bytes:
        """Bytes read after the last look."""
        self._context.listenerBus().waitUntilEmpty()
        everything = int(dict(line.split(": ") for line in self._counters.read_text().splitlines())["rchar"])
        shuffled = self._context.statusStore().executorSummary("driver").totalShuffleRead()
        before, self._last = self._last, (everything, shuffled)
        of_shuffles = shuffled - before[1]
        return _Bytes(everything - before[0] - of_shuffles, of_shuffles)
