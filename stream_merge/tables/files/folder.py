"""The folder in which the driver reads and writes the files of a table."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa

from stream_merge.tables.files.commit import Commit
from stream_merge.tables.log.handle import LogHandle
from stream_merge.tables.log.live_files import LocalLog, Log

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
