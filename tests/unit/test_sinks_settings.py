"""Which sinks may stand together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stream_merge import (
    ConfigError,
    MergeSink,
    MergeSinks,
)
from stream_merge.shapes import Clauses, when_matched, when_not_matched_by_source


@pytest.fixture
def one(tmp_path: Path) -> dict[str, MergeSink]:
    return {"a": MergeSink(target=str(tmp_path / "a"), keys="id", sequence_by="lsn")}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"sinks": {}}, "sinks is empty"),
        ({"on_failure": "ignore"}, "on_failure='ignore' must be one of"),
        ({"on_failure": "quarantine"}, "needs quarantine_target="),
        ({"quarantine_target": "q"}, "quarantine_target= is used with"),
        ({"parallel": 0}, "parallel=0 must be a whole number"),
        ({"route_by": ""}, "must be a column name or a Column"),
    ],
)
def test_wrong_settings_are_refused_without_spark(one: dict[str, MergeSink], settings: dict[str, Any], problem: str):
    with pytest.raises(ConfigError, match=problem):
        MergeSinks(**{"sinks": one, "route_by": "source", **settings})


def test_rows_that_a_part_of_a_stream_does_not_have_are_not_missing(tmp_path: Path):
    shape = Clauses([when_matched().update_all(), when_not_matched_by_source().delete()])
    whole = MergeSink(target=str(tmp_path / "a"), keys="id", shape=shape)
    with pytest.raises(ConfigError, match=r"the sinks of \['a'\] need full copies of their tables"):
        MergeSinks({"a": whole}, route_by="source")


def test_sinks_that_would_meet_are_refused(tmp_path: Path):
    def sink(target: str, name: str | None = None) -> MergeSink:
        return MergeSink(target=str(tmp_path / target), keys="id", sequence_by="lsn", name=name)

    with pytest.raises(ConfigError, match="the same target"):
        MergeSinks({"a": sink("t", "x"), "b": sink("t/", "y")}, route_by="source")
    with pytest.raises(ConfigError, match=r"the same name="):
        MergeSinks({"a": sink("t"), "b": sink("u/t")}, route_by="source")
    with pytest.raises(ConfigError, match="use str for all of them, or int"):
        MergeSinks({"a": sink("t"), 1: sink("u")}, route_by="source")
