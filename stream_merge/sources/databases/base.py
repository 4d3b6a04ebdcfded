"""What every database brings: how its position is told, and how its types are written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol


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

    def position(self, source: Mapping[str, Any]) -> int:
        """Where in the database's log an event stands.

        Args:
            source: what is said about the event (`source` of an envelope).

        Raises:
            UndecodableError: it does not say.
        """
        ...
