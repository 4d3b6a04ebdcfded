"""A batch of files as Spark has planned it: all are there, in types that the schema holds, or nothing is merged.

Spark passes over a planned file that is gone without a word (Spark 4.2, `FileStreamSource.getBatch` with
`checkFilesExist = false`), and after a kill its first batch may hold more files than one trigger takes: those that it
had noted, and those that came since.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache, partial
from urllib.parse import unquote

from pyspark.sql import DataFrame, SparkSession

from stream_merge.errors import ConfigError, ContractError
from stream_merge.jobs.files.parquet import refuse_other_types, refuse_without
from stream_merge.model.results import MergeResult
from stream_merge.model.source_batch import Intake, MostUndecodable
from stream_merge.sink import MergeSink
from stream_merge.sources.files.schema import Schema
from stream_merge.sources.files.whole import Snapshots
from stream_merge.spark.checkpoint import Checkpoint, PlannedFile
from stream_merge.spark.hadoop_files import State, state
from stream_merge.spark.streaming import files_of, streaming_query

_SHOWN = 5


class PlannedRead:
    """A sink for the batches of a file source.

    Args:
        sink: merges.
        schema: what to read.
        is_parquet: whether the files have types of their own.
        snapshots: of the source, where each file is one; None: files are changes.
        most_undecodable: of a batch.

    Cost: the names of the batch's files, from Spark's plan; of a batch that is not merged yet three small files of the
    checkpoint, and a look at each file that Spark does not read; the footers of Parquet files. Of a snapshot also a
    look at the file, and Spark's log of all files.
    """

    def __init__(
        self,
        sink: MergeSink,
        schema: Schema,
        *,
        is_parquet: bool,
        snapshots: Snapshots | None,
        most_undecodable: MostUndecodable,
    ) -> None:
        self._sink = sink
        self._schema = schema
        self._is_parquet = is_parquet
        self._snapshots = snapshots
        self._most_undecodable = most_undecodable

    @property
    def last_result(self) -> MergeResult | None:
        """What the sink did last."""
        return self._sink.last_result

    def __call__(self, batch_df: DataFrame, batch_id: int) -> None:
        """Merge a micro-batch.

        Raises:
            ContractError: a file is gone, or has a type that the schema's does not hold; or the batch is no snapshot,
                or an older one than the last, or lacks a column.
            ConfigError: there are folders beside files that are snapshots; or Spark does not tell which files the batch
                reads.
        """
        began = time.perf_counter()
        with self._sink._reading(batch_df, batch_id, began):
            if self._snapshots is not None:
                self._snapshots.kind()  # Spark would read what is in folders, too
            read = files_of(batch_df)
            is_typed = self._is_parquet and bool(read)
            lacking = refuse_other_types(batch_df.sparkSession, read, self._schema) if is_typed else []
        # Looked at once, however often it is asked for: what Spark has planned does not change.
        expect_whole = cache(partial(self._expect_whole, batch_df, batch_id, read, lacking))
        # `foreachBatch` calls nothing but this.
        intake = Intake(calls="every", began=began, expect_whole=expect_whole, most_undecodable=self._most_undecodable)
        self._sink._merge(batch_df, batch_id, intake)

    def _expect_whole(self, batch_df: DataFrame, batch_id: int, read: Sequence[str], lacking: Sequence[str]) -> None:
        session = batch_df.sparkSession
        query = streaming_query(batch_df)
        place = None if query is None else query.checkpoint
        checkpoint = None if place is None else Checkpoint.in_session(session, place)
        planned = [] if checkpoint is None else checkpoint.files(batch_id)
        if not planned or checkpoint is None:
            msg = (
                f"[CHECKPOINT_NOT_USABLE] the checkpoint does not list the files of batch {batch_id}; use a supported"
                " Spark version, and one checkpoint per query"
            )
            raise ConfigError(msg, batch_id=batch_id)
        known = {unquote(file) for file in read}
        states = {file.path: _state(session, file) for file in planned if unquote(file.path) not in known}
        late = [file for file in planned if (found := states.get(file.path)) is not None and found.bytes]
        if late:
            msg = (
                f"[SOURCE_FILE_REPLACED] {_listed(late)} disappeared and came back while Spark planned batch {batch_id}"
                "; run again, and add files by renaming complete ones into the source"
            )
            raise ContractError(msg, reasons={})
        gone = [file for file in planned if file.path in states and states[file.path] is None]
        if self._snapshots is not None:
            self._expect_one(session, planned, gone, batch_id, checkpoint)
            refuse_without(session, self._sink._spec.target, lacking, read)
        elif gone:
            empty = "files without rows" if self._is_parquet else "empty files"
            msg = (
                f"[SOURCE_FILE_MISSING] batch {batch_id} is planned with missing file(s) {_listed(gone)}; restore them,"
                f" or put {empty} in their place if you do not need them"
            )
            raise ContractError(msg, reasons={})

    def _expect_one(
        self,
        session: SparkSession,
        planned: Sequence[PlannedFile],
        gone: Sequence[PlannedFile],
        batch_id: int,
        checkpoint: Checkpoint,
    ) -> None:
        """The newest planned file is there, alone, and younger than any that came before it."""
        newest = max(planned, key=lambda file: file.modified_millis)
        if newest in gone:
            msg = (
                f"[SOURCE_FILE_MISSING] snapshot {_place(newest)} is planned and does not exist any more; restore it,"
                " or put the newest one there under its name"
            )
            raise ContractError(msg, reasons={})
        here = [file for file in planned if file not in gone]
        if len(here) > 1:
            msg = (
                f"[FULL_COPY_OUT_OF_ORDER] batch {batch_id} has {len(here)} snapshots: {_listed(here)}; move all but"
                f" the newest, {_place(newest)}, out of the source and run again"
            )
            raise ContractError(msg, reasons={})
        found, earlier = _state(session, newest), _merged_before(session, checkpoint, batch_id)
        last = max(earlier, key=lambda file: file.modified_millis, default=None)
        if found is not None and any(
            one.modified_millis == found.modified_millis and one.path != newest.path for one in earlier
        ):
            msg = (
                f"[FULL_COPY_OUT_OF_ORDER] snapshot {_place(newest)} and an earlier one have the same time,"
                f" {_time(found.modified_millis)}; touch the newest file, and move the others out of the source"
            )
            raise ContractError(msg, reasons={})
        if found is not None and last is not None and found.modified_millis < last.modified_millis:
            msg = (
                f"[FULL_COPY_OUT_OF_ORDER] snapshot {_place(newest)} ({_time(found.modified_millis)}) is older than"
                f" {_place(last)} ({_time(last.modified_millis)}), which was merged before; touch it if it is the"
                " newest, otherwise replace it by the newest"
            )
            raise ContractError(msg, reasons={})


def _merged_before(session: SparkSession, checkpoint: Checkpoint, batch_id: int) -> list[PlannedFile]:
    """The file written last of all batches before, and that of the batch before; with their times of now, if later."""
    if not batch_id:
        return []
    newest = checkpoint.newest_file(batch_id - 1)
    found = [*checkpoint.files(batch_id - 1), *([] if newest is None else [newest])]
    now = [_state(session, file) for file in found]  # a file may have been touched since it was planned
    return [
        replace(file, modified_millis=max(file.modified_millis, 0 if state is None else state.modified_millis))
        for file, state in zip(found, now, strict=True)
    ]


def _listed(files: Sequence[PlannedFile]) -> str:
    more = f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else ""
    return ", ".join(_place(file) for file in files[:_SHOWN]) + more


def _place(file: PlannedFile) -> str:
    return repr(unquote(file.path))


def _state(session: SparkSession, file: PlannedFile) -> State | None:
    return state(session, unquote(file.path))


def _time(millis: int) -> str:
    return datetime.fromtimestamp(millis / 1000, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
