"""What holds for the log of remembered deletes, whichever engine reads and writes it."""

from __future__ import annotations

from stream_merge import names
from stream_merge.snapshot import TableSnapshot

TIDY_FILES = 64
"""The log is tidied when it has this many files."""


def log_of(target_id: str, found: TableSnapshot | None) -> TableSnapshot | None:
    """The log, if it belongs to this very target: one that was dropped and made anew starts without."""
    if found is None or found.properties.get(names.TARGET_ID_PROPERTY) != target_id:
        return None
    return found
