"""Events of a batch in Arrow files of this machine: they reach the driver without becoming rows of the JVM.

Only where the workers run on the driver's machine. Rows cost the JVM twice the time that decoding them takes:
each is written by a worker, read, copied, kept, and written again for the driver.
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

from stream_merge.sources.decode.decoding import Decoder, old_keys_of
from stream_merge.sources.decode.events import PLACE
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
"""Events that the JVM gets as one row, before it makes a row of each."""


def workers_are_here(session: SparkSession) -> bool:
    """Whether all of Spark runs in the driver's process, so that its workers see the driver's files."""
    return _LOCAL.fullmatch(str(session.sparkContext.master)) is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Spool:
    """The events of one batch; nothing after this reads their source again."""

    session: SparkSession
    folder: str
    files: tuple[str, ...]
    schema: T.StructType
    """Of the events: `PLACE`, then as `Reading.schema` says."""

    def table(self) -> pa.Table:
        """The events, in the order of their tasks; mapped, not read."""
        schema = _arrow_schema(self.schema)
        found = [_opened(file).read_all() for file in self.files]
        return pa.concat_tables([schema.empty_table(), *found])

    def frame(self) -> DataFrame:
        """The events as rows; reads the files whenever it runs."""
        opened_files = {file: _opened(file) for file in self.files}
        batches = [(file, i) for file, found in opened_files.items() for i in range(found.num_record_batches)]
        places = [
            (file, i, start)
            for file, i in batches
            for start in range(0, opened_files[file].get_batch(i).num_rows, _AT_ONCE)
        ]
        dtype, count = T.ArrayType(self.schema), _AT_ONCE

        def opened(batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
            for (numbers,) in batches:
                yield pa.concat_arrays(
                    [_as_list(*place, count, dtype) for place in map(places.__getitem__, numbers.to_pylist())]
                )

        if not places:
            return self.session.createDataFrame([], self.schema)
        numbers = self.session.range(0, len(places), 1, len(batches))
        found = decoded(numbers, opened, "id", dtype=dtype, name=_EVENTS)
        return found.select(F.inline(_EVENTS))

    def remove(self) -> None:
        """Delete the files; what is still mapped stays readable."""
        shutil.rmtree(self.folder, ignore_errors=True)


def spooled(records: DataFrame, decoder: Decoder) -> Spool:
    """Decode records into files.

    Cost: one Spark job, which reads the records once.
    """
    session = records.sparkSession
    # Spark removes what lies there when its JVM ends, also after the driver was killed; not when it is killed itself.
    folder = tempfile.mkdtemp(prefix="events-", dir=SparkFiles.getRootDirectory())
    schema = T.StructType([*_PLACE.fields, *decoder.schema.fields])
    stored = _arrow_schema(schema)

    def spool(batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        path = os.path.join(folder, f"{uuid.uuid4().hex}.arrow")
        deleted: set[tuple[int, bytes]] = set()
        with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, stored) as writer:
            told = False
            for *place, keys, values, old_keys in batches:
                count = len(values)
                if count:
                    events = decoder.decode(keys, values, place[1], deleted, old_keys)
                    writer.write_batch(_placed(place, events, stored))
                yield pa.array([None if told else path] + [None] * (count - 1) if count else [], pa.string())
                told = told or count > 0

    inputs = (*PLACE, "key", "value", old_keys_of(records))
    try:
        # The filter must not run it a second time.
        written = decoded(records, spool, *inputs, dtype=T.StringType(), name=_FILE, is_repeatable=False)
        files = arrow_table(written.where(F.col(_FILE).isNotNull()))[_FILE].to_pylist()
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return Spool(session=session, folder=folder, files=tuple(files), schema=schema)


def _placed(place: list[pa.Array], events: pa.StructArray, schema: pa.Schema) -> pa.RecordBatch:
    where = [column.cast(schema.field(i).type) for i, column in enumerate(place)]
    return pa.RecordBatch.from_arrays([*where, *events.flatten()], schema=schema)


def _arrow_schema(schema: T.StructType) -> pa.Schema:
    return pa.schema([pa.field(f.name, arrow_type(f.dataType)) for f in schema.fields])


def _opened(file: str) -> pa.RecordBatchFileReader:
    return pa.ipc.open_file(pa.memory_map(file))


def _as_list(file: str, number: int, start: int, count: int, dtype: T.ArrayType) -> pa.ListArray:
    """Part of a batch of a file as one list."""
    batch = _opened(file).get_batch(number).slice(start, count)
    events = pa.StructArray.from_arrays(batch.columns, fields=list(arrow_type(dtype).value_type))
    return pa.ListArray.from_arrays(pa.array([0, len(events)], pa.int32()), events)
