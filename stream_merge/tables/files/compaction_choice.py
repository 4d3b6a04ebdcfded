"""Which files of the driver's merges are worth rewriting: many small ones, and ones that lost many rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

TOGETHER = 8
"""So many files of about one size become one: each byte is written again once for every step in size."""
SMALL_BYTES = 4 << 20
"""Files from this size on are left to a sink's `Maintenance`, unless they have lost rows."""
_FIRST_STEP = 64 << 10
MOST_DELETED_SHARE = 0.25
"""A file of whose rows more are gone is written again: whoever reads it reads these, too."""
_LEAST_DELETED_BYTES = 1 << 20
MOST_BYTES = 64 << 20
"""What one round may read, of compressed files: about a second, on 2 cores."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """A live file."""

    path: str
    """Decoded."""
    bytes: int
    rows: int
    """Deleted ones included."""
    deleted: int
    partition: tuple[tuple[str, Any], ...] = ()
    is_own: bool
    """Whether merge-on-read has written it. How others have laid out their rows is theirs: ordered by key, say."""

    @property
    def deleted_share(self) -> float:
        """Share of deleted rows."""
        return self.deleted / self.rows if self.rows else 0.0

    @property
    def live_bytes(self) -> float:
        """Bytes without the deleted rows."""
        return self.bytes * (1 - self.deleted_share)


def rounds(files: Iterable[Stored]) -> Sequence[Sequence[Stored]]:
    """The files that are worth rewriting, by rounds: those of a round become one file.

    Small files first: each merge has to read them.
    """
    small: dict[tuple[Any, ...], list[Stored]] = defaultdict(list)
    thin: list[Stored] = []
    for file in files:
        if file.bytes > MOST_BYTES:
            continue
        if file.is_own and file.live_bytes < SMALL_BYTES:
            small[(_step(file), *file.partition)].append(file)
        elif file.deleted_share >= MOST_DELETED_SHARE and file.bytes - file.live_bytes >= _LEAST_DELETED_BYTES:
            thin.append(file)
    many = [group for group in small.values() if len(group) >= TOGETHER]
    together = [part for group in sorted(many, key=lambda group: _step(group[0])) for part in _fitting(group)]
    thinnest_first = sorted(thin, key=lambda file: (file.deleted_share, file.path), reverse=True)
    return [*together, *([file] for file in thinnest_first)]


def _step(file: Stored) -> int:
    step, limit = 0, float(_FIRST_STEP)
    while file.live_bytes >= limit:
        step, limit = step + 1, limit * TOGETHER
    return step


def _fitting(files: Sequence[Stored]) -> Iterator[Sequence[Stored]]:
    """Parts of what a round may read."""
    part: list[Stored] = []
    total, is_first = 0, True
    for file in sorted(files, key=lambda file: (file.bytes, file.path)):
        if part and total + file.bytes > MOST_BYTES:
            yield part
            part, total, is_first = [], 0, False
        part.append(file)
        total += file.bytes
    if is_first or len(part) >= TOGETHER:
        yield part
