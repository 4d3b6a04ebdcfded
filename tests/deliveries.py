"""A change stream as tests write it: batches of events, each delivered a second time, as after a crash.

With `--core` only the last batch of a stream is delivered again, when the test has passed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from disk import on_disk
from engines import under_test
from grouped import sink_with
from prometheus_client import CollectorRegistry
from pyspark.sql import DataFrame, SparkSession

from stream_merge import MergeSink
from stream_merge.metrics.instruments import MergeMetrics
from stream_merge.model.names import quote
from stream_merge.model.results import EventCounts, MergeResult
from stream_merge.model.table_ref import TableRef
from stream_merge.spark.versions import ANSWERS_MERGE
from stream_merge.testing import batch, change_rows, run, target_rows

SCHEMA = "id bigint, lsn bigint, op string, name string"
DEFAULTS: Mapping[str, Any] = {
    "keys": ["id"],
    "sequence_by": "lsn",
    "apply_as_deletes": "op = 'd'",
    "except_column_list": ["op"],
}

COPY_ON_WRITE: Mapping[str, str] = {"delta.enableDeletionVectors": "false"}
"""Table properties by which nobody merges on read: what delta-rs does not write is then for Spark."""


def upsert(key: int, name: str | None, *, lsn: int | None) -> tuple[Any, ...]:
    """An upsert of `SCHEMA`."""
    return (key, lsn, "u", name)


def delete(key: int, *, lsn: int | None) -> tuple[Any, ...]:
    """A delete of `SCHEMA`; like most sources it knows no more than the key."""
    return (key, lsn, "d", None)


def from_sql(spark: SparkSession, rows: Iterable[Mapping[str, str]], types: Mapping[str, str]) -> DataFrame:
    """Rows whose values are SQL, evaluated as they are read, which a UNION of as many SELECTs is not.

    Columns have these types and this order; those that no row has are left out.
    """
    rows = list(rows)
    found = {name: dtype for name, dtype in types.items() if name in rows[0]}
    values = (f"({', '.join(f'CAST({row[name]} AS {dtype})' for name, dtype in found.items())})" for row in rows)
    return spark.sql(f"SELECT * FROM VALUES {', '.join(values)} AS t({', '.join(map(quote, found))})")


STREAMS: list[ChangeStream] = []
"""Streams of the running test."""


class ChangeStream:
    """Delivers batches to a target and proves of each that a replay changes nothing.

    With `app_id` (the default) a replay may change no file of any table, tombstones and quarantine
    included. Without, the sequences alone have to keep rows and change feed as they are.
    """

    replays_each = True
    """Whether each batch is delivered again at once, instead of the last one when the test has passed."""

    def __init__(
        self, spark: SparkSession, target: str, schema: str = SCHEMA, *, folder: Path | None = None, **settings: Any
    ) -> None:
        self.spark = spark
        self.target = target
        self.folder = folder or on_disk(target).parent
        self.schema = schema
        self.settings = {
            "target": target,
            "app_id": "test",
            "metrics": MergeMetrics(registry=CollectorRegistry()),
            **(DEFAULTS if schema == SCHEMA else {}),
            **settings,
        }
        self.batch_id = -1
        self._replay: Callable[[], None] = lambda: None
        STREAMS.append(self)

    def deliver(self, *events: Sequence[Any], schema: str | None = None, **settings: Any) -> MergeResult:
        """Deliver the next batch, and the same batch again; what the first delivery did."""
        return self.deliver_frame(batch(self.spark, schema or self.schema, *events), **settings)

    def deliver_frame(self, batch_df: DataFrame, **settings: Any) -> MergeResult:
        """Deliver a frame as the next batch, and again; a sink of its own each time, as after a restart."""
        self.settings |= settings
        self.batch_id += 1
        result = run(self.sink(), batch_df, self.batch_id)
        if not result.events.received:
            return result
        self._replay = partial(self._deliver_again, self.sink(), batch_df, result, self.versions())
        if self.replays_each:
            self.replay_last()
        return result

    def replay_last(self) -> None:
        """Deliver the last batch again, unless something else has happened to the tables since, or it was done."""
        replay, self._replay = self._replay, lambda: None
        replay()

    def _deliver_again(
        self, sink: MergeSink, batch_df: DataFrame, result: MergeResult, versions: Mapping[str, int]
    ) -> None:
        if self.versions() != versions:
            return
        if self.settings["app_id"] is None:
            rows = self.rows(), self.changes()
            run(sink, batch_df, result.batch_id)
            assert (self.rows(), self.changes()) == rows
            return
        changes = self.data_changes()
        replay = run(sink, batch_df, result.batch_id)
        assert self.data_changes() == changes
        if result.version is not None:
            assert (replay.outcome, replay.events) == ("skipped_duplicate", EventCounts())

    def sink(self) -> MergeSink:
        """A new sink with the stream's settings."""
        return under_test(sink_with(**self.settings))

    def rows(self, *columns: str) -> list[tuple[Any, ...]]:
        """The target's rows, sorted."""
        return target_rows(self.spark, self.target, *columns)

    def changes(self) -> list[tuple[Any, ...]]:
        """The change feed: (change type, columns…), sorted."""
        return sorted((row[1:] for row in change_rows(self.spark, self.target)), key=repr)

    def data_changes(self) -> dict[str, int]:
        """Number of changed files in the log of every table beside the target, the target included."""
        logs = self.folder.glob("*/_delta_log")
        return {log.parent.name: sum(_changed_files(commit) for commit in log.glob("*.json")) for log in logs}

    def versions(self) -> dict[str, int]:
        """Number of commits of every table beside the target, the target included."""
        return {log.parent.name: len(list(log.glob("*.json"))) for log in self.folder.glob("*/_delta_log")}

    def side_table(self, prefix: str) -> DataFrame:
        """The tombstones or the quarantine beside the target."""
        return self.spark.table(TableRef(self.target).beside(prefix).sql)

    def sql(self, statement: str) -> DataFrame:
        """Run a statement with `{target}` as the target's identifier."""
        return self.spark.sql(statement.format(target=TableRef(self.target).sql))


def expect_metrics(result: MergeResult, **wanted: int) -> None:
    """MERGE's own metrics; beside Spark 3.5 those that a commit tells (docs/reference/spark-versions.md)."""
    said = wanted if ANSWERS_MERGE else {name: n for name, n in wanted.items() if name in result.metrics}
    assert {name: result.metrics[name] for name in said} == said


def ledger(result: MergeResult) -> dict[str, int]:
    """The counts of a result that are not 0."""
    counts = {name: getattr(result.events, name) for name in EventCounts.__dataclass_fields__}
    return {name: n for name, n in counts.items() if n}


def _changed_files(commit: Path) -> int:
    actions = [json.loads(line) for line in commit.read_text().split("\n") if line]
    files = [(kind, file) for action in actions for kind, file in action.items() if kind in ("add", "remove", "cdc")]
    return sum(kind == "cdc" or file["dataChange"] for kind, file in files)
