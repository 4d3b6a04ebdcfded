"""One micro-batch before its observers, none of which can fail it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from stream_merge.merge.clock import PhaseClock
from stream_merge.model.logs import tell
from stream_merge.model.observer import MicroBatch, Observer

log = logging.getLogger(__name__)


class Observed:
    """Tells observers how a batch goes.

    Args:
        observers: whom.
        clock: of the batch.
        label: `query`, `target` and `batch_id`.
    """

    def __init__(self, observers: Sequence[Observer], clock: PhaseClock, **label: Any) -> None:
        self._observers = observers
        self._clock = clock
        self._has_started = False
        self._batch = MicroBatch(**label, began_ns=clock.began_ns)

    def started(self, location: str | None = None) -> None:
        """The batch is about to be merged into the table there."""
        self._has_started = True
        self._batch = replace(self._batch, location=location)
        self._each("started", lambda: self._batch)

    def ended(self, facts: Callable[[], dict[str, Any]]) -> None:
        """The batch has ended.

        Args:
            facts: fields of `MicroBatch`; not asked for without observers.
        """
        if not self._has_started:  # its source could not read it
            self.started()
        self._each("ended", lambda: replace(self._batch, phases=self._clock.intervals(), **facts()))

    def _each(self, what: str, batch: Callable[[], MicroBatch]) -> None:
        for one in self._observers:
            try:
                getattr(one, what)(batch())
            except Exception:  # the batch may be committed
                tell(log.error, "observer_failed", exc_info=True)
