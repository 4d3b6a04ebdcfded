"""Checkpoints of a log that delta-rs commits to, after the commit: their failure cannot pass for the commit's."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Protocol

from stream_merge.model.logs import tell

log = logging.getLogger(__name__)

_INTERVAL_PROPERTY = "delta.checkpointInterval"
_DEFAULT_INTERVAL = 10
"""Delta's default; delta-rs alone would take 100, and Spark would read ten times as many commits."""
_RETENTIONS = frozenset({"delta.logretentionduration", "delta.deletedfileretentionduration"})
_READ = re.compile(r"interval \d+ (?:nanosecond|microsecond|millisecond|second|minute|hour|day|week)s?")


class Log(Protocol):
    """A table's log in the hands of delta-rs."""

    def create_checkpoint(self) -> None:
        """Write one at the handle's version."""
        ...

    def cleanup_metadata(self) -> None:
        """Delete commits that are past the log's retention and in a checkpoint."""
        ...


def write_if_due(
    table: Log,
    version: int,
    properties: Mapping[str, str],
    location: str,
    *,
    by_spark: Callable[[], None] | None,
) -> None:
    """Write the checkpoint that a table's interval asks for at a version, and clean up its log; failures are warnings.

    How long commits and removed files are kept, delta-rs (1.6) reads as `interval 30 days` alone, and else takes its
    own defaults; Delta also reads `30 days`, capitals, and several units: there Spark does it, if `by_spark` is given.
    """
    interval = int(properties.get(_INTERVAL_PROPERTY, _DEFAULT_INTERVAL))
    if version == 0 or version % interval:
        return
    try:
        if any(name.lower() in _RETENTIONS and not _READ.fullmatch(value) for name, value in properties.items()):
            if by_spark is not None:
                by_spark()
            return
        table.create_checkpoint()
        if properties.get("delta.enableExpiredLogCleanup", "true").lower() != "false":
            table.cleanup_metadata()
    except Exception:
        tell(log.warning, "checkpoint_failed", table=location, version=version, exc_info=True)
