"""Compaction holds rows as they are in memory, which no file tells; without a JVM."""

from __future__ import annotations

from pathlib import Path

import pytest
from driver_target import Target

from stream_merge.engines.driver import compact as module
from stream_merge.engines.driver.compact import compact
from stream_merge.engines.memory import BASE_BYTES
from stream_merge.tables.files.compaction_choice import TOGETHER
from stream_merge.tables.log.handle import open_table

ROWS, TEXT = 5_000, "x" * 2_000
MEGABYTE = 1_000_000
FILE_BYTES = 10 * MEGABYTE
"""In memory; a page of the file says it all with one text."""


@pytest.fixture
def target(tmp_path: Path) -> Target:
    target = Target(tmp_path / "table")
    for number in range(TOGETHER):
        target.append(*((number * ROWS + i, 1, TEXT) for i in range(ROWS)), name=f"on-read-{number}.parquet")
    return target


def test_as_many_files_are_put_together_as_there_is_memory_for(target: Target):
    before = target.rows()
    assert sum((target.root / name).stat().st_size for name in target.files()) < FILE_BYTES
    native = open_table(str(target.root))
    assert native is not None

    found = compact(native, BASE_BYTES + 3 * 3 * FILE_BYTES + MEGABYTE * 5)

    assert found.maintenance is not None
    assert (found.maintenance.outcome, found.maintenance.removed_files, found.maintenance.added_files) == ("done", 3, 1)
    assert found.debt is not None
    assert (found.debt.rows, found.debt.awaiting_files) == (TOGETHER * ROWS, TOGETHER - 3)
    assert target.rows() == before
    newest = native.history(1)[0]
    assert (newest.is_maintenance, newest.ours) == (True, None)  # known as the sink's own, and no batch's


def test_what_there_is_no_memory_for_is_not_read_again(target: Target, monkeypatch: pytest.MonkeyPatch):
    native = open_table(str(target.root))
    assert native is not None
    files = target.files()
    read: list[str] = []
    live_rows = module.live_rows

    def noted(root: Path, candidate: object, *more: object, **how: object) -> object:
        read.append(str(candidate))
        return live_rows(root, candidate, *more, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "live_rows", noted)
    for times in range(1, 4):
        found = compact(native, BASE_BYTES + 3 * FILE_BYTES + MEGABYTE * 5)
        assert found.maintenance is not None
        assert found.maintenance.outcome == "no_memory"
        assert len(read) == 2, times
    assert target.files() == files
