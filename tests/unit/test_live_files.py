"""The live files of a table, replayed from its log: commits, and checkpoints of every form that the protocol knows."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from stream_merge.tables.log.live_files import LiveFiles, LocalLog, UnreadableLogError, decoded

Action = Mapping[str, Any]

PROTOCOL = {
    "protocol": {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": ["deletionVectors"],
        "writerFeatures": ["deletionVectors"],
    }
}
FIELDS = '{"type":"struct","fields":[{"name":"id","type":"long","nullable":true,"metadata":{}}]}'
METADATA = {
    "metaData": {
        "id": "a8f5",
        "format": {"provider": "parquet", "options": {}},
        "schemaString": FIELDS,
        "partitionColumns": [],
        "configuration": {"delta.enableDeletionVectors": "true"},
        "createdTime": 1,
    }
}
VECTOR = {"storageType": "u", "pathOrInlineDv": "ab^-aqEH.-t@S}K{vb[*k^", "offset": 4, "sizeInBytes": 40}
TEXT = pa.string()
ENTRIES = pa.map_(TEXT, TEXT)
ADD = pa.struct(
    [
        ("path", TEXT),
        ("partitionValues", ENTRIES),
        ("size", pa.int64()),
        ("modificationTime", pa.int64()),
        ("dataChange", pa.bool_()),
        ("stats", TEXT),
        ("tags", ENTRIES),
        (
            "deletionVector",
            pa.struct(
                [
                    ("storageType", TEXT),
                    ("pathOrInlineDv", TEXT),
                    ("offset", pa.int32()),
                    ("sizeInBytes", pa.int32()),
                    ("cardinality", pa.int64()),
                    ("maxRowIndex", pa.int64()),
                ]
            ),
        ),
        ("baseRowId", pa.int64()),
        ("defaultRowCommitVersion", pa.int64()),
        ("clusteringProvider", TEXT),
        ("stats_parsed", pa.struct([("numRecords", pa.int64())])),
        ("partitionValues_parsed", pa.struct([("p", pa.int32())])),
    ]
)
CHECKPOINT = pa.schema(
    [
        ("add", ADD),
        ("remove", pa.struct([("path", TEXT), ("deletionTimestamp", pa.int64())])),
        ("txn", pa.struct([("appId", TEXT), ("version", pa.int64())])),
        ("sidecar", pa.struct([("path", TEXT), ("sizeInBytes", pa.int64()), ("modificationTime", pa.int64())])),
    ]
)


def add(path: str, **more: Any) -> dict[str, Any]:
    body = {"path": path, "partitionValues": {}, "size": 10, "modificationTime": 1, "dataChange": True}
    return {"add": {**body, **more}}


def remove(path: str, **more: Any) -> dict[str, Any]:
    return {"remove": {"path": path, "deletionTimestamp": 1, "dataChange": True, **more}}


def sidecar(name: str) -> dict[str, Any]:
    return {"sidecar": {"path": name, "sizeInBytes": 1, "modificationTime": 1}}


def vector(cardinality: int) -> dict[str, Any]:
    return {**VECTOR, "cardinality": cardinality}


class Log:
    """A table's log, written by hand."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "_delta_log"
        self.folder.mkdir(parents=True)

    def commit(self, version: int, *actions: Action) -> None:
        lines = [{"commitInfo": {"timestamp": 1, "operation": "WRITE"}}, *actions]
        (self.folder / f"{version:020}.json").write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    def tidy(self, *versions: int) -> None:
        for version in versions:
            (self.folder / f"{version:020}.json").unlink()

    def checkpoint(self, name: str, *actions: Action) -> Path:
        """A checkpoint's file, or a sidecar; Parquet or JSON, by its name."""
        file = self.folder / name
        file.parent.mkdir(exist_ok=True)
        if file.suffix == ".json":
            file.write_text("".join(f"{json.dumps(one)}\n" for one in actions))
        else:
            rows = [{name: parquet(body) for name, body in one.items()} for one in actions]
            pq.write_table(pa.Table.from_pylist(rows, CHECKPOINT), file)
        return file

    def live(self, version: int) -> dict[str, Action]:
        return dict(LiveFiles(LocalLog(self.root / "_delta_log")).at(version))


def parquet(body: Any) -> Any:
    """Maps as Arrow takes them."""
    if not isinstance(body, dict):
        return body
    maps = ("partitionValues", "tags")
    return {name: list(value.items()) if name in maps else parquet(value) for name, value in body.items()}


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "table")


# -- commits ------------------------------------------------------------------------------------


def test_files_of_each_version(log):
    log.commit(0, PROTOCOL, METADATA, add("a"), add("b"))
    log.commit(1, remove("a"), add("c"))
    log.commit(2)
    log.commit(3, remove("b"), remove("c"))

    assert [sorted(log.live(version)) for version in range(4)] == [["a", "b"], ["b", "c"], ["b", "c"], []]


@pytest.mark.parametrize("removed_first", [True, False])
def test_a_file_with_another_vector_is_removed_and_added_in_one_commit(log, removed_first):
    """In either order: the log's order within a commit means nothing (Delta protocol, "Action Reconciliation")."""
    again = [remove("a", deletionVector=vector(1)), add("a", deletionVector=vector(2))]
    log.commit(0, PROTOCOL, METADATA, add("a", deletionVector=vector(1)))
    log.commit(1, *(again if removed_first else reversed(again)))

    assert log.live(1)["a"]["deletionVector"]["cardinality"] == 2


def test_an_action_is_kept_as_the_log_has_it(log):
    """Statistics to the last digit, NULL in partitions, and what no version of the protocol has named yet."""
    stats = '{"numRecords":1,"minValues":{"d":1.10, "e":1E400},"maxValues":{"d":12345678901234567890.0}}'
    body = add("a", stats=stats, partitionValues={"p": None, "q": ""}, tags={"T": "1"}, ofTomorrow=[1])
    log.commit(0, PROTOCOL, METADATA, body)

    assert log.live(0)["a"] == body["add"]


def test_paths_are_compared_decoded(log):
    """They are URLs: writers escape different characters, Spark leaves `ä` and delta-rs does not."""
    log.commit(0, PROTOCOL, METADATA, add("p=%C3%A4/a%20b"), add("p=x%2525/c"), add("p=x%25/c"))
    log.commit(1, remove("p=ä/a b"))

    assert sorted(log.live(1)) == ["p=x%/c", "p=x%25/c"]
    assert decoded("p=a%253Ab/f%2Bg+h") == "p=a%3Ab/f+g+h"


def test_what_separates_lines_elsewhere_stays_in_a_text(log):
    """Python's lines of texts end at U+2028, too; those of JSON do not."""
    text = json.dumps(add("a", tags={"T": "\u2028\x85\x0c"})["add"], ensure_ascii=False)
    (log.folder / f"{0:020}.json").write_text(f'{{"add":{text}}}\n\n{{"add":{text.replace("a", "b", 1)}}}\n')
    (log.folder / f"{0:020}.json").write_text(f'{{"add":{text}}}\r\n')

    assert log.live(0)["a"]["tags"] == {"T": "\u2028\x85\x0c"}


def test_only_commits_since_the_last_call_are_read(log):
    log.commit(0, PROTOCOL, METADATA, add("a"))
    log.commit(1, add("b"))
    live = LiveFiles(LocalLog(log.root / "_delta_log"))
    live.at(1)
    log.tidy(0, 1)
    log.commit(2, remove("a"))

    assert (sorted(live.at(2)), sorted(live.at(2))) == (["b"], ["b"])


def test_an_older_version_after_a_newer_one(log):
    log.commit(0, PROTOCOL, METADATA, add("a"))
    log.commit(1, remove("a"), add("b"))
    live = LiveFiles(LocalLog(log.root / "_delta_log"))

    assert [sorted(live.at(version)) for version in (1, 0, 1)] == [["b"], ["a"], ["b"]]


def test_a_commit_of_ones_own_is_not_read_again(log):
    log.commit(0, PROTOCOL, METADATA, add("a"))
    live = LiveFiles(LocalLog(log.root / "_delta_log"))
    live.at(0)
    live.follow(1, [remove("a"), add("a", deletionVector=vector(1)), add("b")])

    assert {path: "deletionVector" in body for path, body in live.at(1).items()} == {"a": True, "b": False}


@pytest.mark.parametrize("version", [0, 2, 7])
def test_a_commit_that_is_not_the_next_is_not_followed(log, version):
    """Somebody else's may lie in between."""
    log.commit(0, PROTOCOL, METADATA, add("a"))
    log.commit(1, add("b"))
    live = LiveFiles(LocalLog(log.root / "_delta_log"))
    live.at(0)
    live.follow(version, [remove("a")])

    assert sorted(live.at(1)) == ["a", "b"]


def test_another_table_in_its_place_is_read_anew(log):
    log.commit(0, PROTOCOL, METADATA, add("a"))
    live = LiveFiles(LocalLog(log.root / "_delta_log"))
    live.at(0)
    log.commit(0, PROTOCOL, METADATA, add("other"))
    live.forget()

    assert sorted(live.at(0)) == ["other"]


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_commit_is_an_error(log, missing):
    """Whatever its files were, the others are not the table."""
    for version in range(3):
        log.commit(version, add(f"f{version}"))
    log.tidy(missing)

    with pytest.raises(UnreadableLogError, match=f"version 2 .*cannot be read.*{missing:020}"):
        log.live(2)


def test_a_commit_that_is_no_json_is_an_error_until_it_is_mended(log):
    log.commit(0, PROTOCOL, METADATA, add("a"))
    log.commit(1, add("b"))
    file = log.folder / f"{1:020}.json"
    whole = file.read_text()
    file.write_text(whole[:-9])
    live = LiveFiles(LocalLog(log.root / "_delta_log"))
    with pytest.raises(json.JSONDecodeError):
        live.at(1)
    file.write_text(whole)

    assert sorted(live.at(1)) == ["a", "b"]


# -- checkpoints --------------------------------------------------------------------------------


def of_v2(log: Log, name: str, *files: Action) -> None:
    """A checkpoint of version 2 whose files are in two sidecars."""
    names = ["one-part.parquet", "another%20part.parquet"]
    log.checkpoint("_sidecars/one-part.parquet", *files[:1])
    log.checkpoint("_sidecars/another part.parquet", *files[1:])
    rest = () if name.endswith("parquet") else (METADATA, PROTOCOL, {"checkpointMetadata": {"version": 1}})
    log.checkpoint(name, *rest, *map(sidecar, names))


ID = UUID("80a083e8-7026-4e79-81be-64bd76c43a11")
FORMS = {
    "classic": lambda log, *files: log.checkpoint(f"{1:020}.checkpoint.parquet", *files),
    "parts": lambda log, *files: [
        log.checkpoint(f"{1:020}.checkpoint.{part:010}.{2:010}.parquet", *some)
        for part, some in ((1, files[:1]), (2, files[1:]))
    ],
    "v2 as JSON": lambda log, *files: of_v2(log, f"{1:020}.checkpoint.{ID}.json", *files),
    "v2 as Parquet": lambda log, *files: of_v2(log, f"{1:020}.checkpoint.{ID}.parquet", *files),
    "v2 under the classic name": lambda log, *files: of_v2(log, f"{1:020}.checkpoint.parquet", *files),
    "v2 without sidecars": lambda log, *files: log.checkpoint(f"{1:020}.checkpoint.{ID}.json", PROTOCOL, *files),
}


@pytest.mark.parametrize("form", FORMS)
def test_files_of_a_checkpoint(log, form):
    """With vectors, in each form; the commits before it are gone."""
    files = [add("a", deletionVector=vector(3), stats='{"numRecords":5}'), add("b"), add("p=%C3%A4/c")]
    FORMS[form](log, *files, remove("gone"))
    log.commit(2, remove("b"), add("d"))

    assert log.live(2) == {decoded(one["add"]["path"]): one["add"] for one in (*files[::2], add("d"))}


def test_copies_in_a_checkpoint_are_left_out(log):
    """`stats_parsed` and `partitionValues_parsed` are no fields of an `add`; NULL in a partition is a value.

    Elsewhere NULL is what Parquet has for a field that nobody gave, at any depth: a commit repeats none.
    """
    body = add(
        "a",
        partitionValues={"p": "7", "q": None},
        stats='{"numRecords":5}',
        deletionVector=vector(3),
        stats_parsed={"numRecords": 5},
        partitionValues_parsed={"p": 7},
        baseRowId=0,
        clusteringProvider="liquid",
    )
    log.checkpoint(f"{1:020}.checkpoint.parquet", body)
    found = log.live(1)["a"]

    copies = ("stats_parsed", "partitionValues_parsed")
    assert found == {name: value for name, value in body["add"].items() if name not in copies}


def test_the_newest_checkpoint_up_to_a_version_counts(log):
    for version in range(5):
        log.commit(version, add(f"f{version}"))
    log.checkpoint(f"{1:020}.checkpoint.parquet", add("of 1"))
    log.checkpoint(f"{3:020}.checkpoint.parquet", add("of 3"))

    assert [sorted(log.live(version)) for version in (0, 1, 2, 4)] == [
        ["f0"],
        ["of 1"],
        ["f2", "of 1"],
        ["f4", "of 3"],
    ]


def test_a_checkpoint_that_lacks_a_part_does_not_count(log):
    """Nor do the parts of two that were written at once make one."""
    for version in range(3):
        log.commit(version, add(f"f{version}"))
    for part, parts in ((1, 3), (3, 3), (1, 2)):
        log.checkpoint(f"{2:020}.checkpoint.{part:010}.{parts:010}.parquet", add("of a part"))
    log.checkpoint(f"{1:020}.checkpoint.parquet", add("whole"))

    assert sorted(log.live(2)) == ["f2", "whole"]


def test_what_is_no_checkpoint_does_not_count(log):
    """Temporary files, checksums, and the pointer that says which is the last."""
    log.commit(0, add("a"))
    log.commit(1, add("b"))
    for name in (
        f".{1:020}.checkpoint.parquet.crc",
        f"{1:020}.checkpoint.parquet.tmp",
        f"{1:020}.crc",
        f"{1:019}.checkpoint.parquet",
        "_last_checkpoint",
        f".tmp.{1:020}.checkpoint.parquet",
    ):
        (log.folder / name).write_bytes(b"no Parquet")

    assert sorted(log.live(1)) == ["a", "b"]


def test_an_empty_table_in_a_checkpoint(log):
    log.checkpoint(f"{1:020}.checkpoint.parquet", {"txn": {"appId": "a", "version": 1}})

    assert log.live(1) == {}


def test_commits_that_were_tidied_away_are_found_in_a_checkpoint(log):
    """A job that slept while others wrote."""
    log.commit(0, add("a"))
    live = LiveFiles(LocalLog(log.root / "_delta_log"))
    live.at(0)
    log.checkpoint(f"{2:020}.checkpoint.parquet", add("a", deletionVector=vector(1)), add("c"))
    log.commit(3, add("d"))

    assert sorted(live.at(3)) == ["a", "c", "d"]
    assert live.at(3)["a"]["deletionVector"] == vector(1)


def test_a_version_before_the_only_checkpoint_is_an_error(log):
    log.checkpoint(f"{2:020}.checkpoint.parquet", add("a"))

    with pytest.raises(UnreadableLogError):
        log.live(1)


def test_sidecars_within_sidecars_are_an_error(log):
    """The protocol rules them out; to pass over them would lose files."""
    log.checkpoint("_sidecars/outer.parquet", add("a"), sidecar("inner.parquet"))
    log.checkpoint(f"{1:020}.checkpoint.{ID}.json", sidecar("outer.parquet"))

    with pytest.raises(UnreadableLogError, match=r"'outer\.parquet'"):
        log.live(1)


@pytest.mark.parametrize("broken", ["checkpoint", "sidecar"])
def test_a_checkpoint_that_cannot_be_read_leaves_nothing_behind(log, broken):
    """What was read of it until then is not taken for the table at the next call."""
    of_v2(log, f"{1:020}.checkpoint.{ID}.json", add("a"), add("b"))
    names = {"checkpoint": f"{1:020}.checkpoint.{ID}.json", "sidecar": "_sidecars/another part.parquet"}
    file = log.folder / names[broken]
    whole = file.read_bytes()
    file.write_bytes(whole[:-5])
    live = LiveFiles(LocalLog(log.root / "_delta_log"))
    for _ in range(2):
        with pytest.raises((pa.ArrowInvalid, json.JSONDecodeError)):
            live.at(1)
    file.write_bytes(whole)

    assert sorted(live.at(1)) == ["a", "b"]


def test_a_missing_sidecar_is_an_error(log):
    log.checkpoint(f"{1:020}.checkpoint.{ID}.json", sidecar("gone.parquet"))

    with pytest.raises((UnreadableLogError, FileNotFoundError), match=r"gone\.parquet"):
        log.live(1)


# -- written by others --------------------------------------------------------------------------


def test_checkpoints_of_delta_rs(tmp_path):
    """Partitions with NULL and odd characters; with its early commits gone, the table is the same."""
    root = tmp_path / "table"
    texts = ["a", None, "é b", "a%41", "p/q", "x=1"]
    for number, text in enumerate(texts):
        rows = pa.table({"id": pa.array([number], pa.int64()), "p": pa.array([text], pa.string())})
        write_deltalake(str(root), rows, partition_by=["p"], mode="append")
    before = dict(LiveFiles(LocalLog(root / "_delta_log")).at(5))
    table = DeltaTable(str(root))
    table.create_checkpoint()
    for file in (root / "_delta_log").glob("*.json"):
        file.unlink()
    found = LiveFiles(LocalLog(root / "_delta_log")).at(5)

    assert {body["partitionValues"]["p"] for body in found.values()} == set(texts)
    assert [json.loads(found[path]["stats"]) for path in before] == [json.loads(b["stats"]) for b in before.values()]
    assert {path: relevant(body) for path, body in found.items()} == {p: relevant(b) for p, b in before.items()}
    assert all((root / path).exists() for path in found)


def relevant(body: Action) -> dict[str, Any]:
    """An `add` without what checkpoints may say otherwise, or not at all."""
    return {n: v for n, v in body.items() if n not in ("stats", "dataChange", "tags") and v is not None}


def test_vectors_survive_a_checkpoint_of_delta_rs(log):
    """Files with and without; delta-rs writes the checkpoint of a table whose vectors it did not make."""
    log.commit(0, PROTOCOL, METADATA, add("a", stats='{"numRecords":5}'), add("b", stats='{"numRecords":5}'))
    log.commit(
        1, remove("a", size=10), add("a", stats='{"numRecords":5,"tightBounds":false}', deletionVector=vector(3))
    )
    DeltaTable(str(log.root)).create_checkpoint()
    log.tidy(0, 1)
    found = log.live(1)

    assert (found["a"]["deletionVector"], found["b"].get("deletionVector")) == (vector(3), None)
    assert json.loads(found["a"]["stats"]) == {"numRecords": 5, "tightBounds": False}


# -- histories ----------------------------------------------------------------------------------


@pytest.mark.parametrize("turn", range(25))
def test_any_history_is_replayed_as_it_happened(log, seed, turn):
    """Checkpoints of any form at any version, commits tidied away, versions asked for in any order."""
    rng = random.Random(f"{seed} {turn}")
    live: dict[str, Action] = {}
    told: list[dict[str, Action]] = []
    kept, last = LiveFiles(LocalLog(log.root / "_delta_log")), 12
    for version in range(last + 1):
        actions = list(changes(rng, live, version))
        rng.shuffle(actions)
        log.commit(version, *actions)
        told.append(dict(live))
        if rng.random() < 0.3:
            write_checkpoint(rng, log, version, list(live.values()))
            log.tidy(*(v for v in range(version) if (log.folder / f"{v:020}.json").exists() and rng.random() < 0.5))
        if rng.random() < 0.5:
            assert dict(kept.at(version)) == live
    readable = 0
    for version in rng.sample(range(last + 1), last + 1):
        try:
            found = dict(kept.at(version))
        except UnreadableLogError:
            continue
        readable += 1
        assert found == told[version]
        with suppress(UnreadableLogError):  # what is kept reaches further back than the log
            assert log.live(version) == found
    assert readable
    assert dict(kept.at(last)) == told[last]


def changes(rng: random.Random, live: dict[str, Action], version: int) -> Iterable[Action]:
    for path in list(live):
        what = rng.random()
        if what < 0.2:
            del live[path]
            yield remove(path)
        elif what < 0.5:
            again = add(path, deletionVector=vector(version + 1), stats=f'{{"numRecords":{version}}}')
            live[path] = again["add"]
            yield from (remove(path), again)
    for number in range(rng.randrange(3)):
        new = add(f"f{version}-{number}", partitionValues={"p": rng.choice([None, "x"])})
        live[new["add"]["path"]] = new["add"]
        yield new


def write_checkpoint(rng: random.Random, log: Log, version: int, bodies: Sequence[Action]) -> None:
    files = [{"add": body} for body in bodies]
    form = rng.choice(["classic", "parts", "v2"])
    if form == "classic":
        log.checkpoint(f"{version:020}.checkpoint.parquet", *files)
    elif form == "parts":
        for part in (1, 2, 3):
            log.checkpoint(f"{version:020}.checkpoint.{part:010}.{3:010}.parquet", *files[part - 1 :: 3])
    else:
        names = [f"{version}-{number}.parquet" for number in range(2)]
        for number, name in enumerate(names):
            log.checkpoint(f"_sidecars/{name}", *files[number::2])
        identity = UUID(int=rng.getrandbits(128))
        log.checkpoint(f"{version:020}.checkpoint.{identity}.{rng.choice(['json', 'parquet'])}", *map(sidecar, names))
