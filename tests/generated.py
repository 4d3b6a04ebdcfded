"""Tables with generated columns on each version: SQL declares them from Spark 4 on, Delta's Python API before, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from delta.tables import DeltaTable
from pyspark.sql import SparkSession

from stream_merge.spark.versions import from_ddl


def create_generated(
    spark: SparkSession, path: str, columns: str, generated: Mapping[str, str], by: Sequence[str] = ()
) -> None:
    """Create a table.

    Args:
        spark: session.
        path: its folder.
        columns: those that are given, as in `CREATE TABLE`.
        generated: what each of the others, `<name> <type>`, is made of.
        by: partition columns.
    """
    builder = DeltaTable.create(spark).location(path).addColumns(from_ddl(columns))
    for column, expression in generated.items():
        name, kind = column.split(" ", 1)
        builder = builder.addColumn(name, kind, generatedAlwaysAs=expression)
    builder.partitionedBy(*by).execute()
