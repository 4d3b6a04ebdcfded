"""How the sink's side tables are written: appended once per batch, retried when another writer won."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pyspark.sql import DataFrame

from stream_merge import names, retry, tables
from stream_merge.errors import MergeFailedError
from stream_merge.spark_internals import reason

Runner = Callable[[Callable[[int], None]], None]
"""Runs an attempt under the sink's retry policy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SideCommit:
    """How a side table is written: once per batch, retried when another writer won."""

    app_id: str | None
    """Application id of the commit's role; None writes no transaction id."""
    batch_id: int
    run: Runner
    refuse: Callable[[int, int], None] | None = None
    """Called with the recorded id and the batch's where the first is greater; None: such a batch is skipped."""

    def expect_newest(self, transaction: Callable[[str], int | None]) -> None:
        """Let no batch of a stream pass for a repeated one because a later one is recorded."""
        recorded = None if self.app_id is None or self.refuse is None else transaction(self.app_id)
        if recorded is not None and self.refuse is not None and recorded > self.batch_id:
            self.refuse(recorded, self.batch_id)


def append_once(rows: DataFrame, table: str, commit: SideCommit) -> None:
    """Append rows in one commit; a second append under the same application and batch id does nothing.

    Guarantees: idempotent when there is an application id (Delta's `txnAppId` and `txnVersion` writer options).
    Cost: one Spark job per attempt.
    Raises: `CommitConflictError` when the policy is exhausted, `MergeFailedError` for any other failure.
    """
    if commit.refuse is not None:
        found = tables.find(rows.sparkSession, table)
        if found is not None:
            commit.expect_newest(found.transaction)
    writer = rows.write.format("delta").mode("append")
    if commit.app_id is not None:
        writer = writer.option("txnAppId", commit.app_id).option("txnVersion", str(commit.batch_id))

    def attempt(_: int) -> None:
        try:
            if names.is_path(table):
                writer.save(names.normal_path(table))
            else:
                writer.saveAsTable(table)
        except Exception as err:
            lost = retry.conflict(err, target=table, batch_id=commit.batch_id)
            if lost is None:
                msg = f"writing to {table!r} for batch {commit.batch_id} failed: {reason(err)}"
                raise MergeFailedError(msg, target=table, batch_id=commit.batch_id) from err
            if retry.VERDICTS[lost.conflict] is retry.Verdict.LOOK_UP_FIRST and commit.app_id is not None:
                # A blind append reads nothing, so only its own transaction id can be the one recorded:
                # a twin of this call wrote the same rows, or the answer to this very commit was lost.
                return
            raise lost from err

    commit.run(attempt)
