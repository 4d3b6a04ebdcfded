"""Events in files of the driver's machine are the events that rows of the JVM would be."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from py4j.protocol import Py4JJavaError
from pyspark import SparkFiles
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T
from wire_rows import ODD, ROW, fields_of, formats, raw

from stream_merge.jobs.kafka import counts, decode
from stream_merge.model import names
from stream_merge.model.settings import MergeSpec
from stream_merge.model.source_batch import AtHand
from stream_merge.shapes.batch import Batch, evaluate_at_hand, evaluate_in_driver
from stream_merge.shapes.layouts import plan_layout
from stream_merge.sources.decode.arrow_files import spooled
from stream_merge.sources.decode.decoding import Decoder, events
from stream_merge.sources.decode.events import PLACE
from stream_merge.spark.versions import arrow_table

RECORD = T.StructType(
    [
        T.StructField("topic", T.StringType()),
        T.StructField("partition", T.IntegerType()),
        T.StructField("offset", T.LongType()),
        T.StructField("timestamp", T.TimestampType()),
        T.StructField("key", T.BinaryType()),
        T.StructField("value", T.BinaryType()),
    ]
)
WHEN = datetime(2026, 11, 22, 7, 8, 9, 123456, UTC)


@pytest.fixture(autouse=True)
def _tidy(spark: SparkSession) -> Iterator[None]:
    """Files that a test leaves would pass for a leak elsewhere."""
    folder = Path(SparkFiles.getRootDirectory())
    before = set(folder.iterdir())
    yield
    for left in set(folder.iterdir()) - before:
        shutil.rmtree(left)


def envelopes() -> Decoder:
    form, encodings, known, _ = formats()["debezium"]
    return Decoder(format=form, columns=fields_of(encodings), keys=("id",), known=known, max_value_bytes=20_000)


def whole_rows(count: int) -> list[tuple[bytes | None, bytes | None]]:
    """Upserts and deletes, and now and then a record that is not about a row."""
    write = formats()["debezium"][3]
    records = [write({**ROW, "id": turn % 50}, turn) for turn in range(count)]
    return [(None, raw({"ts_ms": 1})) if turn % 97 == 96 else record for turn, record in enumerate(records)]


def records_of(
    spark: SparkSession, records: Iterable[tuple[bytes | None, bytes | None]], *, tasks: int = 3
) -> DataFrame:
    """As Spark's Kafka source gives them; each task reads a partition."""
    rows = [(f"topic {i % 2}", i % tasks, i, WHEN, key, value) for i, (key, value) in enumerate(records)]
    rows.sort(key=lambda row: row[1])
    return spark.createDataFrame(rows, RECORD).repartition(tasks, "partition")


def in_order(found: pa.Table) -> list[str]:
    """All rows as text, which tells -0.0 from 0.0; types do not count, nullability of fields may differ."""
    rows = found.select(sorted(found.column_names)).to_pylist()
    return [repr(row) for row in sorted(rows, key=lambda row: row["offset"])]


@pytest.fixture
def mixed(spark: SparkSession) -> DataFrame:
    """Records of all kinds: odd values, wrong texts, null values, deletes said twice."""
    records = whole_rows(900)
    write = formats()["debezium"][3]
    odd = [(name, value) for name, values in ODD.items() for value in values]
    for i, (name, value) in enumerate(odd):
        records[7 * i + 1] = write({**ROW, "id": i, name: value}, 7 * i + 1)
    for i, text in enumerate((None, b"", b"{", b"null", b"x" * 30_000)):
        records[800 + i] = (records[800 + i][0], text)
    return records_of(spark, records)


def test_files_hold_what_rows_would(mixed):
    decoder = envelopes()
    rows = arrow_table(events(mixed, decoder))

    spool = spooled(mixed, decoder)

    wanted = in_order(rows)
    assert len(wanted) == 900
    assert in_order(spool.table()) == wanted
    assert in_order(arrow_table(spool.frame())) == wanted
    assert spool.frame().schema.names == [*PLACE, *decoder.schema.names]
    spool.remove()
    assert not Path(spool.folder).exists()


def test_rows_of_files_come_in_small_parts(spark, monkeypatch):
    """Of a whole batch of large events the JVM would have to make one row."""
    monkeypatch.setattr("stream_merge.sources.decode.arrow_files._AT_ONCE", 7)
    spool = spooled(records_of(spark, whole_rows(100)), envelopes())

    assert in_order(arrow_table(spool.frame())) == in_order(spool.table())


@pytest.mark.parametrize("tasks", [1, 3])
def test_no_records_are_no_events(spark, tasks):
    spool = spooled(records_of(spark, [], tasks=tasks), envelopes())

    assert spool.table().num_rows == 0
    assert spool.frame().count() == 0
    assert counts.of_table(spool.table()) == counts.Tally()


def test_a_failed_reading_leaves_no_files(spark, monkeypatch):
    folders: list[str] = []
    make = tempfile.mkdtemp
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **options: folders.append(make(**options)) or folders[-1])
    broken = records_of(spark, whole_rows(10)).withColumn("key", F.raise_error(F.lit("no key")).cast("binary"))

    with pytest.raises((PySparkException, Py4JJavaError), match="no key"):  # of Spark 3.5 it is the second one
        spooled(broken, envelopes())

    assert [Path(folder).exists() for folder in folders] == [False]


def test_both_ways_of_counting_count_the_same(spark):
    frame = events(records_of(spark, whole_rows(1_000)), envelopes())

    found = counts.of_table(arrow_table(frame))

    assert found == counts.of_frame(frame)
    assert {kind for counts in found.counts.values() for kind in counts.kinds} == {"upsert", "delete", "filtered"}
    assert sum(counts.records for counts in found.counts.values()) == 1_000


class Rows:
    """What `decoded` asks of `RowSchema`, for one schema that is known."""

    def __init__(self, decoder: Decoder) -> None:
        self.columns = decoder.columns
        self.defaults: dict[str, Any] = {}
        self._decoder = decoder

    def decoder(self) -> Decoder:
        return self._decoder

    def forget_not_registered(self) -> None:
        pass


def test_whole_rows_are_at_hand_until_the_batch_is_released(spark, monkeypatch):
    rows: Any = Rows(envelopes())

    folders: list[str] = []
    make = tempfile.mkdtemp
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **options: folders.append(make(**options)) or folders[-1])

    with ExitStack() as held:
        batch = decode.evaluate_here(records_of(spark, whole_rows(500)), rows, held)
        there = [Path(folder).exists() for folder in folders]

    assert batch.at_hand is not None
    assert batch.at_hand.num_rows == batch.tally.records == 500
    assert (there, [Path(folder).exists() for folder in folders]) == ([True], [False])


@pytest.mark.parametrize("odd", [b"{", None], ids=["undecodable", "null value"])
def test_one_record_that_is_none_takes_the_batch_to_rows(spark, odd):
    records = whole_rows(500)
    records[123] = (raw({"id": 1}), odd)
    frame, rows = records_of(spark, records), Rows(envelopes())

    with ExitStack() as held:
        batch = decode.evaluate_here(frame, rows, held)  # type: ignore[arg-type]

        wanted = decode.evaluate(frame, rows, held)  # type: ignore[arg-type]
        assert batch.at_hand is None
        assert batch.tally == wanted.tally
        assert in_order(arrow_table(batch.frames[0])) == in_order(arrow_table(wanted.frames[0]))


# -- the sink's evaluation ---------------------------------------------------------------------

EVENTS = T.StructType(
    [
        T.StructField("id", T.LongType()),
        T.StructField("name", T.StringType()),
        T.StructField("price", T.DoubleType()),
        T.StructField("read", T.TimestampType()),
        T.StructField("doc", T.StructType([T.StructField("tags", T.ArrayType(T.StringType()))])),
        T.StructField("place", T.IntegerType()),
        T.StructField("turn", T.LongType()),
        T.StructField("gone", T.BooleanType()),
    ]
)
SPEC = MergeSpec(
    target="/tables/somewhere",
    keys=("id",),
    sequence_by=("place", "turn"),
    apply_as_deletes="gone",
    except_column_list=("place", "turn", "gone"),
)


def random_events(seed: int, count: int = 60) -> list[tuple[Any, ...]]:
    """Few keys and few sequences, so that many events are tied."""
    rng = random.Random(seed)
    values: dict[str, list[Any]] = {
        "name": ["a", "b", "", None],
        "price": [0.0, -0.0, float("nan"), 1.5, None],
        "read": [WHEN, datetime(1700, 1, 1, tzinfo=UTC), None],
        "doc": [{"tags": ["x", None]}, {"tags": []}, {"tags": None}, None],
    }
    return [
        (
            rng.randrange(12),
            *(rng.choice(found) for found in values.values()),
            rng.randrange(2),
            rng.randrange(3),
            rng.random() < 0.2,
        )
        for _ in range(count)
    ]


def at_hand(frame: DataFrame) -> AtHand:
    return AtHand(events=arrow_table(frame), sequence=("place", "turn"), delete="gone")


@pytest.mark.parametrize(("seed", "count"), [(1, 0), (2, 1), (3, 2), (4, 60), (5, 60), (6, 60)])
def test_events_at_hand_are_evaluated_as_those_that_spark_brings(spark, seed, count):
    frame = spark.createDataFrame(random_events(seed, count), EVENTS)
    layout = plan_layout(frame, SPEC, None)
    wanted = evaluate_in_driver(frame, layout)

    found = evaluate_at_hand(frame, at_hand(frame), layout)

    assert wanted is not None
    assert found is not None
    assert _numbers(found) == _numbers(wanted)
    assert found.rows.arrow().schema == wanted.rows.arrow().schema
    assert repr(found.rows.arrow().to_pylist()) == repr(wanted.rows.arrow().to_pylist())
    assert found.rows.invalid().count() == 0


def test_many_events_at_hand_are_not_sent_through_the_heap(spark, monkeypatch):
    """Where Spark has to merge them after all, it evaluates their frame."""
    frame = spark.createDataFrame(random_events(3), EVENTS).localCheckpoint()
    layout = plan_layout(frame, SPEC, None)
    sent = evaluate_at_hand(frame, at_hand(frame), layout)
    monkeypatch.setattr("stream_merge.shapes.batch.MOST_SENT", 5)

    found = evaluate_at_hand(frame, at_hand(frame), layout)

    assert sent is not None
    assert found is not None
    assert _numbers(found) == _numbers(sent)
    assert found.rows.invalid().isEmpty()
    monkeypatch.setattr(SparkSession, "createDataFrame", None)
    wanted = sorted(map(repr, sent.rows.arrow().to_pylist()))
    for _ in range(2):
        latest = arrow_table(found.rows.latest().select(*sent.rows.arrow().column_names))
        assert sorted(map(repr, latest.cast(sent.rows.arrow().schema).to_pylist())) == wanted
    found.rows.release()


def _numbers(batch: Batch) -> Any:
    return batch.received, batch.collapsed, batch.ties, batch.upserts, batch.deletes, batch.reasons, batch.bounds


def test_events_too_large_for_arrow_are_left_to_spark(spark, monkeypatch):
    frame = spark.createDataFrame(random_events(4), EVENTS)
    events = at_hand(frame)
    monkeypatch.setattr("stream_merge.shapes.batch.MOST_BYTES", events.events.nbytes - 1)

    assert evaluate_at_hand(frame, events, plan_layout(frame, SPEC, None)) is None


@pytest.mark.parametrize("lacking", ["id", "turn"])
def test_spark_judges_where_an_event_at_hand_breaks_the_contract(spark, lacking):
    rows = [(*row,) for row in random_events(2)]
    at = EVENTS.names.index(lacking)
    rows[-1] = (*rows[-1][:at], None, *rows[-1][at + 1 :])
    frame = spark.createDataFrame(rows, EVENTS)

    assert evaluate_at_hand(frame, at_hand(frame), plan_layout(frame, SPEC, None)) is None
    judged = evaluate_in_driver(frame, plan_layout(frame, SPEC, None))
    assert judged is not None
    assert judged.quarantined == 1


def test_spark_converts_where_the_target_stores_another_type(spark):
    frame = spark.createDataFrame(random_events(2), EVENTS).withColumn("id", F.col("id").cast("int"))
    sequence = T.StructType([T.StructField("c1", T.IntegerType()), T.StructField("c2", T.LongType())])
    stored = T.StructType([*EVENTS.fields[:5], T.StructField(names.SEQUENCE_COLUMN, sequence)])

    assert evaluate_at_hand(frame, at_hand(frame), plan_layout(frame, SPEC, stored)) is None
