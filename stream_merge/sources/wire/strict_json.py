"""Strict JSON: a text is exactly one value, or it is refused with the reason."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any, NoReturn

MOST_NESTED = 200
"""Deepest nesting of arrays and objects."""


class UndecodableError(ValueError):
    """An event that cannot be read without guessing; the text is the reason."""


class NotRegisteredError(UndecodableError):
    """An event in a schema that the registry does not have, so far."""


class UnknownSchemaError(Exception):
    """An event in a schema that only a registry has, which the driver asks; the text is the schema's id."""

    def __init__(self, schema_id: str, *, of_key: bool = False) -> None:
        super().__init__(schema_id)
        self.of_key = of_key


def _refuse_constant(name: str) -> NoReturn:
    msg = f"{name} is not JSON"
    raise UndecodableError(msg)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        msg = f"field {twice!r} is there twice"
        raise UndecodableError(msg)
    return fields


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_without_repetition)
_EXACT_DECODER = json.JSONDecoder(
    parse_constant=_refuse_constant, object_pairs_hook=_without_repetition, parse_float=Decimal
)


def utf8_text(value: bytes) -> str:
    """The text of UTF-8 bytes. Raises `UndecodableError`."""
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as err:
        msg = f"byte {err.start} is not UTF-8"
        raise UndecodableError(msg) from None


def parse(text: str, *, exact: bool = False, begins_at: int = 0) -> Any:
    """The value of a text: int, float (Decimal when `exact`), str, bool, None, list or dict.

    Integers are exact whatever their size. Refused beyond RFC 8259: duplicate fields, NaN and Infinity, and nesting
    beyond `MOST_NESTED`. `begins_at` is added to positions in errors.
    """
    try:
        value = (_EXACT_DECODER if exact else _DECODER).decode(text)
    except json.JSONDecodeError as err:
        msg = f"not JSON at character {begins_at + err.pos}: {err.msg}"
        raise UndecodableError(msg) from None
    except RecursionError:
        raise UndecodableError(_TOO_DEEP) from None
    except UndecodableError:
        raise
    except ValueError as err:  # an integer of more digits than Python 3.11 converts (4,300)
        msg = f"not JSON: {err}"
        raise UndecodableError(msg) from None
    if text.count("{") + text.count("[") > MOST_NESTED and depth(value) > MOST_NESTED:
        raise UndecodableError(_TOO_DEEP)
    return value


_TOO_DEEP = f"nested deeper than {MOST_NESTED} levels"


def depth(value: Any) -> int:
    """The nesting of arrays and objects, without recursion."""
    level, levels = [value], 0
    while containers := [node for node in level if isinstance(node, dict | list)]:
        level = [child for node in containers for child in (node.values() if isinstance(node, dict) else node)]
        levels += 1
    return levels
