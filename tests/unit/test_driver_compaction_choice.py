"""Which files the driver compacts, and when: by sizes and shares alone."""

from __future__ import annotations

from collections.abc import Sequence

from stream_merge.tables.files.compaction_choice import MOST_BYTES, SMALL_BYTES, TOGETHER, Stored, rounds

KIB, MIB = 1 << 10, 1 << 20


def own(number: int, size: int, *, deleted: int = 0, day: str | None = None) -> Stored:
    partition = () if day is None else (("day", day),)
    return Stored(path=f"{number}", bytes=size, rows=100, deleted=deleted, partition=partition, is_own=True)


def foreign(number: int, size: int, *, deleted: int = 0) -> Stored:
    return Stored(path=f"{number}", bytes=size, rows=100, deleted=deleted, is_own=False)


def due(files: list[Stored]) -> Sequence[Stored]:
    """The first round."""
    return next(iter(rounds(files)), ())


def paths(files: object) -> list[str]:
    return [file.path for file in files]  # type: ignore[attr-defined]


def test_nothing_is_due_before_there_are_enough_files_of_a_size():
    assert not due([])
    assert not due([own(i, 10 * KIB) for i in range(TOGETHER - 1)])
    assert paths(due([own(i, 10 * KIB) for i in range(TOGETHER)])) == [str(i) for i in range(TOGETHER)]


def test_files_of_another_size_are_left_alone():
    """Each byte is written again once per step in size, not once per batch."""
    small = [own(i, 10 * KIB) for i in range(TOGETHER)]
    large = [own(100 + i, 600 * KIB) for i in range(TOGETHER - 1)]

    assert paths(due([*large, *small])) == paths(small)
    assert not due([*large, *small[:-1]])


def test_files_of_others_keep_their_layout():
    assert not due([foreign(i, 10 * KIB) for i in range(2_000)])


def test_partitions_are_apart():
    monday = [own(i, 10 * KIB, day="mon") for i in range(TOGETHER - 1)]
    tuesday = [own(100 + i, 10 * KIB, day="tue") for i in range(TOGETHER)]

    assert paths(due([*monday, *tuesday])) == paths(tuesday)
    assert not due([*monday, *tuesday[1:]])


def test_a_round_reads_no_more_than_allowed():
    files = [own(i, 3 * MIB) for i in range(60)]

    picked = due(files)

    assert TOGETHER <= len(picked) < len(files)
    assert sum(file.bytes for file in picked) <= MOST_BYTES


def test_a_large_file_is_written_again_when_a_quarter_of_its_rows_is_gone():
    assert not due([foreign(1, 8 * MIB, deleted=24)])
    assert paths(due([foreign(1, 8 * MIB, deleted=25)])) == ["1"]
    assert paths(due([foreign(1, 8 * MIB, deleted=30), foreign(2, 8 * MIB, deleted=60)])) == ["2"]
    assert not due([foreign(1, MOST_BYTES + 1, deleted=90)])


def test_what_a_file_has_lost_has_to_be_worth_it():
    """Also a file of one's own that is no longer small without its rows counts among the small ones."""
    assert not due([foreign(1, 3 * MIB, deleted=30)])
    assert paths(due([foreign(1, 4 * MIB, deleted=30)])) == ["1"]
    halves = [own(i, 2 * SMALL_BYTES - 1, deleted=51) for i in range(TOGETHER)]
    assert paths(due(halves)) == paths(halves)


def test_rounds_to_come_hold_each_file_once_and_none_that_would_be_left_alone_then():
    small = [own(i, 10 * KIB) for i in range(TOGETHER)]
    larger = [own(100 + i, 3 * MIB) for i in range(60)]
    thin = [foreign(200, 8 * MIB, deleted=30), foreign(201, 8 * MIB, deleted=60)]

    planned = rounds([*thin, *larger, *small])

    assert paths(planned[0]) == paths(small)
    assert [paths(one) for one in planned[-2:]] == [["201"], ["200"]]
    assert sorted(path for one in planned[1:-2] for path in paths(one)) == sorted(
        paths(larger[:42]) + paths(larger[42:])
    )
    assert all(len(one) >= TOGETHER for one in planned[:-2])
    assert rounds([own(i, 3 * MIB) for i in range(TOGETHER * 3)])[1:] == []
