"""Which events of a batch meet a remembered delete, whoever has looked."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Hits:
    """The events of a batch whose key has a tombstone; each engine adds them in its own form."""

    refused: int = 0
    """Events that are older than the tombstone of their key."""
    revived: int = 0
    """Upserts that are not older: they bring their key back."""
    version: int | None = None
    """Version of the log that was at least read; None while there is no log."""

    def release(self) -> None:
        """Free what was materialised."""
