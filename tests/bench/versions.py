"""What a change costs: the sink of several commits, side by side.

    make bench-versions ARGS="before after"      commits, branches or tags; ratios are to the first one

Each commit is checked out beside the others and runs in a process of its own, with its own code and its own
helpers of the benchmark, on copies of the same tables. In each round every commit has its turn, in another order, so
that the machine's noise hits them alike. What one commit took from round to round shows how much of a difference is
noise.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

Seconds = dict[str, list[float]]
"""Of each case the seconds of its calls."""

REPOSITORY = Path(__file__).parents[2]
TINY, LARGE = (20_000, 1), (5_000_000, 16)
TRIGGERS, MANY = 100, 1_000_000


def measured(tables: Path, runs: int, wanted: str) -> Seconds:
    """In the process of one commit: cases of `--only engines` and `--only stream`, the sink's sides of them."""
    import streams  # noqa: PLC0415 - of the commit whose process this is
    from common import Bench, sink_on, timed  # noqa: PLC0415

    from stream_merge.session import local_session  # noqa: PLC0415

    spark = local_session("stream_merge bench", memory="4g")
    bench = Bench(spark, tables, runs)
    found: Seconds = {}

    def case(name: str, size: tuple[int, int], events: int, keys: range, *, engine: str) -> None:
        name = f"{name}, {engine}"
        if wanted not in name:
            return
        sink = sink_on(bench.copy(bench.table(*size), f"versions_{len(found)}"), engine=engine)
        seconds, warm_up = [], 4 if events < MANY else 1
        for number in range(runs + warm_up):
            batch = bench.events(events, keys.start, keys.stop, deletes=True)
            took = timed(lambda batch=batch: sink(batch, bench.batch_id))
            if number >= warm_up:
                seconds.append(took)
        found[name] = seconds

    for engine in ("auto", "spark"):
        case("20 k rows, 1 k events", TINY, 1_000, range(22_000), engine=engine)
        case("5 M rows, 10 k recent events", LARGE, 10_000, range(4_750_000, 5_025_000), engine=engine)
    case("5 M rows, 10 k random events", LARGE, 10_000, range(5_500_000), engine="auto")
    case("5 M rows, 1 M random events", LARGE, MANY, range(5_500_000), engine="auto")
    stream = sink_on(bench.copy(bench.table(*TINY), "stream"), app_id=None)
    triggers = streams.triggers if hasattr(streams, "triggers") else streams._triggers  # what older commits call it
    found["whole trigger, 1 k events, 20 k rows"] = triggers(bench, stream, TRIGGERS, {})
    spark.stop()
    return found


def run(commit: str, folder: Path, args: argparse.Namespace) -> Seconds:
    """The figures of one commit, by a process that has its code alone, and copies of the tables of its own.

    What a sink leaves beside a table, deletes that it remembers and its transaction ids, would spare the next one work.
    """
    checkout, tables, own = folder / named(commit), folder / "tables", folder / "own"
    if not checkout.exists():
        git("worktree", "add", "--detach", "--quiet", str(checkout), commit)
    shutil.rmtree(own, ignore_errors=True)
    if tables.exists():
        shutil.copytree(tables, own)
    paths = (checkout, checkout / "tests", checkout / "tests/bench")
    options = ("--child", str(own), "--runs", str(args.runs), "--only", args.only)
    child = subprocess.run(
        (sys.executable, "-P", __file__, *options),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    if not tables.exists():  # the tables that this process has made, as it has made them
        tables.mkdir()
        for rows, files in (TINY, LARGE):
            if (own / f"rows_{rows}_{files}").exists():
                shutil.copytree(own / f"rows_{rows}_{files}", tables / f"rows_{rows}_{files}")
    found: Seconds = json.loads(child.stdout.splitlines()[-1])
    return found


def git(*words: str) -> str:
    """What git says about this repository."""
    done = subprocess.run(("git", "-C", str(REPOSITORY), *words), check=True, capture_output=True, text=True)
    return done.stdout.strip()


def named(commit: str) -> str:
    """A commit by its hash."""
    return git("rev-parse", "--short", f"{commit}^{{commit}}")


def show(found: dict[str, dict[str, list[float]]], commits: list[str]) -> None:
    """Medians of all rounds, the ratio to the first commit, and the least and greatest median of one round."""
    for case, of_commits in found.items():
        print(f"\n{case}")
        first = statistics.median(of_commits[commits[0]])
        for commit in commits:
            rounds = of_commits[commit]
            middle = statistics.median(rounds)
            spread = f"rounds {min(rounds):.3f} to {max(rounds):.3f}"
            print(f"  {commit:<12} {middle:7.3f} s  {middle / first:5.2f} x   {spread}")


def main() -> None:
    """Compare the commits that are given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commits", nargs="*", help="the first one is what the others are compared with")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each commit")
    parser.add_argument("--runs", type=int, default=7, help="counted calls of a case in a process")
    parser.add_argument("--only", default="", metavar="TEXT", help="of the sink's calls only cases that have this text")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measured(args.child, args.runs, args.only)))
        return
    if len(args.commits) < 2:
        parser.error("give two commits or more, the first one is what the others are compared with")
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            for number in range(args.rounds):
                turn = number % len(args.commits)
                for commit in (*args.commits[turn:], *args.commits[:turn]):
                    for case, seconds in run(commit, folder, args).items():
                        found[case][commit].append(statistics.median(seconds))
                    print(f"round {number + 1}: {commit}", file=sys.stderr, flush=True)
        finally:
            for checkout in {folder / named(commit) for commit in args.commits}:
                shutil.rmtree(checkout, ignore_errors=True)
            git("worktree", "prune")
    show(found, args.commits)


if __name__ == "__main__":
    main()
