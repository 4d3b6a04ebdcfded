"""Which running sessions a sink can work in."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from stream_merge.errors import ConfigError
from stream_merge.spark import preflight


def test_a_session_with_delta_is_accepted(spark: SparkSession):
    preflight.check_session(spark)


def test_a_session_without_the_extension_is_refused(spark: SparkSession):
    other = spark.newSession()

    class WithoutExtension:
        sparkContext = other.sparkContext  # noqa: N815  # PySpark's name

        class conf:  # noqa: N801  # PySpark's name
            get = staticmethod(lambda _key, default: default)

    with pytest.raises(ConfigError, match="has Delta's jar but not its extension"):
        preflight.check_session(WithoutExtension())
