"""Whether each query of a job fills a table of its own, however the job file calls it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from pyspark.sql import DataFrame

from stream_merge.errors import ConfigError, StreamMergeError
from stream_merge.jobs.watch.queries import BatchFunction
from stream_merge.model.results import MergeResult
from stream_merge.model.table_ref import TableRef


class Targets:
    """Where the targets of a job's queries lie; the threads of all of them ask.

    Args:
        place: where a target lies or is going to; its whole name as long as only its catalog could tell.
    """

    def __init__(self, place: Callable[[TableRef], TableRef]) -> None:
        self._place = place
        self._lock = threading.Lock()
        self._places: dict[str, tuple[TableRef, TableRef]] = {}
        """Query -> its target, and where that was at the last look."""

    def expect_own(self, query: str, target: TableRef) -> None:
        """Look where a query's target lies, before the query reads anything.

        Raises:
            ConfigError: another query fills that table: equal keys of two topics would overwrite each other.
        """
        found = self._place(target)
        with self._lock:
            self._refuse_another(query, target, found)
            self._places[query] = target, found

    def look_again(self, query: str) -> None:
        """Before a batch: a table that a catalog has placed since may be another query's.

        What keeps a catalog from telling is left to the query whose table it is: its sink asks, too.

        Cost: nothing once all tables are there; before, a look into the catalog for each that is not.

        Raises:
            ConfigError: as `expect_own`.
        """
        with self._lock:
            unknown = {name: target for name, (target, place) in self._places.items() if place.path is None}
        found: dict[str, tuple[TableRef, TableRef]] = {}
        for name, target in unknown.items():
            with suppress(StreamMergeError):
                found[name] = target, self._place(target)
        with self._lock:
            self._places |= found
            self._refuse_another(query, *self._places[query])

    def _refuse_another(self, query: str, target: TableRef, place: TableRef) -> None:
        same = place.canonical
        others = [name for name, (_, at) in self._places.items() if at.canonical == same and name != query]
        if others:
            msg = (
                f"[DUPLICATE_SETTING] queries {others[0]!r} and {query!r} write to {place!r}; give each its own target"
            )
            raise ConfigError(msg, target=target)


class OwnTable:
    """A query's sink, which merges nothing into a table that another query fills."""

    def __init__(self, sink: BatchFunction, query: str, targets: Targets) -> None:
        self._sink = sink
        self._query = query
        self._targets = targets

    @property
    def last_result(self) -> MergeResult | None:
        """What the last batch did."""
        return self._sink.last_result

    def __call__(self, batch_df: DataFrame, batch_id: int) -> None:
        """As the sink.

        Raises:
            ConfigError: as `Targets.look_again`; nothing is written.
        """
        self._targets.look_again(self._query)
        self._sink(batch_df, batch_id)
