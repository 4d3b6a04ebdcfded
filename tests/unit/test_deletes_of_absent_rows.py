"""A delete of a row that is not there, while another stream brings it, where looks at a table are not free."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest
from driver_target import Target, events

from stream_merge.engines.base import CommitTag
from stream_merge.model.results import Mode
from stream_merge.tables.log.handle import LogHandle


@pytest.fixture(params=get_args(Mode))
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    target = Target(tmp_path, mode=request.param)
    target.append((1, 1, "one"))
    return target


def test_a_delete_that_changes_nothing_has_seen_what_came_before_it_was_remembered(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other stream has looked at the remembered deletes before, so nobody else removes the row."""
    monkeypatch.setattr(LogHandle, "refresh_if_free", lambda _: None)  # as on an object store
    deleting, inserting = target.merger(events((7, 10, None), delete=[7])), target.merger(events((7, 5, "older")))

    inserting.merge(None, _tag("inserts"))
    report = deleting.merge(None, _tag("deletes"))

    assert report.deleted == 1
    assert report.version == target.version


def test_a_delete_that_changes_nothing_commits_nothing(target: Target) -> None:
    before = target.version

    report = target.merger(events((7, 10, None), delete=[7])).merge(None, _tag("deletes"))

    assert (report.deleted, report.version) == (0, None)
    assert target.version == before


def _tag(name: str) -> CommitTag:
    return CommitTag(app_id=name, batch_id=0, user_metadata=json.dumps({"by": name}), token=name)
