"""A table as merge-on-read works on it: its live files as the log has them, and their footers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from stream_merge.model import locations
from stream_merge.model.snapshot import TableSnapshot
from stream_merge.shapes.key_bounds import KeyBounds
from stream_merge.tables.files.compaction import Stored
from stream_merge.tables.files.copies import CopiedFolder
from stream_merge.tables.files.data_file import OWN_PREFIX
from stream_merge.tables.files.find import Candidate
from stream_merge.tables.files.folder import Folder, OwnFolder, Sizes
from stream_merge.tables.files.footers import Footers
from stream_merge.tables.log.candidate_files import touched_files
from stream_merge.tables.log.handle import LogHandle
from stream_merge.tables.log.live_files import Add, LiveFiles, UnreadableLogError, decoded


@dataclass(frozen=True, kw_only=True, slots=True)
class Touched:
    """A file that may hold keys of a batch, and what the log says of it."""

    candidate: Candidate
    add: Add


class TableFiles:
    """What is known of one table's files, from batch to batch."""

    def __init__(self, handle: LogHandle, snapshot: TableSnapshot) -> None:
        is_local = locations.local_path(handle.location) is not None
        self.folder: Folder = OwnFolder(handle) if is_local else CopiedFolder(handle, snapshot.table_id)
        self.table_id = snapshot.table_id
        self.opened = handle.times_opened
        self.live = LiveFiles(self.folder.log)
        self.expansion = 1.0
        """Bytes in memory for each that rows take in files before these are compressed: the most that was seen."""
        self._columns = (snapshot.schema, snapshot.partition_columns)
        self._footers = Footers(self.folder.opened, *self._columns)

    def expands(self, file: Touched, row_bytes: int) -> None:
        """Learn how many bytes in memory the rows of a file take."""
        encoded = file.candidate.footer.row_bytes * file.candidate.footer.rows
        self.expansion = max(self.expansion, row_bytes / max(encoded, 1))

    def touched(self, handle: LogHandle, snapshot: TableSnapshot, bounds: KeyBounds) -> Sequence[Touched]:
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

    def file(self, path: str, add: Add) -> Touched:
        """A live file by its decoded path."""
        footer = self._footers.of(path, int(add["size"]))
        partition = dict(add.get("partitionValues") or {})
        return Touched(candidate=Candidate(path=path, footer=footer, partition=partition), add=add)

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


def sizes_of(files: Iterable[Touched]) -> Sizes:
    """The sizes of files as the log has them."""
    return {one.candidate.path: int(one.add["size"]) for one in files}


_tables: WeakKeyDictionary[LogHandle, TableFiles] = WeakKeyDictionary()


def table_files(handle: LogHandle, snapshot: TableSnapshot) -> TableFiles:
    """The table behind a handle; one that was dropped and made anew, or whose log was replaced, is another one."""
    files = _tables.get(handle)
    if files is None or (files.table_id, files.opened) != (snapshot.table_id, handle.times_opened):
        files = _tables[handle] = TableFiles(handle, snapshot)
    return files
