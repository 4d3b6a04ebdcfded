"""What `explain` advises: only where the figures ask for it, in one sentence with them."""

from __future__ import annotations

import datetime
import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from stream_merge.model.snapshot import CommitRecord
from stream_merge.tables import advice as advice_module
from stream_merge.tables.advice import KeySpread, MergedRows, TableFacts, advice
from stream_merge.tables.delta_rs.changed_keys import spread_of
from stream_merge.tables.explain import explain
from stream_merge.tables.facts import merged_rows

MB = 10**6
CALM = TableFacts(target="/data/orders", files=96, bytes=96 * 100 * MB, rows=96_000_000, small_files=0, keys=("id",))
COPYING = MergedRows(merges=5, changed=10_000, copied=4_120_000)


def test_a_table_whose_merges_cost_little_gets_no_advice():
    assert advice(CALM) == ()
    assert advice(replace(CALM, merged=MergedRows(merges=5, changed=10_000, copied=190_000))) == ()
    assert advice(replace(CALM, merged=MergedRows(merges=50, changed=100, copied=4_000_000))) == ()


def test_keys_of_a_narrow_range_in_files_of_all_kinds_ask_for_an_order():
    facts = replace(CALM, merged=COPYING, spreads=[KeySpread(key="id", files=96, rows=1_900_000)])

    assert advice(facts) == (
        "the newest 5 merges wrote 412 rows again for each row changed, and by their statistics 96 of 96 files may hold"
        " the keys of the newest one; ordered by 'id' they would lie in about 3 (rows between its least and its"
        " greatest key over rows per file, and one): ALTER TABLE delta.`/data/orders` CLUSTER BY (`id`) and OPTIMIZE"
        " delta.`/data/orders` FULL in a session with spark.databricks.delta.optimize.maxFileSize=134217728",
    )


@pytest.mark.parametrize("kind", [{"is_native": True}, {"is_partitioned": True}])
def test_clustering_is_not_advised_where_it_takes_something_away(kind: dict[str, bool]):
    facts = replace(CALM, merged=COPYING, spreads=[KeySpread(key="id", files=96, rows=1_900_000)], **kind)
    (sentence,) = advice(facts)
    assert "OPTIMIZE delta.`/data/orders` ZORDER BY (`id`) in a session" in sentence
    assert "CLUSTER BY" not in sentence


@pytest.mark.parametrize(
    "spread",
    [
        KeySpread(key="id", files=96, rows=95_000_000),  # keys of the whole table
        KeySpread(key="id", files=6, rows=2_000_000),  # three files less
        KeySpread(key="id", files=20, rows=11_000_000),  # not half of them
    ],
)
def test_an_order_that_would_not_help_is_not_advised(spread: KeySpread):
    assert advice(replace(CALM, merged=COPYING, spreads=[spread])) == ()


def test_of_several_keys_the_one_that_leaves_the_fewest_files_counts():
    spreads = [KeySpread(key="shop", files=96, rows=40_000_000), KeySpread(key="id", files=90, rows=900_000)]
    (sentence,) = advice(replace(CALM, merged=COPYING, spreads=spreads))
    assert "90 of 96 files" in sentence
    assert "ordered by 'id' they would lie in about 2" in sentence


def test_rows_that_spark_writes_again_ask_for_deletion_vectors():
    merged = replace(COPYING, by_spark=5, copied_by_spark=4_120_000)
    (sentence,) = advice(replace(CALM, merged=merged))
    assert sentence.startswith(
        "the newest 5 merges wrote 412 rows again for each row changed, 4,120,000 in all by Spark"
    )
    assert "SET TBLPROPERTIES ('delta.enableDeletionVectors' = 'true')" in sentence

    has_them = replace(CALM, merged=merged, properties={"delta.enableDeletionVectors": "true"})
    assert advice(has_them) == ()


def test_few_changed_rows_in_large_files_ask_for_smaller_ones():
    large = replace(
        CALM, files=10, bytes=10 * 512 * (1 << 20), merged=MergedRows(merges=5, changed=50, copied=4_000_000)
    )
    (sentence,) = advice(large)
    assert "10 in each, and files have 512 MiB on average; in files of 128 MiB it would be 4.0 x less" in sentence
    assert "spark.databricks.delta.optimize.maxFileSize=134217728" in sentence

    more_rows_than_files = replace(large, merged=replace(large.merged, changed=150))
    assert advice(more_rows_than_files) == ()


def test_many_small_files_of_each_merge_ask_for_optimized_writes():
    merged = MergedRows(merges=20, changed=20_000, by_spark=20, added_files=400, added_bytes=400 * 300_000)
    facts = replace(CALM, merged=merged)
    (sentence,) = advice(facts)
    assert sentence.startswith("20 merges by Spark added 400 files of 0.3 MB on average, 20 each;")
    assert "('delta.autoOptimize.optimizeWrite' = 'true')" in sentence

    assert advice(replace(facts, properties={"delta.autoOptimize.optimizeWrite": "true"})) == ()
    assert advice(replace(facts, merged=replace(merged, added_files=100))) == ()
    assert advice(replace(facts, merged=replace(merged, added_bytes=400 * 20 * MB))) == ()


def test_a_table_of_small_files_asks_for_upkeep():
    assert advice(replace(CALM, small_files=99)) == ()
    (sentence,) = advice(replace(CALM, files=412, small_files=400))
    assert sentence == (
        "400 of 412 files are smaller than 16 MB: stream-merge maintain /data/orders compacts them now, and"
        " maintenance=Maintenance() from time to time"
    )


@pytest.mark.parametrize("partitioned_by", [[], ["day"], ["day", "region"]])
@pytest.mark.parametrize(("files", "is_advised"), [(1, False), (3, False), (4, True)])
def test_upkeep_is_advised_where_it_would_find_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partitioned_by: list[str], files: int, *, is_advised: bool
):
    """It leaves three files of a partition as they are, however many partitions there are."""
    monkeypatch.setattr(advice_module, "MANY_SMALL_FILES", 2)
    days = [datetime.date(2026, 1, 1), datetime.date(2026, 1, 2), None]
    rows = pa.table({"id": range(6), "day": 2 * days, "region": 3 * ["north"] + 3 * ["south"]})
    for _ in range(files):
        write_deltalake(str(tmp_path / "table"), rows, partition_by=partitioned_by, mode="append")

    found = explain(str(tmp_path / "table"))
    assert found.files == files * (1, 3, 6)[len(partitioned_by)]
    assert [sentence.partition(" smaller")[0] for sentence in found.advice] == [
        f"{found.files} of {found.files} files are"
    ] * is_advised


@pytest.mark.parametrize(
    ("properties", "said", "statement"),
    [
        ({}, "90 of key 'id', so", "('delta.dataSkippingNumIndexedCols' = '-1')"),
        (
            {"delta.dataSkippingNumIndexedCols": "2"},
            "90 of key 'id' (delta.dataSkippingNumIndexedCols=2), so",
            "('delta.dataSkippingNumIndexedCols' = '-1')",
        ),
        (
            {"delta.dataSkippingStatsColumns": "name,at"},
            "90 of key 'id' (delta.dataSkippingStatsColumns='name,at'), so",
            "('delta.dataSkippingStatsColumns' = 'name,at, `id`')",
        ),
    ],
)
def test_keys_without_statistics_are_named(properties: dict[str, str], said: str, statement: str):
    """The columns that have statistics keep them: a list would be instead of the first columns, not beside them."""
    (sentence,) = advice(replace(CALM, without_statistics={"id": 90}, properties=properties))
    assert sentence.startswith(f"of 96 files some have no statistics, {said} a merge reads them whatever its keys are:")
    assert statement in sentence


def test_several_keys_without_statistics_are_one_statement():
    listed = {"delta.dataSkippingStatsColumns": "name"}
    (sentence,) = advice(replace(CALM, without_statistics={"id": 90, "a.b": 3}, properties=listed))
    assert "90 of key 'id' and 3 of key 'a.b'" in sentence
    assert "('delta.dataSkippingStatsColumns' = 'name, `id`, `a.b`')" in sentence


def commit(version: int, engine: str | None, **metrics: int) -> CommitRecord:
    ours = None if engine is None else json.dumps({"stream_merge": {"batch_id": version, "engine": engine}})
    return CommitRecord(version=version, timestamp_ms=None, user_metadata=ours, metrics=metrics)


def test_the_merges_of_sinks_that_changed_rows_are_summed_up():
    rows = {"numTargetRowsUpdated": 3, "numTargetRowsDeleted": 2, "numTargetRowsInserted": 1}
    files = {"numTargetFilesAdded": 4, "numTargetBytesAdded": 400}
    commits = [
        commit(4, "spark", **rows, **files, numTargetRowsCopied=60),
        commit(3, "driver", **rows, numTargetFilesAdded=9, numTargetRowsCopied=40),
        commit(2, None, **rows, numTargetRowsCopied=1_000),
        commit(1, "spark", numTargetRowsCopied=1_000),
    ]
    assert merged_rows(commits) == MergedRows(
        merges=2, changed=12, copied=100, by_spark=1, copied_by_spark=60, added_files=4, added_bytes=400
    )


def files_of(least: list[object], greatest: list[object], **types: pa.DataType) -> pa.Table:
    dtype = types.get("dtype")
    ends = {"min.k": pa.array(least, dtype), "max.k": pa.array(greatest, dtype)}
    return pa.table({**ends, "num_records": [100] * len(least)})


def test_rows_within_bounds_are_estimated_from_the_files_ends():
    """Keys of a file are taken to be spread evenly: half of the first file, all of the second, none of the third."""
    files = files_of([0, 10, 100], [10, 20, 200])
    assert spread_of(files, "k", pa.array([5, 20])) == (2, 150.0)

    day = datetime.date(2024, 1, 1)
    days = files_of([day, day], [day + datetime.timedelta(days=10)] * 2)
    assert spread_of(days, "k", pa.array([day, day + datetime.timedelta(days=1)])) == (2, pytest.approx(20))

    one_value = files_of([7], [7])
    assert spread_of(one_value, "k", pa.array([0, 9])) == (1, 100.0)


def test_what_cannot_be_measured_is_not_estimated():
    assert spread_of(files_of(["a"], ["b"]), "k", pa.array(["a", "b"])) is None
    assert spread_of(files_of([None, 0], [None, 1], dtype=pa.int64()), "k", pa.array([0, 1])) is None
    assert spread_of(files_of([0], [1]), "other", pa.array([0, 1])) is None


@pytest.mark.parametrize(
    "properties", [{"delta.dataSkippingNumIndexedCols": "-1"}, {"delta.dataSkippingStatsColumns": "name, `ID`"}]
)
def test_advice_that_was_followed_says_how_older_files_get_statistics(properties: dict[str, str]):
    """The statement again would change nothing; with a column named twice Delta refuses it."""
    (sentence,) = advice(replace(CALM, without_statistics={"id": 90}, properties=properties))
    assert "SET TBLPROPERTIES" not in sentence
    assert "these do once they are written again: ALTER TABLE" in sentence
    assert "CLUSTER BY (`id`) and OPTIMIZE" in sentence
