"""A job reads a real topic of a real broker: every record ends as a row, in the quarantine, or in a count."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import services
from kafka import KafkaAdminClient, KafkaProducer, TopicPartition
from prometheus_client import CollectorRegistry
from pyspark.sql import SparkSession

from stream_merge import ConfigError, ContractError, MergeMetrics, MergeResult
from stream_merge.jobs.kafka import JobSettings, run
from stream_merge.jobs.kafka.check import check
from stream_merge.jobs.kafka.exit_codes import Verdict
from stream_merge.jobs.kafka.run import JobResult
from stream_merge.merge import commit as committing
from stream_merge.testing import change_rows, target_rows

FORMAT = {
    "type": "debezium",
    "columns": {"id": "bigint", "price": "numeric(10,2)", "name": "text"},
    "decimal_handling_mode": "precise",
}


def price(cents: int) -> str:
    return base64.b64encode(cents.to_bytes(8, "big", signed=True)).decode()


class Shop:
    """One topic, one table, and the connector that this test plays."""

    def __init__(self, spark: SparkSession, broker: services.Broker, folder: Path, topic: str) -> None:
        self.spark = spark
        self.broker = broker
        self.topic = topic
        self.target = str(folder / "orders")
        self.checkpoint = str(folder / "checkpoint")
        self.admin = KafkaAdminClient(bootstrap_servers=broker.bootstrap)
        self.producer = KafkaProducer(bootstrap_servers=broker.bootstrap, max_request_size=11 * 2**20)
        self.lsn = 1_000
        self.make_topic()

    def make_topic(self, partitions: int = 1) -> None:
        self.admin.create_topics({self.topic: {"num_partitions": partitions, "replication_factor": 1}})

    def widen(self, partitions: int) -> None:
        self.admin.create_partitions({self.topic: partitions})
        services.wait_until(
            lambda: len(self.producer.partitions_for(self.topic)) == partitions, "the producer knows all partitions"
        )

    def close(self) -> None:
        self.producer.close()
        self.admin.close()

    def send(self, key: bytes | None, value: bytes | None, *, partition: int = 0, **headers: bytes) -> int:
        """The record's offset."""
        named = [(f"__debezium.{name}", header) for name, header in headers.items()]
        sent = self.producer.send(self.topic, key=key, value=value, partition=partition, headers=named)
        return int(sent.get(30).offset)

    def event(self, op: str, key: int, name: str | None = "n", *, lsn: int | None = None, **more: Any) -> int:
        self.lsn += 1
        headers = {name: more.pop(name) for name in ("oldkey", "newkey") if name in more}
        partition = more.pop("partition", 0)
        row = {"id": key, "price": price(100 * key), "name": name, **more.pop("row", {})}
        source = {"lsn": self.lsn if lsn is None else lsn, "ts_ms": 1_700_000_000_000, "snapshot": "false"}
        source["name"] = "shop"
        value = {
            "op": op,
            "before": {"id": key, "price": None, "name": None} if op == "d" else None,
            "after": None if op == "d" else row,
            "source": {**source, **more},
        }
        return self.send(raw({"id": key}), raw(value), partition=partition, **headers)

    def rename(self, old: int, new: int, name: str, *, partition: int = 0) -> int:
        """A key change as Debezium sends it: a delete and a create at one position, which name each other."""
        self.event("d", old, newkey=raw({"id": new}))
        return self.event("c", new, name, lsn=self.lsn, oldkey=raw({"id": old}), partition=partition)

    def settings(self, **changes: Any) -> JobSettings:
        query = {
            "name": "orders",
            "topic": self.topic,
            "target": self.target,
            "keys": "id",
            "checkpoint": self.checkpoint,
            "value_format": FORMAT,
            **changes,
        }
        return JobSettings.model_validate({"kafka": {"bootstrap": self.broker.bootstrap}, "queries": [query]})

    def run(self, **changes: Any) -> JobResult:
        """Merge what is there."""
        self.producer.flush()
        return run(self.settings(**changes), self.spark, once=True, metrics=MergeMetrics(CollectorRegistry()))

    def merge(self, **changes: Any) -> list[MergeResult]:
        result = self.run(**changes)
        assert result.failures == {}
        return list(result.results.get("orders", []))

    def failure(self, **changes: Any) -> Exception:
        return self.run(**changes).failures["orders"]

    def rows(self, *columns: str) -> list[tuple[Any, ...]]:
        return target_rows(self.spark, self.target, *(columns or ("id", "name")))

    def quarantined(self, *columns: str) -> list[tuple[Any, ...]]:
        path = Path(self.target).parent / "__stream_merge_quarantine_orders"
        return target_rows(self.spark, str(path), *(columns or ("offset", "reasons"))) if path.exists() else []

    def recorded(self) -> list[dict[str, Any]]:
        """What each commit says about its topic, oldest first."""
        found = []
        for commit in sorted(Path(self.target, "_delta_log").glob("*.json")):
            for line in commit.read_text().splitlines():
                metadata = json.loads(line).get("commitInfo", {}).get("userMetadata")
                said = json.loads(metadata)["stream_merge"] if metadata else {}
                if "batch_id" in said:  # not of maintenance
                    found.append(said["kafka"])
        return found

    def ranges(self) -> list[list[int]]:
        return [commit["topics"][self.topic]["partitions"]["0"]["range"] for commit in self.recorded()]


def raw(value: Any) -> bytes:
    return json.dumps(value).encode()


@pytest.fixture
def shop(spark: SparkSession, broker: services.Broker, tmp_path: Path) -> Iterator[Shop]:
    shop = Shop(spark, broker, tmp_path, tmp_path.name.replace("[", ".").replace("]", "."))
    yield shop
    shop.close()


def test_every_record_ends_somewhere_and_each_batch_continues_where_the_last_one_ended(shop: Shop):
    for key in (1, 2, 3):
        shop.event("c", key)
    shop.event("u", 1, "newer")
    shop.event("d", 2)
    shop.send(raw({"id": 2}), None)
    bad = shop.send(raw({"id": 4}), b'{"op": "c", "after":')
    shop.send(None, raw({"status": "BEGIN", "id": "1", "event_count": None}))

    (first,) = shop.merge()

    assert first.outcome == "committed"
    assert (first.events.received, first.events.quarantined) == (6, 1)
    assert (first.events.collapsed, first.events.inserted) == (2, 2)
    assert shop.rows("id", "price", "name") == sorted(
        [(1, pytest.approx(1), "newer"), (3, pytest.approx(3), "n")], key=lambda row: row[0]
    )
    assert shop.quarantined("offset", "reasons", "raw_value", "error") == [
        (bad, ["undecodable"], b'{"op": "c", "after":', "not JSON at character 20: Expecting value")
    ]
    partition = shop.recorded()[0]["topics"][shop.topic]["partitions"]["0"]
    assert partition == {
        "range": [0, 8],
        "first": True,
        "records": {"delete": 1, "filtered": 1, "redundant": 1, "undecodable": 1, "upsert": 4},
        "filtered": {"transaction": 1},
        "position": shop.lsn,
    }

    shop.event("u", 3, "second run")
    (second,) = shop.merge()

    assert (second.batch_id, second.events.updated) == (1, 1)
    assert shop.ranges() == [[0, 8], [8, 9]]
    assert shop.merge() == []


def test_an_event_delivered_again_is_no_change(shop: Shop):
    """The connector starts again from where it last said it was: same position, higher offset."""
    shop.event("c", 1, lsn=10)
    shop.event("u", 1, "newer", lsn=20)
    shop.merge()
    shop.event("c", 1, lsn=10)
    shop.event("u", 1, "newer", lsn=20)

    (again,) = shop.merge()

    assert (again.events.updated, again.events.unaffected, again.events.collapsed) == (0, 1, 1)
    assert [kind for _, kind, *_ in change_rows(shop.spark, shop.target)] == ["insert"]


@pytest.mark.parametrize(("unchanged", "updated"), [("update", 1), ("skip", 0)])
def test_a_newer_event_without_a_change_advances_the_row_unless_told_otherwise(
    shop: Shop, unchanged: str, updated: int
):
    shop.event("c", 1, lsn=10)
    shop.merge(unchanged=unchanged)
    shop.event("u", 1, lsn=20)

    (result,) = shop.merge(unchanged=unchanged)

    assert result.events.updated == updated


def test_a_read_stands_behind_what_its_topic_brought_before_it(shop: Shop):
    """Though the connector gives it the position of the log's end: writes of open transactions lie before that.

    Key 1 is overtaken by such a write, key 2 loses its row to one; key 3 comes back by a read. The same in one batch.
    """
    for key in (1, 2, 3):
        shop.event("c", key, "created", lsn=100)
    shop.event("d", 3, lsn=110)
    shop.merge()
    shop.event("r", 1, "read", lsn=150, snapshot="true")
    shop.event("r", 2, "read", lsn=150, snapshot="true")
    shop.event("r", 3, "read again", lsn=150, snapshot="last")
    (reads,) = shop.merge()
    between = shop.rows()
    shop.event("u", 1, "written before the read, committed after it", lsn=140)
    shop.event("d", 2, lsn=141)
    shop.merge()
    shop.event("c", 4, "created", lsn=160)
    shop.event("r", 4, "read", lsn=190, snapshot="true")
    shop.event("u", 4, "of an open transaction", lsn=170)
    shop.event("r", 5, "read", lsn=190, snapshot="true")
    shop.event("u", 6, "streamed", lsn=195)
    shop.event("r", 6, "read at the same place", lsn=195, snapshot="true")
    shop.merge()

    assert (reads.events.updated, reads.events.inserted) == (2, 1)
    assert between == [(1, "read"), (2, "read"), (3, "read again")]
    assert shop.rows() == [
        (1, "written before the read, committed after it"),
        (3, "read again"),
        (4, "of an open transaction"),
        (5, "read"),
        (6, "read at the same place"),
    ]


def test_reads_of_a_first_snapshot_look_at_no_row(shop: Shop):
    """No change came before them, so they stand at the beginning; a restart knows it from the commit."""
    shop.event("r", 1, "read", lsn=150, snapshot="first")
    shop.event("r", 2, "read", lsn=150, snapshot="true")
    shop.merge()
    shop.event("r", 3, "read", lsn=150, snapshot="true")
    shop.event("r", 1, "read by a second try", lsn=160, snapshot="last")
    (second,) = shop.merge()
    partition = shop.recorded()[-1]["topics"][shop.topic]["partitions"]["0"]
    shop.event("u", 3, "of a transaction that was open", lsn=140)
    shop.event("d", 2, lsn=141)
    shop.merge()

    assert second.engine != "spark", second.plan
    assert partition["only_reads"] is True
    assert "only_reads" not in shop.recorded()[-1]["topics"][shop.topic]["partitions"]["0"]
    assert shop.rows() == [(1, "read by a second try"), (3, "of a transaction that was open")]


def test_reads_of_another_topic_for_the_table_are_ordered_by_the_log(shop: Shop, tmp_path: Path):
    """A connector with another prefix: offsets begin again, and say nothing of the rows that are there."""
    for turn in range(5):
        shop.event("u", 1, f"old {turn}", lsn=100 + turn)
        shop.event("u", 2, f"old {turn}", lsn=100 + turn)
    shop.merge()
    shop.topic = f"{shop.topic}.another"
    shop.make_topic()
    another = str(tmp_path / "another")
    shop.event("r", 1, "read", lsn=200, snapshot="first")
    shop.merge(checkpoint=another)
    shop.event("r", 2, "read", lsn=200, snapshot="last")

    shop.merge(checkpoint=another)

    assert shop.rows() == [(1, "read"), (2, "read")]
    assert [commit.get("other_topics") for commit in shop.recorded()] == [None, True, True]


def test_keys_that_move_between_two_snapshots_are_read_again(shop: Shop):
    """To a partition before theirs, in the first batch after the topic has grown and in a later one."""
    shop.widen(2)
    for key in (1, 2):
        shop.event("r", key, "read", lsn=150, partition=1, snapshot="true")
    shop.merge()
    shop.producer.close()
    shop.producer = KafkaProducer(bootstrap_servers=shop.broker.bootstrap)  # the other one knows of two partitions
    shop.widen(3)
    shop.event("r", 1, "read again", lsn=160, partition=0, snapshot="first")
    shop.merge()
    shop.event("r", 2, "read again", lsn=160, partition=0, snapshot="last")

    shop.merge()

    assert shop.rows() == [(1, "read again"), (2, "read again")]


def test_an_old_trace_of_a_key_elsewhere_says_nothing_of_a_read(shop: Shop):
    """A delete that was remembered in another partition long ago is not the newest change of the key."""
    shop.widen(2)
    shop.event("c", 1, "created", lsn=90, partition=1)
    shop.event("d", 1, lsn=100, partition=1)
    shop.merge()
    shop.event("c", 1, "created again", lsn=120)
    shop.merge()
    shop.event("r", 1, "read", lsn=150, snapshot="true")
    shop.merge()
    shop.event("u", 1, "of an open transaction", lsn=140)

    shop.merge()

    assert shop.rows() == [(1, "of an open transaction")]


def test_a_snapshot_delivered_again_changes_nothing(shop: Shop, tmp_path: Path):
    shop.event("r", 1, "read", lsn=150, snapshot="last")
    shop.event("u", 1, "changed", lsn=160)
    shop.event("r", 2, "read", lsn=150, snapshot="last")
    shop.merge()
    before = shop.rows()

    (again,) = shop.merge(checkpoint=str(tmp_path / "another"))

    assert shop.rows() == before == [(1, "changed"), (2, "read")]
    assert (again.events.inserted, again.events.updated, again.events.deleted) == (0, 0, 0)


def test_a_null_value_record_deletes_what_came_before_it(shop: Shop):
    """Without a delete of its key in the batch it speaks of the newest event before it, else of the stored row."""
    for key in (1, 2):
        shop.event("c", key)
    shop.merge()
    shop.send(raw({"id": 1}), None)
    shop.event("c", 3)
    shop.send(raw({"id": 3}), None)
    shop.send(raw({"id": 99}), None)

    (result,) = shop.merge()

    assert shop.rows() == [(2, "n")]
    assert (result.events.received, result.events.deleted) == (3, 1)
    assert shop.recorded()[-1]["topics"][shop.topic]["partitions"]["0"]["records"] == {
        "delete": 2,
        "redundant": 1,
        "upsert": 1,
    }


def test_null_value_records_alone_do_not_say_how_their_keys_are_written(shop: Shop, tmp_path: Path):
    """Beside many records of another format that is not what stops the job."""
    described = {"value_format": {"type": "debezium"}}
    shop.send(raw({"id": 1}), None)

    alone = shop.failure(**described)
    for key in range(1_000):
        shop.producer.send(shop.topic, key=raw({"id": key}), value=raw({"op": "c", "after": {"id": key}}))
    beside = shop.failure(checkpoint=str(tmp_path / "another"), **described)

    assert isinstance(alone, ConfigError)
    assert "[KEY_SCHEMA_UNKNOWN] keys of 1 null-value records" in str(alone)
    assert isinstance(beside, ContractError)
    assert "1000 of 1001 records of batch 0" in str(beside)


PLACEHOLDER = "__debezium_unavailable_value"


def test_a_value_that_an_event_leaves_out_is_taken_from_before(shop: Shop):
    """From the batch's events that carry it, else from the stored row; never across a delete; never the placeholder."""
    for key in (1, 2, 3, 4):
        shop.event("c", key, "stored")
    shop.merge()
    shop.event("u", 1, PLACEHOLDER, row={"price": price(1)})
    shop.event("u", 2, "in the batch")
    shop.event("u", 2, PLACEHOLDER, row={"price": price(2)})
    shop.event("d", 3)
    lost = shop.event("c", 3, PLACEHOLDER)
    shop.event("u", 4, f"{PLACEHOLDER}?")

    (result,) = shop.merge()

    assert shop.rows() == [(1, "stored"), (2, "in the batch"), (4, f"{PLACEHOLDER}?")]
    assert shop.quarantined("offset", "reasons", "raw_key") == [(lost, ["unavailable_value"], raw({"id": 3}))]
    ((value,),) = shop.quarantined("raw_value")
    assert json.loads(value)["after"]["name"] == PLACEHOLDER
    assert result.reasons == {"unavailable_value": 1}
    assert [str(row[1]) for row in shop.rows("id", "price")] == ["0.01", "0.02", "4.00"]


def test_a_value_is_not_taken_from_before_a_record_that_nobody_could_read(shop: Shop):
    """Which may have brought another one: the event waits in quarantine, too. Key 1 over two batches, key 2 in one."""
    unreadable = {"row": {"price": "?"}}
    for key in (1, 2):
        shop.event("c", key, "old")
    shop.merge()
    shop.event("u", 1, "new", **unreadable)
    shop.merge()
    shop.event("u", 1, PLACEHOLDER, row={"price": price(1)})
    shop.event("u", 2, "new", **unreadable)
    shop.event("u", 2, PLACEHOLDER, row={"price": price(2)})
    (result,) = shop.merge()
    after = shop.rows()
    shop.event("u", 1, "newest")
    shop.merge()
    shop.event("u", 1, PLACEHOLDER, row={"price": price(3)})
    shop.merge()

    assert after == [(1, "old"), (2, "old")]
    assert result.reasons == {"undecodable": 1, "unavailable_value": 2}
    assert [(key, name, str(paid)) for key, name, paid in shop.rows("id", "name", "price")] == [
        (1, "newest", "0.03"),
        (2, "old", "2.00"),
    ]


def test_nor_from_under_the_old_key(shop: Shop):
    """The header names the old key in JSON of its own. Key 1: over two batches; 2: in one; 3: read since."""
    shop.widen(2)
    for key in (1, 2, 3, 4):
        shop.event("c", key, f"old {key}")
    unreadable = {"row": {"price": "?"}}
    shop.event("u", 3, "new", **unreadable)
    shop.event("u", 3, "newer")
    shop.merge()
    shop.event("u", 1, "new", **unreadable)
    shop.merge()
    lost = [shop.rename(1, 11, PLACEHOLDER, partition=1)]
    shop.event("u", 2, "new", **unreadable)
    lost.append(shop.rename(2, 12, PLACEHOLDER))
    shop.rename(3, 13, PLACEHOLDER)
    shop.rename(4, 14, PLACEHOLDER)

    (result,) = shop.merge()

    assert shop.rows() == [(13, "newer"), (14, "old 4")]
    assert result.reasons == {"undecodable": 1, "unavailable_value": 2}
    assert sorted(offset for offset, reasons in shop.quarantined() if reasons == ["unavailable_value"]) == sorted(lost)


TWO_TEXTS = {**FORMAT, "columns": {**FORMAT["columns"], "note": "text"}}


def test_a_batch_tried_again_judges_its_events_as_before(shop: Shop, monkeypatch: pytest.MonkeyPatch):
    """What the first try has put into quarantine stands before nothing: else its last event would be nowhere."""
    shop.event("c", 1, "old", row={"note": "old"})
    shop.merge(value_format=TWO_TEXTS)
    bad = [shop.event("u", 1, "new", row={"price": "?", "note": "new"})]
    shop.merge(value_format=TWO_TEXTS)
    bad.append(shop.event("u", 1, "a name", row={"note": PLACEHOLDER}))
    bad.append(shop.event("u", 1, PLACEHOLDER, row={"note": PLACEHOLDER}))
    shop.event("u", 1, PLACEHOLDER, row={"note": "a note"})
    with monkeypatch.context() as dying:
        dying.setattr(committing, "commit", lambda *_: (_ for _ in ()).throw(ConfigError("the process dies here")))
        failure = shop.failure(value_format=TWO_TEXTS)
    between = [offset for offset, _ in shop.quarantined()]

    shop.merge(value_format=TWO_TEXTS)

    assert "the process dies here" in str(failure)
    assert between == bad
    assert shop.rows("id", "name", "note") == [(1, "a name", "a note")]
    assert [offset for offset, _ in shop.quarantined()] == bad


def test_a_record_of_an_earlier_epoch_stands_before_nothing_of_now(shop: Shop):
    shop.widen(2)
    shop.event("c", 1, "old")
    shop.event("u", 1, "new", partition=1, row={"price": "?"})
    shop.merge()
    shop.event("u", 1, "now", lsn=1)
    shop.merge(epoch=1)
    shop.event("u", 1, PLACEHOLDER, lsn=2, partition=1, row={"price": price(7)})

    shop.merge(epoch=1)

    assert [(name, str(paid)) for name, paid in shop.rows("name", "price")] == [("now", "0.07")]


def test_a_late_event_does_not_lend_its_value_to_a_newer_one(shop: Shop):
    """The stored row is newer than the batch's event that carries the column, so its value counts."""
    shop.event("c", 1, "stored", lsn=50)
    shop.merge()
    shop.event("u", 1, "late", lsn=40)
    shop.event("u", 1, PLACEHOLDER, lsn=60)

    shop.merge()

    assert shop.rows() == [(1, "stored")]


def test_a_changed_key_takes_unavailable_values_along(shop: Shop):
    """From the stored row, from the batch, across two changes, over to another partition; never from a deleted row."""
    shop.widen(2)
    for key in (1, 2, 5):
        shop.event("c", key, f"stored {key}")
    shop.merge()
    shop.rename(1, 11, PLACEHOLDER, partition=1)
    shop.event("u", 2, "newer 2")
    shop.rename(2, 12, PLACEHOLDER)
    shop.rename(12, 22, PLACEHOLDER)
    shop.event("u", 22, PLACEHOLDER, row={"price": price(1)})
    shop.event("c", 3, "made here")
    shop.rename(3, 13, PLACEHOLDER)
    shop.event("d", 5)
    gone = shop.event("c", 15, PLACEHOLDER, oldkey=raw({"id": 5}))

    shop.merge()

    assert shop.rows() == [(11, "stored 1"), (13, "made here"), (22, "newer 2")]
    assert shop.quarantined() == [(gone, ["unavailable_value"])]


@pytest.mark.parametrize(("setting", "rows"), [("null", [(1, None)]), ("fail", None)])
def test_a_value_that_nobody_has_follows_the_setting(shop: Shop, setting: str, rows: Any):
    shop.event("c", 1, PLACEHOLDER)

    if rows is None:
        assert isinstance(shop.failure(unavailable=setting), ContractError)
        assert not Path(shop.target).exists()
    else:
        shop.merge(unavailable=setting)
        assert shop.rows() == rows


def with_schema(columns: dict[str, str], row: dict[str, Any], lsn: int) -> bytes:
    fields = [{"field": name, "type": dtype, "optional": name != "id"} for name, dtype in columns.items()]
    blocks = [{"type": "struct", "fields": fields, "optional": True, "field": image} for image in ("before", "after")]
    payload = {"op": "c", "before": None, "after": row, "source": {"lsn": lsn, "ts_ms": 1, "snapshot": "false"}}
    block = {"schema": {"type": "struct", "fields": blocks}, "payload": payload}
    return json.dumps(block, separators=(",", ":")).encode()


def test_a_column_that_appears_half_way_is_added_and_earlier_rows_keep_null(shop: Shop):
    old, new = {"id": "int64", "n": "string"}, {"id": "int64", "n": "string", "more": "int32"}
    wanted = {"value_format": {"type": "debezium"}}
    shop.send(raw({"id": 1}), with_schema(old, {"id": 1, "n": "a"}, 1))
    shop.merge(**wanted)
    shop.send(raw({"id": 2}), with_schema(old, {"id": 2, "n": "b"}, 2))
    shop.send(raw({"id": 3}), with_schema(new, {"id": 3, "n": "c", "more": 3}, 3))
    shop.send(raw({"id": 4}), with_schema(old, {"id": 4, "n": "d"}, 4))

    shop.merge(**wanted)

    assert shop.rows("id", "n", "more") == [(1, "a", None), (2, "b", None), (3, "c", 3), (4, "d", None)]


def test_a_type_that_the_target_cannot_hold_stops_the_job_before_writing(shop: Shop):
    wanted = {"value_format": {"type": "debezium"}}
    shop.send(raw({"id": 1}), with_schema({"id": "int64", "n": "int32"}, {"id": 1, "n": 1}, 1))
    shop.merge(**wanted)
    shop.send(raw({"id": 1}), with_schema({"id": "int64", "n": "int64"}, {"id": 1, "n": 2**40}, 2))

    result = shop.run(**wanted)

    assert result.verdict is Verdict.CONFIGURATION
    assert "column 'n'" in str(result.failures["orders"])
    assert "is int, new events have bigint" in str(result.failures["orders"])
    assert shop.rows("id", "n") == [(1, 1)]


def test_a_truncate_stops_the_job_unless_told_otherwise(shop: Shop):
    shop.event("c", 1)
    offset = shop.send(None, raw({"op": "t", "source": {"lsn": 1}}))

    result = shop.run()

    assert result.verdict is Verdict.DATA
    assert f"partition 0, offset {offset} truncates the source table" in str(result.failures["orders"])
    assert not Path(shop.target).exists()
    shop.merge(on_truncate="ignore")
    assert shop.rows() == [(1, "n")]


def test_a_source_that_fell_back_stops_the_job_until_the_epoch_says_so(shop: Shop):
    shop.event("c", 1, "before", lsn=2 * 10**9)
    shop.merge()
    shop.event("c", 1, "restored", lsn=1_000)

    result = shop.run()

    assert result.verdict is Verdict.DATA
    assert "[POSITION_REGRESSED]" in str(result.failures["orders"])
    assert "went back from position 2000000000 to 1000; " in str(result.failures["orders"])
    shop.merge(epoch=1)
    assert shop.rows() == [(1, "restored")]
    assert isinstance(shop.failure(checkpoint=f"{shop.checkpoint}2"), ConfigError)


def sequence(last_commit: int | None, lsn: int) -> str:
    return json.dumps([None if last_commit is None else str(last_commit), str(lsn)])


@pytest.mark.parametrize("odd", [(), (b"{",)])
def test_a_long_transaction_is_told_from_a_restored_source_by_the_commit_before_it(shop: Shop, odd: tuple[bytes, ...]):
    """Its changes come at its commit, with positions of when they were written; counted in the driver or by Spark."""
    far = 2**40
    shop.event("c", 1, "short", lsn=far, sequence=sequence(far - 10, far))
    shop.merge()
    shop.event("c", 2, "long", lsn=1_000, sequence=sequence(far + 5, 1_000))
    for value in odd:
        shop.send(raw({"id": 3}), value)
    shop.merge()
    between = shop.rows()
    shop.event("u", 1, "restored", lsn=2_000, sequence=sequence(1_500, 2_000))
    for value in odd:
        shop.send(raw({"id": 3}), value)

    result = shop.run()

    assert between == shop.rows() == [(1, "short"), (2, "long")]
    assert shop.recorded()[-1]["topics"][shop.topic]["partitions"]["0"]["position"] == far + 5
    assert result.verdict is Verdict.DATA
    assert f"went back from position {far + 5} to 2000; " in str(result.failures["orders"])


def test_a_long_transaction_without_a_word_of_the_commit_before_it_wants_a_higher_limit(shop: Shop):
    shop.event("c", 1, "short", lsn=2**40)
    shop.merge()
    shop.event("c", 2, "long", lsn=1_000)

    failure = shop.failure()
    shop.merge(limits={"max_position_regression": "2048 GiB"})

    assert "raise max_position_regression" in str(failure)
    assert shop.rows() == [(1, "short"), (2, "long")]


def test_a_transaction_goes_on_behind_what_an_older_version_has_recorded_of_it(shop: Shop):
    """That is the highest position that an event had itself, as of events that do not name the commit before them."""
    far = 2**40
    shop.event("c", 1, "its first changes", lsn=far)
    shop.merge()
    shop.event("c", 2, "the next", lsn=far + 1, sequence=sequence(5, far + 1))

    shop.merge()

    assert shop.rows() == [(1, "its first changes"), (2, "the next")]


def test_changes_of_a_transaction_that_a_first_snapshot_has_not_seen_are_no_restored_source(shop: Shop):
    """They lie before the log's end that reads stand at, by as much as the server wrote while it was open."""
    far = 2**40
    shop.event("r", 1, "read", lsn=far, snapshot="first", sequence=sequence(None, far))
    shop.merge()
    shop.event("r", 2, "read", lsn=far, snapshot="last", sequence=sequence(None, far))
    shop.event("u", 1, "written before the read", lsn=1_000, sequence=sequence(None, 1_000))
    shop.merge()
    shop.event("u", 2, "committed after it", lsn=1_001, sequence=sequence(None, 1_001))
    shop.merge()

    assert shop.rows() == [(1, "written before the read"), (2, "committed after it")]


def test_mostly_undecodable_records_stop_the_job_before_writing(shop: Shop):
    for _ in range(600):
        shop.producer.send(shop.topic, key=b"k", value=b"no")
    for key in range(400):
        shop.producer.send(shop.topic, key=raw({"id": key}), value=raw({"op": "m"}))

    result = shop.run()

    assert result.verdict is Verdict.DATA
    assert "600 of 1000 records of batch 0" in str(result.failures["orders"])
    assert "offset 0: not JSON" in str(result.failures["orders"])
    assert shop.quarantined() == []


def test_offsets_that_the_broker_has_removed_stop_the_job_or_are_recorded(shop: Shop):
    for key in (1, 2):
        shop.event("c", key)
    shop.merge()
    for key in (3, 4, 5):
        shop.event("c", key)
    place = TopicPartition(shop.topic, 0)
    shop.admin.delete_records({place: 4})

    result = shop.run()

    assert result.verdict is Verdict.DATA
    assert f"topic {shop.topic!r}, partition 0, offsets 2 to 3" in str(result.failures["orders"])
    shop.merge(on_data_loss="continue")
    assert [key for key, _ in shop.rows()] == [1, 2, 5]
    assert shop.recorded()[-1]["topics"][shop.topic]["partitions"]["0"]["lost"] == [2, 4]


def test_a_topic_that_was_made_anew_needs_a_new_checkpoint_and_epoch(shop: Shop):
    shop.event("c", 1, "before", lsn=5_000)
    shop.merge()
    shop.admin.delete_topics([shop.topic])
    services.wait_until(lambda: shop.topic not in shop.admin.list_topics(), "the topic is gone")
    shop.make_topic()
    shop.event("c", 1, "after", lsn=10)
    shop.event("c", 2, "after", lsn=11)

    result = shop.run()

    assert result.verdict is Verdict.DATA
    assert "[TOPIC_RECREATED]" in str(result.failures["orders"])
    assert "use a new checkpoint and set 'epoch: 1'" in str(result.failures["orders"])
    shop.merge(checkpoint=f"{shop.checkpoint}2", epoch=1)
    assert shop.rows() == [(1, "after"), (2, "after")]


def test_merged_offsets_are_shown_to_lag_tools(shop: Shop):
    shop.event("c", 1)
    shop.merge()

    offsets = shop.admin.list_group_offsets({"stream-merge-orders": None})

    assert offsets["stream-merge-orders"][TopicPartition(shop.topic, 0)].offset == 1


def test_a_starting_position_beside_a_checkpoint_is_an_error(shop: Shop):
    shop.event("c", 1)
    shop.event("c", 2)
    shop.merge(start={0: 1})

    assert shop.rows() == [(2, "n")]
    assert "has a start, but its checkpoint" in str(shop.failure(start={0: 0}))


def test_keys_are_read_as_their_own_format_says(shop: Shop):
    """Text and bare values of the one key column; a null value deletes by them."""
    columns = {"id": "bigint", "name": "string"}
    wanted = {"value_format": {"type": "json", "columns": columns}, "key_format": {"type": "text", "holds": "integer"}}
    shop.send(b"1", raw({"name": "by its key"}))
    shop.send(b"2", raw({"name": "gone"}))
    shop.send(b"2", None)
    bad = shop.send(b"two", None)

    shop.merge(**wanted)

    assert shop.rows() == [(1, "by its key")]
    assert shop.quarantined("offset", "error") == [(bad, "not JSON at character 0: Expecting value")]


def test_a_topic_of_facts_fills_a_table_that_only_grows(shop: Shop):
    """The first event of a key stays; a delete, which such a table cannot follow, stops the job and nothing is lost."""
    columns = {"id": "bigint", "name": "string"}
    wanted = {"value_format": {"type": "json", "columns": columns}, "shape": "insert-only"}
    shop.send(raw({"id": 1}), raw({"id": 1, "name": "first"}))
    shop.merge(**wanted)
    shop.send(raw({"id": 1}), raw({"id": 1, "name": "again"}))
    shop.send(raw({"id": 2}), raw({"id": 2, "name": "second"}))
    shop.merge(**wanted)
    shop.send(raw({"id": 3}), raw({"id": 3, "name": "third"}))
    shop.send(raw({"id": 1}), None)

    failure = str(shop.failure(**wanted))

    assert "1 of 2 events of batch 2" in failure
    assert "are deletes, and its shape deletes nothing" in failure
    assert shop.rows() == [(1, "first"), (2, "second")]


def test_a_topic_is_merged_by_clauses_of_one_s_own(shop: Shop):
    """A delete is ``s.`$delete` ``; where clauses do not ask for it, one stops the job before it becomes a row."""
    columns = {"id": "bigint", "name": "string", "price": "int"}
    clauses: list[dict[str, Any]] = [
        {"when": "matched", "condition": "s.price < t.price", "then": "update", "set": {"price": "s.price"}},
        {"when": "not_matched", "then": "insert"},
    ]
    wanted = {"value_format": {"type": "json", "columns": columns}, "shape": {"clauses": clauses}}
    shop.send(raw({"id": 1}), raw({"id": 1, "name": "one", "price": 5}))
    shop.send(raw({"id": 2}), raw({"id": 2, "name": "two", "price": 5}))
    shop.merge(**wanted)
    shop.send(raw({"id": 1}), raw({"id": 1, "name": "x", "price": 4}))
    shop.send(raw({"id": 2}), raw({"id": 2, "name": "x", "price": 6}))
    shop.merge(**wanted)
    assert shop.rows("id", "name", "price") == [(1, "one", 4), (2, "two", 5)]
    shop.send(raw({"id": 1}), None)

    assert "1 of 1 events of batch 2" in (failure := str(shop.failure(**wanted)))
    assert "which a clause would write as rows; add NOT s.`$delete` to each insert" in failure

    clauses.insert(0, {"when": "matched", "condition": "s.`$delete`", "then": "delete"})
    assert "which a clause would write as rows" in str(shop.failure(**wanted))
    clauses[-1]["condition"] = "NOT s.`$delete`"
    shop.merge(**wanted)
    assert shop.rows("id", "name", "price") == [(2, "two", 5)]


def test_several_topics_fill_one_table_where_a_key_column_tells_them_apart(shop: Shop):
    other = f"{shop.topic}.other"
    shop.admin.create_topics({other: {"num_partitions": 1, "replication_factor": 1}})
    shop.event("c", 1, "first")
    shop.event("c", 2, "gone")
    shop.send(raw({"id": 2}), None)
    value = {"op": "c", "after": {"id": 1, "price": price(1), "name": "other"}, "source": {"lsn": 1, "ts_ms": 1}}
    shop.producer.send(other, key=raw({"id": 1}), value=raw(value)).get(30)

    shop.merge(topic=[shop.topic, other], keys=["source_topic", "id"], topic_column="source_topic")

    assert shop.rows("source_topic", "id", "name") == [(shop.topic, 1, "first"), (other, 1, "other")]


def test_gaps_are_an_alarm_where_nothing_explains_them(shop: Shop):
    """Transactions leave markers behind, which the job can only know of by being told."""
    writer = KafkaProducer(bootstrap_servers=shop.broker.bootstrap, transactional_id=shop.topic)
    writer.init_transactions()
    row = {"id": 1, "price": price(1), "name": "n"}
    registry = CollectorRegistry()
    series = "stream_merge_topic_unexpected_gaps_total"
    labels = {"query": "orders", "target": "orders", "topic": shop.topic}
    for lsn, told, alarms in ((1, True, 0), (2, False, 1)):
        writer.begin_transaction()
        value = {"op": "u", "after": row, "source": {"lsn": lsn, "ts_ms": 1}}
        writer.send(shop.topic, key=raw({"id": 1}), value=raw(value), partition=0)
        writer.commit_transaction()
        settings = shop.settings(transactional=told)
        result = run(settings, shop.spark, once=True, metrics=MergeMetrics(registry))
        assert result.failures == {}
        assert registry.get_sample_value(series, labels) == alarms
        registry = CollectorRegistry()
    writer.close()


def test_the_commit_names_the_connector(shop: Shop):
    shop.event("c", 1)

    shop.merge()

    assert shop.recorded()[0]["connector"] == "shop"


@pytest.mark.parametrize("is_declared", [True, False])
def test_the_first_commit_accounts_for_the_batches_before_it_that_changed_nothing(shop: Shop, is_declared: bool):
    """With columns the sink was called for them; without any it could not be, as no record had told a row's columns."""
    wanted = {"limits": {"max_events_per_batch": 2}, **({} if is_declared else {"value_format": {"type": "debezium"}})}
    for n in range(4):
        shop.send(raw({"id": n}), raw({"ts_ms": n}))
    shop.send(raw({"id": 1}), with_schema({"id": "int64", "name": "string"}, {"id": 1, "name": "a"}, 1))

    shop.merge(**wanted)

    (commit,) = shop.recorded()
    (found,) = (found for found in commit["topics"][shop.topic]["partitions"].values() if found["range"][1])
    assert found["range"] == [0, 5]
    assert found["records"] == {"filtered": 4, "upsert": 1}
    assert shop.rows("id", "name") == [(1, "a")]


def test_a_topic_that_never_existed_is_not_waited_for_by_once(shop: Shop):
    """A typing error, in cron: as a broker that is away it would take ten minutes, and exit code 4."""
    error = shop.failure(topic=f"no_{shop.topic}")

    assert isinstance(error, ConfigError)
    assert str(error).startswith(f"[TOPIC_NOT_FOUND] query 'orders' reads topic(s) ['no_{shop.topic}'], which the")


def test_other_keys_are_refused_though_nothing_is_new(shop: Shop):
    """The sink would say so at the next batch; until then the job would run and say nothing."""
    shop.event("c", 1)
    shop.merge()

    error = shop.failure(keys="name")

    assert isinstance(error, ConfigError)
    assert "is merged by keys ['id'], now keys=['name']; use the recorded keys" in str(error)
    said = [f.said for f in check(shop.settings(keys="name"), jars_in=None) if f.about == "table" and f.is_problem]
    assert said == [str(error).replace("now keys=", "now queries.orders.keys: ")]


def test_check_sees_what_lies_at_the_target(shop: Shop):
    shop.event("c", 1)
    shop.producer.flush()
    Path(shop.target).mkdir()
    (Path(shop.target) / "part-0.parquet").touch()

    found = [f.said for f in check(shop.settings(), jars_in=None) if f.is_problem]

    assert found == [
        f"[NOT_A_DELTA_TABLE] target {shop.target!r} exists but is not a Delta table; convert it (CONVERT TO DELTA) or"
        " choose another"
    ]


def test_a_name_in_a_catalog_that_forgets_is_refused(shop: Shop):
    """The table would go with the process, and the checkpoint stay."""
    shop.event("c", 1)

    error = shop.failure(target="orders")

    assert isinstance(error, ConfigError)
    assert "is lost when this process ends; use a path ('./orders')" in str(error)
