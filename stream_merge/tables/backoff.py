"""Which errors are lost commits, and when the next attempt is made."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from enum import Enum
from typing import TypeVar

from tenacity import RetryCallState, Retrying, stop_after_attempt, stop_before_delay, wait_exponential, wait_random

from stream_merge.errors import CommitConflictError
from stream_merge.model.logs import tell
from stream_merge.model.results import CONFLICTS
from stream_merge.model.settings import RetryPolicy
from stream_merge.spark.errors import java_causes

log = logging.getLogger(__name__)

T = TypeVar("T")


class ConflictKind(Enum):
    """What a conflict class says about the commit that lost."""

    RETRY = "nothing was written; try again on a fresh table"
    PERHAPS_OURS = "a commit has the version, perhaps this very one, put again after a lost answer; look before trying"
    LOOK_UP_FIRST = "this batch's transaction is recorded by somebody, perhaps by this very commit; look before trying"


CONFLICT_KINDS: dict[str, ConflictKind] = {
    "ConcurrentWriteException": ConflictKind.PERHAPS_OURS,
    "ConcurrentAppendException": ConflictKind.RETRY,
    "ConcurrentDeleteReadException": ConflictKind.RETRY,
    "ConcurrentDeleteDeleteException": ConflictKind.RETRY,
    # Delta's check comes before that of transactions: a commit that changes the schema, put again after a lost answer,
    # conflicts with itself by these.
    "MetadataChangedException": ConflictKind.PERHAPS_OURS,
    "ProtocolChangedException": ConflictKind.PERHAPS_OURS,
    "ConcurrentTransactionException": ConflictKind.LOOK_UP_FIRST,
    "DeltaConcurrentModificationException": ConflictKind.RETRY,
}
"""Every class of `delta.exceptions` (4.4.0); a test fails when Delta adds one."""

_BY_CODE: dict[str, str] = {
    "DELTA_CONCURRENT_WRITE": "ConcurrentWriteException",
    "DELTA_CONCURRENT_APPEND": "ConcurrentAppendException",
    "DELTA_CONCURRENT_DELETE_READ": "ConcurrentDeleteReadException",
    "DELTA_CONCURRENT_DELETE_DELETE": "ConcurrentDeleteDeleteException",
    "DELTA_CONCURRENT_TRANSACTION": "ConcurrentTransactionException",
    "DELTA_METADATA_CHANGED": "MetadataChangedException",
    "DELTA_PROTOCOL_CHANGED": "ProtocolChangedException",
    # Raised before any file is written when another writer evolved the schema since the handle was built.
    "DELTA_SCHEMA_CHANGE_SINCE_ANALYSIS": "MetadataChangedException",
}
_CODE = re.compile(r"\[(DELTA_[A-Z_]+)[.\]]")


_NOTHING_WRITTEN = "nothing was written, restart the query"


def conflict_class(error: BaseException) -> str | None:
    """The class of the lost optimistic commit behind an error, or None.

    Python's conflict classes share no base class (delta-spark 4.4.0), and a wrapped cause arrives untyped, so class
    names and error codes are searched along the Python and Java causes.
    """
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in seen:
        seen.append(current)
        causes = [(type(current).__name__, str(current)), *java_causes(current)]
        known = filter(None, (_known_class(name.rsplit(".", 1)[-1], message) for name, message in causes))
        conflict = next(known, None)
        if conflict:
            return conflict
        current = current.__cause__
    return None


def _known_class(class_name: str, message: str) -> str | None:
    if class_name in CONFLICT_KINDS:
        return class_name
    code = _CODE.search(message.split("\n", 1)[0])
    return _BY_CODE.get(code.group(1)) if code else None


def run(
    attempt: Callable[[int], T],
    policy: RetryPolicy,
    *,
    sleep: Callable[[float], None] = time.sleep,
    on_conflict: Callable[[CommitConflictError], None] = lambda _: None,
) -> T:
    """Run an attempt, which gets its number from 1, until it does not lose or the policy is exhausted.

    The last conflict is raised with attempts and seconds; `on_conflict` gets each of them.
    """
    started = time.monotonic()
    lost = 0

    def counted(state: RetryCallState) -> bool:
        nonlocal lost
        error = state.outcome.exception() if state.outcome else None
        if not isinstance(error, CommitConflictError):
            return False
        lost += 1
        error.attempts = lost
        error.seconds = time.monotonic() - started
        on_conflict(error)
        return True

    retrying = Retrying(
        retry=counted,
        stop=stop_after_attempt(policy.attempts) | stop_before_delay(policy.budget_seconds),
        # Not wait_exponential_jitter: its maximum takes the jitter away from the longest waits.
        wait=wait_exponential(multiplier=policy.backoff_initial_seconds, max=policy.backoff_max_seconds)
        + wait_random(0, policy.backoff_jitter_seconds),
        sleep=sleep,
        before_sleep=_warn,
        reraise=True,
    )
    try:
        for number, each in enumerate(retrying, start=1):
            with each:
                return attempt(number)
    except CommitConflictError as err:
        err.add_note(f"gave up after {err.attempts} attempt(s) in {err.seconds:.1f} s")
        raise
    msg = "tenacity ended without an outcome"
    raise AssertionError(msg)


def commit(command: Callable[[], None], policy: RetryPolicy, *, target: str) -> None:
    """Run a command that commits to a table until it does not lose."""

    def attempt(_: int) -> None:
        try:
            command()
        except Exception as err:
            lost = conflict(err, target=target, batch_id=None)
            if lost is None:
                raise
            raise lost from err

    run(attempt, policy)


def conflict(
    error: BaseException, *, target: str, batch_id: int | None, remedy: str = _NOTHING_WRITTEN
) -> CommitConflictError | None:
    """Our error for a lost commit, or None for any other error."""
    lost = conflict_class(error)
    if lost is None:
        return None
    where = "" if batch_id is None else f" for batch {batch_id}"
    msg = (
        f"[COMMIT_CONFLICT] a commit to {target!r}{where} lost against another writer ({lost}); {remedy}, or raise"
        " attempts or budget of the retry policy"
    )
    return CommitConflictError(msg, conflict=lost, target=target, batch_id=batch_id)


def _warn(state: RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    if isinstance(error, CommitConflictError):
        wait = round(state.next_action.sleep, 3) if state.next_action else None
        facts = {"conflict": error.conflict, "attempt": error.attempts, "wait_seconds": wait}
        tell(log.warning, "commit_conflict", target=error.target, batch_id=error.batch_id, **facts)


assert set(CONFLICT_KINDS) == set(CONFLICTS), "results.CONFLICTS and CONFLICT_KINDS name the same classes"
