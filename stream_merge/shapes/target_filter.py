"""The user's `target_filter`: checked, with one time per call, as conditions inside and outside."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pyspark.errors import ParseException
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType

from stream_merge.model.settings import MergeSpec
from stream_merge.shapes import clause_analysis, shape_of
from stream_merge.shapes.layout import Layout
from stream_merge.spark.jvm import leaf_spans, reads_only

_TIMES = ("current_date", "curdate", "current_timestamp", "now", "localtimestamp")
_ONLY_CALLED = ("curdate", "now")
"""Without parentheses these are columns (Spark 4.2)."""


def inside(written: str) -> Column:
    """Rows of `t` for which it is TRUE."""
    return F.expr(written)


def outside(written: str) -> Column:
    """All other rows, in a form by which Delta skips files on partition values and statistics."""
    return ~F.expr(written) | F.expr(written).isNull()


def with_fixed_time(session: SparkSession, spec: MergeSpec) -> MergeSpec:
    """The settings of a call, with one time for all its queries."""
    if spec.target_filter is not None:
        spec = replace(spec, target_filter=fixed(session, spec.target_filter))
    shape = shape_of(spec)
    return spec if shape.within is None else replace(spec, shape=shape.over(fixed(session, shape.within)))


def fixed(session: SparkSession, written: str) -> str:
    """The SQL with a literal for each function of the current time.

    Spark gives each query a time of its own: a row inside for the check, and outside for the MERGE, would be there
    twice. Cost: nothing where no time is used; else one query without a job.
    """
    if not any(name in written.lower() for name in _TIMES):
        return written
    try:
        spans = leaf_spans(session, written)
    except ParseException:  # `misfits` names it
        return written
    ((day, micros, clock),) = session.sql(
        "SELECT CAST(current_date() AS STRING), unix_micros(current_timestamp()), CAST(localtimestamp() AS STRING)"
    ).collect()
    date, instant = f"DATE '{day}'", f"timestamp_micros({micros})"
    literals = dict(zip(_TIMES, (date, date, instant, instant, f"TIMESTAMP_NTZ '{clock}'"), strict=True))
    for start, end in reversed(spans):
        name, called, _ = written[start:end].partition("(")
        name = name.strip().lower()
        if name in literals and (called or name not in _ONLY_CALLED):
            written = written[:start] + literals[name] + written[end:]
    return written


def misfits(session: SparkSession, written: str, layout: Layout, target: StructType) -> list[str]:
    """Every problem of the filter; runs no Spark job."""
    return layout.once("filter misfits", lambda: list(_misfits(session, written, layout, target)))


def _misfits(session: SparkSession, written: str, layout: Layout, target: StructType) -> Iterator[str]:
    rows = session.createDataFrame([], target).alias("t")
    names = [c.name for c in layout.whole.columns] if layout.whole else [c.name for c in layout.stored]
    events = session.createDataFrame([], StructType([StructField(n, target.fields[0].dataType) for n in names]))
    what, seen = f"target_filter={written!r}", f"it applies to the target's row t, which has {target.names!r}"
    text = fixed(session, written)
    both = rows.crossJoin(events.alias("s"))
    # The rows alone have no column of events; beside these a column of both needs its side's name.
    for frame, remedy in ((rows, ""), (both, "; write columns as t.<name>")):
        problem = clause_analysis.misfit(frame, what, text, seen=seen + remedy, is_condition=True, is_fixed=True)
        if problem is not None:
            yield f"[INVALID_EXPRESSION] {problem}"
            return
    if not reads_only(both.where(F.expr(text)), rows):  # such as s.day, of rows that have a struct s
        yield f"[INVALID_EXPRESSION] {what} refers to a column of the event; {seen}; write columns as t.<name>"
