"""Tables on Google's Cloud Storage: what a sink does there, against an emulator. Needs a JVM and that emulator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from deliveries import ChangeStream, upsert
from pyspark.sql import SparkSession
from services import gcs, running
from story import commit_at_once, tell

from stream_merge import ConfigError
from stream_merge.testing import batch, run


@pytest.fixture(scope="module")
def store(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[gcs.GcsBucket]:
    """A bucket, which Spark knows of."""
    gcs.need()
    server = gcs.GcsServer(tmp_path_factory.mktemp("gcs"))
    with running(server):
        found = server.bucket("lake")
        found.tell(spark)
        yield found


class OnGcs(ChangeStream):
    """A change stream into a table in a folder of a bucket."""

    def __init__(self, spark: SparkSession, store: gcs.GcsBucket, folder: Path, **settings: Any) -> None:
        # A replay is compared by rows and change feed: the emulator keeps no files on a disk.
        super().__init__(spark, store.uri(f"{uuid4().hex[:8]}/orders"), folder=folder, **{"app_id": None, **settings})


def test_a_stream_is_merged_as_on_a_disk(spark: SparkSession, store: gcs.GcsBucket, tmp_path: Path) -> None:
    """Create, update, delete, late events, broken ones, and each batch again; by Spark, whoever may choose."""
    stream = OnGcs(spark, store, tmp_path)
    assert [one.engine for one in tell(stream)] == ["spark"] * 2


def test_of_commits_at_the_same_time_one_is_made(spark: SparkSession, store: gcs.GcsBucket) -> None:
    """Delta's log store for it makes an object where there is none, by the store itself."""
    commit_at_once(spark, store.uri(f"{uuid4().hex[:8]}/t"), writers=4, versions=4, lines=100)


def test_engines_in_the_driver_are_refused_without_a_promise(
    spark: SparkSession, store: gcs.GcsBucket, tmp_path: Path
) -> None:
    stream = OnGcs(spark, store, tmp_path, engine="driver")

    with pytest.raises(ConfigError, match=r"single_writer=True if nobody else writes"):
        run(stream.sink(), batch(spark, stream.schema, upsert(1, "one", lsn=1)), 0)
