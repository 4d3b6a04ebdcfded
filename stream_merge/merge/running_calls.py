"""Excludes two sinks of this process under one identity on one table, or beside a single writer."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pyspark.sql import DataFrame

from stream_merge.errors import ConfigError
from stream_merge.model.locations import local_path
from stream_merge.model.settings import MergeSpec
from stream_merge.model.source_batch import Calls
from stream_merge.model.table_ref import TableRef
from stream_merge.spark.streaming import Caller


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Events that a user's function gives to a sink."""

    run_id: str
    batch_id: int
    events: int
    """Identity of the frame (`DataFrame.semanticHash`): a retried call has the same."""

    def is_of_one_batch(self, other: Part | None) -> bool:
        """Whether these are other events of the same batch."""
        return other is not None and (other.run_id, other.batch_id) == (self.run_id, self.batch_id) and other != self


def batch_part(batch_df: DataFrame, who: Caller, batch_id: int, calls: Calls) -> Part | None:
    """The part of a batch that a call gets; None where it gets the complete batch, or nobody can tell."""
    if calls != "some" or who.run_id is None:
        return None
    return Part(run_id=who.run_id, batch_id=batch_id, events=batch_df.semanticHash())


class _Claims:
    """Identities and tables at work in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owners: dict[tuple[str, str], int] = {}
        self._merged: dict[tuple[str, str], Part] = {}
        """Last merged part, by identity and location."""
        self._writers: Counter[tuple[str, bool]] = Counter()
        """Calls by location, and whether their sink has `single_writer`."""

    @contextmanager
    def held(
        self, owner: object, identity: str | None, spec: MergeSpec, location: str, *, part: Part | None = None
    ) -> Iterator[None]:
        """Register (identity, table) for one call; the table by its name, too, since it may not exist yet.

        Raises `ConfigError` where another call has it, another part of the batch was merged under this id, or either
        call was promised to be the single writer of a table on an object store.
        """
        target, location = spec.target.plain, TableRef(location).canonical
        wanted = set() if identity is None else {(identity, target), (identity, location)}
        writer = (location, spec.single_writer and local_path(location) is None)
        with self._lock:
            msg = None
            if any(self._owners.get(claim) == id(owner) for claim in wanted):
                msg = (
                    f"[SINK_ALREADY_RUNNING] this sink is already merging into {target!r}; pass it all events of a"
                    " batch in one call, and one batch after the other"
                )
            elif any(claim in self._owners for claim in wanted):
                msg = (
                    f"[DUPLICATE_IDENTITY] another sink is merging into {target!r} under the same identity"
                    f" {identity!r}; give each sink of a query its own name="
                )
            elif part is not None and any(part.is_of_one_batch(self._merged.get(claim)) for claim in wanted):
                msg = (
                    f"[DUPLICATE_IDENTITY] a sink has already merged other events of batch {part.batch_id} into"
                    f" {target!r}; pass one sink all events of a batch, or give each sink its own name="
                )
            elif self._writers[location, True] or (writer[1] and self._writers[location, False]):
                msg = (
                    f"[NOT_SINGLE_WRITER] two sinks are merging into {target!r} at the same time, and one has"
                    " single_writer=True; remove it from both, or write to the table with one sink"
                )
            if msg is not None:
                raise ConfigError(msg, target=target)
            self._owners.update(dict.fromkeys(wanted, id(owner)))
            self._writers[writer] += 1
        try:
            yield
            if part is not None:
                with self._lock:
                    self._merged.update(dict.fromkeys(wanted, part))
        finally:
            with self._lock:
                self._writers[writer] -= 1
                if not self._writers[writer]:
                    del self._writers[writer]
                for claim in wanted:
                    self._owners.pop(claim, None)


claims = _Claims()
