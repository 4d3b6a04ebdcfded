"""Shapes in job files and clause files: a name, or own clauses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Discriminator, Field, Tag, ValidationError, model_validator
from pydantic_core import ErrorDetails

from stream_merge import shapes
from stream_merge.errors import ConfigError, located
from stream_merge.jobs.units import Model, Names
from stream_merge.shapes import Clauses, Shape
from stream_merge.shapes.clause_builders import Then


class ClauseSettings(Model):
    """One clause of a MERGE, in SQL over the event `s` and the row `t`."""

    when: Literal["matched", "not_matched", "not_matched_by_source"]
    condition: str | None = None
    """None: always."""
    then: Literal["update", "insert", "delete"]
    values: Mapping[str, str] | None = Field(default=None, alias="set")
    """Column of the target -> its value. None: every stored column of the event."""
    left_out: Names = Field(default=(), alias="except")
    """Columns that are not assigned where `set` is missing."""


class ClausesSettings(Model):
    """`clauses`: the shape `Clauses`."""

    clauses: tuple[ClauseSettings, ...]

    def shape(self) -> Clauses:
        """The shape. Raises `ConfigError` with all problems that need neither source nor target."""
        return Clauses(
            [
                Then(kind=one.when, action=one.then, condition=one.condition, values=one.values, except_=one.left_out)
                for one in self.clauses
            ]
        )

    @model_validator(mode="after")
    def _make_a_merge(self) -> ClausesSettings:
        try:
            self.shape()
        except ConfigError as err:
            raise ValueError("\n".join(err.problems)) from None
        return self


def _kind(given: Any) -> str:
    return "by_name" if isinstance(given, str) else "in_words"


ShapeSettings = Annotated[
    Annotated[str, Tag("by_name")] | Annotated[ClausesSettings, Tag("in_words")], Discriminator(_kind)
]
"""A name of `shapes.known_shapes`, or `clauses:`."""


def shape_from_settings(given: str | ClausesSettings) -> Shape:
    """The shape; raises `KeyError` for an unknown name."""
    return shapes.from_name(given) if isinstance(given, str) else given.shape()


def read_clauses(path: str | Path) -> Clauses:
    """The clauses of a YAML file: a list, or `clauses:` with one. Raises `ConfigError` with all problems."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as err:
        msg = f"[CANNOT_READ_FILE] clause file {str(path)!r} cannot be read: {err.strerror}"
        raise ConfigError(msg) from err
    except (yaml.YAMLError, UnicodeDecodeError) as err:
        msg = f"[CANNOT_READ_FILE] clause file {str(path)!r} is not YAML: {' '.join(str(err).split())}"
        raise ConfigError(msg) from err
    try:
        settings = ClausesSettings.model_validate({"clauses": content} if isinstance(content, list) else content)
    except ValidationError as err:
        errors = err.errors(include_url=False, include_input=False)
        raise ConfigError([located(str(path), text) for one in errors for text in validation_problems(one)]) from None
    return settings.shape()


_MESSAGES = {
    "extra_forbidden": "[UNKNOWN_SETTING] {place} is not a setting",
    "missing": "[MISSING_SETTING] {place} is missing",
    "model_type": "[INVALID_SETTING] {place} must be a mapping of settings to values",
    "model_attributes_type": "[INVALID_SETTING] {place} must be a mapping of settings to values",
    "too_short": "[INVALID_SETTING] {place} must not be empty",
    "string_too_short": "[INVALID_SETTING] {place} must not be empty",
    "union_tag_not_found": "[MISSING_SETTING] {place}.type is missing",
    "union_tag_invalid": "[INVALID_SETTING] {place}.type {tag!r} must be one of {expected_tags}",
}
"""pydantic's error type -> message."""


def validation_problems(error: ErrorDetails) -> list[str]:
    """The messages of a pydantic error, with the setting's name after the code."""
    place = ".".join(map(str, error["loc"])) or "the file"
    message = _MESSAGES.get(error["type"])
    if message is not None:
        return [message.format(place=place, **error.get("ctx", {}))]
    message = str(error["msg"]).removeprefix("Value error, ").replace("Input should be", "must be")
    message = message.replace("valid tuple", "list").replace("valid dictionary", "mapping")
    return [
        located(place, line) if line.startswith("[") else f"[INVALID_SETTING] {place}: {line}"
        for line in message.splitlines()
    ]
