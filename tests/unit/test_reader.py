"""What a sink reads by delta-rs, and what it leaves to Spark. No Spark: its answers."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
from py4j.protocol import Py4JJavaError

from stream_merge.model.settings import MergeSpec
from stream_merge.spark import object_stores
from stream_merge.tables import spark_table
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
