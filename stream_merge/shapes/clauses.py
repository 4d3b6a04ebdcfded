"""The clauses of a merge as values, for every engine.

Conditions are about one event and, where there is one, the row of its key. Each is either true or false, never
unknown: a renderer must decide `Newer`, `SamePosition`, `SameSequence` and `Changed` also where a NULL is compared,
so that `Not` means the opposite.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from pyspark.sql import Column


@dataclass(frozen=True, slots=True)
class Always:
    """No condition."""


@dataclass(frozen=True, slots=True)
class Newer:
    """The event's sequence is greater than the row's, component by component; a NULL of the row is the least there."""


@dataclass(frozen=True, slots=True)
class SameSequence:
    """The event has the row's sequence."""


@dataclass(frozen=True, slots=True)
class SamePosition:
    """The first components of the event's sequence equal the row's: both are from one position of the source's log."""

    components: int


@dataclass(frozen=True, slots=True)
class Changed:
    """The event differs from the row in a stored column, by Spark's `<=>`: NaN equals NaN, and 0.0 equals -0.0."""


@dataclass(frozen=True, slots=True)
class IsDelete:
    """The event is a delete."""


@dataclass(frozen=True, slots=True)
class HasValue:
    """The row is not NULL in a column of the target."""

    column: str


@dataclass(frozen=True, slots=True)
class Holds:
    """User SQL over the row (`t`) alone is TRUE: not FALSE, not NULL."""

    written: str


@dataclass(frozen=True, slots=True)
class Not:
    """The opposite of a condition."""

    condition: Condition


@dataclass(frozen=True, init=False)
class _Several:
    conditions: tuple[Condition, ...]

    def __init__(self, *conditions: Condition) -> None:
        object.__setattr__(self, "conditions", conditions)


class And(_Several):
    """All conditions hold."""


class Or(_Several):
    """At least one condition holds."""


@dataclass(frozen=True, slots=True, eq=False)
class Opaque:
    """A user's SQL over the event (`s`) and the row (`t`): only Spark executes it.

    As a condition it holds where it is TRUE, as in Delta, and stands alone: it may be NULL, so it is never negated.
    """

    written: str | Column


Condition: TypeAlias = (
    Always | Newer | SameSequence | SamePosition | Changed | IsDelete | HasValue | Holds | Not | And | Or | Opaque
)

Assignments: TypeAlias = Mapping[str, str | Opaque]
"""Column of the target -> column of the event, both by plain name, or a user's SQL."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Delete:
    """WHEN MATCHED: the row is deleted."""

    when: Condition


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """WHEN MATCHED: columns of the row take the event's values."""

    when: Condition
    values: Assignments


@dataclass(frozen=True, kw_only=True, slots=True)
class Insert:
    """WHEN NOT MATCHED: the event becomes a row."""

    when: Condition
    values: Assignments


@dataclass(frozen=True, kw_only=True, slots=True)
class DeleteMissing:
    """WHEN NOT MATCHED BY SOURCE: a row whose key no event has is deleted."""

    when: Condition


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateMissing:
    """WHEN NOT MATCHED BY SOURCE: columns of a row whose key no event has take values over the row alone."""

    when: Condition
    values: Assignments


Clause: TypeAlias = Delete | Update | Insert | DeleteMissing | UpdateMissing
