"""Errors that leave the sink, and who has to act on each.

    StreamMergeError
    ├── ConfigError (ValueError)    the configuration is wrong: a person changes it
    │   └── HeldError               another process uses the table or the checkpoint: run again when it has ended
    ├── ContractError               the data breaks the contract and on_invalid="fail": a person checks the data
    ├── CommitConflictError         other writers won every attempt: restart the query
    ├── CommitStateUnknownError     the commit may have landed: check before running again
    ├── RoutedMergeError            some tables of a `MergeSinks` failed: see the error of each
    └── MergeFailedError            the merge failed, and another attempt would not help

The caller's micro-batch is then not known to be applied, so a streaming query must fail and let Spark deliver it again.
A message begins with a stable code in brackets, `[TARGET_REPLACED] …`. The troubleshooting page has a section per code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_CODE = re.compile(r"\[([A-Z][A-Z0-9_]+)\] ")


def located(where: str, problem: str) -> str:
    """The problem with its location, which follows the code."""
    code = _CODE.match(problem)
    return f"{where}: {problem}" if code is None else f"{code[0]}{where}: {problem[code.end() :]}"


class StreamMergeError(Exception):
    """Base of every error that the sink raises on purpose.

    Attributes:
        target: the table that the error is about, the sink's target or a side table; None if it is about no table.
        batch_id: the micro-batch, or None outside a batch.
    """

    def __init__(self, message: str, *, target: str | None = None, batch_id: int | None = None) -> None:
        super().__init__(message)
        self.target = target
        self.batch_id = batch_id

    @property
    def code(self) -> str | None:
        """Code of the message, such as `TARGET_REPLACED`; None of a message without one."""
        code = _CODE.match(str(self))
        return code[1] if code else None


class ConfigError(StreamMergeError, ValueError):
    """The sink, the table or the environment cannot work as configured.

    Attributes:
        problems: every problem, each a sentence with its code and its remedy.
    """

    def __init__(
        self, problems: str | Sequence[str], *, target: str | None = None, batch_id: int | None = None
    ) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("; ".join(self.problems), target=target, batch_id=batch_id)


class HeldError(ConfigError):
    """Another process uses the table or the checkpoint; when it has ended, the same call can continue."""


class ContractError(StreamMergeError):
    """Events of a batch break the contract, and the sink must fail (`on_invalid="fail"`).

    Attributes:
        reasons: quarantine reason to number of events; one event can have several reasons.
    """

    def __init__(
        self, message: str, *, reasons: Mapping[str, int], target: str | None = None, batch_id: int | None = None
    ) -> None:
        super().__init__(message, target=target, batch_id=batch_id)
        self.reasons = dict(reasons)


class CommitConflictError(StreamMergeError):
    """The commit lost against another writer's; nothing of this attempt was written.

    Attributes:
        conflict: class of the last conflict, one of `stream_merge.model.results.CONFLICTS`.
        attempts: attempts made so far, the first one included.
        seconds: wall time from the first attempt to the last conflict.
    """

    def __init__(
        self,
        message: str,
        *,
        conflict: str,
        attempts: int = 1,
        seconds: float = 0.0,
        target: str | None = None,
        batch_id: int | None = None,
    ) -> None:
        super().__init__(message, target=target, batch_id=batch_id)
        self.conflict = conflict
        self.attempts = attempts
        self.seconds = seconds


class CommitStateUnknownError(StreamMergeError):
    """The commit may or may not have landed, and the table could not be read to find out."""


class MergeFailedError(StreamMergeError):
    """A write failed, and another attempt would not help.

    A merge is known not to have landed. An append to a side table may have: under an identity its
    transaction id makes the next delivery of the batch safe; without one, check the table.
    """


class RoutedMergeError(StreamMergeError):
    """Some tables of a `MergeSinks` failed; the others are merged, and skip the batch when it is delivered again.

    Attributes:
        failures: value of the route -> error of its sink.
    """

    def __init__(
        self, message: str, *, failures: Mapping[str | int, Exception], target: str | None, batch_id: int
    ) -> None:
        super().__init__(message, target=target, batch_id=batch_id)
        self.failures = dict(failures)
