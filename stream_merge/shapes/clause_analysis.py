"""Clauses analysed by Spark against the columns of source and target; no job runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, AtomicType, DataType, MapType, NullType, StructField, StructType

from stream_merge.model import names
from stream_merge.shapes.clause_builders import Kind, Then, Written, named, plain_name, sql_text
from stream_merge.shapes.layout import Layout
from stream_merge.spark import columns
from stream_merge.spark.errors import reason
from stream_merge.spark.jvm import FilterTraits, filter_traits, is_never_true
from stream_merge.spark.versions import KEEPS_NULL_STRUCTS


def misfits(session: SparkSession, clauses: Sequence[Then], layout: Layout, target: StructType) -> list[str]:
    """Every problem of the clauses with these columns; some milliseconds per condition and value."""
    sides = _Sides(session, layout, target)
    return [
        f"[INVALID_CLAUSE] {named(number, clause)}: {problem}"
        for number, clause in enumerate(clauses, start=1)
        for problem in sides.problems(clause)
    ]


def handles_marked_events(
    session: SparkSession, clauses: Sequence[Then], mark: str, layout: Layout, target: StructType
) -> bool:
    """Whether no clause writes an event that the boolean source column `mark` marks, unless it asks for the mark.

    The condition of an insert must be false for marked events. So must that of an update, unless it is false for all
    others, or an earlier clause takes every marked event. Where Spark's optimizer cannot tell, it is not false.
    """
    marked, others = (_Sides(session, layout, target, {plain_name(mark): is_marked}) for is_marked in (True, False))
    are_taken = False
    for clause in clauses:
        condition = F.lit(True) if clause.condition is None else _as_column(clause.condition)
        if clause.kind == "not_matched" and not marked.rule_out(clause.kind, condition):
            return False
        if clause.kind == "matched":
            if clause.action == "update" and not (
                are_taken or marked.rule_out(clause.kind, condition) or others.rule_out(clause.kind, condition)
            ):
                return False
            are_taken = are_taken or marked.rule_out(clause.kind, ~F.coalesce(condition, F.lit(False)))
    return True


def stored(name: str, layout: Layout) -> str | None:
    """The stored column of a name in the source or the target."""
    for known in ([c.name for c in layout.stored], [c.source_name for c in layout.stored]):
        column = columns.resolve(plain_name(name), known, case_sensitive=layout.case_sensitive)
        if column is not None:
            return layout.stored[known.index(column)].name
    return None


class _Sides:
    """Empty frames of source and target that clauses are analysed against."""

    def __init__(
        self, session: SparkSession, layout: Layout, target: StructType, known: Mapping[str, bool] | None = None
    ) -> None:
        self._layout = layout
        source = StructType([StructField(c.name, c.dtype) for c in layout.whole.columns] if layout.whole else [])
        values = {name: F.lit(value) for name, value in (known or {}).items()}
        events = session.createDataFrame([], source).withColumns(values).alias("s")
        rows = session.createDataFrame([], target).alias("t")
        self._seen: Mapping[Kind, tuple[DataFrame, str]] = {
            "matched": (rows.crossJoin(events), f"s has {_shown(source.names)}, t has {_shown(target.names)}"),
            "not_matched": (events, f"s has {_shown(source.names)}, there is no row t"),
            "not_matched_by_source": (rows, f"t has {_shown(target.names)}, there is no event s"),
        }
        # stored columns with the events' new fields and wider types
        types = {f.name: f.dataType for f in target.fields} | {c.name: c.dtype for c in layout.stored}
        self._assignable = {name: dtype for name, dtype in types.items() if not names.is_reserved(name)}

    def rule_out(self, kind: Kind, condition: Column) -> bool:
        """Whether a condition is false or NULL for all values of the unknown columns."""
        frame, _ = self._seen[kind]
        return is_never_true(frame.where(condition))

    def problems(self, clause: Then) -> Iterator[str]:
        """Every problem of a clause."""
        if clause.condition is not None:
            yield from self._misfit(clause.kind, "its condition", clause.condition, is_condition=True)
        for name in clause.except_:
            if stored(name, self._layout) is None:
                yield (
                    f"except_ names {name!r}, which is not among the stored columns"
                    f" {_shown(c.source_name for c in self._layout.stored)}"
                )
        assigned: dict[str, str] = {}
        for name, value in (clause.values or {}).items():
            known = list(self._assignable)
            column = columns.resolve(plain_name(name), known, case_sensitive=self._layout.case_sensitive)
            if column is None:
                yield f"the target has no column {plain_name(name)!r} to assign; it has {_shown(self._assignable)}"
            elif column in assigned:
                yield f"{assigned[column]!r} and {name!r} are one column; name each column once"
            else:
                assigned[column] = name
            stored_as = None if column is None else self._assignable[column]
            yield from self._misfit(clause.kind, f"the value of {name!r}", value, stored_as=stored_as)

    def _misfit(
        self, kind: Kind, what: str, written: Written, *, is_condition: bool = False, stored_as: DataType | None = None
    ) -> Iterator[str]:
        frame, seen = self._seen[kind]
        named = f"{what} {sql_text(written)!r}"
        problem = misfit(frame, named, written, seen=seen, is_condition=is_condition, stored_as=stored_as)
        if problem is not None:
            yield problem


def misfit(
    frame: DataFrame,
    what: str,
    written: Written,
    *,
    seen: str,
    is_condition: bool = False,
    is_fixed: bool = False,
    stored_as: DataType | None = None,
) -> str | None:
    """The problem of a condition or a value of a clause, without a code; None if it fits.

    A cast inside a struct, an array or a map is left to Delta: its MERGE fails where there is none.

    Args:
        frame: what the expression is over, without rows.
        what: what the sentence calls the expression.
        written: the expression.
        seen: the columns that it can use.
        is_condition: whether it is a condition, not a value.
        is_fixed: whether it must have the same value in query after query.
        stored_as: the type of the column that a value is for.
    """
    try:
        value = _as_stored(written, stored_as)
        # A filter, as a clause of MERGE, takes neither aggregates nor windows nor generators.
        traits = filter_traits(frame.where(value if is_condition else value.isNull()))
        dtype = None if stored_as is None else _value_type(frame, written)
    except AnalysisException as err:
        return f"{what} does not fit: {reason(err).rstrip(';.')}; {seen}"
    if dtype is not None and stored_as is not None:
        are = f"{what} is {dtype.simpleString()}, and the column is {stored_as.simpleString()}"
        if _are_unlike(dtype, stored_as):
            return f"{are}; {seen}"
        if (
            not KEEPS_NULL_STRUCTS
            and "struct<" in dtype.simpleString()
            and columns.nullable(dtype) != columns.nullable(stored_as)
        ):
            return f"{are}: Delta for Spark 3.5 casts a NULL struct to a struct of NULLs; cast it in the clause"
    return _not_in_merge(what, traits, is_condition=is_condition, is_fixed=is_fixed)


def _not_in_merge(what: str, traits: FilterTraits, *, is_condition: bool, is_fixed: bool) -> str | None:
    """The problem of valid SQL that MERGE does not support."""
    if traits.has_subquery:
        return f"{what} has a subquery, which MERGE does not support; join its table to the events in the stream"
    if is_condition and not traits.is_deterministic:
        return f"{what} is not deterministic, and MERGE evaluates it more than once; make it a column of the stream"
    if is_fixed and traits.asks_for_now:
        return (
            f"{what} may differ from query to query; for the time use current_date(), current_timestamp() or"
            " localtimestamp(), which are fixed per batch"
        )
    return None


def may_be_null(frame: DataFrame, written: Written, stored_as: DataType) -> bool:
    """Whether Spark cannot rule out that a value without a misfit is NULL."""
    return frame.select(_as_stored(written, stored_as).alias("value")).schema["value"].nullable


def _are_unlike(value: DataType, stored: DataType) -> bool:
    """Whether one type is a struct, an array or a map, and the other is not of the same kind: no cast helps."""
    kinds = StructType | ArrayType | MapType
    is_nested = isinstance(value, kinds) or isinstance(stored, kinds)
    return is_nested and not isinstance(value, NullType) and type(value) is not type(stored)


def _as_stored(written: Written, stored_as: DataType | None) -> Column:
    value = _as_column(written)
    # Delta casts a struct's fields by name, Spark by position.
    return value.cast(stored_as) if isinstance(stored_as, AtomicType) else value


def _as_column(written: Written) -> Column:
    return F.expr(written) if isinstance(written, str) else written


def _value_type(frame: DataFrame, written: Written) -> DataType:
    return frame.select(_as_column(written).alias("value")).schema["value"].dataType


def _shown(listed: Iterable[str]) -> str:
    return repr([name for name in listed if not names.is_reserved(name)])
