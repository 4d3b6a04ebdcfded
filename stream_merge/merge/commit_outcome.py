"""Whether a commit landed when nobody said so: checked in a freshly loaded table, never guessed."""

from __future__ import annotations

from stream_merge.engines.base import Commits, CommitTag, MergeReport
from stream_merge.errors import CommitStateUnknownError, MergeFailedError, StreamMergeError
from stream_merge.model.snapshot import is_applied
from stream_merge.spark.errors import reason
from stream_merge.tables import backoff


def landed(commits: Commits, tag: CommitTag, *, since: int) -> MergeReport | None:
    """What a commit with this tag did, by its token in the history; None when it did not land.

    `already_applied` when only the transaction id shows the batch: a twin of this call committed it.
    """
    target = commits.find()
    if target is None:
        return None
    for commit in commits.history(newer_than=since, up_to=target.version):
        if commit.user_metadata is not None and tag.token in commit.user_metadata:
            return MergeReport(
                inserted=commit.metrics.get("numTargetRowsInserted", 0),
                updated=commit.metrics.get("numTargetRowsUpdated", 0),
                deleted=commit.metrics.get("numTargetRowsDeleted", 0),
                version=commit.version,
                metrics=commit.metrics,
            )
    if is_applied(target.transaction, tag.app_id, tag.batch_id):
        return MergeReport(already_applied=True)
    return None


_REPAIR = "the batch is committed; run it again to remove rows that later deletes refuse"


def decide(
    error: Exception, commits: Commits, target: str, tag: CommitTag, *, since: int, is_repair: bool = False
) -> MergeReport:
    """The report of an attempt that raised although its commit landed; otherwise the error that is true.

    `CommitConflictError`: it lost, nothing was written. `CommitStateUnknownError`: the table cannot be read; never
    retry blindly. `MergeFailedError`: it failed and did not land. Any other `StreamMergeError` is raised as it is.
    """
    if isinstance(error, StreamMergeError):
        raise error
    remedy = {"remedy": _REPAIR} if is_repair else {}
    lost = backoff.conflict(error, target=target, batch_id=tag.batch_id, **remedy)
    if lost is not None and backoff.CONFLICT_KINDS[lost.conflict] is backoff.ConflictKind.RETRY:
        raise lost from error
    try:
        report = landed(commits, tag, since=since)
    except StreamMergeError:
        raise
    except Exception as unreadable:
        msg = (
            f"[COMMIT_STATE_UNKNOWN] batch {tag.batch_id} failed while committing to {target!r}, and the table cannot"
            f" be read to check it; restart the query, or search the table's history for {tag.token!r}"
        )
        unknown = CommitStateUnknownError(msg, target=target, batch_id=tag.batch_id)
        unknown.add_note(f"reading the table failed with: {reason(unreadable)}")
        raise unknown from error
    if report is not None:
        return report
    if lost is not None:
        raise lost from error
    msg = f"[MERGE_FAILED] merging batch {tag.batch_id} into {target!r} failed, nothing was committed: {reason(error)}"
    if is_repair:
        msg = f"[RECHECK_FAILED] re-checking batch {tag.batch_id} in {target!r} failed; {_REPAIR}: {reason(error)}"
    raise MergeFailedError(msg, target=target, batch_id=tag.batch_id) from error
