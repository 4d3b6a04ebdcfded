"""A kept handle of a table follows what others do to the table."""

from __future__ import annotations

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


@pytest.fixture
def kept(table: Path) -> NativeTable:
    """A handle at that version."""
    found = open_table(str(table))
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
