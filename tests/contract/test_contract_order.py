"""Which event of a key wins: the greatest sequence, whole row, in an order that is the same on every replay."""

from __future__ import annotations

from itertools import permutations

import pytest
from deliveries import SCHEMA, ChangeStream, delete, ledger, upsert
from engines import under_test
from grouped import sink_with
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from since import since

from stream_merge.errors import ConfigError
from stream_merge.testing import batch, run

pytestmark = pytest.mark.engines("auto", "spark", "rewrite", "random")


@pytest.fixture
def stream(spark: SparkSession, tmp_table: str) -> ChangeStream:
    return ChangeStream(spark, tmp_table)


def test_the_greatest_sequence_of_a_batch_wins_as_a_whole_row(spark: SparkSession, tmp_table: str):
    """Several events of a key in a batch: the latest wins, never a mix of several."""
    stream = ChangeStream(
        spark, tmp_table, "id bigint, lsn bigint, name string, city string", keys="id", sequence_by="lsn"
    )

    result = stream.deliver((1, 2, "second", "Graz"), (1, 3, "third", None), (1, 1, "first", "Wien"))

    assert stream.rows() == [(1, 3, "third", None)]
    assert ledger(result) == {"received": 3, "collapsed": 2, "inserted": 1}
    assert stream.changes() == [("insert", 1, 3, "third", None)]


def test_the_end_does_not_depend_on_the_order_of_arrival(stream: ChangeStream):
    """Every order of three upserts, one per batch and key, ends with the latest row."""
    events = [("old", 1), ("newer", 2), ("newest", 3)]
    orders = list(permutations(events))

    for position in range(3):
        stream.deliver(*(upsert(key, order[position][0], lsn=order[position][1]) for key, order in enumerate(orders)))

    assert stream.rows() == [(key, 3, "newest") for key in range(6)]


def test_an_event_older_than_the_row_is_refused(stream: ChangeStream):
    """Upserts and deletes alike; the ledger may report both as unaffected."""
    stream.deliver(upsert(1, "kept", lsn=5), upsert(2, "kept", lsn=5))

    result = stream.deliver(upsert(1, "late", lsn=4), delete(2, lsn=4))

    assert stream.rows() == [(1, 5, "kept"), (2, 5, "kept")]
    assert result.outcome == "no_change"
    assert ledger(result) == {"received": 2, "unaffected": 2}
    assert stream.changes() == [("insert", 1, 5, "kept"), ("insert", 2, 5, "kept")]


def test_a_newer_event_updates_or_deletes_the_row(stream: ChangeStream):
    stream.deliver(upsert(1, "old", lsn=1), upsert(2, "old", lsn=1))

    result = stream.deliver(upsert(1, "new", lsn=2), delete(2, lsn=2), upsert(3, "first", lsn=1))

    assert stream.rows() == [(1, 2, "new"), (3, 1, "first")]
    assert ledger(result) == {"received": 3, "updated": 1, "deleted": 1, "inserted": 1}
    assert stream.changes() == [
        ("delete", 2, 1, "old"),
        ("insert", 1, 1, "old"),
        ("insert", 2, 1, "old"),
        ("insert", 3, 1, "first"),
        ("update_postimage", 1, 2, "new"),
        ("update_preimage", 1, 1, "old"),
    ]


def test_at_equal_sequence_an_upsert_beats_a_delete(stream: ChangeStream):
    """Inside a batch, whichever arrives first; counted as a tie."""
    result = stream.deliver(
        upsert(1, "stays", lsn=5), delete(1, lsn=5), delete(2, lsn=5), upsert(2, "stays", lsn=5), delete(2, lsn=5)
    )

    assert stream.rows() == [(1, 5, "stays"), (2, 5, "stays")]
    assert ledger(result) == {"received": 5, "collapsed": 3, "inserted": 2, "ties": 2}


def test_between_two_upserts_of_equal_sequence_the_stored_columns_decide(spark: SparkSession, tmp_table: str):
    """In the source's column order the greater value wins and NULL loses, whichever arrives first.

    The column that is not stored has no say.
    """
    stream = ChangeStream(
        spark,
        tmp_table,
        "id bigint, note string, lsn bigint, a int, b string",
        keys="id",
        sequence_by="lsn",
        except_column_list=["note"],
    )
    ties = {
        1: [("", 1, "b"), ("", 2, "a")],  # the first column that differs decides: 2
        2: [("", 1, "a"), ("", 1, "b")],  # then the next: b
        3: [("", None, "z"), ("", -5, "a")],  # NULL is below every value
        4: [("", 1, None), ("", 1, "")],
        5: [("z", 1, "a"), ("a", 1, "b")],  # note is not stored
    }

    events = [(key, note, 7, a, b) for key, tied in ties.items() for note, a, b in tied]
    events += [(key + 10, note, 7, a, b) for key, tied in ties.items() for note, a, b in reversed(tied)]
    result = stream.deliver(*events)

    winners = [(2, "a"), (1, "b"), (-5, "a"), (1, ""), (1, "b")]
    assert stream.rows("id", "a", "b") == sorted(
        [(key, *row) for key, row in enumerate(winners, 1)] + [(key, *row) for key, row in enumerate(winners, 11)],
        key=repr,
    )
    assert ledger(result) == {"received": 20, "collapsed": 10, "inserted": 10, "ties": 10}


def test_equal_events_of_a_batch_are_no_ties(stream: ChangeStream):
    """A tie differs in operation or stored columns; a source that repeats itself is no reason to look."""
    result = stream.deliver(
        upsert(1, "same", lsn=5),
        upsert(1, "same", lsn=5),
        upsert(1, "other", lsn=5),
        upsert(1, "old", lsn=4),
        upsert(2, None, lsn=5),
        upsert(2, None, lsn=5),
        upsert(3, "once", lsn=5),
    )

    assert stream.rows() == [(1, 5, "same"), (2, 5, None), (3, 5, "once")]
    assert ledger(result) == {"received": 7, "collapsed": 4, "inserted": 3, "ties": 1}


def test_maps_are_compared_with_sorted_entries(spark: SparkSession, tmp_table: str):
    """The order in which a map's entries arrive makes neither a tie nor another winner."""
    stream = ChangeStream(spark, tmp_table, "id bigint, lsn bigint, tags map<string,int>", keys="id", sequence_by="lsn")

    result = stream.deliver(
        (1, 1, {"a": 1, "b": 2}),
        (1, 1, {"b": 2, "a": 1}),
        (2, 1, {"b": 1, "a": 9}),
        (2, 1, {"a": 9, "b": 2}),
        (3, 1, {"a": 1}),
        (3, 1, None),
    )

    assert stream.rows("id", "tags") == [(1, {"a": 1, "b": 2}), (2, {"a": 9, "b": 2}), (3, {"a": 1})]
    assert ledger(result) == {"received": 6, "collapsed": 3, "inserted": 3, "ties": 2}


def test_against_the_stored_row_of_equal_sequence_the_later_upsert_wins_and_a_delete_loses(stream: ChangeStream):
    """So a different cut of the same stream may end differently for ties."""
    stream.deliver(upsert(1, "z first", lsn=5), upsert(2, "stays", lsn=5))

    result = stream.deliver(upsert(1, "a later", lsn=5), delete(2, lsn=5))

    assert stream.rows() == [(1, 5, "a later"), (2, 5, "stays")]
    assert ledger(result) == {"received": 2, "updated": 1, "unaffected": 1}


@pytest.mark.parametrize(
    ("sequence_by", "not_stored"),
    [
        (["day", "pos"], []),
        (["day", "pos"], ["pos"]),
        ("struct(day, pos)", ["day", "pos"]),
        ("day * 1000 + pos", []),
        ("named_struct('d', day, 'p', struct(pos))", []),
    ],
    ids=["list", "list partly stored", "struct not stored", "expression", "nested struct"],
)
def test_a_sequence_of_several_parts_is_compared_from_left_to_right(
    spark: SparkSession, tmp_table: str, sequence_by: list[str] | str, not_stored: list[str]
):
    """Whether it is a list of columns, a struct or an expression, and whether its columns are stored or not."""
    stream = ChangeStream(
        spark,
        tmp_table,
        "id int, day int, pos int, name string",
        keys="id",
        sequence_by=F.expr(sequence_by) if isinstance(sequence_by, str) else sequence_by,
        except_column_list=not_stored,
    )
    stream.deliver((1, 2, 9, "kept"), (2, 2, 9, "old"), (3, 1, 1, "old"), (3, 1, 2, "latest"))

    result = stream.deliver((1, 1, 10, "late"), (2, 10, 1, "new"), (3, 1, 1, "late"))

    assert stream.rows("id", "name") == [(1, "kept"), (2, "new"), (3, "latest")]
    assert ledger(result) == {"received": 3, "updated": 1, "unaffected": 2}


def test_a_struct_column_orders_by_its_fields(spark: SparkSession, tmp_table: str):
    """A stored struct column is the sequence as it is."""
    stream = ChangeStream(
        spark, tmp_table, "id int, pos struct<file:string,offset:int>, name string", keys="id", sequence_by="pos"
    )
    stream.deliver((1, ("binlog.2", 7), "old"))

    stream.deliver((1, ("binlog.10", 900), "late"), (1, ("binlog.2", 8), "new"))

    assert stream.rows("id", "name") == [(1, "new")]
    assert "__stream_merge_sequence" not in spark.read.format("delta").load(tmp_table).columns


def test_composite_keys_are_one_key(spark: SparkSession, tmp_table: str):
    stream = ChangeStream(
        spark,
        tmp_table,
        "shop string, lsn int, id int, op string, name string",
        keys=["id", "shop"],
        sequence_by="lsn",
        apply_as_deletes="op = 'd'",
        except_column_list=["op"],
    )
    stream.deliver(("a", 5, 1, "u", "a1"), ("b", 5, 1, "u", "b1"), ("a", 5, 2, "u", "a2"))

    result = stream.deliver(("a", 6, 1, "d", None), ("b", 4, 1, "d", None), ("a", 6, 2, "u", "a2 new"))
    late = stream.deliver(("a", 5, 1, "u", "ghost"), ("b", 6, 2, "u", "b2"))

    assert stream.rows("shop", "id", "name") == [("a", 2, "a2 new"), ("b", 1, "b1"), ("b", 2, "b2")]
    assert ledger(result) == {"received": 3, "deleted": 1, "updated": 1, "unaffected": 1}
    assert ledger(late) == {"received": 2, "stale": 1, "inserted": 1}


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [
        ("string", "'10'", "'9'"),
        ("decimal(38,10)", "-1.0000000001", "-1"),
        ("double", "1e308", "'NaN'"),
        ("timestamp", "'1969-12-31 23:59:59.999998'", "'1969-12-31 23:59:59.999999'"),
    ],
)
def test_every_type_with_an_order_can_be_the_sequence(
    spark: SparkSession, tmp_table: str, dtype: str, low: str, high: str
):
    """Compared as Spark compares the type: text by characters, NaN above every number."""
    stream = ChangeStream(spark, tmp_table, f"id int, at {dtype}, name string", keys="id", sequence_by="at")

    def events(*rows: tuple[int, str, str]) -> DataFrame:
        values = ", ".join(f"({key}, CAST({at} AS {dtype}), '{name}')" for key, at, name in rows)
        return spark.sql(f"SELECT * FROM VALUES {values} AS events(id, at, name)")

    stream.deliver_frame(events((1, high, "latest"), (1, low, "old"), (2, low, "old"), (3, high, "latest")))
    stream.deliver_frame(events((1, low, "late"), (2, high, "latest"), (3, low, "late")))

    assert stream.rows("id", "name") == [(1, "latest"), (2, "latest"), (3, "latest")]


def test_a_history_delivered_again_ends_the_same(spark: SparkSession, tmp_table: str):
    """Without transaction ids the sequences alone keep rows and change feed as they are, batch by batch.

    Delivered again as a whole, late events of the past are refused as such.
    """
    stream = ChangeStream(spark, tmp_table, app_id=None)
    history = [
        [upsert(1, "old", lsn=1), upsert(2, "old", lsn=1), upsert(3, "kept", lsn=9), delete(4, lsn=2)],
        [upsert(1, "new", lsn=2), delete(2, lsn=2), upsert(3, "late", lsn=8), upsert(4, "ghost", lsn=1)],
        [upsert(1, "tied", lsn=2), upsert(2, "ghost", lsn=1), delete(3, lsn=7), upsert(4, "back", lsn=3)],
    ]
    for events in history:
        stream.deliver(*events)
    rows = stream.rows()

    for batch_id, events in enumerate(history):
        run(stream.sink(), batch(spark, SCHEMA, *events), batch_id)

    assert rows == [(1, 2, "tied"), (3, 9, "kept"), (4, 3, "back")]
    assert stream.rows() == rows


def test_a_new_checkpoint_is_not_mistaken_for_an_old_one(spark: SparkSession, tmp_table: str):
    """Batch ids restart at 0 under another identity; nothing is skipped, nothing is applied twice."""
    stream = ChangeStream(spark, tmp_table)
    stream.deliver(upsert(1, "old", lsn=1))
    stream.deliver(upsert(1, "new", lsn=2), delete(2, lsn=2))

    stream.batch_id = -1
    again = stream.deliver(upsert(1, "old", lsn=1), upsert(2, "ghost", lsn=1), app_id="other")
    more = stream.deliver(upsert(1, "newest", lsn=3))

    assert (again.outcome, ledger(again)) == ("no_change", {"received": 2, "unaffected": 1, "stale": 1})
    assert (more.batch_id, ledger(more)) == (1, {"received": 1, "updated": 1})
    assert stream.rows() == [(1, 3, "newest")]


def test_a_batch_id_below_the_recorded_one_is_skipped_and_told(stream: ChangeStream, caplog: pytest.LogCaptureFixture):
    """Batch ids must grow: that is how a batch is known to be applied. A script that begins again sends such ones."""
    stream.batch_id = 6
    stream.deliver(upsert(1, "seven", lsn=7))

    skipped = run(stream.sink(), batch(stream.spark, stream.schema, upsert(1, "eight", lsn=8)), 6)

    assert (skipped.outcome, skipped.version, ledger(skipped)) == ("skipped_duplicate", None, {})
    assert stream.rows() == [(1, 7, "seven")]
    (told,) = (record for record in caplog.records if record.message.startswith("batch_id_below_recorded"))
    assert "batch_id=6 recorded=7" in told.message


@pytest.mark.engines("auto")
@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ("id int, at map<string,int>", ["'at'", "map<string,int>", "no order"]),
        ("id int, at struct<a:array<map<int,int>>>", ["'at'", "no order"]),
        pytest.param("id int, at variant", ["'at'", "variant", "no order"], marks=since((4, 0), "VARIANT")),
        ("id map<string,int>, at int", ["'id'", "map<string,int>", "cannot be compared"]),
        pytest.param("id struct<v:variant>, at int", ["'id'", "cannot be compared"], marks=since((4, 0), "VARIANT")),
    ],
)
def test_types_without_an_order_are_refused_before_the_first_write(
    spark: SparkSession, tmp_table: str, schema: str, named: list[str]
):
    """Maps and variants can be neither sequence nor key, at no depth."""
    stream = ChangeStream(spark, tmp_table, schema, keys="id", sequence_by="at")

    with pytest.raises(ConfigError) as error:
        stream.deliver()

    assert [part for part in named if part not in str(error.value)] == []
    assert stream.data_changes() == {}


def test_changed_keys_or_sequence_are_refused_by_naming_old_new_and_remedy(stream: ChangeStream):
    """Stored rows and remembered deletes belong to the definition that is recorded with the table."""
    stream.deliver(upsert(1, "kept", lsn=1))
    before = stream.data_changes()

    for changed, named in (
        ({"keys": ["id", "name"]}, ["['id']", "['id', 'name']"]),
        ({"sequence_by": ["lsn", "name"]}, ["['lsn']", "['lsn', 'name']"]),
        ({"sequence_by": F.expr("lsn * 2")}, ["['lsn']", "lsn * 2"]),
    ):
        sink = under_test(sink_with(**{**stream.settings, **changed}))
        with pytest.raises(ConfigError) as error:
            sink(batch(stream.spark, stream.schema, upsert(1, "new", lsn=2), delete(2, lsn=2)), 1)
        named += ["use the recorded", "rebuild the table"]
        assert [part for part in named if part not in str(error.value)] == []

    assert stream.data_changes() == before
