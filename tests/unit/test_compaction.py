"""Which files a round of upkeep takes, and when it comes: arithmetic alone, without Spark."""

from __future__ import annotations

import random
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stream_merge import ConfigError, Maintenance
from stream_merge.microbatch import upkeep
from stream_merge.microbatch.upkeep import UpkeepPlan
from stream_merge.model.results import Upkeep
from stream_merge.model.settings import MergeSpec
from stream_merge.spark.data_files import DataFile
from stream_merge.spark.streaming import Trigger
from stream_merge.tables.compaction import due

KB, MB = 1 << 10, 1 << 20
PLENTY = 1e12


def files(*sizes: int, partition: str = "{}", deleted: float = 0.0) -> list[DataFile]:
    return [DataFile(partition, size, deleted, is_clustered=False) for size in sizes]


def test_small_files_are_put_together_and_large_ones_left_alone() -> None:
    found = due(files(*[10 * KB] * 6, 65 * MB, 300 * MB), most_bytes=PLENTY)
    assert (found.files, found.bytes, found.smaller_than) == (6, 60 * KB, 10 * KB + 1)


def test_a_file_is_written_again_when_its_size_doubles() -> None:
    """40 MB wait until there is as much beside them; few files wait for more."""
    assert due(files(40 * MB, *[MB] * 39), most_bytes=PLENTY).files == 39
    assert due(files(40 * MB, *[MB] * 40), most_bytes=PLENTY).files == 41
    assert due(files(MB, MB, MB), most_bytes=PLENTY).files == 0


def test_files_of_unequal_size_are_put_together() -> None:
    """As they are on any real table."""
    rng = random.Random(1)
    alike = files(*(rng.randrange(900 * KB, 1_100 * KB) for _ in range(200)))
    assert due(alike, most_bytes=PLENTY).files == 200
    assert due(files(*range(1_000, 1_500)), most_bytes=PLENTY).files == 500
    assert due(files(100, *[1_000] * 20), most_bytes=PLENTY).files == 21
    assert due(files(KB, 10 * KB, 100 * KB, MB, 10 * MB), most_bytes=PLENTY).files == 0


def test_files_of_other_partitions_are_not_put_together() -> None:
    apart = [DataFile(f'{{"day":"{day}"}}', KB, 0.0, is_clustered=False) for day in range(50)]
    assert due(apart, most_bytes=PLENTY).files == 0
    assert due([*apart, *files(*[KB] * 4, partition='{"day":"7"}')], most_bytes=PLENTY).files == 5


def test_what_is_picked_stays_within_the_budget() -> None:
    """The smallest files go first; where not even they fit, the least amount that would do is told."""
    sizes = [*[KB] * 10, *[100 * KB] * 10]
    assert due(files(*sizes), most_bytes=50 * KB).files == 10
    found = due(files(*[MB] * 20), most_bytes=10 * MB)
    assert (found.files, found.beyond) == (0, 20 * MB)


def test_files_with_many_removed_rows_are_written_again() -> None:
    """All that have some, as REORG does it: where what has been removed is worth it, and they fit the budget."""
    half, tenth, few, whole = (files(200 * MB, deleted=share)[0] for share in (0.5, 0.1, 0.04, 0.0))
    found = due([half, tenth, few, whole], most_bytes=PLENTY)
    assert (found.purge, found.bytes, found.files) == (True, 600 * MB, 0)
    found = due([half, tenth, few, whole], most_bytes=300 * MB)
    assert (found.purge, found.bytes, found.beyond) == (False, 0, 600 * MB)
    assert not due([few, whole], most_bytes=PLENTY).purge
    found = due([half, *files(*[KB] * 5, deleted=0.5)], most_bytes=PLENTY)
    assert (found.files, found.purge, found.bytes) == (5, True, 5 * KB + 200 * MB)


@pytest.mark.parametrize("most_bytes", [PLENTY, 0.0])
def test_what_is_due_is_found_without_comparing_each_file_with_all_others(
    most_bytes: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found outside of a round's budget, and all files may have removed rows."""
    rng = random.Random(1)
    table = [DataFile(f"p{n % 50}", rng.randrange(KB, 60 * MB), rng.random(), is_clustered=False) for n in range(2_000)]
    compared, equal = [0], DataFile.__eq__

    def counted(one: DataFile, other: object) -> bool:
        compared[0] += 1
        return equal(one, other)

    monkeypatch.setattr(DataFile, "__eq__", counted)

    found = due(table, most_bytes=most_bytes)

    assert compared[0] < len(table)
    assert (found.files > 1_900, found.beyond > 0) == (bool(most_bytes), not most_bytes)


@pytest.mark.parametrize("seed", range(50))
def test_random_tables_never_cost_more_than_allowed(seed: int) -> None:
    """By Delta's own rules: OPTIMIZE takes files below the limit in partitions that hold two of them."""
    rng = random.Random(seed)
    table = [
        DataFile(
            f"p{rng.randrange(3)}",
            int(2 ** rng.uniform(8, 28)),
            rng.choice([0.0, 0.0, rng.random()]),
            is_clustered=False,
        )
        for _ in range(rng.randrange(60))
    ]
    most = 2 ** rng.uniform(10, 31)
    found = due(table, most_bytes=most)

    small = [file for file in table if file.bytes < found.smaller_than]
    together = [file for file in small if sum(other.partition == file.partition for other in small) > 1]
    purged = [file for file in table if found.purge and file.deleted_share > 0 and file not in together]
    assert sum(file.bytes for file in [*together, *purged]) == found.bytes <= most
    assert len(together) == found.files
    assert not (found.bytes and found.beyond)
    assert found.beyond == 0 or found.beyond > most


def test_a_table_that_grows_by_small_files_is_written_a_logarithmic_number_of_times() -> None:
    table, written = [], 0
    for batch in range(1, 2_001):
        table += files(10 * KB)
        if batch % 20 == 0:
            found = due(table, most_bytes=PLENTY)
            taken = [file for file in table if file.bytes < found.smaller_than] if found.files else []
            if taken:
                table = [file for file in table if file not in taken] + files(sum(file.bytes for file in taken))
                written += found.bytes
    assert len(table) < 40
    assert written < 10 * 2_000 * 10 * KB


class Rounds:
    """Counts rounds in the place of a table's upkeep."""

    def __init__(self) -> None:
        self.count = 0

    def round(self, _: Any) -> Upkeep:
        self.count += 1
        return Upkeep(outcome="nothing")


SPEC = MergeSpec(target="shop.orders", keys=("id",), sequence_by=("lsn",))


def calls(
    monkeypatch: pytest.MonkeyPatch,
    *,
    every: int,
    pause: float,
    count: int,
    changed: bool = True,
    query_id: str | None = "q",
    other_work: float = 0.0,
) -> tuple[list[str | None], int]:
    """What became of upkeep in so many calls of a query, each in a trigger of one second and what else it does."""
    now = 1.0
    ended: list[Trigger] = []
    monkeypatch.setattr(upkeep, "time", SimpleNamespace(time=lambda: now))
    monkeypatch.setattr(upkeep, "ended_triggers", lambda _, query_id, *, most: ended[-most:])
    plan, rounds = UpkeepPlan(SPEC, Maintenance(every=every)), Rounds()
    monkeypatch.setattr(plan, "_table", rounds)
    found = []
    for _ in range(count):
        started, now = now, now + 1.0
        done = plan.round(cast(Any, None), changed=changed, query_id=query_id)
        found.append(None if done is None else done.outcome)
        now += other_work
        ended.append(Trigger(started=started, seconds=now - started))
        now += pause
    return found, rounds.count


def test_a_round_comes_after_so_many_calls_that_changed_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    assert calls(monkeypatch, every=3, pause=1.0, count=7) == ([None, None, "nothing", None, None, "nothing", None], 2)
    assert calls(monkeypatch, every=3, pause=1.0, count=7, changed=False) == ([None] * 7, 0)


def test_a_stream_that_is_behind_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triggers without pauses; calls outside of a query have nobody who waits for them."""
    assert calls(monkeypatch, every=6, pause=0.01, count=7) == ([None] * 5 + ["behind"] * 2, 0)
    assert calls(monkeypatch, every=6, pause=0.5, count=7) == ([None] * 5 + ["nothing", None], 1)
    assert calls(monkeypatch, every=6, pause=0.0, count=7, query_id=None) == ([None] * 5 + ["nothing", None], 1)


def test_what_a_trigger_does_beside_the_call_is_no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tables of `MergeSinks`, the decoding of records, Spark's own work."""
    assert calls(monkeypatch, every=6, pause=0.01, other_work=3.0, count=6) == ([None] * 5 + ["behind"], 0)
    assert calls(monkeypatch, every=6, pause=0.5, other_work=3.0, count=6) == ([None] * 5 + ["nothing"], 1)


def test_the_time_of_a_round_itself_does_not_make_a_stream_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """What came before the last round does not count: the next trigger has waited for it."""
    found, rounds = calls(monkeypatch, every=3, pause=0.01, count=9)
    assert (found, rounds) == ([None, None, "nothing"] * 2 + [None, None, "nothing"], 3)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"every": 0}, "every=0 must be a whole number of calls, 1 or more"),
        ({"every": 1.5}, "every=1.5 must be a whole number of calls"),
        ({"budget_seconds": 0}, "budget_seconds=0 must be a positive number of seconds"),
        ({"budget_seconds": float("inf")}, "budget_seconds=inf must be a positive number"),
        ({"vacuum_after": 7}, "vacuum_after=7 must be a timedelta, such as timedelta(days=7)"),
        ({"vacuum_after": timedelta(minutes=59), "force": True}, "vacuum_after=0:59:00 must be at least an hour"),
        ({"zorder_by": "id"}, "zorder_by='id' must be a tuple of column names"),
        ({"zorder_by": ("id",), "optimize": False}, "zorder_by is given, but optimize is off"),
        ({"optimize": False}, "nothing is left to do; remove maintenance"),
        ({"force": True}, "force is given without vacuum_after"),
    ],
)
def test_wrong_settings_are_one_sentence(wrong: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Maintenance(**wrong)
    assert problem in str(raised.value)
