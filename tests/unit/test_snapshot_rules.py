"""What a snapshot may be told, and when its counts are too many missing rows: rules that need no Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from grouped import sink_with

from stream_merge import ConfigError, MergeSink, MergeSinks
from stream_merge.shapes import SHAPES, Clauses, Snapshot, from_name, known_shapes
from stream_merge.shapes.base import Copied


def sink(shape: Snapshot | None = None, **settings: Any) -> MergeSink:
    return sink_with(target="/t", keys=["id"], shape=shape or Snapshot(), **settings)


def test_a_snapshot_reads_as_it_is_written():
    written = "Snapshot(missing={'deleted_at': 'current_timestamp()'}, max_delete_share=0.5, within=\"t.day = 'x'\")"

    assert repr(eval(written)) == written
    assert repr(Snapshot()) == "Snapshot()"


def test_it_is_known_by_its_name():
    assert "snapshot" in known_shapes()
    assert repr(from_name("snapshot")) == "Snapshot()"
    assert [shape.is_whole for shape in SHAPES] == [False, False, False, True]
    assert Clauses in SHAPES


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"max_delete_share": 1.5}, "max_delete_share=1.5 must be a number from 0 (no row) to 1 (all rows)"),
        ({"max_delete_share": float("nan")}, "max_delete_share=nan must be a number from 0"),
        ({"max_delete_share": True}, "max_delete_share=True must be a number from 0"),
        ({"min_rows": -1}, "min_rows=-1 must be a whole number of rows, 0 or more"),
        ({"min_rows": 1.5}, "min_rows=1.5 must be a whole number of rows, 0 or more"),
        ({"within": " "}, "within=' ' must be SQL text over t, such as \"t.day = '2024-06-01'\""),
        ({"missing": {}}, "missing is empty; name a column to set, or remove it to delete missing rows"),
        ({"missing": {"": "1"}}, "missing holds '', which is not a column name"),
        ({"missing": {"a": 1}}, "missing sets 'a' to 1; use SQL text, such as 'true'"),
        (
            {"missing": {"`__stream_merge_x`": "1"}},
            "missing sets '`__stream_merge_x`'; the prefix '__stream_merge_' is reserved",
        ),
        (
            {"missing": {"a": "1"}, "delete_missing": False},
            "missing is given, but delete_missing=False keeps such rows; remove one of them",
        ),
    ],
)
def test_arguments_that_mean_nothing_are_refused(arguments: dict[str, Any], said: str):
    with pytest.raises(ConfigError) as caught:
        Snapshot(**arguments)
    (problem,) = caught.value.problems
    assert problem.split("] ", 1)[1].startswith(said)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sequence_by": "lsn"}, "sequence_by has no effect with shape=Snapshot(…), of which the later one"),
        ({"apply_as_deletes": "op = 'd'"}, "apply_as_deletes has no effect with shape=Snapshot(…), which deletes what"),
        ({"tombstone_retention_seconds": 1.0}, "retention_seconds has no effect with shape=Snapshot(…)"),
        ({"shape": Snapshot(missing={"id": "1"})}, "missing sets key(s) ['id']; use other columns"),
        (
            {"engine": "driver", "shape": Snapshot(missing={"gone": "true"})},
            "engine='driver' does not execute the SQL of missing in shape=Snapshot(…); use 'auto'",
        ),
        (
            {"engine": "driver", "shape": Snapshot(within="t.day = 1")},
            "engine='driver' does not execute the SQL of within in shape=Snapshot(…); use 'auto'",
        ),
    ],
)
def test_settings_that_mean_nothing_are_refused_by_both_names(settings: dict[str, Any], said: str):
    with pytest.raises(ConfigError) as caught:
        sink(**settings)
    (problem,) = caught.value.problems
    assert problem.split("] ", 1)[1].startswith(said)


@pytest.mark.parametrize(
    ("share", "rows", "missing", "stops"),
    [
        (0.2, 0, 0, False),
        (0.2, 10, 2, False),
        (0.2, 10, 3, True),
        (0.0, 10, 0, False),
        (0.0, 10, 1, True),
        (1.0, 10, 10, False),
        (0.3, 10, 3, False),
        (0.29, 100, 29, False),
    ],
)
def test_so_many_rows_may_be_missing_and_no_more(share: float, rows: int, missing: int, stops: bool):
    said = Snapshot(max_delete_share=share).objection(Copied(rows=rows, missing=missing), where="snapshot 1")

    assert (said is not None) == stops
    if said is not None:
        allowed = float(said.rsplit("=", 1)[1])
        shape = Snapshot(max_delete_share=allowed)
        assert shape.objection(Copied(rows=rows, missing=missing), where="snapshot 1") is None


def test_what_stays_may_be_any_share():
    shape = Snapshot(delete_missing=False, max_delete_share=0.0)

    assert shape.objection(Copied(rows=1, missing=1), where="snapshot 1") is None
    assert (shape.concerns_missing, Snapshot().concerns_missing) == (False, True)


def test_a_part_of_a_routed_stream_is_no_snapshot(tmp_path: Path):
    for shape in (Snapshot(), Snapshot(delete_missing=False)):
        whole = sink_with(target=str(tmp_path / "a"), keys="id", shape=shape)
        with pytest.raises(ConfigError, match=r"the sinks of \['a'\] need full copies of their tables"):
            MergeSinks({"a": whole}, route_by="source")
