"""The reader of Delta's log that other tests trust: it takes what is right and finds each thing that may be wrong."""

from __future__ import annotations

import datetime as dt
import json
import struct
import uuid
import zlib
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from delta_log import check_table, live_rows
from delta_log_files import read_vector, vector_file
from delta_log_values import counted
from deltalake import DeltaTable, write_deltalake
from pyroaring import BitMap64

OLD_TABLES = Path(__file__).parents[1] / "data" / "made_by_0_1"
FIELDS = {
    "id": "long",
    "name": "string",
    "price": "decimal(10,2)",
    "x": "double",
    "day": "date",
    "ts": "timestamp",
    "s": {"type": "struct", "fields": [{"name": "a", "type": "integer", "nullable": True, "metadata": {}}]},
}
Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
KEYED_TIMES = pa.map_(pa.string(), pa.struct([("t", pa.timestamp("us", "UTC")), ("d", pa.date32())]))
VECTORS = {"delta.enableDeletionVectors": "true"}
MAPPED = "delta.columnMapping.physicalName"
UUIDS = [uuid.UUID(int=n) for n in (7, 8, 9)]
Edit = Callable[[list[dict[str, Any]], Path], object]


def rows(*ids: int) -> pa.Table:
    at = dt.datetime(2024, 1, 1, 12, 0, 0, 123456)
    table = {
        "id": pa.array(ids, pa.int64()),
        "name": pa.array([f"näme {i}" for i in ids]),
        "price": pa.array([Decimal(i) / 4 for i in ids], pa.decimal128(10, 2)),
        "x": pa.array([i / 3 for i in ids]),
        "day": pa.array([dt.date(2024, 1, i) for i in ids], pa.date32()),
        "ts": pa.array([at.replace(day=i) for i in ids], pa.timestamp("us", "UTC")),
        "s": pa.array([None if i == 2 else {"a": i} for i in ids], pa.struct([("a", pa.int32())])),
    }
    return pa.table(table)


def stats(table: pa.Table) -> str:
    def bound(i: int) -> dict[str, Any]:
        ts = f"2024-01-{i:02}T12:00:00.123Z"
        return {
            "id": i,
            "name": f"näme {i}",
            "price": i / 4,
            "x": i / 3,
            "day": f"2024-01-{i:02}",
            "ts": ts,
            "s": {"a": i},
        }

    ids = table["id"].to_pylist()
    nulls = {**dict.fromkeys(("id", "name", "price", "x", "day", "ts"), 0), "s": {"a": table["s"].null_count}}
    told = {"minValues": bound(min(ids)), "maxValues": bound(max(ids)), "nullCount": nulls, "tightBounds": True}
    return json.dumps({"numRecords": table.num_rows, **told})


def put(root: Path, path: str, table: pa.Table) -> int:
    (root / path).parent.mkdir(exist_ok=True, parents=True)
    pq.write_table(table, root / path)
    return (root / path).stat().st_size


def add(root: Path, path: str, table: pa.Table) -> dict[str, Any]:
    size = put(root, path, table)
    kept = {"partitionValues": {}, "modificationTime": 1, "dataChange": True, "stats": stats(table), "tags": {"t": "1"}}
    return {"path": path, "size": size, **kept}


def cdc(root: Path, path: str, **ids: list[int]) -> dict[str, Any]:
    parts = [rows(*of).append_column("_change_type", pa.array([kind] * len(of))) for kind, of in ids.items()]
    size = put(root, f"_change_data/{path}", pa.concat_tables(parts))
    return {"cdc": {"path": f"_change_data/{path}", "size": size, "partitionValues": {}, "dataChange": False}}


def z85(data: bytes) -> str:
    numbers = [int.from_bytes(data[i : i + 4], "big") for i in range(0, len(data), 4)]
    return "".join(Z85[number // 85**power % 85] for number in numbers for power in (4, 3, 2, 1, 0))


def vector(
    root: Path, which: int, positions: list[int], *, data: bytes | None = None, lead: bytes = b"\x01"
) -> dict[str, Any]:
    """Write a vector by the protocol's table of bytes, at an offset that another vector would leave."""
    body = data or struct.pack("<i", 1681511377) + BitMap64(positions).serialize()
    stored = lead + b"other" + struct.pack(">i", len(body)) + body + struct.pack(">I", zlib.crc32(body))
    (root / f"deletion_vector_{UUIDS[which]}.bin").write_bytes(stored)
    at = {"storageType": "u", "pathOrInlineDv": z85(UUIDS[which].bytes), "offset": 6}
    return {**at, "sizeInBytes": len(body), "cardinality": len(positions)}


def with_vector(action: dict[str, Any], descriptor: dict[str, Any]) -> dict[str, Any]:
    wide = json.dumps({**json.loads(action["stats"]), "tightBounds": False})
    return {**action, "stats": wide, "deletionVector": descriptor}


def removed(action: dict[str, Any]) -> dict[str, Any]:
    kept = {key: action[key] for key in ("path", "size", "partitionValues", "deletionVector") if key in action}
    return {"remove": {**kept, "deletionTimestamp": 1, "dataChange": True, "extendedFileMetadata": True}}


def commit(root: Path, version: int, *actions: dict[str, Any], operation: str = "MERGE", **metrics: str) -> None:
    info = {"timestamp": 1, "operation": operation, "operationMetrics": metrics}
    write(root, version, [{"commitInfo": info}, *actions])


def write(root: Path, version: int, actions: list[dict[str, Any]]) -> None:
    log = root / "_delta_log"
    log.mkdir(exist_ok=True, parents=True)
    (log / f"{version:020}.json").write_text("".join(json.dumps(action) + "\n" for action in actions))


def created(fields: dict[str, Any], partitions: list[str] | None = None, **conf: str) -> list[dict[str, Any]]:
    listed = [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in fields.items()]
    features = {"readerFeatures": ["deletionVectors"], "writerFeatures": ["deletionVectors", "changeDataFeed"]}
    schema = json.dumps({"type": "struct", "fields": listed})
    metadata = {"id": "1", "schemaString": schema, "partitionColumns": partitions or [], "configuration": conf}
    return [{"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, **features}}, {"metaData": metadata}]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A table with a file that loses rows twice, and one that is removed."""
    commit(tmp_path, 0, *created(FIELDS, **VECTORS), operation="CREATE TABLE")
    first = {**add(tmp_path, "a b.parquet", rows(1, 2, 3, 4, 5)), "path": "a%20b.parquet"}
    second = add(tmp_path, "gone.parquet", rows(6, 7))
    commit(tmp_path, 1, {"txn": {"appId": "app", "version": 0}}, {"add": first}, {"add": second})
    less = with_vector(first, vector(tmp_path, 0, [0, 2]))
    changes = cdc(tmp_path, "2.parquet", update_preimage=[1], update_postimage=[1], delete=[3], insert=[8])
    new = {"add": add(tmp_path, "c.parquet", rows(1, 8))}
    counts = {f"numTargetRows{what}": "1" for what in ("Inserted", "Updated", "Deleted")}
    txn = {"txn": {"appId": "app", "version": 1}}
    commit(tmp_path, 2, txn, removed(first), {"add": less}, new, changes, numTargetRowsCopied="0", **counts)
    least = with_vector(first, vector(tmp_path, 1, [0, 2, 4]))
    changes = cdc(tmp_path, "3.parquet", delete=[5, 6, 7])
    commit(tmp_path, 3, removed(less), {"add": least}, removed(second), changes, numTargetRowsCopied="0")
    return tmp_path


def edit(root: Path, version: int, change: Edit) -> None:
    file = root / "_delta_log" / f"{version:020}.json"
    actions = [json.loads(line) for line in file.read_text().splitlines()]
    change(actions, root)
    write(root, version, actions)


def of(actions: list[dict[str, Any]], kind: str, path: str = "") -> dict[str, Any]:
    return next(action[kind] for action in actions if kind in action and path in action[kind].get("path", ""))


def setting(kind: str, at: str = "", **values: Any) -> Edit:
    return lambda actions, root: of(actions, kind, at).update(values)


def stating(path: str, **values: Any) -> Edit:
    def change(actions: list[dict[str, Any]], root: Path) -> None:
        action = of(actions, "add", path)
        told = json.loads(action["stats"])
        for name, value in values.items():
            told[name] = {**told[name], **value} if isinstance(value, dict) else value
        action["stats"] = json.dumps(told)

    return change


def without(kind: str, path: str = "") -> Edit:
    return lambda actions, root: actions.remove({kind: of(actions, kind, path)})


def again(kind: str, **values: Any) -> Edit:
    return lambda actions, root: actions.append({kind: {**of(actions, kind), **values}})


def other_vector(positions: list[int], **how: Any) -> Edit:
    """Version 3 puts another vector on the file."""

    def change(actions: list[dict[str, Any]], root: Path) -> None:
        of(actions, "add", "a%20b")["deletionVector"] = {**vector(root, 1, positions), **how}

    return change


def stored(**how: Any) -> Edit:
    return lambda actions, root: of(actions, "add", "a%20b").update(deletionVector=vector(root, 1, [0, 2, 4], **how))


def flipped(at: int) -> Edit:
    def change(actions: list[dict[str, Any]], root: Path) -> None:
        file = root / f"deletion_vector_{UUIDS[1]}.bin"
        data = bytearray(file.read_bytes())
        data[at] ^= 1
        file.write_bytes(data)

    return change


def changed(**ids: list[int]) -> Edit:
    """Other rows in the change file of version 2."""
    return lambda actions, root: of(actions, "cdc").update(cdc(root, "2.parquet", **ids)["cdc"])


RIGHT_BODY = struct.pack("<i", 1681511377) + BitMap64([0, 2, 4]).serialize()
WRONG: dict[str, tuple[int, Edit, str]] = {
    "remove of a file that is not there": (
        3,
        setting("remove", "gone", path="z.parquet"),
        "'z.parquet', which is not",
    ),
    "remove without the vector": (3, setting("remove", "a%20b", deletionVector=None), "with vector None, but the live"),
    "remove with another size": (3, setting("remove", "gone", size=1), "with another size"),
    "remove of another cardinality": (
        3,
        lambda a, _: of(a, "remove")["deletionVector"].update(cardinality=1),
        "another d",
    ),
    "two removes": (3, again("remove"), "several remove actions"),
    "two adds": (2, again("add"), "several add actions"),
    "add without a remove": (2, without("remove"), "which is live already"),
    "the former vector": (
        3,
        lambda a, _: of(a, "add", "a%20b").update(deletionVector=of(a, "remove", "a%20b")["deletionVector"]),
        "a second time",
    ),
    "size in the log": (3, other_vector([0, 2, 4], sizeInBytes=8), "the log says 8"),
    "offset": (3, other_vector([0, 2, 4], offset=7), "stored with|beyond its file"),
    "offset beyond the file": (3, other_vector([0, 2, 4], offset=1000), "ends beyond its file"),
    "unknown storage": (3, other_vector([0, 2, 4], storageType="x"), "unknown storage 'x'"),
    "inline vector of another size": (
        3,
        other_vector([0, 2, 4], storageType="i", pathOrInlineDv="0" * 60, offset=None),
        "is 48 bytes long, not",
    ),
    "cardinality": (3, other_vector([0, 2, 4], cardinality=2), "has 3 rows"),
    "checksum": (3, flipped(-1), "checksum"),
    "a bit of the vector": (3, flipped(-6), "checksum"),
    "stored size": (3, flipped(9), "is stored with"),
    "version of the vector file": (3, stored(lead=b"\x02"), "file of version"),
    "magic": (3, stored(data=b"abcd" + RIGHT_BODY[4:]), "magic"),
    "cut bitmap": (3, stored(data=RIGHT_BODY[:-1]), "is no bitmap"),
    "bytes after the bitmap": (3, stored(data=RIGHT_BODY + b"x"), "bytes after its bitmap"),
    "missing vector": (3, lambda _, root: (root / f"deletion_vector_{UUIDS[1]}.bin").unlink(), "is missing"),
    "rows come back": (3, other_vector([0, 4]), r"brings rows back: \[2\]"),
    "row beyond the end": (3, other_vector([0, 2, 5]), "beyond the end"),
    "no table feature": (0, setting("protocol", readerFeatures=[]), "without the table feature"),
    "vectors are switched off": (
        0,
        lambda a, _: of(a, "metaData").update(configuration={}),
        "enableDeletionVectors is",
    ),
    "vector lost": (3, lambda a, _: of(a, "add", "a%20b").pop("deletionVector"), "a second time|lost its vector"),
    "vector without numRecords": (2, stating("a%20b", numRecords=None), "numRecords"),
    "tight with a vector": (2, stating("a%20b", tightBounds=True), "claims tight bounds"),
    "numRecords": (1, stating("gone", numRecords=3), "numRecords of 'gone.parquet' is not 2"),
    "minimum": (1, stating("gone", minValues={"id": 7}), "minValues of 'id'"),
    "maximum": (1, stating("gone", maxValues={"id": 6}), "maxValues of 'id'"),
    "loose bound": (1, stating("gone", maxValues={"id": 8}), "maxValues of 'id'"),
    "wide, but too narrow": (1, stating("gone", maxValues={"id": 6}, tightBounds=False), "maxValues of 'id'"),
    "string maximum cut off": (1, stating("gone", maxValues={"name": "näme"}), "maxValues of 'name'"),
    "string minimum cut off early": (1, stating("gone", minValues={"name": "näme"}), "minValues of 'name'"),
    "string maximum of another": (1, stating("gone", maxValues={"name": "z"}), "maxValues of 'name'"),
    "decimal": (1, stating("gone", maxValues={"price": 1.74}), "maxValues of 'price'"),
    "double": (1, stating("gone", maxValues={"x": 2.3333333333}), "maxValues of 'x'"),
    "date": (1, stating("gone", minValues={"day": "2024-01-07"}), "minValues of 'day'"),
    "no date": (1, stating("gone", minValues={"day": "06.01.2024"}), "neither a date nor a time"),
    "time": (1, stating("gone", maxValues={"ts": "2024-01-07T12:00:00.122Z"}), "maxValues of 'ts'"),
    "time in a zone": (1, stating("gone", minValues={"ts": "2024-01-06T12:00:00.123-01:00"}), "minValues of 'ts'"),
    "nested": (1, stating("gone", minValues={"s": {"a": 7}}), "minValues of 's.a'"),
    "nullCount": (1, stating("a%20b", nullCount={"s": {"a": 0}}), "nullCount of 's.a'"),
    "nullCount of no column": (1, stating("a%20b", nullCount={"other": 0}), "nullCount of 'other' .* is 5"),
    "statistics change": (2, stating("a%20b", minValues={"id": 0}), "statistics of .* changed"),
    "statistics go": (2, setting("add", "a%20b", stats='{"numRecords": 5}'), "statistics of .* changed"),
    "tags change": (2, setting("add", "a%20b", tags={}), "tags of .* changed"),
    "clustering changes": (2, setting("add", "a%20b", clusteringProvider="liquid"), "clusteringProvider of .* changed"),
    "size changes": (2, setting("add", "a%20b", size=1), "the log says 1"),
    "other change": (2, changed(update=[1], update_postimage=[1], delete=[3], insert=[8]), "other kinds"),
    "a delete is missing": (2, changed(update_preimage=[1], update_postimage=[1], insert=[8]), "2 rows gone"),
    "an insert is missing": (
        2,
        changed(update_preimage=[1], update_postimage=[1], delete=[3]),
        "2 rows gone and 2 new",
    ),
    "another row is deleted": (
        2,
        changed(update_preimage=[1], update_postimage=[1], delete=[4], insert=[8]),
        "say gone",
    ),
    "another row is inserted": (
        2,
        changed(update_preimage=[1], update_postimage=[1], delete=[3], insert=[9]),
        "say new",
    ),
    "wrong pre-image": (2, changed(update_preimage=[2], update_postimage=[1], delete=[3], insert=[8]), "say gone"),
    "wrong post-image": (2, changed(update_preimage=[1], update_postimage=[2], delete=[3], insert=[8]), "say new"),
    "pre-images are missing": (2, changed(update_postimage=[1], delete=[3], insert=[8]), "pre-images"),
    "too many changes": (2, changed(delete=[1, 3, 5], insert=[1, 8]), "2 rows gone"),
    "unstated copies": (2, changed(delete=[3], insert=[8]), "numTargetRowsCopied"),
    "metrics": (2, lambda a, _: a[0]["commitInfo"]["operationMetrics"].update(numTargetRowsUpdated="2"), "RowsUpdated"),
    "change file with dataChange": (2, setting("cdc", dataChange=True), "has dataChange"),
    "commitInfo comes later": (2, lambda a, _: a.reverse(), "commitInfo is not first"),
    "two commitInfo": (2, again("commitInfo"), "commitInfo"),
    "numbers as metrics": (
        2,
        lambda a, _: a[0]["commitInfo"]["operationMetrics"].update(n=1),
        r"\['n'\] are no strings",
    ),
    "txn goes back": (1, setting("txn", version=5), "goes back from 5 to 1"),
    "two txn": (1, again("txn", version=7), "several txn"),
    "missing data file": (3, lambda _, root: (root / "gone.parquet").unlink(), "'gone.parquet' is missing"),
    "missing live file": (3, lambda _, root: (root / "c.parquet").unlink(), "'c.parquet' is missing"),
    "missing change file": (3, lambda _, root: (root / "_change_data/2.parquet").unlink(), "is missing"),
}


def test_a_good_table_passes_and_its_rows_come_back(root):
    found = check_table(root)

    assert (found.first, found.version, found.rows, sorted(found.files)) == (-1, 3, 4, ["a%20b.parquet", "c.parquet"])
    assert found.changes[2] == {"update_preimage": 1, "update_postimage": 1, "delete": 1, "insert": 1}
    assert live_rows(root).sort_by("id").equals(rows(1, 2, 4, 8))


@pytest.mark.parametrize("what", WRONG)
def test_each_violation_is_found(root, what):
    version, change, message = WRONG[what]
    edit(root, version, change)

    with pytest.raises(AssertionError, match=f"(?s)(version|live file|vector).*({message})"):
        check_table(root)


def test_a_file_does_not_come_back_but_by_restore(root):
    back = add(root, "gone.parquet", rows(6, 7))
    commit(root, 4, {"add": back}, operation="WRITE")
    with pytest.raises(AssertionError, match=r"version 4 .* a second time"):
        check_table(root)

    commit(root, 4, {"add": with_vector(back, vector(root, 2, [0]))}, operation="WRITE")
    with pytest.raises(AssertionError, match="which an earlier commit removed"):
        check_table(root)

    commit(root, 4, {"add": back}, operation="RESTORE")
    assert check_table(root).rows == 6


def test_restore_may_bring_rows_back(root):
    before, after = (of(read(root, version), "add", "a%20b") for version in (2, 3))
    commit(root, 4, removed(after), {"add": before}, operation="RESTORE")
    assert check_table(root).rows == 5

    commit(root, 4, removed(after), {"add": before}, operation="MERGE")
    with pytest.raises(AssertionError, match=r"version 4 .* a second time"):
        check_table(root)


def test_the_same_file_may_get_other_statistics_without_a_change_of_data(root):
    told = {**of(read(root, 2), "add", "c.parq"), "dataChange": False}
    commit(root, 4, {"add": {**told, "stats": '{"numRecords": 2}'}}, operation="COMPUTE STATS")
    assert check_table(root).rows == 4

    commit(root, 4, {"add": {**told, "dataChange": True}}, operation="WRITE")
    with pytest.raises(AssertionError, match="live already"):
        check_table(root)


def test_numrecords_is_added_with_a_vector_where_the_former_add_had_none(root):
    without_any = {**add(root, "d.parquet", rows(9, 10)), "stats": None}
    commit(root, 4, {"add": without_any}, operation="WRITE")
    size = 4 + len(BitMap64([1]).serialize())
    told = {"storageType": "i", "pathOrInlineDv": inline([1]), "sizeInBytes": size, "cardinality": 1}
    less = {**without_any, "stats": '{"numRecords": 2, "tightBounds": false}', "deletionVector": told}
    commit(root, 5, removed(without_any), {"add": less}, operation="DELETE")

    assert check_table(root).rows == 5
    assert live_rows(root)["id"].to_pylist().count(9) == 1

    commit(root, 5, removed(without_any), {"add": {**less, "stats": None}}, operation="DELETE")
    with pytest.raises(AssertionError, match=r"'d\.parquet' has a vector, but no numRecords"):
        check_table(root)


def test_rearranged_rows_stay_as_many(root):
    both = {**of(read(root, 2), "add", "c.parq"), "dataChange": False}
    whole = {"add": {**add(root, "d.parquet", rows(1, 8)), "dataChange": False}}
    out = removed(both)
    out["remove"]["dataChange"] = False
    commit(root, 4, out, whole, operation="OPTIMIZE")
    assert check_table(root).rows == 4

    commit(root, 4, out, {"add": {**add(root, "d.parquet", rows(1)), "dataChange": False}}, operation="OPTIMIZE")
    with pytest.raises(AssertionError, match=r"rearranges 2 rows .* adds 1"):
        check_table(root)


def test_change_files_and_copied_rows_balance(tmp_path):
    """A file that is rewritten for one of its rows: three rows go, three come, two of them are no changes."""
    old, new = add(tmp_path, "a.parquet", rows(1, 2, 3)), add(tmp_path, "gone.parquet", rows(1, 2, 3))
    commit(tmp_path, 0, *created(FIELDS, **VECTORS), {"add": old})
    changes = cdc(tmp_path, "1.parquet", update_preimage=[2], update_postimage=[2])
    commit(tmp_path, 1, removed(old), {"add": new}, changes, numTargetRowsCopied="2")
    assert check_table(tmp_path).changes == {1: {"update_preimage": 1, "update_postimage": 1}}

    commit(tmp_path, 1, removed(old), {"add": new}, changes, numTargetRowsCopied="0")
    with pytest.raises(AssertionError, match="3 rows gone and 3 new"):
        check_table(tmp_path)

    other = add(tmp_path, "other.parquet", rows(1, 2, 4))
    commit(tmp_path, 1, removed(old), {"add": other}, changes, numTargetRowsCopied="2")
    with pytest.raises(AssertionError, match=r"changed without a word: .*näme 3.*näme 4"):
        check_table(tmp_path)


def test_rows_beyond_the_year_9999_are_counted_too():
    late = pa.array([[("k", {"t": 300_000_000_000_000_000, "d": 3_000_000})]] * 2, KEYED_TIMES)

    assert list(counted(pa.table({"m": late, "l": pa.array([[1], [1]])})).values()) == [2]


def test_a_transaction_may_go_back_where_the_caller_says_so(root):
    edit(root, 1, setting("txn", version=5))

    assert check_table(root, txns_may_decrease=True).version == 3


def test_a_vacuumed_table_lacks_only_what_is_not_live(root):
    for gone in ("gone.parquet", "_change_data/2.parquet", f"deletion_vector_{UUIDS[0]}.bin"):
        (root / gone).unlink()
    assert check_table(root, vacuumed=True).rows == 4

    (root / f"deletion_vector_{UUIDS[1]}.bin").rename(root / "kept")
    with pytest.raises(AssertionError, match=r"the vector of live file 'a%20b\.parquet' is missing"):
        check_table(root, vacuumed=True)

    (root / "kept").rename(root / f"deletion_vector_{UUIDS[1]}.bin")
    (root / "c.parquet").unlink()
    with pytest.raises(AssertionError, match=r"live file 'c\.parquet' is missing"):
        check_table(root, vacuumed=True)


def test_commits_follow_each_other(root):
    (root / "_delta_log" / f"{2:020}.json").unlink()
    with pytest.raises(AssertionError, match=r"commits \[2\] .* missing"):
        check_table(root)

    (root / "_delta_log" / f"{0:020}.json").unlink()
    with pytest.raises(AssertionError, match="neither commit 0 nor a checkpoint"):
        check_table(root)


def test_in_commit_timestamps_increase(root):
    edit(
        root,
        0,
        lambda actions, _: of(actions, "metaData")["configuration"].update({"delta.enableInCommitTimestamps": "true"}),
    )
    for version, time in enumerate((10, 11, 12, 12)):
        edit(root, version, setting("commitInfo", inCommitTimestamp=time))
    with pytest.raises(AssertionError, match=r"version 3 .* inCommitTimestamp 12 does not follow 12"):
        check_table(root)

    edit(root, 3, setting("commitInfo", inCommitTimestamp=13))
    assert check_table(root).version == 3


@pytest.mark.parametrize(
    ("values", "told", "right"),
    [
        (pa.array([1.0, float("nan")]), {"min": 1.0, "max": 1.0}, False),  # Spark takes NaN for the greatest number
        (pa.array([1.0, float("nan")]), {"min": 1.0, "max": "NaN"}, True),
        (pa.array([-0.0]), {"min": 0.0, "max": -0.0}, True),
        (pa.array([0.1], pa.float32()), {"min": 0.1, "max": 0.1}, True),
        (pa.array(["x" * 40]), {"min": "x" * 32, "max": "x" * 32 + "\x7f"}, True),
        (pa.array(["x" * 40]), {"min": "x" * 32, "max": "x" * 32}, False),
        (pa.array(["x" * 40]), {"min": "x" * 32, "max": "x" * 31 + "y"}, True),
        (pa.array(["x" * 40]), {"max": "x" * 20 + "a" + "z" * 20}, False),
        (pa.array([253402300799999999], pa.timestamp("us", "UTC")), {"max": "9999-12-31T23:59:59.999Z"}, True),
        (pa.array([-1], pa.timestamp("us", "UTC")), {"min": "1969-12-31T23:59:59.999Z"}, True),
        (pa.array([-1], pa.timestamp("us", "UTC")), {"min": "1970-01-01T00:00:00.000Z"}, False),
        (pa.array([-719162], pa.date32()), {"min": "0001-01-01", "max": "0001-01-01"}, True),
        (pa.array([2932897], pa.date32()), {"min": "+10000-01-01", "max": "+10000-01-01"}, True),
        (
            pa.array([Decimal("12345678901234567890.1234567890")]),
            {"max": Decimal("12345678901234567890.1234567890")},
            True,
        ),
        (
            pa.array([Decimal("12345678901234567890.1234567890")]),
            {"max": Decimal("12345678901234567890.1234567889")},
            False,
        ),
        (pa.array([True, False]), {"min": False, "max": True}, True),
        (pa.array([None], pa.int64()), {"min": 3, "max": 1}, True),  # bounds say nothing where all is NULL
        (pa.array([2**63 - 1]), {"max": 2**63 - 2}, False),
        (pa.array([b"x"]), {"min": "x"}, False),
    ],
)
def test_bounds_of_each_type(tmp_path, values, told, right):
    size = put(tmp_path, "a.parquet", pa.table({"v": values}))
    told = {f"{end}Values": {"v": value} for end, value in told.items()}
    text = (
        json.dumps({"numRecords": len(values), **told}, default=lambda d: f"#{d}#").replace('"#', "").replace('#"', "")
    )
    action = {"path": "a.parquet", "size": size, "partitionValues": {}, "dataChange": True, "stats": text}
    commit(tmp_path, 0, *created({"v": "long"}), {"add": action})

    if right:
        check_table(tmp_path)
    else:
        with pytest.raises(AssertionError, match=r"Values of 'v'|cannot be told"):
            check_table(tmp_path)


def test_vectors_of_the_protocols_examples(tmp_path):
    """PROTOCOL.md, "Deletion Vector Descriptor Schema", examples 1 and 3.

    Its third has the magic number of an older format; this is the same vector as the text describes it.
    """
    told = {"storageType": "i", "pathOrInlineDv": "^Bg9^0rr910000000000iXQKl0rr91000f55c8Xg0@@D72lkbi5=-{L"}
    assert list(read_vector(tmp_path, {**told, "sizeInBytes": 44, "cardinality": 6})) == [3, 4, 7, 11, 18, 29]

    file = vector_file(tmp_path, {"storageType": "u", "pathOrInlineDv": "ab^-aqEH.-t@S}K{vb[*k^"})
    assert file == tmp_path / "ab/deletion_vector_d2c639aa-8816-431a-aaf6-d3fe2512ff61.bin"


def read(root: Path, version: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "_delta_log" / f"{version:020}.json").read_text().splitlines()]


def inline(positions: list[int]) -> str:
    body = struct.pack("<i", 1681511377) + BitMap64(positions).serialize()
    return z85(body + b"\0" * (-len(body) % 4))


def state(root: Path, **changes: Any) -> list[dict[str, Any]]:
    """The actions of a checkpoint of version 2."""
    actions = [*created(FIELDS, **VECTORS), {"txn": {"appId": "app", "version": 1}}]
    adds = [of(read(root, 2), "add", "a%20b"), of(read(root, 1), "add", "gone"), of(read(root, 2), "add", "c.parq")]
    tombstone = {"remove": {"path": "a%20b.parquet", "deletionTimestamp": 1, "dataChange": True}}
    return [*actions, tombstone, *({"add": {**action, **changes}} for action in adds)]


def parquet(actions: list[dict[str, Any]], file: Path) -> None:
    """As columns; maps have to be told from structs."""
    text = pa.map_(pa.string(), pa.string())
    place = pa.struct([("storageType", pa.string()), ("pathOrInlineDv", pa.string()), ("offset", pa.int32())])
    place = pa.struct([*place, ("sizeInBytes", pa.int32()), ("cardinality", pa.int64())])
    typed = {"partitionValues": text, "tags": text, "configuration": text, "deletionVector": place}
    columns = {}
    for kind in dict.fromkeys(kind for action in actions for kind in action):
        rows_of = [{**action[kind]} if kind in action else None for action in actions]
        names = dict.fromkeys(name for row in rows_of if row for name in row)
        whole = pa.array([row and {n: None if n in typed else row.get(n) for n in names} for row in rows_of]).type
        fields = [pa.field(f.name, typed.get(f.name, f.type)) for f in whole]
        columns[kind] = pa.array(rows_of, pa.struct(fields))
    file.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), file)


def classic(root: Path, actions: list[dict[str, Any]]) -> None:
    parquet(actions, root / "_delta_log" / f"{2:020}.checkpoint.parquet")


def in_parts(root: Path, actions: list[dict[str, Any]]) -> None:
    for part, some in ((1, actions[:4]), (2, actions[4:])):
        parquet(some, root / "_delta_log" / f"{2:020}.checkpoint.{part:010}.{2:010}.parquet")


def with_sidecars(root: Path, actions: list[dict[str, Any]]) -> None:
    log, files = root / "_delta_log", [action for action in actions if action.keys() & {"add", "remove"}]
    parquet(files, log / "_sidecars" / "side.parquet")
    kept = [action for action in actions if action not in files]
    whole = [{"checkpointMetadata": {"version": 2}}, *kept, {"sidecar": {"path": "side.parquet", "sizeInBytes": 1}}]
    (log / f"{2:020}.checkpoint.{UUIDS[0]}.json").write_text("\n".join(map(json.dumps, whole)))


@pytest.mark.parametrize("kind", [classic, in_parts, with_sidecars])
def test_a_checkpoint_stands_for_the_commits_that_are_gone(root, kind):
    kind(root, state(root))
    assert check_table(root).first == -1

    for version in range(3):
        (root / "_delta_log" / f"{version:020}.json").unlink()
    found = check_table(root)

    assert (found.first, found.version, found.rows) == (2, 3, 4)
    assert live_rows(root).sort_by("id").equals(rows(1, 2, 4, 8))


@pytest.mark.parametrize("kind", [classic, in_parts, with_sidecars])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda actions: actions.pop(), "other files"),
        (lambda actions: actions[-1]["add"].update(stats='{"numRecords": 2}'), "other files, vectors or stat"),
        (lambda actions: of(actions, "add", "a%20b").pop("deletionVector"), "both as live and as removed"),
        (lambda actions: actions[2]["txn"].update(version=3), "other txns"),
        (lambda actions: actions.append(actions[-1]), "twice"),
    ],
)
def test_a_checkpoint_that_differs_from_the_log_is_found(root, kind, change, message):
    actions = state(root)
    change(actions)
    kind(root, actions)

    with pytest.raises(AssertionError, match=f"version 2 .*{message}"):
        check_table(root)


def test_a_vector_is_not_lost_where_the_tombstone_is_gone(root):
    """Neither the log nor the checkpoint tells any more that the file was there without a vector."""
    classic(root, [action for action in state(root) if "remove" not in action])
    for version in range(3):
        (root / "_delta_log" / f"{version:020}.json").unlink()
    edit(root, 3, lambda actions, _: of(actions, "add", "a%20b").pop("deletionVector"))

    with pytest.raises(AssertionError, match=r"version 3 .* lost its vector"):
        check_table(root)


def test_a_checkpoint_without_statistics_as_text_is_refused(root):
    classic(root, state(root, stats=None, stats_parsed={"numRecords": 5}))

    with pytest.raises(AssertionError, match="statistics as columns only"):
        check_table(root)


def test_a_type_that_the_reader_does_not_know_is_refused(tmp_path):
    commit(tmp_path, 0, *created({"v": "variant"}))

    with pytest.raises(AssertionError, match="does not know the type 'variant'"):
        live_rows(tmp_path)


def test_rows_have_the_types_and_names_of_the_schema(tmp_path):
    """Partition values are text in the log, names in files may be others, old files lack columns or are narrower."""
    kinds = {"n": "integer", "d": "decimal(10,2)", "day": "date", "ts": "timestamp", "yes": "boolean", "x": "double"}
    kinds |= {"text": "string", "none": "string", "v": "long", "new": "string"}
    items = {"type": "map", "keyType": "string", "valueType": {"type": "array", "elementType": "long"}}
    inner = {"type": "struct", "fields": [{"name": n, "type": "long", "metadata": {MAPPED: f"p-{n}"}} for n in "ab"]}
    actions = created({**kinds, "m": items, "s": inner}, list(kinds)[:8], **{"delta.columnMapping.mode": "name"})
    schema = json.loads(actions[1]["metaData"]["schemaString"])
    for one in schema["fields"]:
        one["metadata"] = {MAPPED: f"p-{one['name']}", "delta.columnMapping.id": 1}
    actions[1]["metaData"]["schemaString"] = json.dumps(schema)
    m = pa.array([[("k", [1, 2])], None], pa.map_(pa.string(), pa.list_(pa.int32())))
    s = pa.array([None, {"p-a": 1}], pa.struct([("p-a", pa.int32())]))
    size = put(tmp_path, "a.parquet", pa.table({"p-v": pa.array([1, 2], pa.int32()), "p-m": m, "p-s": s}))
    text = {"n": "-3", "d": "1.5", "day": "2024-02-29", "ts": "2024-02-29 01:02:03.5", "yes": "true", "x": "0.5"}
    values = {f"p-{name}": value for name, value in {**text, "text": "ä b", "none": ""}.items()}
    commit(
        tmp_path,
        0,
        *actions,
        {"add": {"path": "a.parquet", "size": size, "partitionValues": values, "dataChange": True}},
    )

    check_table(tmp_path)
    found = live_rows(tmp_path)

    at = dt.datetime(2024, 2, 29, 1, 2, 3, 500000, dt.UTC)
    same = {
        "n": -3,
        "d": Decimal("1.50"),
        "day": at.date(),
        "ts": at,
        "yes": True,
        "x": 0.5,
        "text": "ä b",
        "none": None,
    }
    assert found.to_pylist() == [
        {**same, "v": 1, "new": None, "m": [("k", [1, 2])], "s": None},
        {**same, "v": 2, "new": None, "m": None, "s": {"a": 1, "b": None}},
    ]
    assert [found.schema.field(name).type for name in ("n", "v", "d")] == [pa.int32(), pa.int64(), pa.decimal128(10, 2)]


def test_int96_times_come_as_they_are(tmp_path):
    ends = pa.array([-14831769599876544, 253402300799999999], pa.timestamp("us"))
    pq.write_table(pa.table({"ts": ends}), tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)
    size = (tmp_path / "a.parquet").stat().st_size
    told = {"minValues": {"ts": "1500-01-01T00:00:00.123Z"}, "maxValues": {"ts": "9999-12-31T23:59:59.999Z"}}
    action = {"path": "a.parquet", "size": size, "partitionValues": {}, "dataChange": True, "stats": json.dumps(told)}
    commit(tmp_path, 0, *created({"ts": "timestamp"}), {"add": action})

    check_table(tmp_path)

    assert live_rows(tmp_path)["ts"].cast(pa.int64()).to_pylist() == ends.cast(pa.int64()).to_pylist()


@pytest.mark.parametrize("partitions", [None, ["part"]])
def test_what_delta_rs_writes_passes(tmp_path, partitions):
    def some(low: int, high: int) -> pa.Table:
        return rows(*range(low, high)).append_column("part", pa.array([f"a {i % 2}%" for i in range(low, high)]))

    conf = {"delta.enableChangeDataFeed": "true"}
    write_deltalake(tmp_path, some(1, 10), partition_by=partitions, configuration=conf)
    write_deltalake(tmp_path, some(10, 20), mode="append")
    DeltaTable(tmp_path).delete("id = 3")
    merge = DeltaTable(tmp_path).merge(some(15, 25), "t.id = s.id", source_alias="s", target_alias="t")
    merge.when_matched_delete("s.id = 15").when_matched_update_all().when_not_matched_insert_all().execute()
    DeltaTable(tmp_path).create_checkpoint()
    DeltaTable(tmp_path).optimize.compact()

    found = check_table(tmp_path)
    there = live_rows(tmp_path).sort_by("id")

    assert found.rows == 22
    assert found.changes[3] == {"delete": 1, "update_preimage": 4, "update_postimage": 4, "insert": 5}
    told = pa.table(DeltaTable(tmp_path).scan().read_all()).select(there.column_names).cast(there.schema).sort_by("id")
    assert there.to_pylist() == told.to_pylist()


@pytest.mark.parametrize("table", sorted(log.parent for log in OLD_TABLES.glob("*/*/_delta_log")), ids=str)
def test_tables_of_the_first_version_pass(table):
    """Written by Spark and delta-rs in turn."""
    assert check_table(table).rows == live_rows(table).num_rows
