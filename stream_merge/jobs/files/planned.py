"""A batch of files as Spark has planned it: all are there, in types that the schema holds, or nothing is merged.

Spark passes over a planned file that is gone without a word (Spark 4.2, `FileStreamSource.getBatch` with
`checkFilesExist = false`), and after a kill its first batch may hold more files than one trigger takes: those that it
had noted, and those that came since.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from urllib.parse import unquote

from pyspark.sql import DataFrame, SparkSession

from stream_merge.errors import ConfigError, ContractError
from stream_merge.jobs.files.parquet import refuse_other_types
from stream_merge.model.results import MergeResult
from stream_merge.model.source_batch import Intake
from stream_merge.sink import MergeSink
from stream_merge.sources.files.schema import Schema
from stream_merge.sources.files.whole import Snapshots
from stream_merge.spark.checkpoint import Checkpoint, PlannedFile
from stream_merge.spark.hadoop_files import State, state
from stream_merge.spark.streaming import files_of

_SHOWN = 5


class PlannedRead:
    """A sink for the batches of a file source.

    Args:
        sink: merges.
        checkpoint: of the query that gives the batches.
        types: what Parquet files are read with; None: they are text.
        snapshots: of the source, where each file is one; None: files are changes.

    Cost: three small files of the checkpoint; the footers of Parquet files; a look at each file that is not read.
    """

    def __init__(
        self, sink: MergeSink, checkpoint: Checkpoint, *, types: Schema | None, snapshots: Snapshots | None
    ) -> None:
        self._sink = sink
        self._checkpoint = checkpoint
        self._types = types
        self._snapshots = snapshots

    @property
    def last_result(self) -> MergeResult | None:
        """What the sink did last."""
        return self._sink.last_result

    def __call__(self, batch_df: DataFrame, batch_id: int) -> None:
        """Merge a micro-batch.

        Raises:
            ContractError: a file is gone, or has a type that the schema's does not hold; or the batch is no snapshot,
                or an older one than the last.
            ConfigError: there are folders beside files that are snapshots; or Spark does not tell which files the batch
                reads.
        """
        session = batch_df.sparkSession
        if self._snapshots is not None:
            self._snapshots.kind()  # Spark would read what is in folders, too
        read = files_of(batch_df)
        if self._types is not None and read:
            refuse_other_types(session, read, self._types, is_whole=self._snapshots is not None)

        def expect_whole() -> None:
            """Asked by the sink for batches that it has not merged: the files of others may be gone."""
            planned = self._checkpoint.files(batch_id)
            if self._snapshots is None:
                unread = _expect_all(session, planned, read)
            else:
                unread = self._expect_one(session, planned, batch_id)
            if self._types is not None and not read and any(found.bytes for found in unread):
                msg = (
                    f"batch {batch_id} does not tell which files it reads, so that their types cannot be compared with"
                    " the schema's; use the Spark version that this package names"
                )
                raise ConfigError(msg, batch_id=batch_id)

        # `foreachBatch` calls nothing but this.
        self._sink._merge(batch_df, batch_id, Intake(calls="every", expect_whole=expect_whole))

    def _expect_one(self, session: SparkSession, planned: Sequence[PlannedFile], batch_id: int) -> list[State]:
        """The newest planned file is there, alone, and no older than the one merged before it."""
        if not planned:
            return []
        *earlier, newest = planned
        found = _state(session, newest)
        if found is None:
            msg = (
                f"snapshot {_place(newest)} was about to be merged and is gone; put it there again, or the newest one"
                " under its name"
            )
            raise ContractError(msg, reasons={})
        beside = [file for file in earlier if _state(session, file) is not None]
        if beside:
            msg = (
                f"batch {batch_id} has {len(beside) + 1} snapshots, as after a kill: {_listed([*beside, newest])}; move"
                f" all but the newest, {_place(newest)}, out of the source and run again"
            )
            raise ContractError(msg, reasons={})
        before = self._checkpoint.files(batch_id - 1)[-1:]
        if before and found.modified_millis < before[0].modified_millis:
            msg = (
                f"snapshot {_place(newest)} was written at {_time(found.modified_millis)}, before {_place(before[0])}"
                f" ({_time(before[0].modified_millis)}), which came first, and would turn the table back; if it is the"
                " newest, touch it, else put the newest one into its place under its name"
            )
            raise ContractError(msg, reasons={})
        return [found]


def _expect_all(session: SparkSession, planned: Sequence[PlannedFile], read: Sequence[str]) -> list[State]:
    """Those that are not read have no content.

    Returns: what is there of them.
    """
    known = {unquote(file) for file in read}
    unread = [(file, _state(session, file)) for file in planned if unquote(file.path) not in known]
    gone = [file for file, found in unread if found is None]
    if gone:
        msg = (
            f"planned, not merged yet and gone: {_listed(gone)}; put it there again, or an empty file under its name"
            " where nothing that it said is wanted"
        )
        raise ContractError(msg, reasons={})
    return [found for _, found in unread if found is not None]


def _listed(files: Sequence[PlannedFile]) -> str:
    more = f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else ""
    return ", ".join(_place(file) for file in files[:_SHOWN]) + more


def _place(file: PlannedFile) -> str:
    return repr(unquote(file.path))


def _state(session: SparkSession, file: PlannedFile) -> State | None:
    return state(session, unquote(file.path))


def _time(millis: int) -> str:
    return datetime.fromtimestamp(millis / 1000, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
