"""What a batch costs on S3: seconds at a latency of each request, and requests, beside a hand-written merge."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from common import DEFAULT_CONFS, Bench, Comparison, deduped, hand_written, sink_on, timed
from pyspark.sql import DataFrame
from services import SPARK_JARS, missing, running
from services.s3 import Bucket, S3Server
from services.s3_proxy import Request, S3Proxy, by_kind

from stream_merge.jobs.kafka import jars
from stream_merge.model.snapshot import VECTORS_PROPERTY
from stream_merge.spark.jvm import in_session, owned_session
from stream_merge.spark.log_store import log_store_confs

ROWS, EVENTS = 20_000, 1_000
WARM_UP = 3
NAIVE = "naive"
WAYS = ("mark", "rewrite", "spark")
SLOWEST = {0.02: 1.0, 0.08: 2.5}
"""Seconds that a call in the driver may take, by the seconds that a request takes."""
PRICES = {"PUT": 0.005, "LIST": 0.005, "POST": 0.005, "GET": 0.0004, "HEAD": 0.0004, "DELETE": 0.0}
"""Dollars for 1,000 requests: Amazon's list, standard storage in us-east-1."""


def s3_confs() -> dict[str, str]:
    """Those of a session that reaches S3; none where the jars for it are not there."""
    return {} if missing() else log_store_confs(jars.conf(str(SPARK_JARS)))


@dataclass(kw_only=True, slots=True)
class _Side:
    merge: Callable[[DataFrame], object]
    seconds: list[float] = field(default_factory=list)
    requests: list[list[Request]] = field(default_factory=list)

    def steady(self) -> float:
        """Median of the calls after the first ones."""
        return statistics.median(self.seconds[WARM_UP:])


def on_s3(bench: Bench, latencies: Sequence[float]) -> list[Comparison]:
    """1,000 events with 10 % deletes for 20,000 rows, each engine and by hand, at each latency."""
    if missing():
        sys.stderr.write(f"no comparison on S3: {missing()}\n")
        return []
    found: list[Comparison] = []
    with slow_bucket(bench) as (proxy, bucket):
        for latency in latencies:
            proxy.delay(0)
            sides = _sides(bench, bucket, f"{latency}")
            proxy.delay(latency)
            for _ in range(WARM_UP + bench.runs):
                batch = bench.events(EVENTS, 0, ROWS + ROWS // 10, deletes=True)
                for side in sides.values():
                    with proxy.counted() as requests:
                        side.seconds.append(timed(partial(side.merge, batch)))
                    side.requests.append(requests)
            found += [_compared(name, sides, latency) for name in WAYS]
            _show_requests(sides)
    return found


@contextmanager
def slow_bucket(bench: Bench) -> Iterator[tuple[S3Proxy, Bucket]]:
    """A bucket that Spark knows of, and what makes its answers late."""
    server = S3Server(bench.folder / "server")
    proxy = S3Proxy(server, bench.folder / "proxy")
    with running(server, proxy):
        bucket = proxy.bucket("bench")
        bucket.tell(bench.spark)
        yield proxy, bucket


def _sides(bench: Bench, bucket: Bucket, label: str) -> dict[str, _Side]:
    session = owned_session(bench.spark)
    for key, value in DEFAULT_CONFS.items():
        session.conf.set(key, value)
    by_hand = make_table(bench, bucket.uri(f"{label}/naive"), vectors=False)
    sides = {NAIVE: _Side(merge=lambda batch: hand_written(session, by_hand, deduped(in_session(batch, session))))}
    for way in WAYS:
        target = make_table(bench, bucket.uri(f"{label}/{way}"), vectors=way == "mark")
        sink = sink_on(target, engine="spark" if way == "spark" else "driver")

        def merge(batch: DataFrame, sink: object = sink, way: str = way) -> None:
            sink(batch, bench.batch_id)
            if way not in (sink.last_result.mode, sink.last_result.engine):
                msg = f"a batch was not merged by {way}: {sink.last_result.plan}"
                raise AssertionError(msg)

        sides[way] = _Side(merge=merge)
    return sides


def make_table(bench: Bench, target: str, *, vectors: bool) -> str:
    """The table that batches are merged into; where it lies."""
    rows = bench.spark.range(0, ROWS, 1, 1).selectExpr(
        "id", "1L AS lsn", "uuid() AS a", "id * 2 AS b", "'constant' AS c", "current_timestamp() AS ts"
    )
    writer = rows.write.format("delta").option("delta.enableChangeDataFeed", "true")
    writer.option(VECTORS_PROPERTY, str(vectors).lower()).save(target)
    return target


def _compared(name: str, sides: dict[str, _Side], latency: float) -> Comparison:
    limit = None if name == "spark" else SLOWEST.get(latency)
    seconds = sides[name].steady()
    return Comparison(
        case=f"{EVENTS:,} events, {ROWS:,} rows on S3, {latency * 1000:.0f} ms a request",
        baseline="hand-written MERGE, default confs",
        baseline_seconds=sides[NAIVE].steady(),
        candidate=name,
        candidate_seconds=seconds,
        bound="" if limit is None else f"at most {limit} s",
        holds=limit is None or seconds <= limit,
        phases=f"{sides[name].seconds[0]:.2f} s for the first batch",
    )


def _show_requests(sides: dict[str, _Side]) -> None:
    """Of the first batch, of a later one (median), and what a million events cost by the mean of the later ones."""
    print(f"{'':15} first  later  dollars per million events  kinds of the later ones, mean")
    for name, side in sides.items():
        later = side.requests[WARM_UP:]
        kinds = sum(map(by_kind, later), start=by_kind([]))
        dollars = sum(PRICES[kind] * count for kind, count in kinds.items()) / 1_000 / len(later) * 1_000_000 / EVENTS
        counts = ", ".join(f"{kind} {count / len(later):.1f}" for kind, count in sorted(kinds.items()))
        median = statistics.median(map(len, later))
        print(f"{name:15} {len(side.requests[0]):5}  {median:5.0f}  {dollars:26.3f}  {counts}")
