"""Where the files of a table are read and written: in its own folder on a local disk, or as copies of those on S3."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import pyarrow as pa

from stream_merge.tables.files.commit import Commit
from stream_merge.tables.log.handle import LogHandle
from stream_merge.tables.log.live_files import LocalLog, Log

Sizes = Mapping[str, int | None]
"""Bytes of files by their decoded paths, relative to the table; None where nobody knows."""


class Folder(ABC):
    """The files of one table, by decoded paths that are relative to it."""

    root: Path
    """Folder on a local disk in which files are read, and new ones written."""
    log: Log
    at_once = 1
    """How many files are best looked into side by side."""

    @abstractmethod
    def opened(self, path: str) -> Path | pa.NativeFile:
        """A file as Parquet's reader takes it, to read its footer."""

    @abstractmethod
    def obstacle(self, sizes: Sizes) -> str | None:
        """Why these files cannot all be read at once."""

    @abstractmethod
    def holding(self, sizes: Sizes) -> AbstractContextManager[None]:
        """Provide files below `root` for as long as the block runs."""

    @abstractmethod
    def send(self, paths: Iterable[str]) -> None:
        """Move files written below `root` to where readers of the table look for them."""

    @abstractmethod
    def discard(self, paths: Iterable[str]) -> None:
        """Delete files of a commit that is known to be lost, as far as they exist."""

    @abstractmethod
    def commit(self, made: Commit) -> None:
        """Put a commit under its version: completely or not at all, and never over another one."""


class OwnFolder(Folder):
    """A table on a local disk."""

    def __init__(self, handle: LogHandle) -> None:
        self.root = Path(handle.location)
        self.log = LocalLog(self.root / "_delta_log")
        self._handle = weakref.proxy(handle)  # its handle owns what is known of a table

    def opened(self, path: str) -> Path:  # noqa: D102
        return self.root / path

    def obstacle(self, sizes: Sizes) -> str | None:  # noqa: D102
        return None

    @contextmanager
    def holding(self, sizes: Sizes) -> Iterator[None]:  # noqa: D102
        yield

    def send(self, paths: Iterable[str]) -> None:  # noqa: D102
        pass

    def discard(self, paths: Iterable[str]) -> None:  # noqa: D102
        for path in paths:
            with suppress(OSError):
                (self.root / path).unlink()

    def commit(self, made: Commit) -> None:  # noqa: D102
        made.put(self.root / "_delta_log", self._handle.lock())
