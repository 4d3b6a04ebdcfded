"""The folder in which the driver reads and writes the files of a table: its own, or copies of those in a store.

Copies are a cache on the driver's disk: data files and deletion vectors never change (Delta protocol).
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import pyarrow as pa

from stream_merge.model.logs import tell
from stream_merge.tables.files.commit import Commit, overtaken
from stream_merge.tables.files.data_file import CHANGE_FOLDER
from stream_merge.tables.files.footers import GLOB
from stream_merge.tables.log.handle import LogHandle
from stream_merge.tables.log.live_files import LocalLog, Log, RemoteLog

log = logging.getLogger(__name__)

MOST_BYTES = 16 << 30
"""Of all copies of a table; less where the disk has less: half of what would be free without them."""
_CHUNK = 8 << 20
_JUST_MADE_SECONDS = 60
_MOUNTS = Path("/proc/self/mounts")
_PREFIX, _IN_USE = "stream-merge-copies-", "in-use"


Sizes = Mapping[str, int | None]
"""Bytes of files by their decoded paths, relative to the table; None where nobody knows."""


class Folder:
    """The files of a table on a local disk, by decoded paths that are relative to it."""

    at_once = 1
    """How many footers are best read side by side."""

    def __init__(self, handle: LogHandle, root: Path | None = None, log: Log | None = None) -> None:
        self._handle = weakref.proxy(handle)  # its handle owns what is known of a table
        self.root = root or Path(handle.location)
        """Folder on a local disk in which files are read, and new ones written."""
        self.log: Log = log or LocalLog(self.root / "_delta_log")

    def opened(self, path: str) -> Path | pa.NativeFile:
        """A file as Parquet's reader takes it, to read its footer."""
        return self.root / path

    def obstacle(self, sizes: Sizes) -> str | None:
        """Why these files cannot all be read at once."""
        return None

    @contextmanager
    def holding(self, sizes: Sizes) -> Iterator[None]:
        """Provide files below `root` for as long as the block runs."""
        yield

    def send(self, paths: Iterable[str]) -> None:
        """Move files written below `root` to where readers of the table look for them."""

    def discard(self, paths: Iterable[str]) -> None:
        """Delete files of a commit that is known to be lost, as far as they exist."""
        for path in paths:
            with suppress(OSError):
                (self.root / path).unlink()

    def commit(self, made: Commit) -> None:
        """Put a commit under its version: completely or not at all, and never over another one."""
        made.put(self.root / "_delta_log", self._handle.lock())


class CopiedFolder(Folder):
    """A table on an object store, read and written through copies on the driver's disk."""

    at_once = 8

    def __init__(self, handle: LogHandle, table_id: str) -> None:
        self._copies = _copies(handle, table_id)
        super().__init__(handle, self._copies.root, RemoteLog(weakref.proxy(handle)))

    def opened(self, path: str) -> Path | pa.NativeFile:  # noqa: D102
        copy = self.root / path
        return copy if copy.exists() else self._handle.objects.filesystem.open_input_file(path)

    def obstacle(self, sizes: Sizes) -> str | None:  # noqa: D102
        wanted, allowed = sum(size or 0 for size in sizes.values()), self._copies.ceiling()
        parent = str(self.root.parent)
        if GLOB.search(str(self.root)):
            return f"copies of the target's files would lie in {parent!r}, where some sign means any name"
        if self._copies.are_in_memory:
            return (
                f"copies of the target's files would take the driver's memory, not its disk: {parent!r}"
                " is a tmpfs; set spark.local.dir to a folder on a disk"
            )
        if wanted <= allowed:
            return None
        return (
            f"the files that may hold rows of the batch's keys have {wanted / 1e9:,.1f} GB, and copies of up to"
            f" {allowed / 1e9:,.1f} GB may be kept on the driver's disk ({parent!r})"
        )

    @contextmanager
    def holding(self, sizes: Sizes) -> Iterator[None]:  # noqa: D102
        with self._copies.lock, self._copies.using(sizes):
            there = [path for path, size in sizes.items() if self._copies.has(path, size)]
            self._copies.use(there)
            self._fetch({path: size for path, size in sizes.items() if path not in there})
            yield

    def _fetch(self, missing: Sizes) -> None:
        if not missing:
            return
        started = time.perf_counter()
        self._copies.make_room(sum(size or 0 for size in missing.values()))
        try:
            with ThreadPoolExecutor(min(self.at_once, len(missing))) as threads:
                fetched = sum(threads.map(self._fetched, missing, missing.values()))
        finally:
            self._copies.use(path for path in missing if (self.root / path).exists())
        taken = round(time.perf_counter() - started, 3)
        tell(log.info, "files_copied", table=self._handle.location, files=len(missing), bytes=fetched, seconds=taken)

    def _fetched(self, path: str, size: int | None) -> int:
        """Copy one file; returns its bytes."""
        with (
            self._handle.objects.filesystem.open_input_stream(path, compression=None) as source,
            self._copies.writing(path) as target,
        ):
            shutil.copyfileobj(source, target, _CHUNK)
            copied = target.tell()
            if size is not None and copied != size:
                msg = f"file {path!r} of {self._handle.location!r} has {copied} bytes, and {size} by the log"
                raise OSError(msg)
        return copied

    def send(self, paths: Iterable[str]) -> None:  # noqa: D102
        sent = list(paths)
        with ThreadPoolExecutor(min(self.at_once, max(1, len(sent)))) as threads:
            list(threads.map(self._send, sent))
        with self._copies.lock:
            for path in sent:
                if path.startswith(f"{CHANGE_FOLDER}/"):  # which no merge reads
                    (self.root / path).unlink()
                else:
                    self._copies.use([path])
            self._copies.make_room(0)

    def _send(self, path: str) -> None:
        # Through a buffer: of a stream without one delta-rs (1.6) takes no buffers of Arrow's.
        with (
            (self.root / path).open("rb") as source,
            self._handle.objects.filesystem.open_output_stream(path, compression=None, buffer_size=_CHUNK) as target,
        ):
            shutil.copyfileobj(source, target, _CHUNK)

    def discard(self, paths: Iterable[str]) -> None:  # noqa: D102
        for path in paths:
            with self._copies.lock:
                self._copies.forget(path)
            with suppress(OSError):
                self._handle.objects.filesystem.delete_file(path)

    def commit(self, made: Commit) -> None:  # noqa: D102
        if self._handle.put is None:
            msg = f"nobody has said how a commit to {self._handle.location!r} is put"
            raise RuntimeError(msg)
        try:
            self._handle.put(made.version, made.text())
        except FileExistsError as err:
            with self.log.opened(f"{made.version:020d}.json") as file:
                is_ours = made.token.encode() in bytes(file.read())
            if not is_ours:  # else an answer was lost, and the put made again
                raise overtaken(made.version) from err


class _Copies:
    """The copies of one table's files in one folder of this process."""

    def __init__(self, parent: Path) -> None:
        _sweep(parent)
        self.root = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        lock = (self.root / _IN_USE).open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        weakref.finalize(self, _remove, self.root, lock)
        self.lock = threading.RLock()
        self.are_in_memory = _is_in_memory(self.root)
        """Whether the folder is in memory."""
        self._sizes: OrderedDict[str, int] = OrderedDict()
        """Least recently used first."""
        self._in_use: frozenset[str] = frozenset()

    def has(self, path: str, size: int | None) -> bool:
        """Whether a copy is complete."""
        copied = self._sizes.get(path)
        return copied is not None and size in (None, copied) and (self.root / path).exists()

    def use(self, paths: Iterable[str]) -> None:
        """Record that copies are used now."""
        for path in paths:
            self._sizes[path] = (self.root / path).stat().st_size
            self._sizes.move_to_end(path)

    def ceiling(self) -> int:
        """Bytes that copies may have."""
        free = shutil.disk_usage(self.root).free
        return min(MOST_BYTES, (free + sum(self._sizes.values())) // 2)

    @contextmanager
    def using(self, paths: Iterable[str]) -> Iterator[None]:
        """Delete none of these for as long as the block runs."""
        before, self._in_use = self._in_use, self._in_use.union(paths)
        try:
            yield
        finally:
            self._in_use = before

    def make_room(self, wanted: int) -> None:
        """Delete copies that are not in use until so many bytes more are within the ceiling."""
        allowed, total = self.ceiling(), sum(self._sizes.values())
        for path in [path for path in self._sizes if path not in self._in_use]:
            if total + wanted <= allowed:
                return
            total -= self.forget(path)

    def forget(self, path: str) -> int:
        """Delete a copy, if it is there; how many bytes it had."""
        with suppress(OSError):
            (self.root / path).unlink()
        return self._sizes.pop(path, 0)

    @contextmanager
    def writing(self, path: str) -> Iterator[IO[bytes]]:
        """A new copy: complete, or not there at all."""
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.part")
        try:
            with part.open("wb") as stream:
                yield stream
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)


def _is_in_memory(folder: Path) -> bool:
    """Whether a folder is in memory, where its files count as this container's; by Linux' list of mounts."""
    try:
        mounts = [line.split() for line in _MOUNTS.read_text().splitlines()]
    except OSError:
        return False
    above = {Path(place): kind for _, place, kind, *_ in mounts if folder.resolve().is_relative_to(place)}
    return bool(above) and above[max(above, key=lambda place: len(place.parts))] in ("tmpfs", "ramfs")


def _remove(folder: Path, lock: IO[str]) -> None:
    lock.close()
    shutil.rmtree(folder, ignore_errors=True)


def _sweep(parent: Path) -> None:
    """Delete the copies of killed processes; a living one has its file locked, or is about to lock it."""
    for left in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError), (left / _IN_USE).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - os.fstat(lock.fileno()).st_mtime > _JUST_MADE_SECONDS:
                shutil.rmtree(left, ignore_errors=True)


_known: dict[tuple[str, str, int], _Copies] = {}
_known_lock = threading.Lock()


def _copies(handle: LogHandle, table_id: str) -> _Copies:
    """The copies of a table's files; they survive renewed credentials, which make another handle."""
    with _known_lock:
        key = (handle.location, table_id, os.getpid())
        copies = _known.get(key)
        if copies is None:
            parent = handle.scratch or Path(tempfile.gettempdir())
            parent.mkdir(parents=True, exist_ok=True)
            for older in [one for one in _known if one[0] == key[0]]:
                del _known[older]
            copies = _known[key] = _Copies(parent)
        return copies
