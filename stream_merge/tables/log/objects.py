"""The files of a table by their paths, in the store as delta-rs reaches it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pyarrow.fs as pafs

_MOST_TEXT = 1 << 20
"""Bytes of a commit requested at once; few have more."""


AT_ONCE = 16
"""Parallel requests."""


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
