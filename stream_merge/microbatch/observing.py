"""One micro-batch before its observers; without observers nothing is computed for them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from pyspark.sql.types import StructType

from stream_merge.microbatch.clock import PhaseClock
from stream_merge.model.logs import tell
from stream_merge.model.observer import End, MicroBatch, Observer
from stream_merge.model.results import MergeResult

log = logging.getLogger(__name__)


class Observed:
    """Tells observers of a batch; an error of theirs is logged: the batch may be committed by then.

    Args:
        observers: whom.
        clock: of the batch.
        query: label.
        target: label.
        batch_id: which batch.
    """

    def __init__(
        self, observers: Sequence[Observer], clock: PhaseClock, *, query: str, target: str, batch_id: int
    ) -> None:
        self._observers = observers
        self._clock = clock
        self._has_started = False
        self._batch = MicroBatch(query=query, target=target, batch_id=batch_id, began_ns=clock.began_ns, location=None)

    def started(self, location: str | None = None) -> None:
        """The batch is about to be merged."""
        self._has_started = True
        self._batch = replace(self._batch, location=location)
        self._each(lambda one: one.started(self._batch))

    def merged(self, result: MergeResult, location: str | None, schema: Callable[[], StructType | None]) -> None:
        """The call has returned."""
        self._batch = replace(self._batch, location=location or self._batch.location)
        self._end(result, schema=schema)

    def failed(self, error: Exception) -> None:
        """The call raises this, or its source could not read the batch."""
        if not self._has_started:
            self.started()
        self._end(error=error)

    def _end(
        self,
        result: MergeResult | None = None,
        error: Exception | None = None,
        schema: Callable[[], StructType | None] = lambda: None,
    ) -> None:
        if not self._observers:
            return
        phases = self._clock.intervals()
        end = End(ended_ns=phases[-1][2], phases=phases, result=result, error=error)
        with _errors_logged("schema"):
            end = replace(end, schema=schema())
        self._each(lambda one: one.ended(self._batch, end))

    def _each(self, call: Callable[[Observer], None]) -> None:
        for one in self._observers:
            with _errors_logged(type(one).__name__):
                call(one)


@contextmanager
def _errors_logged(what: str) -> Iterator[None]:
    try:
        yield
    except Exception:
        tell(log.error, "observer_failed", observer=what, exc_info=True)
