"""What a Delta table's log says at one version, whoever has read it."""

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
"""The folder of NULL in a partition column; as a text Spark keeps it as NULL there."""


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
    """Number of data files, where the log tells it without a Spark job."""
    transaction: Callable[[str], int | None] = field(repr=False)
    """The highest batch id recorded for an application id, or None."""
    read_by: str = "spark"
    """Who read the log."""

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
        """Whether commits keep what they change (Delta's change data feed)."""
        return is_on(self.properties, FEED_PROPERTY)

    def has_columns_of(self, other: TableSnapshot) -> bool:
        """Whether all columns, with their types and what Delta generates them from, and partitions are the same."""
        return (_columns(self), self.partition_columns) == (_columns(other), other.partition_columns)


def is_on(properties: Mapping[str, str], name: str) -> bool:
    """Whether a Delta table property that defaults to false is true."""
    return properties.get(name, "false").lower() == "true"


def expect_not_replaced(before: str, now: str, *, target: str, batch_id: int) -> None:
    """Stop where a table's Delta table id is another one than when the batch was prepared for it.

    CREATE OR REPLACE TABLE goes on with the log and makes a new id (Delta 4.4); a table that is made anew has one, too.

    Raises:
        ConfigError: it is.
    """
    if before != now:
        msg = (
            f"[TARGET_REPLACED] target {target!r} was replaced while batch {batch_id} was merged (table id {before},"
            f" now {now}); restore the table, or start a new checkpoint"
        )
        raise ConfigError(msg, target=target, batch_id=batch_id)


def _columns(found: TableSnapshot) -> list[tuple[str, str, str | None]]:
    return [(f.name, f.dataType.simpleString(), f.metadata.get(names.GENERATED_FROM)) for f in found.schema.fields]


def mapping_mode(properties: Mapping[str, str]) -> str:
    """By what columns are found in files: `none` (their names), `name` (physical ones) or `id`; read in any case."""
    return properties.get("delta.columnMapping.mode", "none").lower()


def name_in_files(field: StructField) -> str:
    """What a column is called in data files and their statistics: under column mapping by its physical name."""
    return str(field.metadata.get("delta.columnMapping.physicalName", field.name))


def is_applied(transaction: Callable[[str], int | None], app_id: str | None, batch_id: int) -> bool:
    """Whether a table's log shows that this batch, or a later one, was committed; False without an application id."""
    recorded = None if app_id is None else transaction(app_id)
    return recorded is not None and recorded >= batch_id


_MAINTENANCE = "upkeep"
"""As commits record it."""
MAINTENANCE_METADATA = json.dumps({"stream_merge": {"role": _MAINTENANCE}})
"""`userMetadata` of a commit that the sink makes for no batch: without `batch_id` nobody takes it for one's."""


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
        found = self._said()
        return found if "batch_id" in found else None

    @property
    def is_maintenance(self) -> bool:
        """Whether the sink compacted files in it (`MAINTENANCE_METADATA`)."""
        return self._said().get("role") == _MAINTENANCE

    def _said(self) -> dict[str, Any]:
        try:
            found = json.loads(self.user_metadata or "")["stream_merge"]
        except (ValueError, KeyError, TypeError):
            return {}
        return found if isinstance(found, dict) else {}


History = Callable[[int, int], Sequence[CommitRecord]]
"""The commits of a table in a range of versions (newer than, up to its newest), newest first."""

_LOOKED_AT_FIRST = 200
"""Versions; where what is looked for is not among them, all that the log has."""


def newest_first(version: int, history: History) -> Iterator[CommitRecord]:
    """The commits of a table, as far as its log is kept.

    Args:
        version: the table's newest.
        history: gives them; of Delta's own the newest commits come, however old the range is (4.4).
    """
    seen = version + 1
    for lowest in dict.fromkeys((max(version - _LOOKED_AT_FIRST, -1), -1)):
        for commit in history(lowest, version):
            if commit.version < seen:
                seen = commit.version
                yield commit


FINGERPRINT = "source"
"""Field of what the sink writes into a commit: few characters that stand for what its batch reads."""


def recorded_fingerprint(version: int, history: History, **wanted: Any) -> str | None:
    """What our newest commit with these values says of its batch; None: nothing, or the log has it no longer."""
    for commit in newest_first(version, history):
        ours = commit.ours
        if ours is not None and all(ours.get(name) == value for name, value in wanted.items()):
            fingerprint = ours.get(FINGERPRINT)
            return fingerprint if isinstance(fingerprint, str) else None
    return None


def is_other(now: str | None, then: str | None) -> bool:
    """Whether two fingerprints stand for different batches; one that is missing tells nothing."""
    return None not in (now, then) and now != then


def metrics_of_history(history: Mapping[str, object]) -> dict[str, int]:
    """The metrics of one of Spark's commits under the names and meanings of the MERGE's own.

    Delta 4.4 writes `operationNumSourceRows` as `numSourceRows`, adds `numOutputRows` and counts an
    updated deletion vector as one added and one removed as well.
    """
    numbers = {name: int(str(value)) for name, value in history.items() if str(value).lstrip("-").isdigit()}
    found = {name: value for name, value in numbers.items() if name not in ("numOutputRows", "numSourceRows")}
    found["operationNumSourceRows"] = numbers.get("numSourceRows", 0)
    updated = numbers.get("numTargetDeletionVectorsUpdated", 0)
    for name in ("numTargetDeletionVectorsAdded", "numTargetDeletionVectorsRemoved"):
        found[name] = max(0, numbers.get(name, 0) - updated)
    return found
