"""One query of a job: started, started again after an outage, stopped between two micro-batches."""

from __future__ import annotations

import logging
import threading
import time
from queue import SimpleQueue
from typing import Protocol

from stream_merge.errors import StreamMergeError
from stream_merge.jobs.kafka import control
from stream_merge.jobs.kafka.exit_codes import is_of_report, is_outage, is_refusal, refused, verdict
from stream_merge.jobs.kafka.first_look import Look
from stream_merge.jobs.kafka.replay import Replayed, Request
from stream_merge.jobs.kafka.settings import QuerySettings
from stream_merge.jobs.watch.queries import Running, Stream
from stream_merge.metrics.health import ENDED, RUNS
from stream_merge.model.logs import tell
from stream_merge.model.results import MergeResult
from stream_merge.spark.errors import reason

log = logging.getLogger(__name__)

_LONGEST_OUTAGE_SECONDS = 600.0
"""How long a query is started again and again without a micro-batch in between."""
_SETTLED_SECONDS = 150.0
"""A query that has run for so long has found its broker: Spark 4.2 polls for 120 s before it gives up."""
_BACKOFF_SECONDS = (1.0, 2.0, 5.0, 10.0)
_REPLAY_SECONDS = 60.0
"""Until a replay is tried again whose answer could not be written."""
_MOST_REFUSALS = 2
"""In a row, before the job ends; Spark has tried three times before it speaks of one."""


class Queries(Protocol):
    """What a job knows to do for each of its queries."""

    def look_before(self, query: QuerySettings, *, is_first: bool, once: bool) -> None:
        """Stop for what Spark would stumble over while it plans a batch, without a word that helps."""
        ...

    def stream(self, query: QuerySettings) -> Stream:
        """The query, ready to be started."""
        ...

    def replay(self, query: QuerySettings, request: Request) -> Replayed:
        """Run quarantined records of the query again, between two of its micro-batches."""
        ...


class Supervised:
    """One query through its outages."""

    def __init__(
        self,
        settings: QuerySettings,
        job: Queries,
        arrived: SimpleQueue[tuple[str, MergeResult]],
        *,
        once: bool,
    ) -> None:
        self.settings = settings
        self._job = job
        self._replaying: threading.Thread | None = None
        self._looking: Look | None = None
        self._unexplained: Exception | None = None
        """What the query has ended with, until a look at broker and table tells what stands behind it."""
        self._has_run = self._is_asked_to_stop = False
        self._arrived = arrived
        self._once = once
        self._closing = threading.Event()
        self._running: Running | None = None
        self._not_before = self._no_replay_before = 0.0
        self._outage_since: float | None = None
        self._restarts = 0
        self._refusals = 0
        self.failure: Exception | None = None
        self.has_ended = False
        self._asked = control.stop_request(settings)

    @property
    def name(self) -> str:
        """Of the query."""
        return self.settings.name

    @property
    def state(self) -> str:
        """What stands in the way of its being ready; `runs` where Spark is to be asked."""
        if self.has_ended:
            return ENDED if self.failure is None else "failed"
        if self._is_asked_to_stop:
            return "stopping"
        if self._running is not None:
            return RUNS
        return "starting" if self._outage_since is None else "waiting for another attempt"

    def forget_old_requests(self) -> None:
        """To stop a run before this one; only for the process that holds the query."""
        self._take_request()

    def end(self, error: Exception) -> None:
        """Do not go on, for this reason."""
        self._keep(error)
        self.has_ended = True

    def step(self) -> None:
        """Start, restart or end the query, if it is time to."""
        if self.has_ended:
            return
        self._look_for_a_replay()
        if self._is_asked_to_stop or self._take_request():
            self._is_asked_to_stop = True
            if not self._is_looking:  # for a broker that is away: no other query waits for its answer
                self.stop()
            return
        if time.monotonic() < self._not_before:
            return
        if self._running is None:
            self._start()
        elif not self._running.is_active or self._running.has_failed:
            self._look_at_the_end(self._running)
        elif self._outage_since is not None and time.monotonic() - self._not_before > _SETTLED_SECONDS:
            self._outage_since, self._restarts = None, 0

    def stop(self) -> None:
        """End it after its running micro-batch."""
        self.has_ended = True
        for thread in (self._replaying, self._looking):
            if thread is not None:
                thread.join()
        if self._unexplained is not None:
            found = None if self._looking is None else self._looking.error
            self._keep(_named(self._unexplained, found, self.name))
        if self._running is None:
            return
        self._closing.set()
        self._running.stop()
        self._keep(self._running.failure)

    def _look_for_a_replay(self) -> None:
        if (self._replaying is not None and self._replaying.is_alive()) or time.monotonic() < self._no_replay_before:
            return
        request = control.replay_request(self.settings)
        if request is not None:
            self._replaying = threading.Thread(target=self._answer, args=(request,), name=f"replay {self.name}")
            self._replaying.start()

    def _answer(self, request: Request) -> None:
        try:
            answer = self._job.replay(self.settings, request)
        except Exception as err:
            tell(log.warning, "replay_failed", query=self.name, error=str(err))
            answer = Replayed(id=request.id, error=str(err), exit_code=verdict(err).value)
        try:
            control.answer_replay(self.settings, answer)
        except OSError as err:  # as of a full disk: the request stays, and is done once more
            self._no_replay_before = time.monotonic() + _REPLAY_SECONDS
            tell(log.warning, "replay_answer_unwritten", query=self.name, seconds=_REPLAY_SECONDS, error=str(err))

    def _take_request(self) -> bool:
        """Whether somebody has asked to stop; the request is used up."""
        if self._asked is None or not self._asked.exists():
            return False
        self._asked.unlink(missing_ok=True)
        return True

    def _start(self) -> None:
        """Look, and when that is over start; a broker that does not answer keeps no other query waiting."""
        if self._looking is None:
            self._looking = Look(self.name, self._look)
            self._looking.start()
        if self._is_looking:
            return
        looked, self._looking = self._looking, None
        ended_with, self._unexplained = self._unexplained, None
        if ended_with is not None:
            self._failed(_named(ended_with, looked.error, self.name))
            return
        if looked.error is not None:
            self._failed(looked.error)
            return
        self._has_run = True
        try:
            self._running = Running(self._job.stream(self.settings), self._arrived, self._closing, once=self._once)
        except Exception as err:
            self._failed(err)

    @property
    def _is_looking(self) -> bool:
        return self._looking is not None and self._looking.is_alive()

    def _look(self) -> None:
        self._job.look_before(self.settings, is_first=not self._has_run, once=self._once)

    def _look_at_the_end(self, running: Running) -> None:
        running.stop()
        error = running.failure
        self._running = None
        if error is None:
            self.has_ended = True
            return
        if running.has_delivered:
            self._outage_since, self._restarts, self._refusals = None, 0, 0
        if isinstance(error, StreamMergeError) or is_refusal(error) or _can_go_on(error):
            self._failed(error)
        else:
            self._unexplained = error

    def _failed(self, error: Exception) -> None:
        is_refused = is_refusal(error)
        self._refusals += is_refused
        if self._refusals >= _MOST_REFUSALS:
            self._keep(refused(self.name, error))
            self.has_ended = True
            return
        now = time.monotonic()
        self._outage_since = now if self._outage_since is None else self._outage_since
        if not (_can_go_on(error) or is_refused) or now - self._outage_since > _LONGEST_OUTAGE_SECONDS:
            self._keep(error)
            self.has_ended = True
            return
        wait = _BACKOFF_SECONDS[min(self._restarts, len(_BACKOFF_SECONDS) - 1)]
        self._restarts += 1
        self._not_before = now + wait
        tell(log.warning, "query_restarts", query=self.name, seconds=wait, error=reason(error))

    def _keep(self, error: Exception | None) -> None:
        if error is not None and self.failure is None:
            self.failure = error


def _can_go_on(error: Exception) -> bool:
    """Whether the query only has to be started again, now or later."""
    return is_outage(error) or is_of_report(error)


def _named(error: Exception, found: Exception | None, query: str) -> Exception:
    """What stands behind an error of Spark: what a look at broker and table has found, else the error itself."""
    if isinstance(found, StreamMergeError):
        found.__cause__ = error
        return found
    if found is not None:
        tell(log.info, "cause_not_found", query=query, error=type(found).__name__)
    return error
