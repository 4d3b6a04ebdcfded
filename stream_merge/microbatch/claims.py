"""That no two sinks of this process work under one identity on one table."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from stream_merge.errors import ConfigError


class _Claims:
    """Identities at work in this process. Process-wide: two sinks can only collide if they see each other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owners: dict[tuple[str, str], int] = {}

    @contextmanager
    def held(self, owner: object, identity: str | None, target: str, location: str) -> Iterator[None]:
        """Hold (identity, table) for one call; the table by its name, too, since it may not be anywhere yet.

        Raises:
            ConfigError: another sink object's call holds it.
        """
        if identity is None:
            yield
            return
        wanted = {(identity, target), (identity, location)}
        with self._lock:
            if any(self._owners.get(claim, id(owner)) != id(owner) for claim in wanted):
                msg = (
                    f"another sink is merging into {target!r} under the same identity {identity!r}, so one would skip"
                    " the other's batches; give each sink of a query its own name="
                )
                raise ConfigError(msg, target=target)
            self._owners.update(dict.fromkeys(wanted, id(owner)))
        try:
            yield
        finally:
            with self._lock:
                for claim in wanted:
                    self._owners.pop(claim, None)


claims = _Claims()
