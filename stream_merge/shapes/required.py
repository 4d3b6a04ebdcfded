"""The columns by which a merge finds and compares rows, and what to say where a target lacks one."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql.types import StructField, StructType

from stream_merge.model import names
from stream_merge.model.table_ref import TableRef


def lacking(
    target: TableRef,
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
    table = target.sql
    perhaps = f"perhaps it was renamed to one of {list(unknown)!r}" if unknown else "it was dropped"
    found: dict[str, str] = {}
    for what, fields in (("a key", keys), ("the sequence (sequence_by)", sequence)):
        for field in fields:
            column = names.quote(field.name)
            if field.name in new:
                renamed = f"ALTER TABLE {table} RENAME COLUMN … TO {column}"
                added = f"ALTER TABLE {table} ADD COLUMN {column} {field.dataType.simpleString()}"
                or_add = "" if fields is keys else f", or, if all its rows may count as the oldest, add it: {added}"
                found[field.name] = (
                    f"[COLUMN_DROPPED] target {target!r} has no column {field.name!r}, which is {what}; {perhaps};"
                    f" rename it back ({renamed}){or_add}"
                )
            elif isinstance(field.dataType, StructType):
                inside = [path for path in new if path.startswith(f"{field.name}.")]
                statement = f"ALTER TABLE {table} ADD COLUMN …"
                found |= dict.fromkeys(
                    inside,
                    f"[COLUMN_NOT_IN_TARGET] column {field.name!r} of target {target!r}, which is {what}, lacks"
                    f" field(s) {inside!r}; add each of them first: {statement}",
                )
    return found


def lacks_reserved(target: TableRef) -> str:
    """A target whose sequence was kept in the reserved column, which is gone."""
    table = target.sql
    renamed = f"ALTER TABLE {table} RENAME COLUMN … TO {names.quote(names.SEQUENCE_COLUMN)}"
    unset = f"ALTER TABLE {table} UNSET TBLPROPERTIES ({names.sql_string(names.SEQUENCE_PROPERTY)})"
    return (
        f"[COLUMN_DROPPED] target {target!r} has no column {names.SEQUENCE_COLUMN!r}, and sequence_by is not stored;"
        f" rename it back ({renamed}), store sequence_by again or, if all rows may count as the oldest: {unset}"
    )
