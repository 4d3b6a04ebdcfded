"""One full copy of a source, a file or a folder with `_SUCCESS`: all of it is merged, or nothing."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from stream_merge.errors import ConfigError, ContractError
from stream_merge.jobs.watch.queries import QueryFailedError
from stream_merge.model.results import MergeResult
from stream_merge.model.source_batch import Intake
from stream_merge.sink import MergeSink
from stream_merge.sources.files.parquet import refuse_other_types
from stream_merge.sources.files.reader import Folder
from stream_merge.sources.files.schema import Schema
from stream_merge.spark.hadoop_files import State, exactly, qualified_path, states_below

MARKER = "_SUCCESS"
"""Spark and Hadoop's committers write it into a folder when all of its files are there."""


class FullCopy:
    """The files of a copy, in the state that they have now.

    Args:
        session: lists and reads the files.
        source: the folder, or the single file.

    Raises:
        ConfigError: it is neither a file nor a folder with `_SUCCESS`.
    """

    def __init__(self, session: SparkSession, source: Folder) -> None:
        self._session = session
        self._path = source.path
        self.source = replace(source, path=exactly(source.path))
        """The same folder, its path taken literally."""
        self._files = self._states()
        if not self._files.keys() & {"", MARKER}:
            msg = (
                f"[SNAPSHOT_SOURCE_LAYOUT] source {self._path!r} must be one full copy: a file, or a folder with"
                f" {MARKER} in it; folders of several copies are not watched"
            )
            raise ConfigError(msg)

    def merge(self, sink: MergeSink, rows: DataFrame, schema: Schema, *, label: str) -> MergeResult:
        """Merge the copy.

        Args:
            sink: merges.
            rows: of the copy.
            schema: what they were read with.
            label: name of the job, for metrics and errors.

        Raises:
            ContractError: it is incomplete, changes while it is read, or a Parquet file has other types.
            QueryFailedError: Spark failed.
        """
        expect_types = cache(partial(self._expect_types, rows, schema))

        def expect_complete() -> None:
            self._expect_complete()
            expect_types()

        try:
            sink._merge(rows, 0, Intake(query=label, expect_whole=expect_complete))
        except (PySparkException, Py4JJavaError) as err:
            raise QueryFailedError(label, err) from err
        if sink.last_result is None:
            msg = "a sink that did not raise has a result"
            raise AssertionError(msg)
        return sink.last_result

    def _expect_types(self, rows: DataFrame, schema: Schema) -> None:
        files = rows.inputFiles() if self.source.format == "parquet" else []
        lacking = refuse_other_types(self._session, files, schema) if files else []
        if lacking:
            msg = (
                f"[SNAPSHOT_LACKS_COLUMNS] snapshot {self._path!r} lacks column(s) {lacking!r}, which would become NULL"
                " in every row; write them or, to keep the table's values, pass --schema without them"
            )
            raise ContractError(msg, reasons={})

    def _expect_complete(self) -> None:
        if self._states() != self._files:
            msg = (
                f"[SNAPSHOT_INCOMPLETE] snapshot {self._path!r} is still being written; run again when it is complete,"
                f" with {MARKER} written last"
            )
            raise ContractError(msg, reasons={})
        marker = self._files.get(MARKER)
        later = [
            name
            for name, state in self._files.items()
            if marker is not None and state.modified_millis > marker.modified_millis and name[0] not in "._"
        ]
        if later:  # a copy of a folder, in the order of names, begins with the marker
            msg = (
                f"[SNAPSHOT_INCOMPLETE] snapshot {self._path!r} has a {MARKER} older than {len(later)} of its files,"
                f" such as {min(later)!r}; when all files are there, write {MARKER} again"
            )
            raise ContractError(msg, reasons={})

    def _states(self) -> dict[str, State]:
        """The files by their names in the folder; a single file has none."""
        root = qualified_path(self._session, self._path)
        below = states_below(self._session, self._path)
        return {path.removeprefix(root).lstrip("/"): state for path, state in below.items()}
