"""A process without a JVM that merges, or puts files together, and kills itself between two writes."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable
from driver_target import events, merger

from stream_merge.engines.base import CommitTag, MergeReport
from stream_merge.engines.driver import compact
from stream_merge.engines.driver import write as merging
from stream_merge.model.results import MaintenanceRun
from stream_merge.tables.files import vectors
from stream_merge.tables.log.handle import LogHandle, open_table

CHILD_SECONDS = 60
APP_ID = "crash"
BATCHES: tuple[Callable[[], pa.Table], ...] = (
    lambda: events((1, 4, "uno"), (9, 4, "nine"), (2, 4, None), delete=[2]),
    lambda: events((1, 5, "one"), (9, 5, "neun"), (3, 5, None), (4, 5, None), (8, 5, "eight"), delete=[3, 4]),
)
"""The second one makes a vector grow, takes the last row of a file, and the rows that the first one has written."""


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """Where a process dies: before, inside or after a call of a function."""

    owner: Any
    name: str
    when: str
    """Inside: at the first byte of a file beyond `PART`."""
    commits: bool = False
    """Whether the commit is there by then."""


PART = 20
PUT: Mapping[str, Boundary] = {
    "a part of the commit": Boundary(owner=Path, name="write_bytes", when="inside"),
    "the commit": Boundary(owner=os, name="link", when="before"),
    "its name": Boundary(owner=os, name="link", when="after", commits=True),
    "no other name of it": Boundary(owner=LogHandle, name="committed", when="before", commits=True),
    "a part of the checkpoint": Boundary(owner=DeltaTable, name="create_checkpoint", when="inside", commits=True),
    "the checkpoint": Boundary(owner=DeltaTable, name="create_checkpoint", when="after", commits=True),
    "the tidied log": Boundary(owner=DeltaTable, name="cleanup_metadata", when="after", commits=True),
}
MERGE: Mapping[str, Boundary] = {
    "a part of the vectors": Boundary(owner=vectors, name="write", when="inside"),
    "the vectors": Boundary(owner=vectors, name="write", when="after"),
    "a part of the data file": Boundary(owner=merging, name="write_data_file", when="inside"),
    "the data file": Boundary(owner=merging, name="write_data_file", when="after"),
    "a part of the change file": Boundary(owner=merging, name="write_change_file", when="inside"),
    "the change file": Boundary(owner=merging, name="write_change_file", when="after"),
    **PUT,
}
"""What a merge that marks rows has left last, in its order."""
REWRITE = {at: boundary for at, boundary in MERGE.items() if "vectors" not in at}
"""And one that writes files again."""
COMPACTION: Mapping[str, Boundary] = {
    "a part of the data file": Boundary(owner=compact, name="write_data_file", when="inside"),
    "the data file": Boundary(owner=compact, name="write_data_file", when="after"),
    **PUT,
}
"""What a compaction has left last."""


def deliver(root: Path, batch_id: int) -> MergeReport:
    """Merge a batch."""
    tag = CommitTag(app_id=APP_ID, batch_id=batch_id, user_metadata="{}", token="t")
    return merger(root, BATCHES[batch_id]()).merge(None, tag)


def put_together(root: Path) -> MaintenanceRun | None:
    """One round of compaction."""
    native = open_table(str(root))
    assert native is not None
    return compact.compact(native).maintenance


def killed(act: Callable[..., object], *args: Any, what: str, at: str) -> None:
    """Run an act in a process that dies.

    It is forked from one that has loaded all libraries and started none of their threads: hundredths of a second
    instead of seconds. What ends it inside of a call is the kernel, which lets no file grow any more: to a program
    that is a death like any other.

    Args:
        act: `deliver` or `put_together`.
        args: its arguments.
        what: "mark", "rewrite" or "COMPACTION".
        at: of that the boundary.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(["deltalake", "duckdb", "pyarrow.parquet", "pyarrow.compute", "pyspark.sql"])
    child = context.Process(target=_last, args=(act, args, what, at))
    child.start()
    child.join(CHILD_SECONDS)
    if child.exitcode is None:
        child.kill()
    expected = signal.SIGXFSZ if BOUNDARIES[what][at].when == "inside" else signal.SIGKILL
    assert child.exitcode == -expected, f"the child ended by itself with {child.exitcode}"


BOUNDARIES = {"mark": MERGE, "rewrite": REWRITE, "COMPACTION": COMPACTION}


def _last(act: Callable[..., object], args: tuple[Any, ...], what: str, at: str) -> None:
    boundary = BOUNDARIES[what][at]
    original = getattr(boundary.owner, boundary.name)

    def last(*given: Any, **more: Any) -> None:
        if boundary.when == "inside":
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (PART, PART))
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        if boundary.when != "before":
            original(*given, **more)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(boundary.owner, boundary.name, last)
    act(*args)
