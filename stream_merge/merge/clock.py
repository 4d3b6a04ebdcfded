"""Wall time of a call by phase: every moment belongs to exactly one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from stream_merge.model.logs import tell
from stream_merge.model.observer import MicroBatch, Observer
from stream_merge.model.results import PHASES, Phase


def now_micros() -> int:
    """Microseconds since the epoch."""
    return time.time_ns() // 1000


class PhaseClock:
    """Charges wall time to the innermost phase; what no phase claims is `other`.

    `began`: `time.perf_counter()` when the source began to read the batch; from then to now is the phase `read`.
    """

    def __init__(self, began: float | None = None, *, current: Phase = "other") -> None:
        self._current = current
        self._since = time.perf_counter()
        self._intervals: list[tuple[Phase, float, float]] = []
        if began is not None:
            self._charge("read", began, self._since)
        self._epoch_ns = time.time_ns() - int(time.perf_counter() * 1e9)
        self.began_ns = self._ns(self._since if began is None else began)

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Charge the block to a phase; a phase inside it is charged apart."""
        outer = self._switch(name)
        try:
            yield
        finally:
            self._switch(outer)

    def seconds(self) -> dict[Phase, float]:
        """Seconds by phase up to now; they add up to the time since the clock was made, or the source began."""
        self._switch(self._current)
        spent: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        for phase, begin, end in self._intervals:
            spent[phase] += end - begin
        return spent

    def intervals(self) -> list[tuple[Phase, int, int]]:
        """Phase, begin and end in nanoseconds since the epoch, up to now and without gaps."""
        self._switch(self._current)
        return [(phase, self._ns(begin), self._ns(end)) for phase, begin, end in self._intervals]

    def _ns(self, moment: float) -> int:
        return self._epoch_ns + int(moment * 1e9)

    def _charge(self, phase: Phase, begin: float, end: float) -> None:
        if self._intervals and self._intervals[-1][0] == phase:
            begin = self._intervals.pop()[1]
        self._intervals.append((phase, begin, end))

    def _switch(self, name: Phase) -> Phase:
        now = time.perf_counter()
        self._charge(self._current, self._since, now)
        self._since = now
        previous, self._current = self._current, name
        return previous


log = logging.getLogger(__name__)


class Observed:
    """Notifies observers of the start and the end of a batch."""

    def __init__(self, observers: Sequence[Observer], clock: PhaseClock, **label: Any) -> None:
        self._observers = observers
        self._clock = clock
        self._has_started = False
        self._batch = MicroBatch(**label, began_ns=clock.began_ns)

    def started(self, location: str | None = None) -> None:
        """Notify observers that the batch is about to be merged into the table there."""
        self._has_started = True
        self._batch = replace(self._batch, location=location)
        self._each("started", lambda: self._batch)

    def ended(self, facts: Callable[[], dict[str, Any]]) -> None:
        """Notify observers of the end; `facts` are fields of `MicroBatch`, not computed without observers."""
        if not self._has_started:  # its source could not read it
            self.started()
        self._each("ended", lambda: replace(self._batch, phases=self._clock.intervals(), **facts()))

    def _each(self, what: str, batch: Callable[[], MicroBatch]) -> None:
        for one in self._observers:
            try:
                getattr(one, what)(batch())
            except Exception:  # the batch may be committed
                tell(log.error, "observer_failed", exc_info=True)
