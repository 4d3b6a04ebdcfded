"""Insert-only: the first event of a key stays; nothing is updated, deleted or remembered. On every engine.

Needs a JVM: Delta's insert-only path, its metrics and its change feed are what is tested.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from deliveries import ChangeStream, delete, expect_metrics, ledger, upsert
from disk import beside
from grouped import sink_with
from pyspark.sql import SparkSession
from traces import commits

from stream_merge import ConfigError, ContractError
from stream_merge.shapes import InsertOnly
from stream_merge.testing import batch, run

SCHEMA = "id bigint, lsn bigint, name string"
ENGINES = pytest.mark.parametrize("engine", ["auto", "spark", "driver"])


def stream_of(spark: SparkSession, target: str, engine: str, **settings: Any) -> ChangeStream:
    own = {"keys": ["id"], "shape": InsertOnly(), "engine": engine, **settings}
    return ChangeStream(spark, target, SCHEMA, **own)


@pytest.fixture(params=["auto", "spark", "driver"])
def stream(request: pytest.FixtureRequest, spark: SparkSession, tmp_table: str) -> ChangeStream:
    """A table with the keys 1 and 2."""
    stream = stream_of(spark, tmp_table, request.param)
    first = stream.deliver((1, 5, "one"), (2, 5, "two"))
    assert ledger(first) == {"received": 2, "inserted": 2}
    return stream


@pytest.mark.smoke
def test_keys_that_are_there_are_left_as_they_are(stream: ChangeStream):
    result = stream.deliver((1, 9, "newer"), (3, 1, "three"), (2, 5, "two"))

    assert stream.rows() == [(1, 5, "one"), (2, 5, "two"), (3, 1, "three")]
    assert ledger(result) == {"received": 3, "unaffected": 2, "inserted": 1}
    assert {change[0] for change in stream.changes()} == {"insert"}
    assert len(stream.changes()) == 3


def test_without_a_sequence_the_greatest_row_of_a_key_is_inserted_in_whatever_order(stream: ChangeStream):
    """NULL is the least, and columns are compared in the source's order: the same pick at every replay."""
    events = [(3, None, "z"), (3, 7, None), (3, 7, "a"), (3, 6, "z")]
    result = stream.deliver(*events)
    again = stream.deliver(*((4, *rest) for _, *rest in reversed(events)))

    assert stream.rows()[2:] == [(3, 7, "a"), (4, 7, "a")]
    assert ledger(result) == ledger(again) == {"received": 4, "collapsed": 3, "inserted": 1, "ties": 3}


@ENGINES
def test_with_a_sequence_the_latest_of_a_batch_is_inserted(spark: SparkSession, tmp_table: str, engine: str):
    """It need not be stored, and is kept nowhere: a later batch with an earlier event changes nothing."""
    stream = stream_of(spark, tmp_table, engine, sequence_by="lsn", except_column_list=["lsn"])

    first = stream.deliver((1, 1, "old"), (1, 2, "new"), (2, None, "no sequence"))
    second = stream.deliver((1, 0, "older"), (3, 1, "three"))

    assert stream.rows() == [(1, "new"), (3, "three")]
    assert ledger(first) == {"received": 3, "quarantined": 1, "collapsed": 1, "inserted": 1}
    assert ledger(second) == {"received": 2, "unaffected": 1, "inserted": 1}


def test_a_batch_without_a_new_key_commits_nothing(stream: ChangeStream):
    before = stream.versions()

    result = stream.deliver((1, 9, "newer"), (2, 9, "newer"))

    assert (result.outcome, result.version, ledger(result)) == ("no_change", None, {"received": 2, "unaffected": 2})
    assert stream.versions() == before


def test_no_file_is_touched_and_nothing_is_remembered(stream: ChangeStream):
    """Delta's insert-only path: one scan of the target, no row copied, no file removed."""
    result = stream.deliver((1, 9, "newer"), (3, 1, "three"))

    (version,) = commits(stream.target)[result.version :]
    assert [action for action in version if "remove" in action] == []
    assert sum(json.loads(action["add"]["stats"])["numRecords"] for action in version if "add" in action) == 1
    assert (result.metrics["numTargetRowsCopied"], result.metrics["numTargetFilesRemoved"]) == (0, 0)
    if result.engine == "spark":
        # No row in the second scan is Delta's word for: there was none.
        expect_metrics(result, numTargetRowsInserted=1, numSourceRowsInSecondScan=0)
    assert [name for name in beside(stream.target) if "tombstones" in name] == []


def test_the_key_of_another_writer_is_seen(stream: ChangeStream):
    """A commit since the table was read makes the merge lose: it reads again, and the key is there."""
    other = stream_of(stream.spark, stream.target, "spark", app_id="other")
    run(other.sink(), batch(stream.spark, SCHEMA, (3, 1, "theirs")), 0)

    result = stream.deliver((3, 2, "ours"), (4, 2, "ours"))

    assert stream.rows()[2:] == [(3, 1, "theirs"), (4, 2, "ours")]
    assert ledger(result) == {"received": 2, "unaffected": 1, "inserted": 1}


def test_null_keys_go_to_the_quarantine_and_a_new_column_is_added(stream: ChangeStream):
    wider = f"{SCHEMA}, note string"
    if stream.settings["engine"] == "driver":  # it adds no columns
        stream.settings["engine"] = "auto"
    result = stream.deliver((None, 1, "x", "n"), (3, 1, "three", "new"), schema=wider, schema_evolution=True)

    assert ledger(result) == {"received": 2, "quarantined": 1, "inserted": 1}
    assert stream.rows() == [(1, 5, "one", None), (2, 5, "two", None), (3, 1, "three", "new")]


def test_a_table_that_allows_only_appends_may_be_the_target(spark: SparkSession, tmp_table: str):
    """Spark merges: the driver leaves such tables alone."""
    stream = stream_of(spark, tmp_table, "auto", table_properties={"delta.appendOnly": "true"})
    stream.deliver((1, 1, "one"))

    result = stream.deliver((1, 2, "again"), (2, 1, "two"))

    assert stream.rows() == [(1, 1, "one"), (2, 1, "two")]
    assert ledger(result) == {"received": 2, "unaffected": 1, "inserted": 1}


def test_what_has_no_meaning_for_the_shape_is_refused(tmp_table: str):
    with pytest.raises(ConfigError) as caught:
        sink_with(
            target=tmp_table,
            keys="id",
            shape=InsertOnly(),
            apply_as_deletes="op = 'd'",
            tombstone_retention_seconds=60,
        )

    assert caught.value.problems == (
        "[CONFLICTING_SETTINGS] apply_as_deletes has no effect with shape=InsertOnly(); remove one of them",
        "[CONFLICTING_SETTINGS] retention_seconds has no effect with shape=InsertOnly(); remove it",
    )


def test_deletes_of_a_source_that_marks_them_stop_the_batch_before_anything_is_written(
    spark: SparkSession, tmp_table: str
):
    """A job's source tells deletes whatever the shape."""
    sink = sink_with(target=tmp_table, keys="id", shape=InsertOnly(), app_id="test")
    sink._calls.for_source("__stream_merge_origin", deletes="op = 'd'")
    overtaken = [delete(2, lsn=1), upsert(2, "back", lsn=2)]
    events = batch(spark, "id bigint, lsn bigint, op string, name string", upsert(1, "one", lsn=1), *overtaken)

    with pytest.raises(ContractError, match=r"1 of 3 events of batch 0 .* are deletes, and its shape deletes nothing"):
        run(sink, events, 0)

    assert beside(tmp_table) == []


@ENGINES
def test_a_stored_struct_that_orders_events_may_lack_fields(spark: SparkSession, tmp_table: str, engine: str):
    """It orders the events of a batch by what they have; nothing of it is compared with rows."""
    stream = stream_of(spark, tmp_table, "spark", sequence_by="at")
    stream.deliver((1, (1, 1), "one"), schema="id bigint, at struct<a: int, b: int>, name string")

    narrower = "id bigint, at struct<a: int>, name string"
    stream.settings["engine"] = "auto" if engine == "driver" else engine  # delta-rs keeps no fields
    result = stream.deliver((2, (1,), "old"), (2, (2,), "new"), schema=narrower)

    assert ledger(result) == {"received": 2, "collapsed": 1, "inserted": 1}
    assert stream.rows("id", "at", "name") == [(1, (1, 1), "one"), (2, (2, None), "new")]


def test_a_table_of_changes_is_not_filled_by_it(spark: SparkSession, tmp_table: str):
    """Its rows have sequences that later changes are compared with."""
    ChangeStream(spark, tmp_table).deliver(upsert(1, "one", lsn=1))

    with pytest.raises(ConfigError, match=r"was filled as changes and would now be as insert-only"):
        stream_of(spark, tmp_table, "auto").deliver((2, 1, "two"))
