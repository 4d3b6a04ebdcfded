"""What a constructor is given, as settings have it; what cannot be had so is told among all other problems."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def as_names(value: str | Sequence[str]) -> tuple[str, ...]:
    """One name or a list of names, as a tuple."""
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)


def as_truth(value: bool) -> bool:
    """True or False, also where numpy's are given, which need not be installed."""
    kind = type(value)
    return bool(value) if kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_") else value


def as_mapping(value: Any) -> Any:
    """A mapping as it is, as its values may change later; pairs as one."""
    if isinstance(value, Mapping | str):
        return value
    try:
        return dict(value)
    except (TypeError, ValueError):
        return value


def as_own_mapping(value: Any) -> Any:
    """A mapping, or pairs, as one that nobody else changes."""
    found = as_mapping(value)
    return dict(found) if isinstance(found, Mapping) else found
