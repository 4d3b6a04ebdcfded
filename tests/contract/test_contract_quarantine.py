"""Events that break the contract: why, where they go, and that nobody else has to wait for them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from deliveries import ChangeStream, delete, ledger, upsert
from disk import on_disk
from grouped import sink_with
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from stream_merge import ConfigError, ContractError, MergeFailedError
from stream_merge.model.names import QUARANTINE_TABLE_PREFIX
from stream_merge.model.table_ref import TableRef
from stream_merge.spark.versions import SPARK
from stream_merge.tables.side import quarantine
from stream_merge.tables.side.side_table import SideCommit
from stream_merge.testing import batch, run, target_rows

NESTED_JSON = "parse_json('{\"v\": [1]}')" if SPARK >= (4, 0) else "struct(array(1) AS v)"  # VARIANT came with 4.0

pytestmark = pytest.mark.engines("auto", "spark", "rewrite")


def quarantined(stream: ChangeStream) -> list[tuple[list[str], Any]]:
    """Reasons and event of every quarantined event, sorted by its text."""
    rows = stream.side_table(QUARANTINE_TABLE_PREFIX).select("reasons", "event").collect()
    return sorted(((row["reasons"], json.loads(row["event"])) for row in rows), key=repr)


def test_what_a_repaired_batch_breaks_beyond_its_first_try_is_quarantined_too(spark: SparkSession, tmp_table: str):
    """The first try was committed to the quarantine and to nothing else; its id must not hide what comes now."""
    stream = ChangeStream(spark, tmp_table)
    stream.deliver(upsert(1, "row", lsn=1))
    stream.sql("ALTER TABLE {target} ADD CONSTRAINT short CHECK (length(name) < 6)")
    with pytest.raises((MergeFailedError, ConfigError), match="short"):
        stream.deliver((None, 2, "u", "no key"), upsert(2, "too long", lsn=2), upsert(3, "three", lsn=2))

    stream.batch_id = 0
    result = stream.deliver((None, 2, "u", "no key"), upsert(None, "too long", lsn=2), upsert(3, "three", lsn=2))

    assert ledger(result) == {"received": 3, "quarantined": 2, "inserted": 1}
    assert stream.rows() == [(1, 1, "row"), (3, 2, "three")]
    assert [event["name"] for _, event in quarantined(stream)] == ["no key", "too long"]


@pytest.mark.smoke
def test_broken_events_are_quarantined_and_the_rest_proceeds(spark: SparkSession, tmp_table: str):
    """NULL key, NULL sequence or both: every reason that holds is listed, the event is kept whole as JSON."""
    stream = ChangeStream(spark, tmp_table)

    result = stream.deliver(
        upsert(1, "row", lsn=1),
        (None, 2, "u", "no key"),
        upsert(3, "no sequence", lsn=None),
        (None, None, "d", None),
        delete(4, lsn=None),
    )

    assert stream.rows() == [(1, 1, "row")]
    assert ledger(result) == {"received": 5, "quarantined": 4, "inserted": 1}
    assert result.reasons == {"null_key": 2, "null_sequence": 3}
    assert quarantined(stream) == [
        (["null_key", "null_sequence"], {"id": None, "lsn": None, "op": "d", "name": None}),
        (["null_key"], {"id": None, "lsn": 2, "op": "u", "name": "no key"}),
        (["null_sequence"], {"id": 3, "lsn": None, "op": "u", "name": "no sequence"}),
        (["null_sequence"], {"id": 4, "lsn": None, "op": "d", "name": None}),
    ]


def test_a_delete_without_sequence_is_not_remembered(spark: SparkSession, tmp_table: str):
    stream = ChangeStream(spark, tmp_table)
    stream.deliver(delete(1, lsn=None))

    stream.deliver(upsert(1, "row", lsn=1))

    assert stream.rows() == [(1, 1, "row")]
    assert list(stream.data_changes()) == ["__stream_merge_quarantine_table", "table"]


def test_any_null_among_several_keys_or_sequence_columns_breaks_the_contract(spark: SparkSession, tmp_table: str):
    stream = ChangeStream(
        spark, tmp_table, "a int, b string, s1 int, s2 int", keys=["a", "b"], sequence_by=["s1", "s2"]
    )

    result = stream.deliver(
        (1, "x", 1, 1), (1, None, 1, 1), (None, "x", 1, 1), (1, "x", None, 1), (1, "x", 1, None), (1, "", 0, 0)
    )

    assert stream.rows() == [(1, "", 0, 0), (1, "x", 1, 1)]
    assert ledger(result) == {"received": 6, "quarantined": 4, "inserted": 2}
    assert result.reasons == {"null_key": 2, "null_sequence": 2}


@pytest.mark.parametrize("expression", ["pos", "struct(pos.file AS file, pos.inner AS inner)"])
def test_a_null_component_of_a_struct_sequence_breaks_the_contract(
    spark: SparkSession, tmp_table: str, expression: str
):
    """At any depth, and the struct itself."""
    stream = ChangeStream(
        spark,
        tmp_table,
        "id int, pos struct<file:int,inner:struct<offset:int>>",
        keys="id",
        sequence_by=F.expr(expression),
    )

    result = stream.deliver((1, (1, (1,))), (2, (None, (1,))), (3, (1, (None,))), (4, (1, None)), (5, None))

    assert stream.rows("id") == [(1,)]
    assert result.reasons == {"null_sequence": 4}


def test_a_batch_of_broken_events_only_is_quarantined_once(spark: SparkSession, tmp_table: str):
    """The target holds no id of such a batch, so the quarantine's own id keeps a replay from doubling it."""
    stream = ChangeStream(spark, tmp_table)

    result = stream.deliver((None, 1, "u", "no key"))
    again = stream.deliver((None, 1, "u", "no key"))

    assert (result.outcome, result.version, ledger(result)) == (
        "no_change",
        None,
        {"received": 1, "quarantined": 1},
    )
    assert ledger(again) == {"received": 1, "quarantined": 1}
    assert stream.rows() == []
    assert [row["batch_id"] for row in stream.side_table(QUARANTINE_TABLE_PREFIX).sort("batch_id").collect()] == [0, 1]


def test_on_invalid_fail_writes_nothing(spark: SparkSession, tmp_table: str):
    """No table is made, and an existing one stays as it is."""
    stream = ChangeStream(spark, tmp_table, on_invalid="fail")
    broken = [upsert(1, "row", lsn=1), (None, 1, "u", "no key"), (None, None, "u", ""), delete(2, lsn=3)]

    with pytest.raises(ContractError) as first:
        stream.deliver(*broken)
    made = stream.data_changes()
    stream.deliver(upsert(1, "row", lsn=1))
    before = stream.data_changes()
    with pytest.raises(ContractError) as second:
        stream.deliver(*broken)

    assert made == {}
    assert stream.data_changes() == before
    assert list(before) == ["table"]
    assert first.value.reasons == second.value.reasons == {"null_key": 2, "null_sequence": 1}
    assert str(second.value).startswith("[INVALID_EVENTS] 2 of 4 events of batch 2 for ")


def test_the_quarantine_has_the_same_columns_whatever_the_source_looks_like(spark: SparkSession, tmp_table: str):
    """Sources change; the table that keeps their broken events does not."""
    stream = ChangeStream(spark, tmp_table)
    stream.deliver((None, 1, "u", "no key"))

    stream.deliver_frame(
        spark.sql(
            "SELECT CAST(NULL AS bigint) id, 1L lsn, 'u' op, 'no key' name, X'CAFE' raw, map('k', 1.50) m,"
            f" {NESTED_JSON} v, timestamp'2026-01-02 03:04:05.678901' at, array(struct(1 AS `a b`)) l"
        ),
        except_column_list=["op", "raw", "m", "v", "at", "l"],
    )

    table = stream.side_table(QUARANTINE_TABLE_PREFIX)
    assert [f"{name} {dtype}" for name, dtype in table.dtypes] == [
        "reasons array<string>",
        "query string",
        "batch_id bigint",
        "recorded_at timestamp",
        "event string",
        "topic string",
        "partition int",
        "offset bigint",
        "timestamp timestamp",
        "raw_key binary",
        "raw_value binary",
        "error string",
        "replayed_at timestamp",
    ]
    row = table.where("batch_id = 1").collect()[0]
    assert row["query"] == "direct"
    assert row["recorded_at"] is not None
    assert {name for name in table.columns if row[name] is None} == {
        "topic",
        "partition",
        "offset",
        "timestamp",
        "raw_key",
        "raw_value",
        "error",
        "replayed_at",
    }
    assert json.loads(row["event"]) == {
        "id": None,
        "lsn": 1,
        "op": "u",
        "name": "no key",
        "raw": "yv4=",
        "m": {"k": 1.50},
        "v": {"v": [1]},
        "at": "2026-01-02T03:04:05.678901Z",
        "l": [{"a b": 1}],
    }


def test_the_quarantine_can_be_put_elsewhere(spark: SparkSession, tmp_table: str):
    """Two targets may share one; nothing is written beside the target then."""
    shared = f"{tmp_table} for all"
    one = ChangeStream(spark, tmp_table, quarantine_target=shared)
    other = ChangeStream(spark, f"{tmp_table}_2", quarantine_target=shared)

    one.deliver((None, 1, "u", "one"))
    other.deliver((None, 1, "u", "other"), upsert(1, "row", lsn=1))

    events = [json.loads(row["event"])["name"] for row in spark.read.format("delta").load(shared).collect()]
    assert sorted(events) == ["one", "other"]
    assert sorted(one.data_changes()) == ["table", "table for all", "table_2"]


def test_a_table_in_the_quarantines_place_is_refused_before_anything_is_written(spark: SparkSession, tmp_table: str):
    """Named with the columns that it lacks."""
    taken = f"{tmp_table}_taken"
    spark.sql("SELECT 1 AS id, 'u' AS event").write.format("delta").save(taken)
    stream = ChangeStream(spark, tmp_table, quarantine_target=taken)

    with pytest.raises(ConfigError, match=r"lacks column.*'reasons', 'query', 'batch_id'"):
        stream.deliver(upsert(1, "row", lsn=1))

    assert not on_disk(tmp_table).exists()


def test_a_key_that_no_partition_can_hold_is_quarantined(spark: SparkSession, tmp_table: str):
    """Delta 4.4 keeps NULL for an empty text: the row would never be found again, and each event would add one."""
    schema = "part string, id bigint, lsn bigint, name string, op string"
    sink = sink_with(
        target=tmp_table,
        keys=["part", "id"],
        sequence_by="lsn",
        apply_as_deletes="op = 'd'",
        except_column_list=["op"],
        partition_by="part",
        app_id="app",
    )
    for number in (0, 1):
        lsn = 10 * number
        rows = [(part, 1, lsn, f"name {number}", "u") for part in ("a", " ", "", "__HIVE_DEFAULT_PARTITION__")]
        frame = batch(spark, schema, *rows).unionByName(
            spark.sql(f"SELECT CAST(X'FF61' AS STRING) part, 1L id, {lsn}L lsn, 'name {number}' name, 'u' op")
        )
        run(sink, frame, number)
        assert sink.last_result is not None
        assert (sink.last_result.events.quarantined, sink.last_result.reasons) == (3, {"null_key": 3})
    run(sink, batch(spark, schema, ("", 1, 30, None, "d"), ("a", 1, 30, None, "d")), 2)

    assert target_rows(spark, tmp_table, "part", "id", "name") == [(" ", 1, "name 1")]


@pytest.mark.engines("auto")
def test_records_of_a_batch_that_comes_again_are_known_by_their_place(spark: SparkSession, tmp_table: str):
    """Whatever is said of them by then, and whatever the batch has beyond its first try; others by what they say."""

    def write(*records: tuple[int | None, str, str], query: str = "some") -> None:
        commit = SideCommit(app_id=query, batch_id=5, run=lambda attempt: attempt(1))
        told = [
            {"reasons": ["undecodable"], "batch_id": 5, "topic": "t", "partition": 0, "offset": at, "event": event}
            | {"error": error, "query": query}
            for at, event, error in records
        ]
        quarantine.write_undecodable(spark.createDataFrame(told, quarantine.SCHEMA), TableRef(tmp_table), commit=commit)

    write((1, "a", "first words"), (None, "b", "first words"))
    repaired = (1, "A", "other words"), (2, "c", "other words"), (None, "b", "other words"), (None, "d", "other words")
    write(*repaired)
    write(*repaired)
    write((7, "x", "of another query"), query="other")
    write((1, "a", "of another query"), (7, "x", "again"), query="other")

    assert target_rows(spark, tmp_table, "event", "error") == [
        ("a", "first words"),
        ("a", "of another query"),
        ("b", "first words"),
        ("c", "other words"),
        ("d", "other words"),
        ("x", "of another query"),
    ]
