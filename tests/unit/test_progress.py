"""What a job's lag says before and after it is known. No Spark, no broker: values alone."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from stream_merge.jobs.kafka.batch_offsets import Covered
from stream_merge.jobs.kafka.counts import Tally
from stream_merge.jobs.kafka.lag import Progress
from stream_merge.metrics.instruments import MergeMetrics
from stream_merge.model.results import OUTCOMES, EventCounts, MergeResult, Outcome
from stream_merge.sources.kafka.connection import TopicState

LABELS = {"query": "orders", "target": "orders", "topic": "t"}


def test_there_is_no_lag_before_it_is_known_where_the_query_goes_on() -> None:
    """The whole topic would be an alarm at each start, and for a query that never comes to run."""
    registry = CollectorRegistry()
    progress = Progress(query="orders", target="orders", topics=("t",), group=None, metrics=MergeMetrics(registry))
    topics = {"t": TopicState(topic_id="1", starts={0: 10}, ends={0: 5_000})}

    def shown() -> tuple[float | None, bool]:
        lag = registry.get_sample_value("stream_merge_topic_lag_events", LABELS)
        return lag, bool(registry.get_sample_value("stream_merge_topic_polled_timestamp_seconds", LABELS))

    started: dict[str, dict[int, int]] = {}
    progress.begin()
    assert shown() == (None, False)
    progress.seen({})  # the broker has answered: there is no such topic yet
    assert shown() == (None, True)
    progress.goes_on_from({}, lambda: started)
    progress.seen(topics)
    assert shown() == (None, True)
    started["t"] = {0: 4_997}  # Spark has written down where the query starts
    progress.seen(topics)
    assert shown() == (3, True)
    progress.goes_on_from({"t": {0: 4_998}}, lambda: started)
    progress.seen(topics)
    assert shown() == (2, True)


def test_batches_are_counted_from_0_on_before_there_is_a_lag() -> None:
    """Who asks for a query that is behind and ends no batch would not hear of one that has never ended any."""
    registry = CollectorRegistry()
    progress = Progress(query="orders", target="orders", topics=("t",), group=None, metrics=MergeMetrics(registry))
    progress.begin()

    of_query = {name: LABELS[name] for name in ("query", "target")}
    shown = [
        registry.get_sample_value("stream_merge_batches_total", {**of_query, "outcome": outcome})
        for outcome in OUTCOMES
    ]
    assert shown == [0, 0, 0, 0]


def test_the_newest_merged_event_grows_no_older() -> None:
    """A batch of another partition, or of a snapshot, may bring older events alone."""
    registry = CollectorRegistry()
    progress = Progress(query="orders", target="orders", topics=("t",), group=None, metrics=MergeMetrics(registry))
    shown = []
    for millis in (5_000, 3_000, 7_000):
        progress.merged(Covered(ranges={}, lost={}), Tally(newest_millis={"t": millis}), None)
        shown.append(registry.get_sample_value("stream_merge_topic_newest_event_timestamp_seconds", LABELS))

    assert shown == [5, 5, 7]


def test_a_query_that_is_run_again_in_one_process_has_not_failed() -> None:
    """Its series would say so for ever, while it runs."""
    registry = CollectorRegistry()

    def shown() -> float | None:
        of_query = {name: LABELS[name] for name in ("query", "target")}
        return registry.get_sample_value("stream_merge_query_failed", of_query)

    first, second = (
        Progress(query="orders", target="orders", topics=("t",), group=None, metrics=MergeMetrics(registry))
        for _ in range(2)
    )
    first.begin()
    first.failed()
    assert shown() == 1
    second.begin()
    assert shown() == 0
    second.failed()
    assert shown() == 1


def test_only_a_commit_has_a_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that is delivered again after hours of downtime was in the table all the time."""
    registry = CollectorRegistry()
    progress = Progress(query="orders", target="orders", topics=("t",), group=None, metrics=MergeMetrics(registry))
    shown = []

    def merged(at: float, result: MergeResult | None) -> None:
        monkeypatch.setattr("stream_merge.jobs.kafka.lag.time.time", lambda: at)
        progress.merged(Covered(ranges={}, lost={}), Tally(newest_millis={"t": 1_000_000}), result)
        shown.append(registry.get_sample_value("stream_merge_topic_delay_seconds", LABELS))

    progress.begin()
    merged(8_000, None)
    merged(8_000, result("skipped_duplicate", version=None))
    merged(1_020, result("committed", version=7))
    merged(9_000, result("skipped_duplicate", version=None))
    merged(9_000, result("no_change", version=None))

    assert shown == [None, None, 5, 5, 5]


def result(outcome: Outcome, *, version: int | None) -> MergeResult:
    """Of a batch with a quarter of a minute of maintenance."""
    return MergeResult(
        target="orders",
        query="orders",
        batch_id=3,
        outcome=outcome,
        engine="spark",
        mode=None,
        version=version,
        attempts=1,
        conflicts={},
        plan="the only engine",
        events=EventCounts(),
        seconds={"maintenance": 15},
    )
