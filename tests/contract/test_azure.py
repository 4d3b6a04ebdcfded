"""Tables on Azure: what a sink does there, against an emulator of its Blob endpoint. Needs a JVM and that emulator.

What Hadoop's settings are to delta-rs is text: `tests/unit/test_azure_settings.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import engines
import pytest
from deliveries import ChangeStream, delete, upsert
from delta_log import check_table
from grouped import sink_with
from pyspark.sql import SparkSession
from services import azure
from story import tell

from stream_merge import ConfigError, RetryPolicy
from stream_merge.spark import object_stores
from stream_merge.spark.hadoop_files import write_text
from stream_merge.testing import batch, run


@pytest.fixture(scope="module")
def container(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[azure.Container]:
    """A container, which Spark knows of."""
    azure.need()
    with azure.container(tmp_path_factory.mktemp("azure"), "lake") as found:
        found.tell(spark)
        yield found


class OnAzure(ChangeStream):
    """A change stream into a table in a folder of a container."""

    def __init__(self, spark: SparkSession, container: azure.Container, folder: Path, **settings: Any) -> None:
        self.place = f"{uuid4().hex[:8]}/orders"
        self._container, self._copies = container, folder
        super().__init__(spark, container.uri(self.place), folder=folder, **settings)

    def data_changes(self) -> dict[str, int]:
        """By a copy of the logs."""
        above = self.place.partition("/")[0]
        self.folder = self._container.copy(above, self._copies / uuid4().hex, only="_delta_log/")
        found = super().data_changes()
        assert "orders" in found
        return found


@pytest.mark.parametrize("way", engines.WAYS)
def test_a_stream_is_merged_as_on_a_disk(
    spark: SparkSession, container: azure.Container, tmp_path: Path, way: str
) -> None:
    """Create, update, delete, late events, broken ones, and each batch again; nobody has to promise anything."""
    settings = {} if way == "spark" else {"table_properties": {"delta.checkpointInterval": "2"}}
    with engines.judged(way, "Azure"):
        stream = OnAzure(spark, container, tmp_path, engine=engines.asked(way), **settings)
        told = tell(stream)

    assert [engines.way(one) for one in told] == [way] * 2
    if way != "spark":
        check_table(container.copy(stream.place, tmp_path / "copy"))


def test_engines_of_all_kinds_lose_no_merge_of_each_other(
    spark: SparkSession, container: azure.Container, tmp_path: Path
) -> None:
    """Spark renames its commit to a name that must be free, the driver puts it there: the store lets one have it."""
    retry = RetryPolicy(attempts=40, backoff_max_seconds=0.3, backoff_jitter_seconds=0.2)
    kinds = ("spark", "driver")
    stream = OnAzure(spark, container, tmp_path, tombstones=False, retry=retry)
    run(stream.sink(), batch(spark, stream.schema, upsert(0, "before", lsn=1)), 0)
    merges = 6

    def merged(writer: int) -> None:
        kind = kinds[writer - 1]
        own = OnAzure(spark, container, tmp_path, tombstones=False, retry=retry, app_id=f"writer {writer}")
        own.settings |= {"target": stream.target, "engine": kind}
        sink = engines.with_costs(sink_with(**own.settings), engines.Only(kind))
        for number in range(merges):
            done = run(sink, batch(spark, stream.schema, upsert(writer, f"{writer}", lsn=number)), number)
            assert done.engine == kind

    with ThreadPoolExecutor() as threads:
        list(threads.map(merged, range(1, 1 + len(kinds))))

    assert stream.rows("id", "lsn") == [(0, 1), *((writer, merges - 1) for writer in range(1, 1 + len(kinds)))]
    assert len(stream.changes()) == 1 + len(kinds) * (1 + 2 * (merges - 1))


def test_a_query_reads_and_keeps_its_place_there(
    spark: SparkSession, container: azure.Container, tmp_path: Path
) -> None:
    """Source, checkpoint and target; after a restart it goes on."""
    stream = OnAzure(spark, container, tmp_path, engine="driver", app_id=None)
    folder = stream.place.partition("/")[0]

    def put_and_read(name: str, *events: tuple[Any, ...]) -> None:
        """To the end of the files that are there; Spark itself would write JSON there by another committer only."""
        names = stream.schema.replace(",", "").split()[::2]
        lines = (json.dumps(dict(zip(names, event, strict=True))) for event in events)
        write_text(spark, container.uri(f"{folder}/in/{name}.json"), "\n".join(lines))
        changes = spark.readStream.schema(stream.schema).json(container.uri(f"{folder}/in"))
        changes.writeStream.foreachBatch(stream.sink()).option(
            "checkpointLocation", container.uri(f"{folder}/checkpoint")
        ).trigger(availableNow=True).start().awaitTermination()

    put_and_read("1", upsert(1, "one", lsn=1), upsert(2, "two", lsn=1))
    put_and_read("2", upsert(1, "new", lsn=2), delete(2, lsn=2))

    assert stream.rows("id", "lsn", "name") == [(1, 2, "new")]


def test_engines_in_the_driver_are_refused_where_it_was_not_seen_that_commits_exclude_each_other(
    spark: SparkSession, container: azure.Container, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the endpoint of Data Lake Storage, which the emulator has not, somebody has to promise to be alone."""
    assert object_stores._azure_client(spark, container.uri("t")) == "AbfsBlobClient"
    monkeypatch.setattr(object_stores, "_azure_client", lambda *_: "AbfsDfsClient")
    stream = OnAzure(spark, container, tmp_path, engine="driver")

    with pytest.raises(ConfigError, match=r"single_writer=True if nobody else writes"):
        run(stream.sink(), batch(spark, stream.schema, upsert(1, "one", lsn=1)), 0)
