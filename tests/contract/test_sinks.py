"""One stream, many tables: every event reaches its table or a quarantine, whatever breaks."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame, GroupedData, SparkSession
from pyspark.sql import functions as F
from traces import jobs_so_far, transactions

from stream_merge import (
    CommitStateUnknownError,
    ConfigError,
    ContractError,
    MergeFailedError,
    MergeMetrics,
    MergeSink,
    MergeSinks,
    RoutedMergeError,
)
from stream_merge.engines.memory import reservations
from stream_merge.merge import calls
from stream_merge.merge.call import BatchCall
from stream_merge.merge.calls import Calls
from stream_merge.model.source_batch import Intake
from stream_merge.model.table_ref import TableRef
from stream_merge.testing import batch, target_rows

SCHEMA = "source string, id bigint, lsn bigint, op string, name string"
TABLES = ("customers", "orders", "refunds")


class Fleet:
    """Three tables behind one `MergeSinks`, and the stream that feeds them."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark = spark
        self.folder = folder
        self.registry = CollectorRegistry()
        self.metrics = MergeMetrics(self.registry)
        self.engine = "auto"
        self.quarantine: str | None = None

    def path(self, table: str) -> str:
        return str(self.folder / table)

    def sink(self, table: str, **settings: Any) -> MergeSink:
        wanted = {"app_id": "fleet", "metrics": self.metrics, "except_column_list": ["op", "source"], **settings}
        wanted |= {"engine": self.engine, "quarantine_target": self.quarantine}
        return MergeSink(target=self.path(table), keys="id", sequence_by="lsn", apply_as_deletes="op = 'd'", **wanted)

    def sinks(self, each: Mapping[str, MergeSink] | None = None, **settings: Any) -> MergeSinks:
        """New objects, as after a restart; with these sinks in place of one for each table."""
        wanted: dict[str, Any] = {"route_by": "source", "app_id": "fleet", "metrics": self.metrics, **settings}
        return MergeSinks({**(each or {table: self.sink(table) for table in TABLES})}, **wanted)

    def tolerant(self) -> MergeSinks:
        return self.sinks(on_failure="quarantine", quarantine_target=self.path("unrouted"))

    def batch(self, *events: tuple[Any, ...]) -> DataFrame:
        return batch(self.spark, SCHEMA, *events)

    def rows(self, table: str) -> list[tuple[Any, ...]]:
        return target_rows(self.spark, self.path(table))

    def quarantined(self, table: str) -> list[tuple[list[str], int, dict[str, Any]]]:
        """(reasons, batch id, event) of a quarantine table."""
        found = target_rows(self.spark, table, "reasons", "batch_id", "event")
        return [(reasons, batch_id, json.loads(event)) for reasons, batch_id, event in found]

    def break_table(self, table: str) -> None:
        """Let the table refuse every row that is named "bad"."""
        self.spark.sql(f"ALTER TABLE delta.`{self.path(table)}` ADD CONSTRAINT no_bad CHECK (name <> 'bad')")

    def mend(self, table: str) -> None:
        self.spark.sql(f"ALTER TABLE delta.`{self.path(table)}` DROP CONSTRAINT no_bad")

    def events_total(self, target: str, fate: str) -> float | None:
        labels = {"query": "direct", "target": target, "fate": fate}
        return self.registry.get_sample_value("stream_merge_events_total", labels)


def event(table: str | None, key: int, name: str = "good", *, lsn: int = 1, op: str = "u") -> tuple[Any, ...]:
    return (table, key, lsn, op, name)


@pytest.fixture
def fleet(spark: SparkSession, tmp_path: Path) -> Iterator[Fleet]:
    """Each table holds a row with key 1 from batch 0. In the end no merge holds memory, whatever has failed."""
    fleet = Fleet(spark, tmp_path)
    fleet.sinks()(fleet.batch(*(event(table, 1) for table in TABLES)), 0)
    yield fleet
    assert reservations.promised == 0


def test_each_table_gets_its_events_and_keeps_its_own_ledger_and_ids(fleet: Fleet):
    sinks = fleet.sinks()

    sinks(
        fleet.batch(
            event("orders", 1, "newer", lsn=3),
            event("orders", 1, "older", lsn=2),
            event("customers", 1, lsn=2, op="d"),
            event("customers", 2),
            event("orders", 2),
        ),
        1,
    )

    assert fleet.rows("orders") == [(1, 3, "newer"), (2, 1, "good")]
    assert fleet.rows("customers") == [(2, 1, "good")]
    assert fleet.rows("refunds") == [(1, 1, "good")]
    counts = {route: result.events for route, result in sinks.last_results.items()}
    assert {route: (e.received, e.collapsed, e.inserted, e.updated, e.deleted) for route, e in counts.items()} == {
        "orders": (3, 1, 1, 1, 0),
        "customers": (2, 0, 1, 0, 1),
    }
    assert transactions(fleet.path("orders"))[-1] == [("fleet/target", 1)]
    assert fleet.events_total("orders", "updated") == 1
    assert fleet.events_total("refunds", "updated") == 0


def test_the_source_is_evaluated_once_and_each_table_costs_one_more_job(fleet: Fleet):
    """Natively; where Spark merges, its jobs come on top."""
    evaluations = fleet.spark.sparkContext.accumulator(0)

    def counted(name: str) -> str:
        evaluations.add(1)
        return name

    source = fleet.batch(*(event(table, key) for table in TABLES for key in (5, 6)))
    fleet.engine = "driver"
    sinks = fleet.sinks()
    before = jobs_so_far(fleet.spark)

    sinks(source.withColumn("name", F.udf(counted, useArrow=False)("name")), 1)

    assert evaluations.value == 6
    assert jobs_so_far(fleet.spark) - before == 1 + 3


def test_a_failing_table_fails_the_batch_and_a_replay_finds_the_others_done(fleet: Fleet):
    fleet.break_table("orders")
    events = fleet.batch(event("orders", 2, "bad"), event("customers", 2), event("refunds", 2))

    with pytest.raises(RoutedMergeError, match=r"1 of 3 tables failed in batch 1.*'orders'.*no_bad") as raised:
        fleet.sinks()(events, 1)

    assert list(raised.value.failures) == ["orders"]
    assert fleet.rows("customers") == [(1, 1, "good"), (2, 1, "good")]
    assert fleet.rows("orders") == [(1, 1, "good")]

    fleet.mend("orders")
    again = fleet.sinks()
    again(events, 1)

    assert {route: result.outcome for route, result in again.last_results.items()} == {
        "customers": "skipped_duplicate",
        "orders": "committed",
        "refunds": "skipped_duplicate",
    }
    assert fleet.rows("orders") == [(1, 1, "good"), (2, 1, "bad")]


def test_by_policy_the_events_of_a_failing_table_are_quarantined_once_and_not_merged_later(fleet: Fleet):
    fleet.break_table("orders")
    events = fleet.batch(event("orders", 2, "bad"), event("orders", 3), event("customers", 2))
    sinks = fleet.tolerant()

    sinks(events, 1)

    assert list(sinks.last_failures) == ["orders"]
    assert fleet.rows("customers") == [(1, 1, "good"), (2, 1, "good")]
    expected = [
        (["target_failed"], 1, {"source": "orders", "id": 2, "lsn": 1, "op": "u", "name": "bad"}),
        (["target_failed"], 1, {"source": "orders", "id": 3, "lsn": 1, "op": "u", "name": "good"}),
    ]
    quarantine = TableRef(fleet.path("orders")).quarantine
    assert fleet.quarantined(quarantine) == expected
    assert fleet.events_total("orders", "quarantined") == 2

    fleet.mend("orders")
    again = fleet.tolerant()
    again(events, 1)

    assert set(again.last_results) == {"customers"}
    assert fleet.quarantined(quarantine) == expected
    assert fleet.rows("orders") == [(1, 1, "good")]

    again(fleet.batch(event("orders", 4)), 2)
    assert fleet.rows("orders") == [(1, 1, "good"), (4, 1, "good")]


def test_two_failing_tables_may_share_a_quarantine(fleet: Fleet):
    """Under one transaction id Delta would drop the second one's events as repeated."""
    fleet.quarantine = fleet.path("shared")
    for table in ("orders", "refunds"):
        fleet.break_table(table)

    for _ in range(2):
        fleet.tolerant()(fleet.batch(event("orders", 2, "bad"), event("refunds", 3, "bad"), event("customers", 4)), 1)

    assert [(e["source"], e["id"]) for _, _, e in fleet.quarantined(fleet.quarantine)] == [
        ("orders", 2),
        ("refunds", 3),
    ]
    assert fleet.rows("customers") == [(1, 1, "good"), (4, 1, "good")]


def test_events_that_are_merged_already_are_not_quarantined(fleet: Fleet, monkeypatch: pytest.MonkeyPatch):
    """What failed came after the commit; the replay does what was left undone."""
    events = fleet.batch(event("orders", 2), event("customers", 2))
    note_target = calls.note_target

    def failing(call: BatchCall, *args: Any) -> None:
        if call.spec.label == "orders":
            msg = "after the commit"
            raise MergeFailedError(msg)
        note_target(call, *args)

    with monkeypatch.context() as patch:
        patch.setattr(calls, "note_target", failing)
        with pytest.raises(RoutedMergeError, match="after the commit"):
            fleet.tolerant()(events, 1)
        with pytest.raises(RoutedMergeError, match="after the commit"):
            fleet.tolerant()(events, 1)

    again = fleet.tolerant()
    again(events, 1)
    assert {result.outcome for result in again.last_results.values()} == {"skipped_duplicate"}
    assert fleet.rows("orders") == [(1, 1, "good"), (2, 1, "good")]
    assert not Path(TableRef(fleet.path("orders")).quarantine).exists()


def test_a_cancelled_job_is_no_reason_to_quarantine(fleet: Fleet):
    """Ctrl-C and a stop of the query cancel the jobs of healthy tables."""
    context = fleet.spark.sparkContext

    # Not in Python: beside Spark 3.5 a worker that was cancelled is given to the next job, with its socket closed.
    asleep = F.expr("id + length(java_method('java.lang.Thread', 'sleep', 60000L))")
    slow = fleet.batch(event("orders", 2)).withColumn("id", asleep)
    sinks = fleet.tolerant()
    sink = fleet.sink("orders")
    context.setJobGroup("doomed", "a batch that is cancelled", interruptOnCancel=True)
    killer = threading.Timer(5, lambda: context._jsc.sc().cancelJobGroup("doomed"))
    killer.start()
    try:
        with pytest.raises(Py4JJavaError) as raised:
            sink(slow, 1)
    finally:
        killer.join()
        context._jsc.sc().clearJobGroup()

    routed = fleet.batch(event("orders", 2))
    assert sinks._quarantine_failed(routed, 1, "orders", raised.value) is raised.value
    assert not Path(TableRef(fleet.path("orders")).quarantine).exists()


def test_an_older_batch_is_quarantined_too(fleet: Fleet):
    """Delta drops an append whose transaction id is lower than the recorded one: it must not be given one."""
    fleet.break_table("orders")
    for batch_id in (7, 3):
        fleet.tolerant()(fleet.batch(event("orders", batch_id, "bad")), batch_id)

    quarantine = TableRef(fleet.path("orders")).quarantine
    assert sorted(batch_id for _, batch_id, _ in fleet.quarantined(quarantine)) == [3, 7]


def test_events_whose_commit_nobody_knows_are_not_quarantined(fleet: Fleet, monkeypatch: pytest.MonkeyPatch):
    sinks = fleet.tolerant()
    merge = Calls.merge

    def lost(self: Calls, batch_df: DataFrame, batch_id: int, intake: Intake) -> None:
        merge(self, batch_df, batch_id, intake)
        if self.spec.label == "orders":
            msg = "no answer"
            raise CommitStateUnknownError(msg, target=self.spec.target, batch_id=batch_id)

    with monkeypatch.context() as patch:
        patch.setattr(Calls, "merge", lost)
        with pytest.raises(RoutedMergeError, match="no answer"):
            sinks(fleet.batch(event("orders", 2), event("customers", 2)), 1)

    assert not Path(TableRef(fleet.path("orders")).quarantine).exists()


STRAYS = (event("invoices", 1), event(None, 2), event("orders", 2))


def test_events_without_a_sink_fail_the_batch_before_anything_is_written(fleet: Fleet):
    with pytest.raises(ContractError, match=r"2 events of batch 1 have a route without a sink") as raised:
        fleet.sinks()(fleet.batch(*STRAYS), 1)

    assert raised.value.reasons == {"unknown_route": 2}
    assert "'invoices'" in str(raised.value)
    assert "None" in str(raised.value)
    assert fleet.rows("orders") == [(1, 1, "good")]
    labels = {"query": "direct", "target": "unrouted", "outcome": "failed"}
    assert fleet.registry.get_sample_value("stream_merge_batches_total", labels) == 1


def test_the_evaluation_of_the_source_belongs_to_the_calls_of_all_its_tables(fleet: Fleet):
    """Else a stream that cannot keep up would seem to be idle while it reads."""
    sinks = fleet.sinks()

    sinks(fleet.batch(*(event(table, 2) for table in TABLES)), 1)

    assert len(sinks.last_results) == len(TABLES)
    assert all(result.seconds["read"] > 0 for result in sinks.last_results.values())


def test_by_policy_events_without_a_sink_are_quarantined_once(fleet: Fleet):
    for _ in range(2):
        fleet.tolerant()(fleet.batch(*STRAYS), 1)

    assert fleet.rows("orders") == [(1, 1, "good"), (2, 1, "good")]
    assert fleet.quarantined(fleet.path("unrouted")) == [
        (["unknown_route"], 1, {"source": "invoices", "id": 1, "lsn": 1, "op": "u", "name": "good"}),
        (["unknown_route"], 1, {"source": None, "id": 2, "lsn": 1, "op": "u", "name": "good"}),
    ]
    assert fleet.events_total("unrouted", "quarantined") == 2


def test_what_a_batch_that_was_set_aside_has_beyond_that_is_set_aside_too(fleet: Fleet):
    """It comes again by a stream or settings that were repaired since; the third time it has nothing new."""
    fleet.break_table("orders")
    first = (event("orders", 2, "bad"), event("orders", 3), event("invoices", 1))
    beyond = (event("orders", 4), event("refunds", 5), event("payments", 6))
    fleet.tolerant()(fleet.batch(*first), 1)
    fleet.mend("orders")
    for _ in range(2):
        fleet.tolerant()(fleet.batch(*first, *beyond), 1)

    kept = fleet.quarantined(TableRef(fleet.path("orders")).quarantine)
    assert sorted((reasons, found["id"]) for reasons, _, found in kept) == [
        (["target_failed"], 2),
        (["target_failed"], 3),
        (["target_failed"], 4),
    ]
    strays = fleet.quarantined(fleet.path("unrouted"))
    assert sorted((reasons, found["id"]) for reasons, _, found in strays) == [
        (["unknown_route"], 1),
        (["unknown_route"], 6),
    ]
    assert (fleet.rows("orders"), fleet.rows("refunds")) == ([(1, 1, "good")], [(1, 1, "good"), (5, 1, "good")])
    assert (fleet.events_total("orders", "quarantined"), fleet.events_total("unrouted", "quarantined")) == (3, 2)


@pytest.mark.parametrize(("route", "label"), [("orders", "orders"), ("invoices", "unrouted")])
def test_a_count_that_fails_leaves_no_event_in_quarantine_uncounted(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, route: str, label: str
):
    """The batch comes again, and has nothing beyond what it had written."""
    fleet.break_table("orders")
    events = fleet.batch(event(route, 2, "bad"))

    def lost(_: GroupedData) -> DataFrame:
        msg = "the job was lost"
        raise RuntimeError(msg)

    with monkeypatch.context() as patch:
        patch.setattr(GroupedData, "count", lost)
        with pytest.raises((RuntimeError, RoutedMergeError), match="the job was lost"):
            fleet.tolerant()(events, 1)
    for _ in range(2):
        fleet.tolerant()(events, 1)

    table = fleet.path("unrouted") if label == "unrouted" else TableRef(fleet.path(label)).quarantine
    assert [found["id"] for _, _, found in fleet.quarantined(table)] == [2]
    assert fleet.events_total(label, "quarantined") == 1


def test_two_routers_of_one_batch_share_a_quarantine_under_names_of_their_own(fleet: Fleet):
    shared = {"on_failure": "quarantine", "quarantine_target": fleet.path("unrouted")}
    for name in ("by source", "by region"):
        fleet.sinks(name=name, **shared)(fleet.batch(event("invoices", 2)), 1)

    assert len(fleet.quarantined(fleet.path("unrouted"))) == 2


def test_a_quarantine_that_cannot_be_written_fails_the_batch(fleet: Fleet):
    sinks = fleet.tolerant()
    sinks(fleet.batch(event("orders", 2)), 1)
    fleet.break_table("orders")
    fleet.spark.range(1).write.format("delta").save(TableRef(fleet.path("orders")).quarantine)

    with pytest.raises(RoutedMergeError, match="__stream_merge_quarantine_orders") as raised:
        sinks(fleet.batch(event("orders", 3, "bad"), event("customers", 2)), 2)

    assert "no_bad" in "".join(raised.value.failures["orders"].__notes__)


@pytest.mark.smoke
def test_a_streaming_query_feeds_all_tables_and_a_restart_repeats_nothing(fleet: Fleet, tmp_path: Path):
    """The ids belong to the query, which the sinks' own threads have to find out."""
    source = tmp_path / "source"
    for key in (2, 3):
        fleet.batch(*(event(table, key) for table in TABLES)).coalesce(1).write.mode("append").json(str(source))

    def query(each: Callable[[DataFrame, int], None]) -> None:
        stream = fleet.spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(str(source))
        writer = stream.writeStream.foreachBatch(each).option("checkpointLocation", str(tmp_path / "checkpoint"))
        running = writer.queryName("fleet").trigger(availableNow=True).start()
        running.awaitTermination()

    query(fleet.sinks())
    ids = [recorded for version in transactions(fleet.path("orders")) for recorded in version][1:]
    query_id = json.loads((tmp_path / "checkpoint" / "metadata").read_text())["id"]
    assert ids == [(f"fleet/{query_id}/target", 0), (f"fleet/{query_id}/target", 1)]
    for table in TABLES:
        assert [key for key, *_ in fleet.rows(table)] == [1, 2, 3]

    for of_the_last_batch in ("1", ".1.crc"):
        (tmp_path / "checkpoint" / "commits" / of_the_last_batch).unlink()
    again = fleet.sinks()
    query(again)
    assert {result.outcome for result in again.last_results.values()} == {"skipped_duplicate"}


def test_two_routers_of_one_query_may_share_a_route_that_comes_later(fleet: Fleet, tmp_path: Path):
    """Needs a query: its checkpoint says where events went, and those of a route may go to several tables."""
    source = tmp_path / "source"
    for routes in (["a"], ["a", "b"]):
        fleet.batch(*(event(route, 2) for route in routes)).coalesce(1).write.mode("append").json(str(source))
    routers = [
        fleet.sinks({route: fleet.sink(f"{route}_{copy}", app_id=None) for route in ("a", "b")}, app_id=None)
        for copy in ("here", "there")
    ]

    def both(batch_df: DataFrame, batch_id: int) -> None:
        for router in routers:
            router(batch_df, batch_id)

    stream = fleet.spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(str(source))
    writer = stream.writeStream.foreachBatch(both).option("checkpointLocation", str(tmp_path / "checkpoint"))
    writer.trigger(availableNow=True).start().awaitTermination()

    assert [fleet.rows(f"b_{copy}") for copy in ("here", "there")] == [[(2, 1, "good")]] * 2


def test_tables_can_be_named_by_numbers_and_routed_by_an_expression(fleet: Fleet):
    sinks = MergeSinks(
        {0: fleet.sink("customers"), 1: fleet.sink("orders")}, route_by=F.col("id") % 2, app_id="fleet", parallel=1
    )

    sinks(fleet.batch(event("x", 2), event("x", 3)), 1)

    assert [key for key, *_ in fleet.rows("customers")] == [1, 2]
    assert [key for key, *_ in fleet.rows("orders")] == [1, 3]


def test_two_names_of_one_table_are_refused(fleet: Fleet, tmp_path: Path):
    """One sink would take the other's transaction id for its own and skip its events."""
    (tmp_path / "elsewhere").symlink_to(tmp_path)
    twice = {"a": fleet.sink("orders", name="x"), "b": fleet.sink("elsewhere/orders", name="y")}

    with pytest.raises(ConfigError, match="have the same table"):
        MergeSinks(twice, route_by="source")(fleet.batch(event("a", 2)), 1)


def test_a_name_and_the_path_of_a_table_that_is_not_there_yet_are_one(fleet: Fleet, tmp_path: Path):
    """Delta makes a table of Spark's own catalog in the folder of its schema."""
    spark, name = fleet.spark, "routed_once"
    spark.sql(f"CREATE SCHEMA {name} LOCATION '{tmp_path}/in%20it'")
    place = f"{tmp_path}/in%20it/t"
    told = {"keys": "id", "sequence_by": "lsn", "app_id": "fleet", "except_column_list": ["source"]}
    by_name = MergeSink(target=f"{name}.T", name="x", **told)
    twice = {"orders": by_name, "b": MergeSink(target=place, name="y", **told)}

    with pytest.raises(ConfigError, match="have the same table"):
        MergeSinks(twice, route_by="source")(fleet.batch(event("orders", 2)), 1)
    assert not Path(place).exists()
    MergeSinks({"orders": by_name}, route_by="source")(fleet.batch(event("orders", 2)), 1)
    assert (Path(place) / "_delta_log").exists()
    spark.sql(f"DROP SCHEMA {name} CASCADE")


@pytest.mark.parametrize(
    ("route_by", "problem"), [("schema", "which the source does not have"), ("id", "route_by is bigint")]
)
def test_a_route_that_no_event_could_take_is_refused(fleet: Fleet, route_by: str, problem: str):
    with pytest.raises(ConfigError, match=problem):
        fleet.sinks(route_by=route_by)(fleet.batch(event("orders", 2)), 1)
    assert fleet.rows("orders") == [(1, 1, "good")]
