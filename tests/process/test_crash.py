"""A real process dies by SIGKILL between two steps of a batch; delivering it again must leave no trace of that."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import crash_child
import pytest
import scenario
from pyspark.sql import DataFrame, SparkSession

from stream_merge import MergeSink
from stream_merge.model.results import EventCounts, MergeResult
from stream_merge.shapes.base import filled_as
from stream_merge.testing import change_rows, run, target_rows

ROOT = Path(__file__).parents[2]
CHILD_SECONDS = 180


@dataclass(frozen=True, kw_only=True)
class State:
    """All that a batch leaves behind, but for times and version numbers."""

    rows: list[tuple[Any, ...]]
    feed: list[list[tuple[Any, ...]]]
    """Change rows of each version that changed rows, in order."""
    remembered: list[tuple[Any, ...]]
    """Entries of the log of deletes: key, sequence, whether it marks a revival."""
    quarantined: list[tuple[Any, ...]]


def state(spark: SparkSession, table: Path) -> State:
    versions: dict[int, list[tuple[Any, ...]]] = {}
    for version, *change in change_rows(spark, str(table)):
        versions.setdefault(version, []).append(tuple(change))
    log = sibling(table, "tombstones")
    quarantine = sibling(table, "quarantine")
    return State(
        rows=target_rows(spark, str(table)),
        feed=[versions[version] for version in sorted(versions)],
        remembered=target_rows(spark, str(log), "id", "__stream_merge_sequence", "__stream_merge_revived")
        if log.exists()
        else [],
        quarantined=target_rows(spark, str(quarantine), "reasons", "batch_id", "event") if quarantine.exists() else [],
    )


def sibling(table: Path, kind: str) -> Path:
    return table.parent / f"__stream_merge_{kind}_{table.name}"


def killed(work: Path, *args: str) -> None:
    """Run the child until it has killed itself and its JVM."""
    work.mkdir(exist_ok=True)
    command = [sys.executable, crash_child.__file__, "--work", str(work), *args]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    child = subprocess.Popen(
        command, env=env, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        said, _ = child.communicate(timeout=CHILD_SECONDS)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
    assert child.returncode == -signal.SIGKILL, f"the child ended by itself with {child.returncode}: {said}"


class Bases(dict[str, Path]):
    """For each shape a folder with a table (and its siblings) after the first batch, made when it is wanted."""

    def __init__(self, spark: SparkSession, folders: pytest.TempPathFactory) -> None:
        self._spark = spark
        self._folders = folders

    def __missing__(self, shape: str) -> Path:
        folder = self[shape] = self._folders.mktemp(f"base-{shape}")
        deliver(self._spark, folder / "table", 0, shape)
        return folder


@pytest.fixture(scope="module")
def bases(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Folders with tables after the first batch."""
    return Bases(spark, tmp_path_factory)


@pytest.fixture(scope="module")
def base(spark: SparkSession, bases: Mapping[str, Path]) -> Path:
    """A folder with a table (and its siblings) after the first batch."""
    folder = bases["changes"]
    scenario.filled_by_others(spark, str(folder / "copied"))
    return folder


FIRST_BATCH = ("before quarantine_events", "inside remember_deletes")
BEFORE_COMMIT = ("after quarantine_events", "after remember_deletes")
AFTER_COMMIT = ("after commit", "after recheck", "after forget_revived")
SNAPSHOT = ("snapshot after prepare_target", "snapshot inside commit", "snapshot after commit")
"""With its properties on the table; compared with the table; committed."""


@pytest.fixture(scope="module")
def died(
    request: pytest.FixtureRequest, base: Path, bases: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Path]]:
    """The table that a process left which died at a boundary, of a sink of some shape.

    A process needs half a minute, most of it to start, so two of them run beside the tests; only those that
    the selected tests ask for.
    """

    def left_behind(shape: str, boundary: str, folder: Path) -> Path:
        if boundary in SNAPSHOT:
            shutil.copytree(base, folder, dirs_exist_ok=True)
            table, at = folder / "copied", boundary.removeprefix("snapshot ")
            killed(folder.parent / "work", "--table", str(table), "--snapshot", "--boundary", at)
            return table
        table = folder / "table"
        if boundary not in FIRST_BATCH:
            shutil.copytree(bases[shape], folder, dirs_exist_ok=True)
        race = ["--race"] if boundary in AFTER_COMMIT and shape == "changes" else []
        batch_id = "0" if boundary in FIRST_BATCH else "1"
        where = ("--table", str(table), "--batch-id", batch_id, "--boundary", boundary, "--shape", shape)
        killed(folder.parent / "work", *where, *race)
        return table

    wanted = [
        (str(item.callspec.params.get("shape", "changes")), str(item.callspec.params["boundary"]))
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.module is request.module and hasattr(item, "callspec")
    ]
    with ThreadPoolExecutor(2) as pool:
        running = {}
        for shape, boundary in wanted:
            folder = tmp_path_factory.mktemp("died") / "tables"
            folder.mkdir()
            if boundary not in FIRST_BATCH:
                assert bases[shape]  # made on this thread, before the process starts
            running[shape, boundary] = pool.submit(left_behind, shape, boundary, folder)
        yield lambda boundary, shape="changes": running[shape, boundary].result()


@pytest.fixture(scope="module")
def undisturbed(spark: SparkSession, base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, State]:
    """What batches leave that nobody interrupted: the first, the second, the second with a rival."""
    states = {"first": state(spark, base / "table")}
    for name in ("second", "raced"):
        table = shutil.copytree(base, tmp_path_factory.mktemp(name) / "copy") / "table"
        if name == "raced":
            scenario.race(spark, str(table))
        deliver(spark, table, 1)
        states[name] = state(spark, table)
    return states


def deliver(spark: SparkSession, table: Path, batch_id: int, shape: str = "changes") -> MergeResult:
    """Deliver a batch as the child does."""
    batch_df = scenario.events(spark, scenario.BATCHES[batch_id])
    return run(scenario.sink(str(table), shape=shape, app_id="crash"), batch_df, batch_id)


def test_the_scenario_holds_every_step(undisturbed: dict[str, State]):
    """Without this the tests below could pass because a step had nothing to do."""
    assert undisturbed["second"].rows == [
        (1, 30, "one again"),
        (2, 30, "two revived"),
        (5, 30, "five"),
        (6, 30, "raced"),
    ]
    assert undisturbed["second"].remembered == [
        (2, (20,), False),
        (2, (20,), True),
        (3, (30,), False),
        (9, (20,), False),
    ]
    assert [(reasons, batch_id) for reasons, batch_id, _ in undisturbed["second"].quarantined] == [
        (["null_key"], 1),
        (["null_sequence"], 1),
    ]
    assert undisturbed["raced"].rows == [(1, 30, "one again"), (2, 30, "two revived"), (5, 30, "five")]
    assert undisturbed["raced"].feed[-1] == [("delete", 6, 30, "raced")]


@pytest.mark.parametrize("boundary", FIRST_BATCH)
def test_a_crash_in_the_very_first_batch_leaves_no_trace(
    spark: SparkSession, died: Callable[[str], Path], undisturbed: dict[str, State], boundary: str
):
    """A target or a log of deletes that was created and not yet written to is taken as it is."""
    table = died(boundary)
    assert target_rows(spark, str(table)) == []

    assert deliver(spark, table, 0).outcome == "committed"
    assert state(spark, table) == undisturbed["first"]


@pytest.mark.parametrize("boundary", BEFORE_COMMIT)
def test_a_crash_before_the_target_commit_is_as_if_the_batch_had_run_once(
    spark: SparkSession, died: Callable[[str], Path], undisturbed: dict[str, State], boundary: str
):
    """Quarantine and remembered deletes are written before the target, each once per batch id."""
    table = died(boundary)
    interrupted = state(spark, table)
    assert interrupted.rows == undisturbed["first"].rows
    assert interrupted.quarantined == undisturbed["second"].quarantined
    assert ((3, (30,), False) in interrupted.remembered) == (boundary == "after remember_deletes")

    assert deliver(spark, table, 1).outcome == "committed"
    assert state(spark, table) == undisturbed["second"]
    assert deliver(spark, table, 1).outcome == "skipped_duplicate"
    assert state(spark, table) == undisturbed["second"]


@pytest.mark.parametrize("boundary", AFTER_COMMIT)
def test_a_crash_after_the_target_commit_does_not_skip_the_steps_after_it(
    spark: SparkSession, died: Callable[[str], Path], undisturbed: dict[str, State], boundary: str
):
    """A batch found applied still undoes what a rival's delete refuses, and still forgets revived deletes."""
    table = died(boundary)
    interrupted = state(spark, table)
    assert ((6, 30, "raced") not in interrupted.rows) == (boundary != "after commit")
    assert ((2, (20,), True) in interrupted.remembered) == (boundary == "after forget_revived")

    again = deliver(spark, table, 1)

    assert again.outcome == "skipped_duplicate"
    assert again.events == EventCounts()
    assert state(spark, table) == undisturbed["raced"]


OF_SHAPES: Mapping[str, list[tuple[Any, ...]]] = {
    "clauses": [(1, 30, "one > one again"), (2, 30, "two revived"), (5, 30, "five"), (6, 30, "raced"), (9, 5, "late")],
    "insert-only": [
        (1, 10, "one"),
        (2, 20, None),
        (3, 10, "three"),
        (5, 30, "five"),
        (6, 30, "raced"),
        (9, 20, None),
    ],
}
"""Rows after the second batch. These shapes remember no deletes, and only clauses look at what an event is."""
LEDGERS = {
    "clauses": EventCounts(received=8, quarantined=2, unaffected=0, inserted=4, updated=1, deleted=1),
    "insert-only": EventCounts(received=8, quarantined=2, unaffected=4, inserted=2),
}


@pytest.mark.parametrize(
    ("shape", "boundary"),
    [
        ("clauses", "after quarantine_events"),
        ("clauses", "after commit"),
        ("insert-only", "before quarantine_events"),
        ("insert-only", "after quarantine_events"),
        ("insert-only", "after commit"),
    ],
)
def test_a_crash_of_another_shape_is_as_if_each_batch_had_run_once(
    spark: SparkSession, died: Callable[..., Path], tmp_path: Path, shape: str, boundary: str
):
    """Before the commit of the target the batch is merged by its second delivery, after it there is nothing to do.

    The clauses would tell: to append to a name twice, or to count an update that changed nothing, is not the same.
    """
    table, once = died(boundary, shape), tmp_path / "table"
    interrupted, committed = target_rows(spark, str(table)), boundary == "after commit"
    if boundary in FIRST_BATCH:
        assert interrupted == []
        assert deliver(spark, table, 0, shape).outcome == "committed"
    assert (target_rows(spark, str(table)) == OF_SHAPES[shape]) == committed

    again = deliver(spark, table, 1, shape)

    outcome, counts = ("skipped_duplicate", EventCounts()) if committed else ("committed", LEDGERS[shape])
    assert (again.outcome, again.events) == (outcome, counts)
    assert target_rows(spark, str(table)) == OF_SHAPES[shape]
    for batch_id in (0, 1):
        deliver(spark, once, batch_id, shape)
    assert state(spark, table) == state(spark, once)


@pytest.mark.parametrize("boundary", SNAPSHOT)
def test_a_crash_inside_of_a_snapshot_leaves_the_table_as_it_was_or_as_the_snapshot(
    spark: SparkSession, died: Callable[..., Path], boundary: str
):
    """Delivered again it becomes the snapshot by one commit, without a row that stays as it is; once more, by none."""
    table, is_committed = died(boundary), boundary == "snapshot after commit"
    before = [(1, 10, "one"), (2, 10, "two"), (3, 10, "three"), (4, 10, "four")]
    after = [(1, 10, "one"), (2, 20, "two again"), (5, 20, "five")]
    assert target_rows(spark, str(table)) == (after if is_committed else before)
    properties = {row["key"]: row["value"] for row in spark.sql(f"SHOW TBLPROPERTIES delta.`{table}`").collect()}
    assert filled_as(properties["stream_merge.sequence"]) == "snapshot"

    again = [run(scenario.snapshot_sink(str(table)), scenario.events(spark, scenario.COPY), 0) for _ in range(2)]

    first = "skipped_duplicate" if is_committed else "committed"
    assert [result.outcome for result in again] == [first, "skipped_duplicate"]
    assert target_rows(spark, str(table)) == after
    assert state(spark, table).feed[1:] == [
        [
            ("delete", 3, 10, "three"),
            ("delete", 4, 10, "four"),
            ("insert", 5, 20, "five"),
            ("update_postimage", 2, 20, "two again"),
            ("update_preimage", 2, 10, "two"),
        ]
    ]


def test_a_crash_between_target_commit_and_checkpoint_commit_merges_the_batch_once(spark: SparkSession, tmp_path: Path):
    """The restarted query delivers the batch again, with the id that its checkpoint gave it."""
    source, table, checkpoint = tmp_path / "source", tmp_path / "table", tmp_path / "checkpoint"
    scenario.write_files(source, scenario.BATCHES)
    folders = ("--source", str(source), "--checkpoint", str(checkpoint))
    killed(tmp_path / "work", "--table", str(table), *folders, "--last-batch", "1")
    assert target_rows(spark, str(table)) == [
        (1, 30, "one again"),
        (2, 30, "two revived"),
        (5, 30, "five"),
        (6, 30, "raced"),
    ]
    assert {file.name for file in (checkpoint / "commits").glob("[0-9]*")} == {"0"}

    outcomes: list[tuple[int, str]] = []

    for target, folder in ((table, checkpoint), (tmp_path / "once", tmp_path / "once-checkpoint")):
        sink = scenario.sink(str(target))

        def each(batch_df: DataFrame, batch_id: int, sink: MergeSink = sink) -> None:
            outcomes.append((batch_id, run(sink, batch_df, batch_id).outcome))

        scenario.stream(spark, source, folder, each)

    assert outcomes == [
        (1, "skipped_duplicate"),
        (2, "committed"),
        (0, "committed"),
        (1, "committed"),
        (2, "committed"),
    ]
    assert state(spark, table) == state(spark, tmp_path / "once")
