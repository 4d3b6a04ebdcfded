"""Writers of every engine, and users of Spark, at once on the rows of one table, in one process.

It needs a JVM: Spark is one of the writers, and its lock keeps the others apart from it. `make soak` has more rounds.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pytest
from delta_log import check_table, live_rows
from deltalake import DeltaTable, QueryBuilder
from deltalake.table import TableMerger
from engines import Only
from prometheus_client import CollectorRegistry
from pyspark.sql import DataFrame, SparkSession

from stream_merge import MergeMetrics, MergeSink, RetryPolicy
from stream_merge.model.names import QUARANTINE_TABLE_PREFIX, TOMBSTONE_TABLE_PREFIX, sibling
from stream_merge.model.results import MergeResult
from stream_merge.tables.delta_rs import table as delta_rs
from stream_merge.testing import batch, change_rows, run, target_rows

log = logging.getLogger(__name__)

MERGES = int(os.environ.get("STREAM_MERGE_RACES", "17"))
"""At least so many, of all writers together."""
IN_A_ROUND = {"left": ("merge_on_read", 6), "right": ("merge_on_read", 6), "rust": ("native", 4), "jvm": ("spark", 1)}
"""Writer -> its engine, and how many of its merges race in a round with those of all others."""
ENOUGH = 100
"""With so many each writer has lost some, and merge-on-read has put files together."""
ROUNDS = -(-MERGES // sum(merges for _, merges in IN_A_ROUND.values()))
SHARED = range(5)
"""Keys that every writer changes."""
DOOMED = range(1_000, 1_000 + ROUNDS)
"""Keys that nobody merges; users delete them one after the other."""
KEPT_BATCHES = 12
"""A row that a batch has inserted is deleted by the writer's batch so much later."""
SCHEMA = "id bigint, lsn bigint, name string, op string"
COLUMNS = ("id", "lsn", "name", "counted")
PATIENT = RetryPolicy(
    attempts=500,
    budget_seconds=600,
    backoff_initial_seconds=0,
    backoff_max_seconds=0.02,
    backoff_jitter_seconds=0.02,
)


class Writer:
    """One sink with its engine; its batches tell from the table alone whether one of them was lost.

    Each batch counts its writer's own row up, inserts a row, deletes an older one and overwrites two that all writers
    overwrite, the later sequence the winner.
    """

    def __init__(self, spark: SparkSession, target: str, name: str) -> None:
        self.name = name
        self.engine, self.merges = IN_A_ROUND[name]
        self.number = list(IN_A_ROUND).index(name)
        self.own = 10_000 * (self.number + 1)
        self.results: list[MergeResult] = []
        self._spark = spark
        self._sink = MergeSink(
            target=target,
            keys=["id"],
            sequence_by="lsn",
            apply_as_deletes="op = 'd'",
            column_list=["id", "lsn", "name"],
            tombstones=False,
            app_id=name,
            retry=PATIENT,
            metrics=MergeMetrics(registry=CollectorRegistry()),
        )._under(costs=Only(self.engine))

    def deliver(self) -> None:
        """The next batch."""
        number = len(self.results)
        self.results.append(run(self._sink, batch(self._spark, SCHEMA, *self.events(number)), number))

    def deliver_all(self) -> None:
        """The batches of a round."""
        for _ in range(self.merges):
            self.deliver()

    def events(self, number: int) -> list[tuple[Any, ...]]:
        """Of a batch."""
        lsn, said = len(IN_A_ROUND) * number + self.number, f"{self.name} {number}"
        shared = {number % len(SHARED), (number + self.number) % len(SHARED)}
        found = [(key, lsn, said, "u") for key in (self.own, self.own + 1 + number, *shared)]
        if number >= KEPT_BATCHES:
            found.append((self.own + 1 + number - KEPT_BATCHES, lsn, None, "d"))
        return found


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
def test_no_update_is_lost_among_writers_of_all_engines(spark: SparkSession, tmp_table: str):
    """The rows are those of all merges, and all changes one after the other make the table.

    Each version is one commit, and each batch in one of them, with all of its changes.
    """
    spark.sql(
        f"CREATE TABLE delta.`{tmp_table}` (id bigint, lsn bigint, name string, counted bigint) USING delta"
        " TBLPROPERTIES ('delta.enableDeletionVectors' = 'true', 'delta.enableChangeDataFeed' = 'true')"
    )
    keys = ", ".join(f"({key})" for key in (*SHARED, *DOOMED))
    spark.sql(f"INSERT INTO delta.`{tmp_table}` SELECT id, -1L, 'none', 0L FROM VALUES {keys} AS t(id)")
    writers, users = [Writer(spark, tmp_table, name) for name in IN_A_ROUND], Users(spark, tmp_table)
    for writer in writers:
        writer.deliver()
    with ThreadPoolExecutor(len(writers) + 1) as threads:
        for number in range(ROUNDS):
            acts = [threads.submit(writer.deliver_all) for writer in writers]
            for act in (*acts, threads.submit(users.act, number)):
                act.result(300)

    root, rows = Path(tmp_table), expected_rows(writers, users)
    for writer in writers:
        done = {(result.outcome, result.engine) for result in writer.results}
        assert done == {("committed", writer.engine)}, writer.name
        assert len(writer.results) == 1 + ROUNDS * writer.merges
    checked = check_table(root)
    assert target_rows(spark, tmp_table, *COLUMNS) == rows
    assert as_tuples(live_rows(root)) == rows
    found = QueryBuilder().register("t", DeltaTable(tmp_table)).execute("SELECT * FROM t")
    assert as_tuples(pa.table(found.read_all())) == rows

    commits = [json.loads(line) for version in range(checked.version + 1) for line in commit(root, version)]
    assert len(list((root / "_delta_log").glob("*.json"))) == checked.version + 1
    made = Counter((line["txn"]["appId"], line["txn"]["version"]) for line in commits if "txn" in line)
    batches = [(f"{writer.name}/target", number) for writer in writers for number in range(len(writer.results))]
    assert made == Counter(batches)
    feed = change_rows(spark, tmp_table, *COLUMNS)
    assert replayed(feed) == rows
    for writer in writers:
        expect_changes(feed, writer)

    lost = {writer.name: sum(sum(result.conflicts.values()) for result in writer.results) for writer in writers}
    infos = [line["commitInfo"] for line in commits if "commitInfo" in line]
    by = Counter((info["operation"], info["engineInfo"].split("/")[0].split(":")[0]) for info in infos)
    log.info("%d merges, %d versions; lost: %s; by users: %d; %s", len(batches), len(infos), lost, users.lost, dict(by))
    assert sum(lost.values()) > 0, "nobody lost a commit: the writers have not met"
    if MERGES >= ENOUGH:
        assert all(lost.values())
        assert by["OPTIMIZE", "stream_merge"] > 0


def expected_rows(writers: list[Writer], users: Users) -> list[tuple[Any, ...]]:
    """What all batches and all users make, in whatever order."""
    rows: dict[int, tuple[Any, ...]] = {key: (key, -1, "none") for key in (*SHARED, *DOOMED[users.deleted :])}
    for writer in writers:
        for number in range(len(writer.results)):
            for key, lsn, name, op in writer.events(number):
                if op == "d":
                    del rows[key]
                elif key not in rows or rows[key][1] < lsn:
                    rows[key] = (key, lsn, name)
    counted = {**dict.fromkeys((*SHARED, *DOOMED), 0), **dict.fromkeys((0, 1), users.counted)}
    return sorted(((*row, counted.get(key)) for key, row in rows.items()), key=repr)


def as_tuples(rows: pa.Table) -> list[tuple[Any, ...]]:
    return sorted((tuple(row.values()) for row in rows.select(list(COLUMNS)).to_pylist()), key=repr)


def commit(root: Path, version: int) -> Iterator[bytes]:
    """The lines of a commit."""
    return iter((root / "_delta_log" / f"{version:020}.json").read_bytes().splitlines())


def replayed(feed: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The rows that all changes make, one version after the other; each change is one of the very row that is there."""
    rows: dict[int, tuple[Any, ...]] = {}
    gone = ("delete", "update_preimage")
    for _, kind, *values in sorted(feed, key=lambda change: (change[0], change[1] not in gone)):
        row = tuple(values)
        if kind in gone:
            assert rows.pop(row[0], None) == row, (kind, row)
        else:
            assert rows.setdefault(row[0], row) is row, (kind, row)
    return sorted(rows.values(), key=repr)


def expect_changes(feed: Iterable[tuple[Any, ...]], writer: Writer) -> None:
    """Of each batch what concerns its writer's own rows stands in the version of its commit, and in no other."""
    found = Counter(change for change in feed if change[2] // 10_000 == writer.own // 10_000)
    wanted: Counter[tuple[Any, ...]] = Counter()
    rows: dict[int, tuple[Any, ...]] = {}
    for number, result in enumerate(writer.results):
        for key, lsn, name, op in writer.events(number):
            if key in SHARED:
                continue
            before, after = rows.get(key), (key, lsn, name, None)
            if op == "d":
                wanted[result.version, "delete", *rows.pop(key)] += 1
                continue
            rows[key] = after
            if before is None:
                wanted[result.version, "insert", *after] += 1
            else:
                wanted[result.version, "update_preimage", *before] += 1
                wanted[result.version, "update_postimage", *after] += 1
    assert found == wanted


# -- what keeps them apart ----------------------------------------------------------------------


def test_delta_rs_writes_under_the_lock_of_sparks_commits(
    spark: SparkSession, tmp_table: str, monkeypatch: pytest.MonkeyPatch
):
    """Spark looks whether a version is there and then renames, over whatever came in between.

    So nobody of Spark may be in between while delta-rs commits: the target, the remembered deletes, the quarantine.
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
        app_id="rust",
        metrics=MergeMetrics(registry=CollectorRegistry()),
    )._under(costs=Only("native"))
    first = batch(spark, SCHEMA, (1, 1, "one", "u"), (2, 1, None, "d"), (None, 1, "no key", "u"))
    then = batch(spark, SCHEMA, (1, 2, "uno", "u"), (3, 2, None, "d"), (None, 2, "no key", "u"))
    merge_of(first, 0)
    monkeypatch.setattr(delta_rs, "write_deltalake", noting(delta_rs.write_deltalake, lambda to, *_: to.table_uri))
    monkeypatch.setattr(TableMerger, "execute", noting(TableMerger.execute, lambda merger: merger._table.table_uri()))

    assert merge_of(then, 1) == "native"

    written = [tmp_table, *(sibling(tmp_table, kind) for kind in (TOMBSTONE_TABLE_PREFIX, QUARANTINE_TABLE_PREFIX))]
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
