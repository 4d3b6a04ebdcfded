"""That no two sinks of this process work under one identity on one table, nor beside one that is to be alone there."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from stream_merge.errors import ConfigError
from stream_merge.model import names
from stream_merge.model.settings import MergeSpec
from stream_merge.spark.identity import Caller
from stream_merge.spark.places import canonical, local_path


class _Claims:
    """Identities and tables at work in this process. Process-wide: sinks can only collide if they see each other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owners: dict[tuple[str, str], int] = {}
        self._merged: dict[tuple[str, str], tuple[str, int]] = {}
        """The run of a query and its batch that a call has merged last, by identity and location."""
        self._writers: Counter[tuple[str, bool]] = Counter()
        """Calls by location, and whether their sink was promised to be alone."""

    @contextmanager
    def held(self, owner: object, who: Caller, batch_id: int, spec: MergeSpec, location: str) -> Iterator[None]:
        """Hold (identity, table) for one call; the table by its name, too, since it may not be anywhere yet.

        Raises:
            ConfigError: another sink object's call holds it, or has held it for the same batch of the same run of its
                query, which would skip this one; or one works on a table on an object store that either was promised to
                be alone on.
        """
        identity = who.identity
        target, location = names.normal_path(spec.target), canonical(location)
        wanted = set() if identity is None else {(identity, target), (identity, location)}
        writer = (location, spec.single_writer and local_path(location) is None)
        with self._lock:
            if any(self._owners.get(claim, id(owner)) != id(owner) for claim in wanted):
                msg = (
                    f"another sink is merging into {target!r} under the same identity {identity!r}, so one would skip"
                    " the other's batches; give each sink of a query its own name="
                )
                raise ConfigError(msg, target=target)
            run = None if who.run_id is None else (who.run_id, batch_id)
            if run is not None and any(self._merged.get(claim) == run for claim in wanted):
                msg = (
                    f"a sink has merged batch {batch_id} into {target!r} already in this run of the query, so these"
                    " events would be skipped as delivered again; give one sink all events of a batch, or each of"
                    " several its own name="
                )
                raise ConfigError(msg, target=target)
            if self._writers[location, True] or (writer[1] and self._writers[location, False]):
                msg = (
                    f"two sinks are merging into {target!r} at the same time, and one has single_writer=True, by which"
                    " delta-rs may write there, whose commits and Spark's do not exclude each other on an object store;"
                    " leave it out of both, or let one sink write to the table"
                )
                raise ConfigError(msg, target=target)
            self._owners.update(dict.fromkeys(wanted, id(owner)))
            self._writers[writer] += 1
        try:
            yield
            if run is not None:
                with self._lock:
                    self._merged.update(dict.fromkeys(wanted, run))
        finally:
            with self._lock:
                self._writers[writer] -= 1
                if not self._writers[writer]:
                    del self._writers[writer]
                for claim in wanted:
                    self._owners.pop(claim, None)


claims = _Claims()
