"""Replaces Python arguments in the sink's messages by command-line options or job-file settings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import fields

from stream_merge.model.settings import Create, Driver, Maintenance, Tombstones
from stream_merge.shapes import Changes, Clauses, InsertOnly, Snapshot
from stream_merge.sink import MergeSink

_ARGUMENTS = {
    *(name for one in (MergeSink, Snapshot) for name in inspect.signature(one).parameters),
    *(field.name for group in (Maintenance, Create, Tombstones, Driver) for field in fields(group)),
}
_ANY = "|".join(sorted(_ARGUMENTS, key=len, reverse=True))
_SINK = re.compile(
    rf"""
    (?<!\w)'[^']*' | (?<!\w)"[^"]*" | `[^`]*`                               # names and values of the user's
    | (?<![\w.-]) (?P<name>{_ANY}) =
        (?P<value> '[^']*' | "[^"]*" | \[[^]]*] | (?P<call>\w+)\((?P<inside>[^()]*)\) | [\w.…-]+ )?
    | (?<![\w.-]) (?P<word>{"|".join(name for name in sorted(_ARGUMENTS) if "_" in name)}) (?![\w`.-])
    | (?:^|(?<=[;\]][ ])) (?P<first>{_ANY}) (?=[ ](?:is|must|holds|names|sets)\b)   # only here an argument
    """,
    re.VERBOSE,
)
_SHAPES: Mapping[str, str] = {shape.__name__: shape.name for shape in (Changes, InsertOnly, Clauses, Snapshot)}
_OPTIONS: Mapping[str, str] = {
    "column_list": "--columns",
    "except_column_list": "--except-columns",
    "properties": "--table-property",
} | {
    name: f"--{name.replace('_', '-')}"
    for name in (
        *("apply_as_deletes", "keys", "name", "quarantine_target", "schema_evolution", "sequence_by", "shape"),
        *("single_writer", "target", "target_filter", *inspect.signature(Snapshot).parameters),
    )
}
"""Argument -> option of `stream-merge files`."""
_SETTINGS: Mapping[str, str] = {
    "retention_seconds": "tombstone_retention",
    "properties": "table_properties",
} | {
    name: name
    for name in (
        *("engine", "keys", "maintenance", "name", "schema_evolution", "shape", "single_writer"),
        *("target", "target_filter"),
    )
}
"""Argument -> setting of a query in a job file."""


def as_options(text: str) -> str:
    """The sentence with options of `stream-merge files`."""
    return _spelled(text, _OPTIONS, _option)


def as_settings(query: str, text: str) -> str:
    """The sentence with settings of a query in a job file."""
    return _spelled(text, {name: f"queries.{query}.{setting}" for name, setting in _SETTINGS.items()}, _setting)


def _spelled(text: str, names: Mapping[str, str], write: Callable[[str, str], str]) -> str:
    def replaced(match: re.Match[str]) -> str:
        value = match["value"] or ""
        name = match["name"] or match["word"] or match["first"]
        if name is None:
            return match.group()
        if name not in names:  # only in Python
            return f"{match.group()} (in Python)" if value else match.group()
        if match["call"] in _SHAPES:
            inside = match["inside"] if match["inside"] != "…" else ""
            return " ".join(filter(None, (write(names[name], _SHAPES[match["call"]]), _spelled(inside, names, write))))
        return write(names[name], value)

    return _SINK.sub(replaced, text)


def _option(name: str, value: str) -> str:
    if value == Clauses.name and name == "--shape":
        return "--clauses"
    return {"True": name, "False": f"--no-{name[2:]}"}.get(value, f"{name} {value}".rstrip())


def _setting(name: str, value: str) -> str:
    value = {"True": "true", "False": "false", "None": "null", "Maintenance()": "{}"}.get(value, value.strip("'"))
    quote = "" if "'" in value else "'"
    return f"{quote}{name}: {value}{quote}" if value else name
