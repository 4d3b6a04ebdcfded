"""The shapes: what a batch means for a table. No engine is imported here."""

from __future__ import annotations

from stream_merge.errors import ConfigError
from stream_merge.model.settings import MergeSpec
from stream_merge.shapes.base import Shape
from stream_merge.shapes.changes import Changes
from stream_merge.shapes.custom import Clauses, when_matched, when_not_matched, when_not_matched_by_source
from stream_merge.shapes.insert_only import InsertOnly
from stream_merge.shapes.snapshot import Snapshot

SHAPES: tuple[type[Shape], ...] = (Changes, InsertOnly, Clauses, Snapshot)
"""Every shape; command line and job file name those that need no arguments."""

__all__ = [
    "SHAPES",
    "Changes",
    "Clauses",
    "InsertOnly",
    "Shape",
    "Snapshot",
    "checked",
    "from_name",
    "known_shapes",
    "shape_of",
    "when_matched",
    "when_not_matched",
    "when_not_matched_by_source",
]


def shape_of(spec: MergeSpec) -> Shape:
    """The sink's shape; Changes by default."""
    return checked(Changes() if spec.shape is None else spec.shape, target=spec.target)


def checked(shape: object, *, target: str) -> Shape:
    """The shape.

    Raises:
        ConfigError: it is not an instance of a shape.
    """
    if not isinstance(shape, Shape):
        msg = f"[INVALID_SETTING] shape={shape!r} must be one of stream_merge.shapes, such as Changes()"
        raise ConfigError(msg, target=target)
    return shape


def known_shapes() -> list[str]:
    """Names of the shapes that need no arguments, the default first."""
    return [shape.name for shape in SHAPES if not shape.needs_arguments]


def from_name(name: str) -> Shape:
    """The shape of a name; KeyError if there is none."""
    return {shape.name: shape for shape in SHAPES if not shape.needs_arguments}[name]()
