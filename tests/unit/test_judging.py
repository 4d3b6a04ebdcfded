"""Which tombstones refuse, which are overtaken, and which are obsolete, whichever engine brings the entries."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql.types import StructField, StructType

from stream_merge.model import names
from stream_merge.tables.side.late_events import Hits, judge, overtaking, paired, paired_rows, standing

SEQUENCE = pa.struct([pa.field("c1", pa.int32()), pa.field("c2", pa.struct([pa.field("a", pa.int64())]))])
TYPES = StructType([StructField("id", StructType()), StructField(names.SEQUENCE_COLUMN, StructType())])
"""Only their names count here."""


def sequence(rng: random.Random) -> dict[str, Any]:
    return {"c1": rng.choice([1, 2, None]), "c2": {"a": rng.choice([1, 2, None])}}


def events_of(rng: random.Random, count: int, deletes: float) -> pa.Table:
    return pa.table(
        {
            "id": pa.array(range(count)),
            names.SEQUENCE_COLUMN: pa.array([sequence(rng) for _ in range(count)], SEQUENCE),
            names.DELETE_COLUMN: pa.array([rng.random() < deletes for _ in range(count)]),
        }
    )


def entries_of(rng: random.Random, owners: list[int], sequences: list[dict[str, Any]]) -> pa.Table:
    return pa.table(
        {
            "id": pa.array(owners),
            names.SEQUENCE_COLUMN: pa.array(sequences, SEQUENCE),
            names.REVIVED_COLUMN: pa.array([rng.random() < 0.3 for _ in owners]),
        }
    )


def all_pairs(entries: pa.Table) -> pa.Table:
    """Of events whose row numbers are their keys."""
    return pa.table({"__stream_merge_row": pa.arange(0, entries.num_rows), "__stream_merge_event": entries["id"]})


def judged(entries: pa.Table, events: pa.Table, pairs: pa.Table) -> Hits:
    return judge(entries, events, pairs, version=7, types=TYPES)


def said(hits: Hits) -> tuple[Any, ...]:
    return list(hits.refused_rows), hits.refusing.to_pylist(), hits.overtaken.to_pylist()


@pytest.mark.parametrize("seed", range(40))
def test_a_delete_and_its_own_tombstone_are_left_out_without_a_difference(seed: int) -> None:
    """Few sequences, so that revivals and other deletes stand at the same one."""
    rng = random.Random(seed)
    events = events_of(rng, 30, deletes=0.6)
    owners = [rng.randrange(30) for _ in range(80)]
    theirs = events[names.SEQUENCE_COLUMN].to_pylist()
    entries = entries_of(rng, owners, [theirs[one] if rng.random() < 0.4 else sequence(rng) for one in owners])

    left = paired(entries, events, ["id"])

    assert left.num_rows < entries.num_rows
    assert said(judged(entries, events, left)) == said(judged(entries, events, all_pairs(entries)))


@pytest.mark.parametrize("seed", range(20))
def test_rows_that_hold_entry_and_event_are_judged_alike(seed: int) -> None:
    """As Spark joins them."""
    rng = random.Random(seed)
    events = events_of(rng, 20, deletes=0.3)
    entries = entries_of(rng, [rng.randrange(20) for _ in range(60)], [sequence(rng) for _ in range(60)])
    matched = events.take(entries["id"])

    one = judged(entries, events, all_pairs(entries))
    other = judged(entries, matched, paired_rows(entries, ["id"]))

    for name in ("refusing", "overtaken"):
        rows = (getattr(hits, name).sort_by("id").to_pylist() for hits in (one, other))
        assert len({repr(found) for found in rows}) == 1
    assert one.refused > 0
    assert one.revived > 0


@pytest.mark.parametrize("seed", range(20))
def test_what_stands_refuses_as_all_did(seed: int) -> None:
    """Whatever sequences keys and marks have, NULL among them; one entry of a key is left at most."""
    rng = random.Random(seed)
    entries = entries_of(rng, [rng.randrange(20) for _ in range(80)], [sequence(rng) for _ in range(80)])
    events = events_of(rng, 20, deletes=0.3)

    cleared = standing(entries, ["id"])

    assert cleared.num_rows == len(set(cleared["id"].to_pylist())) < entries.num_rows
    assert not any(cleared[names.REVIVED_COLUMN].to_pylist())
    before, after = (judged(one, events, all_pairs(one)) for one in (entries, cleared))
    assert said(before) == said(after) != ([], [], [])
    alone = overtaking(cleared, ["id"])
    assert alone.num_rows == 0
    assert {*cleared["id"].to_pylist()} | {*overtaking(entries, ["id"])["id"].to_pylist()} == {
        *entries["id"].to_pylist()
    }


def test_what_was_refused_before_is_not_late() -> None:
    rng = random.Random(1)
    events = events_of(rng, 20, deletes=0)
    entries = entries_of(rng, list(range(20)), [{"c1": 3, "c2": {"a": 1}}] * 20)
    seen = judged(entries.slice(0, 5), events, all_pairs(entries.slice(0, 5)))
    now = judged(entries, events, all_pairs(entries))

    late = now.beyond(seen)

    assert (now.refused - seen.refused, late.refused) == (late.refused, len(set(late.refusing["id"].to_pylist())))
    assert not pc.any(pc.is_in(late.refusing["id"], value_set=seen.refusing["id"].combine_chunks())).as_py()
    assert now.beyond(None) is now
    assert (seen + late).refused == now.refused
