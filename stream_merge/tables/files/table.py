"""The files of a table in the driver: live files, footers, deletion vectors, and commits of new ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from weakref import WeakKeyDictionary

import numpy as np
import pyarrow as pa
from pyroaring import BitMap64

from stream_merge.model import locations
from stream_merge.model.snapshot import TableSnapshot
from stream_merge.shapes.key_bounds import KeyBounds
from stream_merge.tables.files import vectors
from stream_merge.tables.files.commit import Commit, ConcurrentWriteException
from stream_merge.tables.files.compaction_choice import Stored
from stream_merge.tables.files.data_file import OWN_PREFIX
from stream_merge.tables.files.find import FILE, POSITION, Candidate
from stream_merge.tables.files.folder import CopiedFolder, Folder, Sizes
from stream_merge.tables.files.footers import Footers
from stream_merge.tables.log.handle import LogHandle
from stream_merge.tables.log.live_files import Add, LiveFiles, UnreadableLogError, decoded, touched_files


class TableFiles:
    """What is known of one table's files, from batch to batch."""

    def __init__(self, handle: LogHandle, snapshot: TableSnapshot) -> None:
        is_local = locations.local_path(handle.location) is not None
        self.folder = Folder(handle) if is_local else CopiedFolder(handle, snapshot.table_id)
        self.table_id = snapshot.table_id
        self.opened = handle.times_opened
        self.live = LiveFiles(self.folder.log)
        self.expansion = 1.0
        """Bytes of rows in memory for each encoded byte: the most that was seen."""
        self._columns = (snapshot.schema, snapshot.partition_columns)
        self._footers = Footers(self.folder.opened, *self._columns)

    def expands(self, file: Candidate, row_bytes: int) -> None:
        """Record how many bytes in memory the rows of a file take."""
        self.expansion = max(self.expansion, row_bytes / max(file.encoded_bytes, 1))

    def touched(self, handle: LogHandle, snapshot: TableSnapshot, bounds: KeyBounds) -> Sequence[Candidate]:
        """The files that may hold keys within the bounds, at the handle's version.

        Cost: the commits since the last call; the footers of new files.
        """
        live = self._live(handle, snapshot)
        adds = {}
        for path in map(decoded, touched_files(handle, bounds)["path"].to_pylist()):
            add = live.get(path)
            if add is None:
                msg = f"version {handle.version} of {handle.location!r} has no file {path!r}, which delta-rs reads"
                raise UnreadableLogError(msg)
            adds[path] = add
        self._footers.read(((path, int(add["size"])) for path, add in adds.items()), at_once=self.folder.at_once)
        return [self.file(path, add) for path, add in adds.items()]

    def file(self, path: str, add: Add) -> Candidate:
        """A live file by its decoded path."""
        footer = self._footers.footer(path, int(add["size"]))
        partition = dict(add.get("partitionValues") or {})
        return Candidate(path=path, footer=footer, partition=partition, add=add)

    def stored(self, handle: LogHandle, snapshot: TableSnapshot) -> Iterator[Stored]:
        """The live files of the driver's merges: its own, and those with a vector, if their row count is known."""
        live = self._live(handle, snapshot)
        files = handle.files()
        for path, rows in zip(files["path"].to_pylist(), files["num_records"].to_pylist(), strict=True):
            at = decoded(path)
            add = live.get(at)
            if add is None or rows is None:
                continue
            vector, is_own = add.get("deletionVector"), path.rsplit("/", 1)[-1].startswith(OWN_PREFIX)
            if vector is None and not is_own:  # of most tables most files: this is looked at after each merge
                continue
            yield Stored(
                path=at,
                bytes=int(add["size"]),
                rows=int(rows),
                deleted=0 if vector is None else int(vector["cardinality"]),
                partition=tuple(sorted((add.get("partitionValues") or {}).items(), key=str)),
                is_own=is_own,
            )

    def commit(self, handle: LogHandle, made: Commit, files: Iterable[str]) -> None:
        """Put a commit under its version and follow it; where another writer was faster, its files are deleted."""
        try:
            self.folder.commit(made)
        except ConcurrentWriteException:  # after any other failure nobody knows yet whether it has landed
            self.folder.discard(files)
            raise
        self.live.follow(made.version, list(made.actions()))
        handle.committed(made.transaction)

    def _live(self, handle: LogHandle, snapshot: TableSnapshot) -> Mapping[str, Add]:
        if (snapshot.schema, snapshot.partition_columns) != self._columns:
            self._columns = (snapshot.schema, snapshot.partition_columns)
            self._footers = Footers(self.folder.opened, *self._columns)
        live = self.live.at(handle.version)
        if len(live) != handle.files().num_rows:
            msg = (
                f"version {handle.version} of {handle.location!r} has {len(live)} files by its log, and"
                f" {handle.files().num_rows} as delta-rs reads it"
            )
            raise UnreadableLogError(msg)
        return live


def file_sizes(files: Iterable[Candidate]) -> Sizes:
    """Sizes of files as the log has them."""
    return {one.path: int(one.add["size"]) for one in files}


class DeadRows:
    """The deletion vectors of touched files, as the table has them."""

    def __init__(self, table: TableFiles, touched: Sequence[Candidate]) -> None:
        self.touched = touched
        self._folder = table.folder
        self._read: dict[int, BitMap64] = {}

    def positions(self, number: int) -> BitMap64:
        """Positions of the deleted rows of a file, by its number; not to be changed."""
        if number not in self._read:
            self._load([number])
        return self._read[number]

    def live(self, rows: pa.Table) -> pa.Array:
        """Which rows (`find.find`) are not deleted: booleans."""
        mask = np.ones(rows.num_rows, dtype=bool)
        files = [one for one in rows_by_file(rows) if self.touched[one[0]].add.get("deletionVector") is not None]
        self._load(number for number, _, _ in files)
        for number, positions, at in files:
            dead = BitMap64(positions) & self._read[number]
            mask[at[np.isin(positions, np.fromiter(dead, np.int64, len(dead)))]] = False
        return pa.array(mask)

    def _load(self, numbers: Iterable[int]) -> None:
        missing = [number for number in numbers if number not in self._read]
        adds = [self.touched[number].add for number in missing]
        with self._folder.holding(vectors.vector_files(adds)):
            self._read.update(zip(missing, (vectors.deleted_rows(add, self._folder.root) for add in adds), strict=True))


def rows_by_file(rows: pa.Table) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """The number of each file in rows (`find.find`), the positions in it, and where in the rows they are."""
    files, positions = rows[FILE].to_numpy(), rows[POSITION].to_numpy()
    order = np.argsort(files, kind="stable")
    numbers, starts = np.unique(files[order], return_index=True)
    for number, at in zip(numbers.tolist(), np.split(order, starts[1:]), strict=False):
        yield number, positions[at], at


_tables: WeakKeyDictionary[LogHandle, TableFiles] = WeakKeyDictionary()


def table_files(handle: LogHandle, snapshot: TableSnapshot) -> TableFiles:
    """The files of a handle's table; a re-created table, or one whose log was replaced, starts anew."""
    files = _tables.get(handle)
    if files is None or (files.table_id, files.opened) != (snapshot.table_id, handle.times_opened):
        files = _tables[handle] = TableFiles(handle, snapshot)
    return files
