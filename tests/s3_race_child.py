"""A process with a JVM of its own whose writers merge into a table on S3 that others merge into at the same time."""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from racing import IN_A_ROUND, Writer, app_id

from stream_merge.session import local_session

_SAYING = threading.Lock()
"""Whoever reads what is said reads lines, and writers are threads."""
BESIDE = 100_000
"""The first of the keys that are appended beside all writers."""
PROCESSES = 2
"""That merge at once; one that is started later finds them all there."""


def deliver_all(writer: Writer, batches: int, target: str, options: dict[str, str]) -> None:
    """Batches from the one that is in the table last, which is delivered again as after a crash."""
    table, share = DeltaTable(target, storage_options=options), IN_A_ROUND[writer.name]
    for number in range(table.transaction_version(app_id(writer.name)) or 0, batches):
        while number // share > rounds_of_spark(table):
            time.sleep(0.1)
        result = writer.deliver(number)
        told = {
            "writer": writer.name,
            "number": number,
            "outcome": result.outcome,
            "engine": result.engine,
            "plan": result.plan,
        }
        line = json.dumps({**told, "lost": sum(result.conflicts.values())})
        with _SAYING:
            print(line, flush=True)


def rounds_of_spark(table: DeltaTable) -> int:
    """How many of its merges are done. Who is quicker waits after each round: against all of theirs it never wins."""
    table.update_incremental()
    done = table.transaction_version(app_id("jvm"))
    return 0 if done is None else done + 1


def append_all(rows: int, target: str, options: dict[str, str]) -> None:
    """Rows by delta-rs alone, which commits on top of whatever is there."""
    for number in range(rows):
        row = pa.table({"id": [BESIDE + number], "lsn": [-1], "name": ["none"], "counted": [0]})
        write_deltalake(target, row, mode="append", storage_options=options)


def meet(folder: Path) -> None:
    """Wait for the other process: on a busy machine one may have ended before the other one's JVM is there."""
    (folder / f"{os.getpid()}.ready").touch()
    while len(list(folder.glob("*.ready"))) < PROCESSES:
        time.sleep(0.05)


def main() -> None:
    """Parse, start, meet the others, deliver."""
    parser = argparse.ArgumentParser()
    parser.add_argument("settings", type=Path, help="JSON: target, options of delta-rs, confs of the session")
    parser.add_argument("--append", type=int, default=0, help="so many rows beside them")
    parser.add_argument("writers", nargs="+", help="name=number of batches")
    args = parser.parse_args()
    settings = json.loads(args.settings.read_text())
    session = local_session("race", cores=2, memory="1g", confs=settings["confs"])
    target, options = settings["target"], settings["options"]
    meet(args.settings.parent)
    with ThreadPoolExecutor() as threads:
        acts = [
            threads.submit(deliver_all, Writer(session, target, name), int(batches), target, options)
            for name, _, batches in (writer.partition("=") for writer in args.writers)
        ]
        acts.append(threads.submit(append_all, args.append, target, options))
        for act in acts:
            act.result()
    session.stop()


if __name__ == "__main__":
    main()
