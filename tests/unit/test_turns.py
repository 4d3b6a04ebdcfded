"""Which tests a change waits for. Arithmetic over what was collected: no Spark."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from turns import PARTS, Turn

ENGINES = ("auto", "spark", "rewrite")


def collected(file: str, name: str, engine: str | None = None, param: str | None = None, mark: str = "") -> Any:
    """What `Turn` looks at of a collected test."""
    ids = "-".join(text for text in (engine, param) if text)
    params = {key: value for key, value in (("judged_by", engine), ("param", param)) if value}
    return SimpleNamespace(
        path=Path("tests") / file,
        name=name,
        originalname=name,
        nodeid=f"tests/{file}::{name}[{ids}]",
        callspec=SimpleNamespace(params=params),
        get_closest_marker=lambda wanted: wanted == mark or None,
    )


def taken(items: list[Any], turn: int) -> list[str]:
    chosen = Turn(turn, items, "judged_by")
    return [item.nodeid for item in items if chosen.has(item)]


MANY = [
    collected("contract/test_rows.py", f"test_{number}", engine, param)
    for number in range(60)
    for engine in ENGINES
    for param in ("a", "b")
]


def test_all_turns_see_every_test_and_three_times_as_many_each_on_every_engine() -> None:
    def about(nodeid: str) -> str:
        return nodeid.replace("auto", "").replace("spark", "").replace("rewrite", "")

    turns = [taken(MANY, turn) for turn in range(3 * PARTS)]

    assert [len(turn) for turn in turns[:PARTS]] == [len(turn) for turn in turns[PARTS : 2 * PARTS]]
    assert sorted(map(about, (nodeid for turn in turns[:PARTS] for nodeid in turn))) == sorted(
        {about(item.nodeid) for item in MANY}
    )
    assert Counter(nodeid for turn in turns for nodeid in turn) == Counter(item.nodeid for item in MANY)


@pytest.mark.parametrize("turn", range(PARTS))
def test_unit_and_smoke_tests_have_every_turn_on_every_engine(turn: int) -> None:
    always = [collected("unit/test_retry.py", f"test_{number}") for number in range(3 * PARTS)]
    always += [collected("contract/test_rows.py", "test_marked", engine, mark="smoke") for engine in ENGINES]

    assert set(taken([*MANY, *always], turn)) >= {item.nodeid for item in always}


def test_tests_that_share_a_process_have_their_turn_together() -> None:
    files = ("test_debezium_process", "test_prometheus", "test_job_process", "test_cluster", "test_wheel")
    items = [collected(f"process/{file}.py", f"test_{number}") for file in files for number in range(5)]

    for turn in range(PARTS):
        assert set(Counter(nodeid.split("::")[0] for nodeid in taken(items, turn)).values()) == {5}
    longest = [
        next(turn for turn in range(PARTS) if f"tests/process/{file}.py::test_0[]" in taken(items, turn))
        for file in files
    ]
    assert sorted(longest[:PARTS]) == list(range(PARTS))
