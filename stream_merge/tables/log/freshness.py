"""Single files of a table in its store, and whether a handle is at the newest version by them."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs

_MOST_TEXT = 1 << 20
"""Bytes of a commit requested at once; few have more."""


class Objects:
    """Opens files of one table, by delta-rs' view of the store, which takes sizes of files by their paths."""

    def __init__(self, handler: Callable[[Mapping[str, int]], pafs.FileSystemHandler]) -> None:
        self._handler = handler
        self.filesystem = pafs.PyFileSystem(handler({}))
        """The files of the table by their decoded paths, relative to it."""

    def names(self, folder: str) -> list[str]:
        """The names of the files in a folder of the table."""
        return [file.base_name for file in self.filesystem.get_file_info(pafs.FileSelector(folder))]

    def beginning(self, path: str, most: int) -> bytes:
        """The first bytes of a file, by its decoded path; fewer where it has no more. Cost: a GET.

        delta-rs believes a size that it is given (1.6: `known_sizes`), and a store answers a range that goes beyond the
        end with what there is (RFC 9110, 14.1.2). A GET, unlike a HEAD, lets other threads of Python go on.
        """
        with pafs.PyFileSystem(self._handler({path: most})).open_input_file(path) as file:
            return bytes(file.read(most))

    def text(self, path: str) -> bytes:
        """A complete file, by its decoded path. Cost: a GET; for one beyond 1 MiB another one, and a HEAD."""
        data = self.beginning(path, _MOST_TEXT)
        if len(data) < _MOST_TEXT:
            return data
        with self.filesystem.open_input_file(path) as file:
            return bytes(file.read())


class ListedLateError(RuntimeError):
    """The store has a commit that its listing of the log lacks."""

    def __init__(self, location: str, version: int) -> None:
        super().__init__(f"version {version} of {location!r} is there and not listed")


class Look(ABC):
    """Checks of the log of one table."""

    is_free: bool
    """Whether a check costs no request."""

    @abstractmethod
    def has(self, version: int) -> bool:
        """Whether there is a commit of a version."""

    @abstractmethod
    def mark(self, version: int, added: Callable[[], str | None]) -> Hashable | None:
        """The identity of the handle's newest commit, by a file that it `added` if known; None where it is gone."""

    @abstractmethod
    def is_marked(self, version: int, mark: Hashable) -> bool:
        """Whether the commit of that version is still the one with this mark: else the log is another table's."""


class OnDisk(Look):
    """On a local disk a commit is identified by its inode and modification time."""

    is_free = True

    def __init__(self, location: str) -> None:
        self._log = os.path.join(location, "_delta_log")

    def has(self, version: int) -> bool:  # noqa: D102
        return self._identity(version) is not None

    def mark(self, version: int, added: Callable[[], str | None]) -> Hashable | None:  # noqa: D102
        return self._identity(version)

    def is_marked(self, version: int, mark: Hashable) -> bool:  # noqa: D102
        return self._identity(version) == mark

    def _identity(self, version: int) -> tuple[int, int] | None:
        try:
            file = os.stat(os.path.join(self._log, f"{version:020d}.json"))
        except OSError:
            return None
        return file.st_ino, file.st_mtime_ns


class InStore(Look):
    """On an object store a commit is identified by the name of a file that it adds, or by its text.

    A time in seconds and a size would not do: two tables that are filled alike may have the same.
    """

    is_free = False

    def __init__(self, objects: Callable[[], Objects]) -> None:
        self._objects = objects

    def has(self, version: int) -> bool:
        """Cost: a GET of a byte, not a HEAD, during which other threads of Python would have to wait."""
        try:
            self._objects().beginning(_name(version), 1)
        except FileNotFoundError:
            return False
        return True

    def mark(self, version: int, added: Callable[[], str | None]) -> Hashable | None:
        """Cost: none where a file is known that the commit has added, else its text is read."""
        path = added()
        return self._text(version) if path is None else path.rsplit("/", 1)[-1].encode()

    def is_marked(self, version: int, mark: Hashable) -> bool:
        """Cost: a GET."""
        text = self._text(version)
        return text is not None and isinstance(mark, bytes) and mark in text

    def _text(self, version: int) -> bytes | None:
        try:
            return self._objects().text(_name(version))
        except FileNotFoundError:
            return None


def look(location: str, objects: Callable[[], Objects]) -> Look:
    """The checks for a table at a location, with these files."""
    return InStore(objects) if "://" in location else OnDisk(location)


def added(before: pa.ChunkedArray, files: pa.Table) -> str | None:
    """The path of a file that the table did not have before."""
    paths = files["path"].filter(pc.invert(pc.is_in(files["path"], value_set=before.combine_chunks())))
    return paths[0].as_py() if len(paths) else None


def _name(version: int) -> str:
    return f"_delta_log/{version:020d}.json"
