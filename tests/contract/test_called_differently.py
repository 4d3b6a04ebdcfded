"""A table has more names than one: its deletes are remembered for all of them, or a sink stops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from deliveries import ChangeStream, delete, ledger, upsert
from pyspark.sql import SparkSession

from stream_merge import ConfigError, MergeResult
from stream_merge.model.names import TOMBSTONE_TABLE_PREFIX, TOMBSTONES_PROPERTY
from stream_merge.model.table_ref import TableRef
from stream_merge.testing import table_version, target_rows

ROWS = "id bigint, lsn bigint, name string"
LATE = upsert(1, "older than its delete", lsn=3)


@pytest.fixture
def schema(spark: SparkSession, tmp_path: Path) -> Iterator[str]:
    spark.sql(f"CREATE SCHEMA named_here LOCATION '{(tmp_path / 'named_here').as_uri()}'")
    yield "named_here"
    spark.sql("DROP SCHEMA named_here CASCADE")


def merge(spark: SparkSession, target: str, folder: Path, *events: tuple[Any, ...]) -> MergeResult:
    """By a stream of its own, replayed."""
    return ChangeStream(spark, target, folder=folder, app_id=uuid4().hex).deliver(*events)


def external(spark: SparkSession, schema: str, path: Path) -> tuple[str, str]:
    """One table by its name and by its path."""
    spark.sql(f"CREATE TABLE {schema}.orders ({ROWS}) USING delta LOCATION '{path}'")
    return f"{schema}.orders", str(path)


def two_names(spark: SparkSession, schema: str, path: Path) -> tuple[str, str]:
    name, _ = external(spark, schema, path)
    spark.sql(f"CREATE TABLE {schema}.same USING delta LOCATION '{path}'")
    return name, f"{schema}.same"


def a_link(spark: SparkSession, schema: str, path: Path) -> tuple[str, str]:
    """To a folder elsewhere."""
    link = path.parent / "links" / path.name
    link.parent.mkdir()
    path.mkdir()
    link.symlink_to(path)
    return str(path), str(link)


@pytest.mark.parametrize("named", [external, two_names, a_link])
@pytest.mark.parametrize("swapped", [False, True], ids=["", "the other way round"])
def test_deletes_that_were_remembered_by_another_name_are_not_forgotten(
    spark: SparkSession,
    tmp_path: Path,
    schema: str,
    named: Callable[[SparkSession, str, Path], tuple[str, str]],
    swapped: bool,
):
    """Two logs would know half of the deletes each."""
    one, other = named(spark, schema, tmp_path / "orders")[:: -1 if swapped else 1]
    merge(spark, one, tmp_path, upsert(1, "one", lsn=1), upsert(2, "two", lsn=1))
    merge(spark, one, tmp_path, delete(1, lsn=5))

    with pytest.raises(ConfigError, match=r"\[TOMBSTONES_ELSEWHERE\] .* use the target's previous name"):
        merge(spark, other, tmp_path, LATE)

    assert target_rows(spark, str(tmp_path / "orders"), "id") == [(2,)]


def test_two_names_of_a_table_without_deletes_do_not_take_turns_in_its_properties(
    spark: SparkSession, tmp_path: Path, schema: str
):
    """Whoever remembers the first delete says where."""
    name, path = external(spark, schema, tmp_path / "orders")
    merge(spark, name, tmp_path, upsert(1, "one", lsn=1))
    before = table_version(spark, path)
    for lsn, called in enumerate((path, name, path, name), start=2):
        merge(spark, called, tmp_path, upsert(1, f"by {lsn}", lsn=lsn))
    assert table_version(spark, path) == before + 4

    merge(spark, path, tmp_path, delete(1, lsn=9))

    with pytest.raises(ConfigError, match="TOMBSTONES_ELSEWHERE"):
        merge(spark, name, tmp_path, LATE)
    assert ledger(merge(spark, path, tmp_path, LATE)) == {"received": 1, "stale": 1}


def test_a_renamed_table_is_told_where_its_deletes_are(spark: SparkSession, tmp_path: Path, schema: str):
    """Each way that the sentence names goes on without a ghost, or without the deletes where that is asked for."""
    merge(spark, f"{schema}.orders", tmp_path, upsert(1, "one", lsn=1), delete(1, lsn=5), upsert(2, "two", lsn=1))
    log = f"{schema}.{TOMBSTONE_TABLE_PREFIX}"
    spark.sql(f"ALTER TABLE {schema}.orders RENAME TO {schema}.sales")
    with pytest.raises(ConfigError, match=f"{TOMBSTONE_TABLE_PREFIX}orders`', not in"):
        merge(spark, f"{schema}.sales", tmp_path, LATE)

    spark.sql(f"ALTER TABLE {log}orders RENAME TO {log}sales")
    refused = merge(spark, f"{schema}.sales", tmp_path, LATE)
    spark.sql(f"ALTER TABLE {schema}.sales RENAME TO {schema}.orders")
    spark.sql(f"ALTER TABLE {schema}.orders UNSET TBLPROPERTIES ('{TOMBSTONES_PROPERTY}')")
    forgotten = merge(spark, f"{schema}.orders", tmp_path, LATE)

    assert (ledger(refused), ledger(forgotten)) == ({"received": 1, "stale": 1}, {"received": 1, "inserted": 1})


def test_a_folder_that_was_moved_with_its_deletes_has_them(spark: SparkSession, tmp_path: Path):
    before, after = tmp_path / "before" / "orders", tmp_path / "after" / "orders"
    merge(spark, str(before), before.parent, upsert(1, "one", lsn=1), delete(1, lsn=5))
    before.parent.rename(after.parent)

    assert ledger(merge(spark, str(after), after.parent, LATE)) == {"received": 1, "stale": 1}


def test_a_folder_that_was_moved_without_its_deletes_is_refused(spark: SparkSession, tmp_path: Path):
    before, after = tmp_path / "orders", tmp_path / "sales"
    merge(spark, str(before), tmp_path, upsert(1, "one", lsn=1), delete(1, lsn=5))
    before.rename(after)

    with pytest.raises(ConfigError, match=f"{TOMBSTONE_TABLE_PREFIX}orders', not in"):
        merge(spark, str(after), tmp_path, LATE)


def test_a_clone_has_none_of_the_deletes_of_its_source_and_leaves_them_alone(spark: SparkSession, tmp_path: Path):
    source, clone = str(tmp_path / "orders"), str(tmp_path / "clone")
    merge(spark, source, tmp_path, upsert(1, "one", lsn=1), delete(1, lsn=5), upsert(2, "two", lsn=1))
    spark.sql(f"CREATE TABLE {TableRef(clone).sql} SHALLOW CLONE {TableRef(source).sql}")

    of_clone = merge(spark, clone, tmp_path, LATE, delete(2, lsn=5))

    assert ledger(of_clone) == {"received": 2, "inserted": 1, "deleted": 1}
    assert ledger(merge(spark, clone, tmp_path, upsert(2, "late", lsn=3))) == {"received": 1, "stale": 1}
    assert ledger(merge(spark, source, tmp_path, LATE)) == {"received": 1, "stale": 1}


def test_a_table_that_an_older_version_has_filled_is_told_once(spark: SparkSession, tmp_table: str, tmp_path: Path):
    """With the first batch that has deletes."""
    merge(spark, tmp_table, tmp_path, upsert(1, "one", lsn=1), upsert(2, "two", lsn=1))
    merge(spark, tmp_table, tmp_path, delete(1, lsn=5))
    identifier = TableRef(tmp_table).sql
    spark.sql(f"ALTER TABLE {identifier} UNSET TBLPROPERTIES ('{TOMBSTONES_PROPERTY}')")

    before = table_version(spark, tmp_table)

    assert ledger(merge(spark, tmp_table, tmp_path, LATE)) == {"received": 1, "stale": 1}
    assert table_version(spark, tmp_table) == before
    assert ledger(merge(spark, tmp_table, tmp_path, delete(2, lsn=5))) == {"received": 1, "deleted": 1}
    (found,) = spark.sql(f"SHOW TBLPROPERTIES {identifier} ('{TOMBSTONES_PROPERTY}')").collect()
    assert found["value"] == "./" + Path(TableRef(tmp_table).tombstones).name
