"""What `explain` advises: only where the figures ask for it, in one sentence with them."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from stream_merge.model.snapshot import CommitRecord
from stream_merge.tables import explain as module
from stream_merge.tables.explain import explain

VECTORS = {"delta.enableDeletionVectors": "true"}
COPYING = {"numTargetRowsUpdated": 100, "numTargetRowsCopied": 400_000}


def advice(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *merges: Mapping[str, int],
    properties: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """Of a table of one file, into which sinks have merged so."""
    target = str(tmp_path / "table")
    write_deltalake(target, pa.table({"id": [1]}), configuration=dict(properties or {}))
    ours = json.dumps({"stream_merge": {"batch_id": 1, "engine": "spark"}})
    commits = [CommitRecord(version=i, timestamp_ms=None, user_metadata=ours, metrics=m) for i, m in enumerate(merges)]
    monkeypatch.setattr(module.NativeTable, "history", lambda *_: commits)
    return explain(target).advice


def test_rows_that_are_rewritten_unchanged_ask_for_deletion_vectors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sentence,) = advice(tmp_path, monkeypatch, COPYING, COPYING)
    assert sentence == (
        "2 merges rewrote 800,000 unchanged rows to change 200; deletion vectors avoid it, if every reader supports"
        f" them: ALTER TABLE delta.`{tmp_path / 'table'}` SET TBLPROPERTIES ('delta.enableDeletionVectors' = 'true'),"
        " with maintenance=Maintenance()"
    )


@pytest.mark.parametrize(
    "merge",
    [
        {"numTargetRowsUpdated": 100_000, "numTargetRowsCopied": 400_000},  # four rows for each
        {"numTargetRowsUpdated": 10, "numTargetRowsCopied": 4_000},  # hundredths of a second
        {},
    ],
)
def test_a_table_whose_merges_cost_little_gets_no_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, merge: dict[str, int]
) -> None:
    assert advice(tmp_path, monkeypatch, merge) == ()


def test_a_table_with_deletion_vectors_is_not_advised_to_have_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert advice(tmp_path, monkeypatch, COPYING, properties=VECTORS) == ()


@pytest.mark.parametrize("partitioned_by", [[], ["day"], ["day", "region"]])
@pytest.mark.parametrize(("files", "is_advised"), [(1, False), (2, True)])
def test_maintenance_is_advised_where_it_would_compact_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partitioned_by: list[str], files: int, *, is_advised: bool
) -> None:
    """It leaves the only file of a partition as it is, however many partitions there are."""
    monkeypatch.setattr(module, "MANY_SMALL_FILES", 2)
    days = [datetime.date(2026, 1, 1), datetime.date(2026, 1, 2), None]
    rows = pa.table({"id": range(6), "day": 2 * days, "region": 3 * ["north"] + 3 * ["south"]})
    for _ in range(files):
        write_deltalake(str(tmp_path / "table"), rows, partition_by=partitioned_by, mode="append")

    explained = explain(str(tmp_path / "table"))
    assert explained.files == files * (1, 3, 6)[len(partitioned_by)]
    assert [sentence.partition(" smaller")[0] for sentence in explained.advice] == [
        f"{explained.files} of {explained.files} files are"
    ] * is_advised
