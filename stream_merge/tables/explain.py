"""What the sink did to a table, why, and what would make merges cheaper: from the table's log, without Spark."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.compute as pc

from stream_merge.errors import ConfigError
from stream_merge.model import locations, names
from stream_merge.model.logs import counted
from stream_merge.model.settings import SMALL_BYTES
from stream_merge.model.snapshot import VECTORS_PROPERTY, CommitRecord, TableSnapshot, is_on
from stream_merge.model.table_ref import TableRef
from stream_merge.shapes import SHAPES
from stream_merge.shapes.base import filled_as
from stream_merge.spark import environment, places
from stream_merge.tables.files import eligibility
from stream_merge.tables.log.handle import LogHandle, open_table

MANY_SMALL_FILES = 100
COPIED_PER_CHANGED = 20
COPIED_PER_MERGE = 100_000
"""Below these two, rewriting unchanged rows takes less than the rest of a merge (0.1 s per 100,000 rows)."""

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, kw_only=True, slots=True)
class MergedVersion:
    """One version of a target that a sink committed."""

    version: int
    at: datetime | None
    """UTC."""
    identity: str | None
    """Whose batch it was; None for calls outside a query without `app_id`."""
    batch_id: int
    role: str
    """`target`, or `recheck` for the undoing of upserts that a late delete refused."""
    engine: str
    plan: str
    """Why this engine, in one sentence."""
    metrics: Mapping[str, int]
    """Metrics of the merge, by Delta's names."""

    @property
    def seconds(self) -> float | None:
        """Wall time of the merge as the engine measured it."""
        taken = self.metrics.get("executionTimeMs")
        return None if taken is None else taken / 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Explained:
    """A target as its log describes it."""

    version: int
    files: int
    bytes: int
    keys: str | None
    """Recorded keys; None where no sink has written yet."""
    shape: str | None
    """Recorded shape; None where no sink has written yet."""
    driver: str | None
    """Why the driver must not merge into this table; None if it may, where commits on its store exclude each other."""
    merges: tuple[MergedVersion, ...]
    """Newest first."""
    others: int
    """Versions that no sink committed."""
    advice: tuple[str, ...]
    """What would make merges cheaper, a sentence each; none where the figures do not ask for it."""


def explain(target: str, *, last: int = 20, storage_options: Mapping[str, str] | None = None) -> Explained:
    """Read a target's newest versions."""
    table = opened(target, storage_options)
    snapshot = table.snapshot()
    keys = snapshot.properties.get(names.KEYS_PROPERTY)
    recorded = snapshot.properties.get(names.SEQUENCE_PROPERTY)
    shape = None if recorded is None else filled_as(recorded)
    commits = table.history(last)
    merges = tuple(_merges(commits))
    refused = eligibility.table_obstacle(table, snapshot, "the table") or eligibility.recorded_obstacle(snapshot)
    driver = _refused_shape(shape) or (None if refused is None else refused.detail)
    return Explained(
        version=snapshot.version,
        files=snapshot.files or 0,
        bytes=int(pc.sum(table.files()["size_bytes"]).as_py() or 0),
        keys=keys,
        shape=shape,
        driver=driver,
        merges=merges,
        others=len(commits) - len(merges),
        advice=tuple(_advice(target, snapshot, table.files(), commits)),
    )


def _advice(target: str, snapshot: TableSnapshot, files: pa.Table, commits: Sequence[CommitRecord]) -> Iterator[str]:
    """What would make merges cheaper; nothing where the figures do not ask for it."""
    merges = [commit.metrics for commit in commits if commit.ours is not None]
    copied = sum(metrics.get("numTargetRowsCopied", 0) for metrics in merges)
    changed = sum(m.get(f"numTargetRows{what}", 0) for m in merges for what in ("Inserted", "Updated", "Deleted"))
    has_vectors = is_on(snapshot.properties, VECTORS_PROPERTY)
    if not has_vectors and copied >= max(COPIED_PER_CHANGED * changed, COPIED_PER_MERGE * len(merges), 1):
        yield (
            f"{counted(len(merges), 'merge')} rewrote {copied:,} unchanged rows to change {changed:,}; deletion vectors"
            f" avoid it, if every reader supports them: ALTER TABLE {TableRef(target).sql} SET TBLPROPERTIES"
            f" ('{VECTORS_PROPERTY}' = 'true'), with maintenance=Maintenance()"
        )
    small = _small_files(files)
    if small >= MANY_SMALL_FILES:
        yield (
            f"{small:,} of {files.num_rows:,} files are smaller than {SMALL_BYTES >> 20} MiB: stream-merge maintain"
            f" {target} compacts them now, maintenance=Maintenance() after every 100 batches"
        )


def _small_files(files: pa.Table) -> int:
    """How many files maintenance would compact: small ones that are not the only one in their partition."""
    small = files.filter(pc.less(files["size_bytes"], SMALL_BYTES))
    partition = [name for name in small.column_names if name.startswith("partition.")]
    sizes = small.group_by(partition).aggregate([([], "count_all")])["count_all"]
    return int(pc.sum(sizes.filter(pc.greater(sizes, 1))).as_py() or 0)


def _refused_shape(shape: str | None) -> str | None:
    """Why only Spark merges into a table of this shape."""
    filled = next((one for one in SHAPES if one.name == shape), None)
    if filled is not None and filled.needs_whole_events:
        return f"the table is filled as {shape}, which only Spark merges"
    return None


def find(target: str, storage_options: Mapping[str, str] | None = None) -> LogHandle | None:
    """A table, read without Spark; None where there is none."""
    place = TableRef(target).path
    if place is None:
        msg = (
            f"[NEEDS_SPARK] {target!r} is a catalog name, and only Spark knows its location (DESCRIBE DETAIL {target});"
            " use the table's path or URI"
        )
        raise ConfigError(msg, target=target)
    escape = places.escape_in(place)
    if escape is not None:
        msg = (
            f"[NEEDS_SPARK] {target!r} has {escape!r}, which delta-rs and Spark read differently; if it stands for"
            " another character, use the folder's path without file:, else DESCRIBE HISTORY in Spark"
        )
        raise ConfigError(msg, target=target)
    local = locations.local_path(place)
    try:
        return open_table(place if local is None else str(local), storage_options)
    except Exception as err:
        why = environment.said(err) or environment.away(err) or _COLOURS.sub("", environment.first_line(str(err)))
        msg = f"[NEEDS_SPARK] the log of {target!r} cannot be read without Spark: {why}; use DESCRIBE HISTORY in Spark"
        raise ConfigError(msg, target=target) from err


def opened(target: str, storage_options: Mapping[str, str] | None = None) -> LogHandle:
    """A table that must exist, read without Spark."""
    table = find(target, storage_options)
    if table is None:
        msg = f"[TABLE_NOT_FOUND] there is no Delta table at {target!r}; use the path of a sink's target"
        raise ConfigError(msg, target=target)
    return table


def _merges(commits: list[CommitRecord]) -> Iterator[MergedVersion]:
    for commit in commits:
        ours = commit.ours
        if ours is None:
            continue
        yield MergedVersion(
            version=commit.version,
            at=None if commit.timestamp_ms is None else datetime.fromtimestamp(commit.timestamp_ms / 1000, UTC),
            identity=ours.get("identity"),
            batch_id=int(ours["batch_id"]),
            role=str(ours.get("role", "target")),
            engine=str(ours.get("engine", "")),
            plan=str(ours.get("plan", "")),
            metrics=commit.metrics,
        )
