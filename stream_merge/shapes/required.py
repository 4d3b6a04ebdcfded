"""The columns by which a merge finds and compares rows, and what to say where a target lacks one."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType

from stream_merge.model import names
from stream_merge.model.settings import MergeSpec
from stream_merge.model.table_ref import TableRef
from stream_merge.shapes.layout import StoredColumn
from stream_merge.spark import columns
from stream_merge.spark.errors import reason


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


def fields(
    session: SparkSession,
    spec: MergeSpec,
    stored: Sequence[StoredColumn],
    target: StructType | None,
    problems: list[str],
    *,
    case_sensitive: bool,
) -> tuple[StructField, ...]:
    """The columns as the target has them, or is to be made with them.

    Args:
        session: whose functions count.
        spec: what the sink was told.
        stored: columns of the source that the target stores.
        target: None while there is none.
        problems: what is wrong with the columns is added here.
        case_sensitive: how names are compared.
    """
    wanted = {} if spec.shape is None else spec.shape.kept_beside
    if not wanted:
        return ()
    rows = StructType([StructField(c.name, c.dtype) for c in stored] if target is None else list(target.fields))
    frame = session.createDataFrame([], rows).alias("t")
    alter = f"ALTER TABLE {spec.target.sql}"
    found: list[StructField] = []
    for name, written in wanted.items():
        of_source = columns.resolve(name, [c.name for c in stored], case_sensitive=case_sensitive)
        if of_source is not None:
            problems.append(
                f"[CONFLICTING_SETTINGS] missing sets column {name!r}, which the source has, too; choose another name,"
                " or leave the column out with except_column_list"
            )
            continue
        known = None if target is None else columns.resolve(name, target.names, case_sensitive=case_sensitive)
        if target is not None and known is not None:
            found.append(target[known])
            if not target[known].nullable:
                statement = f"{alter} ALTER COLUMN {names.quote(known)} DROP NOT NULL"
                problems.append(
                    f"[COLUMN_NOT_WRITABLE] missing sets column {known!r}, which is NOT NULL in {spec.target!r}; run"
                    f" {statement}"
                )
            continue
        try:
            dtype = frame.select(F.expr(written).alias("value")).schema["value"].dataType
        except AnalysisException as err:
            problems.append(
                f"[INVALID_EXPRESSION] missing sets {name!r} to {written!r}, which does not fit:"
                f" {reason(err).rstrip(';.')}; t has {rows.names!r}"
            )
            continue
        if columns.unstorable(name, dtype):
            problems.append(
                f"[UNSUPPORTED_TYPE] missing sets {name!r} to {written!r}, which is {dtype.simpleString()}; Delta does"
                " not store it, cast it"
            )
            continue
        found.append(StructField(name, columns.nullable(dtype)))
        if target is not None and not spec.schema_evolution:
            statement = f"{alter} ADD COLUMN {names.quote(name)} {dtype.simpleString()}"
            problems.append(
                f"[COLUMN_NOT_IN_TARGET] missing sets column {name!r}, which {spec.target!r} lacks; set"
                f" schema_evolution=True to add it, or run {statement}"
            )
    return tuple(found)
