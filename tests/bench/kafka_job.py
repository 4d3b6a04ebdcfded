"""A job from Kafka beside a hand-written `row_number` + MERGE and beside a plain append, on one real broker.

    make bench-kafka                                      2 M events into a table of 1 M rows
    make bench-kafka ARGS="--events 20000 --rows 50000"   the same, small
    make bench-kafka ARGS="--json FILE --png FILE"        and written as JSON and drawn

Each side runs in a process and a Spark of its own, one after the other, and reads the same topic. Ratios
count; seconds are only as good as the machine. (Not `kafka.py`: that is the name of the client's package.)
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kafka import KafkaAdminClient
from kafka_events import AVRO_KEY, AVRO_VALUE, PARTITIONS
from kafka_sides import IN_AVRO, JOB_TABLE, LIMIT_BYTES, TOPIC, WARM_TOPIC, Measured, Plan
from kafka_steady import TOPIC as STEADY_TOPIC
from kafka_steady import Latency, steady
from rich.console import Console
from rich.table import Table
from services import Broker, missing, running
from services import registry as schema_registry

BOUNDS = {"small": 4.0, "large": 1.5}
"""How many times the hand-written merge's event rate the job has to have."""
SIDES = ("by hand", "append", "job", "avro")
MOST_TIMES_JSON = 1.3
"""How many times the time per event of JSON the job may take for Avro."""
LEAN = {"ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "2"}
"""Otherwise Arrow's and glibc's allocators reserve 2 GB of addresses that they do not use, and a limit counts them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """One side over one size of micro-batches."""

    case: str
    side: str
    events: int
    batches: int
    seconds: float
    times_by_hand: float | None
    share_of_append: float | None
    bound: float | None
    about: dict[str, Any]

    @property
    def per_second(self) -> float:
        """Events per second."""
        return self.events / self.seconds

    @property
    def holds(self) -> bool:
        """Whether the bound is kept; always, where there is none."""
        return self.bound is None or (self.times_by_hand or 0.0) >= self.bound


def measured_by(plan: Plan, side: str) -> dict[str, Measured]:
    """Run one side in a process of its own."""
    script = Path(__file__).with_name("kafka_sides.py")
    environment = {**os.environ, **(LEAN if side == "limited" else {})}
    said = Path(plan.folder, f"{side}.log")
    with said.open("wb") as output:
        command = [sys.executable, str(script), side, plan.folder]
        done = subprocess.run(command, check=False, env=environment, stdout=output, stderr=output)
    if done.returncode:
        msg = f"{side} ended with {done.returncode}: {said.read_text(errors='replace')[-4000:]}"
        raise AssertionError(msg)
    found = json.loads(Path(plan.folder, f"{side}.json").read_text())
    return {name: Measured(**one) for name, one in found.items()}


def rates(plan: Plan, sides: dict[str, dict[str, Measured]]) -> list[Rate]:
    """All sides beside each other."""
    found = []
    for case, label in (("small", f"{plan.batch:,} events per batch"), ("large", f"{plan.events:,} in one batch")):
        per_second = {side: of_side[case].events / of_side[case].seconds for side, of_side in sides.items()}
        for side, of_side in sides.items():
            one = of_side[case]

            def beside(other: str, side: str = side, per_second: dict[str, float] = per_second) -> float | None:
                return None if other not in per_second else per_second[side] / per_second[other]

            found.append(
                Rate(
                    case=label,
                    side=side,
                    events=one.events,
                    batches=one.batches,
                    seconds=one.seconds,
                    times_by_hand=beside("by hand"),
                    share_of_append=beside("append"),
                    bound=BOUNDS[case] if side == "job" and "by hand" in sides else None,
                    about=one.about,
                )
            )
    return found


def same_rows(sides: dict[str, dict[str, Measured]]) -> dict[str, bool]:
    """Runs that merged all events: whether their table is the one that the job made batch by batch."""
    complete = {
        f"{side}, {case}": (one.rows, one.fingerprint)
        for side, of_side in sides.items()
        for case, one in of_side.items()
        if side != "append" and not (side == "by hand" and case == "small")
    }
    wanted = complete.pop("job, small", None)
    return {} if wanted is None else {name: found == wanted for name, found in complete.items()}


def show(found: list[Rate]) -> None:
    """Print the rates as a table."""
    table = Table(
        "micro-batches", "side", "batches", "events", "s", "events/s", "x by hand", "of append", "bound", "holds"
    )
    for row in found:
        table.add_row(
            row.case,
            row.side,
            f"{row.batches:,}",
            f"{row.events:,}",
            f"{row.seconds:.1f}",
            f"{row.per_second:,.0f}",
            "" if row.times_by_hand is None else f"{row.times_by_hand:.2f}",
            "" if row.share_of_append is None else f"{row.share_of_append:.0%}",
            "" if row.bound is None else f"at least {row.bound:g} x",
            "" if row.bound is None else "yes" if row.holds else "NO",
        )
    console = Console(width=160)
    console.print(table)
    for row in found:
        if row.about:
            console.print(f"{row.case}, {row.side}: {row.about}", highlight=False)


def plot(found: list[Rate], path: Path) -> None:
    """Bars of events per second, one group per size of micro-batches."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - only where a picture is wanted

    cases, sides = (list(dict.fromkeys(getattr(row, name) for row in found)) for name in ("case", "side"))
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(sides)
    for i, side in enumerate(sides):
        per_second = [next(r.per_second for r in found if (r.case, r.side) == (case, side)) for case in cases]
        bars = axes.bar([x + i * width for x in range(len(cases))], per_second, width, label=side)
        axes.bar_label(bars, fmt="{:,.0f}")
    axes.set_xticks([x + 0.4 - width / 2 for x in range(len(cases))], cases)
    axes.set_ylabel("events per second, Kafka to Delta")
    axes.legend()
    figure.savefig(path, dpi=120)


def bench(plan: Plan, args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Everything, with the broker running."""
    admin = KafkaAdminClient(bootstrap_servers=plan.bootstrap)
    names = (TOPIC, WARM_TOPIC, STEADY_TOPIC, *IN_AVRO.values())
    admin.create_topics({name: {"num_partitions": PARTITIONS, "replication_factor": 1} for name in names})
    admin.close()
    produced = measured_by(plan, "prepare")["produced"]
    say(f"{produced.events:,} events in the topic, {produced.seconds:.0f} s")
    wanted = args.only or (*SIDES, "steady", "limited")
    sides: dict[str, dict[str, Measured]] = {}
    result: dict[str, Any] = {"events": plan.events, "rows": plan.rows}
    for side in [side for side in SIDES if side in wanted and (side != "avro" or plan.registry)]:
        sides[side] = measured_by(plan, side)
        say(f"measured: {side}")
    if "avro" in sides and "job" in sides:
        for case, one in sides["avro"].items():
            times = one.seconds / one.events / (sides["job"][case].seconds / sides["job"][case].events)
            result[f"avro_{case}"] = times
            say(f"Avro, {case} batches: {times:.2f} x the time per event of JSON (at most {MOST_TIMES_JSON:g} x)")
    if sides:
        found = rates(plan, sides)
        show(found)
        result["rates"] = [{**asdict(row), "events_per_second": row.per_second, "holds": row.holds} for row in found]
        if args.png:
            plot(found, args.png)
    if "steady" in wanted:
        target = Path(plan.folder, "steady")
        shutil.copytree(Path(plan.folder, JOB_TABLE), target)
        latency = steady(Path(plan.folder), plan.bootstrap, target, rows=plan.rows, seconds=args.seconds)
        say(described(latency))
        result["latency"] = asdict(latency)
    if "limited" in wanted:
        sides["limited"] = measured_by(plan, "limited")
        one = sides["limited"]["large"]
        say(
            f"{one.events:,} events in one batch, 2 GiB heap, Python limited to {LIMIT_BYTES >> 20:,} MiB: finished"
            f" in {one.seconds:.0f} s, {one.about}"
        )
        result["limited"] = asdict(one)
    result["same_rows"] = same_rows(sides)
    for name, are_same in result["same_rows"].items():
        say(f"{name}: {'the same rows' if are_same else 'NOT the same rows'} as the job batch by batch")
    return result


def described(latency: Latency) -> str:
    """The latencies in one sentence."""
    return (
        f"source commit to table commit at {latency.per_second:.0f} events/s, {latency.events:,} events in"
        f" {latency.commits} commits of {latency.events_per_commit:.0f}: p50 {latency.p50:.2f} s, p99"
        f" {latency.p99:.2f} s, greatest {latency.greatest:.2f} s"
    )


def main() -> None:
    """Run the comparisons, print and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=2_000_000, help="events in the topic")
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the table before the first event")
    parser.add_argument("--batch", type=int, default=10_000, help="events of a small micro-batch")
    parser.add_argument("--batches", type=int, default=30, help="small micro-batches to extrapolate the others from")
    parser.add_argument("--seconds", type=float, default=120, help="how long the steady stream is measured")
    parser.add_argument("--only", choices=(*SIDES, "steady", "limited"), action="append", help="these parts alone")
    parser.add_argument("--png", type=Path, help="also draw the rates here")
    parser.add_argument("--json", type=Path, help="also write the results here")
    args = parser.parse_args()
    reason = missing()
    if reason:
        parser.error(reason)
    console = Console(width=160)
    with tempfile.TemporaryDirectory(prefix="stream-merge-bench-") as folder:
        broker = Broker(Path(folder, "broker"))
        plan = Plan(
            folder=folder,
            bootstrap=broker.bootstrap,
            events=args.events,
            rows=args.rows,
            batch=args.batch,
            extrapolated_from=args.batches,
        )
        with contextlib.ExitStack() as servers:
            servers.enter_context(running(broker))
            if schema_registry.FOUND.exists() and (not args.only or "avro" in args.only):
                registry = schema_registry.Registry(Path(folder, "registry"))
                servers.enter_context(running(registry))
                ids = registry.register("orders-key", AVRO_KEY), registry.register("orders-value", AVRO_VALUE)
                plan = replace(plan, registry=registry.url, schema_ids=ids)
            plan.save()
            result = bench(plan, args, lambda text: console.print(text, highlight=False))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
