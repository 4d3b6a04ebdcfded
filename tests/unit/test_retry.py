"""Which errors mean that another writer won, and how long the sink keeps trying."""

from __future__ import annotations

import logging
from collections.abc import Callable

import delta.exceptions
import pytest

from stream_merge import CommitConflictError, ConfigError, MergeFailedError, RetryPolicy
from stream_merge.model.results import CONFLICTS
from stream_merge.tables import backoff
from stream_merge.tables.backoff import CONFLICT_KINDS, ConflictKind, conflict, conflict_class

QUICK = RetryPolicy(backoff_initial_seconds=0.2, backoff_max_seconds=15.0, backoff_jitter_seconds=0.0)


class Clock:
    """Time that passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.waits: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.waits.append(round(seconds, 6))
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("time.monotonic", lambda: clock.now)
    return clock


def lost(conflict_name: str = "ConcurrentAppendException") -> CommitConflictError:
    return CommitConflictError("lost", conflict=conflict_name, target="shop.orders", batch_id=7)


def losing(times: int, *, seconds: float = 0.0, clock: Clock | None = None) -> Callable[[int], str]:
    def attempt(number: int) -> str:
        if clock is not None:
            clock.now += seconds
        if number <= times:
            raise lost()
        return f"won attempt {number}"

    return attempt


# -- the policy ---------------------------------------------------------------------------------


def test_the_policy_reports_every_wrong_number_at_once():
    with pytest.raises(ConfigError) as caught:
        RetryPolicy(
            attempts=0,
            budget_seconds=-1,
            backoff_initial_seconds=-2,
            backoff_max_seconds=-3,
            backoff_jitter_seconds=-4,
        )

    assert caught.value.problems == (
        "[INVALID_SETTING] attempts=0 must be a whole number, 1 or more",
        "[INVALID_SETTING] budget_seconds=-1 must be a finite number of seconds, 0 or more",
        "[INVALID_SETTING] backoff_initial_seconds=-2 must be a finite number of seconds, 0 or more",
        "[INVALID_SETTING] backoff_max_seconds=-3 must be a finite number of seconds, 0 or more",
        "[INVALID_SETTING] backoff_jitter_seconds=-4 must be a finite number of seconds, 0 or more",
    )


@pytest.mark.parametrize(
    "odd", [float("nan"), float("inf"), "3", None, True], ids=["nan", "infinite", "text", "none", "bool"]
)
@pytest.mark.parametrize("setting", ["attempts", "budget_seconds", "backoff_max_seconds"])
def test_the_policy_refuses_what_is_no_number(setting, odd):
    """A NaN budget compares as false with every delay and would retry without end."""
    with pytest.raises(ConfigError, match=f"{setting}=") as caught:
        RetryPolicy(**{setting: odd})

    assert len(caught.value.problems) == 1


def test_one_attempt_and_no_budget_are_allowed():
    policy = RetryPolicy(attempts=1, budget_seconds=0)

    assert (policy.attempts, policy.budget_seconds) == (1, 0)


# -- the table of verdicts ----------------------------------------------------------------------


def test_every_conflict_class_of_delta_has_a_verdict():
    """A Delta release that adds a conflict class must fail here, not in production."""
    assert set(CONFLICT_KINDS) == set(delta.exceptions.__all__)
    assert set(CONFLICTS) == set(delta.exceptions.__all__)


def test_only_a_recorded_transaction_is_looked_up_before_another_try():
    looked_up = [name for name, verdict in CONFLICT_KINDS.items() if verdict is ConflictKind.LOOK_UP_FIRST]

    assert looked_up == ["ConcurrentTransactionException"]


@pytest.mark.parametrize("name", delta.exceptions.__all__)
def test_python_classes_of_delta_are_recognised(name):
    error = getattr(delta.exceptions, name)("somebody was faster")

    assert conflict_class(error) == name


@pytest.mark.parametrize(
    ("message", "name"),
    [
        ("[DELTA_CONCURRENT_WRITE] A concurrent transaction has written", "ConcurrentWriteException"),
        ("[DELTA_CONCURRENT_APPEND] Files were added", "ConcurrentAppendException"),
        ("[DELTA_CONCURRENT_APPEND.WITH_PARTITION_HINT] Files were added", "ConcurrentAppendException"),
        ("[DELTA_CONCURRENT_DELETE_READ.WITHOUT_HINT] This read", "ConcurrentDeleteReadException"),
        ("[DELTA_CONCURRENT_DELETE_DELETE] This delete", "ConcurrentDeleteDeleteException"),
        ("[DELTA_CONCURRENT_TRANSACTION] There is a transaction", "ConcurrentTransactionException"),
        ("[DELTA_METADATA_CHANGED] The metadata", "MetadataChangedException"),
        ("[DELTA_PROTOCOL_CHANGED] The protocol", "ProtocolChangedException"),
        ("[DELTA_SCHEMA_CHANGE_SINCE_ANALYSIS] The schema", "MetadataChangedException"),
        ("[DELTA_MULTIPLE_SOURCE_ROW_MATCHING_TARGET_ROW_IN_MERGE] no", None),
        ("see [DELTA_CONCURRENT_APPENDIX] which is no code of Delta", None),
        ("plain failure\nsomewhere below: [DELTA_CONCURRENT_APPEND] quoted from a row", None),
    ],
)
def test_error_codes_are_recognised_in_the_first_line(message, name):
    """An error that arrives without its class still carries Delta's code; text further down may be data."""
    assert conflict_class(RuntimeError(message)) == name


# -- causes -------------------------------------------------------------------------------------


def test_a_conflict_that_python_wrapped_is_recognised():
    wrapped = RuntimeError("in a function of the job")
    wrapped.__cause__ = delta.exceptions.ConcurrentDeleteReadException("somebody compacted")

    assert conflict_class(wrapped) == "ConcurrentDeleteReadException"


def test_a_failure_while_a_conflict_was_handled_is_no_conflict():
    """`__context__` says what was going on, not why: an unrelated error must not be tried again."""
    unrelated = KeyError("a bug in a handler")
    unrelated.__context__ = delta.exceptions.ConcurrentAppendException("somebody was faster")

    assert conflict_class(unrelated) is None


def test_a_circle_of_causes_ends():
    one, two = RuntimeError("one"), RuntimeError("two")
    one.__cause__, two.__cause__ = two, one

    assert conflict_class(one) is None


def test_the_error_of_a_conflict_names_table_batch_class_and_remedy():
    error = conflict(
        delta.exceptions.ConcurrentAppendException("somebody was faster"), target="shop.orders", batch_id=3
    )

    assert error is not None
    assert (error.target, error.batch_id, error.conflict) == ("shop.orders", 3, "ConcurrentAppendException")
    assert str(error) == (
        "[COMMIT_CONFLICT] a commit to 'shop.orders' for batch 3 lost against another writer"
        " (ConcurrentAppendException); nothing was written, restart the query, or raise attempts or budget of the"
        " retry policy"
    )


# -- attempts, backoff, budget ------------------------------------------------------------------


def test_the_first_attempt_is_not_a_retry(clock):
    conflicts: list[CommitConflictError] = []

    won = backoff.run(losing(0), QUICK, sleep=clock.sleep, on_conflict=conflicts.append)

    assert won == "won attempt 1"
    assert (clock.waits, conflicts) == ([], [])


def test_backoff_doubles_from_the_first_wait(clock):
    won = backoff.run(losing(4), QUICK, sleep=clock.sleep)

    assert won == "won attempt 5"
    assert clock.waits == [0.2, 0.4, 0.8, 1.6]


def test_backoff_ends_at_its_longest_wait(clock):
    policy = RetryPolicy(attempts=8, backoff_initial_seconds=4.0, backoff_max_seconds=15.0, backoff_jitter_seconds=0.0)

    backoff.run(losing(5), policy, sleep=clock.sleep)

    assert clock.waits == [4.0, 8.0, 15.0, 15.0, 15.0]


def test_jitter_is_added_to_the_wait(clock):
    """Two writers that lost to each other must not meet again."""
    policy = RetryPolicy(attempts=40, budget_seconds=1e6, backoff_initial_seconds=1.0, backoff_max_seconds=1.0)

    backoff.run(losing(39), policy, sleep=clock.sleep)

    assert all(1.0 <= wait <= 2.0 for wait in clock.waits)
    assert len(set(clock.waits)) > 30


def test_exhausted_attempts_raise_the_last_conflict_with_what_was_spent(clock):
    policy = RetryPolicy(attempts=3, backoff_initial_seconds=0.5, backoff_jitter_seconds=0.0)
    raised: list[CommitConflictError] = []

    def attempt(number: int) -> str:
        clock.now += 10
        raised.append(lost("ConcurrentAppendException" if number < 3 else "MetadataChangedException"))
        raise raised[-1]

    with pytest.raises(CommitConflictError) as caught:
        backoff.run(attempt, policy, sleep=clock.sleep)

    assert caught.value is raised[2]
    assert (caught.value.attempts, caught.value.seconds) == (3, 31.5)
    assert caught.value.conflict == "MetadataChangedException"
    assert caught.value.__notes__ == ["gave up after 3 attempt(s) in 31.5 s"]
    assert clock.waits == [0.5, 1.0]


def test_no_attempt_starts_after_the_budget(clock):
    """The budget is checked with the wait included: attempts of 10 s start at 0, 12 and 26, never at 44 of 40."""
    policy = RetryPolicy(
        attempts=100, budget_seconds=40, backoff_initial_seconds=2, backoff_max_seconds=64, backoff_jitter_seconds=0
    )
    starts: list[float] = []

    def attempt(_: int) -> str:
        starts.append(clock.now - 1000)
        clock.now += 10
        raise lost()

    with pytest.raises(CommitConflictError) as caught:
        backoff.run(attempt, policy, sleep=clock.sleep)

    assert starts == [0, 12, 26]
    assert (caught.value.attempts, caught.value.seconds) == (3, 36.0)


@pytest.mark.parametrize("policy", [RetryPolicy(attempts=1), RetryPolicy(budget_seconds=0)])
def test_without_attempts_or_budget_left_the_first_conflict_is_the_last(clock, policy):
    with pytest.raises(CommitConflictError) as caught:
        backoff.run(losing(9), policy, sleep=clock.sleep)

    assert caught.value.attempts == 1
    assert clock.waits == []


def test_every_lost_attempt_is_told_once_the_last_one_included(clock):
    told: list[int] = []

    def tell(error: CommitConflictError) -> None:
        told.append(error.attempts)

    with pytest.raises(CommitConflictError):
        backoff.run(losing(9), RetryPolicy(attempts=3), sleep=clock.sleep, on_conflict=tell)

    assert told == [1, 2, 3]


def test_any_other_error_ends_it_at_once(clock):
    failure = MergeFailedError("division by zero", target="shop.orders", batch_id=7)

    def attempt(_: int) -> str:
        raise failure

    with pytest.raises(MergeFailedError) as caught:
        backoff.run(attempt, QUICK, sleep=clock.sleep)

    assert caught.value is failure
    assert clock.waits == []
    assert not hasattr(failure, "__notes__")


def test_one_warning_is_logged_per_retry(clock, caplog):
    with caplog.at_level(logging.WARNING, logger="stream_merge.tables.backoff"):
        backoff.run(losing(2), QUICK, sleep=clock.sleep)

    records = [record for record in caplog.records if record.event == "commit_conflict"]
    assert [(r.target, r.batch_id, r.conflict, r.attempt, r.wait_seconds) for r in records] == [
        ("shop.orders", 7, "ConcurrentAppendException", 1, 0.2),
        ("shop.orders", 7, "ConcurrentAppendException", 2, 0.4),
    ]
