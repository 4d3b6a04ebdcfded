"""What delta-rs (1.6) counts in a merge, under the names of Delta's MERGE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stream_merge.model.snapshot import metrics_of_history

MERGE_METRICS: Mapping[str, str] = {
    "num_source_rows": "operationNumSourceRows",
    "num_target_rows_inserted": "numTargetRowsInserted",
    "num_target_rows_updated": "numTargetRowsUpdated",
    "num_target_rows_deleted": "numTargetRowsDeleted",
    "num_target_rows_copied": "numTargetRowsCopied",
    "num_target_files_scanned": "numTargetFilesAfterSkipping",
    "num_target_files_added": "numTargetFilesAdded",
    "num_target_files_removed": "numTargetFilesRemoved",
    "execution_time_ms": "executionTimeMs",
    "scan_time_ms": "scanTimeMs",
    "rewrite_time_ms": "rewriteTimeMs",
}
"""Metrics of a merge by delta-rs and what Delta calls them; delta-rs does not count the others."""
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


def metrics_of(history: Mapping[str, Any]) -> dict[str, int]:
    """The metrics of a commit, whoever made it."""
    if MERGE_METRICS.keys() & history.keys():
        return as_merge_metrics(history)
    return metrics_of_history(history)
