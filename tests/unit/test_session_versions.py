"""What differs between versions of Spark: what was chosen belongs to the PySpark that is installed."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyspark
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import types as T

from stream_merge.session import delta_packages
from stream_merge.spark import versions
from stream_merge.spark.confs import PACKAGES

ITS_JARS = Path(pyspark.__file__).parent / "jars"


def test_the_package_of_delta_is_the_one_that_delta_chooses():
    assert delta_packages(SparkSession.builder)._options[PACKAGES] == versions.DELTA_PACKAGE


def test_file_systems_are_for_the_hadoop_that_pyspark_brings():
    assert [jar.name for jar in ITS_JARS.glob("hadoop-client-api-*.jar")] == [
        f"hadoop-client-api-{versions.HADOOP}.jar"
    ]


@pytest.mark.parametrize(
    ("dtype", "arrow"),
    [
        (T.TimestampType(), pa.timestamp("us", tz="UTC")),
        (T.TimestampNTZType(), pa.timestamp("us")),
        (T.ArrayType(T.TimestampType()), pa.list_(pa.field("element", pa.timestamp("us", tz="UTC")))),
        (T.DecimalType(20, 4), pa.decimal128(20, 4)),
        (T.StructType([T.StructField("a", T.StringType())]), pa.struct([pa.field("a", pa.string())])),
    ],
)
def test_types_are_the_same_to_arrow_in_every_version(dtype: T.DataType, arrow: pa.DataType):
    assert versions.arrow_type(dtype) == arrow
