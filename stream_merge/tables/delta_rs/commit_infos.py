"""What commits say of themselves; read from their files where delta-rs (1.6) cannot give them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from stream_merge.model.snapshot import CommitRecord, metrics_of_history

_BY_DELTA_RS = {
    "num_source_rows": "numSourceRows",
    "num_target_rows_inserted": "numTargetRowsInserted",
    "num_target_rows_updated": "numTargetRowsUpdated",
    "num_target_rows_deleted": "numTargetRowsDeleted",
    "num_target_rows_copied": "numTargetRowsCopied",
    "execution_time_ms": "executionTimeMs",
}
"""Metrics of merges that older sinks left to delta-rs, and what Delta calls them."""


def newest_first(commit: Callable[[int], bytes], version: int) -> Iterator[dict[str, Any]]:
    """The commits' own words with their versions, as far as the log is kept.

    delta-rs gives none at all if one has a number that it does not expect, as Spark's CLONE: "readVersion": -1.

    Cost: a file for each.

    Args:
        commit: the text of a version; raises FileNotFoundError.
        version: the newest.
    """
    for number in range(version, -1, -1):
        try:
            text = commit(number)
        except FileNotFoundError:
            return
        actions = (json.loads(line) for line in text.splitlines() if line.strip())
        said: dict[str, Any] = next((action["commitInfo"] for action in actions if "commitInfo" in action), {})
        yield {**said, "version": number}


def record(commit: Mapping[str, Any]) -> CommitRecord:
    """A commit by its own words."""
    return CommitRecord(
        version=int(commit["version"]),
        timestamp_ms=commit.get("timestamp"),
        user_metadata=commit.get("userMetadata"),
        metrics=metrics_of_history(
            {_BY_DELTA_RS.get(name, name): value for name, value in (commit.get("operationMetrics") or {}).items()}
        ),
    )
