"""A batch of files as Spark has planned it: all are there, in types that the schema holds, or nothing is merged.

Spark passes over a planned file that is gone without a word (Spark 4.2, `FileStreamSource.getBatch` with
`checkFilesExist = false`), and after a kill its first batch may hold more files than one trigger takes: those that it
had noted, and those that came since.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache, partial
from urllib.parse import unquote

from pyspark.sql import DataFrame

from stream_merge.errors import ConfigError, ContractError
from stream_merge.model.results import MergeResult
from stream_merge.model.source_batch import Intake, MostUndecodable
from stream_merge.sink import MergeSink
from stream_merge.sources.files.parquet import refuse_other_types
from stream_merge.sources.files.schema import Schema
from stream_merge.spark.checkpoint import Checkpoint
from stream_merge.spark.hadoop_files import state
from stream_merge.spark.streaming import files_of, streaming_query

_SHOWN = 5


class PlannedRead:
    """A sink for the batches of a file source.

    Args:
        sink: merges.
        schema: what to read.
        is_parquet: whether the files have types of their own.
        most_undecodable: of a batch.

    Cost: the names of the batch's files, from Spark's plan; of a batch that is not merged yet three small files of the
    checkpoint, and the status of each file that Spark does not read; the footers of Parquet files.
    """

    def __init__(
        self,
        sink: MergeSink,
        schema: Schema,
        *,
        is_parquet: bool,
        most_undecodable: MostUndecodable,
    ) -> None:
        self._sink = sink
        self._schema = schema
        self._is_parquet = is_parquet
        self._most_undecodable = most_undecodable

    @property
    def last_result(self) -> MergeResult | None:
        """What the sink did last."""
        return self._sink.last_result

    def __call__(self, batch_df: DataFrame, batch_id: int) -> None:
        """Merge a micro-batch.

        Raises:
            ContractError: a file is gone, or has a type that the schema's does not hold.
            ConfigError: Spark does not tell which files the batch reads.
        """
        began = time.perf_counter()
        with self._sink._reading(batch_df, batch_id, began):
            read = files_of(batch_df)
            if self._is_parquet and read:
                refuse_other_types(batch_df.sparkSession, read, self._schema)
        # Looked at once, however often it is asked for: what Spark has planned does not change.
        expect_whole = cache(partial(self._expect_whole, batch_df, batch_id, read))
        # `foreachBatch` calls nothing but this.
        intake = Intake(calls="every", began=began, expect_whole=expect_whole, most_undecodable=self._most_undecodable)
        self._sink._merge(batch_df, batch_id, intake)

    def _expect_whole(self, batch_df: DataFrame, batch_id: int, read: Sequence[str]) -> None:
        session = batch_df.sparkSession
        query = streaming_query(batch_df)
        place = None if query is None else query.checkpoint
        checkpoint = None if place is None else Checkpoint.in_session(session, place)
        planned = [] if checkpoint is None else checkpoint.files(batch_id)
        if not planned:
            msg = (
                f"[CHECKPOINT_NOT_USABLE] the checkpoint does not list the files of batch {batch_id}; use a supported"
                " Spark version, and one checkpoint per query"
            )
            raise ConfigError(msg, batch_id=batch_id)
        known = {unquote(file) for file in read}
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
            empty = "files without rows" if self._is_parquet else "empty files"
            msg = (
                f"[SOURCE_FILE_MISSING] batch {batch_id} is planned with missing file(s) {_listed(gone)}; restore them,"
                f" or put {empty} in their place if you do not need them"
            )
            raise ContractError(msg, reasons={})


def _listed(files: Sequence[str]) -> str:
    more = f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else ""
    return ", ".join(map(repr, files[:_SHOWN])) + more
