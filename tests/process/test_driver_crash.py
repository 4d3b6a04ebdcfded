"""A process that dies by SIGKILL between two writes of a merge in the driver, or of what puts its files together.

It has no JVM; the tests need one, for Spark reads what is left and deletes what no version refers to.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pytest
from delta_log import check_table, live_rows
from delta_log_files import vector_file
from deltalake import DeltaTable, QueryBuilder
from driver_crash import APP_ID, BOUNDARIES, COMPACTION, MERGE, deliver, killed, put_together
from driver_target import COLUMNS, Target, events, tuples
from pyspark.sql import SparkSession

from stream_merge.model.results import Mode
from stream_merge.spark.confs import holding
from stream_merge.tables.files.compaction_choice import TOGETHER
from stream_merge.testing import change_rows, target_rows

BEFORE = [(1, 4, "uno"), (3, 3, "three"), (4, 3, "four"), (5, 3, "five"), (9, 4, "nine")]
AFTER = [(1, 5, "one"), (5, 3, "five"), (8, 5, "eight"), (9, 5, "neun")]
CHECKPOINTED = "delta.checkpointInterval"
VACUUM_CONFS = {
    "spark.databricks.delta.retentionDurationCheck.enabled": "false",
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "2",
}
LOG_NAME = re.compile(r"\d{20}\.(json|checkpoint\.parquet(#1)?)|_last_checkpoint")
"""What belongs into a log, and what delta-rs leaves there of a checkpoint that it has not finished: no reader takes
that for one."""


@dataclass(frozen=True, kw_only=True)
class State:
    """All that a reader may see."""

    version: int
    rows: list[tuple[Any, ...]]
    feed: list[tuple[Any, ...]]
    """Change rows: version, kind, columns."""
    transactions: list[tuple[str, int]]
    """Of all commits."""


def state(root: Path) -> State:
    """What delta-rs and the independent reader agree on, in a log that keeps the protocol and has each version."""
    checked = check_table(root)
    rows = sorted(tuples(live_rows(root).select(list(COLUMNS))), key=repr)
    table = DeltaTable(str(root))
    found = QueryBuilder().register("t", table).execute("SELECT id, lsn, name FROM t").read_all()
    assert sorted(tuples(pa.table(found)), key=repr) == rows
    feed = pa.table(table.load_cdf(starting_version=0).read_all()).select(["_commit_version", "_change_type", *COLUMNS])
    commits = sorted((root / "_delta_log").glob("*.json"))
    assert [int(commit.stem) for commit in commits] == list(range(checked.version + 1))
    lines = (json.loads(line) for commit in commits for line in commit.read_bytes().splitlines())
    txns = [(line["txn"]["appId"], line["txn"]["version"]) for line in lines if "txn" in line]
    return State(version=checked.version, rows=rows, feed=sorted(tuples(feed), key=repr), transactions=txns)


def expect_for_spark(spark: SparkSession, root: Path, expected: State) -> None:
    """Rows and changes by Spark; then its VACUUM leaves of all files those that this version refers to, and the log."""
    assert [file.name for file in (root / "_delta_log").iterdir() if not LOG_NAME.fullmatch(file.name)] == []
    assert change_rows(spark, str(root)) == expected.feed
    with holding(spark, VACUUM_CONFS):
        spark.sql(f"VACUUM delta.`{root}` RETAIN 0 HOURS")
    live = check_table(root, vacuumed=True).files
    wanted = {root / path for path in live}
    wanted |= {vector_file(root, add["deletionVector"]) for add in live.values() if add.get("deletionVector")}
    left = {file for file in root.rglob("*") if file.is_file() and file.parent.name != "_delta_log"}
    assert left == wanted
    assert target_rows(spark, str(root)) == expected.rows


@pytest.fixture(scope="module", params=get_args(Mode))
def mode(request: pytest.FixtureRequest) -> Mode:
    """In which tables are merged."""
    found: Mode = request.param
    return found


@pytest.fixture(scope="module")
def merged_once(mode: Mode, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table before the second batch, by whose commit a checkpoint is due."""
    root = tmp_path_factory.mktemp("merged") / "table"
    target = Target(root, mode=mode, **{CHECKPOINTED.removeprefix("delta."): "4"})
    target.append((1, 3, "one"), (2, 3, "two"), (3, 3, "three"), (5, 3, "five"))
    target.append((4, 3, "four"))
    deliver(root, 0)
    return root


@pytest.fixture(scope="module")
def in_pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table with so many small files that they are put together, by a commit by which a checkpoint is due."""
    root = tmp_path_factory.mktemp("pieces") / "table"
    target = Target(root, **{CHECKPOINTED.removeprefix("delta."): str(TOGETHER + 2)})
    for number in range(TOGETHER + 1):
        target.merge(events((number, 4, "new"), (100, 4 + number, f"{number}")))
    return root


@pytest.fixture(scope="module")
def merged_twice(merged_once: Path) -> State:
    """The table after a second batch that nobody interrupted."""
    once = shutil.copytree(merged_once, merged_once.with_name("once"))
    deliver(once, 1)
    return state(once)


@pytest.mark.parametrize("at", MERGE)
def test_a_crash_inside_of_a_merge_leaves_the_old_version_or_the_new_one(
    spark: SparkSession, *, merged_once: Path, merged_twice: State, tmp_table: str, mode: Mode, at: str
):
    """Delivered again the batch has its rows and changes once, and VACUUM finds all that was left."""
    if at not in BOUNDARIES[mode]:
        pytest.skip("no vectors are written")
    root, before, after = Path(tmp_table), state(merged_once), merged_twice
    assert (before.rows, after.rows, after.version) == (BEFORE, AFTER, before.version + 1)
    assert after.transactions == [(APP_ID, 0), (APP_ID, 1)]
    shutil.copytree(merged_once, root)

    killed(deliver, root, 1, what=mode, at=at)
    is_committed = MERGE[at].commits
    assert state(root) == (after if is_committed else before)

    assert deliver(root, 1).already_applied == is_committed
    assert state(root) == after
    expect_for_spark(spark, root, after)


@pytest.mark.parametrize("at", COMPACTION)
def test_a_crash_while_files_are_put_together_changes_no_row(
    spark: SparkSession, in_pieces: Path, tmp_table: str, at: str
):
    """Nor a word of the change feed; a later round does what is left to do, and VACUUM finds all that was left."""
    root, before = Path(tmp_table), state(in_pieces)
    shutil.copytree(in_pieces, root)

    killed(put_together, root, what="COMPACTION", at=at)
    is_committed = COMPACTION[at].commits
    assert state(root) == replace(before, version=before.version + is_committed)

    again = put_together(root)
    assert (again is None) if is_committed else (again is not None and again.outcome == "done"), again
    after = state(root)
    assert after == replace(before, version=before.version + 1)
    assert len(check_table(root).files) < TOGETHER
    expect_for_spark(spark, root, after)
