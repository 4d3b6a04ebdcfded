"""Log lines of events: the name, then `key=value` fields on one line; or JSON."""

from __future__ import annotations

import json
import logging
import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from math import isfinite
from typing import Any

from stream_merge.errors import StreamMergeError

_PLAIN = re.compile(r"[^\s\"'=\\]+")
_MOST_CHARACTERS = 2000
"""Length of one value in the message, and in JSON; the record's attribute has all of it."""
_RECORD_ATTRIBUTES = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName", "event"}
"""Attributes of every record; all others are fields of an event."""


def tell(log: Callable[..., None], event: str, /, *, exc_info: object = False, **fields: object) -> None:
    """Log an event as a line that is complete under any logging setup; its fields are attributes of the record, too.

    Args:
        log: method of a logger, which gives the level: `tell(log.warning, "commit_conflict", target=target)`.
        event: its name, a constant; the record has it as `event`.
        exc_info: add the error that is being handled, or this one.
        fields: values; none may be named like an attribute of `logging.LogRecord`.
    """
    facts = (f"{key}={_shown(value)}" for key, value in fields.items())
    error = exc_info if isinstance(exc_info, BaseException) else bool(exc_info)
    log(" ".join((event, *facts)), exc_info=error, extra={"event": event, **fields}, stacklevel=2)


def _shown(value: object) -> str:
    """A value without a space or in double quotes; unprintable characters are escaped."""
    text = _text(value)
    if len(text) > _MOST_CHARACTERS:
        text = text[:_MOST_CHARACTERS] + "…"
    if _PLAIN.fullmatch(text) and text.isprintable():
        return text
    escaped = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else c.encode("unicode-escape", "surrogatepass").decode() for c in escaped)


def _text(value: object) -> str:
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return ",".join(f"{key}:{_text(one)}" for key, one in value.items() if one)
    if isinstance(value, list | tuple):
        return ",".join(map(_text, value))
    return f"{value:.3f}" if isinstance(value, float) else str(value)


class JsonFormatter(logging.Formatter):
    """One JSON object per line: `ts`, `level`, `logger`, `event`, its fields, and `exception` where there is one.

    A record of another package has the event `log`, and its text as `message`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        own = record.__dict__
        line: dict[str, object] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "event": own.get("event", "log"),
        }
        if "event" not in own:
            line["message"] = _as_json(record.getMessage())
        line |= {name: _as_json(own[name]) for name in own if name not in _RECORD_ATTRIBUTES and name not in line}
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            line["exception"] = {
                "type": type(error).__name__,
                "code": error.code if isinstance(error, StreamMergeError) else None,
                "message": _as_json(str(error)),
                "stack": "".join(traceback.format_tb(error.__traceback__)),
            }
        return json.dumps(line)


def _as_json(value: object) -> Any:
    """A value for JSON; of bytes, which may be an event's, only their number."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(key): _as_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_as_json(one) for one in value]
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, float):
        return round(value, 6) if isfinite(value) else str(value)
    text = f"{len(value)} bytes" if isinstance(value, bytes) else str(value)
    return text if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS] + "…"


def counted(number: int, noun: str) -> str:
    """`1 file`, `2,000 files`, `0 micro-batches`."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"
