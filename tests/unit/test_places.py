"""Where a location lies on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from stream_merge.spark.places import canonical, local_path


@pytest.mark.parametrize(
    ("location", "path"),
    [
        ("/lake/orders", "/lake/orders"),
        ("file:/lake/orders#eu", "/lake/orders#eu"),  # as Hadoop writes its paths
        ("file:///lake/orders%23eu", "/lake/orders#eu"),
        ("file://localhost/lake/what?", "/lake/what?"),
        ("file:///lake/a%20b", "/lake/a b"),
        ("lake/50%25", "lake/50%25"),
        ("s3a://lake/orders", None),
    ],
)
def test_a_path_of_this_machine_is_whole(location: str, path: str | None) -> None:
    assert local_path(location) == (None if path is None else Path(path))


def test_two_folders_are_two_tables() -> None:
    assert canonical("file:/lake/orders#eu") != canonical("file:/lake/orders#us")
