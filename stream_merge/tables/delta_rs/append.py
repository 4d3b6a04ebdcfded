"""Side tables by delta-rs: `side_commits.append_once` for rows that the driver has already."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from stream_merge.errors import MergeFailedError
from stream_merge.model.snapshot import is_applied
from stream_merge.model.table_ref import TableRef
from stream_merge.spark.errors import reason
from stream_merge.tables import retry
from stream_merge.tables.delta_rs.table import NativeTable
from stream_merge.tables.side_commits import SideCommit


def append_once(
    rows: pa.Table, table: TableRef, find: Callable[[], NativeTable | None], commit: SideCommit, *, at_hand: NativeTable
) -> None:
    """Append rows in one commit; a second append under the same application and batch id does nothing.

    delta-rs writes transaction ids but does not check them (1.6): each attempt reads the id from the very
    version that it is based on, and any commit in between makes it lose.

    Args:
        rows: in the table's types.
        table: its name, for messages.
        find: the table up to date, or None where it is gone.
        commit: application id of the commit's role (None: no transaction id), batch id, the sink's retry policy.
        at_hand: the table as this batch has seen it last, for the first attempt.

    Raises: `CommitConflictError` when the policy is exhausted, `MergeFailedError` for any other failure.
    """

    def attempt(number: int) -> None:
        found: NativeTable | None = at_hand
        if number == 1:
            at_hand.refresh_if_free()
        else:
            found = find()
        if found is None:
            msg = f"[TABLE_NOT_FOUND] {table!r} disappeared during batch {commit.batch_id}; restart the query"
            raise MergeFailedError(msg, target=table, batch_id=commit.batch_id)
        commit.expect_own(found.transaction, found.version, found.commits)
        if is_applied(found.transaction, commit.app_id, commit.batch_id):
            return
        try:
            transaction = None if commit.app_id is None else (commit.app_id, commit.batch_id)
            found.append(rows, transaction=transaction, user_metadata=commit.metadata)
        except Exception as err:
            lost = retry.conflict(err, target=table, batch_id=commit.batch_id)
            if lost is not None:
                raise lost from err
            msg = f"[WRITE_FAILED] writing to {table!r} for batch {commit.batch_id} failed: {reason(err)}"
            raise MergeFailedError(msg, target=table, batch_id=commit.batch_id) from err

    commit.run(attempt)
