"""What every database brings: how its position is told, and how its types are written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import pyarrow as pa


class Database(Protocol):
    """Where changes come from; sent to the workers."""

    name: ClassVar[str]
    """As Debezium calls its connector (`source.connector`)."""
    log: ClassVar[str]
    """What positions are in, for people."""
    position_field: ClassVar[str]
    """Whole number among what is said about an event that orders the events of a key."""
    position_told_by: ClassVar[tuple[str, ...]]
    """All that `position` looks at, that field included."""
    last_commit_field: ClassVar[str]
    """Text among what is said about an event that names the last commit before it."""

    def position(self, source: Mapping[str, Any]) -> int:
        """Where in the database's log an event stands.

        Args:
            source: what is said about the event (`source` of an envelope).

        Raises:
            UndecodableError: it does not say.
        """
        ...

    def last_commit(self, said: Any) -> int | None:
        """Where in the log the last commit stands that was delivered before an event; None: nothing says it.

        Args:
            said: the `last_commit_field`, whatever is in it.
        """
        ...

    def last_commits(self, said: pa.StringArray) -> pa.Int64Array:
        """`last_commit` of each text."""
        ...
