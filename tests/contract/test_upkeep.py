"""Housekeeping of the remembered deletes, at the size it really starts at, by both engines in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from deliveries import SCHEMA, ChangeStream, delete, ledger, upsert
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession

from stream_merge.model.table_ref import TableRef
from stream_merge.tables.files import rows
from stream_merge.tables.side import tombstones
from stream_merge.tables.side.tombstones import SparkTombstones
from stream_merge.testing import batch, run

RETENTION_SECONDS = 3_600
ENTRIES = pa.schema(
    {
        "id": pa.int64(),
        "__stream_merge_sequence": pa.struct({"c1": pa.int64()}),
        "__stream_merge_revived": pa.bool_(),
        "__stream_merge_recorded_at": pa.timestamp("us", tz="UTC"),
    }
)

Entry = tuple[int, int, bool]
"""Key, sequence, whether it marks the tombstone as revived."""


class Log:
    """A target and the log of its deletes, which other writers append to."""

    def __init__(self, spark: SparkSession, target: str) -> None:
        self.stream = ChangeStream(spark, target, tombstone_retention_seconds=RETENTION_SECONDS)
        self.place = TableRef(target).tombstones

    def deliver(self, engine: str, *events: tuple[Any, ...]) -> dict[str, int]:
        """One batch, once; a sink of its own, as after a restart."""
        self.stream.batch_id += 1
        self.stream.settings["engine"] = engine
        frame = batch(self.stream.spark, SCHEMA, *events)
        result = run(self.stream.sink(), frame, self.stream.batch_id)
        assert result.engine == engine
        return ledger(result)

    def append(self, entries: Sequence[Entry], *, is_expired: bool = False) -> None:
        """A file of another writer."""
        age = timedelta(seconds=2 * RETENTION_SECONDS) if is_expired else timedelta()
        rows = [(key, {"c1": sequence}, mark, datetime.now(UTC) - age) for key, sequence, mark in entries]
        write_deltalake(
            self.place,
            pa.Table.from_pylist([dict(zip(ENTRIES.names, row, strict=True)) for row in rows], ENTRIES),
            mode="append",
        )

    def fill(self, up_to: int) -> None:
        """Deletes at 10 of keys from 100 on: three in turn stand, came back, or are past the retention."""
        for number in range(self.files, up_to):
            entries = [(100 + number, 10, False)]
            self.append(
                [*entries, (100 + number, 10, True)] if number % 3 == 1 else entries, is_expired=number % 3 == 2
            )

    @property
    def files(self) -> int:
        return len(DeltaTable(self.place).file_uris())

    @property
    def entries(self) -> list[Entry]:
        rows = pa.table(DeltaTable(self.place).to_pyarrow_table()).to_pylist()
        names = ENTRIES.names
        return sorted((row[names[0]], row[names[1]]["c1"], row[names[2]]) for row in rows)


@pytest.fixture
def log(spark: SparkSession, tmp_table: str) -> Log:
    return Log(spark, tmp_table)


ENGINES = ["spark", "driver"]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_file_that_makes_it_too_many_has_the_log_tidied_and_neither_engine_forgets(log: Log, engine: str) -> None:
    """What stands goes on refusing, what came back or is past the retention refuses nothing; before and after."""
    other = ENGINES[engine == "spark"]
    log.deliver(other, *(upsert(key, "row", lsn=1) for key in range(1, 4)))
    log.deliver(other, delete(1, lsn=10))
    log.fill(tombstones.TIDY_FILES - 2)
    log.deliver(other, delete(2, lsn=10))
    before = log.files
    late = [
        *(upsert(key, "late", lsn=9) for key in (1, 2, 3)),
        *(upsert(key, "late", lsn=9) for key in (102, 103, 104)),
    ]
    seen = log.deliver(engine, *late)

    log.deliver(engine, delete(3, lsn=10))

    assert before == tombstones.TIDY_FILES - 1
    assert log.files < 3
    standing = [(100 + number, 10, False) for number in range(1, tombstones.TIDY_FILES - 2) if number % 3 == 0]
    assert log.entries == [(key, 10, False) for key in (1, 2, 3)] + standing
    assert seen == {"received": 6, "stale": 3, "inserted": 2, "updated": 1}
    assert log.deliver(other, *(upsert(key, "later", lsn=9) for key in (1, 2, 3, 103, 105, 106))) == {
        "received": 6,
        "stale": 5,
        "inserted": 1,
    }
    assert log.deliver(engine, upsert(1, "back", lsn=11)) == {"received": 1, "inserted": 1}
    assert log.deliver(other, upsert(1, "newer", lsn=10)) == {"received": 1, "unaffected": 1}
    assert [row for row in log.stream.rows("id", "name") if row[0] < 100] == [(1, "back")]


def during_the_upkeep(engine: str, monkeypatch: pytest.MonkeyPatch, action: Callable[[], None]) -> None:
    """Let another writer act between what the upkeep has read and what it commits."""
    if engine == "driver":
        rewrite = tombstones.rewrite

        def racing(*args: Any) -> None:
            action()
            rewrite(*args)

        monkeypatch.setattr(tombstones, "rewrite", racing)
        return
    delete_overtaken = SparkTombstones._delete_overtaken

    def deleted(*args: Any) -> None:
        action()
        delete_overtaken(*args)

    monkeypatch.setattr(SparkTombstones, "_delete_overtaken", deleted)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_remembered_while_the_log_is_tidied_is_not_lost(
    log: Log, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delete of a key that had none, a newer delete, and a mark; the upkeep may win or lose."""
    other = ENGINES[engine == "spark"]
    log.deliver(engine, *(delete(key, lsn=10) for key in (1, 2)))
    log.fill(tombstones.TIDY_FILES - 1)
    with monkeypatch.context() as patched:
        during_the_upkeep(
            engine, patched, lambda: log.append([(7, 10, False), (2, 20, False), (1, 10, True), (103, 10, True)])
        )
        log.deliver(engine, delete(3, lsn=10))
    late = (upsert(1, "came back", lsn=9), upsert(2, "late", lsn=15), upsert(7, "late", lsn=9))

    assert log.deliver(other, *late, upsert(103, "came back", lsn=9)) == {"received": 4, "stale": 2, "inserted": 2}
    log.fill(tombstones.TIDY_FILES + 1)
    log.deliver(engine, delete(4, lsn=10))
    assert log.files < 3
    assert [entry for entry in log.entries if entry[0] < 103] == [
        *((key, sequence, False) for key, sequence in ((2, 20), (3, 10), (4, 10), (7, 10)))
    ]


@pytest.mark.parametrize("kept", [rows.MOST_KEPT_ROWS, 0], ids=["in memory", "by a join"])
def test_a_log_of_many_entries_is_packed_and_cleared_only_when_it_has_doubled(
    log: Log, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tombstones, "TIDY_ENTRIES", 10)
    monkeypatch.setattr(rows, "MOST_KEPT_ROWS", kept)
    log.deliver("driver", delete(1, lsn=10))
    log.append([*((key, 10, False) for key in range(200, 300)), (200, 10, True)])
    log.fill(tombstones.TIDY_FILES - 1)
    log.deliver("driver", delete(2, lsn=10))
    packed, entries = log.files, len(log.entries)
    log.append([(key, 11, False) for key in range(200, 400)])
    log.fill(tombstones.TIDY_FILES - 1)

    log.deliver("driver", delete(3, lsn=10))

    assert (packed, log.files) == (1, 1)
    assert entries > 150
    assert [entry for entry in log.entries if entry[0] > 190] == [(key, 11, False) for key in range(200, 400)]
    assert log.deliver("spark", upsert(1, "late", lsn=9), upsert(200, "late", lsn=10)) == {"received": 2, "stale": 2}
