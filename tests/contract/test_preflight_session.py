"""Which running sessions a sink can work in."""

from __future__ import annotations

import pyspark
import pytest
from pyspark.sql import SparkSession

from stream_merge.errors import ConfigError
from stream_merge.session import small_batches
from stream_merge.spark import preflight
from stream_merge.spark.versions import PARTS, SPARK


def test_a_session_with_delta_is_accepted(spark: SparkSession):
    preflight.check_session(spark)


def test_a_session_with_the_jar_of_another_spark_is_refused(spark: SparkSession, monkeypatch: pytest.MonkeyPatch):
    """Needs Spark: its JVM says which jar Delta's classes come from."""
    monkeypatch.setattr(pyspark, "__version__", "4.0.9")
    monkeypatch.setattr(preflight, "mixture_problem", lambda *found: " ".join(found))

    with pytest.raises(ConfigError, match=rf"4\.0\.9 {spark.version} file:.*{PARTS[SPARK].delta_jar}"):
        preflight.check_session(spark)


def test_what_a_running_session_says_is_left_to_it(spark: SparkSession):
    """Needs Spark: `getOrCreate` writes a builder's confs into the session that runs."""
    told, untold = "spark.sql.session.timeZone", "spark.sql.adaptive.enabled"
    before = {conf: spark.conf.get(conf) for conf in (told, untold)}
    spark.conf.set(told, "Europe/Vienna")
    spark.conf.unset(untold)
    try:
        changed = small_batches(SparkSession.builder)._options
    finally:
        for conf, value in before.items():
            spark.conf.set(conf, value)

    assert (told in changed, changed[untold]) == (False, "true")


def test_a_session_without_the_extension_is_refused(spark: SparkSession):
    other = spark.newSession()

    class WithoutExtension:
        sparkContext = other.sparkContext  # noqa: N815  # PySpark's name

        class conf:  # noqa: N801  # PySpark's name
            get = staticmethod(lambda _key, default: default)

    with pytest.raises(ConfigError, match="has Delta's jar but not its extension"):
        preflight.check_session(WithoutExtension())
