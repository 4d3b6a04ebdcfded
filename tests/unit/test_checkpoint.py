"""What a checkpoint tells of a batch and of where batches were merged; files as Spark writes them, without Spark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stream_merge import ConfigError
from stream_merge.spark.checkpoint import Checkpoint, Destination

HERE = Destination(identity="query", location="file:/tables/orders", label="orders")


def offsets(folder: Path, batch_id: int, *ends: str, version: str = "v1") -> None:
    (folder / "offsets").mkdir(exist_ok=True)
    about = json.dumps({"batchTimestampMs": 1_700_000_000_000 + batch_id})
    (folder / "offsets" / str(batch_id)).write_text("\n".join((version, about, *ends)))


def log_of_files(folder: Path, name: str, *entries: tuple[str, int]) -> None:
    (folder / "sources" / "0").mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"path": path, "timestamp": 1, "batchId": batch}) for path, batch in entries)
    (folder / "sources" / "0" / name).write_text("\n".join(("v1", *lines)))


def fingerprint(folder: Path, batch_id: int) -> str | None:
    return Checkpoint.on_disk(str(folder)).fingerprint(batch_id)


@pytest.mark.parametrize(("version", "end"), [("v1", '{"logOffset":%d}'), ("v2", '0:{"logOffset":%d}')])
def test_files_are_told_apart_under_the_same_offset(tmp_path: Path, version: str, end: str):
    """The offset of a file source is a number, whatever the files; the second way is Spark 4.2's offset log v2."""
    offsets(tmp_path, 0, end % 0, version=version)
    offsets(tmp_path, 1, end % 1, version=version)
    log_of_files(tmp_path, "1", ("b.json", 1))
    before = fingerprint(tmp_path, 1)
    log_of_files(tmp_path, "1", ("other.json", 1))

    assert before is not None
    assert fingerprint(tmp_path, 1) not in (None, before)


@pytest.mark.parametrize("files", [10, 30_000], ids=["a short log", "one longer than what is read of it first"])
def test_a_packed_log_tells_the_same_as_the_log_before(tmp_path: Path, files: int):
    """Spark packs every tenth, with all files since the start; the batch may have taken many."""
    for batch_id, end in ((0, 0), (9, 9), (10, 10)):
        offsets(tmp_path, batch_id, json.dumps({"logOffset": end}))
    offsets(tmp_path, 8, json.dumps({"logOffset": 8}))
    mine = [(f"a file with a long name {number}.json", 9) for number in range(files)]
    log_of_files(tmp_path, "9", *mine)
    alone = fingerprint(tmp_path, 9)
    (tmp_path / "sources" / "0" / "9").unlink()
    log_of_files(tmp_path, "9.compact", *((f"{number}.json", number) for number in range(9)), *mine)

    assert fingerprint(tmp_path, 9) == alone


def test_times_of_a_batch_are_no_part_of_its_content(tmp_path: Path):
    offsets(tmp_path, 3, '{"topic":{"0":5}}')
    first = fingerprint(tmp_path, 3)
    (tmp_path / "offsets" / "3").write_text('v1\n{"batchTimestampMs":1}\n{"topic":{"0":5}}')
    assert first is None  # nobody knows where it starts
    offsets(tmp_path, 2, '{"topic":{"0":1}}')

    same = fingerprint(tmp_path, 3)
    offsets(tmp_path, 3, '{"topic":{"0":5}}')
    assert fingerprint(tmp_path, 3) == same
    offsets(tmp_path, 3, '{"topic":{"0":6}}')
    assert fingerprint(tmp_path, 3) != same


def test_a_note_that_a_crash_has_cut_is_written_again(tmp_path: Path):
    checkpoint = Checkpoint.on_disk(str(tmp_path))
    checkpoint.note(HERE)
    (note,) = (tmp_path / "stream_merge_targets").iterdir()
    note.write_text('{"identity": "que')
    assert checkpoint.destinations() is None

    checkpoint.note(HERE)

    assert checkpoint.destinations() == [HERE]


def test_of_a_table_the_merge_counts_and_not_the_call_before(tmp_path: Path):
    checkpoint = Checkpoint.on_disk(str(tmp_path))
    merged = Destination(identity="query", location=HERE.location, label="orders", table_id="a table")
    checkpoint.note(HERE)
    checkpoint.note(merged)

    assert checkpoint.destinations() == [merged]


def test_a_table_that_was_built_anew_takes_the_place_of_the_one_before(tmp_path: Path):
    """By a query whose first batch was delivered again, after somebody has dropped what it had begun."""
    checkpoint = Checkpoint.on_disk(str(tmp_path))
    one, other = (
        Destination(identity="query", location=HERE.location, label="orders", table_id=table_id)
        for table_id in ("a table", "another")
    )
    checkpoint.note(one)
    checkpoint.note(other)

    assert checkpoint.destinations() == [other]


def test_a_checkpoint_that_does_not_name_its_query_is_told(tmp_path: Path):
    (tmp_path / "metadata").write_text("")

    with pytest.raises(ConfigError, match=r"CHECKPOINT_NOT_USABLE.*does not name its query"):
        Checkpoint.on_disk(str(tmp_path)).query_id()


def test_the_newest_commit_of_each_table_is_kept_apart(tmp_path: Path) -> None:
    """Beside the tables that sinks have noted, which it must not disturb."""
    checkpoint = Checkpoint.on_disk(str(tmp_path))
    assert checkpoint.last_commit("query", "s3a://lake/orders") is None
    checkpoint.note(HERE)

    for version in (1, 2):
        checkpoint.keep_last_commit("query", "s3a://lake/orders", {"versions": [version]})
    checkpoint.keep_last_commit("query", "s3a://lake/items", {"versions": [7]})

    assert checkpoint.last_commit("query", "s3a://lake/orders") == {"versions": [2]}
    assert checkpoint.last_commit("query", "s3a://lake/items") == {"versions": [7]}
    assert checkpoint.last_commit("query/name", "s3a://lake/orders") is None
    assert checkpoint.destinations() == [HERE]
