"""Batches of `files`: merged only if all of their files exist, in types that the schema holds.

Spark 4.2 silently skips a planned file that is gone (`FileStreamSource.getBatch` with `checkFilesExist = false`),
and after a kill its first batch may have more files than one trigger takes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from urllib.parse import unquote

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from stream_merge.errors import ConfigError, ContractError
from stream_merge.jobs.watch.queries import QueryFailedError
from stream_merge.model.results import MergeResult
from stream_merge.model.source_batch import Intake, MostUndecodable
from stream_merge.sink import MergeSink
from stream_merge.sources.files.parquet import refuse_other_types
from stream_merge.sources.files.reader import Folder
from stream_merge.sources.files.schema import Schema
from stream_merge.spark.checkpoint import Checkpoint
from stream_merge.spark.hadoop_files import State, exactly, qualified_path, state, states_below
from stream_merge.spark.streaming import caller_named, planned_files

_SHOWN = 5
MARKER = "_SUCCESS"
"""File that Spark and Hadoop's committers write last."""


@dataclass(frozen=True)
class PlannedRead:
    """A sink for the batches of a file source, which refuses missing files and other types.

    Cost: the names of the batch's files, from Spark's plan; of a batch that is not merged yet three small files of the
    checkpoint, and the status of each file that Spark does not read; the footers of Parquet files.
    """

    sink: MergeSink
    schema: Schema
    is_parquet: bool
    most_undecodable: MostUndecodable

    @property
    def last_result(self) -> MergeResult | None:
        """The sink's last result."""
        return self.sink.last_result

    def __call__(self, batch_df: DataFrame, batch_id: int) -> None:
        """Merge a micro-batch."""
        began = time.perf_counter()
        with self.sink._calls.reading(batch_df, batch_id, began):
            read = planned_files(batch_df)
            if self.is_parquet and read:
                refuse_other_types(batch_df.sparkSession, read, self.schema)
        # Cached: Spark's plan does not change.
        expect_whole = cache(partial(self._expect_all_files, batch_df, batch_id, read))
        intake = Intake(calls="every", began=began, expect_whole=expect_whole, most_undecodable=self.most_undecodable)
        self.sink._calls.merge(batch_df, batch_id, intake)

    def _expect_all_files(self, batch_df: DataFrame, batch_id: int, read: Sequence[str]) -> None:
        session = batch_df.sparkSession
        path = caller_named(batch_df, app_id=None, name=None).checkpoint
        planned = [] if path is None else Checkpoint.in_session(session, path).files(batch_id)
        if not planned:
            msg = (
                f"[CHECKPOINT_NOT_USABLE] the checkpoint does not list the files of batch {batch_id}; use a supported"
                " Spark version, and one checkpoint per query"
            )
            raise ConfigError(msg, batch_id=batch_id)
        known = set(map(unquote, read))
        states = {file: state(session, file) for file in map(unquote, planned) if file not in known}
        late = [file for file, now in states.items() if now is not None and now.bytes]
        if late:
            msg = (
                f"[SOURCE_FILE_REPLACED] {_listed(late)} disappeared and came back while Spark planned batch {batch_id}"
                "; run again, and add files by renaming complete ones into the source"
            )
            raise ContractError(msg, reasons={})
        gone = [file for file, now in states.items() if now is None]
        if gone:
            empty = "files without rows" if self.is_parquet else "empty files"
            msg = (
                f"[SOURCE_FILE_MISSING] batch {batch_id} is planned with missing file(s) {_listed(gone)}; restore them,"
                f" or put {empty} in their place if you do not need them"
            )
            raise ContractError(msg, reasons={})


def _listed(files: Sequence[str]) -> str:
    more = f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else ""
    return ", ".join(map(repr, files[:_SHOWN])) + more


class FullCopy:
    """The current files of a full copy: a single file, or a folder with `_SUCCESS`."""

    def __init__(self, session: SparkSession, source: Folder) -> None:
        self._session = session
        self._path = source.path
        self.source = replace(source, path=exactly(source.path))
        """The folder with its path as a literal."""
        self._files = self._states()
        if not self._files.keys() & {"", MARKER}:
            msg = (
                f"[SNAPSHOT_SOURCE_LAYOUT] source {self._path!r} must be one full copy: a file, or a folder with"
                f" {MARKER} in it; folders of several copies are not watched"
            )
            raise ConfigError(msg)

    def merge(self, sink: MergeSink, rows: DataFrame, schema: Schema, *, label: str) -> MergeResult:
        """Merge the copy's rows; refused if it is incomplete, changes meanwhile, or has other types.

        `label` names the job in metrics and errors.
        """
        expect_types = cache(partial(self._expect_types, rows, schema))

        def expect_complete() -> None:
            self._expect_complete()
            expect_types()

        try:
            sink._calls.merge(rows, 0, Intake(query=label, expect_whole=expect_complete))
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
        if later:  # a copy of a folder in the order of names starts with the marker
            msg = (
                f"[SNAPSHOT_INCOMPLETE] snapshot {self._path!r} has a {MARKER} older than {len(later)} of its files,"
                f" such as {min(later)!r}; when all files are there, write {MARKER} again"
            )
            raise ContractError(msg, reasons={})

    def _states(self) -> dict[str, State]:
        """Path below the folder -> state; a single file has an empty path."""
        root = qualified_path(self._session, self._path)
        below = states_below(self._session, self._path)
        return {path.removeprefix(root).lstrip("/"): state for path, state in below.items()}
