"""What a handle keeps in memory of its table, from version to version as long as only this handle commits."""

from __future__ import annotations

from collections.abc import Callable


class KeptTransactions:
    """The batch ids by application id, as far as somebody has asked for them."""

    def __init__(self) -> None:
        self._version: int | None = None
        self._known: dict[str, int | None] = {}

    def of(self, version: int, app_id: str, read: Callable[[str], int | None]) -> int | None:
        """What a version records, read where it is not known."""
        if self._version != version:
            self._version, self._known = version, {}
        if app_id not in self._known:
            self._known[app_id] = read(app_id)
        return self._known[app_id]

    def add(self, before: int, version: int, transaction: tuple[str, int] | None) -> None:
        """Note what the commit of this handle records that has made a version."""
        if (self._version, before + 1) == (before, version):
            self._version = version
            self._known |= {} if transaction is None else dict([transaction])
