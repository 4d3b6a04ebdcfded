"""Which columns a Parquet file has by its footer, in Parquet's words: Spark has no type for some of them."""

from __future__ import annotations

import re
from typing import Any

from pyspark.sql import SparkSession

from stream_merge.spark.hadoop_files import hadoop_class


def columns(session: SparkSession, path: str) -> dict[str, str]:
    """Dotted name -> type, such as `int64 (TIMESTAMP(NANOS,true))`; of nested columns the innermost.

    Cost: one read of the footer.
    """
    jvm: Any = session.sparkContext._jvm
    conf = session._jsparkSession.sessionState().newHadoopConf()
    hadoop_path = hadoop_class(session, "Path")(path)
    file = getattr(jvm, "org.apache.parquet.hadoop.util.HadoopInputFile").fromPath(hadoop_path, conf)
    reader = getattr(jvm, "org.apache.parquet.hadoop.ParquetFileReader").open(file)
    try:
        schema = reader.getFileMetaData().getSchema()
        return {".".join(names): _type(str(schema.getType(names)), names[-1]) for names in schema.getPaths()}
    finally:
        reader.close()


def _type(written: str, name: str) -> str:
    """The type alone: `optional int64 at (TIMESTAMP(NANOS,true))` has the column's name in it."""
    return re.sub(rf"^\w+ (\S+) {re.escape(name)}(?= |$)", r"\1", written)
