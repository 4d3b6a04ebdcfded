"""Locks between processes: files beside a table, locked until their process ends, however it ends."""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO
from uuid import uuid4

from stream_merge.errors import HeldError
from stream_merge.model import names
from stream_merge.model.logs import tell
from stream_merge.model.table_ref import TableRef

log = logging.getLogger(__name__)

_LOCK_PREFIX = f"{names.RESERVED_PREFIX}lock_"
_WRITERS_PREFIX = f"{names.RESERVED_PREFIX}writers_"
"""Folder with a file of each process that writes to a table."""
_LOOKS, _LOOK_SECONDS = 5, 0.05
"""A reader (`lock_holder`) excludes others from the lock for a moment."""
_ours: set[Path] = set()
"""Locked by this process, in which sinks and Spark exclude each other."""


@contextmanager
def locked(path: Path, by: str) -> Iterator[str | None]:
    """Hold a lock; None when this call has it, else who does. `by` says who this is, for others to read.

    Where the file system has no locks or the file cannot be written nobody is kept apart.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
    except OSError:  # whoever writes there says what is wrong
        yield None
        return
    with file:
        try:
            is_taken = _is_taken(file)
        except OSError:
            yield None
            return
        if is_taken:
            file.seek(0)
            yield file.read() or "another process"
            return
        file.truncate(0)
        file.write(f"process {os.getpid()} ({by})")
        file.flush()
        yield None


def _is_taken(file: IO[str]) -> bool:
    """Whether somebody else has the lock; if not, this file has it from now on."""
    for look in range(_LOOKS):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if look < _LOOKS - 1:
                time.sleep(_LOOK_SECONDS)
        else:
            return False
    return True


@contextmanager
def only_writer(target: str, by: str, location: str | None = None) -> Iterator[None]:
    """Keep jobs and sinks of other processes away from a table on a local disk.

    Spark's commit to a local file system checks and then renames (Delta 4.4), so that the commits of two processes can
    overwrite each other. `location` of a catalog name; None while nobody knows it, and then nobody is kept apart.
    """
    path = _lock_path(TableRef(target), location)
    if path is None or path in _ours:
        yield
        return
    with locked(path, by) as holder:
        if holder is not None:
            raise _taken(target, holder)
        _ours.add(path)
        try:
            warn_of_others(target, by, location)
            yield
        finally:
            _ours.discard(path)


def expect_no_other(target: str, location: str | None = None) -> None:
    """Stop where a job of another process has a table on a local disk for itself."""
    path = _lock_path(TableRef(target), location)
    holder = None if path is None or path in _ours else lock_holder(path)
    if holder is not None:
        raise _taken(target, holder)


def enter(target: str, by: str, location: str | None = None) -> None:
    """Register as a writer, and only then check for a job that has the table for itself: one of two sees the other."""
    warn_of_others(target, by, location)
    expect_no_other(target, location)


def expect_alone(target: str, location: str | None = None) -> None:
    """Stop where a sink of another process has written to a table on a local disk and is still there."""
    path = _lock_path(TableRef(target), location)
    if path is None:
        return
    folder, ours = _writers_folder(path), _writers.get(path)
    with suppress(FileNotFoundError):
        for name in os.listdir(folder):  # not by process number: that of another container may be the same
            is_own = ours is not None and name == ours.own.name
            holder = None if is_own else lock_holder(folder / name)
            if holder is not None:
                raise _taken(target, holder)


class _Writer:
    """This process as a registered writer of a table; its lock ends with it, however it ends."""

    def __init__(self, lock: Path, by: str) -> None:
        self._lock, self._by = lock, by
        self._folder = _writers_folder(lock)
        self._is_registered = False
        self.own = self._folder / uuid4().hex
        """Its file among the writers'."""
        self._checked = {self.own.name}
        self._known: set[str] = set()

    def others(self) -> list[str]:
        """Other writers of the table that were not reported before."""
        if not self._is_registered:
            self._register()
        holders = [] if self._lock in _ours else [lock_holder(self._lock)]
        added = set(os.listdir(self._folder)) - self._checked
        self._checked |= added
        holders += [lock_holder(self._folder / name, remove=True) for name in added]
        new = dict.fromkeys(name for name in holders if name is not None and name not in self._known)
        self._known.update(new)
        return list(new)

    def _register(self) -> None:
        self._folder.mkdir(exist_ok=True)
        # Locked and filled under a name that nobody reads: an unlocked file is one of a process that has ended.
        unfinished = self._folder.with_name(f"{self._folder.name}.{self.own.name}")
        file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)  # open for as long as Python runs
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            os.write(file, f"process {os.getpid()} ({self._by})".encode())
            unfinished.replace(self.own)
        except OSError:
            os.close(file)
            raise
        atexit.register(self.own.unlink, missing_ok=True)
        self._is_registered = True


_writers: dict[Path, _Writer] = {}
_writers_lock = threading.Lock()


def warn_of_others(target: str, by: str, location: str | None = None) -> None:
    """Register as a writer of a table on a local disk, and log each other process that writes to it once.

    Where the file system has no locks or nothing can be written beside the table nobody is registered. Cost: at first a
    file beside the table; then reading a lock and a folder: tens of microseconds.
    """
    path = _lock_path(TableRef(target), location)
    if path is None:
        return
    with _writers_lock, suppress(OSError):
        ours = _writers[path] = _writers.get(path) or _Writer(path, by)
        for other in ours.others():
            remedy = "on a local disk the commits of two processes can overwrite each other: let one of them end"
            tell(log.warning, "another_writer", target=target, by=by, other=other, remedy=remedy)


def lock_holder(path: Path, *, remove: bool = False) -> str | None:
    """What a process has written into a file that it holds locked; None where nobody does, and `remove` deletes it.

    Readers do not exclude each other, and for a moment exclude whoever wants the lock (`locked` waits for that).
    """
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read() or "another process"
    except OSError:  # there has never been one, or the file system knows no locks
        return None
    if remove:
        path.unlink(missing_ok=True)
    return None


def _taken(target: str, holder: str) -> HeldError:
    msg = (
        f"[TABLE_LOCKED] {holder} is writing to {target!r}, and on a local disk two processes can overwrite each"
        " other's commits; end that process first, or use another target"
    )
    return HeldError(msg, target=target)


def _lock_path(target: TableRef, location: str | None) -> Path | None:
    """Lock file beside the table, however its path is spelled; None unless it is known to be on a local disk."""
    ref = TableRef(location) if target.path is None and location is not None else target
    if ref.local is None:
        return None
    place = ref.local.resolve()
    return place.with_name(f"{_LOCK_PREFIX}{place.name}")


def _writers_folder(lock: Path) -> Path:
    return lock.with_name(f"{_WRITERS_PREFIX}{lock.name.removeprefix(_LOCK_PREFIX)}")
