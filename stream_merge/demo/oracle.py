"""What the table must look like: a second opinion that shares no code with the sink.

It reads the change files with nothing but Python and needs only one sentence: of the valid events of
a key the one with the greatest sequence counts, and the row is there unless that event is a delete.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Row = tuple[Any, ...]

STORED = ("id", "lsn", "customer", "status", "total_cents")
"""Columns of the table, the order of every row here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """What must be there once every event has been merged, in whatever order and however often."""

    rows: Mapping[int, Row]
    """Key to row."""
    received: int
    """Events in the files, broken ones and duplicates included."""
    quarantined: Mapping[tuple[str, ...], int]
    """Sorted reasons to number of events."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """How a table differs from what is expected."""

    missing: tuple[Row, ...] = ()
    unexpected: tuple[Row, ...] = ()
    other: tuple[tuple[Row, Row], ...] = ()
    """Expected and found row of the same key."""
    twice: tuple[int, ...] = field(default=())
    """Keys that the table holds more than once."""

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self.missing or self.unexpected or self.other or self.twice)


def expected(lines: Iterable[str]) -> Expected:
    """Fold change events, given as lines of JSON in any order, into the table they lead to."""
    newest: dict[int, dict[str, Any]] = {}
    reasons: Counter[tuple[str, ...]] = Counter()
    received = 0
    for line in lines:
        event = json.loads(line)
        received += 1
        lacking = tuple(
            reason for reason, name in (("null_key", "id"), ("null_sequence", "lsn")) if event.get(name) is None
        )
        if lacking:
            reasons[lacking] += 1
        elif event["id"] not in newest or event["lsn"] > newest[event["id"]]["lsn"]:
            newest[event["id"]] = event
    rows = {key: tuple(event[name] for name in STORED) for key, event in newest.items() if event["op"] != "d"}
    return Expected(rows=rows, received=received, quarantined=reasons)


def compare(wanted: Expected, found: Iterable[Row]) -> Difference:
    """Hold the table's rows, in the order of `STORED`, against the expected ones."""
    table: dict[int, Row] = {}
    twice: list[int] = []
    for row in found:
        if row[0] in table:
            twice.append(row[0])
        table[row[0]] = row
    return Difference(
        missing=tuple(row for key, row in sorted(wanted.rows.items()) if key not in table),
        unexpected=tuple(row for key, row in sorted(table.items()) if key not in wanted.rows),
        other=tuple(
            (row, table[key]) for key, row in sorted(wanted.rows.items()) if key in table and table[key] != row
        ),
        twice=tuple(sorted(set(twice))),
    )
