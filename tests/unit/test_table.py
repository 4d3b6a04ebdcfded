"""What the driver reads of a sink's tables, and what it leaves to Spark. No Spark: its answers."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
from py4j.protocol import Py4JJavaError

from stream_merge import ConfigError
from stream_merge.model.settings import MergeSpec
from stream_merge.spark import object_stores
from stream_merge.tables import spark_table, table
from stream_merge.tables.table import Tables

PLACE = "s3a://lake/orders"
SESSION = cast(Any, None)


def tables(**settings: Any) -> Tables:
    found = Tables(MergeSpec(target=PLACE, keys=("id",), sequence_by=("lsn",), **settings))
    found.begin(SESSION)
    return found


def test_a_table_is_left_to_spark_while_hadoops_credential_store_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As while it is being written anew (`Configuration.getPassword` throws an IOException)."""

    def refuse(*_: object) -> None:
        msg = "An error occurred while calling o1.getPassword."
        raise Py4JJavaError(msg, cast(Any, SimpleNamespace(_target_id="o1")))

    by_spark = object()
    monkeypatch.setattr(object_stores, "storage_options", refuse)
    monkeypatch.setattr(spark_table, "find", lambda _, __: by_spark)

    assert tables(single_writer=True).target.snapshot() is by_spark


# -- whether a store respects what commits rely on ----------------------------------------------


class Found:
    """A table that the driver and Spark see alike."""

    location = PLACE

    def snapshot(self) -> Any:
        return SimpleNamespace(table_id="id")


class Bucket:
    """A bucket of tables that delta-rs may write by Spark's settings; what its store does is another matter."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, found: Found | None) -> None:
        self.tried: list[str] = []
        self.refuses: Exception | None = None
        monkeypatch.setattr(object_stores, "excludes_driver", lambda *_: True)
        monkeypatch.setattr(object_stores, "storage_options", lambda *_: {})
        monkeypatch.setattr(object_stores, "expect_condition", self._try)
        monkeypatch.setattr(table, "open_table", lambda *_: found)
        monkeypatch.setattr(spark_table, "find", lambda *_: found and found.snapshot())

    def _try(self, _: object, place: str) -> None:
        self.tried.append(place)
        if self.refuses is not None:
            raise self.refuses


def test_nothing_is_tried_where_no_table_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would leave a folder, in which Delta makes no table; Spark's first commit there tries by itself."""
    bucket = Bucket(monkeypatch, None)

    assert tables().target.snapshot() is None
    assert bucket.tried == []


def test_a_table_in_a_bucket_that_cannot_be_tried_is_left_to_spark_and_a_person_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "stream_merge")
    bucket, target = Bucket(monkeypatch, Found()), tables().target
    bucket.refuses = ConfigError("the log store is of another version")

    assert [target.driver() for _ in range(2)] == [None, None]
    assert bucket.tried == [PLACE, PLACE]
    (told,) = caplog.records
    assert told.getMessage() == f'table_left_to_spark table={PLACE} error="the log store is of another version"'


def test_where_only_delta_rs_may_merge_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = Bucket(monkeypatch, Found())
    bucket.refuses = ConfigError("the log store is of another version")

    with pytest.raises(ConfigError, match="the log store is of another version"):
        tables(engine="driver").target.driver()
