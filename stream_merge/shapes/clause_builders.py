"""Builders of MERGE clauses in Delta's words, and the problems that show without Spark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeAlias, get_args

from pyspark.sql import Column

from stream_merge.model import names

Written: TypeAlias = str | Column
"""SQL text, or a column, over the event (`s`) and the row (`t`)."""
Kind = Literal["matched", "not_matched", "not_matched_by_source"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Action = Literal["update", "insert", "delete"]
_ALLOWED: Mapping[Kind, tuple[Action, ...]] = {
    "matched": ("update", "delete"),
    "not_matched": ("insert",),
    "not_matched_by_source": ("update", "delete"),
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Then:
    """One clause: when it applies, and what it does; see `when_matched` and its like."""

    kind: Kind
    action: Action
    condition: Written | None = None
    """None: always."""
    values: Mapping[str, Written] | None = None
    """Column of the target -> its new value. None: every stored column of the event."""
    except_: tuple[str, ...] = field(default=())
    """Columns that are not assigned where all others are."""

    def __repr__(self) -> str:
        if self.action == "delete":
            action = "delete()"
        elif self.values is None:
            action = f"{self.action}_all({f'except_={list(self.except_)!r}' if self.except_ else ''})"
        else:
            assigned = ", ".join(f"{name!r}: {_text(value)}" for name, value in self.values.items())
            action = f"{self.action}({{{assigned}}})"
        return f"when_{self.kind}({'' if self.condition is None else _text(self.condition)}).{action}"

    def problems(self) -> Iterator[str]:
        """Its own problems, without name and code."""
        if self.kind not in KINDS:
            yield f"its kind {self.kind!r} must be one of {', '.join(KINDS)}"
            return
        if self.action not in _ALLOWED[self.kind]:
            yield f"a {self.kind} clause cannot {self.action}; it can {' or '.join(_ALLOWED[self.kind])}"
            return
        if self.condition is not None and not _is_written(self.condition):
            yield f"its condition {self.condition!r} must be SQL text, a Column or None"
        yield from self._value_problems()

    def _value_problems(self) -> Iterator[str]:
        if self.action == "delete":
            if self.values is not None or self.except_:
                yield "a delete assigns no columns; remove them"
            return
        if self.kind == "not_matched_by_source" and self.values is None:
            yield "it has no event to take columns from; name columns and values"
            return
        if self.values is None:
            return
        if self.except_:
            yield "it has both except_ and columns of its own; keep one of them"
        if not self.values:
            yield f"it names no column to {self.action}; give at least one"
        plain = [plain_name(name) for name in self.values if isinstance(name, str)]
        for name, value in self.values.items():
            if not isinstance(name, str) or not name.strip():
                yield f"{name!r} is not a column name"
            elif names.is_reserved(plain_name(name)):
                yield f"it assigns {name!r}; the prefix {names.RESERVED_PREFIX!r} is reserved"
            elif not _is_written(value):
                yield f"the value {value!r} of {name!r} must be SQL text or a Column; write a constant as text: '0'"
        twice = sorted({name for name in plain if plain.count(name) > 1})
        if twice:
            yield f"it names {twice!r} more than once; name each column once"


@dataclass(frozen=True, eq=False)
class _When:
    """A clause without its action."""

    kind: ClassVar[Kind]
    condition: Written | None = None

    def __repr__(self) -> str:
        return f"when_{self.kind}({'' if self.condition is None else _text(self.condition)})"

    def _then(
        self, action: Action, values: Mapping[str, Written] | None = None, except_: str | Sequence[str] = ()
    ) -> Then:
        left_out = (except_,) if isinstance(except_, str) else tuple(except_)
        return Then(kind=self.kind, action=action, condition=self.condition, values=values, except_=left_out)


class WhenMatched(_When):
    """For an event whose key the table has, if the condition holds."""

    kind = "matched"

    def update(self, values: Mapping[str, Written]) -> Then:
        """Columns of the row take these values: target column -> SQL text or Column over `s` and `t`."""
        return self._then("update", values)

    def update_all(self, *, except_: Sequence[str] = ()) -> Then:
        """Every stored column of the event is written over the row's, except these."""
        return self._then("update", except_=except_)

    def delete(self) -> Then:
        """The row is deleted."""
        return self._then("delete")


class WhenNotMatched(_When):
    """For an event whose key the table does not have, if the condition (over `s` alone) holds."""

    kind = "not_matched"

    def insert(self, values: Mapping[str, Written]) -> Then:
        """A row of these values, and NULL (or the column's default) elsewhere: target column -> SQL over `s`."""
        return self._then("insert", values)

    def insert_all(self, *, except_: Sequence[str] = ()) -> Then:
        """A row of every stored column of the event, except these."""
        return self._then("insert", except_=except_)


class WhenNotMatchedBySource(_When):
    """For a row whose key no event of the batch has, if the condition (over `t` alone) holds."""

    kind = "not_matched_by_source"

    def update(self, values: Mapping[str, Written]) -> Then:
        """Columns of the row take these values: target column -> SQL text or Column over `t`."""
        return self._then("update", values)

    def delete(self) -> Then:
        """The row is deleted."""
        return self._then("delete")


def when_matched(condition: Written | None = None) -> WhenMatched:
    """Begin a clause about events whose key the table has; condition over the event `s` and the row `t`."""
    return WhenMatched(condition)


def when_not_matched(condition: Written | None = None) -> WhenNotMatched:
    """Begin a clause about events whose key the table does not have; condition over the event `s`."""
    return WhenNotMatched(condition)


def when_not_matched_by_source(condition: Written | None = None) -> WhenNotMatchedBySource:
    """Begin a clause about rows whose key no event of the batch has; condition over the row `t`."""
    return WhenNotMatchedBySource(condition)


def list_problems(clauses: Sequence[object]) -> list[str]:
    """Every problem of a list of clauses that shows without source and target."""
    if not clauses:
        return ["[INVALID_CLAUSE] Clauses is empty; add a clause, such as when_matched().update_all()"]
    problems: list[str] = []
    unconditional: dict[Kind, int] = {}
    for number, clause in enumerate(clauses, start=1):
        if not isinstance(clause, Then):
            problems.append(
                f"[INVALID_CLAUSE] {clause!r}, number {number}, is not a clause; start with when_matched,"
                " when_not_matched or when_not_matched_by_source and end with an action, as in when_matched().delete()"
            )
            continue
        problems.extend(f"[INVALID_CLAUSE] {named(number, clause)}: {problem}" for problem in clause.problems())
        before = unconditional.get(clause.kind)
        if before is not None:
            problems.append(
                f"[INVALID_CLAUSE] {named(number, clause)} is never reached: clause {before} has no condition; give"
                " that one a condition, or put it last"
            )
        elif clause.condition is None:
            unconditional[clause.kind] = number
    return problems


def named(number: int, clause: Then) -> str:
    """A clause as sentences name it."""
    return f"clause {number}, {clause!r}"


def plain_name(name: str) -> str:
    """A column's name without backticks around it."""
    quoted = len(name) > 2 and name[0] == name[-1] == "`"  # noqa: PLR2004 - two backticks and something in between
    return name[1:-1].replace("``", "`") if quoted else name


def sql_text(written: Written) -> str:
    """SQL text, or how Spark shows a Column."""
    return written if isinstance(written, str) else str(written).removeprefix("Column<'").removesuffix("'>")


def _text(written: object) -> str:
    return repr(sql_text(written)) if isinstance(written, Column) else repr(written)


def _is_written(value: object) -> bool:
    return isinstance(value, Column) or (isinstance(value, str) and bool(value.strip()))
