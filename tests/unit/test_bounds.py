"""Whether an event can lie beyond what a table's statistics bound."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    DataType,
    DateType,
    DecimalType,
    LongType,
    StringType,
    StructField,
    TimestampNTZType,
    TimestampType,
)

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
    ("dtype", "ends", "bound"),
    [
        (StringType(), ("0b7c-4f", "fe31-9a"), ("0b7c-4f", "fe31-9a")),
        (StringType(), ("Zug", "Zürich"), ("Zug", "[")),
        (StringType(), ("a\ufffd", "a\ufffdb"), ("a", "b")),
        (StringType(), ("a", "a\x7f\U0010ffff"), ("a", "b")),
        (StringType(), ("a", "\x7fé"), None),
        (StringType(), ("a", "é"), None),
        (LongType(), (-(2**63), 2**63 - 1), (-(2**63), 2**63 - 1)),
        (DateType(), (-25_567, 2_932_895), (-25_567, 2_932_895)),
        (DateType(), (-25_568, 0), None),
        (DateType(), (0, 2_932_896), None),
        (
            TimestampType(),
            (-2_208_988_800_000_000, 253_402_214_399_999_999),
            (-(2_208_988_800 * 10**6), 253402214399999999),
        ),
        (TimestampType(), (-9_223_372_036_832_400_000, 0), None),
        (TimestampNTZType(), (0, 253_402_214_400_000_000), None),
        (DecimalType(20, 2), ("-1.50", "99.00"), ("-1.50", "99.00")),
    ],
)
def test_a_key_is_bounded_where_everybody_reads_the_bound_alike(
    dtype: DataType, ends: tuple[Any, Any], bound: tuple[Any, Any] | None
):
    """Text is rounded to ASCII; dates and times must lie between 1900-01-01 and 9999-12-30."""
    bounds = key_bounds((StructField("k", dtype),), dict(zip(("least_0", "greatest_0"), ends, strict=True)))

    assert [(one.least, one.greatest) for one in bounds.columns] == ([] if bound is None else [bound])


@pytest.mark.parametrize(
    "text", ["b", "aé", "a\U0010ffff", "a\U0010ffffb", "a\U0010ffffbéc", "a\ufffdb", "ab\x7f\ufffd"]
)
def test_bounds_of_texts_exclude_no_file_that_may_hold_a_key(text: str):
    """Texts are ordered by UTF-8; in statistics each byte that is none has become U+FFFD."""
    ends = {"least_0": text, "greatest_0": text}
    (bound,) = key_bounds((StructField("k", StringType()),), ends).columns
    exact = text.encode()
    others = [exact[:at] + bytes([byte]) + b"\xff" for at in range(len(exact)) for byte in range(256)] + [exact]
    statistics = {held: held.decode(errors="replace").encode() for held in others}

    assert [held for held in others if held <= exact and statistics[held] > str(bound.greatest).encode()] == []
    assert [held for held in others if held >= exact and statistics[held] < str(bound.least).encode()] == []


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
