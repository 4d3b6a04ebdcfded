"""The files of Delta's log, by the text of PROTOCOL.md: commits, checkpoints and deletion vectors."""

from __future__ import annotations

import json
import re
import struct
import uuid
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow.parquet as pq
from pyroaring import BitMap64

Action = dict[str, Any]
"""The fields of one action of the log, as in its JSON; fractions are `Decimal`."""

_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_MAGIC = 1681511377
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint\.(?:\d{10}\.(\d{10})\.)?(?:[0-9a-f-]{36}\.)?(?:parquet|json)")


def expect(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def lines_of(text: str) -> list[str]:
    """The actions of a commit; JSON may hold what `str.splitlines` takes for the end of a line, such as U+2028."""
    return text.rstrip("\n").split("\n")


def action_of(line: str) -> tuple[str, Action]:
    ((kind, action),) = json.loads(line, parse_float=Decimal).items()
    return kind, action


def stats_of(add: Action) -> Action:
    return dict(json.loads(add.get("stats") or "{}", parse_float=Decimal))


def vector_id(action: Action) -> str | None:
    vector = action.get("deletionVector")
    if vector is None:
        return None
    at = "" if vector.get("offset") is None else f"@{vector['offset']}"
    return f"{vector['storageType']}{vector['pathOrInlineDv']}{at}"


@dataclass
class Snapshot:
    """A table at a version."""

    live: dict[str, Action] = field(default_factory=dict)
    known: set[tuple[str, str | None]] = field(default_factory=set)
    """Every file that was ever added, with its vector."""
    txns: dict[str, int] = field(default_factory=dict)
    metadata: Action = field(default_factory=dict)
    protocol: Action = field(default_factory=dict)

    def apply(self, actions: list[tuple[str, Action]]) -> None:
        """Removes go first: the actions of a commit have no order."""
        for kind, action in sorted(actions, key=lambda pair: pair[0] == "add"):
            if kind in ("add", "remove"):
                self.known.add((action["path"], vector_id(action)))
            if kind == "add":
                self.live[action["path"]] = action
            elif kind == "remove":
                self.live.pop(action["path"], None)
            elif kind == "txn":
                self.txns[action["appId"]] = action["version"]
            elif kind == "metaData":
                self.metadata = action
            elif kind == "protocol":
                self.protocol = action

    @property
    def configuration(self) -> dict[str, str]:
        return self.metadata.get("configuration") or {}

    @property
    def fields(self) -> list[Action]:
        """The fields of the schema."""
        fields: list[Action] = json.loads(self.metadata["schemaString"])["fields"]
        return fields

    @property
    def mapping(self) -> str:
        return self.configuration.get("delta.columnMapping.mode", "none")


# The log: commits, and checkpoints where the early ones are gone.


def commits_of(root: Path) -> tuple[int, dict[int, str]]:
    """The version to start from, -1 for nothing, and the text of each commit after it."""
    files = {int(f.stem): f for f in (root / "_delta_log").glob("*.json") if re.fullmatch(r"\d{20}", f.stem)}
    first = -1
    if 0 not in files:
        usable = [version for version in checkpoints(root) if not files or version >= min(files) - 1]
        expect(bool(usable), f"{root} has neither commit 0 nor a checkpoint to start from")
        first = min(usable)
    after = sorted(version for version in files if version > first)
    missing = sorted(set(range(first + 1, max(after, default=first) + 1)) - set(after))
    expect(not missing, f"commits {missing} of {root} are missing")
    return first, {version: files[version].read_text() for version in after}


def snapshot_at(root: Path, version: int) -> Snapshot:
    """The table by a checkpoint of this version; the empty one for -1."""
    return Snapshot() if version < 0 else snapshot_of(next(iter(checkpoints(root)[version].values())))


def checkpoints(root: Path) -> dict[int, dict[str, list[Path]]]:
    """The files of the complete checkpoints by version and name: classic, in parts, or v2."""
    found: dict[int, dict[str, list[Path]]] = {}
    whole: dict[int, dict[str, list[Path]]] = {}
    for file in sorted((root / "_delta_log").iterdir()):
        if named := _CHECKPOINT.fullmatch(file.name):
            version, parts = int(named[1]), int(named[2] or 1)
            name = file.name if parts == 1 else f"{version} in {parts} parts"
            found.setdefault(version, {}).setdefault(name, []).append(file)
            if len(found[version][name]) == parts:
                whole.setdefault(version, {})[name] = found[version][name]
    return whole


def snapshot_of(files: list[Path]) -> Snapshot:
    """The table of a checkpoint, with the file actions of its sidecars."""
    actions = [action for file in files for action in _actions_of_checkpoint(file)]
    for sidecar in [action for kind, action in actions if kind == "sidecar"]:
        actions += _actions_of_checkpoint(files[0].parent / "_sidecars" / unquote(sidecar["path"]))
    twice = [path for path, n in Counter(a["path"] for kind, a in actions if kind == "add").items() if n > 1]
    expect(not twice, f"checkpoint {files[0]} adds {twice!r} twice")
    tombstones = {(action["path"], vector_id(action)) for kind, action in actions if kind == "remove"}
    table = Snapshot()
    table.apply([pair for pair in actions if pair[0] != "remove"])
    both = tombstones & {(path, vector_id(add)) for path, add in table.live.items()}
    expect(not both, f"checkpoint {files[0]} has {both} both as live and as removed")
    table.known |= tombstones
    return table


def _actions_of_checkpoint(file: Path) -> Iterator[tuple[str, Action]]:
    if file.suffix == ".json":
        yield from map(action_of, lines_of(file.read_text()))
        return
    parquet = pq.ParquetFile(file)
    columns = [f"{kind.name}.{part.name}" for kind in parquet.schema_arrow for part in kind.type]
    for row in parquet.read([name for name in columns if not name.endswith("_parsed")]).to_pylist():
        ((kind, action),) = [(kind, action) for kind, action in row.items() if action is not None]
        action = {name: value for name, value in action.items() if value is not None}
        for name in {"partitionValues", "tags", "configuration"} & action.keys():
            if isinstance(action[name], list):  # a map; the configuration of a domain is text
                action[name] = dict(action[name])
        if vector := action.get("deletionVector"):
            action["deletionVector"] = {name: value for name, value in vector.items() if value is not None}
        stated = kind != "add" or action.get("stats") or "add.stats_parsed" not in columns
        expect(bool(stated), f"{file} has statistics as columns only, which this reader does not know")
        yield kind, action


# Deletion vectors.


def read_vector(root: Path, descriptor: Action) -> BitMap64:
    """The positions that a vector removes, after comparing version, sizes, checksum, magic number and cardinality."""
    size, what = descriptor["sizeInBytes"], f"vector {descriptor['pathOrInlineDv']!r}"
    at = vector_file(root, descriptor)
    if at is None:
        data = _decoded(descriptor["pathOrInlineDv"])
        expect(len(data) - size in range(4), f"{what} is {len(data)} bytes long, not {size}")
        data = data[:size]
    else:
        expect(at.exists(), f"{what} is missing: {at}")
        file, start = at.read_bytes(), descriptor.get("offset") or 0
        expect(file[:1] == b"\x01", f"{what} is in a file of version {file[:1]!r}")
        expect(start + 8 + size <= len(file), f"{what} ends beyond its file")
        stored = struct.unpack_from(">I", file, start)[0]
        expect(stored == size, f"{what} is stored with {stored} bytes, the log says {size}")
        data = file[start + 4 : start + 4 + size]
        crc = struct.unpack_from(">I", file, start + 4 + size)[0]
        expect(crc == zlib.crc32(data), f"the checksum of {what} is wrong")
    expect(data[:4] == struct.pack("<I", _MAGIC), f"{what} has another magic number")
    try:
        positions = BitMap64.deserialize(data[4:])
    except (ValueError, IndexError) as err:
        msg = f"{what} is no bitmap"
        raise AssertionError(msg) from err
    expect(len(positions) == descriptor["cardinality"], f"{what} has {len(positions)} rows: {descriptor}")
    expect(len(positions.serialize()) == size - 4, f"{what} has bytes after its bitmap")
    return positions


def vector_file(root: Path, descriptor: Action) -> Path | None:
    """Where a vector is stored; None for one in the log itself."""
    kind, text = descriptor["storageType"], str(descriptor["pathOrInlineDv"])
    expect(kind in ("u", "i", "p"), f"a vector of unknown storage {kind!r}")
    if kind == "i":
        return None
    if kind == "p":
        return located(root, text)
    return root / text[:-20] / f"deletion_vector_{uuid.UUID(bytes=_decoded(text[-20:]))}.bin"


def _decoded(text: str) -> bytes:
    """Z85: five characters for four bytes, big-endian."""
    groups = [text[i : i + 5] for i in range(0, len(text), 5)]
    numbers = [sum(_Z85.index(c) * 85 ** (4 - i) for i, c in enumerate(group)) for group in groups]
    return b"".join(number.to_bytes(4, "big") for number in numbers)


def located(root: Path, path: str) -> Path:
    """The file of a path of the log: a URL, mostly relative to the table."""
    return root / unquote(urlsplit(path).path if path.startswith("file:") else path)


def opened(root: Path, path: str) -> pq.ParquetFile:
    return pq.ParquetFile(located(root, path), coerce_int96_timestamp_unit="us")
