"""What a sink reads by delta-rs, and what it leaves to Spark. No Spark: its answers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
from py4j.protocol import Py4JJavaError

from stream_merge import ConfigError
from stream_merge.model.settings import MergeSpec
from stream_merge.spark import object_stores
from stream_merge.tables import reader, spark_table
from stream_merge.tables.reader import Store

PLACE = "s3a://lake/orders"
SESSION = cast(Any, None)


class Kept:
    """The handle of a table that the batch before had to do with."""

    location = PLACE

    def __init__(self) -> None:
        self.looks = 0

    def is_at(self, location: str, options: Mapping[str, str] | None) -> bool:
        return (location, options) == (PLACE, {})

    def refresh(self) -> None:
        self.looks += 1


@pytest.fixture
def kept() -> Kept:
    return Kept()


@pytest.fixture
def store(kept: Kept) -> Store:
    found = Store(MergeSpec(target=PLACE, keys=("id",), sequence_by=("lsn",), single_writer=True))
    found._handles[PLACE] = cast(Any, kept)
    return found


def test_tables_are_looked_at_before_they_are_asked_for(
    store: Store, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_stores, "storage_options", lambda _, __: {})
    store.look_at_all(SESSION)
    assert kept.looks == 1


def test_a_table_is_left_to_spark_while_hadoops_credential_store_cannot_be_read(
    store: Store, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while it is being written anew (`Configuration.getPassword` throws an IOException)."""

    def refuse(*_: object) -> None:
        msg = "An error occurred while calling o1.getPassword."
        raise Py4JJavaError(msg, cast(Any, SimpleNamespace(_target_id="o1")))

    by_spark = object()
    monkeypatch.setattr(object_stores, "storage_options", refuse)
    monkeypatch.setattr(spark_table, "find", lambda _, __: by_spark)

    store.look_at_all(SESSION)
    assert kept.looks == 0
    assert store.find(SESSION, PLACE) is by_spark


# -- whether a store respects what commits rely on ----------------------------------------------


class Bucket:
    """A bucket of tables that delta-rs may write by Spark's settings; what its store does is another matter."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, found: object) -> None:
        self.tried: list[str] = []
        self.refuses: Exception | None = None
        monkeypatch.setattr(object_stores, "excludes_delta_rs", lambda *_: True)
        monkeypatch.setattr(object_stores, "storage_options", lambda *_: {})
        monkeypatch.setattr(object_stores, "expect_condition", self._try)
        monkeypatch.setattr(reader, "open_table", lambda *_: found)
        monkeypatch.setattr(spark_table, "find", lambda *_: None)

    def _try(self, _: object, place: str) -> None:
        self.tried.append(place)
        if self.refuses is not None:
            raise self.refuses


def looks(engine: str) -> Store:
    return Store(MergeSpec(target=PLACE, keys=("id",), sequence_by=("lsn",), engine=cast(Any, engine)))


def test_nothing_is_tried_where_no_table_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would leave a folder, in which Delta makes no table; Spark's first commit there tries by itself."""
    bucket = Bucket(monkeypatch, None)

    assert looks("auto").find(SESSION, PLACE) is None
    assert bucket.tried == []


def test_a_table_in_a_bucket_that_cannot_be_tried_is_left_to_spark_and_a_person_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "stream_merge")
    bucket, store = Bucket(monkeypatch, object()), looks("auto")
    bucket.refuses = ConfigError("the log store is of another version")

    assert [store.native(SESSION, PLACE) for _ in range(2)] == [None, None]
    assert bucket.tried == [PLACE, PLACE]
    (told,) = caplog.records
    assert told.getMessage() == f'table_left_to_spark table={PLACE} error="the log store is of another version"'


def test_where_only_delta_rs_may_merge_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = Bucket(monkeypatch, object())
    bucket.refuses = ConfigError("the log store is of another version")

    with pytest.raises(ConfigError, match="the log store is of another version"):
        looks("driver").native(SESSION, PLACE)
