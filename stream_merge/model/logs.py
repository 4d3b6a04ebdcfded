"""How an event is logged: its name first, then its facts as `key=value`, on one line whatever they hold."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass

_PLAIN = re.compile(r"[^\s\"'=\\]+")
_MOST_CHARACTERS = 2000
"""Of one value in the message; the field has all of it."""


def tell(log: Callable[..., None], event: str, /, *, exc_info: object = False, **fields: object) -> None:
    """Log an event so that it says something under any logging setup, Python's last resort included.

    The fields stand in the record, too (`extra`), beside `event`, which filters can ask for.

    Args:
        log: method of a logger, which gives the level: `tell(log.warning, "commit_conflict", target=target)`.
        event: its name, a constant.
        exc_info: add the error that is being handled.
        fields: the facts; none may be named like an attribute of `logging.LogRecord`.
    """
    facts = (f"{key}={_shown(value)}" for key, value in fields.items())
    log(" ".join((event, *facts)), exc_info=bool(exc_info), extra={"event": event, **fields}, stacklevel=2)


def _shown(value: object) -> str:
    """A value without a space or in double quotes; what does not print, line ends above all, is escaped."""
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
