"""Writers that race on the rows of one table, and what has to come of it, whoever is faster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from engines import Only, with_costs
from grouped import sink_with
from prometheus_client import CollectorRegistry
from pyspark.sql import SparkSession

from stream_merge import MergeMetrics, RetryPolicy
from stream_merge.model.results import MergeResult
from stream_merge.testing import batch, run

ENGINES = {"left": "driver", "right": "driver", "middle": "driver", "jvm": "spark"}
"""Writer -> its engine."""
IN_A_ROUND = {"left": 6, "right": 6, "middle": 4, "jvm": 1}
"""Writer -> how many of its merges race in a round with those of all others: Spark's take so much longer."""
SHARED = range(5)
"""Keys that every writer changes."""
KEPT_BATCHES = 12
"""A row that a batch has inserted is deleted by the writer's batch so much later."""
SCHEMA = "id bigint, lsn bigint, name string, op string"
COLUMNS = ("id", "lsn", "name", "counted")
PATIENT = RetryPolicy(
    attempts=500,
    budget_seconds=600,
    backoff_initial_seconds=0,
    backoff_max_seconds=0.02,
    backoff_jitter_seconds=0.02,
)


def app_id(writer: str) -> str:
    """Under which a writer's commits to the target carry the numbers of its batches."""
    return f"{writer}/target"


class Writer:
    """One sink with its engine; its batches tell from the table alone whether one of them was lost.

    Each batch counts its writer's own row up, inserts a row, deletes an older one and overwrites two that all writers
    overwrite, the later sequence the winner.
    """

    def __init__(self, spark: SparkSession, target: str, name: str) -> None:
        self.name = name
        self.engine = ENGINES[name]
        self.results: list[MergeResult] = []
        self._spark = spark
        self._sink = sink_with(
            target=target,
            keys=["id"],
            sequence_by="lsn",
            apply_as_deletes="op = 'd'",
            column_list=COLUMNS[:3],
            tombstones=False,
            app_id=name,
            retry=PATIENT,
            metrics=MergeMetrics(registry=CollectorRegistry()),
        )
        with_costs(self._sink, Only(self.engine))

    def deliver(self, number: int | None = None) -> MergeResult:
        """A batch; the next one where none is named."""
        number = len(self.results) if number is None else number
        result = run(self._sink, batch(self._spark, SCHEMA, *events(self.name, number)), number)
        self.results.append(result)
        return result


def own_keys(writer: str) -> int:
    """The first key of a writer's own."""
    return 10_000 * (list(ENGINES).index(writer) + 1)


def events(writer: str, number: int) -> list[tuple[Any, ...]]:
    """Of a writer's batch."""
    at, own = list(ENGINES).index(writer), own_keys(writer)
    lsn, said = len(ENGINES) * number + at, f"{writer} {number}"
    shared = {number % len(SHARED), (number + at) % len(SHARED)}
    found = [(key, lsn, said, "u") for key in (own, own + 1 + number, *shared)]
    if number >= KEPT_BATCHES:
        found.append((own + 1 + number - KEPT_BATCHES, lsn, None, "d"))
    return found


def expected_rows(batches: Mapping[str, int], others: Iterable[int] = (), counted: int = 0) -> list[tuple[Any, ...]]:
    """What batches make, in whatever order.

    Args:
        batches: writer -> how many it has delivered.
        others: keys of rows that no writer changes.
        counted: of how often the two first shared keys were counted by others.
    """
    rows: dict[int, tuple[Any, ...]] = {key: (key, -1, "none") for key in (*SHARED, *others)}
    for writer, delivered in batches.items():
        for number in range(delivered):
            for key, lsn, name, op in events(writer, number):
                if op == "d":
                    del rows[key]
                elif key not in rows or rows[key][1] < lsn:
                    rows[key] = (key, lsn, name)
    counts = {**dict.fromkeys((*SHARED, *others), 0), **dict.fromkeys((0, 1), counted)}
    return sorted(((*row, counts.get(key)) for key, row in rows.items()), key=repr)


def as_tuples(rows: pa.Table) -> list[tuple[Any, ...]]:
    return sorted((tuple(row.values()) for row in rows.select(list(COLUMNS)).to_pylist()), key=repr)


def commit(root: Path, version: int) -> Iterator[bytes]:
    """The lines of a commit."""
    return iter((root / "_delta_log" / f"{version:020}.json").read_bytes().splitlines())


def replayed(feed: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The rows that all changes make, one version after the other; each change is one of the very row that is there."""
    rows: dict[int, tuple[Any, ...]] = {}
    gone = ("delete", "update_preimage")
    for _, kind, *values in sorted(feed, key=lambda change: (change[0], change[1] not in gone)):
        row = tuple(values)
        if kind in gone:
            assert rows.pop(row[0], None) == row, (kind, row)
        else:
            assert rows.setdefault(row[0], row) is row, (kind, row)
    return sorted(rows.values(), key=repr)


def expect_changes(feed: Iterable[tuple[Any, ...]], writer: str, versions: Sequence[int | None]) -> None:
    """Of each batch what concerns its writer's own rows stands in the version of its commit, and in no other.

    Args:
        feed: version, kind and values of each change.
        writer: whose batches they are.
        versions: of the commits of its batches, in order.
    """
    found = Counter(change for change in feed if change[2] // 10_000 == own_keys(writer) // 10_000)
    wanted: Counter[tuple[Any, ...]] = Counter()
    rows: dict[int, tuple[Any, ...]] = {}
    for number, version in enumerate(versions):
        for key, lsn, name, op in events(writer, number):
            if key in SHARED:
                continue
            before, after = rows.get(key), (key, lsn, name, None)
            if op == "d":
                wanted[version, "delete", *rows.pop(key)] += 1
                continue
            rows[key] = after
            if before is None:
                wanted[version, "insert", *after] += 1
            else:
                wanted[version, "update_preimage", *before] += 1
                wanted[version, "update_postimage", *after] += 1
    assert found == wanted
