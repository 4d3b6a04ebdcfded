"""What a merge in the driver makes of rows and events, and which files, vectors, changes and commit it leaves."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from delta_log import live_rows
from deltalake import DeltaTable
from driver_target import ARROW, COLUMNS, EVENTS, LONG, SCHEMA, SPEC, Row, Target, events, layout, tuples
from pyspark.sql.types import IntegerType, StructField, StructType

from stream_merge.engines.base import CommitTag, MergeReport
from stream_merge.engines.driver import merger as module
from stream_merge.engines.driver import write
from stream_merge.engines.driver.conditions import needed
from stream_merge.engines.driver.decide import Decision, decide
from stream_merge.engines.driver.merger import DriverMerger, NoLongerEligibleError
from stream_merge.engines.memory import Promise
from stream_merge.errors import ContractError
from stream_merge.model import names
from stream_merge.model.results import Mode
from stream_merge.model.settings import MergeSpec
from stream_merge.shapes import shape_of
from stream_merge.shapes.base import assignments
from stream_merge.shapes.changes import DELETES
from stream_merge.shapes.clauses import (
    Always,
    And,
    Changed,
    Clause,
    Delete,
    DeleteMissing,
    HasValue,
    Insert,
    IsDelete,
    Newer,
    Not,
    Opaque,
    Or,
    SameSequence,
    Update,
    UpdateMissing,
)
from stream_merge.shapes.insert_only import InsertOnly
from stream_merge.shapes.key_bounds import KeyBounds
from stream_merge.shapes.snapshot import Snapshot
from stream_merge.tables.files import eligibility
from stream_merge.tables.files import find as finding
from stream_merge.tables.files.commit import ConcurrentWriteException
from stream_merge.tables.files.find import EVENT, FILE, POSITION, find
from stream_merge.tables.files.table import table_files
from stream_merge.tables.log.handle import open_table


def found(given: pa.Table, *rows: Row) -> pa.Table:
    """Rows of the events' keys as `find` gives them, all of one file."""
    place = {key: number for number, key in enumerate(given["id"].to_pylist())}
    told = [
        {EVENT: place[row[0]], FILE: 7, POSITION: 100 + number, **dict(zip(COLUMNS, row, strict=True))}
        for number, row in enumerate(rows)
    ]
    return pa.Table.from_pylist(
        told, pa.schema([(EVENT, pa.int64()), (FILE, pa.int64()), (POSITION, pa.int64()), *ARROW])
    )


def decided(clauses: Sequence[Clause], given: pa.Table, *rows: Row, schema: StructType = SCHEMA) -> Decision:
    return decide(clauses, layout(), schema, events=given, rows=found(given, *rows))


# -- deciding -----------------------------------------------------------------------------------


def test_each_event_is_deleted_updated_inserted_or_passed_over():
    clauses = shape_of(SPEC).clauses(layout(), SPEC, deletes=True, upserts=True)
    given = events(
        (1, 5, "new"), (2, 5, None), (3, 5, "three"), (4, 1, "stale"), (5, 9, None), (6, 1, None), delete=[2, 5, 6]
    )
    decision = decided(clauses, given, (4, 3, "four"), (1, 3, "one"), (2, 3, "two"), (6, 3, "six"))

    assert tuples(decision.before) == [(1, 3, "one")]
    assert tuples(decision.after) == [(1, 5, "new")]
    assert tuples(decision.deleted) == [(2, 3, "two")]
    assert tuples(decision.inserted) == [(3, 5, "three")]
    assert sorted(tuples(decision.gone)) == [(7, 101), (7, 102)]
    assert not decision.changes_nothing


def test_an_event_that_is_older_than_its_row_inserts_nothing():
    """It has a row, though no clause holds for it: WHEN NOT MATCHED is about events without one."""
    clauses = shape_of(SPEC).clauses(layout(), SPEC, deletes=True, upserts=True)
    decision = decided(clauses, events((1, 1, "late")), (1, 3, "one"))

    assert decision.changes_nothing
    assert [t.num_rows for t in (decision.before, decision.after, decision.deleted, decision.inserted)] == [0] * 4
    assert decision.inserted.schema.names == list(COLUMNS)


def test_the_first_clause_that_holds_decides():
    values = assignments(layout())
    given = events((1, 5, "new"), (2, 5, "new"))
    rows: tuple[Row, ...] = ((1, 3, "one"), (2, 9, "two"))
    decision = decided([Delete(when=Newer()), Update(when=Always(), values=values)], given, *rows)
    other = decided([Update(when=Always(), values=values), Delete(when=Newer())], given, *rows)

    assert (tuples(decision.deleted), tuples(decision.after)) == ([(1, 3, "one")], [(2, 5, "new")])
    assert (tuples(other.deleted), tuples(other.after)) == ([], [(1, 5, "new"), (2, 5, "new")])
    inserts = [Insert(when=IsDelete(), values={"id": "id"}), Insert(when=Always(), values=values)]
    assert tuples(decided(inserts, events((1, 5, "a"), (2, 5, "b"), delete=[1])).inserted) == [
        (1, None, None),
        (2, 5, "b"),
    ]


def test_all_rows_of_a_key_are_concerned():
    """A table may hold a key twice: MERGE updates both, and inserts none."""
    clauses = shape_of(SPEC).clauses(layout(), SPEC, deletes=False, upserts=True)
    decision = decided(clauses, events((1, 5, "new")), (1, 3, "one"), (1, 4, "uno"))

    assert tuples(decision.before) == [(1, 3, "one"), (1, 4, "uno")]
    assert tuples(decision.after) == [(1, 5, "new")] * 2
    assert (decision.gone.num_rows, decision.inserted.num_rows) == (2, 0)


def test_columns_that_are_not_assigned():
    """An update leaves them as they were, an insert has NULL; a narrower value is taken over in the table's type."""
    wide = StructType([*SCHEMA.fields, StructField("more", LONG)])
    small = pa.schema([(f.name, pa.int32() if f.name == "lsn" else f.type) for f in EVENTS])
    given = events((1, 5, "new"), (2, 5, "two")).cast(small)
    rows = found(given, (1, 3, "one")).append_column("more", pa.array([42], pa.int64()))
    values = {"id": "id", "lsn": "lsn"}
    clauses = [Update(when=Always(), values=values), Insert(when=Always(), values=values)]
    decision = decide(clauses, layout(), wide, events=given, rows=rows)

    assert tuples(decision.after) == [(1, 5, "one", 42)]
    assert tuples(decision.inserted) == [(2, 5, None, None)]
    assert decision.after.schema.types == decision.inserted.schema.types == [*ARROW.types, pa.int64()]


@pytest.mark.parametrize(
    "clause",
    [
        Update(when=Always(), values={"name": Opaque("upper(s.name)")}),
        Insert(when=Always(), values={"name": Opaque("upper(s.name)")}),
        Delete(when=Opaque("t.name IS NULL")),
        DeleteMissing(when=Not(HasValue("name"))),
        UpdateMissing(when=Always(), values={"name": Opaque("'gone'")}),
    ],
    ids=["value", "inserted value", "condition", "some missing", "flags"],
)
def test_what_only_spark_executes_is_never_guessed(clause):
    """Eligibility keeps it away; where it does not, nothing may be merged."""
    given = events((1, 5, "a"), (2, 5, "b"))
    with pytest.raises(AssertionError):
        decided([clause], given, (1, 3, "one"))


@pytest.mark.parametrize("turn", range(30))
def test_any_batch_is_decided_as_one_by_one(seed, turn):
    """Clauses of a sink in all their forms, against an oracle that looks at one event after the other."""
    rng = random.Random(f"{seed} {turn}")
    spec = MergeSpec(
        target="/t",
        keys=("id",),
        sequence_by=("lsn",),
        apply_as_deletes="op = 'd'",
        skip_unchanged=rng.random() < 0.3,
    )
    keys = rng.sample(range(100), 40)
    given = events(
        *((key, rng.randrange(4), rng.choice(["a", "b", None])) for key in keys),
        delete=[key for key in keys if rng.random() < 0.3],
    )
    rows = [
        (key, rng.choice([None, 0, 1, 2, 3]), rng.choice(["a", "b", None]))
        for key in keys
        for _ in range(rng.choice([0, 1, 1, 1, 2]))
    ]
    rng.shuffle(rows)
    clauses = shape_of(spec).clauses(layout(), spec, deletes=True, upserts=True)
    decision = decided(clauses, given, *rows)
    before, after, deleted, inserted = expected(given, rows, skip_unchanged=spec.skip_unchanged)

    assert sorted(zip(tuples(decision.before), tuples(decision.after), strict=True), key=repr) == sorted(
        zip(before, after, strict=True), key=repr
    )
    assert sorted(tuples(decision.deleted), key=repr) == sorted(deleted, key=repr)
    assert sorted(tuples(decision.inserted), key=repr) == sorted(inserted, key=repr)
    gone = [rows[position - 100] for _, position in tuples(decision.gone)]
    assert sorted(gone, key=repr) == sorted([*before, *deleted], key=repr)


def expected(given: pa.Table, rows: Sequence[Row], *, skip_unchanged: bool) -> tuple[list[Row], ...]:
    before: list[Row] = []
    after: list[Row] = []
    deleted: list[Row] = []
    inserted: list[Row] = []
    for event in given.to_pylist():
        new = (event["id"], event["lsn"], event["name"])
        own = [row for row in rows if row[0] == event["id"]]
        if not own and not event[names.DELETE_COLUMN]:
            inserted.append(new)
        for row in own:
            newer = row[1] is None or event["lsn"] > row[1]
            if event[names.DELETE_COLUMN]:
                deleted += [row] if newer else []
            elif (newer and (not skip_unchanged or new != row)) or (event["lsn"] == row[1] and new != row):
                before.append(row)
                after.append(new)
    return before, after, deleted, inserted


# -- merging ------------------------------------------------------------------------------------


MODES = pytest.mark.parametrize("mode", get_args(Mode))


@pytest.fixture(params=get_args(Mode))
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    """A table of two files, with deletion vectors and without."""
    target = Target(tmp_path / "table", mode=request.param)
    target.append((1, 3, "one"), (2, 3, "two"), (3, 3, "three"))
    target.append((4, 3, "four"))
    return target


def test_a_merge_in_one_commit(target):
    report = target.merge(
        events((1, 5, "uno"), (2, 5, None), (4, 5, None), (9, 5, "nine"), (3, 1, "late"), delete=[2, 4])
    )

    assert (report.inserted, report.updated, report.deleted, report.version) == (1, 1, 2, 3)
    assert target.rows() == [(1, 5, "uno"), (3, 3, "three"), (9, 5, "nine")]
    assert target.feed() == [
        ("delete", 2, 3, "two"),
        ("delete", 4, 3, "four"),
        ("insert", 9, 5, "nine"),
        ("update_postimage", 1, 5, "uno"),
        ("update_preimage", 1, 3, "one"),
    ]
    assert [txn["version"] for txn in target.actions("txn")] == [0]
    is_copied = target.mode == "rewrite"
    assert report.metrics["numTargetRowsCopied"] == is_copied
    assert (report.metrics["numTargetFilesRemoved"], report.metrics["numTargetFilesAdded"]) == (1 + is_copied, 1)


def test_a_file_of_which_nothing_is_left_goes_without_a_vector(target):
    target.merge(events((4, 5, None), delete=[4]))

    assert [remove["path"] for remove in target.actions("remove")] == ["part-1.parquet"]
    assert target.actions("add") == []
    assert target.rows() == [(1, 3, "one"), (2, 3, "two"), (3, 3, "three")]


@pytest.mark.parametrize("target", ["mark"], indirect=True)
def test_a_vector_grows_until_its_file_goes(target):
    """Each commit removes the file with the vector before and adds it with the next."""
    seen = []
    for key in (2, 1, 3):
        target.merge(events((key, 5, None), delete=[key]))
        vectors = [action.get("deletionVector") for kind in ("remove", "add") for action in target.actions(kind)]
        seen.append([vector and vector["cardinality"] for vector in vectors])

    assert seen == [[None, 1], [1, 2], [2]]
    assert target.rows() == [(4, 3, "four")]
    assert (
        target.actions("remove")[0]["deletionVector"] == target.actions("add", target.version - 1)[0]["deletionVector"]
    )


def test_a_deleted_row_is_nobodys(target):
    """What a vector marks stays in the file and must neither be updated nor keep an event from being inserted."""
    target.merge(events((1, 5, None), (2, 5, "zwei"), delete=[1]))
    report = target.merge(events((1, 7, "again"), (2, 7, "due")))

    assert (report.inserted, report.updated, report.deleted) == (1, 1, 0)
    assert target.feed() == [
        ("insert", 1, 7, "again"),
        ("update_postimage", 2, 7, "due"),
        ("update_preimage", 2, 5, "zwei"),
    ]
    assert target.rows() == [(1, 7, "again"), (2, 7, "due"), (3, 3, "three"), (4, 3, "four")]


def test_a_merge_that_changes_nothing_commits_nothing(target):
    files = target.files()
    report = target.merge(events((1, 1, "late"), (77, 1, None), delete=[77]))

    assert (report.version, report.inserted, report.updated, report.deleted) == (None, 0, 0, 0)
    assert target.files() == files


def test_a_batch_that_was_applied_is_not_applied_again(target):
    target.merge(events((1, 5, "uno")))
    target.batch_id -= 1
    files = target.files()

    assert target.merge(events((1, 6, "again"))).already_applied
    assert target.files() == files


def test_a_batch_without_an_application_id_leaves_no_transaction(target):
    target.merger(events((1, 5, "uno"))).merge(None, target.tag(app_id=None))

    assert target.actions("txn") == []


def test_an_insert_only_merge(target):
    spec = MergeSpec(target="/t", keys=("id",), sequence_by=("lsn",), shape=InsertOnly())
    report = target.merge(events((1, 5, "uno"), (9, 5, "nine")), spec=spec)

    assert (report.inserted, report.updated, target.feed()) == (1, 0, [("insert", 9, 5, "nine")])
    assert target.actions("remove") == []


@MODES
def test_without_a_change_feed_there_are_no_change_files(tmp_path, mode):
    target = Target(tmp_path / "table", mode=mode, enableChangeDataFeed="false")
    target.append((1, 3, "one"), (2, 3, "two"))
    target.merge(events((1, 5, "uno"), (2, 5, None), delete=[2]))

    assert (target.actions("cdc"), target.rows()) == ([], [(1, 5, "uno")])


@MODES
def test_commits_of_a_table_that_dates_them(tmp_path, mode):
    """Later than the commit before, whatever the clock says."""
    target = Target(tmp_path / "table", mode=mode, enableInCommitTimestamps="true")
    target.append((1, 3, "one"))
    before = target.actions("commitInfo")[0]["inCommitTimestamp"]
    for lsn in (4, 5):
        target.merge(events((1, lsn, "uno")))
    times = [target.actions("commitInfo", version)[0]["inCommitTimestamp"] for version in (2, 3)]

    assert times == [before + 1, before + 2]
    assert target.rows() == [(1, 5, "uno")]


@MODES
def test_rows_of_partitions(tmp_path, mode):
    """An update may take a row to another partition; NULL is one of them."""
    target = Target(tmp_path / "table", partition_columns=["name"], mode=mode)
    target.merge(events((1, 1, "a b"), (2, 1, None), (3, 1, "ä"), (4, 1, "p/q=%25")))
    target.merge(events((1, 2, None), (2, 2, "a b"), (3, 2, None), delete=[3]))

    assert target.rows() == [(1, 2, None), (2, 2, "a b"), (4, 1, "p/q=%25")]
    assert {add["partitionValues"]["name"] for add in target.actions("add")} == {None, "a b"}


# -- others at the same time --------------------------------------------------------------------


@contextmanager
def overtaking(act: Callable[[], Any]) -> Iterator[None]:
    act()
    yield


def overtaken(target: Target, given: pa.Table, act: Callable[[], Any], spec: MergeSpec = SPEC) -> DriverMerger:
    """A merger before whose commit something happens, once."""
    left = [act]

    def lock() -> AbstractContextManager[object]:
        return overtaking(left.pop()) if left else nullcontext()

    return target.merger(given, spec, lock)


def test_a_merge_that_is_overtaken_leaves_nothing_and_may_be_tried_again(target):
    merger = overtaken(target, events((1, 5, "uno"), (4, 5, None), delete=[4]), lambda: target.append((7, 1, "theirs")))
    files, tag = target.files(), target.tag()

    with pytest.raises(ConcurrentWriteException):
        merger.merge(None, tag)
    assert target.files() - files == {"part-2.parquet", f"_delta_log/{3:020}.json"}  # of a rewritten file nothing
    report = merger.merge(None, tag)
    assert (report.version, report.updated, report.deleted) == (4, 1, 1)
    assert target.rows() == [(1, 5, "uno"), (2, 3, "two"), (3, 3, "three"), (7, 1, "theirs")]


def test_a_row_that_another_merge_has_moved_is_found_where_it_is(target):
    """The second attempt reads log, files and vectors anew."""
    merger = overtaken(target, events((1, 5, "uno")), lambda: target.merge(events((1, 4, "eins"), (2, 9, "zwei"))))
    tag = CommitTag(app_id="other", batch_id=0, user_metadata="{}", token="t")

    with pytest.raises(ConcurrentWriteException):
        merger.merge(None, tag)
    merger.merge(None, tag)
    assert target.feed() == [("update_postimage", 1, 5, "uno"), ("update_preimage", 1, 4, "eins")]
    assert target.rows() == [(1, 5, "uno"), (2, 9, "zwei"), (3, 3, "three"), (4, 3, "four")]


def test_a_newer_row_of_another_merge_wins(target):
    merger = overtaken(target, events((1, 5, "late")), lambda: target.merge(events((1, 7, "newest"))))
    tag = CommitTag(app_id="other", batch_id=0, user_metadata="{}", token="t")

    with pytest.raises(ConcurrentWriteException):
        merger.merge(None, tag)
    assert merger.merge(None, tag).version is None
    assert (1, 7, "newest") in target.rows()


@pytest.mark.parametrize(
    "properties",
    [{"delta.constraints.c": "id < 5"}, {"delta.appendOnly": "true"}],
    ids=str,
)
def test_a_table_that_must_not_be_merged_into_any_more(target, properties):
    """Properties that came between the choice of the engine and the merge."""
    merger = target.merger(events((1, 5, "uno")))
    body = target.metadata["metaData"]
    target.put({"metaData": {**body, "configuration": {**body["configuration"], **properties}}})
    files = target.files()

    with pytest.raises(NoLongerEligibleError):
        merger.merge(None, target.tag())
    assert target.files() == files


@pytest.mark.parametrize("name", ["id", "lsn", "name"])
def test_a_column_that_has_another_name_since_the_choice(target, name):
    """RENAME COLUMN in between: to go on would leave the column out, or take each key for a new one."""
    merger = target.merger(
        events((1, 5, "uno"), (9, 5, "nine")),
        spec=MergeSpec(target="/t", keys=("id",), sequence_by=("lsn",), shape=InsertOnly()),
    )
    renamed = StructType(
        [
            StructField(
                f"{field.name}_2" if field.name == name else field.name,
                field.dataType,
                True,
                {"delta.columnMapping.physicalName": field.name, "delta.columnMapping.id": number},
            )
            for number, field in enumerate(SCHEMA.fields, 1)
        ]
    )
    body = target.metadata["metaData"]
    mapping = {"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": "3"}
    protocol = {
        kind: [*one, "columnMapping"] if isinstance(one, list) else one
        for kind, one in target.protocol["protocol"].items()
    }
    configuration = {**body["configuration"], **mapping}
    target.put(
        {"protocol": protocol}, {"metaData": {**body, "schemaString": renamed.json(), "configuration": configuration}}
    )
    files = target.files()

    with pytest.raises(NoLongerEligibleError):
        merger.merge(None, target.tag())
    assert target.files() == files


def test_a_column_that_was_added_since_the_choice(target):
    """Events do not have it: it is NULL in new rows and stays in others."""
    merger = target.merger(events((1, 5, "uno"), (9, 5, "nine")))
    wider = StructType([*SCHEMA.fields, StructField("more", IntegerType())])
    target.put({"metaData": {**target.metadata["metaData"], "schemaString": wider.json()}})
    merger.merge(None, target.tag())

    assert target.rows() == [(1, 5, "uno"), (2, 3, "two"), (3, 3, "three"), (4, 3, "four"), (9, 5, "nine")]
    assert live_rows(target.root)["more"].null_count == 5


def test_a_failure_before_the_commit_changes_nothing(target, monkeypatch):
    rows, files = target.rows(), target.files()

    def full(*_: Any, **__: Any) -> Any:
        msg = "no space left on device"
        raise OSError(msg)

    monkeypatch.setattr(write, "write_change_file", full)
    with pytest.raises(OSError, match="no space left"):
        target.merge(events((1, 5, "uno"), (9, 5, "nine")))
    monkeypatch.undo()

    assert (target.version, target.rows(), target.files()) == (2, rows, files)
    assert target.merge(events((1, 5, "uno"))).updated == 1


# -- histories ----------------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("turn", range(6))
def test_any_history_of_merges_has_the_rows_of_its_events(tmp_path, seed, turn, mode, monkeypatch):
    """Against a dictionary; each commit is checked, row by row, by a reader that shares no code with the package."""
    rng = random.Random(f"{seed} {turn}")
    monkeypatch.setattr(write, "_SMALL_BYTES", rng.choice([0, 150, write._SMALL_BYTES]))
    monkeypatch.setattr(write, "_MOST_BYTES", rng.choice([100, write._MOST_BYTES]))
    partitioned = ["name"] if turn % 2 else []
    feed = "true" if turn % 3 else "false"  # without one, rows are read in as few columns as will do
    target = Target(tmp_path / "table", partition_columns=partitioned, mode=mode, enableChangeDataFeed=feed)
    rows: dict[int, Row] = {}
    merger: DriverMerger | None = None
    for batch in range(12):
        keys = rng.sample(range(60), rng.choice([1, 10, 40]))
        deletes = [key for key in keys if rng.random() < 0.4]
        told: list[Row] = [(key, rng.choice([batch, batch + 1, 0]), rng.choice(["a", "b", None])) for key in keys]
        for event in told:
            row = rows.get(event[0])
            if row is not None and not (event[1] > row[1] or (event[1] == row[1] and event[0] not in deletes)):
                continue
            if event[0] in deletes:
                rows.pop(event[0], None)
            else:
                rows[event[0]] = event
        given = events(*told, delete=deletes)
        fresh = target.merger(given)
        if merger is not None and rng.random() < 0.7:  # what is known of the table is kept, as a sink does
            fresh.target = merger.target
            fresh._chosen_at = -1
        merger = fresh
        merger.merge(None, target.tag())
        if rng.random() < 0.2:
            DeltaTable(str(target.root)).create_checkpoint()

    assert target.rows() == sorted(rows.values(), key=repr)


def test_without_a_feed_rows_are_read_in_the_columns_that_count(tmp_path, monkeypatch):
    """Keys are left as they are. All are read where an event has the sequence of its row, and where there is a feed."""
    asked: list[set[str]] = []

    def noted(*args: Any, **how: Any) -> pa.Table:
        found = find(*args, **how)
        asked.append(set(found.column_names) & set(COLUMNS))
        return found

    monkeypatch.setattr(module, "find", noted)
    for feed, lsn, expected in (
        ("false", 5, [{"id", "lsn"}]),
        ("false", 3, [{"id", "lsn"}, set(COLUMNS)]),
        ("true", 5, [set(COLUMNS)]),
    ):
        target = Target(tmp_path / f"{feed}{lsn}", enableChangeDataFeed=feed)
        target.append((1, 3, "one"), (2, 3, "two"))
        asked.clear()
        target.merge(events((1, lsn, "uno"), (2, 5, None), (3, 5, "three"), delete=[2]))
        assert asked == expected
        assert target.rows() == [(1, lsn, "uno"), (3, 5, "three")]


@MODES
def test_rows_are_counted_where_no_clause_looks_at_them(tmp_path, mode):
    target = Target(tmp_path / "table", mode=mode, enableChangeDataFeed="false")
    target.append((1, 3, "one"), (2, 3, "two"), (3, 3, "three"))
    report = target.merger(events((1, 1, None), (2, 1, None)))._commit(
        events((1, 1, None), (2, 1, None)), [Delete(when=Always())], target.tag()
    )

    assert (report.deleted, report.metrics["numTargetRowsDeleted"], target.rows()) == (2, 2, [(3, 3, "three")])


def test_what_is_committed_is_undone_whatever_memory_it_takes(target):
    """A merge of the same rows is given up, with nothing written."""
    late = events((1, 4, None), (2, 4, None))
    merger = target.merger(late)
    merger.promise = Promise(1)
    files = target.files()
    with pytest.raises(NoLongerEligibleError, match="memory"):
        merger._commit(late, [Delete(when=Newer())], target.tag())
    assert target.files() == files

    report = merger.repair(SimpleNamespace(refusing=late), target.tag())
    assert (report.deleted, target.rows()) == (2, [(3, 3, "three"), (4, 3, "four")])


def test_columns_that_a_clause_looks_at_or_leaves_are_needed():
    """Whatever is not known to look at less is taken to look at all of them."""
    values = {name: name for name in COLUMNS}
    same = And(SameSequence(), Changed())
    for clause, expected in (
        (Insert(when=Changed(), values={}), set()),
        (Delete(when=Always()), set()),
        (Delete(when=And(IsDelete(), Newer())), {"lsn"}),
        (Update(when=And(Not(IsDelete()), Or(Newer(), same)), values=values), {"lsn"}),
        (Update(when=Newer(), values={"id": "id"}), {"lsn", "name"}),
        (Update(when=And(Newer(), Changed()), values=values), None),
        (Update(when=And(Changed(), SameSequence()), values=values), None),
        (Update(when=Or(SameSequence(), Changed()), values=values), None),
        (Update(when=Not(same), values=values), {"lsn"}),
        (Delete(when=HasValue("name")), None),
        (Delete(when=Opaque("t.name = 'x'")), None),
    ):
        found = needed([clause], layout(), SCHEMA)
        assert found == (None if expected is None else {"id", *expected}), clause


# -- files that are written again ---------------------------------------------------------------


@pytest.fixture
def rewritten(tmp_path: Path) -> Target:
    """A table without deletion vectors, of two files that a merge touches."""
    target = Target(tmp_path / "table", mode="rewrite")
    for first in (0, 100):
        target.append(*((key, 3, f"text {key}") for key in range(first + 99, first, -1)))
    return target


TOUCHING = (50, 5, "new"), (150, 5, "new"), (500, 5, "new")


def test_what_is_left_of_small_files_comes_into_one_with_the_new_rows(rewritten):
    report = rewritten.merge(events(*TOUCHING))

    assert sorted(remove["path"] for remove in rewritten.actions("remove")) == ["part-0.parquet", "part-1.parquet"]
    (add,) = rewritten.actions("add")
    assert json.loads(add["stats"])["numRecords"] == 199
    assert (report.metrics["numTargetRowsCopied"], report.metrics["numTargetFilesAdded"]) == (196, 1)
    assert add["path"].startswith("on-read-")  # may be compacted
    assert len(rewritten.rows()) == 199


def test_large_files_are_written_again_alone_in_their_order(rewritten, monkeypatch):
    """Somebody may have sorted them: compaction leaves them alone."""
    monkeypatch.setattr(write, "_SMALL_BYTES", 0)
    rewritten.merge(events(*TOUCHING))

    adds = rewritten.actions("add")
    assert sorted(add["path"].partition("-")[0] for add in adds) == ["on", "part", "part"]
    for add in adds[:2]:
        keys = pq.read_table(rewritten.root / add["path"])["id"].to_pylist()
        assert (len(keys), keys) == (98, sorted(keys, reverse=True))
        stats = json.loads(add["stats"])
        assert (stats["minValues"]["id"], stats["maxValues"]["id"]) == (min(keys), max(keys))
    assert len(rewritten.rows()) == 199


@pytest.mark.parametrize("small", [0, 1 << 20])
def test_a_file_that_becomes_too_large_becomes_several(rewritten, monkeypatch, small):
    """Of few rows at a time, for those that are read at once stay together."""
    monkeypatch.setattr(write, "_SMALL_BYTES", small)
    monkeypatch.setattr(write, "_MOST_BYTES", 1_000)
    monkeypatch.setattr(finding, "_rows_at_a_time", lambda _: 10)
    before = rewritten.rows()
    rewritten.merge(events(*TOUCHING))

    counts = [json.loads(add["stats"])["numRecords"] for add in rewritten.actions("add")]
    assert (sum(counts), max(counts) <= 50, len(counts) >= 4) == (199, True, True), counts
    assert rewritten.rows() == sorted([*(row for row in before if row[0] not in (50, 150)), *TOUCHING], key=repr)


def test_files_with_a_vector_of_before_are_written_without_it(tmp_path):
    """The property was taken away since."""
    target = Target(tmp_path / "table")
    target.append((1, 3, "one"), (2, 3, "two"), (3, 3, "three"))
    target.merge(events((1, 5, None), delete=[1]))
    body = target.metadata["metaData"]
    off = {**body["configuration"], "delta.enableDeletionVectors": "false"}
    merger = target.merger(events((2, 5, "zwei")))
    target.put({"metaData": {**body, "configuration": off}})

    report = merger.merge(None, target.tag())

    assert [action["deletionVector"]["cardinality"] for action in target.actions("remove")] == [1]
    assert not any("deletionVector" in add for add in target.actions("add"))
    assert (report.metrics["numTargetDeletionVectorsRemoved"], report.metrics["numTargetRowsCopied"]) == (1, 1)
    assert target.rows() == [(2, 5, "zwei"), (3, 3, "three")]


def test_a_merge_whose_files_do_not_fit_into_memory_writes_nothing(rewritten):
    merger = rewritten.merger(events(*TOUCHING))
    asked: list[int] = []

    class Little(Promise):
        def cover(self, wanted: int) -> int | None:
            asked.append(wanted)
            return 1 if wanted > asked[0] + 1_000 else None

    merger.promise = Little(None)
    files = rewritten.files()

    with pytest.raises(NoLongerEligibleError, match="memory"):
        merger.merge(None, rewritten.tag())
    assert rewritten.files() == files


def test_of_large_files_two_are_in_memory_at_once_and_of_small_ones_as_many_as_make_up_a_file(rewritten, monkeypatch):
    for _ in range(8):
        rewritten.append(*((key, 3, f"text {key}") for key in range(99)))
    native = open_table(str(rewritten.root))
    table = table_files(native, native.snapshot())
    touched = table.touched(native, native.snapshot(), KeyBounds())
    one = write.rewritten_bytes(table, touched[:1])

    assert write.rewritten_bytes(table, touched) == pytest.approx(10 * one, rel=0.2)
    monkeypatch.setattr(write, "_MOST_BYTES", 3 * one)
    assert write.rewritten_bytes(table, touched) == 3 * one
    monkeypatch.setattr(write, "_SMALL_BYTES", 0)
    assert write.rewritten_bytes(table, touched) == pytest.approx(2 * one, rel=0.2)


# -- the engine ---------------------------------------------------------------------------------


def test_clauses_about_some_rows_without_an_event_are_sparks():
    """Which ones, SQL says; all of them may go, or stay."""
    assert eligibility.clauses_obstacle([Delete(when=DELETES), Insert(when=Always(), values={})]) is None
    assert eligibility.clauses_obstacle([DeleteMissing(when=Always())]) is None
    for clause in (DeleteMissing(when=Not(Changed())), UpdateMissing(when=Always(), values={})):
        refused = eligibility.clauses_obstacle([clause])
        assert refused is not None
        assert refused.reason == "shape"


# -- copies of the whole table ------------------------------------------------------------------

WHOLE = MergeSpec(target="/t", keys=("id",), sequence_by=(), shape=Snapshot(max_delete_share=0.5))


def copied(target: Target, *rows: Row, spec: MergeSpec = WHOLE) -> MergeReport:
    """Merge a copy of the whole table."""
    return target.merge(events(*rows), spec=spec)


def test_the_table_becomes_the_copy(target):
    """Rows that differ in nothing have no change; those that the copy lacks go; a key twice is updated twice."""
    target.append((3, 3, "three"), (None, 3, "nobody"))
    report = copied(target, (1, 3, "one"), (2, 3, "zwei"), (3, 3, "three"), (4, 3, "four"), (5, 1, "five"))

    assert target.rows() == sorted(
        [(1, 3, "one"), (2, 3, "zwei"), (3, 3, "three"), (3, 3, "three"), (4, 3, "four"), (5, 1, "five")], key=repr
    )
    assert target.feed() == sorted(
        [
            ("update_preimage", 2, 3, "two"),
            ("update_postimage", 2, 3, "zwei"),
            ("delete", None, 3, "nobody"),
            ("insert", 5, 1, "five"),
        ],
        key=repr,
    )
    counts = (report.inserted, report.updated, report.deleted, report.metrics["numTargetRowsNotMatchedBySourceDeleted"])
    assert counts == (1, 1, 1, 1)
    version = target.version
    again = copied(target, (5, 1, "five"), (1, 3, "one"), (2, 3, "zwei"), (3, 3, "three"), (4, 3, "four"))
    assert (again.version, target.version) == (None, version)


def test_a_copy_that_would_remove_too_much_stops_before_anything_is_written(target):
    """By the rows that live: deleted ones do not count, nor files that are gone."""
    assert copied(target, (1, 3, "one"), (2, 3, "two"), (3, 3, "three")).deleted == 1
    files = target.files()

    with pytest.raises(ContractError, match=r"snapshot 1 for '/t' would delete 2 of 3 rows \(66\.7%\)"):
        copied(target, (1, 3, "one"))

    assert target.files() == files


def test_a_copy_that_is_overtaken_is_held_against_the_table_as_it_is_then(target):
    """Rows of the winner are missing, and count."""
    copy = events((1, 3, "uno"), (2, 3, "two"), (3, 3, "three"))
    tags = [CommitTag(app_id="other", batch_id=number, user_metadata="{}", token="t") for number in range(2)]
    merger = overtaken(target, copy, lambda: target.append((8, 1, "theirs")), WHOLE)
    with pytest.raises(ConcurrentWriteException):
        merger.merge(None, tags[0])
    assert merger.merge(None, tags[0]).deleted == 2
    assert target.rows() == [(1, 3, "uno"), (2, 3, "two"), (3, 3, "three")]

    merger = overtaken(
        target, copy.slice(1), lambda: target.append((8, 1, "theirs"), (9, 1, "theirs"), (10, 1, "x")), WHOLE
    )
    with pytest.raises(ConcurrentWriteException):
        merger.merge(None, tags[1])
    with pytest.raises(ContractError, match=r"would delete 4 of 6 rows"):
        merger.merge(None, tags[1])


def test_what_a_copy_lacks_may_stay(target):
    spec = MergeSpec(target="/t", keys=("id",), sequence_by=(), shape=Snapshot(delete_missing=False))
    copied(target, (1, 3, "uno"), spec=spec)

    assert target.rows() == [(1, 3, "uno"), (2, 3, "two"), (3, 3, "three"), (4, 3, "four")]


def test_an_empty_copy_empties_the_table(target):
    spec = MergeSpec(target="/t", keys=("id",), sequence_by=(), shape=Snapshot(max_delete_share=1, min_rows=0))

    assert (copied(target, spec=spec).deleted, target.rows()) == (4, [])
    assert copied(target, spec=spec).version is None


@MODES
@pytest.mark.parametrize("turn", range(4))
def test_any_history_of_copies_is_the_last_one(tmp_path, seed, turn, mode):
    """In partitions, with vectors that grow, with and without a feed; each commit is checked by another reader."""
    rng = random.Random(f"copies {seed} {turn}")
    feed, partitioned = "true" if turn % 3 else "false", ["name"] if turn % 2 else []
    target = Target(tmp_path / "table", partition_columns=partitioned, mode=mode, enableChangeDataFeed=feed)
    spec = MergeSpec(target="/t", keys=("id",), sequence_by=(), shape=Snapshot(max_delete_share=1, min_rows=0))
    rows: dict[int, Row] = {}
    for _ in range(10):
        before = dict(rows)
        for key in rng.sample(range(50), rng.choice([0, 3, 30])):
            if rng.random() < 0.4:
                rows.pop(key, None)
            else:
                rows[key] = (key, rng.choice([1, 2, None]), rng.choice(["a", "b", None]))
        told = list(rows.values())
        rng.shuffle(told)
        report = copied(target, *told, spec=spec)
        changed = sum(before[key] != row for key, row in rows.items() if key in before)
        expected = (len(rows.keys() - before.keys()), changed, len(before.keys() - rows.keys()))
        assert (report.inserted, report.updated, report.deleted) == expected
        assert target.rows() == sorted(rows.values(), key=repr)


def test_another_log_in_the_place_of_the_one_that_was_read_is_read_anew(target):
    """Of the same table, as from a backup: what was known of its files may be of others."""
    native = open_table(str(target.root))
    known = table_files(native, native.snapshot())
    newest = target.log / f"{native.version:020}.json"
    newest.write_bytes(newest.read_bytes().replace(b'"timestamp":1', b'"timestamp":2'))
    os.utime(newest, (1, 1))

    native.refresh()

    assert table_files(native, native.snapshot()) is not known
