"""Writers of every engine, and users of Spark, at once on the rows of one table, in one process.

It needs a JVM: Spark is one of the writers, and its lock keeps the others apart from it. `make soak` has more rounds.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pytest
from delta_log import check_table, live_rows
from deltalake import DeltaTable, QueryBuilder
from engines import Only, with_costs
from prometheus_client import CollectorRegistry
from pyspark.sql import DataFrame, SparkSession
from racing import (
    COLUMNS,
    IN_A_ROUND,
    PATIENT,
    SCHEMA,
    SHARED,
    Writer,
    app_id,
    as_tuples,
    commit,
    expect_changes,
    expected_rows,
    replayed,
)

from stream_merge import MergeMetrics, MergeSink
from stream_merge.model.names import QUARANTINE_TABLE_PREFIX, TOMBSTONE_TABLE_PREFIX
from stream_merge.model.table_ref import TableRef
from stream_merge.testing import batch, change_rows, run, target_rows

log = logging.getLogger(__name__)

MERGES = int(os.environ.get("STREAM_MERGE_RACES", "17"))
"""At least so many, of all writers together."""
ENOUGH = 100
"""With so many each writer has lost some, and the driver has put files together."""
ROUNDS = -(-MERGES // sum(IN_A_ROUND.values()))
DOOMED = range(1_000, 1_000 + ROUNDS)
"""Keys that nobody merges; users delete them one after the other."""


class Users:
    """Those who use Spark as they please; who loses tries again.

    Args:
        spark: their session.
        target: a table that is there.
    """

    def __init__(self, spark: SparkSession, target: str) -> None:
        self._spark, self._target = spark, target
        self.counted = self.deleted = self.optimized = self.lost = 0

    def act(self, number: int) -> None:
        """What they do in a round."""
        (self._count, self._delete, self._optimize)[number % 3]()

    def _count(self) -> None:
        self._sql("UPDATE {t} SET counted = counted + 1 WHERE id IN (0, 1)")
        self.counted += 1

    def _delete(self) -> None:
        self._sql(f"DELETE FROM {{t}} WHERE id = {DOOMED[self.deleted]}")
        self.deleted += 1

    def _optimize(self) -> None:
        self._sql("OPTIMIZE {t}")
        self.optimized += 1

    def _sql(self, statement: str) -> None:
        for _ in range(PATIENT.attempts):
            try:
                self._spark.sql(statement.format(t=f"delta.`{self._target}`")).collect()
            except Exception as err:
                if "DELTA_CONCURRENT" not in str(err):
                    raise
                self.lost += 1
            else:
                return
        pytest.fail(f"{statement} never came through")


@pytest.mark.timeout(600 + 5 * MERGES)
@pytest.mark.parametrize("vectors", ["true", "false"])
def test_no_update_is_lost_among_writers_of_all_engines(spark: SparkSession, tmp_table: str, vectors: str):
    """The rows are those of all merges, and all changes one after the other make the table.

    Each version is one commit, and each batch in one of them, with all of its changes.
    """
    spark.sql(
        f"CREATE TABLE delta.`{tmp_table}` (id bigint, lsn bigint, name string, counted bigint) USING delta"
        f" TBLPROPERTIES ('delta.enableDeletionVectors' = '{vectors}', 'delta.enableChangeDataFeed' = 'true')"
    )
    keys = ", ".join(f"({key})" for key in (*SHARED, *DOOMED))
    spark.sql(f"INSERT INTO delta.`{tmp_table}` SELECT id, -1L, 'none', 0L FROM VALUES {keys} AS t(id)")
    writers, users = [Writer(spark, tmp_table, name) for name in IN_A_ROUND], Users(spark, tmp_table)
    for writer in writers:
        writer.deliver()
    with ThreadPoolExecutor(len(writers) + 1) as threads:
        for number in range(ROUNDS):
            acts = [threads.submit(deliver, writer, IN_A_ROUND[writer.name]) for writer in writers]
            for act in (*acts, threads.submit(users.act, number)):
                act.result(300)

    delivered = {writer.name: len(writer.results) for writer in writers}
    root, rows = Path(tmp_table), expected_rows(delivered, DOOMED[users.deleted :], users.counted)
    for writer in writers:
        done = {(result.outcome, result.engine) for result in writer.results}
        assert done == {("committed", writer.engine)}, writer.name
        assert len(writer.results) == 1 + ROUNDS * IN_A_ROUND[writer.name]
    checked = check_table(root)
    assert target_rows(spark, tmp_table, *COLUMNS) == rows
    assert as_tuples(live_rows(root)) == rows
    found = QueryBuilder().register("t", DeltaTable(tmp_table)).execute("SELECT * FROM t")
    assert as_tuples(pa.table(found.read_all())) == rows

    commits = [json.loads(line) for version in range(checked.version + 1) for line in commit(root, version)]
    assert len(list((root / "_delta_log").glob("*.json"))) == checked.version + 1
    made = Counter((line["txn"]["appId"], line["txn"]["version"]) for line in commits if "txn" in line)
    batches = [(app_id(name), number) for name, count in delivered.items() for number in range(count)]
    assert made == Counter(batches)
    feed = change_rows(spark, tmp_table, *COLUMNS)
    assert replayed(feed) == rows
    for writer in writers:
        expect_changes(feed, writer.name, [result.version for result in writer.results])

    lost = {writer.name: sum(sum(result.conflicts.values()) for result in writer.results) for writer in writers}
    infos = [line["commitInfo"] for line in commits if "commitInfo" in line]
    by = Counter((info["operation"], info["engineInfo"].split("/")[0].split(":")[0]) for info in infos)
    log.info("%d merges, %d versions; lost: %s; by users: %d; %s", len(batches), len(infos), lost, users.lost, dict(by))
    assert sum(lost.values()) > 0, "nobody lost a commit: the writers have not met"
    if MERGES >= ENOUGH:
        assert all(lost.values())
        assert by["OPTIMIZE", "stream_merge"] > 0


def deliver(writer: Writer, batches: int) -> None:
    """The next batches of a writer."""
    for _ in range(batches):
        writer.deliver()


# -- what keeps them apart ----------------------------------------------------------------------


def test_the_driver_writes_under_the_lock_of_sparks_commits(
    spark: SparkSession, tmp_table: str, monkeypatch: pytest.MonkeyPatch
):
    """Spark looks whether a version is there and then renames, over whatever came in between.

    So nobody of Spark may be in between while the driver commits: the target, the remembered deletes, the quarantine.
    """
    seen: list[tuple[str, bool]] = []

    def noting(act: Callable[..., Any], where: Callable[..., str]) -> Callable[..., Any]:
        def noted(*args: Any, **more: Any) -> Any:
            place = urlsplit(where(*args)).path.rstrip("/")
            seen.append((Path(place).name, is_free(spark, place)))
            return act(*args, **more)

        return noted

    def merge_of(frame: DataFrame, number: int) -> str | None:
        return run(sink, frame, number).engine

    sink = MergeSink(
        target=tmp_table,
        keys=["id"],
        sequence_by="lsn",
        apply_as_deletes="op = 'd'",
        except_column_list=["op"],
        app_id="driver",
        metrics=MergeMetrics(registry=CollectorRegistry()),
    )
    with_costs(sink, Only("driver"))
    first = batch(spark, SCHEMA, (1, 1, "one", "u"), (2, 1, None, "d"), (None, 1, "no key", "u"))
    then = batch(spark, SCHEMA, (1, 2, "uno", "u"), (3, 2, None, "d"), (None, 2, "no key", "u"))
    merge_of(first, 0)
    monkeypatch.setattr(os, "link", noting(os.link, lambda _, name, **__: str(Path(name).parent.parent)))

    assert merge_of(then, 1) == "driver"

    written = [
        tmp_table,
        *(TableRef(tmp_table).beside(kind) for kind in (TOMBSTONE_TABLE_PREFIX, QUARANTINE_TABLE_PREFIX)),
    ]
    assert sorted(seen) == sorted((Path(one).name, False) for one in written)
    assert is_free(spark, tmp_table)


def is_free(spark: SparkSession, path: str) -> bool:
    """Whether a commit of Spark, on another thread, could have its lock."""

    def take() -> bool:
        jvm: Any = spark._jvm
        place = jvm.org.apache.hadoop.fs.Path(path)
        lock = jvm.org.apache.spark.sql.delta.DeltaLog.forTable(spark._jsparkSession, place).snapshotLock()
        taken = bool(lock.tryLock())
        if taken:
            lock.unlock()
        return taken

    with ThreadPoolExecutor(1) as another:
        return another.submit(take).result(60)
