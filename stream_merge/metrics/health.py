"""Liveness and readiness of a process, for orchestrators.

Liveness fails only where a restart helps: the JVM is gone or has not answered for minutes. Readiness means that each
query runs, and that none has been in one trigger for longer than its newest ones explain.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from stream_merge.spark.streaming import Look, look_at_queries

LOOK_SECONDS = 2.0
_NO_ANSWER_SECONDS = 300.0
"""Longer than the JVM's longest garbage collection."""
_TRIGGER_SECONDS = 300.0
"""Any trigger may take this long; longer ones three times the longest of the newest."""
_NEWEST = 20

RUNS, ENDED = "runs", "ended"


@dataclass(slots=True)
class _Followed:
    """One run of a query."""

    progress: str | None = None
    """Start of its newest trigger with events, as Spark writes it."""
    moved_at: float | None = None
    """Monotonic time of its newest observed progress; None: it has not ended a trigger."""
    durations: deque[float] = field(default_factory=lambda: deque(maxlen=_NEWEST))
    """Seconds of its newest triggers."""

    def update(self, look: Look, now: float) -> None:
        has_moved = look.progress is not None and look.progress != self.progress
        if has_moved:
            self.progress = look.progress
            self.durations.append(look.trigger_seconds)
        if has_moved or look.is_waiting:
            self.moved_at = now

    def state(self, now: float) -> str:
        if self.moved_at is None:
            return "starting"
        most = max(_TRIGGER_SECONDS, 3 * max(self.durations, default=0.0))
        seconds = now - self.moved_at
        return "ready" if seconds <= most else f"in one trigger for {seconds:.0f} s"


class Health:
    """State behind `/livez` and `/readyz`; a thread checks the queries every 2 s.

    Args:
        session: follow all streaming queries of its JVM; None: none before `follow`.
        now: monotonic clock in seconds.
    """

    def __init__(self, session: SparkSession | None = None, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._followed: dict[str, tuple[str, _Followed]] = {}
        """Run id -> query name and its progress."""
        self._states: Callable[[], Mapping[str, str]] | None = None
        self._looked_at: float | None = None
        self._is_gone = False
        self._over = threading.Event()
        if session is not None:
            self.follow(session)

    def follow(self, session: SparkSession, states: Callable[[], Mapping[str, str]] | None = None) -> SparkSession:
        """Check the streaming queries of a session's JVM from now on; returns the session.

        Args:
            session: any of the JVM.
            states: of the expected queries, by name: `runs` where Spark can be asked, `ended`, or why it does not run.
                None: all that run, at least one.
        """
        self._states, self._looked_at = states, self._now()
        threading.Thread(target=self._run, args=(session,), name="stream-merge-health", daemon=True).start()
        return session

    def close(self) -> None:
        """Stop checking."""
        self._over.set()

    def problem(self) -> str | None:
        """Why the process should be restarted, or None."""
        if self._is_gone:
            return "Spark has ended"
        silent = 0.0 if self._looked_at is None else self._now() - self._looked_at
        return None if silent <= _NO_ANSWER_SECONDS else f"the JVM has not answered for {silent:.0f} s"

    def ready(self) -> tuple[bool, str]:
        """Whether all queries are ready, and a line for each."""
        if (problem := self.problem()) is not None:
            return False, problem
        now = self._now()
        with self._lock:
            states = {name: followed.state(now) for name, followed in self._followed.values()}
        if self._states is not None:
            expected = self._states().items()
            states = {name: states.get(name, "starting") if state == RUNS else state for name, state in expected}
        is_ready = bool(states) and all(state in ("ready", ENDED) for state in states.values())
        return is_ready, "\n".join(f"{name}: {state}" for name, state in states.items()) or "starting"

    def _run(self, session: SparkSession) -> None:
        while not self._over.wait(LOOK_SECONDS):
            try:
                looks = None if session.sparkContext._jsc is None else look_at_queries(session)
            except (Py4JError, OSError):  # a query that ended meanwhile, or a JVM that is gone
                self._is_gone = not _answers(session)
                continue
            if looks is None:
                self._is_gone = True
                continue
            self._is_gone, self._looked_at = False, self._now()
            with self._lock:
                before, self._followed = self._followed, {}
                for look in looks:
                    name, followed = before.get(look.run_id, (look.name, _Followed()))
                    followed.update(look, self._looked_at)
                    self._followed[look.run_id] = (name, followed)


def _answers(session: SparkSession) -> bool:
    try:
        session.sparkContext._jvm.System.nanoTime()  # type: ignore[union-attr]
    except (Py4JError, OSError):
        return False
    return True
