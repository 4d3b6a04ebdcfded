"""Copies of a table's files on the driver's disk. The table is on a local one, too: delta-rs reads both in one way."""

from __future__ import annotations

import fcntl
import gc
import os
import weakref
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from stream_merge.tables.files import folder as folders
from stream_merge.tables.files.commit import Commit, ConcurrentWriteException
from stream_merge.tables.files.folder import CopiedFolder
from stream_merge.tables.log.handle import LogHandle

COMMIT = Commit(version=1, now_ms=1, user_metadata=None, metrics={}, transaction=None, parameters={})


@pytest.fixture
def native(tmp_path: Path) -> LogHandle:
    """A table whose files `a`, `b` and `c` have 10 bytes each."""
    write_deltalake(tmp_path / "table", pa.table({"id": [1]}))
    for name in ("a", "b", "c", "p=%C3%A4/d"):
        file = tmp_path / "table" / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(name[-1].encode() * 10)
    found = LogHandle(str(tmp_path / "table"))
    found.scratch = tmp_path / "scratch"
    return found


@pytest.fixture
def folder(native: LogHandle, request: pytest.FixtureRequest) -> CopiedFolder:
    return CopiedFolder(native, request.node.name)


def there(folder: CopiedFolder) -> set[str]:
    paths = (path for path in folder.root.rglob("*") if path.is_file() and path.name != "in-use")
    return {str(path.relative_to(folder.root)) for path in paths}


def test_files_are_there_while_they_are_held(folder: CopiedFolder) -> None:
    """Under their decoded paths, whatever these look like."""
    with folder.holding({"a": 10, "p=%C3%A4/d": None}):
        assert (folder.root / "a").read_bytes() == b"a" * 10
        assert (folder.root / "p=%C3%A4/d").read_bytes() == b"d" * 10
    assert folder.root.is_relative_to(folder.root.parent)


def test_a_file_is_fetched_once(folder: CopiedFolder, native: LogHandle) -> None:
    with folder.holding({"a": 10}):
        pass
    (Path(native.location) / "a").unlink()
    with folder.holding({"a": 10}):
        assert (folder.root / "a").read_bytes() == b"a" * 10


def test_a_file_that_is_not_there_is_an_error_that_leaves_nothing(folder: CopiedFolder) -> None:
    with pytest.raises(FileNotFoundError), folder.holding({"a": 10, "x": 10}):
        pytest.fail("the block must not run")
    assert there(folder) <= {"a"}


def test_a_file_of_another_size_than_the_log_says_is_an_error(folder: CopiedFolder) -> None:
    with pytest.raises(OSError, match=r"'a' of .* has 10 bytes, and 11 by the log"), folder.holding({"a": 11}):
        pytest.fail("the block must not run")
    assert there(folder) == set()


def test_the_least_recently_used_are_given_up(folder: CopiedFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "MOST_BYTES", 25)
    for name in ("a", "b", "a", "c"):
        with folder.holding({name: 10}):
            assert name in there(folder)
    assert there(folder) == {"a", "c"}


def test_what_is_held_is_not_given_up_for_what_is_fetched_with_it(
    folder: CopiedFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest is wanted again, with one that needs room."""
    monkeypatch.setattr(folders, "MOST_BYTES", 25)
    for name in ("a", "b"):
        with folder.holding({name: 10}):
            pass
    with folder.holding({"a": 10, "c": 10}):
        assert there(folder) == {"a", "c"}


def test_a_folder_whose_name_is_a_pattern_is_told_before(native: LogHandle, tmp_path: Path) -> None:
    """DuckDB would look for other files."""
    native.scratch = tmp_path / "a[1]"
    assert "some sign means any name" in str(CopiedFolder(native, "pattern").obstacle({"a": 10}))


def test_more_than_fits_is_told_before(folder: CopiedFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "MOST_BYTES", 25)
    assert folder.obstacle({"a": 10, "b": 10}) is None
    assert "may be kept on the driver's disk" in str(folder.obstacle({"a": 10, "b": 10, "c": 10}))


@pytest.mark.parametrize(
    ("kinds", "refused"),
    [
        ({"/": "ext4"}, False),
        ({"/": "ext4", "{tmp}": "tmpfs"}, True),
        ({"/": "tmpfs", "{tmp}": "ext4"}, False),
        ({}, False),
    ],
)
def test_memory_is_not_taken_for_a_disk(
    native: LogHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kinds: dict[str, str], refused: bool
) -> None:
    """By the innermost mount; Kubernetes may give Spark's local folders from a container's memory."""
    mounts = tmp_path / "mounts"
    mounts.write_text("".join(f"x {place.format(tmp=tmp_path)} {kind} rw 0 0\n" for place, kind in kinds.items()))
    monkeypatch.setattr(folders, "_MOUNTS", mounts)
    folder = CopiedFolder(native, str(kinds))

    assert ("is a tmpfs" in str(folder.obstacle({"a": 10}))) == refused


def test_what_was_written_is_sent_and_kept(folder: CopiedFolder, native: LogHandle) -> None:
    (folder.root / "new").write_bytes(b"new")
    (folder.root / "q=1").mkdir()
    (folder.root / "q=1" / "other").write_bytes(b"other")

    folder.send(["new", "q=1/other"])

    assert (Path(native.location) / "new").read_bytes() == b"new"
    assert (Path(native.location) / "q=1" / "other").read_bytes() == b"other"
    (Path(native.location) / "new").unlink()
    with folder.holding({"new": 3}):
        assert (folder.root / "new").read_bytes() == b"new"


def test_what_merges_write_is_given_up_like_all_others(folder: CopiedFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream whose files are all there fetches none any more; changes are read by no merge."""
    monkeypatch.setattr(folders, "MOST_BYTES", 25)
    (folder.root / "_change_data").mkdir()
    for number in range(9):
        written = [f"new-{number}", f"_change_data/{number}"]
        for path in written:
            (folder.root / path).write_bytes(b"0123456789")
        folder.send(written)
        with folder.holding({f"new-{number}": 10}):
            pass

    assert there(folder) == {"new-7", "new-8"}


def test_what_is_held_stays_when_there_is_no_room_any_more(
    folder: CopiedFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk may have filled up since files were chosen."""
    with folder.holding({"a": 10, "b": 10}):
        monkeypatch.setattr(folders, "MOST_BYTES", 5)
        with folder.holding({"c": None}):
            assert there(folder) == {"a", "b", "c"}
    with folder.holding({"c": 10}):
        assert "c" in there(folder)


def test_files_that_came_before_one_failed_count(folder: CopiedFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError), folder.holding({"a": 10, "x": 10}):
        pytest.fail("the block must not run")
    monkeypatch.setattr(folders, "MOST_BYTES", 5)
    with folder.holding({"b": 10}):
        assert there(folder) == {"b"}


def test_files_of_a_lost_commit_are_deleted_here_and_there(folder: CopiedFolder, native: LogHandle) -> None:
    (folder.root / "new").write_bytes(b"new")
    folder.send(["new"])
    (folder.root / "unsent").write_bytes(b"")

    folder.discard(["new", "unsent", "never"])

    assert there(folder) == set()
    assert not (Path(native.location) / "new").exists()
    (Path(native.location) / "new").write_bytes(b"again")  # of the same name and another size
    with folder.holding({"new": 5}):
        assert (folder.root / "new").read_bytes() == b"again"


@pytest.mark.parametrize(("there", "lost"), [(COMMIT.text(), False), ("{}\n", True)], ids=["ours", "theirs"])
def test_a_version_that_is_there_is_ours_or_lost(
    folder: CopiedFolder, native: LogHandle, there: str, lost: bool
) -> None:
    """A put may be made again after its answer was lost."""

    def exists(version: int, text: str) -> None:
        (Path(native.location) / "_delta_log" / f"{version:020d}.json").write_text(there)
        raise FileExistsError

    native.put = exists
    if not lost:
        folder.commit(COMMIT)
        return
    with pytest.raises(ConcurrentWriteException):
        folder.commit(COMMIT)


def test_another_table_at_the_place_has_copies_of_its_own(native: LogHandle) -> None:
    first = CopiedFolder(native, "first")
    with first.holding({"a": 10}):
        pass

    assert there(CopiedFolder(native, "first")) == {"a"}
    assert there(CopiedFolder(native, "second")) == set()


def test_what_killed_processes_have_left_is_deleted(native: LogHandle, folder: CopiedFolder) -> None:
    """They hold no lock any more; one that does lives."""
    scratch = folder.root.parent
    left, living = (scratch / f"stream-merge-copies-{name}" for name in ("left", "living"))
    for one in (left, living):
        one.mkdir()
        (one / "in-use").touch()
        os.utime(one / "in-use", (1, 1))
        (one / "file").touch()
    with (living / "in-use").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        CopiedFolder(native, "another")

    assert not left.exists()
    assert (living / "file").exists()
    assert folder.root.exists()


def test_a_handle_that_is_gone_is_not_kept(native: LogHandle) -> None:
    """Of a table whose keys are renewed each hour there would be one more each hour."""
    handle = LogHandle(native.location)
    handle.scratch, gone = native.scratch, weakref.ref(handle)
    folder = CopiedFolder(handle, "gone")
    with folder.holding({"a": 10}):
        del handle
    gc.collect()

    assert gone() is None
