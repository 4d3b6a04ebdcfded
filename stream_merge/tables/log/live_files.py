"""The live files of a table: their `add` actions verbatim, and which of them may hold the keys of a batch."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql.types import DecimalType

from stream_merge.model.snapshot import name_in_files
from stream_merge.shapes.key_bounds import KeyBounds
from stream_merge.tables.log.handle import LogHandle

Add = Mapping[str, Any]
"""The body of an `add` action (Delta protocol, "Add File and Remove File"); `stats` is text."""

_CHECKPOINT = re.compile(
    r"(?P<version>\d{20})\.checkpoint(\.(?P<part>\d{10})\.(?P<parts>\d{10})|\.(?P<uuid>[0-9a-f-]{36}))?\.(?P<kind>parquet|json)$"
)
_FIELDS = frozenset({
    "path", "partitionValues", "size", "modificationTime", "dataChange", "stats", "tags", "deletionVector", "baseRowId",
    "defaultRowCommitVersion", "clusteringProvider",
})  # fmt: skip
"""Fields of an `add` by the protocol; checkpoints have parsed copies of some beside them."""


class UnreadableLogError(RuntimeError):
    """The log lacks a part of a version."""


class Log(Protocol):
    """The folder `_delta_log` of a table."""

    where: str
    """Its path, for messages."""

    def names(self) -> Iterable[str]:
        """The names of the files in it."""
        ...

    def opened(self, name: str) -> pa.NativeFile:
        """A file of it; raises FileNotFoundError."""
        ...


class LocalLog(Log):
    """A log on a local disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.where = str(folder)

    def names(self) -> Iterable[str]:
        """The names of the files in it."""
        return (file.name for file in self._folder.iterdir())

    def opened(self, name: str) -> pa.NativeFile:
        """A file of it."""
        return pa.OSFile(str(self._folder / name))


class RemoteLog(Log):
    """A log in an object store, as delta-rs reaches it."""

    def __init__(self, handle: LogHandle) -> None:
        self._handle = handle
        self.where = f"{handle.location}/_delta_log"

    def names(self) -> list[str]:
        """The names of the files in it."""
        return self._handle.objects.names("_delta_log")

    def opened(self, name: str) -> pa.NativeFile:
        """A file of it."""
        return self._handle.objects.filesystem.open_input_file(f"_delta_log/{name}")


class LiveFiles:
    """The `add` actions of a table, kept from version to version."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._version = -1
        self._files: dict[str, Add] = {}

    def at(self, version: int) -> Mapping[str, Add]:
        """The live files of a version by decoded paths; the mapping is valid until the next call.

        Cost: the commits since the version asked for last; else the newest checkpoint and the commits after it.
        """
        if not 0 <= self._version <= version:
            self._start(version)
        try:
            self._advance(version)
        except FileNotFoundError:  # tidied away since; a checkpoint has them
            self._start(version)
            try:
                self._advance(version)
            except FileNotFoundError as err:
                msg = f"version {version} cannot be read from the log {self._log.where!r}: {err}"
                raise UnreadableLogError(msg) from err
        return self._files

    def follow(self, version: int, commit: Iterable[Mapping[str, Any]]) -> None:
        """Apply a commit of one's own, if it is the next after the version that was asked for last."""
        if version == self._version + 1:
            self._apply(commit)
            self._version = version

    def forget(self) -> None:
        """Read the log again at the next call: the table is another one."""
        self._version, self._files = -1, {}

    def _advance(self, version: int) -> None:
        while self._version < version:
            self._apply(map(json.loads, self._read(f"{self._version + 1:020d}.json").splitlines()))
            self._version += 1

    def _apply(self, actions: Iterable[Mapping[str, Any]]) -> None:
        added: list[Add] = []
        for action in actions:
            removed = action.get("remove")
            if removed is not None:
                self._files.pop(decoded(removed["path"]), None)
            elif action.get("add") is not None:
                added.append(action["add"])
        # A file whose vector grows is removed and added in one commit, in either order.
        for add in added:
            self._files[decoded(add["path"])] = add

    def _read(self, name: str) -> bytes:
        with self._log.opened(name) as file:
            return bytes(file.read())

    def _start(self, version: int) -> None:
        self.forget()
        checkpoint = self._newest_checkpoint(version)
        if checkpoint is None:
            return
        at, files = checkpoint
        for file in files:
            for add in self._adds(file):
                self._files[decoded(add["path"])] = add
        self._version = at

    def _newest_checkpoint(self, up_to: int) -> tuple[int, list[str]] | None:
        """The newest complete checkpoint, and its files."""
        checkpoints: dict[int, dict[tuple[int, str], list[str]]] = {}
        for name in self._log.names():
            match = _CHECKPOINT.match(name)
            if match is not None and int(match["version"]) <= up_to:
                whole = (int(match["parts"] or 1), match["uuid"] or "")
                checkpoints.setdefault(int(match["version"]), {}).setdefault(whole, []).append(name)
        for version in sorted(checkpoints, reverse=True):
            for (parts, _), files in checkpoints[version].items():
                if len(files) == parts:
                    return version, files
        return None

    def _adds(self, checkpoint: str) -> Iterator[Add]:
        if checkpoint.endswith(".json"):
            actions = [json.loads(line) for line in self._read(checkpoint).splitlines()]
            yield from (action["add"] for action in actions if action.get("add") is not None)
            sidecars = [action["sidecar"]["path"] for action in actions if action.get("sidecar") is not None]
        else:
            sidecars = yield from self._adds_in(checkpoint)
        for sidecar in sidecars:
            beside = yield from self._adds_in(f"_sidecars/{unquote(sidecar)}")
            if beside:
                msg = f"sidecar {sidecar!r} of {self._log.where!r} names further sidecars, which the protocol rules out"
                raise UnreadableLogError(msg)

    def _adds_in(self, parquet: str) -> Generator[Add, None, list[str]]:
        """The adds of a Parquet file; returns the paths of its sidecars."""
        with self._log.opened(parquet) as opened, pq.ParquetFile(opened) as file:
            wanted = [name for name in ("add", "sidecar") if name in file.schema_arrow.names]
            table = file.read(columns=wanted)
        if "add" in wanted:
            for add in table["add"].to_pylist(maps_as_pydicts="strict"):
                if add is not None:
                    yield _without_nulls(add)
        if "sidecar" not in wanted:
            return []
        return [one["path"] for one in table["sidecar"].to_pylist() if one is not None]


def _without_nulls(add: Mapping[str, Any]) -> Add:
    """An `add` of a checkpoint without the NULLs that a commit would leave out."""
    values = {name: value for name, value in add.items() if name in _FIELDS and value is not None}
    vector = values.get("deletionVector")
    if vector is not None:
        values["deletionVector"] = {name: value for name, value in vector.items() if value is not None}
    return values


def decoded(path: str) -> str:
    """A path of the log, which is a URL, as a file name relative to the table."""
    return unquote(path)


_DIGITS = 15
"""Digits of a decimal that delta-rs (1.6) surely reads from statistics unchanged: JSON's numbers may go through a
float."""
_CUT = 1_000
"""Microseconds: statistics of times end at milliseconds, and the greatest may be cut, too (Delta protocol)."""


def touched_files(table: LogHandle, bounds: KeyBounds) -> pa.Table:
    """The files whose statistics do not rule out the keys within the bounds. Reads the log only."""
    files = table.files()
    # Statistics stand under the names that columns have in files.
    in_files = {field.name: name_in_files(field) for field in table.snapshot().schema.fields}
    keep: Any = pa.array([True] * files.num_rows, pa.bool_())
    for bound in bounds.columns:
        name = in_files.get(bound.name, bound.name)
        least, greatest = f"min.{name}", f"max.{name}"
        if least not in files.column_names or greatest not in files.column_names:
            continue
        dtype = bound.field.dataType
        if isinstance(dtype, DecimalType) and dtype.precision > _DIGITS:
            continue
        try:
            lowest, _ = bound.to_arrow(files[greatest].type, earlier_by=_CUT)
            _, highest = bound.to_arrow(files[least].type)
            may_hold = pc.and_kleene(pc.less_equal(files[least], highest), pc.greater_equal(files[greatest], lowest))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError):
            continue
        keep = pc.and_(keep, pc.fill_null(may_hold, True))
    return files.filter(keep)


def bytes_and_rows(files: pa.Table) -> tuple[int, int]:
    """Bytes and rows of files."""
    rows = pc.sum(files["num_records"]).as_py() if "num_records" in files.column_names else 0
    return int(pc.sum(files["size_bytes"]).as_py() or 0), int(rows or 0)
