"""Maintenance of a sink's target: settings, checked without Spark."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from stream_merge.errors import ConfigError

SMALL_BYTES = 32 << 20
"""Files below it are compacted; each byte of a partition is rewritten until its file has reached this size."""
_REMOVED = {
    "zorder_by": "create the table with cluster_by, or run OPTIMIZE … ZORDER BY yourself",
    "vacuum_after": "set vacuum, and the table property delta.deletedFileRetentionDuration",
    "budget_seconds": "raise every to compact less often",
    "budget": "raise every to compact less often",
    "force": "shorten the table property delta.deletedFileRetentionDuration instead",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Maintenance:
    """Compacts and vacuums the target at the end of a call, after the target's commit. It never fails a batch."""

    optimize: bool = True
    """OPTIMIZE small files, purge removed rows where they are many, and cluster new files of a clustered table."""
    vacuum: bool = False
    """VACUUM the target and its side tables, at most once a day: delete files that the table has not needed for its own
    `delta.deletedFileRetentionDuration`."""
    every: int = 100
    """After how many calls that changed a row."""

    def __new__(cls, **settings: object) -> Maintenance:  # noqa: D102 - the dataclass has the signature
        if problems := removed_settings(settings):
            raise ConfigError(problems)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        problems = list(_problems(self))
        if problems:
            raise ConfigError(problems)


def removed_settings(names: Iterable[str]) -> list[str]:
    """What replaces each setting of earlier versions among these."""
    return [f"[UNKNOWN_SETTING] {name} is not a setting; {_REMOVED[name]}" for name in names if name in _REMOVED]


def _problems(wanted: Any) -> Iterable[str]:
    for name in ("optimize", "vacuum"):
        if not isinstance(getattr(wanted, name), bool):
            yield f"[INVALID_SETTING] {name}={getattr(wanted, name)!r} must be True or False"
    if not isinstance(wanted.every, int) or isinstance(wanted.every, bool) or wanted.every < 1:
        yield f"[INVALID_SETTING] every={wanted.every!r} must be a whole number of calls, 1 or more"
    if not wanted.optimize and not wanted.vacuum:
        yield "[CONFLICTING_SETTINGS] optimize and vacuum are both off, so nothing is left to do; remove maintenance"
