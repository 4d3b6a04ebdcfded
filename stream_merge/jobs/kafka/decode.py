"""A micro-batch of records, read from the topic once: what each of them is, and how many there are of each kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from stream_merge.jobs.kafka.column_defaults import ColumnDefault
from stream_merge.jobs.kafka.columns import RowSchema
from stream_merge.jobs.kafka.counts import Tally, of_frame, of_table
from stream_merge.sources.decode.arrow_files import spooled
from stream_merge.sources.decode.decoding import Decoder, events
from stream_merge.sources.decode.events import OLD_KEY, ROW
from stream_merge.sources.envelopes.base import Kind
from stream_merge.spark import columns
from stream_merge.spark.evaluate_once import release


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoded:
    """The evaluated records of a batch; nothing after this reads the topic again."""

    frames: Sequence[DataFrame]
    """Columns of `decoding.META` and the row; together each record once."""
    tally: Tally
    row: T.StructType
    decoder: Decoder
    """What the batch's records were read with in the end."""
    defaults: Mapping[str, ColumnDefault]
    """As `RowSchema.defaults`."""
    at_hand: pa.Table | None = None
    """The records once more, in the driver; None where they are not there, or some are not whole rows."""

    @property
    def missing(self) -> list[str]:
        """Columns that some event does not carry."""
        return sorted(self.tally.missing)

    def of_kinds(self, *kinds: Kind) -> DataFrame:
        """The records of some kinds, all rows in the newest columns."""
        wanted = F.col("kind").isin([str(kind) for kind in kinds])
        parts = [self._with_all_columns(frame.where(wanted)) for frame in self.frames]
        found = parts[0]
        for part in parts[1:]:
            found = found.unionByName(part)
        return found

    def _with_all_columns(self, frame: DataFrame) -> DataFrame:
        """Rows that were decoded before the batch's last column was known."""
        found, old_key = frame.schema[ROW].dataType, self.frames[-1].schema[OLD_KEY].dataType
        if found == self.row:
            return frame
        theirs = frame.schema[OLD_KEY].dataType
        if theirs != old_key:  # decoded before the key columns, or their types, were known
            is_known = isinstance(theirs, T.StructType) and bool(theirs.fields)
            frame = frame.withColumn(OLD_KEY, (F.col(OLD_KEY) if is_known else F.lit(None)).cast(old_key))
        row = columns.column(ROW)
        have = set(found.names) if isinstance(found, T.StructType) else set()
        fields = [
            (row.getField(f.name) if f.name in have else F.lit(None)).cast(f.dataType).alias(f.name)
            for f in self.row.fields
        ]
        grown = F.struct(*fields)
        later = [F.lit(f.name) for f in self.row.fields if f.name not in have]
        absent = F.concat(columns.or_empty(F.col("absent")), F.array(*later))
        return frame.withColumns({ROW: F.when(row.isNotNull(), grown), "absent": absent})


def evaluate(records: DataFrame, rows: RowSchema, held: ExitStack) -> Decoded:
    """Decode a batch, and let new schemas of events in.

    Args:
        records: of a topic.
        rows: the columns of the query's rows.
        held: frees what was evaluated.

    Cost: one Spark job that reads the topic, one over the decoded records for the counts; where a schema is
    new, two more over those records that are written in it.

    Raises:
        ConfigError: a new schema does not fit the target.
    """
    return _of_rows(evaluated(events(records, rows.decoder()), held), rows, held)


def evaluate_here(records: DataFrame, rows: RowSchema, held: ExitStack) -> Decoded:
    """As `evaluate`, with the events in the driver where all of them are whole rows of known schemas.

    Requires: `arrow_files.workers_are_here`.
    Cost: one Spark job that reads the topic; where an event is not such a one, that of `evaluate` over the files.

    Raises:
        ConfigError: as `evaluate`.
    """
    spool = spooled(records, rows.decoder())
    held.callback(spool.remove)
    found = spool.table()
    if not _is_plain(found):
        return _of_rows(evaluated(spool.frame(), held), rows, held)
    return _decoded(of_table(found), [spool.frame()], rows, at_hand=found)


_LOOKED_AT_AGAIN = (Kind.UNDECODABLE, Kind.NULL_VALUE, Kind.OTHER_SCHEMA)
"""Records of these kinds go elsewhere, or need more than themselves to be understood."""


def is_plain(batch: Decoded) -> bool:
    """Whether each record is a whole row, a delete, or nothing: what `evaluate_here` is for."""
    return not batch.missing and not any(batch.tally.total(kind) for kind in _LOOKED_AT_AGAIN)


def _is_plain(found: pa.Table) -> bool:
    lacking = any(found[name].null_count < found.num_rows for name in (OLD_KEY, "unavailable", "absent"))
    again = pa.array([str(kind) for kind in _LOOKED_AT_AGAIN])
    return not lacking and not pc.any(pc.is_in(found["kind"], value_set=again)).as_py()


def evaluated(frame: DataFrame, held: ExitStack) -> DataFrame:
    """The frame, evaluated by a local checkpoint: a lost executor fails the batch, and nothing is read twice."""
    checkpointed = frame.localCheckpoint(eager=True)
    held.callback(release, checkpointed)
    return checkpointed


def _of_rows(first: DataFrame, rows: RowSchema, held: ExitStack) -> Decoded:
    before, tally = rows.columns.names, of_frame(first)
    if not tally.total(Kind.OTHER_SCHEMA):
        return _decoded(tally, [first], rows)
    rows.admit_noted(tally.noted)
    other = F.col("kind") == str(Kind.OTHER_SCHEMA)
    again = first.where(other).withColumnsRenamed({"raw_key": "key", "raw_value": "value"})
    second = evaluated(events(again, rows.decoder()), held)
    tally = tally.replaced_by(of_frame(second))
    if tally.upserts_before:
        tally.missing |= set(rows.columns.names) - set(before)
    return _decoded(tally, [first.where(~other), second], rows)


def _decoded(tally: Tally, frames: Sequence[DataFrame], rows: RowSchema, *, at_hand: pa.Table | None = None) -> Decoded:
    decoder = rows.decoder()
    rows.forget_not_registered()
    return Decoded(
        frames=frames,
        tally=tally,
        row=rows.columns,
        decoder=decoder,
        defaults=dict(rows.defaults),
        at_hand=at_hand,
    )
