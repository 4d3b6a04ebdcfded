"""How the commits of one batch are marked, tried again when another writer was faster, and counted."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from stream_merge.engines.base import CommitTag
from stream_merge.errors import CommitConflictError
from stream_merge.microbatch.call import BatchCall
from stream_merge.model import names
from stream_merge.model.snapshot import FINGERPRINT, History, TableSnapshot, is_applied, newest_first
from stream_merge.tables import quarantine, retry
from stream_merge.tables.side_commits import Judge, SideCommit

T = TypeVar("T")


class Committing:
    """The commits of one batch: the target's and those of the tables beside it.

    Args:
        judge: how a stream tells its batch from one that a side table has recorded; None outside of one.
        recorded: what the target's commits record of the batch beside what the sink does itself.
        user_metadata: the user's own value of `userMetadata`, kept beside the sink's.
    """

    def __init__(
        self,
        call: BatchCall,
        *,
        judge: Judge | None,
        recorded: Mapping[str, Any],
        user_metadata: str | None,
    ) -> None:
        self._spec = call.spec
        self._caller = call.caller
        self._batch_id = call.batch_id
        self._clock = call.clock
        self._metrics = call.metrics
        self._sleep = call.sleep
        self._judge = judge
        self._recorded = recorded
        self._user_metadata = user_metadata
        self.attempts = 0
        """Of the merge."""
        self.conflicts: Counter[str] = Counter()
        """Lost commits by Delta's class."""

    def run(self, attempt: Callable[[int], T]) -> T:
        """Run an attempt, which gets its number, until it wins or the policy is exhausted."""
        return retry.run(attempt, self._spec.retry, sleep=self._wait, on_conflict=self._lost)

    def count_attempt(self, number: int) -> None:
        """Count an attempt of the merge."""
        self.attempts = number
        self._metrics.attempt(self._caller.query, self._spec.label)

    def is_recorded(self, found: TableSnapshot) -> bool:
        """Whether the target's transaction id shows the batch."""
        return is_applied(found.transaction, self._caller.app_id("target"), self._batch_id)

    def native_versions(self, found: TableSnapshot, history: History) -> list[int]:
        """The target's versions that delta-rs has committed for this batch before, as far as the log is kept.

        Cost: nothing unless the batch is the last one that the target has recorded.
        """
        app_id = self._caller.app_id("target")
        if app_id is None or found.transaction(app_id) != self._batch_id:
            return []
        versions = []
        for commit in newest_first(found.version, history):
            ours = commit.ours or {}
            if (ours.get("identity"), ours.get("batch_id")) != (self._caller.identity, self._batch_id):
                continue
            if ours.get("engine") == "native":
                versions.append(commit.version)
            if ours.get("role") == "target":
                break
        return versions

    def is_first(self, found: TableSnapshot) -> bool:
        """Whether the batch is a streaming query's and the target has no transaction id of the query yet."""
        app_id = self._caller.app_id("target")
        return self._caller.checkpoint is not None and app_id is not None and found.transaction(app_id) is None

    def tag(self, role: names.Role, *, engine: str, plan: str) -> CommitTag:
        """What a commit of the target carries; with a token that no other attempt has."""
        token = uuid.uuid4().hex
        ours = {
            "identity": self._caller.identity,
            "batch_id": self._batch_id,
            "role": role,
            "engine": engine,
            "plan": plan,
            "token": token,
            **self._recorded,
        }
        metadata = json.dumps({"stream_merge": ours, "user": self._user_metadata})
        return CommitTag(app_id=self._caller.app_id(role), batch_id=self._batch_id, user_metadata=metadata, token=token)

    def beside(self, role: names.Role, *, table_id: str) -> SideCommit:
        """How a table beside the target with that id is written."""
        return self._side(self._caller.app_id(role, about=table_id))

    def undecodable(self) -> SideCommit:
        """How what never became an event is written, for which no target has to exist."""
        return self._side(quarantine.undecodable_id(self._caller, self._spec.target))

    def _side(self, app_id: str | None) -> SideCommit:
        return SideCommit(
            app_id=app_id,
            batch_id=self._batch_id,
            run=self.run,
            fingerprint=self._recorded.get(FINGERPRINT),
            user=self._user_metadata,
            judge=self._judge,
        )

    def _lost(self, error: CommitConflictError) -> None:
        self.conflicts[error.conflict] += 1
        self._metrics.conflict(self._caller.query, self._spec.label, error.conflict)

    def _wait(self, seconds: float) -> None:
        with self._clock.phase("backoff"):
            self._sleep(seconds)
        self._metrics.backoff(self._caller.query, self._spec.label, seconds)
