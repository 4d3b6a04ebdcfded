"""Checkpoints of a log that delta-rs commits to, after the commit: their failure cannot pass for the commit's."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Protocol

from stream_merge.model.logs import tell

log = logging.getLogger(__name__)

_INTERVAL_PROPERTY = "delta.checkpointInterval"
_DEFAULT_INTERVAL = 10
"""Delta's default; delta-rs alone would take 100, and Spark would read ten times as many commits."""


class Log(Protocol):
    """A table's log in the hands of delta-rs."""

    def create_checkpoint(self) -> None:
        """Write one at the handle's version."""
        ...

    def cleanup_metadata(self) -> None:
        """Delete commits that are past the log's retention and in a checkpoint."""
        ...


def write_if_due(table: Log, version: int, properties: Mapping[str, str], location: str) -> None:
    """Write the checkpoint that a table's interval asks for at a version, and tidy up its log.

    Without it readers have more commits to read; no more than that, so a failure is a warning.

    Args:
        table: at that version.
        version: of the commit that was made.
        properties: of the table.
        location: of the table, for messages.
    """
    interval = int(properties.get(_INTERVAL_PROPERTY, _DEFAULT_INTERVAL))
    if version == 0 or version % interval:
        return
    try:
        table.create_checkpoint()
        if properties.get("delta.enableExpiredLogCleanup", "true").lower() != "false":
            table.cleanup_metadata()
    except Exception:
        tell(log.warning, "checkpoint_failed", table=location, version=version, exc_info=True)
