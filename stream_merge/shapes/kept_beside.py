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
    found: list[StructField] = []
    for name, written in wanted.items():
        of_source = columns.resolve(name, [c.name for c in stored], case_sensitive=case_sensitive)
        if of_source is not None:
            problems.append(
                f"missing sets column {name!r}, which the source has, too; a flag belongs to the table alone: choose"
                " another name, or leave the column out with except_column_list"
            )
            continue
        known = None if target is None else columns.resolve(name, target.names, case_sensitive=case_sensitive)
        if target is not None and known is not None:
            found.append(target[known])
            if not target[known].nullable:
                problems.append(
                    f"missing sets column {known!r}, which is NOT NULL in {spec.target!r}; rows that are there have no"
                    f" flag, so allow it: ALTER TABLE {names.sql_identifier(spec.target)} ALTER COLUMN"
                    f" {names.quote(known)} DROP NOT NULL"
                )
            continue
        try:
            dtype = frame.select(F.expr(written).alias("value")).schema["value"].dataType
        except AnalysisException as err:
            problems.append(
                f"missing sets {name!r} to {written!r}, which does not fit: {reason(err).rstrip(';.')}; t has"
                f" {rows.names!r}"
            )
            continue
        if columns.unstorable(name, dtype):
            problems.append(
                f"missing sets {name!r} to {written!r}, which is {dtype.simpleString()}; Delta does not store it, so"
                " cast it"
            )
            continue
        found.append(StructField(name, columns.nullable(dtype)))
        if target is not None and not spec.schema_evolution:
            problems.append(
                f"missing sets column {name!r}, which {spec.target!r} lacks; set schema_evolution=True to add it, or"
                f" add it yourself: ALTER TABLE {names.sql_identifier(spec.target)} ADD COLUMN"
                f" {names.quote(name)} {dtype.simpleString()}"
            )
    return tuple(found)
