"""Where a row that a snapshot has read stands in the order of its key: behind what its topic brought before it.

A change has the position of its own record in the log, a read the log's end when the snapshot was taken. The two do
not compare: a transaction that was open then is not in the snapshot, and writes that it had made already lie before
that end, while they are delivered after the read (Debezium 3.4, PostgreSQL 15). Among changes of a key positions do
compare, since a row is locked from its change to the commit; between a read and changes the order of the partition
does: no connector delivers a read behind a change that it does not hold.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from stream_merge.jobs.kafka.missing_values import Known, in_sequence
from stream_merge.jobs.kafka.ordering import EPOCH, OFFSET, PARTITION, POSITION, SEQUENCE, STREAMED, TOPIC, Placing
from stream_merge.spark import columns

_PLACE = (TOPIC, PARTITION, OFFSET)
_BEHIND, _ELSEWHERE, _PASSED = "$behind", "$elsewhere", "$passed"


def placed(events: DataFrame, known: Known, placing: Placing, *, unread: DataFrame | None = None) -> DataFrame:
    """Events with the reads of a snapshot where they stand.

    Args:
        events: upserts and deletes of the batch: the row's columns, `SEQUENCE`, `TOPIC`.
        known: where rows and deletes are stored.
        placing: of the reads.
        unread: `unread_keys` of the batch. A read behind such a record stands behind the row in the log's order, too:
            at the row's own position it would not be written where it changes nothing, and the record, once it can be
            read, would win over it.

    Returns:
        The same columns.
    """
    if placing is Placing.AS_TOLD:
        return events
    if placing is Placing.BEHIND:
        return _behind(events, known, unread)
    is_read = columns.column(STREAMED) == 0
    return events.withColumn(POSITION, F.when(is_read, F.lit(0)).otherwise(columns.column(POSITION)).cast("bigint"))


def _behind(events: DataFrame, known: Known, unread: DataFrame | None) -> DataFrame:
    """Events with each read directly behind the newest change before it.

    That is the one with the greatest sequence among the batch's changes of the key, the stored row and the newest
    remembered delete, which stand at a lower offset of its partition, and in its epoch. Without one it stands at the
    beginning of the epoch. Where the newest change of the key stands in another partition, offsets do not tell what
    came before, and the read keeps the position that the connector gave it.

    Cost: two Spark jobs for the bounds of the reads' keys; a join with stored rows of these keys is left to whoever
    runs the frame.
    """
    keys = list(known.keys)
    is_read = columns.column(STREAMED) == 0
    reads, changes = events.where(is_read), events.where(~is_read)
    before = changes.select(*(columns.column(name) for name in (*keys, *SEQUENCE)))
    for stored in (known.rows(reads), known.deletes(reads)):
        if stored is not None:
            before = before.unionByName(in_sequence(stored, keys))
    r, b = reads.alias("r"), before.alias("b")
    is_here = columns.column(PARTITION, "b") == columns.column(PARTITION, "r")
    same = columns.all_of(columns.column(key, "r") == columns.column(key, "b") for key in keys)
    comes_before = ~is_here | (columns.column(OFFSET, "b") < columns.column(OFFSET, "r"))
    of_now = columns.column(EPOCH, "b") == columns.column(EPOCH, "r")
    sequence = F.struct(*(columns.column(name, "b").alias(name) for name in SEQUENCE))
    found = (
        r.join(b, same & of_now & comes_before, "inner")
        .groupBy(*(columns.column(name, "r").alias(name) for name in _PLACE))
        .agg(F.max(F.when(is_here, sequence)).alias(_BEHIND), F.max(F.when(~is_here, sequence)).alias(_ELSEWHERE))
    )
    behind, elsewhere = columns.column(_BEHIND), columns.column(_ELSEWHERE)
    is_elsewhere = elsewhere.isNotNull() & (behind.isNull() | (elsewhere > behind))
    own = F.when(is_elsewhere, columns.column(POSITION)).otherwise(F.lit(0))
    stands = F.struct(own.cast("bigint").alias(POSITION), F.lit(0).alias(STREAMED))
    last = F.when(behind.isNotNull(), F.struct(behind[POSITION].alias(POSITION), behind[STREAMED].alias(STREAMED)))
    beside = reads.join(found, list(_PLACE), "left").withColumn(_BEHIND, F.greatest(stands, last))
    types = {field.name: field.dataType for field in events.schema.fields}
    stood = columns.column(_BEHIND)
    further = F.lit(0)
    if unread is not None:
        beside = beside.join(_behind_unread(reads, keys, unread), list(_PLACE), "left")
        further = F.coalesce(F.col(_PASSED), F.lit(0))
    place = {POSITION: stood[POSITION], STREAMED: stood[STREAMED] + further}
    moved = beside.withColumns({name: value.cast(types[name]) for name, value in place.items()})
    return changes.unionByName(moved.select(*(columns.column(name) for name in events.columns)))


def _behind_unread(reads: DataFrame, keys: list[str], unread: DataFrame) -> DataFrame:
    """Where those reads stand that an unread record of their key precedes, and `_PASSED`, which is 1."""
    r, u = reads.alias("r"), unread.alias("u")
    same = columns.all_of(columns.column(name, "r") == columns.column(name, "u") for name in (*keys, PARTITION))
    passed = r.join(u, same & (columns.column(OFFSET, "u") < columns.column(OFFSET, "r")), "left_semi")
    return passed.select(*(columns.column(name) for name in _PLACE), F.lit(1).alias(_PASSED))
