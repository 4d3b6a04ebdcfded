"""Remembered deletes: what they refuse, what revives a key, and when they are forgotten."""

from __future__ import annotations

from decimal import Decimal
from typing import Any
from uuid import uuid4

import pytest
from deliveries import ChangeStream, delete, ledger, upsert
from disk import removed
from pyspark.sql import SparkSession

from stream_merge.errors import ConfigError
from stream_merge.model.names import FORMAT_PROPERTY, TOMBSTONE_TABLE_PREFIX
from stream_merge.model.table_ref import TableRef
from stream_merge.tables import create_table
from stream_merge.tables.side import tombstones

pytestmark = pytest.mark.engines("auto", "spark", "rewrite", "random")


@pytest.fixture
def stream(spark: SparkSession, tmp_table: str) -> ChangeStream:
    return ChangeStream(spark, tmp_table)


def remembered(stream: ChangeStream) -> list[tuple[Any, ...]]:
    """Entries of the log: key, sequence, whether the entry marks the tombstone as revived."""
    log = stream.side_table(TOMBSTONE_TABLE_PREFIX)
    return sorted(
        tuple(row) for row in log.selectExpr("id", "__stream_merge_sequence.c1", "__stream_merge_revived").collect()
    )


@pytest.mark.smoke
def test_an_upsert_older_than_the_delete_is_refused_in_whatever_batch_it_arrives(stream: ChangeStream):
    """A tombstone refuses every strictly older event, in the batch of the delete and in every later one."""
    stream.deliver(upsert(1, "row", lsn=1), upsert(2, "row", lsn=1))

    same = stream.deliver(delete(1, lsn=5), upsert(1, "ghost", lsn=4), delete(2, lsn=5))
    later = stream.deliver(upsert(1, "ghost", lsn=4), upsert(2, "ghost", lsn=2))
    newer = stream.deliver(upsert(1, "back", lsn=6))

    assert stream.rows() == [(1, 6, "back")]
    assert ledger(same) == {"received": 3, "collapsed": 1, "deleted": 2}
    assert (later.outcome, later.version) == ("no_change", None)
    assert ledger(later) == {"received": 2, "stale": 2}
    assert ledger(newer) == {"received": 1, "inserted": 1}
    assert [change for change in stream.changes() if change[1] == 1] == [
        ("delete", 1, 1, "row"),
        ("insert", 1, 1, "row"),
        ("insert", 1, 6, "back"),
    ]


def test_a_delete_of_a_decimal_key_with_many_digits_is_remembered(spark: SparkSession, tmp_table: str):
    """delta-rs (1.6) writes statistics through a float or a long, by which Spark would skip the file of the delete."""
    columns = "k decimal(38,18), n decimal(20,0), lsn bigint, op string"
    settings = {"keys": ["k", "n"], "sequence_by": "lsn", "apply_as_deletes": "op = 'd'", "except_column_list": ["op"]}
    stream = ChangeStream(spark, tmp_table, columns, **settings)
    key = Decimal("12345678901234567890.123456789012345678"), Decimal("18446744073709551615")

    stream.deliver((*key, 1, "c"))
    stream.deliver((*key, 4, "d"))
    late = stream.deliver((*key, 3, "u"))

    assert ledger(late) == {"received": 1, "stale": 1}
    assert stream.rows() == []


def test_a_delete_of_a_key_never_seen_is_remembered(stream: ChangeStream):
    """The target does not change, and the upsert that the delete overtook stays out."""
    first = stream.deliver(delete(1, lsn=5))
    late = stream.deliver(upsert(1, "ghost", lsn=4), upsert(2, "row", lsn=1))

    assert stream.rows() == [(2, 1, "row")]
    assert (first.outcome, ledger(first)) == ("no_change", {"received": 1, "unaffected": 1})
    assert ledger(late) == {"received": 2, "stale": 1, "inserted": 1}
    assert remembered(stream) == [(1, 5, False)]


def test_a_delete_older_than_the_row_is_refused_and_still_remembered(stream: ChangeStream):
    """The row may be deleted by somebody else; what came before the refused delete still stays out."""
    stream.deliver(upsert(1, "kept", lsn=9))
    refused = stream.deliver(delete(1, lsn=5))
    rows = stream.rows()
    stream.sql("DELETE FROM {target}")

    late = stream.deliver(upsert(1, "ghost", lsn=4))
    newer = stream.deliver(upsert(1, "newer", lsn=6))

    assert rows == [(1, 9, "kept")]
    assert (refused.outcome, ledger(refused)) == ("no_change", {"received": 1, "unaffected": 1})
    assert ledger(late) == {"received": 1, "stale": 1}
    assert ledger(newer) == {"received": 1, "inserted": 1}


def test_at_equal_sequence_an_upsert_revives(stream: ChangeStream):
    """A tombstone refuses strictly older events only."""
    stream.deliver(delete(1, lsn=5))

    revival = stream.deliver(upsert(1, "back", lsn=5))
    again = stream.deliver(delete(1, lsn=5))

    assert stream.rows() == [(1, 5, "back")]
    assert ledger(revival) == {"received": 1, "inserted": 1}
    assert ledger(again) == {"received": 1, "unaffected": 1}


def test_at_equal_sequence_a_delete_still_goes_to_the_target(stream: ChangeStream):
    """A delete that was remembered while its merge was lost is made good by the same delete again."""
    stream.deliver(upsert(1, "row", lsn=1), delete(2, lsn=5))
    stream.sql("INSERT INTO {target} VALUES (2, 1, 'written by somebody else')")

    result = stream.deliver(delete(2, lsn=5))
    older = stream.deliver(delete(2, lsn=4))

    assert stream.rows() == [(1, 1, "row")]
    assert ledger(result) == {"received": 1, "deleted": 1}
    assert ledger(older) == {"received": 1, "stale": 1}


def test_a_revived_key_lives_on_as_if_it_had_never_been_deleted(stream: ChangeStream):
    """After a revival the tombstone is forgotten: the row's own sequence refuses what is older."""
    stream.deliver(delete(1, lsn=5))
    stream.deliver(upsert(1, "back", lsn=6))
    stream.deliver(delete(2, lsn=1))  # with which the mark comes along on an object store
    entries = remembered(stream)

    older = stream.deliver(upsert(1, "late", lsn=4))
    deleted = stream.deliver(delete(1, lsn=7))
    ghost = stream.deliver(upsert(1, "ghost", lsn=6))

    assert entries == [(1, 5, False), (1, 5, True), (2, 1, False)]
    assert ledger(older) == {"received": 1, "unaffected": 1}
    assert ledger(deleted) == {"received": 1, "deleted": 1}
    assert ledger(ghost) == {"received": 1, "stale": 1}
    assert stream.rows() == []


def test_a_revival_forgets_no_delete_that_is_newer(stream: ChangeStream):
    """Upsert and newer delete of a batch: only the delete counts, and it stays remembered."""
    stream.deliver(delete(1, lsn=5))
    stream.deliver(upsert(1, "between", lsn=6), delete(1, lsn=7))

    late = stream.deliver(upsert(1, "ghost", lsn=6))

    assert stream.rows() == []
    assert ledger(late) == {"received": 1, "stale": 1}


def test_an_expired_tombstone_lets_an_older_upsert_revive_the_key(
    stream: ChangeStream, monkeypatch: pytest.MonkeyPatch
):
    """The price of a retention: after it nothing is known of the delete any more."""
    noon = 1_700_000_000_000_000
    monkeypatch.setattr("stream_merge.merge.calls.now_micros", lambda: noon)
    stream.settings["tombstone_retention_seconds"] = 60
    stream.deliver(delete(1, lsn=5))
    monkeypatch.setattr("stream_merge.merge.calls.now_micros", lambda: noon + 60_000_000)
    within = stream.deliver(upsert(1, "ghost", lsn=4))
    monkeypatch.setattr("stream_merge.merge.calls.now_micros", lambda: noon + 60_000_001)

    after = stream.deliver(upsert(1, "revived", lsn=4))

    assert ledger(within) == {"received": 1, "stale": 1}
    assert ledger(after) == {"received": 1, "inserted": 1}
    assert stream.rows() == [(1, 4, "revived")]


def test_without_tombstones_nothing_is_remembered(stream: ChangeStream):
    """`tombstones=False` trusts the source to keep the order of each key."""
    stream.settings["tombstones"] = False
    stream.deliver(upsert(1, "row", lsn=1))
    stream.deliver(delete(1, lsn=5))

    late = stream.deliver(upsert(1, "ghost", lsn=4))

    assert stream.rows() == [(1, 4, "ghost")]
    assert ledger(late) == {"received": 1, "inserted": 1}
    assert list(stream.data_changes()) == ["table"]


@pytest.mark.engines("spark")
def test_many_events_with_tombstones_are_judged_in_parts(stream: ChangeStream, monkeypatch: pytest.MonkeyPatch):
    """Of so many that the driver should not hold them at once; each key is in one part."""
    monkeypatch.setattr(tombstones, "MOST_JUDGED", 4)
    stream.deliver(*(delete(key, lsn=5) for key in range(20)))
    stream.deliver(*(upsert(key, "back", lsn=6) for key in range(4)))

    late = stream.deliver(*(upsert(key, "late", lsn=6 if key % 2 else 4) for key in range(20)))

    assert ledger(late) == {"received": 20, "stale": 8, "inserted": 8, "updated": 2, "unaffected": 2}
    assert len(remembered(stream)) == 20 + 4 + 8


def test_a_log_of_many_files_is_tidied_without_forgetting_a_delete(
    stream: ChangeStream, monkeypatch: pytest.MonkeyPatch
):
    """Overtaken and revived entries go, small files are packed; what refuses an event stays."""
    monkeypatch.setattr(tombstones, "TIDY_FILES", 4)
    stream.deliver(delete(1, lsn=5), delete(2, lsn=5), delete(3, lsn=5))
    stream.deliver(delete(1, lsn=6))
    stream.deliver(upsert(2, "back", lsn=6))
    stream.deliver(delete(4, lsn=1))

    stream.deliver(delete(5, lsn=1))

    assert remembered(stream) == [(1, 6, False), (3, 5, False), (4, 1, False), (5, 1, False)]
    late = stream.deliver(
        upsert(1, "ghost", lsn=5), upsert(2, "newer", lsn=7), upsert(3, "ghost", lsn=4), upsert(4, "ghost", lsn=0)
    )
    assert ledger(late) == {"received": 4, "stale": 3, "updated": 1}
    assert stream.rows() == [(2, 7, "newer")]


def test_a_tidied_log_drops_what_is_past_the_retention(stream: ChangeStream, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tombstones, "TIDY_FILES", 2)
    stream.settings["tombstone_retention_seconds"] = 60
    noon = 1_700_000_000_000_000
    monkeypatch.setattr("stream_merge.merge.calls.now_micros", lambda: noon)
    stream.deliver(delete(1, lsn=5))
    monkeypatch.setattr("stream_merge.merge.calls.now_micros", lambda: noon + 61_000_000)

    stream.deliver(delete(2, lsn=5))

    assert remembered(stream) == [(2, 5, False)]


def test_a_target_made_anew_does_not_meet_the_tombstones_of_the_old_one(
    stream: ChangeStream, caplog: pytest.LogCaptureFixture
):
    """The log and its transaction ids belong to the table's id, not to its place; the old log is discarded."""
    stream.deliver(upsert(1, "old life", lsn=9), delete(2, lsn=9))
    stream.deliver(delete(3, lsn=9))
    removed(stream.target)

    stream.batch_id = -1
    stream.deliver(upsert(1, "new life", lsn=1), upsert(2, "new life", lsn=1))
    stream.deliver(delete(1, lsn=2))

    assert stream.rows() == [(2, 1, "new life")]
    assert remembered(stream) == [(1, 2, False)]
    assert "tombstones_of_dropped_target_discarded" in caplog.text
    assert "driver_failed" not in caplog.text


@pytest.mark.parametrize("place", ["path", "name"])
@pytest.mark.engines("spark")
def test_the_log_of_a_dropped_target_is_emptied_once(
    spark: SparkSession, stream: ChangeStream, place: str, monkeypatch: pytest.MonkeyPatch
):
    """Of two processes that find it, the one that comes late does not remove what the first has remembered by then."""
    if place == "name":
        stream.target = stream.settings["target"] = f"default.begun_{uuid4().hex[:8]}"
    stream.deliver(upsert(1, "old life", lsn=9), delete(2, lsn=9))
    spark.sql(f"DROP TABLE {stream.target}") if place == "name" else removed(stream.target)
    start_over = create_table.start_over

    def late(session: SparkSession, table: TableRef, *args: Any, **settings: Any) -> None:
        start_over(session, table, *args, **settings)
        session.sql(f"INSERT INTO {table.sql} VALUES (7, struct(8), false, current_timestamp())")
        start_over(session, table, *args, **settings)

    monkeypatch.setattr(create_table, "start_over", late)
    stream.batch_id = -1

    stream.deliver(upsert(1, "new life", lsn=1), delete(3, lsn=2))

    assert remembered(stream) == [(3, 2, False), (7, 8, False)]


def test_a_table_that_no_sink_has_made_is_not_emptied_for_deletes(stream: ChangeStream):
    stream.deliver(upsert(1, "row", lsn=1))
    log = TableRef(stream.target).tombstones.sql
    stream.spark.sql(f"CREATE TABLE {log} USING delta AS SELECT 'kept' AS note")

    with pytest.raises(ConfigError, match="is a table that no sink has created; rename it, or drop it"):
        stream.deliver(delete(1, lsn=5))

    assert [row["note"] for row in stream.side_table(TOMBSTONE_TABLE_PREFIX).collect()] == ["kept"]


def test_deletes_remembered_in_another_format_are_not_misread(stream: ChangeStream):
    """A later version may write its tombstones in another way: this one stops before it writes anything."""
    stream.deliver(upsert(1, "row", lsn=1), delete(2, lsn=5))
    log = TableRef(stream.target).tombstones.sql
    stream.spark.sql(f"ALTER TABLE {log} SET TBLPROPERTIES ('{FORMAT_PROPERTY}' = '9')")
    before = stream.versions()

    with pytest.raises(ConfigError, match=r"tombstone table at .*format '9' .*supports '1'; upgrade stream_merge"):
        stream.deliver(upsert(2, "ghost", lsn=4), (None, 6, "u", "no key"))

    assert stream.versions() == before
