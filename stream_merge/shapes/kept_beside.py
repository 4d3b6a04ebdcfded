"""Columns of the target that the source does not have and a shape needs, such as the flags of missing rows."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType

from stream_merge.model import names
from stream_merge.model.settings import MergeSpec
from stream_merge.shapes.layout import StoredColumn
from stream_merge.spark import columns
from stream_merge.spark.errors import reason


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
