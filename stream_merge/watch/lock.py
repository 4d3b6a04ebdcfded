"""One process at a time merges over a checkpoint: where it lies on a disk, a lock beside it says so."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager

from stream_merge.tables import local_path


@contextmanager
def held(checkpoint: str) -> Iterator[bool]:
    """Whether this process may merge over a checkpoint: on a disk one at a time may, until it ends, however it ends."""
    place = local_path(checkpoint)
    if place is None:
        yield True
        return
    path = place.with_name(f"{place.name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
