"""What delta-rs (1.6) counts in a merge, under the names of Delta's MERGE."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from stream_merge.model.snapshot import metrics_of_history

MERGE_METRICS: Mapping[str, str] = {
    "num_source_rows": "operationNumSourceRows",
    "num_target_rows_inserted": "numTargetRowsInserted",
    "num_target_rows_updated": "numTargetRowsUpdated",
    "num_target_rows_deleted": "numTargetRowsDeleted",
    "num_target_rows_copied": "numTargetRowsCopied",
    "num_target_files_scanned": "numTargetFilesAfterSkipping",
    "num_target_files_removed": "numTargetFilesRemoved",
    "execution_time_ms": "executionTimeMs",
    "scan_time_ms": "scanTimeMs",
    "rewrite_time_ms": "rewriteTimeMs",
}
"""Metrics of a merge by delta-rs and what Delta calls them; delta-rs does not count the others. Among the files that it
has added it counts those of the change feed: `files_written` has both, apart."""
MATCHED = {
    "numTargetRowsUpdated": "numTargetRowsMatchedUpdated",
    "numTargetRowsDeleted": "numTargetRowsMatchedDeleted",
}
"""What delta-rs need not count: its merges have no clauses for rows that the source lacks."""


def as_merge_metrics(metrics: Mapping[str, Any]) -> dict[str, int]:
    """What delta-rs counted, under the names of Delta's MERGE; what it does not count is absent."""
    found = {ours: int(metrics[theirs]) for theirs, ours in MERGE_METRICS.items() if theirs in metrics}
    skipped = metrics.get("num_target_files_skipped_during_scan")
    if skipped is not None and "numTargetFilesAfterSkipping" in found:
        found["numTargetFilesBeforeSkipping"] = found["numTargetFilesAfterSkipping"] + int(skipped)
    for total, by_matched in MATCHED.items():
        if total in found:
            found[by_matched] = found[total]
    return found


def files_written(commit: bytes) -> dict[str, int]:
    """Files of a commit (the text of its file in the log; none where nothing was merged), under Delta's names."""
    added, changes, removed = (_sizes(commit, kind) for kind in ("add", "cdc", "remove"))
    return {
        "numTargetFilesAdded": len(added),
        "numTargetBytesAdded": sum(added),
        "numTargetChangeFilesAdded": len(changes),
        "numTargetChangeFileBytes": sum(changes),
        "numTargetFilesRemoved": len(removed),
        "numTargetBytesRemoved": sum(removed),
    }


def _sizes(commit: bytes, kind: Literal["add", "cdc", "remove"]) -> list[int]:
    begins = b'{"%s"' % kind.encode()
    return [int(json.loads(line)[kind].get("size") or 0) for line in commit.splitlines() if line.startswith(begins)]


def metrics_of(history: Mapping[str, Any]) -> dict[str, int]:
    """The metrics of a commit, whoever made it, as far as it says them itself."""
    if MERGE_METRICS.keys() & history.keys():
        return as_merge_metrics(history)
    return metrics_of_history(history)
