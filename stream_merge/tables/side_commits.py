"""How the sink's side tables are written: appended once per batch, retried when another writer won."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from pyspark.sql import DataFrame

from stream_merge.errors import MergeFailedError
from stream_merge.model.snapshot import FINGERPRINT, History, recorded_fingerprint
from stream_merge.model.table_ref import TableRef
from stream_merge.spark.errors import reason
from stream_merge.tables import retry, spark_table

Runner = Callable[[Callable[[int], None]], None]
"""Runs an attempt under the sink's retry policy."""
Judge = Callable[[int, int, Callable[[], str | None]], None]
"""Stops where a batch is not the one that a table has recorded: given the recorded id, the batch's, and what gets the
fingerprint of the recorded batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SideCommit:
    """How a side table is written: once per batch, retried when another writer won."""

    app_id: str | None
    """Application id of the commit's role; None writes no transaction id."""
    batch_id: int
    run: Runner
    fingerprint: str | None = None
    """`Checkpoint.fingerprint` of the batch; None: a repeated one is known by its id alone."""
    user: str | None = None
    """The user's own value of `userMetadata`, kept beside the sink's."""
    judge: Judge | None = None
    """None: a batch whose id, or a later one, is recorded is skipped."""

    @property
    def metadata(self) -> str | None:
        """JSON for the commit's `userMetadata`, by which the batch is found again."""
        if self.app_id is None:
            return self.user
        fingerprint = {} if self.fingerprint is None else {FINGERPRINT: self.fingerprint}
        ours = {"app_id": self.app_id, "batch_id": self.batch_id, **fingerprint}
        return json.dumps({"stream_merge": ours, "user": self.user})

    def expect_own(self, transaction: Callable[[str], int | None], version: int, history: History) -> None:
        """Let no batch of a stream pass for a repeated one because another is recorded, under its id or a later one.

        Cost: nothing where the table has recorded earlier batches alone; else a look at its newest commits.

        Args:
            transaction: of the table, at that version.
            version: the table's newest.
            history: of the table.
        """
        recorded = None if self.app_id is None or self.judge is None else transaction(self.app_id)
        if recorded is not None and self.judge is not None:
            self.judge(recorded, self.batch_id, lambda: self.recorded_fingerprint(version, history))

    def recorded_fingerprint(self, version: int, history: History) -> str | None:
        """What the table says of the batch that it holds under this id."""
        return recorded_fingerprint(version, history, app_id=self.app_id, batch_id=self.batch_id)


def append_once(rows: DataFrame, table: TableRef, commit: SideCommit) -> None:
    """Append rows in one commit; a second append under the same application and batch id does nothing.

    Guarantees: idempotent when there is an application id (Delta's `txnAppId` and `txnVersion` writer options).
    Cost: one Spark job per attempt.
    Raises: `CommitConflictError` when the policy is exhausted, `MergeFailedError` for any other failure.
    """
    if commit.judge is not None:
        session = rows.sparkSession
        found = spark_table.find(session, table)
        if found is not None:
            history = spark_table.history_of(session, table)
            commit.expect_own(found.transaction, found.version, history)
    writer = rows.write.format("delta").mode("append")
    if commit.metadata is not None:
        writer = writer.option("userMetadata", commit.metadata)
    if commit.app_id is not None:
        writer = writer.option("txnAppId", commit.app_id).option("txnVersion", str(commit.batch_id))

    def attempt(_: int) -> None:
        try:
            if table.path is not None:
                writer.save(table.plain)
            else:
                writer.saveAsTable(table)
        except Exception as err:
            lost = retry.conflict(err, target=table, batch_id=commit.batch_id)
            if lost is None:
                msg = f"[WRITE_FAILED] writing to {table!r} for batch {commit.batch_id} failed: {reason(err)}"
                raise MergeFailedError(msg, target=table, batch_id=commit.batch_id) from err
            if retry.VERDICTS[lost.conflict] is retry.Verdict.LOOK_UP_FIRST and commit.app_id is not None:
                # A blind append reads nothing, so only its own transaction id can be the one recorded:
                # a twin of this call wrote the same rows, or the answer to this very commit was lost.
                return
            raise lost from err

    commit.run(attempt)
