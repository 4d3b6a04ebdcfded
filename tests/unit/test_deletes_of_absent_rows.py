"""A delete of a row that is not there, while another stream brings it, where looks at a table are not free."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake
from on_read_target import ARROW, Target, events, merger
from stream_merge.engines.delta_rs.merger import DeltaRsMerger
from stream_merge.engines.in_driver import DriverMerger

from stream_merge.engines.base import CommitTag
from stream_merge.tables.log.handle import NativeTable


def on_read(folder: Path) -> Callable[[pa.Table], DriverMerger]:
    target = Target(folder)
    target.append((1, 1, "one"))
    return target.merger


def by_delta_rs(folder: Path) -> Callable[[pa.Table], DriverMerger]:
    write_deltalake(str(folder), pa.table([[1], [1], ["one"]], schema=ARROW))

    return lambda given: merger(folder, given, by=DeltaRsMerger)


@pytest.mark.parametrize("engine", [on_read, by_delta_rs])
def test_a_delete_that_changes_nothing_has_seen_what_came_before_it_was_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Callable[[Path], Callable[[pa.Table], DriverMerger]]
) -> None:
    """The other stream has looked at the remembered deletes before, so nobody else removes the row."""
    merge_of = engine(tmp_path)
    monkeypatch.setattr(NativeTable, "refresh_if_free", lambda _: None)  # as on an object store
    deleting, inserting = merge_of(events((7, 10, None), delete=[7])), merge_of(events((7, 5, "older")))

    inserting.merge(None, _tag("inserts"))
    report = deleting.merge(None, _tag("deletes"))

    assert report.deleted == 1
    assert report.version == _versions(tmp_path)[-1]


@pytest.mark.parametrize("engine", [on_read, by_delta_rs])
def test_a_delete_that_changes_nothing_commits_nothing(
    tmp_path: Path, engine: Callable[[Path], Callable[[pa.Table], DriverMerger]]
) -> None:
    merge_of = engine(tmp_path)
    before = _versions(tmp_path)

    report = merge_of(events((7, 10, None), delete=[7])).merge(None, _tag("deletes"))

    assert (report.deleted, report.version) == (0, None)
    assert _versions(tmp_path) == before


def _versions(folder: Path) -> list[int]:
    return sorted(int(file.stem) for file in (folder / "_delta_log").glob("*.json"))


def _tag(name: str) -> CommitTag:
    return CommitTag(app_id=name, batch_id=0, user_metadata=json.dumps({"by": name}), token=name)
