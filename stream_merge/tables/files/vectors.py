"""Deletion vectors by the Delta protocol: which rows of a data file are deleted, by positions that count from 0."""

from __future__ import annotations

import base64
import contextlib
import os
import uuid
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from pyroaring import BitMap64

_RELATIVE, _ABSOLUTE, _INLINE = "u", "p", "i"
_Z85 = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
"""The digits of base 85 in the log (https://rfc.zeromq.org/spec/32/)."""
_B85 = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
"""The digits of `base64.b85encode`, which is otherwise the same."""
_AS_Z85, _AS_B85 = bytes.maketrans(_B85, _Z85), bytes.maketrans(_Z85, _B85)
_UUID_DIGITS = 20
_Z85_BLOCK, _BYTES_BLOCK = 5, 4

_FILE_VERSION = b"\x01"
_MAGIC = (1681511377).to_bytes(4, "little")
"""The one format that the protocol defines: a 64-bit Roaring bitmap in its portable form."""
_FRAME = 4
"""Bytes of a vector's size before it and of its CRC-32 after it, both big endian."""
_MOST_BYTES = 2**31 - 1
"""Offsets and sizes are 32-bit integers with a sign."""
_LAST_POSITION = 2**63 - 1
"""The protocol wants the highest bit unset, since Java has no unsigned integers."""


class VectorError(RuntimeError):
    """A deletion vector does not match its descriptor in the log, or cannot be written by the protocol."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Descriptor:
    """A deletion vector's location and properties ("Deletion Vector Descriptor Schema")."""

    storage_type: str
    """`u`: file of the table, by its UUID; `p`: file by its URI; `i`: in the log itself."""
    path_or_inline: str
    """`u`: prefix, then the UUID in Z85; `p`: absolute path, as a URL; `i`: the vector in Z85."""
    offset: int | None = None
    """Bytes from the start of the file to the vector's size; None: 0, or the vector is inline."""
    size_in_bytes: int
    """Of the vector with its magic number, without size and checksum around it."""
    cardinality: int
    """How many rows are gone."""
    max_row_index: int | None = None
    """No position is greater; few writers say so."""

    @classmethod
    def parse(cls, action: Mapping[str, Any]) -> Descriptor:
        """Parse `deletionVector` of an `add` or `remove`."""
        descriptor = cls(
            storage_type=_text(action, "storageType"),
            path_or_inline=_text(action, "pathOrInlineDv"),
            offset=_optional(action, "offset"),
            size_in_bytes=_number(action, "sizeInBytes"),
            cardinality=_number(action, "cardinality"),
            max_row_index=_optional(action, "maxRowIndex"),
        )
        if descriptor.storage_type not in (_RELATIVE, _ABSOLUTE, _INLINE):
            msg = (
                f"a deletion vector in the log has storageType {descriptor.storage_type!r}, which the protocol does not"
                f" know; read the table with the engine that wrote it"
            )
            raise VectorError(msg)
        return descriptor

    def file(self, root: Path) -> Path | None:
        """The local file that holds the vector; None where it is inline."""
        if self.storage_type == _INLINE:
            return None
        if self.storage_type == _ABSOLUTE:
            return _local(self.path_or_inline)
        if len(self.path_or_inline) < _UUID_DIGITS:
            msg = f"deletion vector {self.path_or_inline!r} of {str(root)!r} has no UUID; the log is damaged"
            raise VectorError(msg)
        identity = uuid.UUID(bytes=_from_z85(self.path_or_inline[-_UUID_DIGITS:]))
        return root / self.path_or_inline[:-_UUID_DIGITS] / f"deletion_vector_{identity}.bin"


def read(descriptor: Mapping[str, Any], root: Path) -> BitMap64:
    """The positions of the rows that a deletion vector removes from its data file; raises `VectorError`."""
    described = Descriptor.parse(descriptor)
    file = described.file(root)
    if file is None:
        where = f"the inline deletion vector {described.path_or_inline[:_UUID_DIGITS]!r}... of {str(root)!r}"
        data = _inline(described, where)
    else:
        offset = described.offset or 0
        where = f"the deletion vector at byte {offset} of {str(file)!r}"
        data = _stored(file, offset, described.size_in_bytes, where)
    # Delta's own descriptor of no rows is inline and has no bytes at all, not even a magic number.
    is_none = file is None and described.cardinality == described.size_in_bytes == 0
    positions = BitMap64() if is_none else _positions(data, where)
    if len(positions) != described.cardinality:
        raise _damaged(where, f"removes {len(positions)} rows where the log says {described.cardinality}")
    last = _LAST_POSITION if described.max_row_index is None else described.max_row_index
    if positions and positions.max() > last:
        raise _damaged(where, f"removes row {positions.max()}, beyond the last possible one, {last}")
    return positions


def deleted_rows(add: Mapping[str, Any], root: Path) -> BitMap64:
    """The positions of the deleted rows of a live file, by its `add`."""
    descriptor = add.get("deletionVector")
    return BitMap64() if descriptor is None else read(descriptor, root)


def vector_files(adds: Iterable[Mapping[str, Any]]) -> dict[str, None]:
    """The files of the table that hold the vectors of these adds, relative to it; their sizes are not known."""
    vectors = [Descriptor.parse(add["deletionVector"]) for add in adds if add.get("deletionVector") is not None]
    files = [vector.file(Path()) for vector in vectors if vector.storage_type == _RELATIVE]
    return {str(file): None for file in files}


def write(root: Path, vectors: Mapping[str, BitMap64], *, prefix: str = "") -> dict[str, dict[str, Any]]:
    """Write deletion vectors into one new file of the table; returns their descriptors by the same names.

    The file is complete when its descriptors are returned; an attempt that fails may leave a part of it, to which no
    commit refers. `prefix`: folder below `root`; a random one spreads the files of an object store.
    """
    if not vectors:
        return {}
    identity = uuid.uuid4()
    packed = bytearray(_FILE_VERSION)
    described: dict[str, dict[str, Any]] = {}
    for name, positions in vectors.items():
        data = _serialized(positions, name)
        described[name] = {
            "storageType": _RELATIVE,
            "pathOrInlineDv": prefix + base64.b85encode(identity.bytes).translate(_AS_Z85).decode("ascii"),
            "offset": len(packed),
            "sizeInBytes": len(data),
            "cardinality": len(positions),
        }
        packed += len(data).to_bytes(_FRAME, "big") + data + zlib.crc32(data).to_bytes(_FRAME, "big")
        if len(packed) > _MOST_BYTES:
            msg = (
                f"{len(vectors)} deletion vectors for {str(root)!r} take more than the {_MOST_BYTES} bytes that one"
                f" file may have; merge fewer files at a time"
            )
            raise VectorError(msg)
    file = root / prefix / f"deletion_vector_{identity}.bin"
    if prefix:
        file.parent.mkdir(exist_ok=True)
    with file.open("xb") as stream:
        stream.write(packed)
    return described


def _serialized(positions: BitMap64, name: str) -> bytes:
    if positions and positions.max() > _LAST_POSITION:
        msg = f"row {positions.max()} of {name!r} cannot be removed: positions end at {_LAST_POSITION}"
        raise VectorError(msg)
    compact = positions.copy()
    compact.run_optimize()  # as Delta's own writers do
    return _MAGIC + compact.serialize()


def _positions(data: bytes, where: str) -> BitMap64:
    magic = data[: len(_MAGIC)]
    if magic != _MAGIC:
        msg = (
            f"{where} is of format {int.from_bytes(magic, 'little')}, which the protocol does not define; let the"
            f" engine that wrote it purge its vectors (REORG TABLE ... APPLY (PURGE))"
        )
        raise VectorError(msg)
    try:
        return BitMap64.deserialize(data[len(_MAGIC) :])
    except (ValueError, IndexError) as err:  # IndexError: nothing follows the magic number
        raise _damaged(where, f"is no bitmap ({err})") from err


def _stored(file: Path, offset: int, size: int, where: str) -> bytes:
    """The bytes of a vector, checked against size and checksum around it."""
    try:
        with file.open("rb") as stream:
            version = stream.read(len(_FILE_VERSION))
            if version != _FILE_VERSION:
                msg = (
                    f"{where} is in a file of format version {version.hex() or 'none'}, not 01; read the table with the"
                    f" engine that wrote it"
                )
                raise VectorError(msg)
            end = os.fstat(stream.fileno()).st_size
            if offset + _FRAME + size + _FRAME > end:
                raise _damaged(where, f"is cut off: its file ends after {end} bytes")
            stream.seek(offset)
            stored_size = int.from_bytes(stream.read(_FRAME), "big")
            data = stream.read(size)
            checksum = int.from_bytes(stream.read(_FRAME), "big")
    except (OSError, ValueError) as err:  # ValueError: a zero byte in the path
        raise _damaged(where, f"cannot be read ({err})") from err
    if stored_size != size:
        raise _damaged(where, f"has {stored_size} bytes where the log says {size}")
    if zlib.crc32(data) != checksum:
        raise _damaged(where, "does not have the checksum that is stored with it")
    return data


def _inline(described: Descriptor, where: str) -> bytes:
    """The bytes of a vector in the log; Z85 knows blocks only, so the last one may be padded."""
    data = _from_z85(described.path_or_inline)
    if not 0 <= len(data) - described.size_in_bytes < _BYTES_BLOCK:
        raise _damaged(where, f"has {len(data)} bytes where the log says {described.size_in_bytes}")
    return data[: described.size_in_bytes]


def _from_z85(text: str) -> bytes:
    digits = text.encode("ascii", errors="backslashreplace")
    is_of_blocks = len(digits) % _Z85_BLOCK == 0 and not digits.translate(None, delete=_Z85)
    with contextlib.suppress(ValueError):  # a block of more than 32 bits
        if is_of_blocks:
            return base64.b85decode(digits.translate(_AS_B85))
    msg = f"{text[:100]!r} in the descriptor of a deletion vector is no Z85; the log is damaged"
    raise VectorError(msg)


def _local(uri: str) -> Path:
    """The path of a `file` URI, or an absolute path that is escaped like one."""
    with contextlib.suppress(ValueError):  # no URI, or no UTF-8 when it is decoded
        parts = urlsplit(uri)
        is_local = parts.scheme in ("", "file") and not parts.netloc and parts.path.startswith("/")
        if is_local and not parts.query and not parts.fragment:
            return Path(unquote(parts.path, errors="strict"))
    msg = f"deletion vector {uri!r} is not in a local file; merge this table by Spark"
    raise VectorError(msg)


def _text(action: Mapping[str, Any], name: str) -> str:
    value = action.get(name)
    if not isinstance(value, str):
        raise _misfit(action, name)
    return value


def _number(action: Mapping[str, Any], name: str) -> int:
    value = action.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _misfit(action, name)
    return value


def _optional(action: Mapping[str, Any], name: str) -> int | None:
    return None if action.get(name) is None else _number(action, name)


def _misfit(action: Mapping[str, Any], name: str) -> VectorError:
    msg = f"a deletion vector in the log has {action.get(name)!r} as {name}; the log is damaged"
    return VectorError(msg)


def _damaged(where: str, how: str) -> VectorError:
    return VectorError(f"{where} {how}; put the right file back, or restore an older version of the table (RESTORE)")
