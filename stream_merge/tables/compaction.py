"""Which data files are worth writing again, within what a round of upkeep may take."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stream_merge.spark.data_files import DataFile

TARGET_BYTES = 128 << 20
"""Files are put together up to this size. Larger ones make each merge copy more rows (copy-on-write)."""
FEWEST_FILES = 4
"""Fewer small files of a partition are left for a later round."""
LEAST_DELETED_SHARE = 0.05
"""As Delta's own limit for a file (`optimize.maxDeletedRowsRatio`, 4.4): what deletion vectors have removed, of the
files that have some, has to be more for these to be written again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compaction:
    """The files that are due, as Delta's commands can be told of them."""

    smaller_than: int
    """Bytes: OPTIMIZE puts files below this together; 0: none."""
    files: int
    """How many those are."""
    bytes: int
    """How much there is to write again, in all."""
    purge: bool
    """Whether all files with removed rows are to be written without them (REORG … APPLY (PURGE))."""
    beyond: int = 0
    """Bytes of the least that would be worth it, where that is more than allowed and nothing else is due."""


def due(files: Sequence[DataFile], *, most_bytes: float, target_bytes: int = TARGET_BYTES) -> Compaction:
    """What is to be compacted.

    Small files are taken in ascending order as long as the next one is not larger than all before it together: a file
    grows with what is put into it, and a byte is written again only when its file has doubled.

    Args:
        files: of the table.
        most_bytes: how much may be written again.
        target_bytes: files of half of this size and more are left alone; 0: all are, but for removed rows.

    Cost: hundredths of a second for 20,000 files.
    """
    ends = sorted(set(_ends(files, target_bytes)))
    fitting = bisect_right(ends, most_bytes, key=lambda end: _bytes(_small(files, end)))
    smaller_than = ends[fitting - 1] if fitting else 0
    small = _small(files, smaller_than)
    taken = set(small)
    vectored = [file for file in files if file.deleted_share > 0 and file not in taken]
    removed = sum(file.deleted_share * file.bytes for file in vectored)
    is_worth_it = removed > LEAST_DELETED_SHARE * _bytes(vectored)
    purge = is_worth_it and _bytes(vectored) <= most_bytes - _bytes(small)
    beyond = 0
    if not small and not purge:
        least = [_bytes(_small(files, end)) for end in ends[:1]]  # a higher end takes these, too
        beyond = min([*least, *([_bytes(vectored)] if is_worth_it else [])], default=0)
    return Compaction(
        smaller_than=smaller_than,
        files=len(small),
        bytes=_bytes(small) + (_bytes(vectored) if purge else 0),
        purge=purge,
        beyond=beyond,
    )


def put_together(files: Sequence[DataFile], *, target_bytes: int = TARGET_BYTES) -> list[DataFile]:
    """The small files that are due where nothing limits what may be written again."""
    return _small(files, max(_ends(files, target_bytes), default=0))


def _bytes(files: Iterable[DataFile]) -> int:
    return sum(file.bytes for file in files)


def _ends(files: Iterable[DataFile], target_bytes: int) -> Iterable[int]:
    """For each partition, where the files end that are worth putting together."""
    by_partition: dict[str, list[int]] = defaultdict(list)
    for file in files:
        if 2 * file.bytes < target_bytes:
            by_partition[file.partition].append(file.bytes)
    for sizes in by_partition.values():
        sizes.sort()
        total = 0
        for count, size in enumerate(sizes, start=1):
            if count >= FEWEST_FILES and size > total:
                break
            total += size
            if count >= FEWEST_FILES and (count == len(sizes) or sizes[count] != size):
                yield size + 1


def _small(files: Sequence[DataFile], smaller_than: int) -> list[DataFile]:
    """The files that OPTIMIZE puts together under this limit: one that is alone in its partition it leaves."""
    small = [file for file in files if file.bytes < smaller_than]
    together = Counter(file.partition for file in small)
    return [file for file in small if together[file.partition] > 1]
