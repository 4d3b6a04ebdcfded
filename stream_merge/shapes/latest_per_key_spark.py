"""Which event of a key wins inside a batch: the latest struct, in a total order."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from stream_merge.model import names
from stream_merge.shapes.layout import Layout
from stream_merge.spark import columns

RANK_COLUMN = "__stream_merge_rank"
TIE_COLUMN = "__stream_merge_tie"
ADDED_COLUMNS = (RANK_COLUMN, TIE_COLUMN)


def ranked(events: DataFrame, layout: Layout) -> DataFrame:
    """Number the events of each key from the latest to the oldest.

    The order is total: greater sequence first; at equal sequence an upsert before a delete; then
    the stored columns in the source's order, the greater value first and NULL last, map entries
    sorted by key. So a replay of the batch picks the same event, whatever order it arrives in.
    Invalid events are not compared: each stays the first of its own.
    Of a whole copy a second event of a key is an error, whichever it is: there the values are not compared.

    Requires: the rows of `contract.checked`.
    Returns: the same rows with their rank (1 = latest) and whether the event is a tie: same key
        and sequence as the event before it in the order, but another operation or other stored values.
    Cost: one shuffle and one sort by key; no aggregation state, so a hot key cannot exhaust memory.
    """
    return events.select("*", *layout.once("dedup", lambda: _ranks(layout)))


def _ranks(layout: Layout) -> list[Column]:
    valid = columns.column(names.REASONS_COLUMN).isNull()
    keys = [columns.column(key) for key in layout.keys]
    of_key = Window.partitionBy(*keys, columns.column(names.ALONE_COLUMN))
    if layout.is_whole:
        return [F.row_number().over(of_key.orderBy(*keys)).alias(RANK_COLUMN), F.lit(False).alias(TIE_COLUMN)]
    sequence = columns.column(names.SEQUENCE_COLUMN)
    deletes = columns.column(names.DELETE_COLUMN)
    beside = () if layout.whole is None else layout.whole.carried
    compared = [(c.name, c.dtype) for c in layout.stored] + [(c.travels_as, c.dtype) for c in beside]
    payload = [columns.canonical(columns.column(name), dtype) for name, dtype in compared]
    content = F.struct(deletes, *(value.alias(f"p{i}") for i, value in enumerate(payload)))

    per_key = of_key.orderBy(sequence.desc(), deletes.asc(), *(value.desc() for value in payload))
    same_sequence: Column = F.lag(sequence).over(per_key).eqNullSafe(sequence)
    other_content: Column = ~F.lag(content).over(per_key).eqNullSafe(content)
    return [
        F.row_number().over(per_key).alias(RANK_COLUMN),
        (valid & same_sequence & other_content).alias(TIE_COLUMN),
    ]
