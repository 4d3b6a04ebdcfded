"""A commit by the driver: its actions in the protocol's order, put under the next version if nobody was faster."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from uuid import uuid4

from stream_merge.model.snapshot import TableSnapshot, is_on
from stream_merge.tables.log.live_files import Log

ICT_PROPERTY = "delta.enableInCommitTimestamps"
_ICT = "inCommitTimestamp"


class ConcurrentWriteException(RuntimeError):  # noqa: N818 - as Delta calls it, by which a conflict is known
    """Another commit has the version."""


def overtaken(version: int) -> ConcurrentWriteException:
    """The error of a writer that came second."""
    return ConcurrentWriteException(f"version {version} was committed by another writer")


class UndatedCommitError(RuntimeError):
    """The commit before has no in-commit timestamp, so that none can be given to this one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """The contents of a commit: of a merge, an append or a compaction."""

    version: int
    now_ms: int
    user_metadata: str | None
    metrics: Mapping[str, int]
    transaction: tuple[str, int] | None
    parameters: Mapping[str, str]
    """`operationParameters`; the protocol leaves them to the writer, Delta's MERGE has predicates."""
    operation: str = "MERGE"
    is_blind_append: bool = False
    """Whether it only adds rows, whatever the table holds."""
    removes: Sequence[Mapping[str, Any]] = ()
    adds: Sequence[Mapping[str, Any]] = ()
    changes: Sequence[Mapping[str, Any]] = ()
    """Bodies of `cdc` actions."""
    in_commit_timestamp: int | None = None
    """Milliseconds since the epoch, for a table that has them; greater than that of the commit before."""
    token: str = field(default_factory=lambda: str(uuid4()))

    def actions(self) -> Iterator[dict[str, Any]]:
        """The actions, `commitInfo` first as in-commit timestamps demand."""
        info: dict[str, Any] = {} if self.in_commit_timestamp is None else {_ICT: self.in_commit_timestamp}
        info |= {
            "timestamp": self.now_ms,
            "operation": self.operation,
            "operationParameters": dict(self.parameters),
            "readVersion": self.version - 1,
            "isolationLevel": "Serializable",
            "isBlindAppend": self.is_blind_append,
            "operationMetrics": {name: str(value) for name, value in self.metrics.items()},
            "engineInfo": _engine(),
            "txnId": self.token,
        }
        if self.user_metadata is not None:
            info["userMetadata"] = self.user_metadata
        yield {"commitInfo": info}
        if self.transaction is not None:
            app_id, number = self.transaction
            yield {"txn": {"appId": app_id, "version": number, "lastUpdated": self.now_ms}}
        yield from ({"remove": body} for body in self.removes)
        yield from ({"add": body} for body in self.adds)
        yield from ({"cdc": body} for body in self.changes)

    def text(self) -> str:
        """The actions as a file of the log has them, a line each."""
        return "".join(
            json.dumps(action, separators=(",", ":"), ensure_ascii=False) + "\n" for action in self.actions()
        )

    def put(self, log: Path, lock: AbstractContextManager[object] | None = None) -> None:
        """Put the commit under its version: completely or not at all, and never over another one.

        A hard link either makes the name or fails; who checks and then renames, as Spark does on a local disk, is kept
        out by the lock. Before, the text is among the data files: VACUUM deletes there what a crash leaves.
        """
        unnamed, named = log.parent / f"commit-{self.token}.json", log / f"{self.version:020d}.json"
        try:
            unnamed.write_bytes(self.text().encode())
            with lock or nullcontext():
                os.link(unnamed, named)
        except FileExistsError as err:
            if self.token.encode() in named.read_bytes():
                return  # this very commit: a file server's answer was lost, and the call made again
            raise overtaken(self.version) from err
        finally:
            with suppress(OSError):
                unnamed.unlink()


@cache
def _engine() -> str:
    """What wrote the commit; without a version where the package was not installed, but put on the path."""
    try:
        return f"stream_merge/{version('stream-merge')}"
    except PackageNotFoundError:
        return "stream_merge"


def timestamp_after(snapshot: TableSnapshot, log: Log, now_ms: int) -> int | None:
    """The in-commit timestamp of the commit after a version; None for a table without them."""
    is_dated = is_on(snapshot.properties, ICT_PROPERTY)
    return next_timestamp(log, snapshot.version, now_ms) if is_dated else None


def next_timestamp(log: Log, before: int, now_ms: int) -> int:
    """The in-commit timestamp of the commit after version `before`: now, but later than that one's."""
    try:
        with log.opened(f"{before:020d}.json") as file:
            first = bytes(file.read()).splitlines()[0]
        info = json.loads(first).get("commitInfo") or {}
        return max(now_ms, int(info[_ICT]) + 1)
    except (OSError, IndexError, ValueError, KeyError, AttributeError) as err:
        msg = f"version {before} in {log.where!r} carries no in-commit timestamp, which the table demands"
        raise UndatedCommitError(msg) from err


def removed(add: Mapping[str, Any], now_ms: int, *, changes_data: bool = True) -> dict[str, Any]:
    """The `remove` of a live file, with the vector that it has."""
    body = {
        "path": add["path"],
        "deletionTimestamp": now_ms,
        "dataChange": changes_data,
        "extendedFileMetadata": True,
        "partitionValues": add.get("partitionValues") or {},
        "size": add["size"],
    }
    for name in ("stats", "tags", "deletionVector", "baseRowId", "defaultRowCommitVersion"):
        if add.get(name) is not None:
            body[name] = add[name]
    return body


def added_again(add: Mapping[str, Any], vector: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """The `add` of a live file with another vector: else as the log has it, to the last digit of its statistics."""
    return {**add, "dataChange": True, "stats": wide(add.get("stats"), rows), "deletionVector": dict(vector)}


def wide(stats: str | None, rows: int) -> str:
    """Statistics that say that rows may be gone: bounds still hold, but a row at them may be deleted.

    The text is not parsed and written again: numbers would lose digits.
    """
    parsed = json.loads(stats) if stats else {}
    if not isinstance(parsed, dict) or not isinstance(stats, str) or not parsed:
        return _bare(rows)
    text, wanted = stats.strip(), {"tightBounds": "false", "numRecords": str(rows)}
    for name, value in wanted.items():
        if parsed.get(name) is not None and json.dumps(parsed[name]) == value:
            continue
        if name not in parsed:
            text = f'{{"{name}":{value},{text[1:]}'
        elif name == "tightBounds" or parsed[name] is None:
            pattern = re.compile(rf'"{name}"\s*:\s*(true|null)')
            if len(pattern.findall(text)) != 1:  # a value of some column spells it, too
                return _bare(parsed.get("numRecords") or rows)
            text = pattern.sub(f'"{name}":{value}', text)
    return text


def _bare(rows: int) -> str:
    return json.dumps({"numRecords": rows, "tightBounds": False}, separators=(",", ":"))
