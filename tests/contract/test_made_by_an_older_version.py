"""What an older version has written goes on being used: table, feed, remembered deletes, quarantine and checkpoint.

On real Spark, because Spark goes on by the checkpoint, and Delta's transaction ids decide what is merged already.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from rich.console import Console
from traces import commits, transactions, user_metadata

from stream_merge import MergeResult, MergeSink
from stream_merge.jobs.files.run import FilesSettings, run
from stream_merge.metrics.instruments import MergeMetrics
from stream_merge.model.names import QUARANTINE_TABLE_PREFIX, TOMBSTONE_TABLE_PREFIX
from stream_merge.model.table_ref import TableRef
from stream_merge.sources.files.reader import Folder
from stream_merge.spark.checkpoint import Checkpoint
from stream_merge.tables.explain import explain
from stream_merge.testing import target_rows

OLD = Path(__file__).parents[1] / "data" / "made_by_0_1"
MADE_IN = "file:///tmp/made_by_0_1"
SCHEMA = "id int, lsn int, op string, name string, city string"
ROWS = [
    (1, 20, "uno", "Rome"),
    (4, 30, "quattro", "Oslo"),
    (5, 30, "five", "Bern"),
    (9, 30, "nine revived", None),
]
FOURTH = """\
{"id": 2, "lsn": 15, "op": "u", "name": "older than a delete that Spark remembered"}
{"id": 3, "lsn": 25, "op": "u", "name": "older than a delete that delta-rs remembered"}
{"id": 1, "lsn": 15, "op": "u", "name": "older than the row"}
{"id": 9, "lsn": 40, "op": "u", "name": "nine at last"}
{"id": 4, "lsn": 40, "op": "d"}
{"id": 6, "lsn": 40, "op": "c", "name": "six", "city": "Bonn"}
{"id": null, "lsn": 40, "op": "c", "name": "no key"}
"""
ROWS_THEN = [(1, 20, "uno", "Rome"), (5, 30, "five", "Bern"), (6, 40, "six", "Bonn"), (9, 40, "nine at last", None)]


def _expressed() -> dict[str, Any]:
    return {"sequence_by": F.expr("abs(lsn)"), "except_column_list": ["op", "lsn"], "name": "shop"}


class State:
    """A copy of one of the folders, as if it had always been here."""

    def __init__(self, spark: SparkSession, name: str, root: Path, engine: str) -> None:
        self.spark, self.name, self.engine = spark, name, engine
        self.folder = root / name
        shutil.copytree(OLD / name, self.folder)
        self.table, self.checkpoint = self.folder / "orders", self.folder / "checkpoint"
        self.tombstones = self.folder / f"{TOMBSTONE_TABLE_PREFIX}orders"
        self.quarantine = self.folder / f"{QUARANTINE_TABLE_PREFIX}orders"
        for entry in (self.checkpoint / "sources" / "0").iterdir():
            entry.write_text(entry.read_text().replace(MADE_IN, root.as_uri()))
        for number, file in enumerate(sorted((self.folder / "source").iterdir())):
            _set_time(file, number)
        self.query_id = Checkpoint.on_disk(str(self.checkpoint)).query_id()

    def put(self, text: str) -> None:
        number = len(list((self.folder / "source").iterdir()))
        file = self.folder / "source" / f"{number:04}.json"
        file.write_text(text)
        _set_time(file, number)

    def go_on(self) -> list[MergeResult]:
        """Merge the one batch that is to be done, in the way in which the state was made."""
        return self._files() if self.name == "files" else self._stream()

    def _stream(self) -> list[MergeResult]:
        by_lsn = {"sequence_by": "lsn", "except_column_list": ["op"]}
        sink = MergeSink(
            target=str(self.table),
            keys=["id"],
            apply_as_deletes="op = 'd'",
            engine=self.engine,
            metrics=MergeMetrics(registry=CollectorRegistry()),
            schema_evolution=True,
            **(_expressed() if self.name == "expressed" else by_lsn),
        )
        files = self.spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1)
        writer = files.json(str(self.folder / "source")).writeStream.foreachBatch(sink)
        query = writer.option("checkpointLocation", str(self.checkpoint)).trigger(availableNow=True).start()
        query.awaitTermination()
        return [sink.last_result]

    def _files(self) -> list[MergeResult]:
        settings = FilesSettings(
            folder=Folder(path=str(self.folder / "source"), format="json"),
            target=TableRef(str(self.table)),
            checkpoint=str(self.checkpoint),
            keys=("id",),
            sequence_by=("lsn",),
            apply_as_deletes="op = 'd'",
            except_columns=("op",),
            max_files_per_trigger=1,
            once=True,
        )
        said = StringIO()
        results = run(
            settings, console=Console(file=said, width=200), start_session=lambda: self.spark, metrics_url="nowhere"
        )
        assert "as in the runs before" in said.getvalue()  # the schema that the older version has kept
        return results

    def rows(self) -> list[tuple[object, ...]]:
        return target_rows(self.spark, str(self.table), "id", "lsn", "name", "city")

    def quarantined(self) -> list[tuple[int, str]]:
        found = self.spark.read.format("delta").load(str(self.quarantine)).select("batch_id", "reasons").collect()
        return sorted((row["batch_id"], *row["reasons"]) for row in found)

    def feed(self) -> list[tuple[int, int, str]]:
        reader = self.spark.read.format("delta").option("readChangeFeed", "true").option("startingVersion", 0)
        rows = reader.load(str(self.table)).select("_commit_version", "id", "_change_type").collect()
        return sorted(tuple(row) for row in rows)

    def ids(self, table: Path) -> list[tuple[str, int]]:
        """Role and batch id of the commits of this query, in their order."""
        found = [entry for version in transactions(table) for entry in version]
        assert {app_id.split("/")[0] for app_id, _ in found} == {self.query_id}
        about = [app_id.split("/")[2:] for app_id, _ in found]
        assert about == [[] if table == self.table else [self.table_id]] * len(found)
        return [(app_id.split("/")[1], batch_id) for app_id, batch_id in found]

    @property
    def table_id(self) -> str:
        (first, *_) = [action["metaData"]["id"] for action in commits(self.table)[0] if "metaData" in action]
        return str(first)

    def forget_last(self) -> None:
        """Take the last batch for one that Spark does not know to be done, as after a crash behind its commits."""
        (self.checkpoint / "commits" / "2").unlink()

    def content(self) -> dict[Path, bytes]:
        """Everything that the tables have on the disk."""
        files = [file for table in (self.table, self.tombstones, self.quarantine) for file in table.rglob("*")]
        return {file: file.read_bytes() for file in files if file.is_file()}


def _set_time(file: Path, number: int) -> None:
    """As the checkpoint has it: by a file's time Spark forgets those that it has read, after a week (`maxFileAge`)."""
    os.utime(file, (1_000_000 + number, 1_000_000 + number))


Opened = Callable[..., State]


@pytest.fixture
def opened(spark: SparkSession, tmp_path: Path) -> Opened:
    return lambda name, engine="auto": State(spark, name, tmp_path, engine)


@pytest.mark.parametrize(("name", "engine"), [("stream", "auto"), ("stream", "spark"), ("files", "auto")])
def test_a_query_goes_on(opened: Opened, name: str, engine: str):
    """Old rows and old tombstones refuse what is older, ids and quarantine are continued, and new rows are merged.

    Before the first batch the table is told, in a commit of its own, where its deletes are remembered.
    """
    state = opened(name, engine)
    assert state.rows() == ROWS
    state.put(FOURTH)

    (result,) = state.go_on()

    counts = result.events
    assert (result.outcome, result.batch_id, result.version) == ("committed", 3, 5)
    assert (counts.received, counts.quarantined, counts.stale, counts.unaffected) == (7, 1, 2, 1)
    assert (counts.inserted, counts.updated, counts.deleted) == (1, 1, 1)
    assert state.rows() == ROWS_THEN
    unreadable = [(2, "undecodable")] if name == "files" else []
    assert state.quarantined() == [(1, "null_key"), (2, "null_sequence"), *unreadable, (3, "null_key")]
    assert state.feed() == [
        *((1, key, "insert") for key in (1, 2, 3, 4)),
        *((2, 1, kind) for kind in ("update_postimage", "update_preimage")),
        (2, 2, "delete"),
        (3, 3, "delete"),
        *((3, 4, kind) for kind in ("update_postimage", "update_preimage")),
        *((3, key, "insert") for key in (5, 9)),
        (5, 4, "delete"),
        (5, 6, "insert"),
        *((5, 9, kind) for kind in ("update_postimage", "update_preimage")),
    ]
    assert state.ids(state.table) == [("target", batch_id) for batch_id in range(4)]
    assert state.ids(state.tombstones) == [
        ("tombstones-add", 1),
        ("tombstones-add", 2),
        ("tombstones-forget", 2),
        ("tombstones-add", 3),
    ]
    assert state.ids(state.quarantine) == [("quarantine", batch_id) for batch_id in (1, 2, 3)]


@pytest.mark.parametrize("name", ["stream", "files"])
def test_an_old_batch_that_comes_again_is_skipped(opened: Opened, name: str):
    """Its commit says nothing of what the batch read, so that its id alone has to do."""
    state = opened(name)
    before = state.content()
    state.forget_last()

    (result,) = state.go_on()

    assert (result.outcome, result.batch_id) == ("skipped_duplicate", 2)
    assert state.content() == before

    state.put(FOURTH)
    state.go_on()
    assert state.rows() == ROWS_THEN


@pytest.mark.parametrize(("name", "engine"), [("stream", "auto"), ("stream", "spark"), ("files", "auto")])
def test_an_old_batch_that_was_cut_off_is_merged_with_what_it_has_left_beside_the_table(
    opened: Opened, name: str, engine: str
):
    """Tombstones and quarantine hold the batch already, without a word of what it read; they do not get it twice."""
    state = opened(name, engine)
    quarantined = state.quarantined()
    for last in (state.table, state.tombstones):  # the merge, and the tombstone that it has overtaken
        (last / "_delta_log" / f"{3:020}.json").unlink()
    state.forget_last()

    (result,) = state.go_on()

    assert (result.outcome, result.batch_id, result.version) == ("committed", 2, 4)
    assert state.rows() == ROWS
    assert state.quarantined() == quarantined
    assert state.ids(state.tombstones) == [("tombstones-add", 1), ("tombstones-add", 2), ("tombstones-forget", 2)]


@pytest.mark.parametrize("engine", ["auto", "spark"])
def test_a_sequence_that_is_no_column_is_compared_with_the_kept_one(opened: Opened, engine: str):
    """The table says by which expression it is sequenced, in a property and in a column of the sink's."""
    state = opened("expressed", engine)
    state.put("""\
{"id": 2, "lsn": -15, "op": "u", "name": "older than the delete"}
{"id": 1, "lsn": -15, "op": "u", "name": "older than the row"}
{"id": 3, "lsn": -15, "op": "u", "name": "tre"}
{"id": 9, "lsn": 30, "op": "c", "name": "nine revived"}
""")

    (result,) = state.go_on()

    counts = result.events
    assert (result.outcome, result.batch_id, result.version) == ("committed", 2, 3)
    assert (counts.stale, counts.unaffected, counts.updated, counts.inserted) == (1, 1, 1, 1)
    assert target_rows(state.spark, str(state.table), "id", "name", "city") == [
        (1, "uno", "Rome"),
        (3, "tre", None),
        (4, "four", None),
        (9, "nine revived", None),
    ]
    ids = [entry for version in transactions(state.table) for entry in version]
    assert ids == [(f"{state.query_id}/shop/target", batch_id) for batch_id in range(3)]


def test_from_the_first_new_batch_on_table_and_checkpoint_know_each_other(opened: Opened):
    """As those of queries that have begun with this version."""
    state = opened("stream")
    state.put(FOURTH)
    assert Checkpoint.on_disk(str(state.checkpoint)).destinations() is None

    state.go_on()

    (noted,) = Checkpoint.on_disk(str(state.checkpoint)).destinations()
    assert (noted.identity, noted.table_id) == (state.query_id, state.table_id)
    *_, newest = user_metadata(state.table)
    assert json.loads(newest)["stream_merge"]["source"] == Checkpoint.on_disk(str(state.checkpoint)).fingerprint(3)
    assert [(merge.batch_id, merge.engine) for merge in explain(str(state.table)).merges] == [
        (3, "driver"),
        (2, "native"),
        (1, "spark"),
        (0, "native"),
    ]


def test_a_table_without_an_id_of_its_query_is_used_with_a_warning(opened: Opened, caplog: pytest.LogCaptureFixture):
    """The older version recorded nothing of batches that changed no row, and no checkpoint says which table it was."""
    state = opened("unmerged")
    state.put('{"id": 1, "lsn": 10, "op": "c", "name": "one"}\n')

    with caplog.at_level(logging.WARNING):
        (result,) = state.go_on()

    assert (result.outcome, result.batch_id) == ("committed", 1)
    assert state.rows() == [(1, 10, "one", None)]
    assert state.quarantined() == [(0, "null_key")]
    assert [record.message.split(" ")[0] for record in caplog.records].count("merged_before_unknown") == 1


def test_an_old_checkpoint_without_its_table_is_refused(opened: Opened):
    """Built from the middle of the stream, the table would lack what was merged before."""
    state = opened("stream")
    shutil.rmtree(state.table)
    state.put(FOURTH)

    with pytest.raises(StreamingQueryException, match=r"has run batches before by its checkpoint.*there is no table"):
        state.go_on()

    assert not state.table.exists()
