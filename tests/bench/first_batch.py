"""What a process' first batch takes on S3, beside the same on the local disk: a JVM of its own for each."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from common import Bench, Comparison, sink_on, timed
from s3 import EVENTS, ROWS, make_table, s3_confs, slow_bucket
from services import missing, tell_hadoop

from stream_merge.session import local_session

ROUNDS = 3
BOUND = 2.5


def first_batch(bench: Bench, latencies: Sequence[float]) -> list[Comparison]:
    """The call of a sink that has merged before, in a new process, at each latency (seconds a request)."""
    if missing():
        sys.stderr.write(f"no comparison on S3: {missing()}\n")
        return []
    seconds: dict[float | None, list[float]] = {place: [] for place in (None, *latencies)}
    requests: list[int] = []
    with slow_bucket(bench) as (proxy, bucket):
        targets = {
            place: str(bench.folder / "local") if place is None else bucket.uri(f"at/{place}") for place in seconds
        }
        for target in targets.values():
            _prepare(bench, target)
        for _ in range(ROUNDS):
            bench.batch_id += 1
            for place, target in targets.items():
                proxy.delay(place or 0)
                with proxy.counted() as counted:
                    seconds[place].append(_in_a_process(target, bench.batch_id, bucket.settings()))
                if place is not None:
                    requests.append(len(counted))
    local = statistics.median(seconds[None])
    return [
        Comparison(
            case=f"first batch of a process, {EVENTS:,} events, {ROWS:,} rows",
            baseline="local disk",
            baseline_seconds=local,
            candidate=f"S3, {latency * 1000:.0f} ms a request",
            candidate_seconds=statistics.median(seconds[latency]),
            bound=f"at most {BOUND:g} x and the latency of its requests",
            holds=statistics.median(seconds[latency]) <= BOUND * local + statistics.median(requests) * latency,
            phases=f"{statistics.median(requests):.0f} requests",
        )
        for latency in latencies
    ]


def _prepare(bench: Bench, target: str) -> None:
    """A table with remembered deletes and a quarantine's place, as a job leaves it."""
    sink = sink_on(make_table(bench, target, vectors=True))
    for _ in range(3):
        sink(bench.events(EVENTS, 0, ROWS + ROWS // 10, deletes=True), bench.batch_id)


def _in_a_process(target: str, batch_id: int, settings: Mapping[str, str]) -> float:
    asked = json.dumps({"target": target, "batch_id": batch_id, "settings": dict(settings)})
    child = subprocess.run([sys.executable, __file__], input=asked, stdout=subprocess.PIPE, text=True, check=True)
    return float(child.stdout.splitlines()[-1])


def _child() -> None:
    asked = json.loads(sys.stdin.read())
    spark = local_session("stream_merge first batch", memory="2g", confs=s3_confs())
    tell_hadoop(spark, asked["settings"])
    bench = Bench(spark, Path(), 1)
    bench.batch_id = asked["batch_id"] - 1
    batch = bench.events(EVENTS, 0, ROWS + ROWS // 10, deletes=True)
    sink = sink_on(asked["target"])
    print(timed(lambda: sink(batch, bench.batch_id)))
    spark.stop()


if __name__ == "__main__":
    _child()
