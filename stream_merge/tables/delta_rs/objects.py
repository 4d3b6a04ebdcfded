"""The files of a table by their paths, as delta-rs reaches the store that they lie in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

_MOST_TEXT = 1 << 20
"""Bytes of a commit that are asked for at once; few have more."""


AT_ONCE = 16
"""Requests side by side."""


class Objects:
    """Opens files of one table.

    Args:
        handler: delta-rs' view of the store, which is told sizes of files by their paths.
    """

    def __init__(self, handler: Callable[[Mapping[str, int]], pafs.FileSystemHandler]) -> None:
        self._handler = handler
        self.filesystem = pafs.PyFileSystem(handler({}))
        """The files of the table by their decoded paths, relative to it."""

    def opened(self, path: str, size: int | None = None) -> pa.NativeFile:
        """A file of the table, by its path in the log.

        Cost: a HEAD, for its size unless that is given; each read is a GET.
        """
        at = unquote(path)
        known = self.filesystem if size is None else pafs.PyFileSystem(self._handler({at: size}))
        return known.open_input_file(at)

    def names(self, folder: str) -> list[str]:
        """The names of what lies in a folder of the table."""
        return [found.base_name for found in self.filesystem.get_file_info(pafs.FileSelector(folder))]

    def beginning(self, path: str, most: int) -> bytes:
        """The first bytes of a file, by its decoded path; fewer where it has no more.

        delta-rs believes a size that it is told (1.6: `known_sizes`), and a store answers a range that goes beyond the
        end with what there is (RFC 9110, 14.1.2). While it waits for a GET, and not for a HEAD, it lets other threads
        of Python go on.

        Cost: a GET.

        Raises:
            FileNotFoundError: it is not there.
        """
        with pafs.PyFileSystem(self._handler({path: most})).open_input_file(path) as file:
            return bytes(file.read(most))

    def text(self, path: str) -> bytes:
        """A file as a whole, by its decoded path.

        Cost: a GET; for one beyond 1 MiB another one, and a HEAD.
        """
        found = self.beginning(path, _MOST_TEXT)
        if len(found) < _MOST_TEXT:
            return found
        with self.filesystem.open_input_file(path) as file:
            return bytes(file.read())

    def rows(self, files: pa.Table, schema: pa.Schema) -> pa.Table:
        """All rows of plain data files: without deletion vectors, partitions, and other names of columns.

        Cost: a GET for each file, many at once; all of them are held in memory.

        Args:
            files: `NativeTable.files`.
            schema: of the table.

        Raises:
            KeyError: a file lacks a column.
            OSError, pa.ArrowException: one cannot be read, or has not the size that the log says.
        """
        paths, sizes = files["path"].to_pylist(), files["size_bytes"].to_pylist()
        with ThreadPoolExecutor(AT_ONCE) as threads:
            read = list(threads.map(partial(self._rows_of, schema=schema), paths, sizes))
        return pa.concat_tables([schema.empty_table(), *read])

    def _rows_of(self, path: str, size: int, *, schema: pa.Schema) -> pa.Table:
        data = self.beginning(unquote(path), size)
        if len(data) != size:
            msg = f"file {path!r} has {len(data)} bytes, and {size} by the log"
            raise OSError(msg)
        # Spark's INT96: as nanoseconds, Arrow's default, years before 1678 and after 2261 would wrap.
        with pq.ParquetFile(pa.BufferReader(data), coerce_int96_timestamp_unit="us") as file:
            return file.read(use_threads=False).select(schema.names).cast(schema)
