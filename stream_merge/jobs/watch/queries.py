"""Streaming queries through sinks: started together, monitored from one thread, stopped between micro-batches."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Protocol

from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from stream_merge.errors import StreamMergeError, located
from stream_merge.model.logs import tell
from stream_merge.model.results import FATES, EventCounts, MergeResult
from stream_merge.spark import environment
from stream_merge.spark.errors import root_cause
from stream_merge.spark.jvm import jvm_signals

log = logging.getLogger(__name__)

_CAUSE = re.compile(r"^Caused by: [\w.$]+: (.*?)(?=^\s+at |^\s+\.\.\. |\Z)", re.MULTILINE | re.DOTALL)
_QUERY_STATE = "=== Streaming Query ==="
MOST_KEPT = 1_000
"""Cached results of an endless run, 5 KB each: all those of a day would take hundreds of megabytes."""
_POLL_SECONDS = 0.1
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """One streaming query to run."""

    name: str
    """Query name: label of metrics and output."""
    events: DataFrame
    sink: BatchFunction
    checkpoint: str
    trigger_seconds: float = 1.0
    """Least time between the starts of two micro-batches; without, Spark checks for data a hundred times a second."""


class BatchFunction(Protocol):
    """A function for `foreachBatch`."""

    @property
    def last_result(self) -> MergeResult | None:
        """Result of the last call that did not raise."""

    def __call__(self, batch_df: DataFrame, batch_id: int) -> None:
        """Merge a micro-batch."""


class QueryFailedError(Exception):
    """A streaming query failed in its source or in Spark, not by an error of a sink.

    Attributes:
        trace: Spark's text.
        reason: message of the innermost cause, on one line.
    """

    def __init__(self, query: str, cause: BaseException) -> None:
        self.trace = str(cause)
        # Spark's text has the cause's message, which may be empty, and then describes the query.
        is_mute = self.trace.lstrip().startswith(_QUERY_STATE)
        self.reason = root_cause(cause) if is_mute else innermost_message(self.trace)
        self.reason = environment.said(cause) or self.reason
        super().__init__(located(f"query {query!r} failed", self.reason))


def run(
    streams: Sequence[Stream],
    *,
    once: bool,
    stopping: threading.Event,
    on_result: Callable[[str, MergeResult], None],
    keep: int | None = None,
) -> list[MergeResult]:
    """Run streaming queries until they end, one of them fails, or `stopping` is set.

    Returns the newest `keep` results (None: all) in the order of their ends; `on_result` is called in this thread.
    """
    arrived: SimpleQueue[tuple[str, MergeResult]] = SimpleQueue()
    results: deque[MergeResult] = deque(maxlen=keep)

    def hand_over() -> None:
        for name, result in drained(arrived):
            results.append(result)
            on_result(name, result)

    closing = threading.Event()
    running: list[Running] = []
    try:
        for stream in streams:
            running.append(Running(stream, arrived, closing, once=once))
        while any(query.is_active for query in running) and not stopping.is_set():
            hand_over()
            if any(query.has_failed for query in running):
                break
            time.sleep(_POLL_SECONDS)
    finally:
        closing.set()
        for query in running:
            query.stop()
    hand_over()
    for query in running:
        if query.failure is not None:
            raise query.failure
    return list(results)


def total(counts: Iterable[EventCounts]) -> EventCounts:
    """The sum of several ledgers."""
    sums = dict.fromkeys(("received", *FATES, "ties", "with_unknown_fields"), 0)
    for one in counts:
        for name in sums:
            sums[name] += getattr(one, name)
    return EventCounts(**sums)


@contextmanager
def stop_on_signal(report: Callable[[str], None]) -> Iterator[threading.Event]:
    """Set an event at Ctrl-C or SIGTERM to this process or its JVM; a second one interrupts at once.

    Enter it after the start of the Spark session: PySpark 4.2 then installs a handler that cancels every job.
    """
    stopping = threading.Event()
    times = {"here": 0, "jvm": 0}  # a signal to the process group arrives at both

    def ask(door: str) -> bool:
        times[door] += 1
        if not stopping.is_set():
            stopping.set()
            report("stopping after the micro-batch that is running; Ctrl-C again to stop at once")
        return max(times.values()) > 1

    def here(_number: int, _frame: FrameType | None) -> None:
        if ask("here"):
            raise KeyboardInterrupt

    def at_jvm() -> None:
        if ask("jvm"):
            os.kill(os.getpid(), signal.SIGTERM)  # only the main thread can be interrupted

    if threading.current_thread() is not threading.main_thread():
        yield stopping
        return
    before = {number: signal.signal(number, here) for number in _STOP_SIGNALS}
    try:
        with jvm_signals(at_jvm, *_STOP_SIGNALS):
            yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def end_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end the process with 0 while Spark starts: process 1 of a container ignores it by default."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _StoppedError(Exception):
    """Ends an unread micro-batch that was delivered while the query was being stopped."""


class Running:
    """A started query, whose sink is called until it is stopped."""

    def __init__(
        self, stream: Stream, arrived: SimpleQueue[tuple[str, MergeResult]], closing: threading.Event, *, once: bool
    ) -> None:
        self._stream = stream
        self._arrived = arrived
        self._closing = closing
        self._in_batch = False
        self._last_batch_id: int | None = None
        self._at_gate = False
        self._is_cut_short = False
        self._failure: BaseException | None = None
        self._started = threading.Event()
        writer = stream.events.writeStream.foreachBatch(self._merge).queryName(stream.name)
        writer = writer.option("checkpointLocation", stream.checkpoint)
        writer = (
            writer.trigger(availableNow=True)
            if once
            else writer.trigger(processingTime=f"{round(stream.trigger_seconds * 1000)} milliseconds")
        )
        self._query: StreamingQuery = writer.start()
        self._started.set()

    @property
    def is_active(self) -> bool:
        """Whether Spark runs it."""
        return self._query.isActive

    @property
    def has_failed(self) -> bool:
        """Whether its batch function or Spark raised."""
        return self._failure is not None or self._query.exception() is not None

    def stop(self) -> None:
        """End the query after its running micro-batch and the record of it in the checkpoint.

        Spark interrupts the query's thread, which may be planning the next micro-batch, and knows only some of the
        resulting errors (not delta-io/delta#6158). So errors from here on are ignored; a broken source fails again at
        the next start.
        """
        while self._query.isActive and not self._is_between_batches():
            time.sleep(_POLL_SECONDS)
        self._is_cut_short = self._query.isActive and self._query.exception() is None
        self._query.stop()
        if self._is_cut_short and not self._at_gate and (error := self._query.exception()) is not None:
            tell(log.info, "stop_interrupted", query=self._stream.name, error=root_cause(error))

    @property
    def has_delivered(self) -> bool:
        """Whether a micro-batch has ended since the start."""
        return self._last_batch_id is not None

    @property
    def failure(self) -> Exception | None:
        """The sink's error, or a `QueryFailedError`; None after a clean end."""
        if isinstance(self._failure, StreamMergeError):
            return self._failure
        error = self._failure or (None if self._at_gate or self._is_cut_short else self._query.exception())
        if error is None:
            return None
        failed = QueryFailedError(self._stream.name, error)
        failed.__cause__ = error
        return failed

    def _merge(self, batch_df: DataFrame, batch_id: int) -> None:
        """Call the sink, in a thread of the query."""
        self._in_batch = True
        try:
            if self._closing.is_set():
                self._wait_for_the_end()
            self._stream.sink(batch_df, batch_id)
            # Before the batch counts as ended: `stop` must not overtake its result.
            self._last_batch_id = batch_id
            if self._stream.sink.last_result is not None:
                self._arrived.put((self._stream.name, self._stream.sink.last_result))
        except _StoppedError:
            raise
        except BaseException as err:
            self._failure = err
            traceback.clear_frames(err.__traceback__)  # they reference the events of the batch
            raise
        finally:
            self._in_batch = False

    def _wait_for_the_end(self) -> None:
        """Block until `stop` ends the query: a batch that returned would count as merged."""
        self._at_gate = True
        self._started.wait()
        while self._query.isActive:
            time.sleep(_POLL_SECONDS)
        msg = f"query {self._stream.name!r} is being stopped"
        raise _StoppedError(msg)

    def _is_between_batches(self) -> bool:
        if self._at_gate:
            return True
        if self._in_batch:
            return False
        if self._failure is not None:
            # It ends by itself. Stopped meanwhile, Spark 4.2 would search the error's text for an interrupt, with a
            # pattern that overflows the stack on long ones.
            return False
        if self._last_batch_id is None:
            return True
        # Spark reports a micro-batch after recording it; stopped earlier, it would be delivered again.
        progress = self._query.lastProgress
        return progress is not None and progress["batchId"] >= self._last_batch_id


def innermost_message(trace: str) -> str:
    """The message of the last cause in a Java stack trace, on one line; without a cause the text's first line."""
    causes = _CAUSE.findall(trace)
    message = environment.without_tracebacks(causes[-1]) if causes else environment.first_line(trace.strip())
    return " ".join(line.strip() for line in message.strip().splitlines()) or "no message"


def drained(queue: SimpleQueue[tuple[str, MergeResult]]) -> Iterator[tuple[str, MergeResult]]:
    """The current items of a queue."""
    while True:
        try:
            yield queue.get_nowait()
        except Empty:
            return
