"""Decoded events in local Arrow files, where the workers run on the driver's machine.

As rows of the JVM they cost twice the time of decoding: written by a worker, read, copied, cached, written again.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark import SparkFiles
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from stream_merge.sources.decode.decoding import Decoder
from stream_merge.sources.decode.events import PLACE, Records
from stream_merge.spark.versions import arrow_table, arrow_type, decoded

_PLACE = T.StructType(
    [
        T.StructField("topic", T.StringType()),
        T.StructField("partition", T.IntegerType()),
        T.StructField("offset", T.LongType()),
        T.StructField("timestamp", T.TimestampType()),
    ]
)
_LOCAL = re.compile(r"local(\[.*\])?")
_FILE, _EVENTS = "file", "events"
_AT_ONCE = 500
"""Events in one row of the JVM, before `inline`."""


def workers_are_here(session: SparkSession) -> bool:
    """Whether the workers run on the driver's machine: master `local`."""
    return _LOCAL.fullmatch(str(session.sparkContext.master)) is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Spool:
    """The decoded events of one batch."""

    session: SparkSession
    folder: str
    files: tuple[str, ...]
    schema: T.StructType
    """`PLACE` and `Reading.schema`."""

    def table(self) -> pa.Table:
        """The events, in the order of their tasks; mapped, not read."""
        schema = _arrow_schema(self.schema)
        return pa.concat_tables([schema.empty_table(), *(_opened(file).read_all() for file in self.files)])

    def frame(self) -> DataFrame:
        """The events as rows; reads the files whenever it runs."""
        readers = {file: _opened(file) for file in self.files}
        batches = [(file, i) for file, reader in readers.items() for i in range(reader.num_record_batches)]
        slices = [
            (file, i, start) for file, i in batches for start in range(0, readers[file].get_batch(i).num_rows, _AT_ONCE)
        ]
        dtype, count = T.ArrayType(self.schema), _AT_ONCE

        def opened(batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
            for (numbers,) in batches:
                wanted = map(slices.__getitem__, numbers.to_pylist())
                yield pa.concat_arrays([_as_list(*one, count, dtype) for one in wanted])

        if not slices:
            return self.session.createDataFrame([], self.schema)
        numbers = self.session.range(0, len(slices), 1, len(batches))
        return decoded(numbers, opened, "id", dtype=dtype, name=_EVENTS).select(F.inline(_EVENTS))

    def remove(self) -> None:
        """Delete the files; mapped ones stay readable."""
        shutil.rmtree(self.folder, ignore_errors=True)


def spooled(records: DataFrame, decoder: Decoder) -> Spool:
    """The records decoded into files, by one Spark job that reads them once."""
    session = records.sparkSession
    # Spark removes this folder when its JVM ends, also after the driver was killed; not when it is killed itself.
    folder = tempfile.mkdtemp(prefix="events-", dir=SparkFiles.getRootDirectory())
    schema = T.StructType([*_PLACE.fields, *decoder.schema.fields])
    stored = _arrow_schema(schema)

    def spool(batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        path = os.path.join(folder, f"{uuid.uuid4().hex}.arrow")
        deleted: set[tuple[int, bytes]] = set()
        with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, stored) as writer:
            has_path = False
            for columns in batches:
                place, records = list(columns[: len(PLACE)]), Records(*columns[len(PLACE) :])
                count = len(records.values)
                if count:
                    events = decoder.decode(records, deleted)
                    writer.write_batch(_placed(place, events, stored))
                yield pa.array([None if has_path else path] + [None] * (count - 1) if count else [], pa.string())
                has_path = has_path or count > 0

    inputs = (*PLACE, *decoder.inputs(records))
    try:
        # Not repeatable: the filter must not decode again.
        written = decoded(records, spool, *inputs, dtype=T.StringType(), name=_FILE, is_repeatable=False)
        files = arrow_table(written.where(F.col(_FILE).isNotNull()))[_FILE].to_pylist()
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return Spool(session=session, folder=folder, files=tuple(files), schema=schema)


def _placed(place: list[pa.Array], events: pa.StructArray, schema: pa.Schema) -> pa.RecordBatch:
    columns = [column.cast(schema.field(i).type) for i, column in enumerate(place)]
    return pa.RecordBatch.from_arrays([*columns, *events.flatten()], schema=schema)


def _arrow_schema(schema: T.StructType) -> pa.Schema:
    return pa.schema([pa.field(f.name, arrow_type(f.dataType)) for f in schema.fields])


def _opened(file: str) -> pa.RecordBatchFileReader:
    return pa.ipc.open_file(pa.memory_map(file))


def _as_list(file: str, number: int, start: int, count: int, dtype: T.ArrayType) -> pa.ListArray:
    """A slice of a file's batch as one list."""
    batch = _opened(file).get_batch(number).slice(start, count)
    events = pa.StructArray.from_arrays(batch.columns, fields=list(arrow_type(dtype).value_type))
    return pa.ListArray.from_arrays(pa.array([0, len(events)], pa.int32()), events)
