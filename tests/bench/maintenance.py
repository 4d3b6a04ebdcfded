"""A sink that looks after its table: what its calls take, and how many files there are, over many small batches."""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path

from common import Bench, Comparison, sink_on, timed
from deltalake import DeltaTable

from stream_merge import Maintenance

EVENTS, CHANGES, CHANGES_EVERY = 100, 10, 5
"""A batch has so many events with new keys, but for changes and a delete of the newest rows in each fifth one: a merge
puts the files that it has to write again together, so batches of changes alone leave few files behind."""
WARM_UP, COUNTED = 20, 50
"""Calls: those before the first that count, and how many count at either end."""
EVERY = 50
MOST_FILES = EVERY
"""A call adds a file at most, each fifth one puts some together, and a round leaves two or three."""


def maintenance(bench: Bench, batches: int, png: Path | None) -> list[Comparison]:
    """Small batches of new rows, with a few changes now and then, and a maintenance run after every 50 of them."""
    target = bench.copy(bench.table(20_000, 1), "maintenance")
    sink = sink_on(target, maintenance=Maintenance(every=EVERY))
    rows = bench.spark.range(EVENTS).selectExpr("id", "uuid() AS a", "current_timestamp() AS ts").localCheckpoint()
    table = DeltaTable(target)
    seconds: list[float] = []
    files: list[int] = []
    rounds = 0
    for number in range(batches + WARM_UP):
        newest = 20_000 + EVENTS * number
        new = EVENTS if number % CHANGES_EVERY else EVENTS - CHANGES
        batch = rows.selectExpr(
            f"if(id < {new}, {newest} + id, {newest} - 1 - pmod(hash(id, {number}), 500)) AS id",
            f"{number + 2}L AS lsn",
            "a",
            "id AS b",
            "'changed' AS c",
            "ts",
            f"if(id >= {new} AND id = {EVENTS - 1}, 'd', 'u') AS op",
        )
        seconds.append(timed(partial(sink, batch, number)))
        table.update_incremental()
        files.append(len(table.file_uris()))
        rounds += sink.last_result is not None and sink.last_result.maintenance is not None
    first = statistics.median(seconds[WARM_UP : WARM_UP + COUNTED])
    last = statistics.median(seconds[-COUNTED:])
    if png is not None:
        _plot(seconds[WARM_UP:], files[WARM_UP:], png.with_stem(f"{png.stem}_maintenance"))
    return [
        Comparison(
            case=f"{batches:,} batches of {EVENTS} events, 20,000 rows at first, maintenance after every {EVERY}",
            baseline=f"first {COUNTED} after {WARM_UP}",
            baseline_seconds=first,
            candidate=f"last {COUNTED}",
            candidate_seconds=last,
            bound=f"at most 1.3 x, and {MOST_FILES} files",
            holds=last <= 1.3 * first and max(files) <= MOST_FILES,
            phases=(
                f"files: {max(files)} at most, {files[-1]} in the end, after {rounds} rounds; slowest call"
                f" {max(seconds[WARM_UP:]):.2f} s"
            ),
        )
    ]


def _plot(seconds: list[float], files: list[int], path: Path) -> None:
    """Seconds of each call, and below them how many files the table has after it."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - only where a picture is wanted

    figure = Figure(figsize=(10, 6), layout="constrained")
    above, below = figure.subplots(2, sharex=True)
    above.plot(seconds, ".", markersize=3)
    above.set_ylabel("seconds of a call")
    above.set_yscale("log")
    below.plot(files, drawstyle="steps-post")
    below.set_ylabel("files of the table")
    below.set_xlabel("batch")
    figure.savefig(path, dpi=120)
