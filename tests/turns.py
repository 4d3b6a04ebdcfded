"""What a change waits for: the tests marked `smoke` on each engine, those of `tests/unit`, and a quarter of all others.

Four turns see every test, twelve see each on every engine that it is for, and sixteen each random history. A change has
the turn that the hash of its commit says, so that one commit always sees the same tests. `make test-all` leaves nothing
out.
"""

from __future__ import annotations

from binascii import crc32
from collections import Counter
from collections.abc import Iterable

import pytest

LONG_FILES = (
    "test_debezium_process",
    "test_image",
    "test_prometheus",
    "test_job_process",
    "test_cluster",
    "test_contract_order",
    "test_contract_rows",
    "test_differential",
    "test_conflicts",
    "test_hive",
    "test_s3_races",
    "test_store_faults",
    "test_s3",
    "test_s3_process",
    "test_contract_tombstones",
    "test_contract_names",
    "test_crash",
    "test_widening",
    "test_delivery",
    "test_kube_play",  # once test_image has built the image
)
"""Those that take longest come first, so that none is run alone at the end."""
CORE_FILES = frozenset(
    {
        "test_commit_fate",
        "test_conflict_classes",
        "test_contract_order",
        "test_contract_quarantine",
        "test_contract_rows",
        "test_contract_tombstones",
        "test_evaluated_once",
        "test_idempotency",
        "test_insert_only",
        "test_made_by_an_older_version",
        "test_snapshot",
    }
)
"""What the guarantees rest on, as far as eight minutes go: `make test` takes these files, and of `tests/contract` else
what is marked `smoke`."""
PARTS = 4
"""One in so many tests has its turn with a change."""


def rank(stem: str) -> int:
    """Where a file comes by its length, from the longest on."""
    return LONG_FILES.index(stem) if stem in LONG_FILES else len(LONG_FILES)


def core(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """What `make test` has: unit, core and smoke tests; on Spark, of a test with many parameters the first and last."""
    wanted = [item for item in items if _is_core(item)]
    of_test: dict[str, list[pytest.Item]] = {}
    for item in wanted:
        of_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = {
        id(item)
        for same in of_test.values()
        for item in same[1:-1]
        if item.path.parent.name != "unit" and item.get_closest_marker("smoke") is None
    }
    return [item for item in wanted if id(item) not in left_out]


def _is_core(item: pytest.Item) -> bool:
    folder, stem = item.path.parent.name, item.path.stem
    return folder == "unit" or stem in CORE_FILES or item.get_closest_marker("smoke") is not None


class Turn:
    """Which tests have their turn.

    Args:
        turn: any number from 0 on.
        items: all tests that were collected.
        parameter: of tests, that names the engine.
    """

    def __init__(self, turn: int, items: list[pytest.Item], parameter: str) -> None:
        self._turn = turn
        files = {item.path.stem for item in items if item.path.parent.name == "process"}
        by_length = sorted(files, key=lambda stem: (rank(stem), stem))
        self._part_of_file = {stem: number % PARTS for number, stem in enumerate(by_length)}
        """Tests of one of these files share what takes longest: their processes."""
        self._about: dict[str, str] = {}
        self._ways: dict[str, list[str]] = {}
        seen: Counter[str] = Counter()
        for item in items:
            engine = _engine(item, parameter)
            name = getattr(item, "originalname", item.name)
            seen[f"{item.path.name}::{name} {engine}"] += 1
            nth = seen[f"{item.path.name}::{name} {engine}"]
            about = item.nodeid if engine is None else f"{item.path.name}::{name} {nth}"
            self._about[item.nodeid] = about
            self._ways.setdefault(about, []).append(item.nodeid)

    def has(self, item: pytest.Item) -> bool:
        """Whether the test has its turn, on this engine."""
        if item.path.parent.name == "unit" or item.get_closest_marker("smoke") is not None:
            return True
        about = self._about[item.nodeid]
        own = crc32(about.encode())
        if self._part_of_file.get(item.path.stem, own % PARTS) != self._turn % PARTS:
            return False
        ways = self._ways[about]
        return ways[(self._turn // PARTS + own // PARTS) % len(ways)] == item.nodeid


def _engine(item: pytest.Item, parameter: str) -> str | None:
    """The one that the test is for, None where it is for none of its own."""
    callspec = getattr(item, "callspec", None)
    found = None if callspec is None else callspec.params.get(parameter)
    return None if found is None else str(found)
