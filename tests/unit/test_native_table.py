"""A kept handle of a table follows what others do to the table: by stats on a disk, by a store's objects elsewhere."""

from __future__ import annotations

import datetime
import json
import shutil
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, TableFeatures, write_deltalake
from deltalake.exceptions import DeltaError

from stream_merge.tables.log.handle import NativeTable, open_table
from stream_merge.tables.log.objects import Objects

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


def test_statistics_that_may_be_of_two_columns_are_of_none(tmp_path: Path):
    """A key `a.b` without any lies beside `b` in the struct `a`: its file would be taken for one without the key."""
    path = str(tmp_path / "table")
    held = pa.table({"a": [{"b": 1}], "a.b": [500]})
    write_deltalake(path, held, configuration={"delta.dataSkippingNumIndexedCols": "1"})
    found = open_table(path)

    assert found is not None
    assert [name for name in found.files().column_names if name.startswith(("min.", "max.", "null_count."))] == []


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


@pytest.mark.parametrize("write", ["append", "pack", "replace"])
def test_own_commits_are_known_again(kept: NativeTable, write: str):
    """Whatever they add: the handle stays the same one, with the transactions that it knows."""
    kept.append(rows(1), transaction=("before", 1))
    if write == "append":
        kept.append(rows(2), transaction=("app", 3))
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


def test_commits_are_told_beside_one_that_delta_rs_cannot_read(table: Path, kept: NativeTable):
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
def remote(table: Path) -> NativeTable:
    """A handle for which a commit takes requests."""
    return NativeTable(table.as_uri())


# -- texts of the log ---------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 1 << 20, (1 << 20) + 1])
def test_a_text_of_any_size_is_read_whole(table: Path, remote: NativeTable, size: int):
    """A first request asks for 1 MiB, which most have less than."""
    (table / "_delta_log" / f"{5:020}.json").write_bytes(b"x" * size)

    assert remote.commit(5) == b"x" * size
    with pytest.raises(FileNotFoundError):
        remote.commit(6)


# -- all rows at once ---------------------------------------------------------------------------

WHENEVER = [datetime.datetime(year, 3, 1, 12, tzinfo=datetime.UTC) for year in (1, 1969, 9999)]
COLUMNS = {
    "whole": pa.array([1, None, -(2**63)], pa.int64()),
    "of Spark's short": pa.array([1, None, -3], pa.int16()),
    "amount": pa.array([Decimal("1.10"), None, Decimal("-9999999999999999.99")], pa.decimal128(18, 2)),
    "text": pa.array(["", None, "ä ü"], pa.string()),
    "bytes": pa.array([b"", None, bytes([0, 255])], pa.binary()),
    "day": pa.array([moment.date() for moment in WHENEVER], pa.date32()),
    "at": pa.array(WHENEVER, pa.timestamp("us", tz="UTC")),
    "local": pa.array([moment.replace(tzinfo=None) for moment in WHENEVER], pa.timestamp("us")),
    "float": pa.array([float("nan"), -0.0, float("inf")], pa.float64()),
    "yes": pa.array([True, None, False], pa.bool_()),
    "nested": pa.array([{"c1": {"a": 1, "b": "x"}}, {"c1": None}, None], pa.struct({"c1": NESTED})),
    "list": pa.array([[1, None], [], None], pa.list_(pa.int32())),
}


def test_rows_that_arrow_reads_are_those_of_delta_rs(tmp_path: Path):
    """Of every type that a key or a sequence may have, in two files, from a table without a disk."""
    table = pa.table(COLUMNS)
    write_deltalake(str(tmp_path / "table"), table)
    NativeTable(str(tmp_path / "table")).append(table.slice(1), transaction=None)
    remote = NativeTable((tmp_path / "table").as_uri())

    rows, theirs = remote.rows(), remote.query("SELECT * FROM log")

    assert rows.schema == theirs.schema
    assert sorted(map(repr, rows.to_pylist())) == sorted(map(repr, theirs.to_pylist()))
    assert rows.num_rows == 5


INNER = pa.StructArray.from_arrays([COLUMNS["nested"]], ["o"])
PARTS = {
    "of the rows": pa.table({"id": [1, 2, 3], "nested": COLUMNS["nested"]}).slice(1),
    "of a struct": pa.table({"id": [2, 3], "nested": pa.StructArray.from_arrays([INNER.slice(1)], ["o"])}),
    "of a struct deeper": pa.table(
        {"id": [2, 3], "nested": pa.StructArray.from_arrays([INNER.field(0).slice(1)], ["o"])}
    ),
    "of a list": pa.table({"id": [2, 3], "nested": pa.ListArray.from_arrays([0, 1, 2], INNER.slice(1))}),
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("write", ["append", "replace"])
def test_a_part_of_longer_arrays_is_written_like_any_rows(tmp_path: Path, write: str, part: pa.Table):
    """delta-rs would end the process: a struct in a struct that does not start with its array."""
    write_deltalake(str(tmp_path / "table"), part.schema.empty_table())
    native = NativeTable(str(tmp_path / "table"))

    if write == "append":
        native.append(part, transaction=None)
    else:
        native.replace(part)

    assert native.rows().sort_by("id").to_pylist() == part.to_pylist()


def test_rows_of_a_table_with_deletion_vectors_are_read_by_delta_rs(table: Path, monkeypatch: pytest.MonkeyPatch):
    """Files alone do not say which of their rows live."""
    DeltaTable(str(table)).alter.add_feature(TableFeatures.DeletionVectors, allow_protocol_versions_increase=True)
    remote = NativeTable(table.as_uri())
    asked: list[object] = []
    monkeypatch.setattr(Objects, "rows", lambda *arguments: asked.append(arguments))

    assert remote.rows()["id"].to_pylist() == [0]
    assert asked == []


@pytest.mark.parametrize(
    "protocol",
    [
        {"minReaderVersion": 2, "minWriterVersion": 5},
        {"minReaderVersion": 2, "minWriterVersion": 7, "writerFeatures": ["columnMapping"]},
    ],
    ids=str,
)
def test_rows_under_other_names_in_files_are_read_by_delta_rs(tmp_path: Path, protocol: dict[str, object]):
    """As those of a key with a space: by the table's names its files have nothing."""
    log = tmp_path / "table" / "_delta_log"
    log.mkdir(parents=True)
    pq.write_table(pa.table({"col-1": pa.array([3, 1], pa.int64())}), tmp_path / "table" / "a.parquet")
    mapping = {"delta.columnMapping.id": 1, "delta.columnMapping.physicalName": "col-1"}
    field = {"name": "order id", "type": "long", "nullable": True, "metadata": mapping}
    actions = [
        {"protocol": protocol},
        {
            "metaData": {
                "id": "1",
                "format": {"provider": "parquet", "options": {}},
                "schemaString": json.dumps({"type": "struct", "fields": [field]}),
                "partitionColumns": [],
                "configuration": {"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": "1"},
                "createdTime": 1,
            }
        },
        {
            "add": {
                "path": "a.parquet",
                "partitionValues": {},
                "size": (tmp_path / "table" / "a.parquet").stat().st_size,
                "modificationTime": 1,
                "dataChange": True,
                "stats": '{"numRecords":2}',
            }
        },
    ]
    (log / f"{0:020}.json").write_text("".join(f"{json.dumps(action)}\n" for action in actions))

    rows = NativeTable((tmp_path / "table").as_uri()).rows()

    assert rows.to_pylist() == [{"order id": 3}, {"order id": 1}]


def test_rows_of_files_that_lack_a_column_are_read_by_delta_rs(table: Path):
    """It was added since."""
    wider = pa.table({"id": pa.array([1], pa.int64()), "new": pa.array(["text"])})
    write_deltalake(str(table), wider, mode="append", schema_mode="merge")

    rows = NativeTable(table.as_uri()).rows()

    assert sorted(rows.to_pylist(), key=repr) == [{"id": 0, "new": None}, {"id": 1, "new": "text"}]
