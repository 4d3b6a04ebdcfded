"""One evaluation of a micro-batch: contract, latest event per key, counts and key bounds in a single pass."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from stream_merge import columns, contract, dedup, names
from stream_merge.layout import Layout
from stream_merge.plan import KeyBounds, bound_aggregates, key_bounds
from stream_merge.results import REASONS
from stream_merge.spark_internals import materialised, release


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The evaluated events of one batch: nothing after this reads the source again."""

    rows: DataFrame
    """The latest event of each key, and every invalid event."""
    received: int
    quarantined: int
    reasons: dict[str, int]
    collapsed: int
    ties: int
    upserts: int
    """Keys whose latest event is an upsert."""
    deletes: int
    """Keys whose latest event is a delete."""
    bounds: KeyBounds

    @property
    def latest(self) -> DataFrame:
        """One valid event per key."""
        return self.rows.where(columns.column(names.REASONS_COLUMN).isNull())

    @property
    def invalid(self) -> DataFrame:
        """The events that break the contract."""
        return self.rows.where(columns.column(names.REASONS_COLUMN).isNotNull())

    def release(self) -> None:
        """Free the evaluated rows."""
        release(self.rows)


def evaluate(source: DataFrame, layout: Layout) -> Batch:
    """Evaluate the source exactly once.

    Cost: one Spark job with one shuffle (adaptive execution submits the shuffle as a job of its own).
    """
    ranked = contract.checked(source, layout).transform(lambda events: dedup.ranked(events, layout))
    first = layout.once("first", lambda: columns.column(dedup.RANK_COLUMN) == 1)
    rows, counts = materialised(
        ranked,
        *layout.once("counts", lambda: _counts(layout)),
        keep=lambda observed: observed.where(first).drop(dedup.RANK_COLUMN, dedup.TIE_COLUMN, names.ALONE_COLUMN),
    )
    return Batch(
        rows=rows,
        received=counts["received"],
        quarantined=counts["quarantined"],
        reasons={reason: n for reason in REASONS if (n := counts[f"reason_{reason}"])},
        collapsed=counts["collapsed"],
        ties=counts["ties"],
        upserts=counts["upserts"],
        deletes=counts["deletes"],
        bounds=key_bounds(layout.key_fields, counts),
    )


def _counts(layout: Layout) -> list[Column]:
    valid = columns.column(names.REASONS_COLUMN).isNull()
    first = columns.column(dedup.RANK_COLUMN) == 1
    delete = columns.column(names.DELETE_COLUMN)
    reasons = columns.column(names.REASONS_COLUMN)
    return [
        F.count(F.lit(1)).alias("received"),
        F.count_if(~valid).alias("quarantined"),
        F.count_if(valid & ~first).alias("collapsed"),
        F.count_if(columns.column(dedup.TIE_COLUMN)).alias("ties"),
        F.count_if(valid & first & ~delete).alias("upserts"),
        F.count_if(valid & first & delete).alias("deletes"),
        *(F.count_if(F.array_contains(reasons, reason)).alias(f"reason_{reason}") for reason in REASONS),
        *bound_aggregates(layout.key_fields, valid),
    ]
