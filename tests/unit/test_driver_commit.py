"""Commits of the driver: what is in them, and that each version is made whole, by one writer."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from stream_merge.tables.files.commit import (
    Commit,
    ConcurrentWriteException,
    UndatedCommitError,
    added_again,
    next_timestamp,
    removed,
    wide,
)
from stream_merge.tables.log.live_files import LocalLog

ADD = {
    "path": "p=%C3%A4/a",
    "partitionValues": {"p": "ä", "q": None},
    "size": 10,
    "modificationTime": 1,
    "dataChange": False,
    "stats": '{"numRecords":3,"minValues":{"d":1.10},"maxValues":{"d":2.0}}',
    "tags": {"T": "1"},
    "baseRowId": 0,
    "defaultRowCommitVersion": 4,
    "clusteringProvider": "liquid",
    "ofTomorrow": [1],
}
OLD = {"storageType": "u", "pathOrInlineDv": "old", "offset": 1, "sizeInBytes": 40, "cardinality": 1}
NEW = {"storageType": "u", "pathOrInlineDv": "new", "offset": 1, "sizeInBytes": 42, "cardinality": 2}
PLAIN = Commit(
    version=3, now_ms=17, user_metadata="ours", metrics={"numSourceRows": 2}, transaction=None, parameters={}
)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    folder = tmp_path / "_delta_log"
    folder.mkdir()
    return folder


def kinds(commit: Commit) -> list[str]:
    return [kind for action in commit.actions() for kind in action]


def info(commit: Commit) -> dict[str, Any]:
    found: dict[str, Any] = next(commit.actions())["commitInfo"]
    return found


def written(log: Path, number: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (log / f"{number:020}.json").read_bytes().split(b"\n") if line]


# -- actions ------------------------------------------------------------------------------------


def test_what_a_commit_says_of_itself():
    commit = replace(PLAIN, user_metadata='{"a": "ü\\n"}', parameters={"predicate": "[]"}, token="t")

    assert kinds(commit) == ["commitInfo"]
    assert info(commit) == {
        "timestamp": 17,
        "operation": "MERGE",
        "operationParameters": {"predicate": "[]"},
        "readVersion": 2,
        "isolationLevel": "Serializable",
        "isBlindAppend": False,
        "operationMetrics": {"numSourceRows": "2"},
        "userMetadata": '{"a": "ü\\n"}',
        "engineInfo": f"stream_merge/{version('stream-merge')}",
        "txnId": "t",
    }


def test_the_time_of_a_commit_comes_first():
    """In-commit timestamps: `commitInfo` is the first action, and Delta reads the time from it alone."""
    dated = replace(PLAIN, in_commit_timestamp=99, transaction=("app", 7), removes=[{"path": "a"}])

    assert (kinds(dated)[0], next(iter(info(dated))), info(dated)["inCommitTimestamp"]) == (
        "commitInfo",
        "inCommitTimestamp",
        99,
    )
    assert "inCommitTimestamp" not in info(PLAIN)


def test_actions_of_a_merge():
    """A transaction only where there is an application id."""
    commit = replace(
        PLAIN,
        transaction=("app", 7),
        removes=[removed(ADD, 17)],
        adds=[{"path": "b"}, {"path": "c"}],
        changes=[{"path": "_change_data/d"}],
    )
    actions = list(commit.actions())

    assert kinds(commit) == ["commitInfo", "txn", "remove", "add", "add", "cdc"]
    assert actions[1] == {"txn": {"appId": "app", "version": 7, "lastUpdated": 17}}
    assert list(commit.actions()) == actions


def test_every_commit_has_a_token_of_its_own():
    made = [Commit(version=1, now_ms=1, user_metadata="", metrics={}, transaction=None, parameters={}) for _ in "ab"]

    assert made[0].token != made[1].token


# -- putting ------------------------------------------------------------------------------------


def test_a_commit_is_a_line_per_action_under_its_version(log):
    commit = replace(PLAIN, user_metadata="ü\u2028\n\U0001f600", removes=[removed(ADD, 17)])
    commit.put(log)

    assert written(log, 3) == list(commit.actions())
    assert [file.name for file in log.iterdir()] == ["00000000000000000003.json"]
    assert (log / f"{3:020}.json").read_bytes().count(b"\n") == 2


def test_a_commit_of_another_writer_stays(log):
    """Whatever it is, also a file of nothing; and nothing of ours is left."""
    theirs = log / f"{3:020}.json"
    theirs.write_text("")

    with pytest.raises(ConcurrentWriteException, match="version 3 was committed by another writer"):
        PLAIN.put(log)
    assert ([file.name for file in log.iterdir()], theirs.read_text()) == ([theirs.name], "")


def test_a_log_that_is_gone_is_no_conflict(log):
    log.rmdir()

    with pytest.raises(FileNotFoundError):
        PLAIN.put(log)


def test_the_name_is_made_under_the_lock(log):
    """What Spark checks and then renames on a local disk must not come in between; the text is written before.

    It is not written into the log, where VACUUM would not find what a crash leaves, nor under a name that VACUUM
    passes over.
    """
    seen: list[list[str]] = []

    def files() -> list[str]:
        return sorted(str(file.relative_to(log.parent)) for file in log.parent.rglob("*") if file.is_file())

    @contextmanager
    def lock() -> Iterator[None]:
        seen.append(files())
        yield
        seen.append(files())

    PLAIN.put(log, lock())

    unnamed, named = f"commit-{PLAIN.token}.json", f"_delta_log/{3:020}.json"
    assert seen == [[unnamed], [named, unnamed]]
    assert files() == [named]


def test_a_lock_that_is_not_given_leaves_nothing(log):
    @contextmanager
    def lock() -> Iterator[None]:
        raise TimeoutError
        yield

    with pytest.raises(TimeoutError):
        PLAIN.put(log, lock())
    assert [path for path in log.parent.rglob("*") if path != log] == []


def test_one_of_many_writers_has_a_version(log):
    """Each commit is there whole, and each loser is told."""
    writers, versions = 8, 25
    start = threading.Barrier(writers)

    def write(writer: int) -> int:
        won = 0
        for number in range(versions):
            start.wait()
            try:
                replace(PLAIN, version=number, token=f"{writer}-{number}", user_metadata=str(writer) * 5000).put(log)
            except ConcurrentWriteException:
                continue
            won += 1
        return won

    with ThreadPoolExecutor(writers) as threads:
        assert sum(threads.map(write, range(writers))) == versions
    assert len(list(log.iterdir())) == versions
    for number in range(versions):
        (action,) = written(log, number)
        writer, of = action["commitInfo"]["txnId"].split("-")
        assert (action["commitInfo"]["userMetadata"], of) == (writer * 5000, str(number))


# -- in-commit timestamps -----------------------------------------------------------------------


@pytest.mark.parametrize(("before", "now", "expected"), [(9, 20, 20), (9, 10, 10), (9, 9, 10), (9, 1, 10)])
def test_a_commit_is_later_than_the_one_before(log, before, now, expected):
    """Also where the clock stands, or goes back."""
    replace(PLAIN, in_commit_timestamp=before, removes=[{"path": "a"}]).put(log)

    assert next_timestamp(LocalLog(log), 3, now) == expected


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        '{"commitInfo":{"timestamp":5}}\n',
        '{"commitInfo":null}\n',
        '{"txn":{}}\n{"commitInfo":{"inCommitTimestamp":5}}\n',
        '{"commitInfo":{"inCommitTimestamp":"soon"}}\n',
        "[]\n",
        "{",
    ],
    ids=["tidied away", "empty", "without", "nothing", "not first", "no number", "no object", "no JSON"],
)
def test_a_commit_without_a_time_before_is_an_error(log, text):
    if text is not None:
        (log / f"{3:020}.json").write_text(text)

    with pytest.raises(UndatedCommitError, match=r"version 3 .*carries no in-commit timestamp"):
        next_timestamp(LocalLog(log), 3, 17)


# -- files --------------------------------------------------------------------------------------


def test_a_file_is_removed_with_all_that_identifies_it():
    """Path as the log spells it; with its vector, for path and vector together are the file's name."""
    assert removed(ADD, 17) == {
        "path": "p=%C3%A4/a",
        "deletionTimestamp": 17,
        "dataChange": True,
        "extendedFileMetadata": True,
        "partitionValues": {"p": "ä", "q": None},
        "size": 10,
        "stats": ADD["stats"],
        "tags": {"T": "1"},
        "baseRowId": 0,
        "defaultRowCommitVersion": 4,
    }
    assert removed({**ADD, "deletionVector": OLD}, 17)["deletionVector"] == OLD


def test_a_file_with_next_to_nothing_known_is_removed():
    bare = {"path": "a", "partitionValues": {}, "size": 0, "modificationTime": 1, "dataChange": True, "stats": None}

    assert removed(bare, 17) == {
        "path": "a",
        "deletionTimestamp": 17,
        "dataChange": True,
        "extendedFileMetadata": True,
        "partitionValues": {},
        "size": 0,
    }


def test_a_file_is_added_again_as_it_is():
    """Everything that the log has of it, but for its vector and how tight its bounds are."""
    before = {**ADD, "deletionVector": OLD}
    again = added_again(before, NEW, 3)

    assert again == {
        **ADD,
        "dataChange": True,
        "deletionVector": NEW,
        "stats": '{"tightBounds":false,"numRecords":3,"minValues":{"d":1.10},"maxValues":{"d":2.0}}',
    }
    assert before["deletionVector"] is OLD


@pytest.mark.parametrize(
    ("stats", "expected"),
    [
        (None, '{"numRecords":9,"tightBounds":false}'),
        ("", '{"numRecords":9,"tightBounds":false}'),
        ("{}", '{"numRecords":9,"tightBounds":false}'),
        ('{"numRecords":5}', '{"tightBounds":false,"numRecords":5}'),
        ('{"minValues":{"a":1}}', '{"numRecords":9,"tightBounds":false,"minValues":{"a":1}}'),
        ('{"numRecords":5,"tightBounds":false}', '{"numRecords":5,"tightBounds":false}'),
        ('{"numRecords":5,"tightBounds":true}', '{"numRecords":5,"tightBounds":false}'),
        ('{"tightBounds": true, "numRecords":5}', '{"tightBounds":false, "numRecords":5}'),
        ('{"numRecords":5,"tightBounds":null}', '{"numRecords":5,"tightBounds":false}'),
        ('{"tightBounds":true}', '{"numRecords":9,"tightBounds":false}'),
        (' { "numRecords" : 5 } ', '{"tightBounds":false, "numRecords" : 5 }'),
        ('{"numRecords":5,"minValues":{"d":0.10000000000000000001}}', None),
        ('{"numRecords":5,"maxValues":{"s":"\\"tightBounds\\":true"}}', None),
    ],
)
def test_statistics_of_a_file_that_loses_rows(stats, expected):
    """Bounds still hold, but are not tight; the text stays, to the last digit."""
    found = wide(stats, 9)

    assert json.loads(found)["tightBounds"] is False
    if expected is None:
        assert found == '{"tightBounds":false,' + stats[1:]
    else:
        assert found == expected


def test_statistics_of_a_column_called_like_them():
    """No bound of the column is taken for the flag; bounds may be lost, for those of a column cannot be told."""
    stats = '{"numRecords":5,"tightBounds":true,"maxValues":{"tightBounds":true}}'

    assert json.loads(wide(stats, 9)) == {"numRecords": 5, "tightBounds": False}
    plain = '{"numRecords":5,"nullCount":{"a":1,"tightBounds":2}}'
    assert json.loads(wide(plain, 9))["numRecords"] == 5
    assert json.loads(wide(plain, 9))["tightBounds"] is False


@pytest.mark.parametrize("stats", ['{"numRecords":null}', '{"numRecords":null,"tightBounds":false}', "[1]", "7"])
def test_a_file_with_a_vector_always_tells_its_rows(stats):
    """Delta protocol, "Deletion Vectors": such a file must have `numRecords`."""
    found: Mapping[str, Any] = json.loads(wide(stats, 9))

    assert (found["numRecords"], found["tightBounds"]) == (9, False)
