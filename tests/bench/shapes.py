"""What shapes cost: clauses that only update beside an upsert, and a whole copy beside the MERGE written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from common import STORED, Bench, Comparison, timed
from delta.tables import DeltaTable
from prometheus_client import CollectorRegistry
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from stream_merge import MergeMetrics, MergeSink
from stream_merge.shapes import Clauses, Snapshot, when_matched, when_not_matched
from stream_merge.spark.jvm import in_session

MATCHED_CASES = ((1_000_000, 16, 10_000), (5_000_000, 32, 10_000), (5_000_000, 32, 100_000))
"""Rows, files, and events with keys from anywhere in the table."""
MATCHED_RUNS = 5
"""At most: every file is written again by each."""


def matched_only(bench: Bench, chosen: Sequence[int] | None = None) -> list[Comparison]:
    """Clauses that only update beside the same with an insert, for batches whose keys are all there.

    Args:
        bench: where tables and batches come from.
        chosen: only these cases, from 0; None: all.
    """
    found = []
    bench.runs = min(bench.runs, MATCHED_RUNS)
    update = when_matched("s.lsn > t.lsn").update_all()
    for rows, files, events in (case for number, case in enumerate(MATCHED_CASES) if not chosen or number in chosen):
        table = bench.table(rows, files)
        upsert, only = (
            MergeSink(
                target=bench.copy(table, label),
                keys="id",
                sequence_by="lsn",
                except_column_list=["op"],
                shape=Clauses(clauses),
                engine="spark",
                app_id="bench",
                metrics=MergeMetrics(CollectorRegistry()),
            )
            for label, clauses in (("upsert", [update, when_not_matched().insert_all()]), ("only", [update]))
        )
        make = partial(_as_delivered, bench, events, rows)
        through = (partial(_through, bench, sink) for sink in (upsert, only))
        upsert_seconds, only_seconds = bench.alternate(make, *through)
        found.append(
            Comparison(
                case=f"{rows:,} rows in {files} files, {events:,} random keys that are there",
                baseline="clauses with an insert",
                baseline_seconds=upsert_seconds,
                candidate="clauses that only update",
                candidate_seconds=only_seconds,
                bound="at least 1.3 x faster",
                holds=upsert_seconds >= 1.3 * only_seconds,
                phases=f"{_done(only)}; with an insert: {_done(upsert)}",
            )
        )
    return found


def _as_delivered(bench: Bench, events: int, rows: int) -> DataFrame:
    """A batch of which Spark knows no size, as of those that a query delivers (`ForeachBatchSink`, Spark 4.2)."""
    made = bench.events(events, 0, rows, deletes=False)
    inside = bench.spark._jsparkSession.internalCreateDataFrame(
        made._jdf.queryExecution().toRdd(), made._jdf.schema(), False
    )
    return DataFrame(inside, bench.spark)


SNAPSHOT_ROWS, SNAPSHOT_FILES = 1_000_000, 8
SNAPSHOT_RUNS = 5
"""At most: a copy takes ten seconds and more on each side."""


def snapshot(bench: Bench) -> list[Comparison]:
    """A whole copy, 1 % of it new, changed or gone, by `Snapshot()` and by the MERGE that people write for it."""
    table = bench.table(SNAPSHOT_ROWS, SNAPSHOT_FILES)
    bench.runs = min(bench.runs, SNAPSHOT_RUNS)
    return [_snapshot(bench, str(table), vectors=vectors) for vectors in (False, True)]


def _snapshot(bench: Bench, table: str, *, vectors: bool) -> Comparison:
    how = "deletion vectors" if vectors else "copy-on-write"
    targets = [bench.copy(bench.table(SNAPSHOT_ROWS, SNAPSHOT_FILES), side) for side in ("by_hand", "snapshot")]
    if vectors:
        for target in targets:
            bench.spark.sql(f"ALTER TABLE delta.`{target}` SET TBLPROPERTIES (delta.enableDeletionVectors = true)")
    session = bench.session_by_hand()
    metrics = MergeMetrics(CollectorRegistry())
    sink = MergeSink(target=targets[1], keys="id", shape=Snapshot(), app_id="bench", metrics=metrics)
    copied: list[int] = []

    def by_hand(copy: DataFrame) -> float:
        return timed(lambda: _whole_by_hand(session, targets[0], in_session(copy, session)))

    def by_sink(copy: DataFrame) -> float:
        took = _through(bench, sink, copy)
        if sink.last_result is not None:
            copied.append(sink.last_result.metrics["numTargetRowsCopied"])
        return took

    hand_seconds, sink_seconds = bench.alternate(_Copies(bench, table).another, by_hand, by_sink)
    return Comparison(
        case=f"copy of {SNAPSHOT_ROWS:,} rows in {SNAPSHOT_FILES} files, 1 % differs, {how}",
        baseline="MERGE by hand, preset",
        baseline_seconds=hand_seconds,
        candidate="Snapshot()",
        candidate_seconds=sink_seconds,
        bound="at most 1.5 x" + (", no unchanged row written" if vectors else ""),
        holds=sink_seconds <= 1.5 * hand_seconds and not (vectors and any(copied)),
        phases=f"{_done(sink)}; unchanged rows written by all copies: {sum(copied):,}",
    )


class _Copies:
    """Copies of one table as they come day by day: to each another 0.8 % has changed, 0.1 % is new and 0.1 % gone."""

    def __init__(self, bench: Bench, table: str) -> None:
        self._bench = bench
        self._rows = bench.spark.read.format("delta").load(table).localCheckpoint()
        self._day = 0

    def another(self) -> DataFrame:
        """The next day's, evaluated."""
        self._day += 1
        self._bench.batch_id += 1
        kept = self._rows.where(f"pmod(hash(id, 'gone'), 1000) >= {self._day}")
        added = self._bench.spark.range(SNAPSHOT_ROWS, SNAPSHOT_ROWS + self._day * SNAPSHOT_ROWS // 1_000, 1, 1)
        new = added.selectExpr(
            "id", "1L AS lsn", "'new' AS a", "id * 2 AS b", "'constant' AS c", "timestamp'2026-01-01' AS ts"
        )
        days = [F.expr(f"if(pmod(hash(id, {day}), 1000) < 8, {day}, 0)") for day in range(1, self._day + 1)]
        changed = F.greatest(F.lit(0), *days)
        with_changes = kept.unionByName(new).withColumns(
            {
                "lsn": F.col("lsn") + changed,
                "a": F.when(changed > 0, F.concat(F.lit("changed "), changed)).otherwise(F.col("a")),
            }
        )
        return with_changes.localCheckpoint()


def _whole_by_hand(session: SparkSession, target: str, copy: DataFrame) -> object:
    values = {name: f"s.{name}" for name in STORED}
    differs = " OR ".join(f"NOT (s.{name} <=> t.{name})" for name in STORED if name != "id")
    return (
        DeltaTable.forPath(session, target)
        .alias("t")
        .merge(copy.alias("s"), "t.id = s.id")
        .whenMatchedUpdate(differs, values)
        .whenNotMatchedInsert(values=values)
        .whenNotMatchedBySourceDelete()
        .execute()
    )


def _through(bench: Bench, sink: MergeSink, batch: DataFrame) -> float:
    return timed(lambda: sink(batch, bench.batch_id))


def _done(sink: MergeSink) -> str:
    """Where the last call's seconds went, and Delta's own split of its MERGE."""
    result = sink.last_result
    if result is None:
        return "nothing"
    phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in result.seconds.items() if seconds >= 0.01)
    scan, rewrite = (result.metrics.get(name, 0) / 1000 for name in ("scanTimeMs", "rewriteTimeMs"))
    return f"{phases} (Delta: scan {scan:.2f}, rewrite {rewrite:.2f})"
