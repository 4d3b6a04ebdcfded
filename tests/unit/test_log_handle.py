"""A kept handle of a table follows what others do to the table: by stats on a disk, by a store's objects elsewhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from deltalake.exceptions import DeltaError

from stream_merge.tables.files import rows as files
from stream_merge.tables.log.handle import LogHandle, open_table

COMMITS = 5
NESTED = pa.struct({"a": pa.int64(), "b": pa.string()})


def rows(number: int) -> pa.Table:
    return pa.table({"id": pa.array([number], pa.int64())})


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A table of one version."""
    write_deltalake(str(tmp_path / "table"), rows(0))
    return tmp_path / "table"


@pytest.fixture(params=["path", "URI"])
def kept(request: pytest.FixtureRequest, table: Path) -> LogHandle:
    """A handle at that version; by a URI the log is looked into as on an object store."""
    found = open_table(str(table) if request.param == "path" else table.as_uri())
    assert found is not None
    return found


def test_commits_of_others_are_seen(table: Path, kept: LogHandle):
    """One or several at once; without any the version stays."""
    versions = []
    for commits in (0, 1, 0, 3):
        for number in range(commits):
            write_deltalake(str(table), rows(number), mode="append")
        kept.refresh()
        versions.append(kept.version)

    assert versions == [0, 1, 1, 4]
    assert kept.query("SELECT * FROM log").num_rows == COMMITS


def test_statistics_that_may_be_of_two_columns_are_of_none(tmp_path: Path):
    """A key `a.b` without any lies beside `b` in the struct `a`: its file would be taken for one without the key."""
    path = str(tmp_path / "table")
    held = pa.table({"a": [{"b": 1}], "a.b": [500]})
    write_deltalake(path, held, configuration={"delta.dataSkippingNumIndexedCols": "1"})
    found = open_table(path)

    assert found is not None
    assert [name for name in found.files().column_names if name.startswith(("min.", "max.", "null_count."))] == []


def test_a_handle_whose_next_commit_was_tidied_away_finds_the_newest(table: Path, kept: LogHandle):
    """A job that slept while others wrote: with the log's old commits its own is gone, too."""
    for number in range(COMMITS):
        write_deltalake(str(table), rows(number), mode="append")
    DeltaTable(str(table)).create_checkpoint()
    for version in range(COMMITS):
        (table / "_delta_log" / f"{version:020}.json").unlink()

    kept.refresh()

    assert kept.version == COMMITS


def test_a_table_made_anew_is_not_taken_for_the_old_one(table: Path, kept: LogHandle):
    """Filled alike, so that its log has as many commits, of the same sizes."""
    transaction = CommitProperties(app_transactions=[Transaction("app", 7)])
    write_deltalake(str(table), rows(7), mode="append", commit_properties=transaction)
    kept.refresh()
    assert kept.transaction("app") == 7
    shutil.rmtree(table)
    write_deltalake(str(table), rows(0))
    write_deltalake(str(table), rows(8), mode="append")

    kept.refresh()

    assert kept.version == 1
    assert sorted(kept.query("SELECT id FROM log")["id"].to_pylist()) == [0, 8]
    assert kept.transaction("app") is None


@pytest.mark.parametrize("write", ["append", "rewrite", "replace"])
def test_own_commits_are_known_again(table: Path, write: str):
    """Whatever they add: the handle stays the same one, with the transactions and the rows that it knows."""
    kept = open_table(str(table))
    assert kept is not None
    assert files.rows(kept)["id"].to_pylist() == [0]
    files.append(kept, rows(1), transaction=("before", 1), user_metadata=None)
    if write == "append":
        files.append(kept, rows(2), transaction=("app", 3), user_metadata=None)
    else:
        files.rewrite(kept, rows(2) if write == "replace" else None)
    handle, version = kept._table, kept.version

    kept.refresh()

    assert (kept._table, kept.version) == (handle, version)
    known = open_table(kept.location)
    assert known is not None
    apps = ("before", "app")
    assert [kept.transaction(app) for app in apps] == [known.transaction(app) for app in apps]
    wanted = {"append": [0, 1, 2], "rewrite": [0, 1], "replace": [2]}[write]
    assert sorted(files.rows(kept)["id"].to_pylist()) == sorted(files.rows(known)["id"].to_pylist()) == wanted


def test_transactions_of_others_are_read_again(table: Path, kept: LogHandle):
    assert kept.transaction("app") is None
    transaction = CommitProperties(app_transactions=[Transaction("app", 4)])
    write_deltalake(str(table), rows(1), mode="append", commit_properties=transaction)

    assert kept.transaction("app") is None
    kept.refresh()
    assert kept.transaction("app") == 4


def test_commits_are_told_beside_one_that_delta_rs_cannot_read(table: Path, kept: LogHandle):
    """Spark writes `"readVersion": -1` where a table begins as a clone, and delta-rs gives no commit at all then."""
    for number in (1, 2):
        write_deltalake(str(table), rows(number), mode="append")
    first = table / "_delta_log" / f"{0:020}.json"
    kept.refresh()
    before = kept.history(None)
    actions = [json.loads(line) for line in first.read_text().splitlines()]
    for action in actions:
        action.get("commitInfo", {})["readVersion"] = -1
    first.write_text("".join(f"{json.dumps(action)}\n" for action in actions))

    with pytest.raises(DeltaError, match="-1"):
        DeltaTable(table).history()
    assert kept.history(None) == before
    assert [commit.version for commit in kept.history(2)] == [2, 1]


@pytest.fixture
def remote(table: Path) -> LogHandle:
    """A handle for which a commit takes requests."""
    return LogHandle(table.as_uri())


# -- texts of the log ---------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 1 << 20, (1 << 20) + 1])
def test_a_text_of_any_size_is_read_whole(table: Path, remote: LogHandle, size: int):
    """A first request asks for 1 MiB, which most have less than."""
    (table / "_delta_log" / f"{5:020}.json").write_bytes(b"x" * size)

    assert remote.commit(5) == b"x" * size
    with pytest.raises(FileNotFoundError):
        remote.commit(6)


# -- all rows at once ---------------------------------------------------------------------------
