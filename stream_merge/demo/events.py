"""Generated change events of an order table, delivered late, twice, out of order and broken.

Each change has its own log sequence number (`lsn`), so two different events never tie, and the final table does not
depend on how the stream is cut into micro-batches.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Literal

Op = Literal["c", "u", "d"]

SCHEMA = "id BIGINT, lsn BIGINT, op STRING, customer STRING, status STRING, total_cents BIGINT"
"""The fields of an event, as Spark DDL."""

_DUPLICATED = 0.03
"""Share of events that are delivered twice."""
_LATE = 0.05
"""Share of events that come several micro-batches too late."""
_OVERTAKEN = 0.3
"""Share of deletes that are delivered before the upsert which they delete."""
_JITTER = 20
"""Typical displacement, in events, of everything that is not late."""
_BROKEN = 0.0005
"""Share of events without key, without sequence, or without both."""
_FEWEST_BROKEN = 4

_ODDS = (35, 5, 12, 48)
"""Odds of a new order, a deleted one that comes back, a delete, and an update."""

_CUSTOMERS = ("Ada", "Björn", "Chidi", "Dolores", "Emeka", "Fatima", "Grace", "Hiroshi", "Ines", "João", "Kwame", "Li")
_STATUSES = ("placed", "paid", "packed", "shipped", "delivered", "returned")


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """A change of an order; a delete has only its key."""

    id: int | None
    """Key; None in a broken event."""
    lsn: int | None
    """Sequence; None in a broken event."""
    op: Op
    customer: str | None = None
    status: str | None = None
    total_cents: int | None = None

    def to_json(self) -> str:
        """The event as a line of a change file."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, line: str) -> Event:
        """The event of a line that `to_json` wrote."""
        return cls(**json.loads(line))


@dataclass(kw_only=True, slots=True)
class History:
    """State of the source table: live keys, deleted keys, end of its log."""

    alive: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)
    last_lsn: int = 0

    @classmethod
    def replay(cls, delivered: Iterable[Event]) -> History:
        """The history that led to these events, in any order."""
        newest: dict[int, tuple[int, Op]] = {}
        for event in delivered:
            if event.id is not None and event.lsn is not None:
                newest[event.id] = max(newest.get(event.id, (0, event.op)), (event.lsn, event.op))
        return cls(
            alive={key for key, (_, op) in newest.items() if op != "d"},
            dead={key for key, (_, op) in newest.items() if op == "d"},
            last_lsn=max((lsn for lsn, _ in newest.values()), default=0),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Disorder:
    """Counts of difficult events, in the order of delivery."""

    upserts: int = 0
    deletes: int = 0
    late: int = 0
    """Delivered after a newer event of their key."""
    revenants: int = 0
    """Late upserts of a key that was deleted before."""
    repeated: int = 0
    """Copies of events delivered before."""
    broken: int = 0

    @classmethod
    def count(cls, delivered: Iterable[Event]) -> Disorder:
        """The counts of these events."""
        counts: Counter[str] = Counter()
        newest: dict[int, tuple[int, Op]] = {}
        seen: set[int] = set()
        for event in delivered:
            if event.id is None or event.lsn is None:
                counts["broken"] += 1
                continue
            counts["deletes" if event.op == "d" else "upserts"] += 1
            known_lsn, known_op = newest.get(event.id, (0, event.op))
            counts["repeated"] += event.lsn in seen
            if event.lsn < known_lsn and event.lsn not in seen:
                counts["late"] += 1
                counts["revenants"] += known_op == "d" and event.op != "d"
            newest[event.id] = max((known_lsn, known_op), (event.lsn, event.op))
            seen.add(event.lsn)
        return cls(**counts)


def deliveries(*, seed: int, events: int, keys: int, after: History) -> list[Event]:
    """The next events after a history, with duplicates and broken ones, in the order of delivery.

    The same seed and history give the same events.
    """
    rng = random.Random(f"{seed}/{after.last_lsn}")
    broken = max(_FEWEST_BROKEN, round(events * _BROKEN))
    twice = round(events * _DUPLICATED)
    changes = list(_changes(rng, events - broken - twice, keys, after))
    due = _disorder(rng, changes)
    repeated = [(due_at + rng.uniform(0, len(changes) / 4), change) for due_at, change in rng.sample(due, twice)]
    spoilt = [(due_at, _spoilt(change, kind)) for kind, (due_at, change) in enumerate(rng.sample(due, broken))]
    return [event for _, event in sorted([*due, *repeated, *spoilt], key=lambda pair: pair[0])]


def cut(events: Sequence[Event], pieces: int) -> list[list[Event]]:
    """At most `pieces` consecutive slices of nearly equal size, none empty."""
    size, longer = divmod(len(events), pieces)
    rest = iter(events)
    sizes = (size + (piece < longer) for piece in range(pieces))
    return [piece for piece in ([*islice(rest, length)] for length in sizes) if piece]


def share(seed: int, events: Sequence[Event], writers: int) -> list[list[Event]]:
    """The events of each writer, dealt at random: every writer gets every key."""
    rng = random.Random(f"share/{seed}")
    hands: list[list[Event]] = [[] for _ in range(writers)]
    for event in events:
        rng.choice(hands).append(event)
    return hands


def _changes(rng: random.Random, count: int, keys: int, after: History) -> Iterable[Event]:
    alive, dead = sorted(after.alive), sorted(after.dead)
    unused = [key for key in range(1, keys + 1) if key not in after.alive and key not in after.dead]
    rng.shuffle(unused)
    for lsn in range(after.last_lsn + 1, after.last_lsn + count + 1):
        happens = rng.choices(("new", "revived", "deleted", "changed"), _ODDS)[0]
        if unused and (happens == "new" or not (alive or dead)):
            alive.append(unused.pop())
            yield _upsert(rng, alive[-1], lsn, "c")
        elif dead and (happens == "revived" or not alive):
            alive.append(_take(rng, dead))
            yield _upsert(rng, alive[-1], lsn, "c")
        elif happens == "deleted":
            dead.append(_take(rng, alive))
            yield Event(id=dead[-1], lsn=lsn, op="d")
        else:
            yield _upsert(rng, rng.choice(alive), lsn, "u")


def _disorder(rng: random.Random, changes: Sequence[Event]) -> list[tuple[float, Event]]:
    """Each change with its time of delivery, in units of one change."""
    due = [place + rng.gauss(0, _JITTER) for place in range(len(changes))]
    newest: dict[int | None, int] = {}
    for place, change in enumerate(changes):
        if change.op == "d" and change.id in newest and rng.random() < _OVERTAKEN:
            due[newest[change.id]] = due[place] + rng.uniform(1, len(changes) / 3)
        elif rng.random() < _LATE:
            due[place] += rng.uniform(len(changes) / 20, len(changes) / 3)
        newest[change.id] = place
    return list(zip(due, changes, strict=True))


def _upsert(rng: random.Random, key: int, lsn: int, op: Op) -> Event:
    return Event(
        id=key,
        lsn=lsn,
        op=op,
        customer=rng.choice(_CUSTOMERS),
        status=rng.choice(_STATUSES),
        total_cents=rng.randrange(100, 100_000),
    )


def _spoilt(event: Event, kind: int) -> Event:
    """The event without key, without sequence, or without both."""
    loses_key, loses_sequence = ((True, False), (False, True), (True, True))[kind % 3]
    return replace(event, id=None if loses_key else event.id, lsn=None if loses_sequence else event.lsn)


def _take(rng: random.Random, keys: list[int]) -> int:
    """Remove a key at random; the order of the list does not matter."""
    place = rng.randrange(len(keys))
    keys[place], keys[-1] = keys[-1], keys[place]
    return keys.pop()
