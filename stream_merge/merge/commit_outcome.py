"""Whether a commit landed when nobody said so: asked of a freshly loaded table, never guessed."""

from __future__ import annotations

from stream_merge.engines.base import Commits, CommitTag, MergeReport
from stream_merge.errors import CommitStateUnknownError, MergeFailedError, StreamMergeError
from stream_merge.model.snapshot import is_applied
from stream_merge.spark.errors import reason
from stream_merge.tables import retry


def landed(commits: Commits, tag: CommitTag, *, since: int) -> MergeReport | None:
    """What is known of a commit with this tag.

    Args:
        commits: where to look.
        tag: what the commit carries.
        since: version of the table before the first attempt.

    Returns:
        The report of the very commit, with the metrics in its history, when its token is found;
        a report with `already_applied` when only the transaction id shows the batch (a twin of this
        call committed it); None when it did not land.
    """
    found = commits.find()
    if found is None:
        return None
    for commit in commits.history(newer_than=since, up_to=found.version):
        if commit.user_metadata is not None and tag.token in commit.user_metadata:
            return MergeReport(
                inserted=commit.metrics.get("numTargetRowsInserted", 0),
                updated=commit.metrics.get("numTargetRowsUpdated", 0),
                deleted=commit.metrics.get("numTargetRowsDeleted", 0),
                version=commit.version,
                metrics=commit.metrics,
            )
    if is_applied(found.transaction, tag.app_id, tag.batch_id):
        return MergeReport(already_applied=True)
    return None


_REPAIR = "the batch is committed; run it again to remove rows that later deletes refuse"


def decide(
    error: Exception, commits: Commits, target: str, tag: CommitTag, *, since: int, is_repair: bool = False
) -> MergeReport:
    """Turn the error of an attempt into what really happened.

    Args:
        error: what the attempt raised.
        commits: where to look for its commit.
        target: as the sink was told.
        tag: what the commit carries.
        since: version of the table before the first attempt.
        is_repair: whether it was to undo rows of a batch that is committed.

    Returns: the report of the attempt when its commit landed although it failed.

    Raises:
        CommitConflictError: it lost; nothing was written and another attempt may win.
        CommitStateUnknownError: the table cannot be read to find out; never try blindly.
        MergeFailedError: it failed and did not land.
        StreamMergeError: the engine itself knows what happened, and raised it.
    """
    if isinstance(error, StreamMergeError):
        raise error
    remedy = {"remedy": _REPAIR} if is_repair else {}
    lost = retry.conflict(error, target=target, batch_id=tag.batch_id, **remedy)
    if lost is not None and retry.VERDICTS[lost.conflict] is retry.Verdict.RETRY:
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
