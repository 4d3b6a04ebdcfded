"""What holds for the log of remembered deletes, whichever engine reads and writes it."""

from __future__ import annotations

from stream_merge.errors import ConfigError
from stream_merge.model import names
from stream_merge.model.snapshot import TableSnapshot

TIDY_FILES = 64
"""The log is tidied when it has this many files."""


def log_of(target_id: str, found: TableSnapshot | None) -> TableSnapshot | None:
    """The log, if it belongs to this very target: one that was dropped and re-created starts without.

    Raises:
        ConfigError: the log is in a format that this version does not know, so its deletes would be misread.
    """
    if found is None or found.properties.get(names.TARGET_ID_PROPERTY) != target_id:
        return None
    version = found.properties.get(names.FORMAT_PROPERTY)
    if version not in (None, names.FORMAT_VERSION):
        msg = (
            f"[VERSION_MISMATCH] the tombstone table at {found.location!r} has format {version!r} of another version of"
            f" stream_merge, this one supports {names.FORMAT_VERSION!r}; upgrade stream_merge"
        )
        raise ConfigError(msg)
    return found
