"""Where a location lies on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from stream_merge.errors import ConfigError
from stream_merge.model.locations import beside_folder, local_path
from stream_merge.model.table_ref import TableRef
from stream_merge.spark.places import escape_in, expect_scheme


@pytest.mark.parametrize(
    ("location", "path"),
    [
        ("/lake/orders", "/lake/orders"),
        ("file:/lake/orders#eu", "/lake/orders#eu"),  # as Hadoop writes its paths
        ("file://localhost/lake/what?", "/lake/what?"),
        # Hadoop's `new Path(text)` decodes nothing, so that Spark reads and writes this very folder.
        ("file:///lake/a%20b", "/lake/a%20b"),
        ("file:/lake/a b", "/lake/a b"),
        ("lake/50%25", "lake/50%25"),
        ("s3a://lake/orders", None),
    ],
)
def test_a_path_of_this_machine_is_whole(location: str, path: str | None) -> None:
    assert local_path(location) == (None if path is None else Path(path))


def test_two_folders_are_two_tables() -> None:
    assert TableRef("file:/lake/orders#eu").canonical != TableRef("file:/lake/orders#us").canonical


@pytest.mark.parametrize(
    ("location", "escape"),
    [
        ("/lake/a%20b", "%20"),
        ("s3a://lake/a%2fb/t", "%2f"),
        ("/lake/50%/a b#?", None),
        ("s3a://lake/a b/ü+:", None),
        ("s3a://lake/orders#eu", "#"),
        ("gs://lake/orders?eu", "?"),
        ("s3a://lake/a\tb", "\t"),
        ("s3a://lake/a\\b", "\\"),
        ("abfss://c@a.dfs.core.windows.net/orders ", " "),
    ],
)
def test_what_delta_rs_would_decode_is_told(location: str, escape: str | None) -> None:
    assert escape_in(location) == escape
    assert TableRef("file:/lake/a%20b").canonical != TableRef("file:/lake/a b").canonical


def test_a_path_without_a_scheme_is_one_of_this_disk_or_refused() -> None:
    """Its lock, and delta-rs' look at the table, would be those of a local folder."""
    expect_scheme(TableRef("/user/x/orders"), "file:/user/x/orders")
    expect_scheme(TableRef("hdfs://nn/user/x/orders"), "hdfs://nn/user/x/orders")
    expect_scheme(TableRef("shop.orders"), "hdfs://nn/warehouse/orders")
    with pytest.raises(ConfigError, match=r"'x/orders' is located at 'hdfs://nn/user/x/orders' by fs.defaultFS"):
        expect_scheme(TableRef("x/orders"), "hdfs://nn/user/x/orders")


def test_two_tables_of_a_catalog_are_two_places() -> None:
    assert len({TableRef(name).canonical for name in ("a.b", "`a.b`", "a.`b`", "A.B", "b", "a/b")}) == 4
    assert len({TableRef(name).canonical for name in ("b", "b/", "B/", "./b", "delta.`b/`")}) == 3


@pytest.mark.parametrize(
    "spelled", ["{}/c/orders", "file://{}/c/orders/", "{}/c/../c/orders", "{}/linked", "{}/same/orders"]
)
def test_a_file_beside_a_folder_is_one_however_the_folder_is_spelled(tmp_path: Path, spelled: str) -> None:
    """Also while the folder is not there yet."""
    (tmp_path / "c").mkdir()
    (tmp_path / "same").symlink_to(tmp_path / "c")
    (tmp_path / "linked").symlink_to(tmp_path / "c" / "orders")

    assert beside_folder(spelled.format(tmp_path), "lock") == tmp_path.resolve() / "c" / "orders.lock"
    assert beside_folder("s3a://bucket/orders", "lock") is None


def test_a_file_beside_a_folder_is_one_from_wherever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert beside_folder("orders", "stop") == beside_folder("./orders", "stop") == tmp_path.resolve() / "orders.stop"
