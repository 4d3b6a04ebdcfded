"""A version of a Delta table, and its commits, whoever reads the log."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql.types import StructField, StructType

from stream_merge.errors import ConfigError
from stream_merge.model import names

VECTORS_PROPERTY = "delta.enableDeletionVectors"
FEED_PROPERTY = "delta.enableChangeDataFeed"
HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
"""The folder of NULL in a partition column; Spark stores this text as NULL there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSnapshot:
    """One version of a Delta table."""

    table_id: str
    version: int
    location: str
    schema: StructType
    partition_columns: tuple[str, ...]
    properties: Mapping[str, str]
    files: int | None
    """Number of data files, where the log has it without a Spark job."""
    transaction: Callable[[str], int | None] = field(repr=False)
    """The highest batch id recorded for an application id, or None."""
    read_by: str = "spark"
    """Which engine read the log."""

    @property
    def maps_columns(self) -> bool:
        """Whether columns have other names in files than in the schema (Delta's column mapping)."""
        return mapping_mode(self.properties) != "none"

    @property
    def has_vectors(self) -> bool:
        """Whether rows may be marked as removed (Delta's deletion vectors)."""
        return is_on(self.properties, VECTORS_PROPERTY)

    @property
    def has_feed(self) -> bool:
        """Whether commits write what they change (Delta's change data feed)."""
        return is_on(self.properties, FEED_PROPERTY)

    def has_columns_of(self, other: TableSnapshot) -> bool:
        """Whether columns, with their types and generation expressions, and partitions are the same."""
        return (_columns(self), self.partition_columns) == (_columns(other), other.partition_columns)


def is_on(properties: Mapping[str, str], name: str) -> bool:
    """Whether a Delta table property that defaults to false is true."""
    return properties.get(name, "false").lower() == "true"


def expect_not_replaced(before: str, now: str, *, target: str, batch_id: int) -> None:
    """Raise a ConfigError where the Delta table id is not the one that the batch was prepared for.

    CREATE OR REPLACE TABLE continues the log with a new id (Delta 4.4); a re-created table has a new one, too.
    """
    if before != now:
        msg = (
            f"[TARGET_REPLACED] target {target!r} was replaced while batch {batch_id} was merged (table id {before},"
            f" now {now}); restore the table, or start a new checkpoint"
        )
        raise ConfigError(msg, target=target, batch_id=batch_id)


def _columns(snapshot: TableSnapshot) -> list[tuple[str, str, str | None]]:
    return [(f.name, f.dataType.simpleString(), f.metadata.get(names.GENERATED_FROM)) for f in snapshot.schema.fields]


def mapping_mode(properties: Mapping[str, str]) -> str:
    """How columns map to files: `none` (by name), `name` (by physical name) or `id`."""
    return properties.get("delta.columnMapping.mode", "none").lower()


def name_in_files(field: StructField) -> str:
    """A column's name in data files and statistics: its physical name under column mapping."""
    return str(field.metadata.get("delta.columnMapping.physicalName", field.name))


def is_applied(transaction: Callable[[str], int | None], app_id: str | None, batch_id: int) -> bool:
    """Whether a table's log has this batch, or a later one, under an application id."""
    recorded = None if app_id is None else transaction(app_id)
    return recorded is not None and recorded >= batch_id


_MAINTENANCE = "upkeep"
MAINTENANCE_METADATA = json.dumps({"stream_merge": {"role": _MAINTENANCE}})
"""`userMetadata` of a maintenance commit; it has no `batch_id`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitRecord:
    """One commit, from the table's history."""

    version: int
    timestamp_ms: int | None
    """When it was committed, milliseconds since 1970 UTC."""
    user_metadata: str | None
    metrics: Mapping[str, int]
    """Numbers of the operation, under the names of Delta's MERGE."""

    @property
    def ours(self) -> dict[str, Any] | None:
        """What the sink wrote into the commit of a batch; None for any other."""
        tag = self._tag()
        return tag if "batch_id" in tag else None

    @property
    def is_maintenance(self) -> bool:
        """Whether it is a compaction by the sink (`MAINTENANCE_METADATA`)."""
        return self._tag().get("role") == _MAINTENANCE

    def _tag(self) -> dict[str, Any]:
        try:
            tag = json.loads(self.user_metadata or "")["stream_merge"]
        except (ValueError, KeyError, TypeError):
            return {}
        return tag if isinstance(tag, dict) else {}


History = Callable[[int, int], Sequence[CommitRecord]]
"""The commits of a table in a range of versions (newer than, up to its newest), newest first."""

_READ_FIRST = 200
"""Versions that are read before all that the log has."""


def newest_first(version: int, history: History) -> Iterator[CommitRecord]:
    """The commits of a table, newest first, as far as its log goes.

    Args:
        version: the table's newest.
        history: Delta's own returns the newest commits, however old the range is (4.4).
    """
    oldest = version + 1
    for lowest in dict.fromkeys((max(version - _READ_FIRST, -1), -1)):
        for commit in history(lowest, version):
            if commit.version < oldest:
                oldest = commit.version
                yield commit


FINGERPRINT = "source"
"""Field of the sink's commit metadata: a hash of what its batch reads."""


def recorded_fingerprint(version: int, history: History, **wanted: Any) -> str | None:
    """The fingerprint in our newest commit with these values; None: it has none, or is gone from the log."""
    for commit in newest_first(version, history):
        ours = commit.ours
        if ours is not None and all(ours.get(name) == value for name, value in wanted.items()):
            fingerprint = ours.get(FINGERPRINT)
            return fingerprint if isinstance(fingerprint, str) else None
    return None


def is_other(now: str | None, then: str | None) -> bool:
    """Whether two fingerprints are of different batches; a missing one proves nothing."""
    return None not in (now, then) and now != then


def metrics_of_history(history: Mapping[str, object]) -> dict[str, int]:
    """A commit's metrics in the history under the names and meanings of the MERGE's own.

    Delta 4.4 writes `operationNumSourceRows` as `numSourceRows`, adds `numOutputRows` and counts an updated deletion
    vector as one added and one removed as well.
    """
    numbers = {name: int(str(value)) for name, value in history.items() if str(value).lstrip("-").isdigit()}
    metrics = {name: value for name, value in numbers.items() if name not in ("numOutputRows", "numSourceRows")}
    metrics["operationNumSourceRows"] = numbers.get("numSourceRows", 0)
    updated = numbers.get("numTargetDeletionVectorsUpdated", 0)
    for name in ("numTargetDeletionVectorsAdded", "numTargetDeletionVectorsRemoved"):
        metrics[name] = max(0, numbers.get(name, 0) - updated)
    return metrics
