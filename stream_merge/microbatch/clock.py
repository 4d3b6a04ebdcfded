"""Where the seconds of a call go: every moment belongs to exactly one phase."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from stream_merge.model.results import PHASES, Phase


def now_micros() -> int:
    """Microseconds since the epoch."""
    return time.time_ns() // 1000


class PhaseClock:
    """Charges wall time to the innermost phase; what no phase claims is `other`.

    Args:
        began: `time.perf_counter()` when the source began to read the batch; from then to now is the phase `read`.
        current: the phase that begins now.
    """

    def __init__(self, began: float | None = None, *, current: Phase = "other") -> None:
        self._seconds: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        self._current = current
        self._since = time.perf_counter()
        self._seconds["read"] = 0.0 if began is None else self._since - began

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
        return dict(self._seconds)

    def _switch(self, name: Phase) -> Phase:
        now = time.perf_counter()
        self._seconds[self._current] += now - self._since
        self._since = now
        previous, self._current = self._current, name
        return previous
