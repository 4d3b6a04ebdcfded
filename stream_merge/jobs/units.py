"""Types of job-file settings: sizes, durations, names, paths."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlparse

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, GetPydanticSchema
from pydantic_core.core_schema import with_info_after_validator_function

from stream_merge.model.table_ref import TableRef

_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_NUMBER = r"(?P<number>\d+(?:\.\d+)?)\s*"
_SIZE = re.compile(_NUMBER + r"(?P<unit>b|[kmg]i?b)?", re.IGNORECASE)
_DURATION = re.compile(_NUMBER + r"(?P<unit>ms|s(econds?)?|m(inutes?)?|h(ours?)?|d(ays?)?)?", re.IGNORECASE)
_LONGEST = 10_000 * 366 * 86_400
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400}


def _bytes(value: Any) -> Any:
    """`256 MiB` or a number of bytes."""
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        msg = f"{value!r} is not a size; write a number of bytes, or one with KiB, MiB, GiB, kB, MB or GB"
        raise ValueError(msg)
    return int(float(match["number"]) * _UNITS[(match["unit"] or "b").lower()])


def _seconds(value: Any) -> Any:
    """`500 ms`, `1 second`, `5 m`, `30 days` or a number of seconds."""
    if not isinstance(value, str):
        return value
    match = _DURATION.fullmatch(value.strip())
    if match is None:
        msg = f"{value!r} is not a duration; write a number with ms, s, minutes, hours or days"
        raise ValueError(msg)
    unit = (match["unit"] or "s").lower()
    seconds = float(match["number"]) * _SECONDS["ms" if unit == "ms" else unit[0]]
    if seconds > _LONGEST:
        msg = f"{value!r} must be at most 10,000 years"
        raise ValueError(msg)
    return seconds


def seconds_by_unit(value: Any) -> Any:
    """`_seconds` of a value with a unit."""
    match = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    if isinstance(value, int | float) or (match is not None and match["unit"] is None):
        msg = f"{value!r} has no unit; write '{value} days', or with s, minutes or hours"
        raise ValueError(msg)
    return _seconds(value)


Bytes = Annotated[int, BeforeValidator(_bytes)]
Seconds = Annotated[float, BeforeValidator(_seconds)]
Retention = Annotated[float, BeforeValidator(seconds_by_unit)]
Names = Annotated[tuple[str, ...], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]


def absolute_path(location: str, folder: Path | None) -> str:
    """A location; paths without scheme are absolute, from `~` or the job file's folder."""
    path = os.path.expanduser(location)
    if not path or urlparse(path).scheme or folder is None:
        return path
    return os.path.normpath(os.path.join(folder, path))


def absolute_target(name: str, folder: Path | None) -> TableRef:
    """A table; paths are absolute."""
    ref = TableRef(name)
    if ref.path is None or urlparse(ref.path).scheme:
        return ref
    return TableRef(absolute_path(ref.path, folder))


JobPath = Annotated[str, AfterValidator(lambda path, info: absolute_path(path, info.context))]
"""Path or URI of a file or folder."""
Target = Annotated[
    TableRef,
    GetPydanticSchema(
        lambda _, of: with_info_after_validator_function(
            lambda name, info: absolute_target(name, info.context), of(str)
        )
    ),
]
"""Path, URI or catalog name of a table."""


class Model(BaseModel):
    """Immutable settings; an unknown one is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)
