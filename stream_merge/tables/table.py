"""A table of a sink, located once per call: its snapshot, its commits, and the driver's handle of it."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from stream_merge.errors import ConfigError
from stream_merge.model import locations
from stream_merge.model.logs import tell
from stream_merge.model.settings import MergeSpec
from stream_merge.model.snapshot import CommitRecord, TableSnapshot
from stream_merge.model.table_ref import TableRef
from stream_merge.spark import catalog, delta, environment, object_stores, places
from stream_merge.spark.catalog import Entry
from stream_merge.spark.delta import commit_lock, put_commit, write_checkpoint
from stream_merge.spark.errors import reason
from stream_merge.spark.hadoop_files import NotTranslatedError
from stream_merge.spark.jvm import pins_threads
from stream_merge.tables import spark_table
from stream_merge.tables.log.freshness import ListedLateError
from stream_merge.tables.log.handle import LogHandle, open_table

log = logging.getLogger(__name__)


class Tables:
    """The tables of one sink."""

    def __init__(self, spec: MergeSpec) -> None:
        access = DriverAccess(spec)
        self.target = Table(spec.target, access)
        self.tombstones = Table(spec.tombstone_target, access)
        self.quarantine = Table(spec.quarantine_table, access)
        self._access = access

    def begin(self, session: SparkSession) -> None:
        """Start a call: catalogs are asked again, once for each table, and credentials may have been renewed.

        A table that was dropped and created again at another location is merged into where it is now.
        """
        self._access.begin(session)
        for table in (self.target, self.tombstones, self.quarantine):
            table.begin(session)


class DriverAccess:
    """Where the driver may read and write tables, and how it reaches object stores.

    On a local disk it writes under Spark's lock. An object store is left to Spark unless its commits and the driver's
    exclude each other there, or nobody else writes (`single_writer`). Without `storage_options` it uses Spark's
    settings.
    """

    def __init__(self, spec: MergeSpec) -> None:
        self.merges = spec.engine != "spark"
        """Whether the driver may write at all."""
        self.must_merge = spec.engine == "driver"
        self._spec = spec
        self._options: dict[str, Mapping[str, str] | None] = {}
        """By bucket, in this call."""
        self._excluding: dict[str, bool] = {}
        """Whether commits exclude each other by a bucket's settings, in this call."""
        self._conditional: set[str] = set()
        """Buckets whose object store has shown that it respects conditional writes."""
        self._same_store: set[str] = set()
        """Buckets in which Spark and the driver have seen the same table."""

    def begin(self, session: SparkSession) -> None:
        """Forget what is cached for one call."""
        self._session = session
        self._options.clear()
        self._excluding.clear()

    def may_write(self, location: str) -> bool:
        """Whether the driver may commit to a table at a location."""
        if not self.merges:
            return False
        if locations.local_path(location) is not None:
            return pins_threads(self._session)
        bucket = _bucket(location)
        if bucket not in self._excluding:
            self._excluding[bucket] = self._spec.single_writer or object_stores.excludes_driver(
                self._session, location, self._spec.storage_options
            )
        return self._excluding[bucket]

    def options(self, location: str) -> Mapping[str, str] | None:
        """How the driver reaches an object store; None on a local disk, and where its settings are unknown."""
        if locations.local_path(location) is not None:
            return None
        if self._spec.storage_options is not None:
            return self._spec.storage_options
        bucket = _bucket(location)
        if bucket not in self._options:
            self._options[bucket] = object_stores.storage_options(self._session, location)
        return self._options[bucket]

    def expect_conditional_writes(self, location: str) -> None:
        """Check once per bucket that the store respects conditional writes; the driver would not notice."""
        bucket = _bucket(location)
        if self._spec.single_writer or locations.local_path(location) is not None or bucket in self._conditional:
            return
        try:
            object_stores.expect_condition(self._session, location)
        except Py4JJavaError as err:
            if _is_of_store(err):
                raise
            msg = f"[STORE_IGNORES_CONDITION] commits to {location!r} do not exclude each other: {reason(err)}"
            raise ConfigError(msg) from err
        self._conditional.add(bucket)

    def expect_same_store(self, ref: TableRef, handle: LogHandle) -> None:
        """Stop where Spark reads another table: environment variables or options may lead to another object store.

        Cost: nothing on a local disk; else Spark reads the log, once for each handle.
        """
        if locations.local_path(handle.location) is not None:
            return
        theirs = spark_table.find(self._session, ref)
        ours = handle.snapshot().table_id
        if theirs is None or theirs.table_id != ours:
            there = "no table" if theirs is None else f"the one with Delta table id {theirs.table_id}"
            msg = (
                f"[STORE_MISMATCH] at {ref!r} the driver sees the Delta table with id {ours} and Spark sees {there};"
                " make storage_options, AWS_* and AZURE_* in the environment match Spark's settings"
            )
            raise ConfigError(msg, target=ref)
        self._same_store.add(_bucket(handle.location))

    def sees_as_spark(self, location: str) -> bool:
        """Whether a table that the driver does not see at a location does not exist for Spark, either."""
        return locations.local_path(location) is None and _bucket(location) in self._same_store


class Table:
    """One Delta table, across the calls of a sink; the driver's handle is cached."""

    def __init__(self, ref: TableRef, access: DriverAccess) -> None:
        self.ref = ref
        self._access = access
        self._entry: Entry | None = None
        self._location: TableRef | None = None
        self._full_name: str | None = None
        self._handle: LogHandle | None = None
        self._is_current = False
        """Whether the handle was brought up to date in this call."""
        self._unreadable_at: str | None = None
        """A location that the driver failed to read: not tried again for each batch."""
        self._is_warned = False

    def begin(self, session: SparkSession) -> None:
        """Start a call (`Tables.begin`)."""
        self._session = session
        self._entry = None
        self._is_current = False

    @property
    def location(self) -> TableRef:
        """The location as Hadoop resolves it; the catalog name of a table that does not exist yet."""
        if self.ref.path is None:
            entry = self._catalog_entry()
            return self.ref if entry is None else TableRef(entry.location)
        if self._location is None:
            location = spark_table.location(self._session, self.ref)
            places.expect_scheme(self.ref, location)
            self._location = location
        return self._location

    @property
    def location_to_be(self) -> TableRef:
        """The location, also of a table that does not exist yet; its full name where the catalog chooses."""
        location = self.location
        return TableRef(catalog.place_to_be(self._session, location)) if location.path is None else location

    @property
    def known_location(self) -> str | None:
        """The location that the catalog gave in this call."""
        return None if self._entry is None else self._entry.location

    @property
    def full_name(self) -> str:
        """A catalog name with all its parts, as SQL, resolved at the first call."""
        if self._full_name is None:
            self._full_name = catalog.full_name(self._session, self.ref)
        return self._full_name

    def snapshot(self) -> TableSnapshot | None:
        """The newest version of the table; None where there is no table."""
        location = self._found_at()
        driver = self.driver()
        if driver is not None:
            return driver.snapshot()
        if self.ref.path is None:
            return None if self._entry is None else delta.snapshot(self._session, self._entry.newest())
        if location is not None and self._is_current and self._access.sees_as_spark(location):
            return None
        return spark_table.find(self._session, self.ref)

    def commits(self, *, newer_than: int, up_to: int) -> Sequence[CommitRecord]:
        """Its commits in a range of versions, newest first."""
        driver = self.current_driver()
        if driver is None:
            return spark_table.history(self._session, self.ref, newer_than=newer_than, up_to=up_to)
        return driver.commits(newer_than, up_to)

    def driver(self, *, must_read: bool = False) -> LogHandle | None:
        """The driver's handle, up to date; None where there is no table, or the driver may not write it.

        `must_read` raises where the log cannot be read: it must not pass for a missing table.
        """
        location = self._found_at()
        if location is None or not self._access.may_write(location):
            self._handle = None
            return None
        try:
            return self._up_to_date(location)
        except Exception as err:
            if must_read or (self._access.must_merge and (_is_of_store(err) or isinstance(err, ConfigError))):
                raise
            # What the driver cannot read, Spark may: it decides what is wrong with the table.
            why = str(err) if isinstance(err, NotTranslatedError | ConfigError) else type(err).__name__
            is_told = self._is_warned or not isinstance(err, ConfigError)
            tell(log.info if is_told else log.warning, "table_left_to_spark", table=self.ref, error=why)
            self._is_warned |= not is_told
            self._is_current = False
            return None

    def current_driver(self) -> LogHandle | None:
        """The handle at the version that this call has read last: for what does not change within a call."""
        return self._handle if self._handle is not None and self._is_current else self.driver()

    def cached_driver(self) -> LogHandle | None:
        """The handle, if there is one; nothing is read."""
        return self._handle

    def files(self) -> pa.Table | None:
        """The data files with their statistics (`LogHandle.files`), up to date; None where only Spark reads the log."""
        driver = self.driver()
        location = self._found_at()
        try:
            if driver is None and location is not None and location != self._unreadable_at:
                driver = self._read_only(location)
            return None if driver is None else driver.files()
        except Exception as err:
            tell(log.info, "statistics_left_to_spark", table=self.ref, error=type(err).__name__)
            if not (_is_of_store(err) or isinstance(err, ListedLateError)):  # which may be over with the next batch
                self._unreadable_at = location
            return None

    def _catalog_entry(self) -> Entry | None:
        """The catalog's entry; a missing one is asked for again, since a call creates tables."""
        if self._entry is None:
            self._entry = catalog.entry(self._session, self.ref)
        return self._entry

    def _found_at(self) -> str | None:
        """The location for the driver; None where it would read it differently, or there is none."""
        if self.ref.path is not None:
            location: str | None = self.ref.path
        else:
            entry = self._catalog_entry()
            location = None if entry is None else entry.location
        if location is None or places.escape_in(location) is not None:
            return None
        local = locations.local_path(location)
        return location if local is None or _is_table(local) else None

    def _up_to_date(self, location: str) -> LogHandle | None:
        """The handle at a location, refreshed or opened."""
        before, self._handle = self._handle, None
        handle = self._opened(before, location)
        if handle is None:
            self._is_current = True
            return None
        self._access.expect_conditional_writes(handle.location)
        handle.snapshot()  # reads the log's file list, too
        session = self._session
        if handle is not before:
            handle.scratch = places.scratch(session)
        handle.checkpoint_by_spark = partial(write_checkpoint, session, handle.location)
        if locations.local_path(location) is not None:  # object stores exclude, or the sink is the only writer
            handle.lock = partial(commit_lock, session, handle.location)
        else:
            handle.put = partial(put_commit, session, handle.location)
        self._handle, self._is_current = handle, True
        return handle

    def _read_only(self, location: str) -> LogHandle | None:
        if locations.local_path(location) is None and self._access.options(location) is None:
            return None
        return self._opened(None, location)

    def _opened(self, before: LogHandle | None, location: str) -> LogHandle | None:
        local = locations.local_path(location)
        at, options = location if local is None else str(local), self._access.options(location)
        if before is not None and before.is_at(at, options):
            (before.follow if self._is_current else before.refresh)()
            return before
        handle = open_table(at, options)
        if handle is not None:
            self._access.expect_same_store(self.ref, handle)
        return handle


def _bucket(location: str) -> str:
    return "://".join(urlsplit(location)[:2])


def _is_of_store(err: Exception) -> bool:
    return environment.said(err) is not None or environment.away(err) is not None


def _is_table(path: Path) -> bool:
    # Not Path.is_dir, which raises where the folder may not be read; Spark says what is wrong there.
    return os.path.isdir(path / "_delta_log")
