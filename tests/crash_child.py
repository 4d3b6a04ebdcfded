"""A process that delivers batches to a sink and kills itself, JVM and all, at a boundary between two steps."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import scenario
from pyspark.sql import DataFrame

from stream_merge.engines.spark.whole import Beside
from stream_merge.merge import commit, steps
from stream_merge.merge.call import BatchCall
from stream_merge.session import local_session
from stream_merge.tables.side.tombstones import DriverTombstones

INSIDE = {"remember_deletes": (DriverTombstones, "_entries"), "commit": (Beside, "expect_newest")}
"""Between two parts of one step: the log of deletes exists and has no entry; a snapshot was compared with its table."""


def die() -> None:
    """End this process and its JVM with no chance to do anything more."""
    os.killpg(os.getpgrp(), signal.SIGKILL)


def die_at(boundary: str) -> None:
    """Arrange for death "before", "inside" or "after" a step of the micro-batch."""
    when, step = boundary.split()
    owner, name = INSIDE[step] if when == "inside" else (commit if step == "commit" else steps, step)
    original = getattr(owner, name)

    def last(first: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(first, BatchCall) and first.caller.identity == scenario.RIVAL_ID:
            return original(first, *args, **kwargs)
        if when == "after":
            original(first, *args, **kwargs)
        return die()

    setattr(owner, name, last)


def main() -> None:
    """Parse, start, deliver, die."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", required=True, help="folder for what Spark leaves behind")
    parser.add_argument("--table", required=True)
    parser.add_argument("--boundary", help='such as "after commit"')
    parser.add_argument("--batch-id", type=int, help="deliver this batch; without: run the query")
    parser.add_argument("--shape", default="changes", choices=scenario.SHAPES, help="of the sink")
    parser.add_argument("--snapshot", action="store_true", help="deliver a copy of the whole source")
    parser.add_argument("--race", action="store_true", help="let a rival delete meanwhile")
    parser.add_argument("--source", type=Path)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--last-batch", type=int, help="die when the sink has returned from this batch of the query")
    args = parser.parse_args()
    confs = {"spark.sql.warehouse.dir": args.work, "spark.local.dir": args.work}
    session = local_session("crash child", cores=2, memory="1g", confs=confs)
    if args.boundary:
        die_at(args.boundary)
    if args.race:
        scenario.race(session, args.table)
    if args.snapshot:
        engine = "spark" if args.boundary == "inside commit" else "auto"
        scenario.snapshot_sink(args.table, engine)(scenario.events(session, scenario.COPY), 0)
        return
    if args.batch_id is not None:
        batch_df = scenario.events(session, scenario.BATCHES[args.batch_id])
        scenario.sink(args.table, shape=args.shape, app_id="crash")(batch_df, args.batch_id)
        return
    sink = scenario.sink(args.table, shape=args.shape)

    def each(batch_df: DataFrame, batch_id: int) -> None:
        sink(batch_df, batch_id)
        if batch_id == args.last_batch:
            die()

    scenario.stream(session, args.source, args.checkpoint, each)


if __name__ == "__main__":
    main()
