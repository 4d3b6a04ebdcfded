"""What is told on each object store: a stream that has everything once, and commits that meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from deliveries import ChangeStream, delete, ledger, upsert
from pyspark.sql import SparkSession

from stream_merge.model.names import QUARANTINE_TABLE_PREFIX
from stream_merge.model.results import MergeResult
from stream_merge.spark.delta import put_commit


def tell(stream: ChangeStream, *spelled: Callable[[], object]) -> Sequence[MergeResult]:
    """Create, update, delete, late events, broken ones, and each batch again: rows and changes are as on a disk.

    Args:
        stream: to a table that is not there.
        spelled: how the table is spelled anew before the second batch, the third.

    Returns: what the first two batches came to.
    """
    first = stream.deliver(upsert(1, "one", lsn=1), upsert(2, "two", lsn=1), upsert(None, "no key", lsn=1))
    for spell in spelled[:1]:
        spell()
    second = stream.deliver(upsert(1, "new", lsn=5), delete(2, lsn=5), upsert(3, "three", lsn=5))
    for spell in spelled[1:]:
        spell()
    third = stream.deliver(upsert(2, "ghost", lsn=3), upsert(1, "late", lsn=4))

    assert ledger(first) == {"received": 3, "quarantined": 1, "inserted": 2}
    assert ledger(second) == {"received": 3, "updated": 1, "deleted": 1, "inserted": 1}
    assert ledger(third) == {"received": 2, "stale": 1, "unaffected": 1}
    assert stream.rows("id", "lsn", "name") == [(1, 5, "new"), (3, 5, "three")]
    assert stream.changes() == [
        ("delete", 2, 1, "two"),
        ("insert", 1, 1, "one"),
        ("insert", 2, 1, "two"),
        ("insert", 3, 5, "three"),
        ("update_postimage", 1, 5, "new"),
        ("update_preimage", 1, 1, "one"),
    ]
    broken = stream.side_table(QUARANTINE_TABLE_PREFIX).collect()
    assert {tuple(row["reasons"]) for row in broken} == {("null_key",)}
    assert stream.settings["app_id"] is None or len(broken) == 1
    return first, second


def commit_at_once(spark: SparkSession, table: str, *, writers: int, versions: int, lines: int) -> list[list[int]]:
    """Have writers put the same versions of a log by Spark's log store, each a text of its own number: one has each.

    Returns: for each writer the versions that it has put.
    """

    def written(writer: int) -> list[int]:
        won = []
        for version in range(versions):
            try:
                put_commit(spark, table, version, f"{writer}\n" * lines)
            except FileExistsError:
                continue
            won.append(version)
        return won

    with ThreadPoolExecutor(writers) as threads:
        won = list(threads.map(written, range(writers)))
    assert sorted(version for versions_won in won for version in versions_won) == list(range(versions))
    return won
