"""Every table feature of the Delta release in use has been thought about; only a JVM can tell which there are."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from pyspark.sql import SparkSession

from stream_merge.model.snapshot import VECTORS_PROPERTY
from stream_merge.spark.versions import SPARK
from stream_merge.tables.files.features import SUPPORTED, UNPROVEN, refusal

PACKAGE = "org.apache.spark.sql.delta"
SCALA_OBJECT = re.compile(rf"({PACKAGE.replace('.', '/')}/\w*Feature\$)\.class")
FOR_TESTS_OF_DELTA = "test"


def test_the_list_is_deltas_own(spark: SparkSession):
    """A Delta release that brings a feature must fail here: somebody has to decide whether it may be written."""
    delta = set(features_in_the_jar(spark)) | set(features_that_are_on(spark))

    listed = {*SUPPORTED, *UNPROVEN}
    assert delta - listed == set()
    assert listed - delta == set() or SPARK < (4, 0), "Delta 3.3 has fewer"


def test_a_table_of_this_delta_release_may_be_written(spark: SparkSession, tmp_table: str):
    """Protocol and properties as Spark writes them, with all that is common."""
    spark.sql(
        f"CREATE TABLE delta.`{tmp_table}` (id BIGINT, at TIMESTAMP_NTZ, note STRING) USING delta CLUSTER BY (id)"
        f" TBLPROPERTIES ('{VECTORS_PROPERTY}' = 'true', 'delta.enableChangeDataFeed' = 'true',"
        "  'delta.enableInCommitTimestamps' = 'true', 'delta.columnMapping.mode' = 'name',"
        "  'delta.enableTypeWidening' = 'true', 'delta.checkpointPolicy' = 'v2')"
    )
    detail = spark.sql(f"DESCRIBE DETAIL delta.`{tmp_table}`").first()
    assert detail is not None
    features = detail["tableFeatures"]

    def told(*further: str) -> str | None:
        versions = detail["minReaderVersion"], detail["minWriterVersion"]
        return refusal(*versions, [*features, *further], detail["properties"])

    assert {"clustering", "columnMapping", "inCommitTimestamp", "v2Checkpoint"} <= set(features)
    assert {"typeWidening", "typeWidening-preview"} & {*features}  # of Delta 3.3 the second one
    assert told() is None
    assert told("rowTracking") is not None


def features_in_the_jar(spark: SparkSession) -> Iterator[str]:
    """All features in the code, also those that a setting hides; those for Delta's own tests aside."""
    jvm: Any = spark.sparkContext._jvm
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    base = loader.loadClass(f"{PACKAGE}.TableFeature")
    jar = urlsplit(str(base.getProtectionDomain().getCodeSource().getLocation())).path
    with zipfile.ZipFile(Path(unquote(jar))) as archive:
        objects = [match[1].replace("/", ".") for match in map(SCALA_OBJECT.fullmatch, archive.namelist()) if match]
    for name in objects:
        found = loader.loadClass(name)
        if base.isAssignableFrom(found):
            feature = str(found.getField("MODULE$").get(None).name())
            if not feature.lower().startswith(FOR_TESTS_OF_DELTA):
                yield feature


def features_that_are_on(spark: SparkSession) -> Iterator[str]:
    """What a session of Delta accepts, whatever its code calls them."""
    jvm: Any = spark.sparkContext._jvm
    features = jvm.org.apache.spark.sql.delta.TableFeature.allSupportedFeaturesMap().values().iterator()
    while features.hasNext():
        yield str(features.next().name())
