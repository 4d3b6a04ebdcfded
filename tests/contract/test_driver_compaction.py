"""What merges on read leave is put together after the batch. Needs a JVM: Spark reads it and is the other writer."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from deliveries import DEFAULTS
from delta_log import check_table, live_rows
from engines import DriverAlways, with_costs
from grouped import sink_with
from prometheus_client import CollectorRegistry
from pyspark.sql import SparkSession

from stream_merge import MergeMetrics, MergeResult
from stream_merge.engines.driver import compact
from stream_merge.model.results import ReadDebt
from stream_merge.tables.files import commit
from stream_merge.tables.files.compaction_choice import TOGETHER
from stream_merge.testing import batch, change_rows, target_rows

SCHEMA = "id bigint, lsn bigint, op string, name string"


class Table:
    """A target that is merged on read, a key or two in each batch."""

    def __init__(
        self, spark: SparkSession, path: str, *, driver_memory_bytes: int | None = None, **properties: str
    ) -> None:
        self.spark, self.path = spark, path
        self.rows: dict[int, str] = {}
        self.batches = self.updates = 0
        self.sink = sink_with(
            target=path,
            app_id="test",
            tombstones=False,
            table_properties=properties,
            driver_memory_bytes=driver_memory_bytes,
            metrics=MergeMetrics(CollectorRegistry()),
            **DEFAULTS,
        )
        with_costs(self.sink, DriverAlways())

    def merge(self, *keys: int) -> MergeResult:
        self.batches += 1
        events = [(key, self.batches, "u", f"v{self.batches}") for key in keys]
        self.sink(batch(self.spark, SCHEMA, *events), self.batches)
        self.updates += len(self.rows.keys() & set(keys))
        self.rows |= {key: f"v{self.batches}" for key in keys}
        result = self.sink.last_result
        assert result is not None
        return result

    def files(self) -> int:
        return len(check_table(Path(self.path)).files)

    def expect_rows(self) -> None:
        rows = sorted(self.rows.items())
        assert sorted(target_rows(self.spark, self.path, "id", "name")) == rows
        assert sorted(zip(*live_rows(Path(self.path)).select(["id", "name"]).to_pydict().values(), strict=True)) == rows


def test_small_files_become_one_and_the_stream_goes_on(spark: SparkSession, tmp_table: str):
    """In a commit that changes no data: nothing of it is in the change feed."""
    table = Table(spark, tmp_table)
    results = [table.merge(number, number + 1, 100) for number in range(2 * TOGETHER)]
    rounds = [result.maintenance for result in results]

    grown = [ReadDebt(rows=3 * n + 3, deleted_rows=2 * n, awaiting_files=0) for n in range(TOGETHER - 1)]
    assert [result.read_debt for result in results[:TOGETHER]] == [
        *grown,
        ReadDebt(rows=TOGETHER + 2, deleted_rows=0, awaiting_files=0),
    ]
    done = [one for one in rounds if one is not None]
    assert [(one.outcome, one.removed_files, one.added_files) for one in done] == [("done", TOGETHER, 1)] * 2
    assert table.files() < TOGETHER
    table.expect_rows()
    table.merge(3, 100)
    table.expect_rows()
    kinds = Counter(kind for _, kind, *_ in change_rows(spark, tmp_table, "id", "name"))
    assert kinds == {"insert": len(table.rows), **dict.fromkeys(("update_preimage", "update_postimage"), table.updates)}


def test_a_table_that_forbids_it_is_left_alone(spark: SparkSession, tmp_table: str):
    table = Table(spark, tmp_table, **{compact.AUTO_COMPACT_PROPERTY: "false"})

    results = [table.merge(number) for number in range(TOGETHER + 1)]

    assert {result.maintenance for result in results} == {None}
    awaiting = [result.read_debt.awaiting_files for result in results if result.read_debt is not None]
    assert awaiting == [0] * (TOGETHER - 1) + [
        TOGETHER,
        TOGETHER + 1,
    ]
    assert table.files() > TOGETHER


def test_files_whose_rows_there_is_no_memory_for_are_left_alone(
    spark: SparkSession, tmp_table: str, monkeypatch: pytest.MonkeyPatch
):
    """And put together a few at a time where there is room for some."""
    room = 1_000_000
    table = Table(spark, tmp_table, driver_memory_bytes=compact.BASE_BYTES + room)
    for number in range(TOGETHER - 1):
        table.merge(number)
    file = next(Path(tmp_table).glob("on-read-*.parquet"))
    file_bytes = pq.ParquetFile(file).metadata.row_group(0).total_byte_size

    monkeypatch.setattr(compact, "_COPIES", room)
    held = table.merge(TOGETHER)
    assert held.maintenance is not None
    assert held.maintenance.outcome == "no_memory"
    assert held.read_debt is not None
    assert held.read_debt.awaiting_files == TOGETHER
    monkeypatch.setattr(compact, "_COPIES", room / file_bytes / TOGETHER * 1.5)
    some = table.merge(TOGETHER + 1).maintenance
    assert some is not None
    assert (some.outcome, some.removed_files, some.added_files) == ("done", (TOGETHER + 1) // 2, 1)
    table.expect_rows()


def test_another_writer_wins(spark: SparkSession, tmp_table: str, monkeypatch: pytest.MonkeyPatch):
    """The round leaves no file behind, and a later one does its work."""
    table = Table(spark, tmp_table)
    for number in range(TOGETHER - 1):
        table.merge(number)
    written = compact._written

    def overtaken(*args: object) -> commit.Commit:
        made = written(*args)  # type: ignore[arg-type]
        spark.sql(f"UPDATE delta.`{tmp_table}` SET name = 'theirs' WHERE id = 0")
        return made

    with monkeypatch.context() as patch:
        patch.setattr(compact, "_written", overtaken)
        lost = table.merge(50).maintenance
    table.rows[0] = "theirs"

    assert lost is not None
    assert lost.outcome == "lost"
    table.expect_rows()
    live = check_table(Path(tmp_table)).files
    on_disk = {path.name for path in Path(tmp_table).glob("on-read-*.parquet")}
    assert on_disk <= set(live) | {path for path in on_disk if path in _removed(tmp_table)}
    again = table.merge(51).maintenance
    assert again is not None
    assert again.outcome == "done"
    table.expect_rows()


def _removed(table: str) -> str:
    """The log as text: a file that a commit has added once stands in it."""
    return "".join(path.read_text() for path in sorted(Path(table, "_delta_log").glob("*.json")))
