"""What a target is taken for: a path, or a name in a catalog."""

from __future__ import annotations

from typing import Any

import pytest

from stream_merge import ConfigError, MergeSink
from stream_merge.model.table_ref import TableRef


@pytest.mark.parametrize(
    "target", ["/lake/t", "lake/t", "file:/t", "s3://lake/t", "delta.`/lake/t`", " Delta.`/a`", "/lake/a`b/c`d", "c:t"]
)
def test_a_slash_or_a_scheme_makes_a_path(target: str) -> None:
    assert TableRef(target).path is not None


@pytest.mark.parametrize("target", ["t", "shop.t", "lake.shop.t", "`a/b`.t", "shop.`2024:01`", "`a``/b`.`c`"])
def test_what_stands_in_backticks_makes_none(target: str) -> None:
    """Spark's own rule for a part of a name, in which two backticks are one."""
    assert not (TableRef(target).path is not None)


@pytest.mark.parametrize("target", ["t/", "t//", "delta.`t/`"])
def test_a_folder_beside_the_process_is_a_path_without_its_slash_too(target: str) -> None:
    """Else its table of deletes would be one of a catalog, which need not know it after a restart."""
    assert TableRef(target).plain == "./t"
    assert TableRef(target).beside("x_") == "./x_t"


@pytest.mark.parametrize("target", ["s3://lake", "s3a://lake/", "abfss://c@a.dfs.core.windows.net//", "gs://b/x/.."])
def test_a_store_as_a_whole_has_no_place_beside_it(target: str) -> None:
    assert TableRef(target).is_root
    with pytest.raises(ConfigError, match=r"is a bucket root; .* use a path inside the bucket"):
        MergeSink(target=target, keys="id", sequence_by="n")
    MergeSink(target=target, keys="id", sequence_by="n", tombstones=False, on_invalid="fail")


@pytest.mark.parametrize(
    ("name", "settings", "most"),
    [
        ("t" * 230, {}, 229),
        ("é" * 115, {}, 229),
        ("t" * 230, {"quarantine_target": "/lake/q"}, 229),
        ("t" * 256, {"tombstones": False, "on_invalid": "fail"}, 255),
    ],
)
def test_a_folder_name_on_a_disk_leaves_room_for_those_of_the_side_tables(
    name: str, settings: dict[str, Any], most: int
) -> None:
    expected = f"has a folder name of {len(name.encode())} bytes; .* use at most {most} bytes"
    with pytest.raises(ConfigError, match=expected):
        MergeSink(target=f"/lake/{name}", keys="id", sequence_by="n", **settings)
    MergeSink(target=f"/lake/{'t' * most}", keys="id", sequence_by="n", **settings)
    MergeSink(target=f"s3://lake/{name}", keys="id", sequence_by="n", **settings)


@pytest.mark.parametrize("target", ["s3://lake/t", "file:///t", "t", "/", "gs://b/a%2e", "hdfs://nn:8020/t"])
def test_a_folder_has_one(target: str) -> None:
    assert not TableRef(target).is_root


def test_side_tables_of_a_quoted_name_lie_in_its_schema() -> None:
    assert TableRef("`my-lake`.`a/b`.`c``d`").beside("x_") == "`my-lake`.`a/b`.`x_c``d`"
