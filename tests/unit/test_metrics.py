"""What Prometheus sees of a sink."""

from __future__ import annotations

import gc
import logging
import math
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from stream_merge.errors import ConfigError
from stream_merge.metrics import instruments
from stream_merge.metrics.catalogue import CATALOGUE, DELTA_MERGE_METRICS, RECORD_KINDS
from stream_merge.metrics.instruments import MergeMetrics
from stream_merge.metrics.server import serve
from stream_merge.model.results import (
    CONFLICTS,
    ENGINES,
    FATES,
    MAINTENANCE_OUTCOMES,
    OUTCOMES,
    PHASES,
    REASONS,
    REFUSALS,
    ROUTING_REASONS,
    EventCounts,
    FailedBatch,
    MergeResult,
    ReadDebt,
)

DELTA_4_4_MERGE = {
    "numSourceRows",
    "numSourceRowsInSecondScan",
    "operationNumSourceRows",
    "numTargetRowsCopied",
    "numTargetRowsInserted",
    "numTargetRowsUpdated",
    "numTargetRowsMatchedUpdated",
    "numTargetRowsNotMatchedBySourceUpdated",
    "numTargetRowsDeleted",
    "numTargetRowsMatchedDeleted",
    "numTargetRowsNotMatchedBySourceDeleted",
    "numTargetFilesBeforeSkipping",
    "numTargetFilesAfterSkipping",
    "numTargetFilesRemoved",
    "numTargetFilesAdded",
    "numTargetBytesBeforeSkipping",
    "numTargetBytesAfterSkipping",
    "numTargetBytesRemoved",
    "numTargetBytesAdded",
    "numTargetPartitionsAfterSkipping",
    "numTargetPartitionsRemovedFrom",
    "numTargetPartitionsAddedTo",
    "numTargetChangeFilesAdded",
    "numTargetChangeFileBytes",
    "numTargetDeletionVectorsAdded",
    "numTargetDeletionVectorsRemoved",
    "numTargetDeletionVectorsUpdated",
    "executionTimeMs",
    "materializeSourceTimeMs",
    "scanTimeMs",
    "rewriteTimeMs",
}
SINK = {"query": "orders_stream", "target": "orders"}


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def merge_metrics(registry: CollectorRegistry) -> MergeMetrics:
    return MergeMetrics(registry=registry)


def result(
    *,
    outcome: str = "committed",
    version: int | None = 7,
    events: EventCounts | None = None,
    reasons: Mapping[str, int] | None = None,
    raw: Mapping[str, int] | None = None,
    seconds: Mapping[str, float] | None = None,
    attempts: int = 1,
    conflicts: Mapping[str, int] | None = None,
    read_debt: ReadDebt | None = None,
) -> MergeResult:
    return MergeResult(
        **SINK,
        batch_id=3,
        outcome=outcome,  # type: ignore[arg-type]
        engine="spark",
        mode=None,
        version=version,
        attempts=attempts,
        conflicts=conflicts or {},
        plan="the only engine",
        events=events or EventCounts(),
        reasons=reasons or {},
        metrics=raw or {},
        seconds=seconds or {},  # type: ignore[arg-type]
        read_debt=read_debt,
    )


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"stream_merge_{name}", {**SINK, **labels})


def test_every_sql_metric_of_a_merge_has_a_name_of_its_own() -> None:
    """All 31 numbers of Delta 4.4 are exported; no two share a family, where they would be added up."""
    assert set(DELTA_MERGE_METRICS) == DELTA_4_4_MERGE
    assert len({row.name for row in DELTA_MERGE_METRICS.values()}) == 31


def test_names_follow_the_conventions_of_prometheus() -> None:
    """One prefix, `_total` on counters and on nothing else, base units at the end."""
    for instrument in CATALOGUE:
        assert instrument.name.startswith("stream_merge_")
        assert instrument.name.endswith("_total") == (instrument.type == "counter")
        assert instrument.name.removesuffix("_total").endswith("_seconds") == (instrument.unit == "seconds")
        assert "bytes" in instrument.name or instrument.unit != "bytes"
        assert instrument.help.endswith(".")
    assert len({instrument.name for instrument in CATALOGUE}) == len(CATALOGUE)


def test_every_label_beyond_query_and_target_is_a_bounded_enumeration() -> None:
    """The number of series of a sink is known before it starts."""
    enumerations = {i.label: i.values for i in CATALOGUE if i.label}

    assert enumerations == {
        "outcome": (*OUTCOMES, "failed"),
        "fate": FATES,
        "reason": (*REASONS, *ROUTING_REASONS),
        "conflict": (*CONFLICTS, "other"),
        "phase": PHASES,
        "maintenance": MAINTENANCE_OUTCOMES,
        "engine": ENGINES,
        "refusal": REFUSALS,
        "kind": RECORD_KINDS,
        "certificate": ("kafka", "metrics"),
        "topic": (),  # as many as a job file names
    }


def test_every_series_of_a_sink_exists_at_zero_before_its_first_batch(
    registry: CollectorRegistry, merge_metrics: MergeMetrics
) -> None:
    """A counter that first appears at 1 is invisible to increase()."""
    merge_metrics.prepare(**SINK)

    samples = [sample for family in registry.collect() for sample in family.samples]
    assert {sample.value for sample in samples} == {0.0}
    assert len(samples) == len(set(map(str, samples)))
    assert len(samples) <= 250  # the budget of a query and its target


def test_preparing_again_keeps_what_was_counted(registry: CollectorRegistry, merge_metrics: MergeMetrics) -> None:
    merge_metrics.prepare(**SINK)
    merge_metrics.attempt(**SINK)
    merge_metrics.prepare(**SINK)

    assert value(registry, "attempts_total") == 1


def test_the_ledger_of_the_batches_adds_up_in_the_counters(
    registry: CollectorRegistry, merge_metrics: MergeMetrics
) -> None:
    """Received equals the sum of the fates, over any number of micro-batches; ties stand outside."""
    merge_metrics.observe(result(events=EventCounts(received=10, quarantined=2, inserted=5, updated=3, ties=1)))
    merge_metrics.observe(result(events=EventCounts(received=6, collapsed=1, stale=2, unaffected=1, deleted=2)))

    fates = {fate: value(registry, "events_total", fate=fate) for fate in FATES}
    assert fates == {
        "quarantined": 2,
        "collapsed": 1,
        "stale": 2,
        "unaffected": 1,
        "inserted": 5,
        "updated": 3,
        "deleted": 2,
    }
    assert value(registry, "events_received_total") == 16
    assert value(registry, "ties_total") == 1


def test_quarantined_events_are_counted_by_every_reason_they_have(
    registry: CollectorRegistry, merge_metrics: MergeMetrics
) -> None:
    merge_metrics.observe(
        result(events=EventCounts(received=3, quarantined=3), reasons={"null_key": 3, "null_sequence": 1})
    )

    assert value(registry, "quarantined_events_total", reason="null_key") == 3
    assert value(registry, "quarantined_events_total", reason="null_sequence") == 1


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_a_batch_is_counted_under_its_outcome_alone(
    registry: CollectorRegistry, merge_metrics: MergeMetrics, outcome: str
) -> None:
    merge_metrics.observe(result(outcome=outcome, version=None))

    counted = {o: value(registry, "batches_total", outcome=o) for o in (*OUTCOMES, "failed")}
    assert {o for o, n in counted.items() if n == 1} == {outcome}
    assert sum(n or 0 for n in counted.values()) == 1


def test_a_skipped_duplicate_adds_no_events(registry: CollectorRegistry, merge_metrics: MergeMetrics) -> None:
    """A batch that is delivered again after a crash was counted when it was applied."""
    merge_metrics.observe(result(outcome="skipped_duplicate", version=None))

    assert value(registry, "events_received_total") == 0
    assert value(registry, "batches_total", outcome="skipped_duplicate") == 1


def test_a_call_that_raised_is_a_failed_batch_with_its_time(
    registry: CollectorRegistry, merge_metrics: MergeMetrics
) -> None:
    merge_metrics.observe_failure(
        FailedBatch(**SINK, batch_id=3, error="MergeFailedError", seconds={"prepare": 0.5, "merge": 1.0})
    )

    assert value(registry, "batches_total", outcome="failed") == 1
    assert value(registry, "phase_seconds_total", phase="merge") == 1.0
    assert value(registry, "batch_duration_seconds_sum") == 1.5
    assert value(registry, "last_commit_timestamp_seconds") == 0


def test_phases_add_up_to_the_duration_of_the_batches(registry: CollectorRegistry, merge_metrics: MergeMetrics) -> None:
    merge_metrics.observe(result(seconds={"prepare": 0.25, "merge": 1.5, "backoff": 2.0, "other": 0.125}))

    phases = sum(value(registry, "phase_seconds_total", phase=phase) or 0 for phase in PHASES)
    assert phases == value(registry, "batch_duration_seconds_sum") == 3.875
    assert value(registry, "batch_duration_seconds_count") == 1


def test_the_duration_histogram_reaches_from_a_hundredth_of_a_second_to_an_hour(
    registry: CollectorRegistry, merge_metrics: MergeMetrics
) -> None:
    """Bounds are inclusive, counts cumulate, and longer than an hour is still counted."""
    for seconds in (0.01, 0.02, 3600.0, 9999.0):
        merge_metrics.observe(result(seconds={"merge": seconds}))

    bucket = "batch_duration_seconds_bucket"
    assert value(registry, bucket, le="0.01") == 1
    assert value(registry, bucket, le="0.025") == 2
    assert value(registry, bucket, le="1800.0") == 2
    assert value(registry, bucket, le="3600.0") == 3
    assert value(registry, bucket, le="+Inf") == 4


def test_every_raw_number_reaches_the_series_that_the_table_names(
    registry: CollectorRegistry, merge_metrics: MergeMetrics
) -> None:
    """Each raw name gets a number of its own, so that swapped rows of the table show."""
    raw = {name: 1000 + i for i, name in enumerate(sorted(DELTA_4_4_MERGE))}
    merge_metrics.observe(result(raw=raw))

    for delta_name, row in DELTA_MERGE_METRICS.items():
        if row.type == "histogram":
            assert registry.get_sample_value(f"{row.name}_sum", SINK) == pytest.approx(raw[delta_name] / 1000)
            assert registry.get_sample_value(f"{row.name}_count", SINK) == 1
        else:
            assert registry.get_sample_value(row.name, SINK) == pytest.approx(raw[delta_name] * row.factor)
    assert value(registry, "target_rows_copied_total") == raw["numTargetRowsCopied"]
    assert value(registry, "target_added_bytes_total") == raw["numTargetBytesAdded"]
    assert value(registry, "source_rows_total") == raw["operationNumSourceRows"]
    assert value(registry, "unknown_delta_metrics_total") == 0


def test_numbers_of_several_merges_add_up(registry: CollectorRegistry, merge_metrics: MergeMetrics) -> None:
    merge_metrics.observe(result(raw={"numTargetFilesAdded": 2}))
    merge_metrics.observe(result(raw={"numTargetFilesAdded": 3}))

    assert value(registry, "target_files_added_total") == 5


def test_a_step_that_a_merge_did_not_have_is_no_observation(
    registry: CollectorRegistry, merge_metrics: MergeMetrics
) -> None:
    """Zeros would pull the quantiles of the merges that were timed."""
    merge_metrics.observe(result(raw={"executionTimeMs": 0}))
    merge_metrics.observe(result(raw={"executionTimeMs": 1500}))

    assert value(registry, "merge_execution_seconds_count") == 1
    assert value(registry, "merge_execution_seconds_sum") == 1.5


def test_a_counter_never_falls_whatever_an_engine_reports(
    registry: CollectorRegistry, merge_metrics: MergeMetrics
) -> None:
    merge_metrics.observe(result(raw={"numTargetFilesAdded": 4}))
    merge_metrics.observe(result(raw={"numTargetFilesAdded": -1, "executionTimeMs": -1}))

    assert value(registry, "target_files_added_total") == 4
    assert value(registry, "merge_execution_seconds_count") == 0


def test_a_number_that_delta_adds_is_counted_and_named_once_in_the_log(
    registry: CollectorRegistry, merge_metrics: MergeMetrics, caplog: pytest.LogCaptureFixture
) -> None:
    """A newer Delta must not stop a stream, and must not go unnoticed."""
    with caplog.at_level(logging.WARNING):
        merge_metrics.observe(result(raw={"numTargetUnicorns": 1, "numTargetRowsInserted": 2}))
        merge_metrics.observe(result(raw={"numTargetUnicorns": 1}))

    assert value(registry, "unknown_delta_metrics_total") == 2
    assert value(registry, "target_rows_inserted_total") == 2
    assert [record.getMessage() for record in caplog.records] == [
        "stream_merge.unknown_delta_metric delta_metric=numTargetUnicorns"
    ]


def test_a_metric_that_cannot_be_computed_does_not_fail_the_batch(
    registry: CollectorRegistry, merge_metrics: MergeMetrics, caplog: pytest.LogCaptureFixture
) -> None:
    """The merge is committed by then; an error would deliver an applied batch again."""
    merge_metrics.observe(result(raw={"numTargetRowsInserted": None}))  # type: ignore[dict-item]

    assert [record.getMessage() for record in caplog.records] == ["stream_merge.metrics_error"]
    assert value(registry, "batches_total", outcome="committed") is None
    merge_metrics.observe(result())
    assert value(registry, "batches_total", outcome="committed") == 1


def test_attempts_conflicts_and_backoff_show_while_the_batch_still_runs(
    registry: CollectorRegistry, merge_metrics: MergeMetrics
) -> None:
    merge_metrics.attempt(**SINK)
    merge_metrics.conflict(**SINK, conflict="ConcurrentAppendException")
    merge_metrics.backoff(**SINK, seconds=0.75)
    merge_metrics.attempt(**SINK)

    assert value(registry, "attempts_total") == 2
    assert value(registry, "conflicts_total", conflict="ConcurrentAppendException") == 1
    assert value(registry, "backoff_seconds_total") == 0.75
    assert value(registry, "batches_total", outcome="committed") == 0


def test_the_end_of_a_batch_counts_no_attempt_or_conflict_twice(
    registry: CollectorRegistry, merge_metrics: MergeMetrics
) -> None:
    merge_metrics.attempt(**SINK)
    merge_metrics.conflict(**SINK, conflict="ConcurrentAppendException")
    merge_metrics.observe(result(attempts=2, conflicts={"ConcurrentAppendException": 1}))

    assert value(registry, "attempts_total") == 1
    assert value(registry, "conflicts_total", conflict="ConcurrentAppendException") == 1


def test_a_conflict_class_that_nobody_knows_makes_no_new_series(
    registry: CollectorRegistry, merge_metrics: MergeMetrics
) -> None:
    """Labels are bounded, even if an exception class is made up."""
    merge_metrics.conflict(**SINK, conflict="SomethingNewException")
    merge_metrics.conflict(**SINK, conflict="SomethingElseException")

    assert value(registry, "conflicts_total", conflict="other") == 2
    assert value(registry, "conflicts_total", conflict="SomethingNewException") is None


def test_a_commit_moves_version_and_time_and_nothing_else_does(
    registry: CollectorRegistry, merge_metrics: MergeMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of the commit is exported, not an age: an age would stand still when the process hangs."""
    monkeypatch.setattr("stream_merge.metrics.instruments.time.time", lambda: 1_800_000_000.5)
    merge_metrics.observe(result(version=7))
    monkeypatch.setattr("stream_merge.metrics.instruments.time.time", lambda: 1_800_000_099.0)
    merge_metrics.observe(result(outcome="empty", version=None))

    assert value(registry, "last_committed_version") == 7
    assert value(registry, "last_commit_timestamp_seconds") == 1_800_000_000.5


def test_a_first_batch_that_commits_and_changes_no_row_moves_them_too(
    registry: CollectorRegistry, merge_metrics: MergeMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A query's first batch at a table commits its id alone where there is nothing to change."""
    monkeypatch.setattr("stream_merge.metrics.instruments.time.time", lambda: 1_800_000_000.5)
    merge_metrics.observe(result(outcome="no_change", version=8))

    assert value(registry, "last_committed_version") == 8
    assert value(registry, "last_commit_timestamp_seconds") == 1_800_000_000.5


def test_what_readers_pay_is_as_after_the_last_merge_on_read(
    registry: CollectorRegistry, merge_metrics: MergeMetrics
) -> None:
    """A call that was none tells nothing of it."""
    for debt in (
        ReadDebt(rows=10, deleted_rows=9, awaiting_files=4),
        ReadDebt(rows=200, deleted_rows=50, awaiting_files=9),
        None,
    ):
        merge_metrics.observe(result(read_debt=debt))

    assert value(registry, "target_deleted_rows_ratio") == 0.25
    assert value(registry, "target_files_awaiting_compaction") == 9
    merge_metrics.observe(result(read_debt=ReadDebt(rows=0, deleted_rows=0, awaiting_files=0)))
    assert value(registry, "target_deleted_rows_ratio") == 0


def test_two_sinks_on_one_registry_keep_their_numbers_apart(registry: CollectorRegistry) -> None:
    MergeMetrics(registry=registry).attempt("q", "orders")
    MergeMetrics(registry=registry).attempt("q", "customers")
    MergeMetrics(registry=registry).attempt("q", "customers")

    name = "stream_merge_attempts_total"
    assert registry.get_sample_value(name, {"query": "q", "target": "orders"}) == 1
    assert registry.get_sample_value(name, {"query": "q", "target": "customers"}) == 2


def test_two_registries_share_nothing(registry: CollectorRegistry, merge_metrics: MergeMetrics) -> None:
    other = CollectorRegistry()
    MergeMetrics(registry=other).attempt(**SINK)

    assert value(registry, "attempts_total") is None
    assert value(other, "attempts_total") == 1


def test_a_registry_is_not_kept_alive_by_its_metrics() -> None:
    """Thousands of short-lived registries, as in a test suite, are collected."""
    before = len(instruments._BY_REGISTRY)
    MergeMetrics(registry=CollectorRegistry())
    gc.collect()

    assert len(instruments._BY_REGISTRY) <= before


def test_a_registry_that_already_has_our_names_says_so_at_once(registry: CollectorRegistry) -> None:
    Counter("stream_merge_attempts", "Not ours.", registry=registry)

    with pytest.raises(ValueError, match="stream_merge_attempts"):
        MergeMetrics(registry=registry)


def test_threads_lose_no_count(registry: CollectorRegistry, merge_metrics: MergeMetrics) -> None:
    """Sinks run on threads of one process."""

    def work() -> None:
        for _ in range(200):
            merge_metrics.observe(result(events=EventCounts(received=2, inserted=1, updated=1)))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert value(registry, "events_received_total") == 3200
    assert value(registry, "events_total", fate="inserted") == 1600


def test_a_scrape_never_sees_half_a_batch(registry: CollectorRegistry, merge_metrics: MergeMetrics) -> None:
    """The ledger adds up in every scrape, also in one that runs while batches end."""
    done = threading.Event()

    def work() -> None:
        while not done.is_set():
            merge_metrics.observe(result(events=EventCounts(received=7, **dict.fromkeys(FATES, 1))))

    merge_metrics.prepare(**SINK)
    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(50):
            families = {family.name: family.samples for family in registry.collect()}
            [received] = families["stream_merge_events_received"]
            assert received.value == sum(sample.value for sample in families["stream_merge_events"])
    finally:
        done.set()
        thread.join()


def test_a_label_of_undecodable_bytes_does_not_break_the_scrape(registry: CollectorRegistry) -> None:
    """Paths can hold lone surrogates; one such target must not hide the metrics of the whole process."""
    MergeMetrics(registry=registry).attempt("q", "orders\udcff")

    assert b'target="orders?"' in generate_latest(registry)


def test_a_label_is_one_value_whatever_it_holds(registry: CollectorRegistry) -> None:
    """A name cannot end its label, its line or its series."""
    name = 'a"} 1\nb{c="\\\\d\\n\r\x1b[31m\u2028'

    MergeMetrics(registry=registry).attempt(name, name)

    for parsed in (
        parse_text(generate_latest(registry).decode()),
        parse_openmetrics(generate_openmetrics(registry).decode()),
    ):
        labels = [sample.labels for family in parsed for sample in family.samples]
        assert {(found["query"], found["target"]) for found in labels} == {(name, name)}


def test_both_exposition_formats_are_valid_and_hold_no_created_series(
    registry: CollectorRegistry, merge_metrics: MergeMetrics
) -> None:
    merge_metrics.observe(result(raw={"executionTimeMs": 20}, seconds={"merge": 0.02}))

    text = list(parse_text(generate_latest(registry).decode()))
    openmetrics = list(parse_openmetrics(generate_openmetrics(registry).decode()))  # type: ignore[no-untyped-call]
    assert len(text) == len(openmetrics) == len(CATALOGUE)
    assert not [s.name for family in openmetrics for s in family.samples if s.name.endswith("_created")]


def test_a_scrape_over_http_gives_what_was_counted(registry: CollectorRegistry, merge_metrics: MergeMetrics) -> None:
    """Names, types, help and labels arrive as the catalogue states them."""
    merge_metrics.observe(result(version=12, events=EventCounts(received=5, inserted=4, stale=1)))

    with serve(port=0, registry=registry) as server:
        assert server.url == f"http://127.0.0.1:{server.port}/metrics"
        with urllib.request.urlopen(server.url, timeout=10) as response:  # a loopback URL of ours
            families = {family.name: family for family in parse_text(response.read().decode())}
        for path in ("", "healthz", "metrics/"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(f"http://127.0.0.1:{server.port}/{path}", timeout=10)

    assert set(families) == {instrument.name.removesuffix("_total") for instrument in CATALOGUE}
    for instrument in CATALOGUE:
        family = families[instrument.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (instrument.type, instrument.help)
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(instrument.labels)
            assert math.isfinite(sample.value)
    [version] = families["stream_merge_last_committed_version"].samples
    assert (version.labels, version.value) == (SINK, 12.0)
    fates = {s.labels["fate"]: s.value for s in families["stream_merge_events"].samples if s.value}
    assert fates == {"inserted": 4, "stale": 1}


def test_a_closed_server_frees_its_port_and_may_be_closed_again(registry: CollectorRegistry) -> None:
    server = serve(port=0, registry=registry)
    server.close()
    server.close()

    with serve(port=server.port, registry=registry) as again:
        assert again.port == server.port


def test_a_busy_port_is_one_sentence_with_a_remedy(registry: CollectorRegistry) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            serve(port=port, registry=registry)

    assert str(caught.value) == (
        f"[METRICS_PORT_UNAVAILABLE] cannot serve metrics on 127.0.0.1:{port}: Address already in use; choose another"
        " port, or 0 for a free one"
    )


def test_an_impossible_port_is_a_config_error(registry: CollectorRegistry) -> None:
    with pytest.raises(ConfigError, match=r"cannot serve metrics on 127\.0\.0\.1:70000: "):
        serve(port=70000, registry=registry)


def test_importing_registers_nothing_and_the_default_is_made_once() -> None:
    """The registry of the host application is touched by the first sink, not by an import."""
    program = """
from concurrent.futures import ThreadPoolExecutor
from prometheus_client import REGISTRY
import stream_merge.metrics.instruments as m

def ours():
    return sorted(f.name for f in REGISTRY.collect() if f.name.startswith("stream_merge"))

assert ours() == [], ours()
with ThreadPoolExecutor(8) as pool:
    made = {id(x) for x in pool.map(lambda _: m.default_metrics(), range(64))}
assert len(made) == 1, made
assert len(ours()) == len(m.M.CATALOGUE)
m.MergeMetrics().attempt("q", "t")
assert REGISTRY.get_sample_value("stream_merge_attempts_total", {"query": "q", "target": "t"}) == 1
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 0, done.stderr
