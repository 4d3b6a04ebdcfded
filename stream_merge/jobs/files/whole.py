"""Snapshots of a source one after the other: each file, or each folder once it is whole, is one batch."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from pyspark.sql import DataFrame

from stream_merge.jobs.files.parquet import refuse_other_types, refuse_without
from stream_merge.jobs.watch import queries
from stream_merge.model.results import MergeResult
from stream_merge.model.source_batch import Intake
from stream_merge.sink import MergeSink
from stream_merge.sources.files.reader import Folder
from stream_merge.sources.files.schema import Schema
from stream_merge.sources.files.whole import Snapshots


class FolderRead:
    """A sink that is given a note of a folder and merges what is in the folder.

    Args:
        sink: merges.
        snapshots: where the folders are.
        folder: how files are read.
        schema: what to read.
    """

    def __init__(self, sink: MergeSink, snapshots: Snapshots, folder: Folder, schema: Schema) -> None:
        self._sink = sink
        self._snapshots = snapshots
        self._folder = folder
        self._schema = schema

    @property
    def last_result(self) -> MergeResult | None:
        """What the sink did last."""
        return self._sink.last_result

    def __call__(self, batch_df: DataFrame, batch_id: int) -> None:
        """Merge a folder.

        Raises:
            ContractError: it is not whole, or a Parquet file in it has a type that the schema's does not hold.
        """
        session, began = batch_df.sparkSession, time.perf_counter()
        with self._sink._reading(batch_df, batch_id, began):
            ((note,),) = batch_df.select("value").collect()
            found = self._snapshots.opened(note, lambda path: self._folder.rows(session, self._schema, path))
            files = found.rows.inputFiles() if found.is_there and self._folder.format == "parquet" else []
            lacking = refuse_other_types(session, files, self._schema) if files else []

        def expect_whole() -> None:
            found.expect_whole()
            refuse_without(session, self._sink._spec.target, lacking, files)

        # The sink asks whether it is whole, since it knows what the table holds already; that folder may be gone.
        self._sink._merge(found.rows, batch_id, Intake(calls="every", began=began, expect_whole=expect_whole))


def run(
    streams: Sequence[queries.Stream],
    *,
    of_folders: FolderRead,
    snapshots: Snapshots,
    once: bool,
    stopping: threading.Event,
    on_result: Callable[[str, MergeResult], None],
    keep: int,
) -> list[MergeResult]:
    """Merge snapshots; what one is, the first file or folder says.

    Folders are merged by a query that is started for each: so there is never more than one note that it has not read,
    and their order is that of the names. After a kill the query first ends what it has planned.

    Args:
        streams: the one that is for it where each file is a snapshot.
        of_folders: takes the place of its sink where each folder is one.
        snapshots: those of the source.
        once: as in `queries.run`.
        stopping: likewise.
        on_result: likewise.
        keep: likewise.

    Raises: as `queries.run`, and what `Snapshots.take` does.
    """
    (stream,) = streams
    results: deque[MergeResult] = deque(maxlen=keep)
    may_be_left = bool(snapshots.taken())
    kind = None
    while not stopping.is_set():
        kind = kind or snapshots.kind()
        if kind == "files":
            return queries.run([stream], once=once, stopping=stopping, on_result=on_result, keep=keep)
        if may_be_left or snapshots.take() is not None:
            of_notes = replace(stream, events=snapshots.notes(), sink=of_folders)
            results.extend(queries.run([of_notes], once=True, stopping=stopping, on_result=on_result, keep=keep))
            may_be_left = False
        elif once:
            break
        else:
            stopping.wait(stream.trigger_seconds)
    return list(results)
