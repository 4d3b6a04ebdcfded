"""A streaming query's checkpoint: its batches, what each of them reads, and the tables they were merged into."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

from pyspark.sql import SparkSession

from stream_merge.errors import ConfigError
from stream_merge.model.locations import local_path
from stream_merge.spark.hadoop_files import list_names, read_text, write_text

_TARGETS = "stream_merge_targets"
"""The sinks' folder beside Spark's own: offsets, commits, sources, state, metadata."""
_COMMITS = "stream_merge_commits"
"""Another one, with a file for each table on a store that does not exclude other writers."""
_OFFSETS_FROM = 2
"""First line of the sources in `offsets/N`, behind a version and the batch's time and confs."""
_LOG_OFFSET = "logOffset"
"""The offset of a file source: a number, whose files are in `sources/<i>` (Spark 4.2)."""
_COMPACT = ".compact"
_TAIL_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Destination:
    """A table that a query's batches were passed to."""

    identity: str
    """Identity of its batch ids."""
    location: str
    label: str
    """The sink's name."""
    table_id: str | None = None
    """Delta table id; None while nothing was merged."""

    @property
    def is_merged(self) -> bool:
        """Whether a batch was committed there, not only passed to its sink."""
        return self.table_id is not None


class Checkpoint:
    """The checkpoint of one query (Spark 4.2's files `metadata`, `offsets/N`, `commits/N`, `sources/<i>/N`)."""

    def __init__(self, files: _Disk | _Hadoop, path: str) -> None:
        self._files = files
        self.path = path.rstrip("/")

    @classmethod
    def in_session(cls, session: SparkSession, path: str) -> Self:
        """A checkpoint on any of Hadoop's file systems; a local one is read without them."""
        return cls(_Hadoop(session), path) if local_path(path) is None else cls.on_disk(path)

    @classmethod
    def on_disk(cls, path: str) -> Self:
        """A checkpoint on this machine, without Spark."""
        return cls(_Disk(), str(local_path(path) or path))

    @property
    def is_on_disk(self) -> bool:
        """Whether it is on a local disk, where a small file costs almost nothing."""
        return local_path(self.path) is not None

    def query_id(self) -> str | None:
        """The id of its query."""
        text = self._read("metadata")
        if text is None:
            return None
        metadata = _json(text)
        if metadata is None or "id" not in metadata:
            msg = (
                f"[CHECKPOINT_NOT_USABLE] the file 'metadata' in checkpoint {self.path!r} does not name its query;"
                " restore it from a copy, or start a new checkpoint"
            )
            raise ConfigError(msg)
        return str(metadata["id"])

    def newest_batch(self, log: str) -> int | None:
        """The newest batch in one of Spark's logs: `offsets` (planned) or `commits` (done)."""
        return max((int(name) for name in self._names(log) if name.isdigit()), default=None)

    def sources(self, batch_id: int) -> list[str] | None:
        """The end offset of each source in a batch, run or not; None where it is not in the log."""
        text = self._read(f"offsets/{batch_id}")
        if text is None:
            return None
        version, *lines = text.rstrip("\n").split("\n")
        ends = lines[_OFFSETS_FROM - 1 :]
        if version.strip() == "v1":
            return ends
        # spark.sql.streaming.offsetLog.formatVersion=2 (Spark 4.2): each line has the source's name before its offset.
        named = (end.partition(":") for end in ends)
        return [offset for _, _, offset in sorted(named, key=lambda parts: parts[0])]

    def reads_files(self) -> bool | None:
        """Whether its query reads files only; None where no batch is planned."""
        newest = self.newest_batch("offsets")
        ends = None if newest is None else self.sources(newest)
        return are_file_offsets(ends) if ends else None

    def fingerprint(self, batch_id: int) -> str | None:
        """A hash of the offsets of a batch's sources and their files; None where the checkpoint lacks them."""
        ends = self.sources(batch_id)
        if ends is None:
            return None
        before = self.sources(batch_id - 1) if batch_id else []
        if before is None:
            return None
        digest = hashlib.sha256()
        for entry in self._content(ends, before):
            digest.update(f"{entry}\n".encode())
        return digest.hexdigest()[:32]

    def content(self, batch_id: int, *, most: int) -> list[str]:
        """Some of what a batch reads, for people: files, or end offsets."""
        ends = self.sources(batch_id) or []
        content = list(self._content(ends, (self.sources(batch_id - 1) if batch_id else None) or []))
        files = [entry.rsplit(" ", 1)[0] for entry in content if _log_offset(entry) is None and entry not in ends]
        shown = files or ends
        return shown[:most] + (["..."] if len(shown) > most else [])

    def files(self, batch_id: int) -> list[str]:
        """The files that a batch of one file source reads, as percent-encoded URLs (`SparkPath`, since Spark 3.4).

        Returns: none where the checkpoint does not list them.
        """
        ends, before = self.sources(batch_id), self.sources(batch_id - 1) if batch_id else []
        if before is None or ends is None or len(ends) != 1:
            return []
        last, previous = _log_offset(ends[0]), _log_offset(before[0]) if before else -1
        if last is None or previous is None:
            return []
        return [entry.rsplit(" ", 1)[0] for entry in self._entries("sources/0", after=previous, up_to=last)]

    def _content(self, ends: Sequence[str], before: Sequence[str]) -> Iterator[str]:
        """The end offset of each source, and the files behind it."""
        for i, end in enumerate(ends):
            yield end
            last = _log_offset(end)
            if last is not None:
                previous = _log_offset(before[i]) if i < len(before) else None
                yield from sorted(self._entries(f"sources/{i}", after=-1 if previous is None else previous, up_to=last))

    def _entries(self, folder: str, *, after: int, up_to: int) -> Iterator[str]:
        """Paths and times of the files in a file source's log for a range of its offsets."""
        listed: list[str] | None = None
        for number in range(after + 1, up_to + 1):
            text = self._read(f"{folder}/{number}")
            if text is not None:
                yield from _entries_in(text, number)[0]
                continue
            listed = self._names(folder) if listed is None else listed
            packed = [int(name.removesuffix(_COMPACT)) for name in listed if name.endswith(_COMPACT)]
            newest = min((n for n in packed if n >= number), default=None)
            yield from [] if newest is None else self._packed(f"{folder}/{newest}{_COMPACT}", number)

    def _packed(self, name: str, number: int) -> list[str]:
        """The entries of an offset in a compacted log; the newest are at its end."""
        entries, is_complete = _entries_in(self._files.tail(f"{self.path}/{name}") or "", number)
        return entries if is_complete else _entries_in(self._read(name) or "", number)[0]

    # -- where batches were merged -------------------------------------------------------------

    def destinations(self) -> list[Destination] | None:
        """All tables that sinks have recorded; None where there is none."""
        listed = self._names(_TARGETS)
        if not listed:
            return None
        recorded: dict[str, Destination] = {}
        for name in sorted(listed):  # of each table the file of its merge behind the one of its first call
            values = _json(self._read(f"{_TARGETS}/{name}"))
            if name.endswith(".json") and not name.startswith(".") and values is not None:
                recorded[name.split(".", 1)[0]] = Destination(**values)
        return list(recorded.values()) or None

    def note(self, destination: Destination) -> None:
        """Record that a sink was given this query's batches, or that one of them was committed.

        A table that the query's first batch, delivered again, re-creates replaces the one before.
        """
        key = _key(destination.identity, destination.location)
        name = f"{key}.{'merged' if destination.is_merged else 'called'}.json"
        recorded = _json(self._read(f"{_TARGETS}/{name}")) if name in self._names(_TARGETS) else None
        if recorded is None or recorded.get("table_id") != destination.table_id:
            self._write(f"{_TARGETS}/{name}", json.dumps(asdict(destination)))

    def last_commit(self, identity: str, location: str) -> dict[str, Any] | None:
        """What was recorded of the newest commit to a table."""
        return _json(self._read(f"{_COMMITS}/{_key(identity, location)}.json"))

    def keep_last_commit(self, identity: str, location: str, values: Mapping[str, Any]) -> None:
        """Record the newest commit to a table."""
        self._write(f"{_COMMITS}/{_key(identity, location)}.json", json.dumps(values))

    def _read(self, name: str) -> str | None:
        return self._files.read(f"{self.path}/{name}")

    def _names(self, folder: str) -> list[str]:
        return self._files.names(f"{self.path}/{folder}")

    def _write(self, name: str, text: str) -> None:
        self._files.write(f"{self.path}/{name}", text)


class _Disk:
    """Small files on this machine."""

    def read(self, path: str) -> str | None:
        """The text of a file; None where there is none."""
        try:
            return Path(path).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def tail(self, path: str) -> str | None:
        """The text of a file, perhaps only the end of a long one."""
        try:
            with Path(path).open("rb") as file:
                file.seek(max(0, Path(path).stat().st_size - _TAIL_BYTES))
                return file.read().decode(errors="replace")
        except FileNotFoundError:
            return None

    def names(self, path: str) -> list[str]:
        """The names in a folder; none without it."""
        return [entry.name for entry in Path(path).iterdir()] if Path(path).is_dir() else []

    def write(self, path: str, text: str) -> None:
        """Write a file, folders included; it is there whole or not at all."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(path).with_name(f".{Path(path).name}.{uuid4().hex}")
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)


class _Hadoop:
    """Small files on one of Hadoop's file systems."""

    def __init__(self, session: SparkSession) -> None:
        self.read = self.tail = partial(read_text, session)
        self.names = partial(list_names, session)
        self.write = partial(write_text, session)


def _key(identity: str, location: str) -> str:
    return hashlib.sha256(f"{identity}\n{location}".encode()).hexdigest()[:32]


def are_file_offsets(ends: Sequence[str]) -> bool:
    """Whether these are end offsets of file sources alone (`Checkpoint.sources`)."""
    return all(_log_offset(end) is not None for end in ends)


def _entries_in(text: str, number: int) -> tuple[list[str], bool]:
    """Files of one offset in a file source's log, and whether the text reaches further back."""
    entries: list[str] = []
    for line in reversed(text.rstrip("\n").split("\n")):
        entry = _json(line)
        if entry is None:  # the version in the first line, or a line that the text begins in the middle of
            continue
        if entry["batchId"] < number:
            return entries, True
        if entry["batchId"] == number:
            entries.append(f"{entry['path']} {entry['timestamp']}")
    return entries, False


def _json(text: str | None) -> dict[str, Any] | None:
    """An object; None where a crash has truncated it."""
    try:
        value = json.loads(text or "")
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _log_offset(offset: str) -> int | None:
    value = _json(offset)
    return None if value is None or set(value) != {_LOG_OFFSET} else int(value[_LOG_OFFSET])
