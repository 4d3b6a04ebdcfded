"""One process at a time: a file beside what two must not use, locked until its process ends, however it ends."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stream_merge import names
from stream_merge.errors import ConfigError
from stream_merge.places import local_path

_LOCK_PREFIX = f"{names.RESERVED_PREFIX}lock_"
_LOOKS, _LOOK_SECONDS = 5, 0.05
"""Somebody who only looks holds the lock for a moment."""
_ours: set[Path] = set()
"""Held by this process, in which sinks and Spark know of each other."""


@contextmanager
def locked(path: Path, by: str) -> Iterator[str | None]:
    """Hold a lock; None when this call has it, else who does.

    Where the file system knows no locks or the file cannot be written nobody is kept apart.

    Args:
        path: of the file, which stays.
        by: who this is, for others to read.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
    except OSError:  # whoever writes there says what is wrong
        yield None
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            yield file.read() or "another process"
            return
        except OSError:
            yield None
            return
        file.truncate(0)
        file.write(f"process {os.getpid()} ({by})")
        file.flush()
        yield None


@contextmanager
def only_writer(target: str, by: str) -> Iterator[None]:
    """Keep jobs and sinks of other processes away from a table on a local disk.

    Spark's commit to a local file system checks and then renames (Delta 4.4), so that the commits of two processes can
    overwrite each other.

    Raises:
        ConfigError: another process has the table.
    """
    path = _lock_of(target)
    if path is None or path in _ours:
        yield
        return
    for look in range(_LOOKS):
        with locked(path, by) as holder:
            if holder is None:
                _ours.add(path)
                try:
                    yield
                finally:
                    _ours.discard(path)
                return
        if look == _LOOKS - 1:
            raise _taken(target, holder)
        time.sleep(_LOOK_SECONDS)


def expect_no_other(target: str) -> None:
    """Look whether a job of another process has a table on a local disk for itself.

    Raises:
        ConfigError: naming that process.
    """
    path = _lock_of(target)
    if path is None or path in _ours:
        return
    try:
        with path.open(encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _taken(target, file.read() or "another process") from None
    except OSError:  # there has never been one, or the file system knows no locks
        return


def _taken(target: str, holder: str) -> ConfigError:
    msg = (
        f"{holder} is writing to {target!r}, and on a local disk the commits of two processes can overwrite each other;"
        " end that one first, or give this one a target of its own"
    )
    return ConfigError(msg, target=target)


def _lock_of(target: str) -> Path | None:
    """Beside the table, however its path is spelled; None where it is not known to lie on this machine's disks."""
    place = local_path(names.normal_path(target)) if names.is_path(target) else None
    if place is None:
        return None
    place = place.resolve()
    return place.with_name(f"{_LOCK_PREFIX}{place.name}")
