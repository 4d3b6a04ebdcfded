"""What the contract says about batches of change events, in plain Python: one dict of rows, one of deletes.

Shares no code with the package: the two can only agree by meaning the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Event = Mapping[str, Any]
Stored = dict[str, Any]
Comparable = tuple[Any, ...]


def ordered(value: object) -> Comparable:
    """A form that Python compares as the contract does: NULL least, NaN greatest, map entries sorted by key."""
    if value is None:
        return (0,)
    if isinstance(value, float) and math.isnan(value):
        return (2,)
    if isinstance(value, dict):
        return (1, tuple(sorted((ordered(k), ordered(v)) for k, v in value.items())))
    if isinstance(value, list | tuple):
        return (1, tuple(ordered(item) for item in value))
    return (1, value)


@dataclass(frozen=True, kw_only=True)
class Account:
    """What has to become of the events of one batch."""

    received: int
    quarantined: int
    collapsed: int
    ties: int
    inserted: int
    updated: int
    deleted: int
    stale_or_unaffected: int
    stale_at_least: int
    """Events of absent keys that a remembered delete refuses: nothing else can refuse them."""
    stale_at_most: int
    """And those of present keys that are older than row and remembered delete: either may refuse them."""

    @property
    def changed(self) -> int:
        """Rows changed."""
        return self.inserted + self.updated + self.deleted


@dataclass(kw_only=True)
class Oracle:
    """The target and its remembered deletes, as the contract wants them after each batch."""

    keys: Sequence[str]
    stored: Sequence[str]
    """Stored columns, keys included, in the source's order."""
    sequence_of: Callable[[Event], tuple[Any, ...]]
    """Components of an event's sequence, compared left to right."""
    is_delete: Callable[[Event], bool]
    unknown: Sequence[str] = ()
    """Columns of the target that the source does not have."""
    rows: dict[Comparable, tuple[tuple[Any, ...] | None, Stored]] = field(default_factory=dict)
    """Key -> (sequence, row); a row from before the first batch has no sequence."""
    deletes: dict[Comparable, tuple[Any, ...]] = field(default_factory=dict)
    """Key -> greatest sequence of its deletes."""

    def adopt(self, row: Stored) -> None:
        """Take over a row that was there before the first batch."""
        self.rows[self._key(row)] = (None, row)

    def apply(self, events: Iterable[Event]) -> Account:
        """Merge one batch and tell what became of its events."""
        received = list(events)
        valid = [event for event in received if self._is_valid(event)]
        by_key: dict[Comparable, list[Event]] = {}
        for event in valid:
            by_key.setdefault(self._key(event), []).append(event)
        fates = [self._apply_one(key, max(group, key=self._rank)) for key, group in by_key.items()]
        kinds = {
            (self._key(event), self.sequence_of(event), self.is_delete(event), ordered(self._values(event)))
            for event in valid
        }
        moments = {(self._key(event), self.sequence_of(event)) for event in valid}
        return Account(
            received=len(received),
            quarantined=len(received) - len(valid),
            collapsed=len(valid) - len(by_key),
            ties=len(kinds) - len(moments),
            inserted=fates.count("inserted"),
            updated=fates.count("updated"),
            deleted=fates.count("deleted"),
            stale_or_unaffected=sum(fate in ("stale", "either", "unaffected") for fate in fates),
            stale_at_least=fates.count("stale"),
            stale_at_most=fates.count("stale") + fates.count("either"),
        )

    def table(self) -> dict[Comparable, Stored]:
        """The rows by key."""
        return {key: row for key, (_, row) in self.rows.items()}

    def _apply_one(self, key: Comparable, event: Event) -> str:
        sequence = self.sequence_of(event)
        remembered = self.deletes.get(key)
        refused = remembered is not None and remembered > sequence
        present = key in self.rows
        if self.is_delete(event):
            self.deletes[key] = sequence if remembered is None else max(remembered, sequence)
        if not present:
            if refused:
                return "stale"
            if self.is_delete(event):
                return "unaffected"
            self.rows[key] = (sequence, dict.fromkeys(self.unknown) | self._values(event))
            return "inserted"
        old_sequence, old = self.rows[key]
        newer = old_sequence is None or sequence > old_sequence
        if self.is_delete(event) and newer:
            del self.rows[key]
            return "deleted"
        differs = sequence == old_sequence and not _same(self._values(event), self._values(old))
        if not self.is_delete(event) and (newer or differs):
            self.rows[key] = (sequence, {**old, **self._values(event)})
            return "updated"
        return "either" if refused else "unaffected"

    def _rank(self, event: Event) -> Comparable:
        return (self.sequence_of(event), not self.is_delete(event), ordered(list(self._values(event).values())))

    def _is_valid(self, event: Event) -> bool:
        return all(event[key] is not None for key in self.keys) and None not in self.sequence_of(event)

    def _key(self, row: Mapping[str, Any]) -> Comparable:
        return tuple(row[key] for key in self.keys)

    def _values(self, row: Mapping[str, Any]) -> Stored:
        return {name: row[name] for name in self.stored}


def replayed_feed(changes: Iterable[tuple[int, str, Stored]], keys: Sequence[str]) -> dict[Comparable, Stored]:
    """Rebuild a table from its change feed, (version, change type, row), from version 0 on.

    Raises: AssertionError when a row leaves that was not there as it says, enters a place that is
        taken, or is replaced by its equal.
    """
    versions: dict[int, list[tuple[str, Stored]]] = {}
    for version, change, row in changes:
        versions.setdefault(version, []).append((change, row))
    table: dict[Comparable, Stored] = {}
    for version in sorted(versions):
        before = dict(table)
        for change, row in versions[version]:
            if change in ("delete", "update_preimage"):
                there = table.pop(tuple(row[key] for key in keys), None)
                assert _same(there, row), f"version {version}: {change} says {row!r}, but there was {there!r}"
        for change, row in versions[version]:
            key = tuple(row[name] for name in keys)
            if change in ("insert", "update_postimage"):
                assert key not in table, f"version {version}: {change} of {row!r} where {table[key]!r} is"
                assert (change == "update_postimage") == (key in before), f"version {version}: {change} of {row!r}"
                assert not _same(before.get(key), row), f"version {version}: {row!r} replaces its equal"
                table[key] = row
    return table


def _same(one: Stored | None, other: Stored | None) -> bool:
    return ordered(one) == ordered(other)
