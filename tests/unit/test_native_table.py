"""A kept handle of a table follows what others do to the table: by stats on a disk, by a store's objects elsewhere."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from stream_merge.tables.delta_rs.table import NativeTable, open_table

COMMITS = 5


def rows(number: int) -> pa.Table:
    return pa.table({"id": pa.array([number], pa.int64())})


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A table of one version."""
    write_deltalake(str(tmp_path / "table"), rows(0))
    return tmp_path / "table"


@pytest.fixture(params=["path", "URI"])
def kept(request: pytest.FixtureRequest, table: Path) -> NativeTable:
    """A handle at that version; by a URI the log is looked into as on an object store."""
    found = open_table(str(table) if request.param == "path" else table.as_uri())
    assert found is not None
    return found


def test_commits_of_others_are_seen(table: Path, kept: NativeTable):
    """One or several at once; without any the version stays."""
    versions = []
    for commits in (0, 1, 0, 3):
        for number in range(commits):
            write_deltalake(str(table), rows(number), mode="append")
        kept.refresh()
        versions.append(kept.version)

    assert versions == [0, 1, 1, 4]
    assert kept.query("SELECT * FROM log").num_rows == COMMITS


def test_a_handle_whose_next_commit_was_tidied_away_finds_the_newest(table: Path, kept: NativeTable):
    """A job that slept while others wrote: with the log's old commits its own is gone, too."""
    for number in range(COMMITS):
        write_deltalake(str(table), rows(number), mode="append")
    DeltaTable(str(table)).create_checkpoint()
    for version in range(COMMITS):
        (table / "_delta_log" / f"{version:020}.json").unlink()

    kept.refresh()

    assert kept.version == COMMITS
    kept.append(rows(9), transaction=None)
    assert DeltaTable(str(table)).version() == COMMITS + 1


def test_a_table_made_anew_is_not_taken_for_the_old_one(table: Path, kept: NativeTable):
    """Filled alike, so that its log has as many commits, of the same sizes."""
    kept.append(rows(7), transaction=("app", 7))
    shutil.rmtree(table)
    write_deltalake(str(table), rows(0))
    write_deltalake(str(table), rows(8), mode="append")

    kept.refresh()

    assert kept.version == 1
    assert sorted(kept.query("SELECT id FROM log")["id"].to_pylist()) == [0, 8]
    assert kept.transaction("app") is None


@pytest.mark.parametrize("write", ["append", "merge", "pack", "replace"])
def test_own_commits_are_known_again(kept: NativeTable, write: str):
    """Whatever they add: the handle stays the same one, with the transactions that it knows."""
    kept.append(rows(1), transaction=("before", 1))
    if write == "append":
        kept.append(rows(2), transaction=("app", 3))
    elif write == "merge":
        kept.merge(
            rows(1),
            "s.id = t.id",
            lambda merger: merger.when_matched_delete(),
            transaction=("app", 3),
            user_metadata="",
        )
    else:
        getattr(kept, write)(*([rows(2)] if write == "replace" else []))
    handle, version = kept._table, kept.version

    kept.refresh()

    assert (kept._table, kept.version) == (handle, version)
    known = open_table(kept.location)
    assert known is not None
    apps = ("before", "app")
    assert [kept.transaction(app) for app in apps] == [known.transaction(app) for app in apps]


def test_transactions_of_others_are_read_again(table: Path, kept: NativeTable):
    other = open_table(str(table))
    assert (kept.transaction("app"), other is None) == (None, False)
    other.append(rows(1), transaction=("app", 4))

    assert kept.transaction("app") is None
    kept.refresh()
    assert kept.transaction("app") == 4
