"""Whether a condition of a user's own leaves out what a source marks as a delete: read from its text, strictly."""

from __future__ import annotations

import re

_TOKEN = re.compile(
    r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|`[^`]*`|--[^\n]*|/\*.*?\*/|[()]|\b(?:AND|OR|CASE|END)\b",
    re.IGNORECASE | re.DOTALL,
)


def terms(condition: str | None) -> list[str]:
    """What a condition joins by AND, outside of all parentheses; with an OR there, the condition as a whole."""
    if condition is None:
        return []
    depth, start, found = 0, 0, []
    for token in _TOKEN.finditer(condition):
        text = token.group().upper()
        if text in ("(", "CASE"):
            depth += 1
        elif text in (")", "END"):
            depth -= 1
        elif depth == 0 and text == "OR":
            return [condition]
        elif depth == 0 and text == "AND":
            found.append(condition[start : token.start()])
            start = token.end()
    return [*found, condition[start:]]


def bare(mark: str) -> str:
    """The name of the mark without quotes."""
    return mark.replace("`", "").lower()


def is_mark(term: str, mark: str) -> bool:
    """Whether a term is the mark."""
    return _plain(term) in {mark, f"s.{mark}"}


def negates(term: str, mark: str) -> bool:
    """Whether a term holds only without the mark: NOT and the mark, or one of the other ways to say so."""
    plain = _plain(term)
    return (plain.startswith("not") and is_mark(plain[3:], mark)) or any(
        plain.endswith(end) and is_mark(plain.removesuffix(end), mark) for end in ("isfalse", "isnottrue", "=false")
    )


def _plain(term: str) -> str:
    return re.sub(r"[\s()`]", "", term).lower()
