"""The expected table, computed without the sink's code.

Of a key's valid events the one with the greatest sequence counts; the row exists unless that event is a delete.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Row = tuple[Any, ...]

STORED = ("id", "lsn", "customer", "status", "total_cents")
"""Columns of the table, in the order of `Row`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """The state after every event was merged, in any order and any number of times."""

    rows: Mapping[int, Row]
    """By key."""
    received: int
    """Events in the files, with broken ones and duplicates."""
    quarantined: Mapping[tuple[str, ...], int]
    """Events by their sorted reasons."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Differences between a table and the expected state."""

    missing: tuple[Row, ...] = ()
    unexpected: tuple[Row, ...] = ()
    other: tuple[tuple[Row, Row], ...] = ()
    """Expected and actual row of a key."""
    twice: tuple[int, ...] = ()
    """Keys with several rows."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.other or self.twice)


def expected(lines: Iterable[str]) -> Expected:
    """The state that change events lead to, given as lines of JSON in any order."""
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


def compare(wanted: Expected, rows: Iterable[Row]) -> Difference:
    """The differences between the table's rows and the expected ones."""
    table: dict[int, Row] = {}
    twice: list[int] = []
    for row in rows:
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
