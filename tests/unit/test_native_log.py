"""What a delete is not compared with one by one changes nothing of what tombstones do."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest

from stream_merge.model import names
from stream_merge.tables.tombstones.delta_rs import _judged, _without_their_own, standing

SEQUENCE = pa.struct([pa.field("c1", pa.int32()), pa.field("c2", pa.struct([pa.field("a", pa.int64())]))])


def sequence(rng: random.Random) -> dict[str, Any]:
    return {"c1": rng.choice([1, 2, None]), "c2": {"a": rng.choice([1, 2, None])}}


@pytest.mark.parametrize("seed", range(40))
def test_a_delete_and_its_own_tombstone_are_left_out_without_a_difference(seed):
    """Few sequences, so that revivals and other deletes stand at the same one."""
    rng = random.Random(seed)
    events = pa.table(
        {
            "id": pa.array(range(30)),
            names.SEQUENCE_COLUMN: pa.array([sequence(rng) for _ in range(30)], SEQUENCE),
            names.DELETE_COLUMN: pa.array([rng.random() < 0.6 for _ in range(30)]),
        }
    )
    count = 80
    owners = [rng.randrange(30) for _ in range(count)]
    told = events[names.SEQUENCE_COLUMN].to_pylist()
    sequences = [told[owner] if rng.random() < 0.4 else sequence(rng) for owner in owners]
    entries = pa.table(
        {
            "id": pa.array(owners),
            names.SEQUENCE_COLUMN: pa.array(sequences, SEQUENCE),
            names.REVIVED_COLUMN: pa.array([rng.random() < 0.3 for _ in range(count)]),
        }
    )
    pairs = pa.table({"__stream_merge_row": pa.array(range(count)), "__stream_merge_event": pa.array(owners)})

    left = _without_their_own(pairs, entries, events)

    assert left.num_rows < pairs.num_rows
    assert said(left, entries, events) == said(pairs, entries, events)


def said(pairs: pa.Table, entries: pa.Table, events: pa.Table) -> tuple[Any, ...]:
    hits = _judged(entries, events, pairs, 7)
    return hits.refused, hits.revived, list(hits.refused_rows), list(hits.refused_by), list(hits.revived_by)


@pytest.mark.parametrize("seed", range(20))
def test_what_stands_after_clearing_refuses_as_before(seed):
    """Whatever sequences keys and marks have, NULL among them; one entry of a key is left at most."""
    rng = random.Random(seed)
    count = 80
    entries = pa.table(
        {
            "id": pa.array([rng.randrange(20) for _ in range(count)]),
            names.SEQUENCE_COLUMN: pa.array([sequence(rng) for _ in range(count)], SEQUENCE),
            names.REVIVED_COLUMN: pa.array([rng.random() < 0.3 for _ in range(count)]),
        }
    )
    events = pa.table(
        {
            "id": pa.array(range(20)),
            names.SEQUENCE_COLUMN: pa.array([sequence(rng) for _ in range(20)], SEQUENCE),
            names.DELETE_COLUMN: pa.array([rng.random() < 0.3 for _ in range(20)]),
        }
    )

    cleared = standing(entries, ["id"])

    assert cleared.num_rows == len(set(cleared["id"].to_pylist())) < entries.num_rows
    assert not any(cleared[names.REVIVED_COLUMN].to_pylist())
    assert refused(cleared, events) == refused(entries, events) != []


def refused(entries: pa.Table, events: pa.Table) -> list[tuple[int, Any]]:
    """Events that are refused, and the sequences that refuse them."""
    owners = entries["id"].to_pylist()
    pairs = pa.table({"__stream_merge_row": pa.array(range(len(owners))), "__stream_merge_event": pa.array(owners)})
    hits = _judged(entries, events, pairs, 7)
    by = entries[names.SEQUENCE_COLUMN].take(pa.array(hits.refused_by, pa.int64())).to_pylist()
    return list(zip(hits.refused_rows, by, strict=True))
