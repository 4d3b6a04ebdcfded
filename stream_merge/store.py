"""How a sink reads its tables' logs: through delta-rs where it can, else through Spark."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from pyspark.sql import SparkSession

from stream_merge import names, tables
from stream_merge.config import MergeSpec
from stream_merge.engines.delta_rs import NativeTable, open_table
from stream_merge.snapshot import TableSnapshot

log = logging.getLogger(__name__)


class Store:
    """The tables of one sink. Handles of delta-rs are kept from batch to batch.

    A local path can be read by both, since the sink's engines never run at once. An object store is
    read by delta-rs only with `single_writer`: whether its and Spark's commits exclude each other
    there depends on log stores that cannot be seen from here.
    """

    def __init__(self, spec: MergeSpec) -> None:
        self._spec = spec
        self._handles: dict[str, NativeTable] = {}

    def find(self, session: SparkSession, table: str) -> TableSnapshot | None:
        """The table's newest snapshot, or None when nothing is there.

        Raises:
            ConfigError: something is there, but it is not a Delta table.
        """
        native = self.native(session, table)
        return tables.find(session, table) if native is None else native.snapshot()

    def native(self, session: SparkSession, table: str, *, must_read: bool = False) -> NativeTable | None:
        """The table, up to date, as delta-rs reads it; None where it is not there or not for delta-rs.

        With `must_read` only absence is None: a log that cannot be read must not pass for one that is not there.
        """
        location = self._location(session, table)
        if location is None:
            return None
        handle = self._handles.get(location)
        try:
            if handle is None:
                handle = open_table(location, self._spec.storage_options)
            else:
                handle.refresh()
        except Exception as err:
            self._handles.pop(location, None)
            if must_read:
                raise
            # Whatever delta-rs cannot read, Spark may: it decides what is wrong with the table.
            log.info("table_left_to_spark", extra={"table": table, "error": type(err).__name__})
            handle = None
        if handle is None:
            self._handles.pop(location, None)
            return None
        self._handles[location] = handle
        return handle

    def handle(self, session: SparkSession, table: str) -> NativeTable | None:
        """As `native`, at the version that this batch has seen last; for what does not change within a batch."""
        if names.is_path(table):
            kept = self._handles.get(names.normal_path(table))
            if kept is not None:
                return kept
        return self.native(session, table)

    def _location(self, session: SparkSession, table: str) -> str | None:
        if self._spec.engine == "spark":
            return None
        if names.is_path(table):
            location = names.normal_path(table)
        else:
            found = tables.find(session, table)
            if found is None:
                return None
            location = found.location
        local = tables.local_path(location)
        if local is not None:
            return str(local) if _is_table(local) else None
        return location if self._spec.single_writer else None


def _is_table(path: Path) -> bool:
    # Not Path.is_dir, which raises where the folder may not be read; Spark says what is wrong there.
    return os.path.isdir(path / "_delta_log")
