"""The alerts of the rule file, over an hour of a job's metrics. Needs promtool, no JVM: seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
from dashboards import ALERTS_FILE, alerts
from services import prometheus

GONE, RESTARTS, ENDED, STUCK = "ProcessDown", "RestartLoop", "QueryEnded", "Stuck"
BROKER, FAILED, BROKEN, MISSING = "BrokerSilent", "BatchesFail", "EventsQuarantined", "RecordsMissing"
ONE = 'job="stream-merge", instance="a"'
QUERY = f'{ONE}, query="orders", target="orders"'
TOPIC = f'{QUERY}, topic="t"'
LAG = f"stream_merge_topic_lag_events{{{TOPIC}}}"
POLLED = f"stream_merge_topic_polled_timestamp_seconds{{{TOPIC}}}"
START = f"process_start_time_seconds{{{ONE}}}"
COMMIT = f"stream_merge_last_commit_timestamp_seconds{{{QUERY}}}"
BATCHES_COMMITTED = f'stream_merge_batches_total{{{QUERY}, outcome="committed"}}'
BATCHES_WITHOUT_CHANGE = f'stream_merge_batches_total{{{QUERY}, outcome="no_change"}}'
BATCHES_OF_ANOTHER = BATCHES_COMMITTED.replace("orders", "customers")
BATCHES_FAILED = f'stream_merge_batches_total{{{QUERY}, outcome="failed"}}'
EVENTS_BROKEN = f'stream_merge_quarantined_events_total{{{QUERY}, reason="undecodable"}}'
GAPS = f"stream_merge_topic_unexpected_gaps_total{{{TOPIC}}}"
UP = f"up{{{ONE}}}"
ALWAYS = {UP: "1x240"}
"""An hour of scrapes, 15 seconds apart. promtool's clock begins at 0, which is a minute after the process here."""
SINCE_LONG = {START: "-3600x240"}
FRESH = {POLLED: "1+15x240"}
"""The broker answers before each scrape."""


def every_five(first: int, last: int) -> list[int]:
    return list(range(first, last + 1, 5))


CASES: dict[str, tuple[dict[str, str], dict[str, list[int]]]] = {
    "a busy job": (
        {**ALWAYS, **SINCE_LONG, **FRESH, LAG: "0 5 0 7 0 3 0x235", BATCHES_COMMITTED: "0+1x240"},
        {},
    ),
    "a quiet topic, and one event after half an hour": (
        {**ALWAYS, **SINCE_LONG, **FRESH, LAG: "0x119 1 0x120", BATCHES_COMMITTED: "7x120 8x120"},
        {},
    ),
    "a job that has just begun to read a long topic": (
        {
            UP: "_x100 1x140",
            START: "_x100 1500x140",
            POLLED: "_x100 1500+15x140",
            LAG: "_x100 5000x140",
            BATCHES_COMMITTED: "_x100 0x140",
        },
        {GONE: every_five(5, 20), STUCK: every_five(40, 55)},
    ),
    "a job that is stuck from minute 10 on": (
        {**ALWAYS, **SINCE_LONG, **FRESH, LAG: "0x40 5+1x200", BATCHES_COMMITTED: "0+1x40 40x200"},
        {STUCK: every_five(30, 55)},
    ),
    "a topic that is read again under a new checkpoint, where no batch changes a row": (
        {
            **ALWAYS,
            **SINCE_LONG,
            **FRESH,
            LAG: "900000-1000x240",
            COMMIT: "1x240",
            BATCHES_COMMITTED: "1x240",
            BATCHES_WITHOUT_CHANGE: "0+1x240",
        },
        {},
    ),
    "a job that has been behind for an hour, and whose batches fail": (
        {**ALWAYS, **SINCE_LONG, **FRESH, LAG: "5x240", BATCHES_COMMITTED: "0x240", BATCHES_FAILED: "0+1x240"},
        {STUCK: every_five(15, 55), FAILED: every_five(5, 55)},
    ),
    "a query that is stuck beside one that is busy": (
        {**ALWAYS, **SINCE_LONG, **FRESH, LAG: "5x240", BATCHES_COMMITTED: "3x240", BATCHES_OF_ANOTHER: "0+1x240"},
        {STUCK: every_five(15, 55)},
    ),
    "a broker that is away from minute 10 on, and a restart at minute 20": (
        {
            **ALWAYS,
            START: "-3600x80 1200x160",
            POLLED: "1+15x40 600x40 0x160",
            LAG: "0x80 _x160",
            BATCHES_COMMITTED: "0+1x80 0x160",
        },
        {BROKER: every_five(15, 55)},
    ),
    "a process that ends every five minutes": (
        {
            **ALWAYS,
            START: " ".join(f"{300 * n}x19" for n in range(12)),
            **FRESH,
            LAG: "5x240",
            BATCHES_COMMITTED: "0x240",
        },
        {RESTARTS: every_five(15, 55), STUCK: every_five(15, 55)},
    ),
    "batches that fail, broken events and gaps which the first batch counts before the first scrape, at minute 10": (
        {
            **ALWAYS,
            **SINCE_LONG,
            **FRESH,
            BATCHES_FAILED: "_x40 1x200",
            EVENTS_BROKEN: "_x40 5000x200",
            GAPS: "_x40 3x200",
        },
        {FAILED: [10, 15], BROKEN: [10, 15], MISSING: [10, 15]},
    ),
    "the same, counted between two scrapes": (
        {
            **ALWAYS,
            **SINCE_LONG,
            **FRESH,
            BATCHES_FAILED: "0x40 1x199",
            EVENTS_BROKEN: "0x40 5000x199",
            GAPS: "0x40 3x199",
        },
        {FAILED: [15, 20], BROKEN: [15, 20], MISSING: [15, 20]},
    ),
    "a query that has ended beside others": (
        {
            **ALWAYS,
            **SINCE_LONG,
            **FRESH,
            BATCHES_COMMITTED: "0x240",
            f"stream_merge_query_failed{{{QUERY}}}": "0x39 1x200",
        },
        {ENDED: every_five(10, 55)},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_one_is_woken_for_what_needs_somebody_and_for_nothing_else(case: str, tmp_path: Path) -> None:
    prometheus.need()
    series, fires = CASES[case]
    minutes = {alert.name: fires.get(alert.name, []) for alert in alerts.ALERTS}

    assert prometheus.asked(ALERTS_FILE, series, minutes=minutes, folder=tmp_path) == ""
