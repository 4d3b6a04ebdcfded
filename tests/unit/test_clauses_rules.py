"""Which lists of clauses are a MERGE, and which settings go with one: Delta's rules at construction. No Spark."""

from __future__ import annotations

from typing import Any

import pytest
from grouped import sink_with

from stream_merge import ConfigError
from stream_merge.model.settings import MergeSpec
from stream_merge.shapes import (
    SHAPES,
    Clauses,
    known_shapes,
    when_matched,
    when_not_matched,
    when_not_matched_by_source,
)
from stream_merge.shapes.clause_builders import Then


def problems(*clauses: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        Clauses(clauses)
    return caught.value.problems


def test_clauses_read_as_they_are_written():
    written = (
        "Clauses([when_matched(\"s.op = 'd'\").delete(), when_matched('s.v > t.v').update({'v': 's.v'}),"
        " when_matched().update_all(except_=['seen_at']), when_not_matched().insert_all(),"
        " when_not_matched_by_source('t.v = 0').update({'v': '1'}), when_not_matched_by_source().delete()])"
    )

    assert repr(eval(written)) == written


def test_a_list_without_a_clause_is_none():
    assert problems() == ("[INVALID_CLAUSE] Clauses is empty; add a clause, such as when_matched().update_all()",)


def test_a_clause_says_when_and_what():
    assert problems(when_matched("s.v = 1"), "delete", when_not_matched().insert_all()) == tuple(
        f"[INVALID_CLAUSE] {shown}, number {number}, is not a clause; start with when_matched, when_not_matched or"
        " when_not_matched_by_source and end with an action, as in when_matched().delete()"
        for number, shown in ((1, "when_matched('s.v = 1')"), (2, "'delete'"))
    )


def test_only_the_last_of_a_kind_lacks_a_condition():
    """Of each kind for itself, whatever the order of kinds."""
    Clauses(
        [
            when_not_matched_by_source().delete(),
            when_matched("s.v = 1").delete(),
            when_not_matched().insert_all(),
            when_matched().update_all(),
        ]
    )

    assert problems(
        when_matched().delete(),
        when_not_matched().insert_all(),
        when_matched("s.v = 1").update_all(),
        when_not_matched_by_source("t.v = 1").delete(),
    ) == (
        "[INVALID_CLAUSE] clause 3, when_matched('s.v = 1').update_all() is never reached: clause 1 has no condition;"
        " give that one a condition, or put it last",
    )


@pytest.mark.parametrize(
    ("clause", "problem"),
    [
        (when_matched("  ").delete(), "its condition '  ' must be SQL text, a Column or None"),
        (when_matched(True).delete(), "its condition True must be SQL text, a Column or None"),
        (when_matched().update({}), "it names no column to update; give at least one"),
        (when_not_matched().insert({}), "it names no column to insert; give at least one"),
        (when_matched().update({"v": 1}), "the value 1 of 'v' must be SQL text or a Column; write a constant as"),
        (when_matched().update({"": "1"}), "'' is not a column name"),
        (
            when_matched().update({"__stream_merge_x": "1"}),
            "it assigns '__stream_merge_x'; the prefix '__stream_merge_' is",
        ),
        (when_not_matched().insert({"v": "1", "`v`": "2"}), "it names ['v'] more than once; name each column once"),
        (Then(kind="matched", action="delete", values={"v": "1"}), "a delete assigns no columns; remove them"),
        (Then(kind="matched", action="delete", except_=("v",)), "a delete assigns no columns; remove them"),
        (Then(kind="matched", action="insert"), "a matched clause cannot insert; it can update or delete"),
        (Then(kind="not_matched", action="delete"), "a not_matched clause cannot delete; it can insert"),
        (Then(kind="never", action="delete"), "its kind 'never' must be one of matched, not_matched, not_matched_by_"),
        (Then(kind="not_matched_by_source", action="update"), "it has no event to take columns from; name columns"),
        (
            Then(kind="matched", action="update", values={"v": "1"}, except_=("w",)),
            "it has both except_ and columns of its own; keep one of them",
        ),
    ],
)
def test_each_rule_is_told_with_the_clause(clause: Then, problem: str):
    (said,) = problems(clause)

    assert said.startswith(f"[INVALID_CLAUSE] clause 1, {clause!r}: {problem}")


def test_all_problems_are_told_at_once():
    assert [
        said.split(",")[0] for said in problems(when_matched().update({"v": 1, "": "1"}), when_matched().delete())
    ] == [
        "[INVALID_CLAUSE] clause 1",
        "[INVALID_CLAUSE] clause 1",
        "[INVALID_CLAUSE] clause 2",
    ]


def test_settings_that_clauses_say_already_or_that_only_spark_does_are_refused():
    with pytest.raises(ConfigError) as caught:
        sink_with(
            target="t",
            keys="id",
            shape=Clauses([when_matched().delete()]),
            apply_as_deletes="op = 'd'",
            tombstone_retention_seconds=60,
            engine="driver",
        )

    assert caught.value.problems == (
        "[CONFLICTING_SETTINGS] apply_as_deletes has no effect with shape=Clauses(…); remove it and add a clause,"
        " such as when_matched(\"s.op = 'd'\").delete()",
        "[CONFLICTING_SETTINGS] retention_seconds has no effect with shape=Clauses(…); remove it",
        "[CONFLICTING_SETTINGS] engine='driver' does not execute the SQL of shape=Clauses(…); use 'auto' or 'spark'",
    )


def test_what_clauses_are_about_is_told_from_them():
    inserts = Clauses([when_not_matched("s.v = 1").insert_all(), when_not_matched().insert({"id": "s.id"})])
    missing = Clauses([when_not_matched_by_source().delete()])

    assert (inserts.only_inserts, inserts.concerns_missing) == (True, False)
    assert (missing.only_inserts, missing.concerns_missing) == (False, True)
    spec = MergeSpec(target="t", keys=("id",), sequence_by=(), shape=missing)
    assert (spec.keeps_sequence, spec.only_inserts, spec.concerns_missing) == (False, False, True)


def test_a_shape_that_needs_arguments_has_no_name_to_choose_it_by():
    assert Clauses in SHAPES
    assert Clauses.name not in known_shapes()
