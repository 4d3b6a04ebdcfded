"""Constructor arguments, normalized; invalid ones become problems of `MergeSpec`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from stream_merge.errors import ConfigError
from stream_merge.model.settings import RENAMED

T = TypeVar("T")


def as_names(value: str | Sequence[str]) -> tuple[str, ...]:
    """One name or a list of names, as a tuple."""
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)


def optional_names(value: Sequence[str] | None) -> tuple[str, ...] | None:
    """A tuple of names; None where no list was given."""
    return None if value is None else as_names(value)


def to_bool(value: bool) -> bool:
    """True or False, also from numpy's booleans, without importing numpy."""
    kind = type(value)
    return bool(value) if kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_") else value


def as_mapping(value: Any) -> Any:
    """Pairs as a mapping; a mapping itself, as its values may change later."""
    if isinstance(value, Mapping | str):
        return value
    try:
        return dict(value)
    except (TypeError, ValueError):
        return value


def as_own_mapping(value: Any) -> Any:
    """A copy of a mapping, or of pairs."""
    mapping = as_mapping(value)
    return dict(mapping) if isinstance(mapping, Mapping) else mapping


def on_or_with(value: Any, default: T) -> tuple[bool, T]:
    """Whether something is on, and its settings: from True, False, or the settings."""
    if isinstance(value, type(default)):
        return True, value
    return to_bool(value), default


def expect_known(renamed: Mapping[str, object], *, target: str) -> None:
    """Refuse unknown arguments (TypeError), and renamed ones (ConfigError) with their present names."""
    unknown = [name for name in renamed if name not in RENAMED]
    if unknown:
        msg = f"MergeSink.__init__() got an unexpected keyword argument {unknown[0]!r}"
        raise TypeError(msg)
    if renamed:
        raise ConfigError(
            [f"[UNKNOWN_SETTING] {name} is now {RENAMED[name]}; use that" for name in renamed], target=target
        )
