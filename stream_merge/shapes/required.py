"""The columns by which a merge finds and compares rows, and what to say where a target lacks one."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql.types import StructField, StructType

from stream_merge.model import names


def lacking(
    target: str,
    keys: Sequence[StructField],
    sequence: Sequence[StructField],
    new: Sequence[str],
    unknown: Sequence[str],
) -> dict[str, str]:
    """Which of the columns and nested fields that are new to a target must be there, and what to say.

    Args:
        target: the table.
        keys: key columns.
        sequence: stored columns that order the events.
        new: names and dotted paths.
        unknown: columns of the target that the source does not have.
    """
    table = names.sql_identifier(target)
    perhaps = f"perhaps it was renamed to one of {list(unknown)!r}" if unknown else "it was dropped"
    found: dict[str, str] = {}
    for what, fields in (("a key", keys), ("the sequence (sequence_by)", sequence)):
        for field in fields:
            column = names.quote(field.name)
            if field.name in new:
                added = f"ALTER TABLE {table} ADD COLUMN {column} {field.dataType.simpleString()}"
                or_add = "" if fields is keys else f", or, if all its rows may count as the oldest, add it: {added}"
                found[field.name] = (
                    f"target {target!r} has no column {field.name!r}, which is {what}; {perhaps}; rename it back (ALTER"
                    f" TABLE {table} RENAME COLUMN … TO {column}){or_add}"
                )
            elif isinstance(field.dataType, StructType):
                inside = [path for path in new if path.startswith(f"{field.name}.")]
                found |= dict.fromkeys(
                    inside,
                    f"column {field.name!r} of target {target!r}, which is {what}, lacks the field(s) {inside!r}; rows"
                    f" cannot be compared while they are added: ALTER TABLE {table} ADD COLUMN for each, first",
                )
    return found


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
