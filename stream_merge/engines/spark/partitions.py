"""Partition values of a batch's keys: where a partition column is a key, or is computed from keys alone.

A row then lies in the partition of its key, and no other is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from stream_merge.model import names
from stream_merge.model.snapshot import TableSnapshot
from stream_merge.shapes.batch import Batch
from stream_merge.shapes.key_bounds import as_transported, boundable
from stream_merge.shapes.layout import Layout
from stream_merge.spark import columns
from stream_merge.spark.jvm import each, exact_literal
from stream_merge.spark.versions import is_valid_utf8

MOST_VALUES = 64
"""Partitions that a condition lists; Delta compares each file with each value."""
_PROVEN = frozenset(
    {
        *("AttributeReference", "Literal", "Alias", "Cast", "Add", "Subtract", "Multiply", "Abs", "Pmod", "Remainder"),
        *("IntegralDivide", "Murmur3Hash", "XxHash64", "Year", "Quarter", "Month", "DayOfMonth", "DayOfYear"),
        *("DayOfWeek", "WeekOfYear", "TruncDate", "Substring", "Left", "Concat"),
    }
)
"""Expressions of Spark whose value depends on nothing but their arguments: no time zone, no session, no version."""
_WHOLE_NUMBERS = frozenset({"tinyint", "smallint", "int", "bigint"})
_TYPES = _WHOLE_NUMBERS | {"date", "string"}
"""Of all that an expression is made of. Under ANSI a decimal is written as another text, and a text read as another
number (Spark 4.2: `Cast.useDecimalPlainString`; BIGINT in place of DOUBLE); a TIMESTAMP asks for a time zone."""


def partition_condition(session: SparkSession, layout: Layout, batch: Batch, target: TableSnapshot) -> Column | None:
    """Which partitions hold the rows of the batch's keys, as a condition on `t`; None where that says nothing new.

    Cost: one small Spark job over the keys of the evaluated events, where their bounds do not name the only partition.
    """
    partitions = [target.schema[name] for name in target.partition_columns]
    name = f"partitions {[(f.name, f.metadata.get(names.GENERATED_FROM)) for f in partitions]!r}"
    known = layout.once(name, lambda: _computed(session, layout, partitions))
    single = {bound.name for bound in batch.bounds.columns if bound.least == bound.greatest}
    fields = [field for field in partitions if field.name in known and field.name not in single]
    if not fields:
        return None
    values = [as_transported(known[f.name], f.dataType) for f in fields]
    # Text that is no UTF-8 would arrive here as another one.
    are_legible = columns.all_of(
        F.coalesce(is_valid_utf8(known[f.name]), F.lit(True)) for f in fields if isinstance(f.dataType, StringType)
    )
    try:
        found = batch.rows.latest().select(*values, are_legible).distinct().limit(MOST_VALUES + 1).collect()
    except (PySparkException, Py4JJavaError):  # such as an overflow under ANSI, of a value that was stored without
        return None
    if len(found) > MOST_VALUES or not all(row[-1] for row in found):
        return None
    return columns.all_of(_is_one_of(session, f, {row[i] for row in found}) for i, f in enumerate(fields))


def _is_one_of(session: SparkSession, field: StructField, values: set[Any]) -> Column:
    """Whether a row's value is one of these; NULL counts, as which Delta keeps an empty text, too."""
    stored = columns.column(field.name, "t")
    listed = [exact_literal(session, value, field.dataType) for value in values if value is not None]
    return stored.isin(*listed) | stored.isNull() if listed else stored.isNull()


def _computed(session: SparkSession, layout: Layout, partitions: Sequence[StructField]) -> Mapping[str, Column]:
    """Partition column -> its value over the evaluated events."""
    keys = {field.name: field for field in boundable(layout.key_fields)}
    of_keys = session.createDataFrame([], StructType(list(keys.values())))
    found: dict[str, Column] = {}
    for field in partitions:
        name, written = field.name, field.metadata.get(names.GENERATED_FROM)
        if name in keys:
            found[name] = columns.column(name)
        elif written is not None and boundable((field,)):
            value = F.expr(written).cast(field.dataType)
            if _is_proven(of_keys, value):
                found[name] = value
    return found


def _is_proven(of_keys: DataFrame, value: Column) -> bool:
    """Whether an expression over the keys has the same value in every session."""
    try:
        planned = of_keys.select(value.alias("value"))
    except AnalysisException:  # it is about other columns, too
        return False
    (expression,) = each(planned._jdf.queryExecution().analyzed().projectList())
    return _consists_of_proven(expression)


def _consists_of_proven(expression: Any) -> bool:
    name, held = expression.getClass().getSimpleName(), expression.dataType().catalogString()
    children = list(each(expression.children()))
    if name not in _PROVEN or held not in _TYPES:
        return False
    if name == "Cast":
        (child,) = children
        given = child.dataType().catalogString()
        if given != held and (given not in _WHOLE_NUMBERS or held == "date"):
            return False
    return all(_consists_of_proven(child) for child in children)
