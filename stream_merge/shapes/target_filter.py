"""The part of a target that a user says a batch's keys are in: whether Spark understands it, and what lies outside."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType

from stream_merge.model.settings import MergeSpec
from stream_merge.shapes import analysed, shape_of
from stream_merge.shapes.layout import Layout
from stream_merge.spark import moments
from stream_merge.spark.jvm import reads_only


def inside(written: str) -> Column:
    """Rows of `t` for which it is TRUE: not FALSE, not NULL."""
    return F.expr(written)


def outside(written: str) -> Column:
    """All other rows; in this form Delta leaves files unread where partition values or statistics decide it."""
    return ~F.expr(written) | F.expr(written).isNull()


def of_call(session: SparkSession, spec: MergeSpec) -> MergeSpec:
    """The settings with one time for all looks at the target that a call takes."""
    if spec.target_filter is not None:
        spec = replace(spec, target_filter=moments.fixed(session, spec.target_filter))
    shape = shape_of(spec)
    return spec if shape.within is None else replace(spec, shape=shape.over(moments.fixed(session, shape.within)))


def misfits(session: SparkSession, written: str, layout: Layout, target: StructType) -> list[str]:
    """What is wrong with it, a sentence each; runs no Spark job."""
    found: list[str] = layout.once("filter misfits", lambda: list(_misfits(session, written, layout, target)))
    return found


def _misfits(session: SparkSession, written: str, layout: Layout, target: StructType) -> Iterator[str]:
    rows = session.createDataFrame([], target).alias("t")
    names = [c.name for c in layout.whole.columns] if layout.whole else [c.name for c in layout.stored]
    events = session.createDataFrame([], StructType([StructField(n, target.fields[0].dataType) for n in names]))
    said, seen = f"target_filter={written!r}", f"it applies to the target's row t, which has {target.names!r}"
    text = moments.fixed(session, written)
    both = rows.crossJoin(events.alias("s"))
    # Over the rows alone nothing is known of the events; beside them a column of both needs the name of its side.
    for frame, remedy in ((rows, ""), (both, "; write columns as t.<name>")):
        problem = analysed.misfit(frame, said, text, seen=seen + remedy, is_condition=True, is_fixed=True)
        if problem is not None:
            yield f"[INVALID_EXPRESSION] {problem}"
            return
    if not reads_only(both.where(F.expr(text)), rows):  # such as s.day, of rows that have a struct s
        yield f"[INVALID_EXPRESSION] {said} refers to a column of the event; {seen}; write columns as t.<name>"
