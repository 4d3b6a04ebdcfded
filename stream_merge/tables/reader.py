"""How a sink reads its tables' logs: through delta-rs where it can, else through Spark."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
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
from stream_merge.spark.hadoop_settings import NotTranslatedError
from stream_merge.spark.jvm import pins_threads
from stream_merge.tables import spark_table
from stream_merge.tables.delta_rs.newest import ListedLateError
from stream_merge.tables.delta_rs.table import NativeTable, open_table

log = logging.getLogger(__name__)


class Store:
    """The tables of one sink. Handles of delta-rs are kept from batch to batch.

    A local path can be read and written by both: what is written beside Spark is written under its lock. An object
    store is left to Spark unless its and delta-rs' commits exclude each other there, or nobody else writes
    (`single_writer`).
    There it reaches the table by what Spark's own settings say, unless it was given `storage_options`.
    """

    def __init__(self, spec: MergeSpec) -> None:
        self._spec = spec
        self._handles: dict[str, NativeTable] = {}
        self._read_only: dict[str, NativeTable] = {}
        self._unreadable: set[str] = set()
        """Logs that delta-rs failed on while Spark merges alone: not tried again for each batch."""
        self._entries: dict[str, Entry] = {}
        """What the catalog has said in this call."""
        self._full_names: dict[str, str] = {}
        self._reached: dict[str, Mapping[str, str] | None] = {}
        """How delta-rs reaches buckets, in this call: keys may be renewed after it."""
        self._excluding: dict[str, bool] = {}
        """In which buckets commits of all exclude each other by their settings, as this call has found."""
        self._warned: set[str] = set()
        """Tables of which a person should know that they are left to Spark, and was told."""
        self._respecting: set[str] = set()
        """Buckets whose store has shown that it respects what these rely on."""
        self._begun: dict[NativeTable, Future[None]] = {}
        """Looks at logs with which the batch has begun, until somebody wants to know what they have found."""
        self._missed_by_delta_rs: set[str] = set()
        """Tables that its last look has not found."""
        self._missed_by_spark: set[str] = set()
        self._looked_at: set[NativeTable] = set()
        """Handles that this call has brought up to date."""

    def begin(self) -> None:
        """A call begins: the catalog is asked again, once, for each table that is named in it, and keys may be others.

        A table that was dropped and made again elsewhere is merged into where it is now.
        """
        self._entries.clear()
        self._reached.clear()
        self._excluding.clear()
        self._begun.clear()
        self._looked_at.clear()

    def look_at_all(self, session: SparkSession) -> None:
        """Look at the logs of tables on object stores that the batch before had to do with, side by side."""
        remote = [one for one in self._handles.values() if self._is_reached_as_before(session, one)]
        if not remote:
            return
        with ThreadPoolExecutor(len(remote)) as threads:
            self._begun.update({one: threads.submit(one.refresh) for one in remote})

    def _is_reached_as_before(self, session: SparkSession, kept: NativeTable) -> bool:
        if locations.local_path(kept.location) is not None:
            return False
        # Hadoop fails on a credential store that is being written anew; who reads the table next says what that means.
        with suppress(NotTranslatedError, Py4JJavaError):
            return kept.is_at(kept.location, self._options(session, kept.location))
        return False

    def location(self, session: SparkSession, table: TableRef) -> TableRef:
        """As `spark_table.location`."""
        if table.path is not None:
            return spark_table.location(session, table)
        found = self._entry(session, table)
        return table if found is None else TableRef(found.location)

    def full_name(self, session: SparkSession, table: TableRef) -> str:
        """A catalog's name with all its parts, as SQL; a sink's own session goes on meaning the same by it."""
        if table not in self._full_names:
            self._full_names[table] = catalog.full_name(session, table)
        return self._full_names[table]

    def known_location(self, table: TableRef) -> str | None:
        """Where a table lies that this call has found in the catalog."""
        kept = self._entries.get(table)
        return None if kept is None else kept.location

    def _entry(self, session: SparkSession, table: TableRef) -> Entry | None:
        """What the catalog has under a name; one that has nothing is asked again, since a call makes tables."""
        kept = self._entries.get(table)
        if kept is None:
            kept = catalog.entry(session, table)
            if kept is not None:
                self._entries[table] = kept
        return kept

    def find(self, session: SparkSession, table: TableRef) -> TableSnapshot | None:
        """The table's newest snapshot, or None when nothing is there.

        Raises:
            ConfigError: something is there, but it is not a Delta table.
        """
        if table.path is not None:
            location = table.plain
            native = self._at(session, table, location)
            if native is not None:
                return native.snapshot()
            return None if self._is_known_to_be_missing(session, table, location) else self._by_spark(session, table)
        found = self._entry(session, table)
        native = None if found is None else self._at(session, table, found.location)
        if found is None or native is not None:
            return None if native is None else native.snapshot()
        return delta.snapshot(session, found.newest())

    def _by_spark(self, session: SparkSession, table: TableRef) -> TableSnapshot | None:
        found = spark_table.find(session, table)
        (self._missed_by_spark.add if found is None else self._missed_by_spark.discard)(table)
        return found

    def _is_known_to_be_missing(self, session: SparkSession, table: TableRef, location: str) -> bool:
        """Whether delta-rs, which sees nothing at a place on S3, is known to look into the store that Spark does.

        It has a table of the same bucket, reached in the same way, that Spark was asked for, too; and Spark has seen
        nothing there before. Spark's look takes eight requests, and a stream without deletes has no table of them.
        """
        return (
            locations.is_on_s3(location)
            and table in self._missed_by_delta_rs
            and table in self._missed_by_spark
            and any(
                urlsplit(one.location).netloc == urlsplit(location).netloc and self._is_reached_as_before(session, one)
                for one in self._handles.values()
            )
        )

    def native(self, session: SparkSession, table: TableRef, *, must_read: bool = False) -> NativeTable | None:
        """The table, up to date, as delta-rs reads it; None where it is not there or not for delta-rs.

        With `must_read` only absence is None: a log that cannot be read must not pass for one that is not there.
        """
        if table.path is not None:
            return self._at(session, table, table.plain, must_read=must_read)
        found = self._entry(session, table)
        return None if found is None else self._at(session, table, found.location, must_read=must_read)

    def history(self, session: SparkSession, table: TableRef, *, newer_than: int, up_to: int) -> Sequence[CommitRecord]:
        """The table's commits in a range of versions, newest first."""
        native = self.handle(session, table)
        if native is None:
            return spark_table.history(session, table, newer_than=newer_than, up_to=up_to)
        return native.commits(newer_than, up_to)

    def statistics(self, session: SparkSession, table: TableRef) -> pa.Table | None:
        """The table's data files with their statistics (`NativeTable.files`), up to date; None where Spark reads alone.

        Reading a log is harmless beside whatever engine writes it.
        """
        native = self.readable(session, table)
        return None if native is None else native.files()

    def readable(self, session: SparkSession, table: TableRef) -> NativeTable | None:
        """As `native`, also where Spark merges alone: to read the log only.

        On an object store that is where Hadoop's settings, or `storage_options`, say how delta-rs gets in.
        """
        native = None if self._spec.engine == "spark" else self.native(session, table)
        if native is not None:
            return native
        location = table.plain if table.path is not None else self.location(session, table)
        local = locations.local_path(location)
        place = location if local is None else str(local)
        is_left_to_spark = place in self._unreadable or places.escape_in(location) is not None
        if is_left_to_spark or not (local is None or _is_table(local)):
            return None
        try:
            options = None if local is not None else self._options(session, place)
            if local is None and options is None:
                return None  # a store that nobody has told delta-rs of
            kept = self._read_only.pop(place, None)
            if kept is None or not kept.is_at(place, options):
                kept = open_table(place, options)
                if kept is None:
                    return None
                _expect_as_spark(session, table, kept)
            else:
                kept.refresh()
            kept.files()
        except Exception as err:
            tell(log.info, "statistics_left_to_spark", table=table, error=type(err).__name__)
            if not (_is_of_store(err) or isinstance(err, ListedLateError)):  # which may be over with the next batch
                self._unreadable.add(place)
            return None
        self._read_only[place] = kept
        return kept

    def held(self, table: TableRef) -> NativeTable | None:
        """As `handle`, where there is one."""
        return self._handles.get(table)

    def handle(self, session: SparkSession, table: TableRef) -> NativeTable | None:
        """As `native`, at the version that this batch has seen last; for what does not change within a batch."""
        return self._handles.get(table) or self.native(session, table)

    def _at(
        self, session: SparkSession, table: TableRef, location: str, *, must_read: bool = False
    ) -> NativeTable | None:
        """The handle of a table that lies at a location; one from another place is given up."""
        place = self._readable(session, location)
        kept = self._handles.pop(table, None)
        self._missed_by_delta_rs.discard(table)
        if place is None:
            return None
        try:
            options = self._options(session, place)
            if kept is not None and kept.is_at(place, options):
                self._bring_up_to_date(kept)
                found: NativeTable | None = kept
            else:
                found = open_table(place, options)
            if found is not None:
                self._expect_excluding(session, place)
                self._looked_at.add(found)
                found.snapshot()  # reads the log's file list, too
        except Exception as err:
            if must_read or (self._spec.engine == "driver" and (_is_of_store(err) or isinstance(err, ConfigError))):
                raise
            # Whatever delta-rs cannot read, Spark may: it decides what is wrong with the table.
            why = str(err) if isinstance(err, NotTranslatedError | ConfigError) else type(err).__name__
            is_told = table in self._warned or not isinstance(err, ConfigError)
            tell(log.info if is_told else log.warning, "table_left_to_spark", table=table, error=why)
            self._warned |= set() if is_told else {table}
            return None
        if found is not None:
            if found is not kept:
                _expect_as_spark(session, table, found)
                found.scratch = places.scratch(session)
                found.checkpoint_by_spark = partial(write_checkpoint, session, place)
            if locations.local_path(location) is not None:  # object stores exclude, or the sink is the only writer
                found.lock = partial(commit_lock, session, place)
            else:
                found.put = partial(put_commit, session, place)
            self._handles[table] = found
            self._missed_by_spark.discard(table)
        else:
            self._missed_by_delta_rs.add(table)
        return found

    def _bring_up_to_date(self, kept: NativeTable) -> None:
        begun = self._begun.pop(kept, None)
        if begun is not None:
            begun.result()  # or what the look raised
        elif kept in self._looked_at:
            kept.follow()
        else:
            kept.refresh()

    def _readable(self, session: SparkSession, location: str) -> str | None:
        """A location as delta-rs is given it; None where it must not read, or could not hold Spark's lock."""
        if self._spec.engine == "spark" or places.escape_in(location) is not None:
            return None
        local = locations.local_path(location)
        if local is not None:
            return str(local) if _is_table(local) and pins_threads(session) else None
        return location if self._spec.single_writer or self._excludes(session, location) else None

    def _expect_excluding(self, session: SparkSession, place: str) -> None:
        """Once for a bucket: a store that ignores the condition of commits loses some, and delta-rs does not see it.

        Raises:
            ConfigError: it ignores it, or cannot be asked.
            Exception: the store is away.
        """
        bucket = urlsplit(place).netloc
        if self._spec.single_writer or locations.local_path(place) is not None or bucket in self._respecting:
            return
        try:
            object_stores.expect_condition(session, place)
        except Py4JJavaError as err:
            if _is_of_store(err):
                raise
            msg = f"[STORE_IGNORES_CONDITION] commits to {place!r} do not exclude each other: {reason(err)}"
            raise ConfigError(msg) from err
        self._respecting.add(bucket)

    def _excludes(self, session: SparkSession, location: str) -> bool:
        bucket = "://".join(urlsplit(location)[:2])
        if bucket not in self._excluding:
            found = object_stores.excludes_delta_rs(session, location, self._spec.storage_options)
            self._excluding[bucket] = found
        return self._excluding[bucket]

    def _options(self, session: SparkSession, place: str) -> Mapping[str, str] | None:
        """How delta-rs reaches a place."""
        if self._spec.storage_options is not None:
            return self._spec.storage_options
        bucket = urlsplit(place).netloc
        if bucket not in self._reached:
            self._reached[bucket] = object_stores.storage_options(session, place)
        return self._reached[bucket]


def _is_of_store(err: Exception) -> bool:
    return environment.said(err) is not None or environment.away(err) is not None


def _expect_as_spark(session: SparkSession, table: TableRef, found: NativeTable) -> None:
    """Whether Spark sees the same table: elsewhere the environment, or options, may name another store.

    Cost: nothing on a local disk; else Spark's look at the log, once for each handle.

    Raises:
        ConfigError: they see different ones.
    """
    if locations.local_path(found.location) is not None:
        return
    theirs = spark_table.find(session, table)
    ours = found.snapshot().table_id
    if theirs is None or theirs.table_id != ours:
        there = "no table" if theirs is None else f"the one with Delta table id {theirs.table_id}"
        msg = (
            f"[STORE_MISMATCH] at {table!r} delta-rs sees the Delta table with id {ours} and Spark sees {there}; make"
            " storage_options, AWS_* and AZURE_* in the environment match Spark's settings"
        )
        raise ConfigError(msg, target=table)


def _is_table(path: Path) -> bool:
    # Not Path.is_dir, which raises where the folder may not be read; Spark says what is wrong there.
    return os.path.isdir(path / "_delta_log")
