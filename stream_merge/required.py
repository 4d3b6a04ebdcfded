"""The columns by which a merge finds and compares rows, and what to say where a target lacks one."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql.types import StructField

from stream_merge import names


def lacks_key(target: str, key: StructField, unknown: Sequence[str]) -> str:
    """A target without a key column; `unknown` are columns of it that the source does not have."""
    return _lacks(target, key, "a key", unknown)


def lacks_sequence(target: str, component: StructField, unknown: Sequence[str]) -> str:
    """As `lacks_key`, of a stored column that orders the events."""
    added = f"{names.quote(component.name)} {component.dataType.simpleString()}"
    return (
        f"{_lacks(target, component, 'the sequence (sequence_by)', unknown)}, or, if all its rows may count as the"
        f" oldest, add it: ALTER TABLE {names.sql_identifier(target)} ADD COLUMN {added}"
    )


def lacks_reserved(target: str) -> str:
    """A target whose sequence was kept in the reserved column, which is gone."""
    table = names.sql_identifier(target)
    return (
        f"target {target!r} has lost the column {names.SEQUENCE_COLUMN!r}, or the columns of sequence_by were stored"
        " before and are now left out, so that nobody knows how new its rows are; rename it back (ALTER TABLE"
        f" {table} RENAME COLUMN … TO {names.quote(names.SEQUENCE_COLUMN)}), store the columns as before, or, if all"
        f" its rows may count as the oldest: ALTER TABLE {table} UNSET TBLPROPERTIES"
        f" ({names.sql_string(names.SEQUENCE_PROPERTY)})"
    )


def _lacks(target: str, column: StructField, what: str, unknown: Sequence[str]) -> str:
    found = f"perhaps it was renamed to one of {list(unknown)!r}" if unknown else "it was dropped"
    return (
        f"target {target!r} has no column {column.name!r}, which is {what}; {found}; rename it back (ALTER TABLE"
        f" {names.sql_identifier(target)} RENAME COLUMN … TO {names.quote(column.name)})"
    )
