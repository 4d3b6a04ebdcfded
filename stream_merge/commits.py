"""How the sink's side tables are written: appended once per batch, retried when another writer won."""

from __future__ import annotations

from collections.abc import Callable

from pyspark.sql import DataFrame

from stream_merge import names, retry
from stream_merge.errors import MergeFailedError
from stream_merge.spark_internals import reason

Runner = Callable[[Callable[[int], None]], None]
"""Runs an attempt under the sink's retry policy."""


def append_once(rows: DataFrame, table: str, *, app_id: str | None, batch_id: int, run: Runner) -> None:
    """Append rows in one commit; a second append under the same application and batch id does nothing.

    Guarantees: idempotent when `app_id` is given (Delta's `txnAppId` and `txnVersion` writer options).
    Cost: one Spark job per attempt.
    Raises: `CommitConflictError` when the policy is exhausted, `MergeFailedError` for any other failure.
    """
    writer = rows.write.format("delta").mode("append")
    if app_id is not None:
        writer = writer.option("txnAppId", app_id).option("txnVersion", str(batch_id))

    def attempt(_: int) -> None:
        try:
            if names.is_path(table):
                writer.save(names.normal_path(table))
            else:
                writer.saveAsTable(table)
        except Exception as err:
            lost = retry.conflict(err, target=table, batch_id=batch_id)
            if lost is None:
                msg = f"writing to {table!r} for batch {batch_id} failed: {reason(err)}"
                raise MergeFailedError(msg, target=table, batch_id=batch_id) from err
            if retry.VERDICTS[lost.conflict] is retry.Verdict.LOOK_UP_FIRST and app_id is not None:
                # A blind append reads nothing, so only its own transaction id can be the one recorded:
                # a twin of this call wrote the same rows, or the answer to this very commit was lost.
                return
            raise lost from err

    run(attempt)
