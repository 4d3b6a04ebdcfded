"""What a streaming query's checkpoint says: which batches ran, what each of them read, and where they were merged."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

from pyspark.sql import SparkSession

from stream_merge.errors import ConfigError
from stream_merge.model.locations import local_path
from stream_merge.spark.hadoop_files import list_names, read_text, write_text

_TARGETS = "stream_merge_targets"
"""Folder of the sinks; Spark's own are offsets, commits, sources, state, metadata."""
_COMMITS = "stream_merge_commits"
"""Another one, with a file for each table on a store that does not keep writers apart."""
_OFFSETS_FROM = 2
"""Line of `offsets/N` from which on its sources follow; before them a version and the batch's time and confs."""
_LOG_OFFSET = "logOffset"
"""All that the offset of a file source says: a number; which files it stands for is in `sources/<i>` (Spark 4.2)."""
_COMPACT = ".compact"
_TAIL_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Files:
    """Small files, wherever they lie."""

    read: Callable[[str], str | None]
    """The text of a file, None where there is none."""
    names: Callable[[str], list[str]]
    """The names in a folder; none where there is no folder."""
    write: Callable[[str, str], None]
    """Put a text into a file, with the folders above it; it is there whole or not at all."""
    tail: Callable[[str], str | None]
    """As `read`, perhaps only the end of a long file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Destination:
    """A table that a query's batches were given to."""

    identity: str
    """What its batch ids belong to."""
    location: str
    label: str
    """The sink's name."""
    table_id: str | None = None
    """Delta table id; None while nothing was merged."""

    @property
    def is_merged(self) -> bool:
        """Whether a batch was committed there, not only given to its sink."""
        return self.table_id is not None


class Checkpoint:
    """The checkpoint of one query (Spark 4.2's files `metadata`, `offsets/N`, `commits/N`, `sources/<i>/N`)."""

    def __init__(self, files: Files, path: str) -> None:
        self._files = files
        self.path = path.rstrip("/")

    @classmethod
    def in_session(cls, session: SparkSession, path: str) -> Self:
        """Wherever Hadoop's file systems reach; a local one without them."""
        if local_path(path) is not None:
            return cls.on_disk(path)
        files = Files(
            read=lambda name: read_text(session, name),
            names=lambda name: list_names(session, name),
            write=lambda name, text: write_text(session, name, text),
            tail=lambda name: read_text(session, name),
        )
        return cls(files, path)

    @classmethod
    def on_disk(cls, path: str) -> Self:
        """On this machine, without Spark."""
        files = Files(read=_local_text, names=_local_names, write=_write_local, tail=_local_tail)
        return cls(files, str(local_path(path) or path))

    @property
    def is_on_disk(self) -> bool:
        """Whether it lies on a local disk, where a small file costs next to nothing."""
        return local_path(self.path) is not None

    def query_id(self) -> str | None:
        """The id of the query that the checkpoint belongs to."""
        text = self._read("metadata")
        if text is None:
            return None
        found = _json(text)
        if found is None or "id" not in found:
            msg = (
                f"[CHECKPOINT_NOT_USABLE] the file 'metadata' in checkpoint {self.path!r} does not name its query;"
                " restore it from a copy, or start a new checkpoint"
            )
            raise ConfigError(msg)
        return str(found["id"])

    def newest_batch(self, log: str) -> int | None:
        """The newest batch in one of Spark's logs: `offsets` (planned) or `commits` (done)."""
        return max((int(name) for name in self._names(log) if name.isdigit()), default=None)

    def sources(self, batch_id: int) -> list[str] | None:
        """Where each source ends in a batch, run or not; None where there is no such batch (any more)."""
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
        """Whether files are all that its query reads; None where no batch has been planned."""
        newest = self.newest_batch("offsets")
        ends = None if newest is None else self.sources(newest)
        return of_files(ends) if ends else None

    def fingerprint(self, batch_id: int) -> str | None:
        """What a batch reads, in few characters: the offsets of its sources, and the files that these stand for.

        Returns: the same for the same content; None where the checkpoint does not tell.
        """
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
        """Some of what a batch reads, for people: files, or the offsets where its sources end."""
        ends = self.sources(batch_id) or []
        found = list(self._content(ends, (self.sources(batch_id - 1) if batch_id else None) or []))
        files = [entry.rsplit(" ", 1)[0] for entry in found if _log_offset(entry) is None and entry not in ends]
        shown = files or ends
        return shown[:most] + (["..."] if len(shown) > most else [])

    def files(self, batch_id: int) -> list[str]:
        """The files that a batch of one file source reads.

        Returns: URLs, their special characters percent-encoded (`SparkPath`, since Spark 3.4); none where the
            checkpoint does not list them.
        """
        ends, before = self.sources(batch_id), self.sources(batch_id - 1) if batch_id else []
        if before is None or ends is None or len(ends) != 1:
            return []
        last, previous = _log_offset(ends[0]), _log_offset(before[0]) if before else -1
        if last is None or previous is None:
            return []
        return [entry.rsplit(" ", 1)[0] for entry in self._entries("sources/0", after=previous, up_to=last)]

    def _content(self, ends: Sequence[str], before: Sequence[str]) -> Iterator[str]:
        """Where each source ends, and the files behind it."""
        for i, end in enumerate(ends):
            yield end
            last = _log_offset(end)
            if last is not None:
                previous = _log_offset(before[i]) if i < len(before) else None
                yield from sorted(self._entries(f"sources/{i}", after=-1 if previous is None else previous, up_to=last))

    def _entries(self, folder: str, *, after: int, up_to: int) -> Iterator[str]:
        """Paths and times of the files that a file source's log has for a range of its offsets."""
        listed: list[str] | None = None
        for number in range(after + 1, up_to + 1):
            text = self._read(f"{folder}/{number}")
            if text is None:
                listed = self._names(folder) if listed is None else listed
                packed = [int(name.removesuffix(_COMPACT)) for name in listed if name.endswith(_COMPACT)]
                holder = min((n for n in packed if n >= number), default=None)
                yield from [] if holder is None else self._packed(f"{folder}/{holder}{_COMPACT}", number)
            else:
                yield from _entries_of(text, number)[0]

    def _packed(self, name: str, number: int) -> list[str]:
        """As `_entries`, of a log that holds all files since the start; the newest stand last."""
        found, is_whole = _entries_of(self._files.tail(f"{self.path}/{name}") or "", number)
        return found if is_whole else _entries_of(self._read(name) or "", number)[0]

    # -- where batches were merged -------------------------------------------------------------

    def destinations(self) -> list[Destination] | None:
        """All tables that sinks have noted; None where no sink that notes them has run over this checkpoint."""
        listed = self._names(_TARGETS)
        if not listed:
            return None
        found: dict[str, Destination] = {}
        for name in sorted(listed):  # of each table the file of its merge behind the one of its first call
            text = self._read(f"{_TARGETS}/{name}")
            with_values = _json(text)
            if name.endswith(".json") and not name.startswith(".") and with_values is not None:
                found[name.split(".", 1)[0]] = Destination(**with_values)
        return list(found.values()) or None

    def note(self, destination: Destination) -> None:
        """Remember that a sink was given this query's batches, or that one of them was committed; nothing twice.

        A table that was built anew by the query's first batch, delivered again, takes the place of the one before.
        """
        key = _key(destination.identity, destination.location)
        name = f"{key}.{'merged' if destination.is_merged else 'called'}.json"
        noted = _json(self._read(f"{_TARGETS}/{name}")) if name in self._names(_TARGETS) else None
        if noted is not None and noted.get("table_id") == destination.table_id:
            return
        values = {field: getattr(destination, field) for field in ("identity", "location", "label", "table_id")}
        self._files.write(f"{self.path}/{_TARGETS}/{name}", json.dumps(values))

    def last_commit(self, identity: str, location: str) -> dict[str, Any] | None:
        """What was kept of the newest commit to a table; None where nothing was."""
        return _json(self._read(f"{_COMMITS}/{_key(identity, location)}.json"))

    def keep_last_commit(self, identity: str, location: str, values: Mapping[str, Any]) -> None:
        """Keep that, in the place of what was kept before."""
        self._files.write(f"{self.path}/{_COMMITS}/{_key(identity, location)}.json", json.dumps(values))

    def _read(self, name: str) -> str | None:
        return self._files.read(f"{self.path}/{name}")

    def _names(self, folder: str) -> list[str]:
        return self._files.names(f"{self.path}/{folder}")


def _key(identity: str, location: str) -> str:
    return hashlib.sha256(f"{identity}\n{location}".encode()).hexdigest()[:32]


def of_files(ends: Sequence[str]) -> bool:
    """Whether these are the ends of file sources alone (`Checkpoint.sources`)."""
    return all(_log_offset(end) is not None for end in ends)


def _entries_of(text: str, number: int) -> tuple[list[str], bool]:
    """Files of one offset in a file source's log, and whether the text reaches further back."""
    found: list[str] = []
    for line in reversed(text.rstrip("\n").split("\n")):
        entry = _json(line)
        if entry is None:  # the version in the first line, or a line that the text begins in the middle of
            continue
        if entry["batchId"] < number:
            return found, True
        if entry["batchId"] == number:
            found.append(f"{entry['path']} {entry['timestamp']}")
    return found, False


def _json(text: str | None) -> dict[str, Any] | None:
    """A note; None where a crash has cut it."""
    try:
        found = json.loads(text or "")
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _log_offset(offset: str) -> int | None:
    found = _json(offset)
    return None if found is None or set(found) != {_LOG_OFFSET} else int(found[_LOG_OFFSET])


def _local_text(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def _local_tail(path: str) -> str | None:
    try:
        with Path(path).open("rb") as file:
            file.seek(max(0, Path(path).stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return None


def _local_names(path: str) -> list[str]:
    folder = Path(path)
    return [entry.name for entry in folder.iterdir()] if folder.is_dir() else []


def _write_local(path: str, text: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(path).with_name(f".{Path(path).name}.{uuid4().hex}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)
