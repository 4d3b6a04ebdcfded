"""Clauses as users write them against the columns of source and target: analysed by Spark, nothing is run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, AtomicType, DataType, MapType, NullType, StructField, StructType

from stream_merge.model import names
from stream_merge.shapes.layout import Layout
from stream_merge.shapes.written import Kind, Then, Written, named, plain_name, text_of
from stream_merge.spark import columns
from stream_merge.spark.errors import reason
from stream_merge.spark.jvm import FilterTraits, filter_traits, is_never_true
from stream_merge.spark.versions import KEEPS_NULL_STRUCTS


def misfits(session: SparkSession, clauses: Sequence[Then], layout: Layout, target: StructType) -> list[str]:
    """Every problem of the clauses with these columns, a sentence each.

    Args:
        session: whose settings (such as `spark.sql.caseSensitive`) and functions count.
        clauses: in their order.
        layout: how the batch's columns map onto the target.
        target: the columns of the target, or those that it will be made with.

    Cost: no Spark job; a few milliseconds per condition and value.
    """
    sides = _Sides(session, layout, target)
    return [
        f"[INVALID_CLAUSE] {named(number, clause)}: {problem}"
        for number, clause in enumerate(clauses, start=1)
        for problem in sides.problems(clause)
    ]


def handles_marked_events(
    session: SparkSession, clauses: Sequence[Then], mark: str, layout: Layout, target: StructType
) -> bool:
    """Whether no clause writes an event that a column of the source marks unless it asks for the mark.

    The condition of an insert must be false for marked events. So must that of an update, unless it is false for all
    others, or an earlier clause takes every marked event. Where Spark's optimizer cannot tell, it is not false.

    Args:
        session: whose functions count.
        clauses: in their order, without misfits.
        mark: the boolean column of the source.
        layout: how the batch's columns map onto the target.
        target: the columns of the target, or those that it will be made with.
    """
    name = plain_name(mark)
    marked, others = (_Sides(session, layout, target, {name: is_marked}) for is_marked in (True, False))
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
    """The stored column that a user means, by the source's name or the target's."""
    wanted = plain_name(name)
    for known in ([c.name for c in layout.stored], [c.source_name for c in layout.stored]):
        found = columns.resolve(wanted, known, case_sensitive=layout.case_sensitive)
        if found is not None:
            return layout.stored[known.index(found)].name
    return None


class _Sides:
    """Source and target without rows."""

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
        # Of a column that is stored: as it will be, with the events' new fields and wider types.
        types = {f.name: f.dataType for f in target.fields} | {c.name: c.dtype for c in layout.stored}
        self._assignable = {name: dtype for name, dtype in types.items() if not names.is_reserved(name)}

    def rule_out(self, kind: Kind, condition: Column) -> bool:
        """Whether a condition is false or NULL whatever the columns are whose values are not known."""
        frame, _ = self._seen[kind]
        return is_never_true(frame.where(condition))

    def problems(self, clause: Then) -> Iterator[str]:
        """Of one clause."""
        if clause.condition is not None:
            yield from self._of_expression(clause.kind, "its condition", clause.condition, is_condition=True)
        for name in clause.except_:
            if stored(name, self._layout) is None:
                yield (
                    f"except_ names {name!r}, which is not among the stored columns"
                    f" {_shown(c.source_name for c in self._layout.stored)}"
                )
        assigned: dict[str, str] = {}
        for name, value in (clause.values or {}).items():
            known = list(self._assignable)
            found = columns.resolve(plain_name(name), known, case_sensitive=self._layout.case_sensitive)
            if found is None:
                yield f"the target has no column {plain_name(name)!r} to assign; it has {_shown(self._assignable)}"
            elif found in assigned:
                yield f"{assigned[found]!r} and {name!r} are one column; name each column once"
            else:
                assigned[found] = name
            stored_as = None if found is None else self._assignable[found]
            yield from self._of_expression(clause.kind, f"the value of {name!r}", value, stored_as=stored_as)

    def _of_expression(
        self, kind: Kind, what: str, written: Written, *, is_condition: bool = False, stored_as: DataType | None = None
    ) -> Iterator[str]:
        frame, seen = self._seen[kind]
        said = f"{what} {text_of(written)!r}"
        problem = misfit(frame, said, written, seen=seen, is_condition=is_condition, stored_as=stored_as)
        if problem is not None:
            yield problem


def misfit(
    frame: DataFrame,
    said: str,
    written: Written,
    *,
    seen: str,
    is_condition: bool = False,
    is_fixed: bool = False,
    stored_as: DataType | None = None,
) -> str | None:
    """What is wrong with a condition or a value of a clause, without a code; None where nothing is.

    What is inside of a struct, an array or a map is left to Delta: its MERGE fails where it has no cast.

    Args:
        frame: what it is over, without rows.
        said: what it is called.
        written: the condition or the value.
        seen: which columns there are.
        is_condition: whether it decides, and is no value.
        is_fixed: whether it has to mean the same in query after query.
        stored_as: the type of the column that it is the value of.
    """
    try:
        value = _as_stored(written, stored_as)
        # A filter, as a clause of MERGE, takes neither aggregates nor windows nor generators.
        traits = filter_traits(frame.where(value if is_condition else value.isNull()))
        held = None if stored_as is None else _type_of(frame, written)
    except AnalysisException as err:
        return f"{said} does not fit: {reason(err).rstrip(';.')}; {seen}"
    if held is not None and stored_as is not None:
        are = f"{said} is {held.simpleString()}, and the column is {stored_as.simpleString()}"
        if _are_unlike(held, stored_as):
            return f"{are}; {seen}"
        if not KEEPS_NULL_STRUCTS and "struct<" in held.simpleString() and _differ(held, stored_as):
            return f"{are}: Delta for Spark 3.5 casts a NULL struct to a struct of NULLs; cast it in the clause"
    return _not_in_merge(said, traits, is_condition=is_condition, is_fixed=is_fixed)


def _not_in_merge(said: str, traits: FilterTraits, *, is_condition: bool, is_fixed: bool) -> str | None:
    """What MERGE does not take of SQL that is right by itself."""
    if traits.has_subquery:
        return f"{said} has a subquery, which MERGE does not support; join its table to the events in the stream"
    if is_condition and not traits.is_deterministic:
        return f"{said} is not deterministic, and MERGE evaluates it more than once; make it a column of the stream"
    if is_fixed and traits.asks_for_now:
        return (
            f"{said} may differ from query to query; for the time use current_date(), current_timestamp() or"
            " localtimestamp(), which are fixed per batch"
        )
    return None


def may_be_null(frame: DataFrame, written: Written, stored_as: DataType) -> bool:
    """Whether Spark cannot rule out that a value of a clause, which has no misfit, is NULL."""
    return frame.select(_as_stored(written, stored_as).alias("value")).schema["value"].nullable


def _are_unlike(held: DataType, stored: DataType) -> bool:
    """Whether a value is of another kind than its column, where one is a struct, an array or a map: no cast helps."""
    kinds = StructType | ArrayType | MapType
    if not isinstance(held, kinds | NullType) and not isinstance(stored, kinds):
        return False
    return not isinstance(held, NullType) and type(held) is not type(stored)


def _differ(held: DataType, stored: DataType) -> bool:
    return bool(columns.nullable(held) != columns.nullable(stored))


def _as_stored(written: Written, stored_as: DataType | None) -> Column:
    value = _as_column(written)
    # A struct's fields Delta casts by name, Spark by place.
    return value.cast(stored_as) if isinstance(stored_as, AtomicType) else value


def _as_column(written: Written) -> Column:
    return F.expr(written) if isinstance(written, str) else written


def _type_of(frame: DataFrame, written: Written) -> DataType:
    return frame.select(_as_column(written).alias("value")).schema["value"].dataType


def _shown(found: Iterable[str]) -> str:
    return repr([name for name in found if not names.is_reserved(name)])
