"""The demo's made-up stream is as disordered as promised, and its second opinion follows the contract."""

from __future__ import annotations

import json
import random

import pytest

from stream_merge.demo import oracle
from stream_merge.demo.events import Disorder, Event, History, cut, deliveries, share


def lines(*events: Event) -> list[str]:
    return [event.to_json() for event in events]


def upsert(key: int | None, lsn: int | None, status: str = "placed") -> Event:
    return Event(id=key, lsn=lsn, op="u", customer="Ada", status=status, total_cents=100)


def delete(key: int, lsn: int) -> Event:
    return Event(id=key, lsn=lsn, op="d")


@pytest.fixture(scope="module")
def delivered() -> list[Event]:
    return deliveries(seed=7, events=5_000, keys=1_000, after=History())


def test_as_many_events_are_delivered_as_were_asked_for(delivered: list[Event]) -> None:
    assert len(delivered) == 5_000


def test_the_same_seed_gives_the_same_events(delivered: list[Event]) -> None:
    again = deliveries(seed=7, events=5_000, keys=1_000, after=History())
    other = deliveries(seed=8, events=5_000, keys=1_000, after=History())

    assert again == delivered
    assert other != delivered


def test_a_stream_has_every_difficulty(delivered: list[Event]) -> None:
    found = Disorder.count(delivered)

    assert found.upserts > found.deletes > 400
    assert found.late > 300
    assert found.revenants > 50
    assert found.repeated > 100
    assert found.broken == 4


def test_broken_events_lack_key_sequence_or_both(delivered: list[Event]) -> None:
    lacking = {(event.id is None, event.lsn is None) for event in delivered if None in (event.id, event.lsn)}

    assert lacking == {(True, False), (False, True), (True, True)}


def test_two_different_events_never_tie(delivered: list[Event]) -> None:
    """Only exact copies share a sequence, so the outcome does not depend on how the stream is cut."""
    by_lsn: dict[int, set[Event]] = {}
    for event in delivered:
        if event.id is not None and event.lsn is not None:
            by_lsn.setdefault(event.lsn, set()).add(event)

    assert all(len(events) == 1 for events in by_lsn.values())


def test_a_second_run_goes_on_where_the_first_one_ended(delivered: list[Event]) -> None:
    """Its events are all newer, and a key that is alive is not created again."""
    before = History.replay(delivered)
    more = [
        event for event in deliveries(seed=7, events=500, keys=1_000, after=before) if None not in (event.id, event.lsn)
    ]
    in_order = sorted({event.lsn: event for event in more}.items())

    assert min(lsn for lsn, _ in in_order) == before.last_lsn + 1
    alive = set(before.alive)
    for _, event in in_order:
        assert event.id is not None
        assert (event.id in alive) == (event.op != "c")
        (alive.discard if event.op == "d" else alive.add)(event.id)


def test_the_smallest_stream_can_be_made() -> None:
    assert len(deliveries(seed=1, events=10, keys=1, after=History())) == 10


def test_pieces_hold_everything_in_order_and_none_is_empty(delivered: list[Event]) -> None:
    pieces = cut(delivered, 12)

    assert len(pieces) == 12
    assert delivered == [event for piece in pieces for event in piece]
    assert cut([1, 2], 5) == [[1], [2]]  # type: ignore[list-item,comparison-overlap]


def test_two_writers_get_all_events_and_meet_the_same_keys(delivered: list[Event]) -> None:
    first, second = share(7, delivered, 2)

    assert len(first) + len(second) == len(delivered)
    assert len({event.id for event in first} & {event.id for event in second}) > 500


def test_an_event_survives_its_line() -> None:
    event = upsert(1, 2, status="zurückgegeben")

    assert event == Event.from_json(event.to_json())
    assert json.loads(event.to_json())["status"] == "zurückgegeben"


def test_the_latest_event_of_a_key_is_expected_in_whatever_order_it_came() -> None:
    events = lines(upsert(1, 1, "placed"), upsert(1, 3, "paid"), upsert(1, 2, "packed"), upsert(1, 3, "paid"))

    for _ in range(5):
        random.shuffle(events)
        assert oracle.expected(events).rows == {1: (1, 3, "Ada", "paid", 100)}


def test_a_deleted_key_is_not_expected_unless_a_newer_upsert_revives_it() -> None:
    events = lines(delete(1, 5), upsert(1, 4), delete(2, 5), upsert(2, 6), upsert(2, 4), delete(3, 1))

    assert oracle.expected(events).rows == {2: (2, 6, "Ada", "placed", 100)}


def test_broken_events_are_expected_in_quarantine_with_all_their_reasons() -> None:
    expected = oracle.expected(lines(upsert(None, 1), upsert(1, None), upsert(None, None), upsert(1, 1)))

    assert expected.quarantined == {("null_key",): 1, ("null_sequence",): 1, ("null_key", "null_sequence"): 1}
    assert expected.received == 4
    assert list(expected.rows) == [1]


def test_every_kind_of_difference_is_told() -> None:
    expected = oracle.expected(lines(upsert(1, 1), upsert(2, 1), upsert(4, 1)))
    good, stray = (1, 1, "Ada", "placed", 100), (3, 1, "Ada", "placed", 100)
    wrong = (2, 1, "Ada", "PAID", 100)

    difference = oracle.compare(expected, [good, good, wrong, stray])

    assert difference.missing == ((4, 1, "Ada", "placed", 100),)
    assert (stray,) == difference.unexpected
    assert (((2, 1, "Ada", "placed", 100), wrong),) == difference.other
    assert difference.twice == (1,)
    assert not oracle.compare(expected, [good, (2, 1, "Ada", "placed", 100), (4, 1, "Ada", "placed", 100)])
