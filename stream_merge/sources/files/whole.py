"""Which snapshots lie in a folder, each whole: single files, or folders with `_SUCCESS`; and which have been taken.

Spark's file source cannot watch `_SUCCESS` itself: to it names starting with `_` do not exist (Spark 4.2,
`HadoopFSUtils.shouldFilterOutPathName`). So each folder that is whole gets a note in the checkpoint, one at a time, and
the stream reads the notes: which of them a batch has, and whether it ran, stands in Spark's own checkpoint then.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal
from urllib.parse import quote, unquote

from pyspark.sql import DataFrame, SparkSession

from stream_merge.errors import ConfigError, ContractError
from stream_merge.spark.checkpoint import Checkpoint
from stream_merge.spark.hadoop_files import (
    State,
    exactly,
    inside,
    list_names,
    matching,
    state,
    states_below,
    write_text,
)

MARKER = "_SUCCESS"
"""What Spark, and Hadoop's committers, put into a folder when all of its files are there."""
_DIGITS = re.compile(r"[0-9]+")
_NOTES = "stream_merge_snapshots"
"""Folder in the checkpoint; a file in it is named like the folder that was taken."""

Kind = Literal["files", "folders"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """What lies in a source, without hidden names."""

    files: tuple[str, ...]
    """Their names."""
    folders: dict[str, str]
    """Name -> path."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """The rows of a folder, which Spark has listed and not read yet."""

    rows: DataFrame
    is_there: bool
    """Without its folder it has columns alone."""
    expect_whole: Callable[[], None]
    """Raises ContractError where they are not (any more) all of one writing: to be asked before they are read, since
    the folder may be gone, and again when they have been."""


class Snapshots:
    """The snapshots of a source, and what a checkpoint knows of them.

    Args:
        session: lists and reads files.
        source: folder, URI or glob.
        checkpoint: of the query that merges them.
    """

    def __init__(self, session: SparkSession, source: str, checkpoint: Checkpoint) -> None:
        self._session = session
        self._source = source
        self._checkpoint = checkpoint
        self._notes = f"{checkpoint.path}/{_NOTES}"

    def kind(self) -> Kind | None:
        """What a snapshot is here; None while nothing tells.

        Raises:
            ConfigError: files and folders lie side by side, or it was the other one up to now.
        """
        return self._kind_of(self._look(), self.taken())

    def _kind_of(self, found: _Found, taken: Sequence[str]) -> Kind | None:
        here: Kind | None = "files" if found.files else "folders" if found.folders else None
        before: Kind | None = "folders" if taken else "files" if self._checkpoint.reads_files() else None
        if here is not None and before is not None and here != before:
            msg = (
                f"[CHECKPOINT_MISMATCH] checkpoint {self._checkpoint.path!r} records snapshot {before}, but source"
                f" {self._source!r} has {here}; use a new checkpoint"
            )
            raise ConfigError(msg)
        return before or here

    def taken(self) -> list[str]:
        """Names of the folders that were given to the query, merged or about to be, in ascending order."""
        notes = list_names(self._session, self._notes)
        return sorted(unquote(note) for note in notes if not note.startswith("."))

    def whole(self) -> list[str]:
        """Paths of all folders that are whole now, in the order of their names."""
        return [path for _, path in sorted(self._look().folders.items()) if self._is_marked(path)]

    def take(self) -> str | None:
        """Give the query the next folder: of those that are whole and were not taken, the first by its name.

        Requires: the query has merged what was given before. The order of the notes would else be that of their times.

        Returns: its name; None where there is none now.

        Raises:
            ConfigError: as `kind`, or the order of the folders' names is none of their numbers.
            ContractError: the folder has a lower name than one that was taken.
        """
        taken, found = self.taken(), self._look()
        self._kind_of(found, taken)
        misplaced = _misplaced([*taken, *found.folders])
        if misplaced is not None:
            first, later = misplaced
            msg = (
                f"[FULL_COPY_OUT_OF_ORDER] snapshots in {self._source!r} are merged in the order of their names, where"
                f" {first!r} sorts before {later!r}; add leading zeros to their numbers"
            )
            raise ConfigError(msg)
        for name in sorted(found.folders.keys() - set(taken)):
            if not self._is_marked(found.folders[name]):
                continue
            if taken and name < taken[-1]:
                msg = (
                    f"[FULL_COPY_OUT_OF_ORDER] snapshot {name!r} in {self._source!r} sorts before {taken[-1]!r}, which"
                    " is already merged; remove it, or rename it to sort last if it is the newest"
                )
                raise ContractError(msg, reasons={})
            # Hadoop takes what stands before a colon for a scheme; with an equals sign `_a=b` is no hidden name.
            note = quote(name, safe="=")
            write_text(self._session, f"{self._notes}/{note}", json.dumps({"folder": name}))
            return name
        return None

    def notes(self) -> DataFrame:
        """The taken folders as a stream: one a batch, its name as JSON in `value`. Requires: one was taken."""
        # By its whole URL each note would be another one where the checkpoint is moved, or called by another scheme; of
        # a path that is no pattern Spark insists that all files, those of former batches too, lie below it.
        options = {"maxFilesPerTrigger": "1", "maxFileAge": "36500d", "fileNameOnly": "true"}
        pattern = f"{exactly(self._checkpoint.path)}/[{_NOTES[0]}]{_NOTES[1:]}"
        return self._session.readStream.options(**options).text(pattern)

    def opened(self, note: str, read: Callable[[str], DataFrame]) -> Opened:
        """What the folder of a note holds.

        Args:
            note: JSON.
            read: the rows of a folder, by its path.

        Raises:
            ContractError: a later folder was taken, so that merging this one would turn the table back.
        """
        name = json.loads(note)["folder"]
        last = self.taken()[-1]
        if name != last:
            msg = (
                f"[FULL_COPY_OUT_OF_ORDER] checkpoint {self._checkpoint.path!r} plans snapshot {name!r} of"
                f" {self._source!r} after {last!r}; use a new checkpoint, and keep only the newest snapshot in the"
                " source"
            )
            raise ContractError(msg, reasons={})
        path = self._look().folders.get(name)
        before = {} if path is None else self._files(path)
        rows = read(self._notes if path is None else path)  # without a folder the columns alone count

        def expect_whole() -> None:
            if path is None or MARKER not in before:
                what = "does not exist any more" if path is None else f"has no {MARKER} any more"
                msg = (
                    f"[SNAPSHOT_INCOMPLETE] snapshot {name!r} in {self._source!r} is planned and {what}; restore it,"
                    " complete, under its name"
                )
                raise ContractError(msg, reasons={})
            if self._files(path) != before:
                msg = (
                    f"[SNAPSHOT_INCOMPLETE] snapshot {path!r} is still being written; run again when it is complete,"
                    f" with {MARKER} written last"
                )
                raise ContractError(msg, reasons={})
            _expect_marked_last(path, before)

        return Opened(rows=rows, is_there=path is not None, expect_whole=expect_whole)

    def _look(self) -> _Found:
        files: list[str] = []
        folders: dict[str, str] = {}
        for match in matching(self._session, self._source):
            entries = inside(self._session, match.path) if match.is_folder else [match]
            if match.is_folder and any(entry.name == MARKER for entry in entries):
                msg = (
                    f"[SNAPSHOT_SOURCE_LAYOUT] source {self._source!r} is a snapshot itself: {match.path!r} has a"
                    f" {MARKER}; pass the folder above it"
                )
                raise ConfigError(msg)
            for entry in entries:
                if _is_hidden(entry.name):
                    continue
                if not entry.is_folder:
                    files.append(entry.name)
                elif folders.setdefault(entry.name, entry.path) != entry.path:
                    msg = (
                        f"[SNAPSHOT_SOURCE_LAYOUT] source {self._source!r} has two folders {entry.name!r}; pass one"
                        " folder that contains all snapshots"
                    )
                    raise ConfigError(msg)
        if files and folders:
            msg = (
                f"[SNAPSHOT_SOURCE_LAYOUT] source {self._source!r} has both files, such as {min(files)!r}, and folders,"
                f" such as {min(folders)!r}; keep files only, or folders with {MARKER} only"
            )
            raise ConfigError(msg)
        return _Found(files=tuple(files), folders=folders)

    def _is_marked(self, path: str) -> bool:
        return state(self._session, f"{path}/{MARKER}") is not None

    def _files(self, path: str) -> dict[str, State]:
        """What belongs to a folder's snapshot, and its mark, by their paths in it."""
        inside_of = {name[len(path) + 1 :]: found for name, found in states_below(self._session, path).items()}
        return {
            name: found
            for name, found in inside_of.items()
            if name == MARKER or not any(map(_is_hidden, name.split("/")))
        }


def _expect_marked_last(path: str, files: Mapping[str, State]) -> None:
    """A copy that begins with the mark has the other files come after it."""
    later = [name for name, found in files.items() if found.modified_millis > files[MARKER].modified_millis]
    if later:
        msg = (
            f"[SNAPSHOT_INCOMPLETE] snapshot {path!r} has a {MARKER} older than {len(later)} of its files, such as"
            f" {min(later)!r}; when all files are there, write {MARKER} again"
        )
        raise ContractError(msg, reasons={})


def _is_hidden(name: str) -> bool:
    """As Spark's file sources have it (`HadoopFSUtils.shouldFilterOutPathName`)."""
    return name.startswith(".") or (name.startswith("_") and "=" not in name) or name.endswith("._COPYING_")


def _misplaced(folders: Sequence[str]) -> tuple[str, str] | None:
    """Two names of which the first is the lower text and the second the lower number; such as '10' and '9'.

    Only names that are alike but for their digits are compared, and not those of one length: in `01HX10` and `01HX9Z`
    digits are no numbers.
    """
    alike: dict[str, list[str]] = {}
    for name in sorted(folders):
        alike.setdefault(_DIGITS.sub("0", name), []).append(name)
    for names in alike.values():
        for first, later in pairwise(names):
            numbers = [[int(run) for run in _DIGITS.findall(name)] for name in (first, later)]
            if len(first) != len(later) and numbers[0] > numbers[1]:
                return first, later
    return None
