"""What a sink does for its target's files when a batch is merged: settings, checked without Spark."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from stream_merge.errors import ConfigError

LEAST_VACUUM_AFTER = timedelta(hours=1)
"""A file is on the disk before the commit that needs it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Maintenance:
    """Upkeep of a target: a round at the end of a call, after the target's commit. It never fails a batch."""

    optimize: bool = True
    """Put small files together, write files without the rows that deletion vectors have removed, and cluster what a
    table with `cluster_by` has not clustered yet."""
    zorder_by: tuple[str, ...] = ()
    """Columns by which rows lie together; each round that has something to do writes the whole table again."""
    vacuum_after: timedelta | None = None
    """Delete files that the table has not needed for its own `delta.deletedFileRetentionDuration`, said once more here;
    None: never. Spark does it, at most once a day."""
    every: int = 100
    """A round after so many calls that changed a row."""
    budget_seconds: float = 60.0
    """What a round may take; files are picked by what writing them again is expected to take."""
    force: bool = False
    """Allow another `vacuum_after` than that. A shorter one: time travel, readers of the change feed and streams that
    are behind lose what it deletes, and another writer what it has written for so long and not yet committed. A longer
    one: of files that were removed longer ago than the property says, those written so long ago are deleted."""

    def __post_init__(self) -> None:
        problems = list(_problems(self))
        if problems:
            raise ConfigError(problems)


def _problems(wanted: Any) -> list[str]:
    found: list[str] = []
    if isinstance(wanted.zorder_by, str) or not all(isinstance(name, str) and name for name in wanted.zorder_by):
        found.append(f"[INVALID_SETTING] zorder_by={wanted.zorder_by!r} must be a tuple of column names")
    if wanted.zorder_by and not wanted.optimize:
        found.append("[CONFLICTING_SETTINGS] zorder_by is given, but optimize is off; turn it on, or remove zorder_by")
    if wanted.vacuum_after is not None and not isinstance(wanted.vacuum_after, timedelta):
        found.append(
            f"[INVALID_SETTING] vacuum_after={wanted.vacuum_after!r} must be a timedelta, such as timedelta(days=7)"
        )
    elif wanted.vacuum_after is not None and wanted.vacuum_after < LEAST_VACUUM_AFTER:
        found.append(
            f"[INVALID_SETTING] vacuum_after={wanted.vacuum_after} must be at least an hour; less deletes files of"
            " commits in progress"
        )
    if not isinstance(wanted.every, int) or isinstance(wanted.every, bool) or wanted.every < 1:
        found.append(f"[INVALID_SETTING] every={wanted.every!r} must be a whole number of calls, 1 or more")
    budget = wanted.budget_seconds
    if not isinstance(budget, int | float) or isinstance(budget, bool) or not math.isfinite(budget) or budget <= 0:
        found.append(f"[INVALID_SETTING] budget_seconds={budget!r} must be a positive number of seconds")
    if wanted.force and wanted.vacuum_after is None:
        found.append("[CONFLICTING_SETTINGS] force is given without vacuum_after, and applies to that alone; remove it")
    if not wanted.optimize and wanted.vacuum_after is None:
        found.append(
            "[CONFLICTING_SETTINGS] optimize is off and vacuum_after is not given, so nothing is left to do; remove"
            " maintenance"
        )
    return found
