"""A Delta table's log as delta-rs reads it; `deltalake` (1.6) is imported here alone."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from itertools import islice
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import DeltaError, TableNotFoundError
from deltalake.fs import DeltaStorageHandler
from pyspark.sql.types import StructType

from stream_merge.model.logs import tell
from stream_merge.model.snapshot import CommitRecord, TableSnapshot, metrics_of_history, name_in_files
from stream_merge.tables.log.freshness import ListedLateError, Objects, added, look

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Protocol:
    """Protocol of a table."""

    reader_version: int
    writer_version: int
    features: frozenset[str]
    """Named table features; older protocol versions name none."""


def without_views(dtype: pa.DataType) -> pa.DataType:
    """The type without views, at any depth but inside maps."""
    if pa.types.is_string_view(dtype):
        return pa.string()
    if pa.types.is_binary_view(dtype):
        return pa.binary()
    if pa.types.is_struct(dtype):
        return pa.struct([pa.field(f.name, without_views(f.type)) for f in dtype])
    if pa.types.is_list(dtype):
        return pa.list_(pa.field(dtype.value_field.name, without_views(dtype.value_type)))
    return dtype


P = ParamSpec("P")
R = TypeVar("R")


class NativePanicError(RuntimeError):
    """A panic of delta-rs, whose own exception would pass `except Exception`."""


def no_panics(method: Callable[P, R]) -> Callable[P, R]:
    """Turn a panic of Rust code (a bare `BaseException` of pyo3) into an ordinary error."""

    @wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except BaseException as err:
            if type(err).__name__ == "PanicException":
                raise NativePanicError(str(err)) from err
            raise

    return guarded


def newest_first(commit: Callable[[int], bytes], version: int) -> Iterator[dict[str, Any]]:
    """`commitInfo` of the commits with their versions, as far as the log is kept. Cost: a file for each.

    delta-rs gives none at all if one has a number that it does not expect, as Spark's CLONE: "readVersion": -1.
    """
    for number in range(version, -1, -1):
        try:
            text = commit(number)
        except FileNotFoundError:
            return
        actions = (json.loads(line) for line in text.splitlines() if line.strip())
        info: dict[str, Any] = next((action["commitInfo"] for action in actions if "commitInfo" in action), {})
        yield {**info, "version": number}


_BY_DELTA_RS = {
    "num_source_rows": "numSourceRows",
    "num_target_rows_inserted": "numTargetRowsInserted",
    "num_target_rows_updated": "numTargetRowsUpdated",
    "num_target_rows_deleted": "numTargetRowsDeleted",
    "num_target_rows_copied": "numTargetRowsCopied",
    "execution_time_ms": "executionTimeMs",
}
"""Metrics of merges that older sinks left to delta-rs, and what Delta calls them."""


def record(commit: Mapping[str, Any]) -> CommitRecord:
    """A commit from its `commitInfo`."""
    return CommitRecord(
        version=int(commit["version"]),
        timestamp_ms=commit.get("timestamp"),
        user_metadata=commit.get("userMetadata"),
        metrics=metrics_of_history(
            {_BY_DELTA_RS.get(name, name): value for name, value in (commit.get("operationMetrics") or {}).items()}
        ),
    )


def unambiguous(files: pa.Table, schema: StructType) -> pa.Table:
    """`files` as delta-rs flattens them (1.6), without the statistics of ambiguous names."""
    ambiguous = [name for name, n in Counter(_flat_names(schema)).items() if n > 1]  # `a.b`, and `b` in the struct `a`
    several = {f"{kind}.{name}" for name in ambiguous for kind in ("min", "max", "null_count")}
    return files.select([i for i, name in enumerate(files.column_names) if name not in several]) if several else files


def _flat_names(dtype: StructType, prefix: str = "") -> Iterator[str]:
    for field in dtype.fields:
        name = f"{prefix}{name_in_files(field)}"
        yield name
        if isinstance(field.dataType, StructType):
            yield from _flat_names(field.dataType, f"{name}.")


class LogHandle:
    """A table's log by delta-rs, kept and brought up to date from new commits. Storage options are never logged."""

    def __init__(self, location: str, storage_options: Mapping[str, str] | None = None) -> None:
        self.location = location
        self.lock: Callable[[], AbstractContextManager[object]] = nullcontext
        """Excludes writers of this process that commit without an atomic name, while the driver links one."""
        self.put: Callable[[int, str], None] | None = None
        """Puts a text under a version by Spark's log store, or raises FileExistsError; None on a local disk."""
        self.scratch: Path | None = None
        """Folder for copies of its files; None: among temporary files."""
        self.checkpoint_by_spark: Callable[[], None] | None = None
        """Has Spark write a checkpoint, where delta-rs does not read the spelling of a property."""
        self.times_opened = 0
        """More than once where another log replaced it."""
        self._options = None if storage_options is None else dict(storage_options)
        self._look = look(location, lambda: self.objects)
        self._open()

    def is_at(self, location: str, storage_options: Mapping[str, str] | None) -> bool:
        """Whether the handle is one of this location, with these options."""
        options = None if storage_options is None else dict(storage_options)
        return (self.location, self._options) == (location, options)

    @no_panics
    def _open(self) -> None:
        self._table = DeltaTable(self.location, storage_options=self._options)
        self.times_opened += 1
        self.objects = Objects(partial(DeltaStorageHandler.from_table, self._table._table, self._options))
        self._files: tuple[int, pa.Table] | None = None
        self._metadata: tuple[int, str, StructType, dict[str, str], tuple[str, ...]] | None = None
        self._transactions: tuple[int, dict[str, int | None]] = (-1, {})
        self._mark: Hashable | None = self._look.mark(self.version, lambda: None)

    @no_panics
    def refresh(self) -> None:
        """Bring the handle to the newest version; a table that was dropped and re-created is opened afresh.

        Without a next commit there is no newer one, which two files of the log tell sooner than a listing of it. In
        this order: where the next commit was cleaned up already, so was the handle's own before it. Cost: on an object
        store a GET for the next commit, and one for the handle's own.
        """
        is_newest = not self._look.has(self.version + 1)
        if self._mark is None or not self._look.is_marked(self.version, self._mark):
            self._open()
        elif not is_newest:
            expected = self.version + 1
            self._table.update_incremental()
            if self.version < expected:
                raise ListedLateError(self.location, expected)
            self._mark = self._look.mark(self.version, lambda: None)

    def follow(self) -> None:
        """`refresh` for one GET, of a handle that was refreshed in this batch, which showed whose log it is."""
        if self._look.is_free or self._look.has(self.version + 1):
            self.refresh()

    def refresh_if_free(self) -> None:
        """`refresh` where that takes no request: elsewhere a commit on an older version loses by itself."""
        if self._look.is_free:
            self.refresh()

    @property
    def version(self) -> int:
        """Version of the handle."""
        return int(self._table.version())

    @property
    def protocol(self) -> Protocol:
        """The table's protocol."""
        protocol = self._table.protocol()
        return Protocol(
            reader_version=protocol.min_reader_version,
            writer_version=protocol.min_writer_version,
            features=frozenset([*(protocol.reader_features or ()), *(protocol.writer_features or ())]),
        )

    @no_panics
    def snapshot(self) -> TableSnapshot:
        """The table at the handle's version."""
        table_id, schema, properties, partition_columns = self._described()
        return TableSnapshot(
            table_id=table_id,
            version=self.version,
            location=self.location,
            schema=schema,
            partition_columns=partition_columns,
            properties=properties,
            files=self.files().num_rows,
            transaction=self.transaction,
            read_by="driver",
        )

    @property
    def table_id(self) -> str:
        """Delta's table id, at the handle's version."""
        return self._described()[0]

    def _described(self) -> tuple[str, StructType, dict[str, str], tuple[str, ...]]:
        if self._metadata is None or self._metadata[0] != self.version:
            metadata = self._table.metadata()
            schema = StructType.fromJson(json.loads(self._table.schema().to_json()))
            properties = {key: str(value) for key, value in metadata.configuration.items()}
            self._metadata = (self.version, str(metadata.id), schema, properties, tuple(metadata.partition_columns))
        return self._metadata[1:]

    def transaction(self, app_id: str) -> int | None:
        """The batch id that the handle's version records for an application id; read once, from all commits."""
        if self._transactions[0] != self.version:
            self._transactions = (self.version, {})
        batch_ids = self._transactions[1]
        if app_id not in batch_ids:
            batch_ids[app_id] = self._table.transaction_version(app_id)
        return batch_ids[app_id]

    @no_panics
    def files(self) -> pa.Table:
        """The data files with sizes, partition values and statistics, one row each (`unambiguous`)."""
        if self._files is None or self._files[0] != self.version:
            files = pa.table(self._table.get_add_actions(flatten=True))
            self._files = (self.version, unambiguous(files, self._described()[1]))
        return self._files[1]

    @no_panics
    def commit(self, version: int) -> bytes:
        """The text of a commit's file in the log."""
        return self.objects.text(f"_delta_log/{version:020d}.json")

    @no_panics
    def history(self, limit: int | None) -> list[CommitRecord]:
        """The newest commits, newest first; None: all that the log still has."""
        try:
            commits = self._table.history(limit)
        except DeltaError:
            commits = list(islice(newest_first(self.commit, self.version), limit))
        return [record(commit) for commit in commits]

    def commits(self, newer_than: int, up_to: int) -> list[CommitRecord]:
        """The commits in a range of versions, newest first."""
        records = self.history(max(0, self.version - newer_than))
        return [commit for commit in records if newer_than < commit.version <= up_to]

    @no_panics
    def query(self, sql: str) -> pa.Table:
        """The answer to a query (DataFusion SQL) in which the table is called `log`."""
        rows = pa.table(QueryBuilder().register("log", self._table).execute(sql).read_all())
        # delta-rs answers with views, which Arrow cannot filter.
        return rows.cast(pa.schema([pa.field(f.name, without_views(f.type)) for f in rows.schema]))

    @no_panics
    def committed(self, transaction: tuple[str, int] | None) -> None:
        """Follow a commit that was put beside delta-rs, and write the checkpoint that is due."""
        before, live = self.version, self.files()["path"]
        (self.refresh if self._look.is_free else self._table.update_incremental)()
        if self._transactions[0] == before == self.version - 1:
            batch_ids = self._transactions[1] | ({} if transaction is None else dict([transaction]))
            self._transactions = (self.version, batch_ids)
        self._mark = self._look.mark(self.version, lambda: added(live, self.files()))
        by = self.checkpoint_by_spark
        write_checkpoint_if_due(self._table, self.version, self._described()[2], self.location, by_spark=by)


_INTERVAL_PROPERTY = "delta.checkpointInterval"
_DEFAULT_INTERVAL = 10
"""Delta's default; delta-rs alone would take 100, and Spark would read ten times as many commits."""
_RETENTIONS = frozenset({"delta.logretentionduration", "delta.deletedfileretentionduration"})
_READ = re.compile(r"interval \d+ (?:nanosecond|microsecond|millisecond|second|minute|hour|day|week)s?")


def write_checkpoint_if_due(
    table: Any,
    version: int,
    properties: Mapping[str, str],
    location: str,
    *,
    by_spark: Callable[[], None] | None,
) -> None:
    """Write the checkpoint that is due at a version, and clean up the log; failures are warnings.

    delta-rs (1.6) reads retentions as `interval 30 days` alone, and else takes its own defaults; Delta also reads `30
    days`, capitals, and several units: there Spark does it, if `by_spark` is given.
    """
    interval = int(properties.get(_INTERVAL_PROPERTY, _DEFAULT_INTERVAL))
    if version == 0 or version % interval:
        return
    try:
        if any(name.lower() in _RETENTIONS and not _READ.fullmatch(value) for name, value in properties.items()):
            if by_spark is not None:
                by_spark()
            return
        table.create_checkpoint()
        if properties.get("delta.enableExpiredLogCleanup", "true").lower() != "false":
            table.cleanup_metadata()
    except Exception:
        tell(log.warning, "checkpoint_failed", table=location, version=version, exc_info=True)


def open_table(location: str, storage_options: Mapping[str, str] | None = None) -> LogHandle | None:
    """The table at a location, or None where there is none."""
    try:
        return LogHandle(location, storage_options)
    except TableNotFoundError:
        return None


def quote(name: str) -> str:
    """An identifier."""
    return '"' + name.replace('"', '""') + '"'


def text(value: str) -> str:
    """A string literal."""
    return "'" + value.replace("'", "''") + "'"
