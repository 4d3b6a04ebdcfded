"""Tables of a Hive metastore, named in its catalog.

A process with a JVM of its own: which catalog a session has is chosen when its JVM starts. It makes all checks in turn,
and each test looks at what one of them saw.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import services

TESTS = Path(__file__).parents[1]
CHECKS = ("engines", "moved", "moved_under_a_query", "odd_place", "refusals", "managed_by_a_catalog", "commands")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each check saw; the trace of one that failed."""
    services.need()
    root = tmp_path_factory.mktemp("hive")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    command = [sys.executable, str(TESTS / "hive_child.py"), *CHECKS]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found["root"] = root
    return found


@pytest.mark.parametrize(("engine", "calls"), [("driver", 3), ("spark", 5)])
def test_each_engine_merges_a_table_by_its_name(seen: dict[str, Any], engine: str, calls: int) -> None:
    """The catalog is asked once a batch for each table: target, remembered deletes, quarantine.

    Delta asks again for those that Spark writes to.
    """
    found = seen["engines"][engine]

    assert found["rows"] == [[1, 2, "v2"], [2, 2, None]]
    assert set(found["engines"]) == {engine}
    assert found["calls"] <= calls


def test_side_tables_lie_in_the_schema_of_their_target(seen: dict[str, Any]) -> None:
    tables = [f"by_{engine}" for engine in ("driver", "spark")]

    assert seen["engines"]["tables"] == sorted(
        prefix + table
        for table in tables
        for prefix in ("", "__stream_merge_quarantine_", "__stream_merge_tombstones_")
    )


def test_who_writes_to_a_table_is_known_where_it_lies(seen: dict[str, Any]) -> None:
    """Two processes on a local disk are kept apart, or warned, by files beside the table, whatever it is called."""
    assert seen["engines"]["writers"] == [f"__stream_merge_writers_by_{engine}" for engine in ("driver", "spark")]
    assert seen["commands"]["locks"] == ["__stream_merge_lock_orders"]


def test_a_short_name_belongs_to_the_current_catalog(seen: dict[str, Any]) -> None:
    """One that makes no Delta tables, and says so: none is made in Spark's own."""
    assert "'short' cannot be created: [NOT_SUPPORTED_IN_JDBC_CATALOG" in seen["refusals"]["short"]


def test_a_table_that_was_made_again_elsewhere_is_never_merged_where_it_was(seen: dict[str, Any]) -> None:
    """Outside of a query nobody knows that it should hold more."""
    assert seen["moved"] == {"old": [[0, 1, "a"]], "new": [[1, 1, "a"]]}


def test_a_query_stops_at_a_table_that_was_made_again_elsewhere(seen: dict[str, Any]) -> None:
    found = seen["moved_under_a_query"]

    assert "[TARGET_REPLACED]" in found["said"]
    assert (found["old"], found["new"]) == ([[0, 1, "a"]], [])


def test_a_location_with_signs_of_uris_is_that_very_place(seen: dict[str, Any]) -> None:
    assert seen["odd_place"] == [[1, 1, "a"]]


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("shop.parquet_table", "exists but is not a Delta table"),
        ("shop.orc_table", "exists but is not a Delta table"),
        ("shop.some_view", "is a view"),
        ("some_temporary_view", "is a view"),
        ("shop.folder_gone", "but no Delta table is there; restore the table, or drop the name"),
        ("nowhere.t", "does not exist; create it (CREATE SCHEMA `spark_catalog`.`nowhere`), or correct the name"),
        ("nowhere.shop.t", "which is not a catalog of this session"),
        ("spark_catalog.a.b.t", "has too many parts for Spark's catalog"),
        ("shop.`a b`", "[INVALID_SCHEMA_OR_RELATION_NAME]"),
        ("shop.`a/b`", "[INVALID_SCHEMA_OR_RELATION_NAME]"),
        ("shop..t", "is not a valid table name in Spark"),
    ],
)
def test_a_name_that_is_no_delta_table_is_one_sentence(seen: dict[str, Any], target: str, said: str) -> None:
    found = seen["refusals"][target]

    assert found.startswith("ConfigError: ")
    assert said in found
    assert "\n" not in found


def test_a_catalog_that_is_away_is_one_sentence(seen: dict[str, Any]) -> None:
    """Nothing is missing: the same batch may be merged later."""
    found = seen["refusals"]["away.APP.t"]

    assert found.startswith("MergeFailedError: [CATALOG_UNAVAILABLE] the catalog cannot load 'away.APP.t': ")
    assert "\n" not in found


def test_a_table_that_its_catalog_commits_to_is_refused_by_name_and_by_path(seen: dict[str, Any]) -> None:
    """No catalog that commits runs here: the table is one whose protocol says so. Its files are not touched."""
    found = seen["managed_by_a_catalog"]

    assert {said.split(" is managed by its catalog")[0] for said in found["sink"]} == {
        "ConfigError: [CATALOG_NOT_SUPPORTED] target '`spark_catalog`.`shop`.`managed`'",
        f"ConfigError: [CATALOG_NOT_SUPPORTED] target '{seen['root']}/managed'",
    }
    assert found["explain"][0] == 2
    assert found["is_unchanged"]


def test_commands_take_names_of_three_parts(seen: dict[str, Any]) -> None:
    """What they make lies where the metastore says, not in a folder that goes with the command."""
    found = seen["commands"]

    assert [code for code, _ in found["files"]] == [0, 0], found["files"]
    assert (found["rows"], found["quarantined"]) == ([[1, 2, "new"]], 1)
    assert found["maintain"] == [0, "nothing to do\n"]
    assert found["explain"][0] == 2
    assert "only Spark knows its location (DESCRIBE DETAIL shop.orders)" in found["explain"][1]
    assert found["place"] == f"file:{seen['root']}/spark-warehouse/shop.db/orders"
