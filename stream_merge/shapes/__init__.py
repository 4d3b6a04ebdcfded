"""What a batch means for a table: which rows meet, and what becomes of them; no engine is known here."""

from __future__ import annotations

from stream_merge.errors import ConfigError
from stream_merge.model.settings import MergeSpec
from stream_merge.shapes.base import Shape
from stream_merge.shapes.changes import Changes
from stream_merge.shapes.custom import Clauses, when_matched, when_not_matched, when_not_matched_by_source
from stream_merge.shapes.insert_only import InsertOnly
from stream_merge.shapes.snapshot import Snapshot

SHAPES: tuple[type[Shape], ...] = (Changes, InsertOnly, Clauses, Snapshot)
"""Every shape there is; command line and job file know those that need no arguments by their names."""

__all__ = [
    "SHAPES",
    "Changes",
    "Clauses",
    "InsertOnly",
    "Shape",
    "Snapshot",
    "checked",
    "known_shapes",
    "of_name",
    "shape_of",
    "when_matched",
    "when_not_matched",
    "when_not_matched_by_source",
]


def shape_of(spec: MergeSpec) -> Shape:
    """The shape that a sink was told, or the default one."""
    return checked(Changes() if spec.shape is None else spec.shape, target=spec.target)


def checked(shape: object, *, target: str) -> Shape:
    """The shape, if it is one.

    Raises:
        ConfigError: it is none; the class of a shape, without parentheses, is none either.
    """
    if not isinstance(shape, Shape):
        msg = f"[INVALID_SETTING] shape={shape!r} must be one of stream_merge.shapes, such as Changes()"
        raise ConfigError(msg, target=target)
    return shape


def known_shapes() -> list[str]:
    """The names of the shapes that need no more than that, the default one first."""
    return [shape.name for shape in SHAPES if not shape.needs_arguments]


def of_name(name: str) -> Shape:
    """The shape of that name.

    Raises:
        KeyError: there is none.
    """
    return {shape.name: shape for shape in SHAPES if not shape.needs_arguments}[name]()
