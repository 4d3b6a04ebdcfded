"""Whether an event can lie beyond what a table's statistics bound."""

from __future__ import annotations

from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StringType, StructField

from stream_merge.shapes import surely_changes
from stream_merge.shapes.key_bounds import key_bounds
from stream_merge.shapes.surely_changes import GreatestSequence


def test_what_is_beyond_a_bound():
    """Component by component from the left; only those that tell positions, and only as far as both are known."""
    stored = GreatestSequence(components=(1, 20, 3))

    assert GreatestSequence(components=(1, 21, 0)).is_beyond(stored, None)
    assert not GreatestSequence(components=(1, 20, 3)).is_beyond(stored, None)
    assert GreatestSequence(components=(1, 20, 4)).is_beyond(stored, None)
    assert not GreatestSequence(components=(1, 20, 4)).is_beyond(stored, 2)
    assert not GreatestSequence(components=(1, 20, 4)).is_beyond(GreatestSequence(components=(1, 20)), None)
    assert not GreatestSequence(components=(9,)).is_beyond(None, None)
    assert GreatestSequence(components=(1,)).is_beyond(GreatestSequence(components=(), is_empty=True), None)


@pytest.mark.parametrize(
    "greatest",
    [
        "b",
        "é",
        "aé",
        "a\U0010ffff",
        "a\U0010ffffb",
        "\U0010ffff\U0010ffff",
        "a\U0010ffffbéc",
        "a\ufffdb",
        "\U0010fffeb",
    ],
)
def test_a_bound_of_texts_is_beyond_all_statistics_of_files_that_may_hold_a_key(greatest: str):
    """Texts are ordered by UTF-8; in statistics each byte that is none has become U+FFFD, here of a smaller text."""
    field = StructField("k", StringType())
    (bound,) = key_bounds((field,), {"least_0": "a", "greatest_0": greatest, "legible_0": True}).columns
    exact = greatest.encode()
    smaller = [exact, *(exact[:at] + bytes([byte]) + b"\xff" for at in range(len(exact)) for byte in range(exact[at]))]

    assert [held for held in smaller if held.decode(errors="replace").encode() > str(bound.greatest).encode()] == []


def test_statistics_that_are_missing_bound_nothing():
    """One file without them may hold anything; a file of NULLs holds nothing that is newer."""
    layout = SimpleNamespace(sequence_columns=("lsn",), sequence_fields=(StructField("c1", LongType()),))

    def bound(greatest: list[int | None], nulls: list[int | None]) -> GreatestSequence | None:
        columns = {"max.lsn": greatest, "null_count.lsn": nulls, "num_records": [5] * len(greatest)}
        files = pa.table({name: pa.array(values, pa.int64()) for name, values in columns.items()})
        return surely_changes.stored(files, layout)

    assert bound([7, 9], [0, 0]) == GreatestSequence(components=(9,))
    assert bound([7, None], [0, 5]) == GreatestSequence(components=(7,))
    assert bound([7, None], [0, 4]) is None
    assert bound([7, None], [0, None]) is None
    assert bound([], []) == GreatestSequence(components=(), is_empty=True)
    assert surely_changes.stored(pa.table({"path": ["a"], "num_records": [1]}), layout) is None
