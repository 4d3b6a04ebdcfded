"""What the sink costs: beside a bare MERGE, a hand-written one, bare delta-rs, and in streams that run for long.

    make bench                                 all comparisons, printed as tables
    make bench ARGS="--json FILE --png FILE"   and written as JSON and drawn

All sides of a comparison run alternately in one JVM on copies of one table, so that the machine's
noise hits them alike. Ratios count; seconds are only as good as the machine.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from common import DEFAULT_CONFS, Bench, Comparison, deduped, hand_written, show, sink_on, timed
from driver import grid, growth, memory
from engines import CASES, measure, plot, rows_of
from first_batch import first_batch
from maintenance import maintenance
from on_read import growth_on_read, on_read
from on_read_long import debt, memory_on_read, random_stream
from pruning import pruning
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from s3 import on_s3, s3_confs
from shapes import matched_only, snapshot
from streams import end_to_end, fleet, year

from stream_merge.model.results import PHASES, Phase
from stream_merge.model.settings import Engine
from stream_merge.session import local_session
from stream_merge.spark.jvm import in_session, owned_session

SINKS: dict[str, Engine] = {"sink": "auto", "sink on Spark": "spark"}


def sink_and_bare(
    bench: Bench,
    case: str,
    table: Path,
    events: Callable[[], DataFrame],
    *,
    tombstones: bool,
    bound: Callable[[float], float],
) -> list[Comparison]:
    """The sink's call, as shipped and on Spark alone, beside a MERGE that gets the deduped rows for free."""
    bare_table = bench.copy(table, "bare")
    session = bench.session_by_hand()
    sinks = {
        label: sink_on(bench.copy(table, f"sink_{engine}"), tombstones=tombstones, engine=engine)
        for label, engine in SINKS.items()
    }
    phases: dict[str, dict[Phase, list[float]]] = {label: {phase: [] for phase in PHASES} for label in sinks}

    def bare(batch: DataFrame) -> float:
        source = in_session(deduped(batch).localCheckpoint(), session)
        least, greatest = source.agg(F.min("id"), F.max("id")).collect()[0]
        return timed(lambda: hand_written(session, bare_table, source, f" AND t.id BETWEEN {least} AND {greatest}"))

    def through(label: str, batch: DataFrame) -> float:
        took = timed(lambda: sinks[label](batch, bench.batch_id))
        for phase, seconds in result.seconds.items() if (result := sinks[label].last_result) else ():
            phases[label][phase].append(seconds)
        return took

    bare_seconds, *sink_seconds = bench.alternate(events, bare, *(partial(through, label) for label in sinks))
    limit = bound(bare_seconds)
    return [
        Comparison(
            case=case,
            baseline="bare MERGE of the deduped rows",
            baseline_seconds=bare_seconds,
            candidate=label,
            candidate_seconds=seconds,
            bound=f"at most {limit:.2f} s",
            holds=seconds <= limit,
            phases=", ".join(
                f"{phase} {statistics.median(s):.3f}" for phase, s in phases[label].items() if max(s) >= 0.001
            ),
        )
        for label, seconds in zip(sinks, sink_seconds, strict=True)
    ]


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


LONG_EVENTS = 100_000
"""Batches from this size on are merged three times only."""


def preset(bench: Bench, _: argparse.Namespace) -> list[Comparison]:
    """The session preset on a tiny table."""
    tiny = bench.table(20_000, 1)
    return [default_and_preset(bench, tiny, lambda: bench.events(1_000, 0, 22_000, deletes=True))]


def tiny(bench: Bench, _: argparse.Namespace) -> list[Comparison]:
    """What the sink adds on a tiny table."""
    return sink_and_bare(
        bench,
        "20 k rows, 1,000 upserts, empty tombstones",
        bench.table(20_000, 1),
        lambda: bench.events(1_000, 0, 22_000, deletes=False),
        tombstones=True,
        bound=lambda bare: bare + 0.35,
    )


def large(bench: Bench, args: argparse.Namespace) -> list[Comparison]:
    """What the sink adds on a large table."""
    return sink_and_bare(
        bench,
        f"{args.rows:,} rows, 10,000 recent events, tombstones off",
        bench.table(args.rows, 16),
        lambda: bench.events(10_000, int(args.rows * 0.95), args.rows + args.rows // 200, deletes=True),
        tombstones=False,
        bound=lambda bare: 1.15 * bare + 0.3,
    )


def engines(bench: Bench, args: argparse.Namespace) -> list[Comparison]:
    """The four cases beside the hand-written merge."""
    found: list[Comparison] = []
    for number, case in enumerate(CASES):
        if args.case and number not in args.case:
            continue
        long = case.events >= LONG_EVENTS
        table = bench.table(case.rows, case.files)
        sides = measure(bench, case, table, runs=3 if long else args.runs, warm_up=1 if long else 2)
        measured = rows_of(case, sides)
        show(measured)
        found += measured
    if args.png:
        plot(found, args.png)
    return found


COMPARISONS: dict[str, Callable[[Bench, argparse.Namespace], list[Comparison]]] = {
    "preset": preset,
    "tiny": tiny,
    "large": large,
    "engines": engines,
    "grid": lambda bench, _: grid(bench),
    "growth": lambda bench, _: growth(bench),
    "memory": lambda bench, _: memory(bench),
    "stream": lambda bench, _: end_to_end(bench),
    "fleet": lambda bench, _: fleet(bench),
    "matched-only": lambda bench, args: matched_only(bench, args.case),
    "pruning": lambda bench, args: pruning(bench, args.case),
    "on-read": lambda bench, args: on_read(bench, args.case),
    "growth-on-read": lambda bench, _: growth_on_read(bench),
    "s3": lambda bench, args: on_s3(bench, [ms / 1000 for ms in args.latency or (20, 80)]),
    "first-batch": lambda bench, args: first_batch(bench, [ms / 1000 for ms in args.latency or (20, 80)]),
    "random-stream": lambda bench, _: random_stream(bench),
    "memory-on-read": lambda bench, _: memory_on_read(bench),
    "debt": lambda bench, args: debt(bench, args.random_batches),
    "snapshot": lambda bench, _: snapshot(bench),
    "maintenance": lambda bench, args: maintenance(bench, args.calls, args.png),
    "year": lambda bench, args: year(bench, args.batches),
}


def main() -> None:
    """Run the comparisons and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=9, help="counted rounds per comparison")
    parser.add_argument("--rows", type=int, default=5_000_000, help="rows of the large table")
    parser.add_argument("--batches", type=int, default=5_000, help="commits of the year")
    parser.add_argument("--calls", type=int, default=1_000, help="batches of the comparison of maintenance")
    parser.add_argument("--random-batches", type=int, default=3_000, help="batches of the comparison of debt")
    parser.add_argument(
        "--latency", type=float, action="append", help="milliseconds that a request to S3 takes longer; 20 and 80"
    )
    parser.add_argument("--only", choices=tuple(COMPARISONS), action="append", help="these comparisons alone")
    parser.add_argument(
        "--case", type=int, action="append", help="only these cases of a comparison that has several, from 0"
    )
    parser.add_argument("--png", type=Path, help="also draw the engines here, and maintenance beside it")
    parser.add_argument("--json", type=Path, help="also write the results here")
    args = parser.parse_args()
    wanted = args.only or tuple(COMPARISONS)
    spark = local_session(
        "stream_merge bench", memory="4g", confs=s3_confs() if {"s3", "first-batch"} & set(wanted) else {}
    )
    found: list[Comparison] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in wanted:
            place = Path(folder, name)
            place.mkdir()
            measured = COMPARISONS[name](Bench(spark, place, args.runs), args)
            show(measured)
            found += measured
            shutil.rmtree(place)
            if args.json:
                rows = [{**asdict(row), "ratio": row.ratio} for row in found]
                args.json.write_text(json.dumps(rows, indent=2) + "\n")
    spark.stop()


if __name__ == "__main__":
    main()
