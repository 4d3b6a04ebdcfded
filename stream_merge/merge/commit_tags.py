"""Tags of the commits of one batch, by which each is recognised."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stream_merge.engines.base import CommitTag
from stream_merge.model import names
from stream_merge.model.snapshot import FINGERPRINT, TableSnapshot, is_applied
from stream_merge.model.table_ref import TableRef
from stream_merge.spark.streaming import Caller
from stream_merge.tables.side import quarantine
from stream_merge.tables.side.side_table import Judge, Runner, SideCommit


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitTags:
    """Makes the tags of one batch's commits: to the target and to the side tables."""

    caller: Caller
    batch_id: int
    target: TableRef
    run: Runner
    judge: Judge | None
    """None outside of a stream."""
    recorded: Mapping[str, Any]
    """Facts of the batch that each of the target's commits records."""
    accounted: Mapping[str, Any]
    """Facts that only the commit records that merges the batch: a second one would account for its events twice."""
    user_metadata: str | None
    """The user's own value of `userMetadata`, kept beside the sink's."""
    tokens: list[str] = field(default_factory=list)
    """Tokens of all tags so far."""

    def is_recorded(self, target: TableSnapshot) -> bool:
        """Whether the target's transaction id shows the batch."""
        return is_applied(target.transaction, self.caller.app_id("target"), self.batch_id)

    def recorded_id(self, target: TableSnapshot) -> int | None:
        """Newest batch id that the target's transaction id shows."""
        app_id = self.caller.app_id("target")
        return None if app_id is None else target.transaction(app_id)

    def is_first(self, target: TableSnapshot) -> bool:
        """Whether the batch is a streaming query's, and the target has no transaction id of the query yet."""
        is_named = self.caller.app_id("target") is not None
        return self.caller.checkpoint is not None and is_named and self.recorded_id(target) is None

    def tag(self, role: names.Role, *, engine: str, plan: str, so_far: Mapping[str, Any] | None = None) -> CommitTag:
        """The tag of a commit to the target, with a token that no other attempt has; `so_far` goes into the history."""
        token = uuid.uuid4().hex
        self.tokens.append(token)
        ours = {
            "identity": self.caller.identity,
            "batch_id": self.batch_id,
            "role": role,
            "engine": engine,
            "plan": plan,
            "token": token,
            **(so_far or {}),
            **self.recorded,
            **(self.accounted if role == "target" else {}),
        }
        metadata = json.dumps({"stream_merge": ours, "user": self.user_metadata})
        return CommitTag(app_id=self.caller.app_id(role), batch_id=self.batch_id, user_metadata=metadata, token=token)

    def beside(self, role: names.Role, *, table_id: str) -> SideCommit:
        """The commit to a side table of the target with that id."""
        return self._side(self.caller.app_id(role, about=table_id))

    def undecodable(self) -> SideCommit:
        """The commit of undecodable records, for which no target has to exist."""
        return self._side(quarantine.undecodable_id(self.caller, self.target))

    def _side(self, app_id: str | None) -> SideCommit:
        return SideCommit(
            app_id=app_id,
            batch_id=self.batch_id,
            run=self.run,
            fingerprint=self.recorded.get(FINGERPRINT),
            user=self.user_metadata,
            judge=self.judge,
        )
