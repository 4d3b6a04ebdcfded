"""Each alert fires when it should, and stays silent beside it. Needs promtool, no JVM: seconds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from dashboards import ALERTS_FILE, alerts
from services import prometheus

ONE = 'job="stream-merge", instance="a"'
QUERY = f'{ONE}, query="orders", target="orders"'
TOPIC = f'{QUERY}, topic="t"'
HOURS = 7
STEPS = 60 * HOURS
"""One each minute. promtool's clock begins at 0, which is some hours after the process here."""


def of_query(name: str, *more: str) -> str:
    return f"stream_merge_{name}{{{', '.join((QUERY, *more))}}}"


UP, START = f"up{{{ONE}}}", f"process_start_time_seconds{{{ONE}}}"
LAG, NEWEST = (
    f"stream_merge_topic_lag_events{{{TOPIC}}}",
    f"stream_merge_topic_newest_event_timestamp_seconds{{{TOPIC}}}",
)
POLLED = f"stream_merge_topic_polled_timestamp_seconds{{{TOPIC}}}"
GAPS, LOST = f"stream_merge_topic_unexpected_gaps_total{{{TOPIC}}}", f"stream_merge_topic_lost_offsets_total{{{TOPIC}}}"
COMMITTED, FAILED = of_query("batches_total", 'outcome="committed"'), of_query("batches_total", 'outcome="failed"')
CONFLICTS = of_query("conflicts_total", 'conflict="ConcurrentAppendException"')
EXHAUSTED = of_query("retries_exhausted_total")
BROKEN = of_query("quarantined_events_total", 'reason="undecodable"')
SET_ASIDE, RECEIVED = of_query("events_total", 'fate="quarantined"'), of_query("events_received_total")
ENDED = of_query("query_failed")
BY_SPARK, BY_DRIVER = (of_query("merges_total", f'engine="{name}"') for name in ("spark", "driver"))
COLUMN, COST = (of_query("driver_refusals_total", f'refusal="{name}"') for name in ("column", "cost"))
SHARE, AWAITING = of_query("target_deleted_rows_ratio"), of_query("target_files_awaiting_compaction")
CERTIFICATE = of_query("certificate_expiry_timestamp_seconds", 'certificate="kafka"')
MAINTENANCE_FAILED, MAINTENANCE_DONE = (
    of_query("maintenance_total", f'maintenance="{name}"') for name in ("failed", "done")
)

HEALTHY = {
    UP: f"1x{STEPS}",
    START: f"-36000x{STEPS}",
    LAG: f"0 5 0 7x{STEPS}",
    NEWEST: f"1+60x{STEPS}",
    POLLED: f"1+60x{STEPS}",
    COMMITTED: f"0+10x{STEPS}",
    RECEIVED: f"0+1000x{STEPS}",
    BY_DRIVER: f"0+8x{STEPS}",
    MAINTENANCE_DONE: f"0+1x{STEPS}",
    MAINTENANCE_FAILED: f"0x{STEPS}",
    **dict.fromkeys(
        (
            GAPS,
            LOST,
            FAILED,
            CONFLICTS,
            EXHAUSTED,
            BROKEN,
            SET_ASIDE,
            ENDED,
            BY_SPARK,
            COLUMN,
            COST,
            SHARE,
            MAINTENANCE_FAILED,
        ),
        f"0x{STEPS}",
    ),
    AWAITING: f"3 9x{STEPS}",
    CERTIFICATE: f"2592000x{STEPS}",
}
"""A busy job in which nothing goes wrong."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What makes an alert fire, and what is near to it and does not; both on top of a healthy job."""

    fires: dict[str, str]
    at: int
    """Minute at which it fires; at minute 5 it does not."""
    quiet: dict[str, str]
    """Values of `""` are series that are not there."""


def from_hour(first: int, value: str) -> str:
    """A counter or gauge at 0, and then something else."""
    return f"0x{60 * first} {value}"


CASES = {
    "ProcessDown": Case(fires={UP: "1x59 0x360"}, at=62, quiet={START: f"-36000x59 3600x{STEPS}"}),
    "RestartLoop": Case(
        fires={START: f"-36000x59 3600x4 3900x4 4200x{STEPS}"},
        at=75,
        quiet={START: f"-36000x59 3600x4 3900x{STEPS}"},
    ),
    "MetricsAbsent": Case(
        fires={COMMITTED: "0x59 _x361", FAILED: "0x59 _x361"},
        at=90,
        # While Spark starts there is none yet.
        quiet={COMMITTED: "0x59 _x8 0x352", FAILED: "0x59 _x8 0x352"},
    ),
    "QueryEnded": Case(fires={ENDED: from_hour(1, "1x360")}, at=62, quiet={}),
    "Stuck": Case(
        fires={LAG: from_hour(1, "500x360"), COMMITTED: "0+10x59 590x360"},
        at=90,
        quiet={LAG: f"500x{STEPS}"},
    ),
    "LagGrows": Case(
        fires={LAG: from_hour(1, "2000+500x360")},
        at=120,
        # A backlog that is worked off, and one that comes and goes.
        quiet={LAG: "0x59 90000-1000x90 0x100 5000x10 0x160"},
    ),
    "FreshnessBurnsFast": Case(
        fires={LAG: from_hour(1, "500x360"), NEWEST: "1+60x59 3541x360"},
        at=90,
        # An idle topic has an old newest event.
        quiet={LAG: f"0x{STEPS}", NEWEST: f"1x{STEPS}"},
    ),
    "FreshnessBurnsSlow": Case(
        # Half an hour of six is old; one event that comes after a silence is not.
        fires={LAG: from_hour(3, "500x240"), NEWEST: "1+60x179 10741x45 16000+60x195"},
        at=220,
        quiet={LAG: "0x200 1x1 0x218", NEWEST: "1x202 12060x218"},
    ),
    "BrokerSilent": Case(
        fires={POLLED: "1+60x59 3541x360"},
        at=63,
        # One that describes the topics every half minute.
        quiet={LAG: f"0x{STEPS}", POLLED: f"-29+60x{STEPS}"},
    ),
    "BatchesFail": Case(fires={FAILED: from_hour(1, "1x360")}, at=63, quiet={CONFLICTS: f"0+1x{STEPS}"}),
    "RetriesExhausted": Case(
        fires={EXHAUSTED: from_hour(1, "1x360")},
        at=63,
        # Conflicts that a retry has won, and failures of other kinds.
        quiet={FAILED: from_hour(1, "1x360"), CONFLICTS: from_hour(1, "6x360")},
    ),
    "EventsQuarantined": Case(fires={BROKEN: from_hour(1, "1x360")}, at=63, quiet={BROKEN: f"7x{STEPS}"}),
    "QuarantineGrows": Case(
        fires={SET_ASIDE: from_hour(1, "0+200x360")}, at=90, quiet={SET_ASIDE: from_hour(1, "0+50x360")}
    ),
    "RecordsMissing": Case(fires={GAPS: from_hour(1, "3x360")}, at=63, quiet={GAPS: f"3x{STEPS}"}),
    "OffsetsLost": Case(fires={LOST: from_hour(1, "900x360")}, at=63, quiet={LOST: f"900x{STEPS}"}),
    "FallsBackToSpark": Case(
        fires={
            BY_DRIVER: "0+8x59 472x360",
            BY_SPARK: from_hour(1, "0+10x360"),
            COLUMN: from_hour(1, "0+10x360"),
        },
        at=90,
        # Spark is expected to be faster; or the table has never been merged in the driver.
        quiet={BY_SPARK: f"0+20x{STEPS}", COST: f"0+20x{STEPS}"},
    ),
    "DeletionVectorDebt": Case(
        fires={SHARE: from_hour(1, "0.4x360")},
        at=150,
        # Nobody writes any more, so that no newer number can come.
        quiet={SHARE: f"0.4x{STEPS}", BY_DRIVER: f"9x{STEPS}"},
    ),
    "CertificateExpires": Case(
        fires={CERTIFICATE: "1220000x420"},  # 14 days are 1,209,600 s, 10,400 s before that
        at=180,
        quiet={CERTIFICATE: f"0x{STEPS}"},  # there is none
    ),
    "MaintenanceFails": Case(
        fires={MAINTENANCE_DONE: f"4x{STEPS}", MAINTENANCE_FAILED: from_hour(1, "0+1x10 10x350")},
        at=90,
        quiet={MAINTENANCE_FAILED: f"0+1x{STEPS}"},
    ),
}
MORE_FIRES = {
    "files pile up": ("DeletionVectorDebt", Case(fires={AWAITING: from_hour(1, "10+5x360")}, at=180, quiet={})),
    "a process that discovery has lost": ("ProcessDown", Case(fires={UP: "1x59 _x361"}, at=66, quiet={})),
    "a topic that nobody answers for": ("BrokerSilent", Case(fires={POLLED: "1+60x59 0x360"}, at=63, quiet={})),
}
"""The other halves of expressions with two."""
MORE_QUIET = {
    "a table that only Spark can merge": (
        "FallsBackToSpark",
        {
            BY_DRIVER: f"0x{STEPS}",
            BY_SPARK: f"0+10x{STEPS}",
            COLUMN: f"0+10x{STEPS}",
        },
    ),
    "many files, but not more and more": ("DeletionVectorDebt", {AWAITING: f"90x{STEPS}"}),
    "one broken event of few": ("QuarantineGrows", {SET_ASIDE: from_hour(1, "1x360"), RECEIVED: from_hour(1, "5x360")}),
    "a new process that reads an old topic": (
        "FreshnessBurnsFast",
        {START: f"_x59 3600x{STEPS}", LAG: "_x59 90000-9000x10 0x350", NEWEST: "_x59 1x10 4200+60x350"},
    ),
}


def over(changes: dict[str, str]) -> dict[str, str]:
    return {name: values for name, values in {**HEALTHY, **changes}.items() if values}


def test_the_rule_file_is_one_that_prometheus_takes(tmp_path: Path) -> None:
    prometheus.need()

    assert prometheus.promtool("check", "rules", "--lint-fatal", ALERTS_FILE, folder=tmp_path) == ""


def test_nothing_fires_in_a_healthy_job(tmp_path: Path) -> None:
    prometheus.need()
    minutes: dict[str, list[int]] = {alert.name: [] for alert in alerts.ALERTS}

    assert prometheus.asked(ALERTS_FILE, HEALTHY, minutes=minutes, folder=tmp_path, step_seconds=60) == ""


def test_each_alert_has_its_case() -> None:
    assert list(CASES) == [alert.name for alert in alerts.ALERTS]


@pytest.mark.parametrize(("name", "case"), [*CASES.items(), *MORE_FIRES.values()], ids=[*CASES, *MORE_FIRES])
def test_an_alert_fires(name: str, case: Case, tmp_path: Path) -> None:
    prometheus.need()

    assert (
        prometheus.fires(ALERTS_FILE, over(case.fires), name=name, at={5: False, case.at: True}, folder=tmp_path) == ""
    )


@pytest.mark.parametrize(
    ("name", "quiet"),
    [*((name, case.quiet) for name, case in CASES.items()), *MORE_QUIET.values()],
    ids=[*CASES, *MORE_QUIET],
)
def test_an_alert_does_not_fire(name: str, quiet: dict[str, str], tmp_path: Path) -> None:
    prometheus.need()
    # What a counter has at the first scrape counts as new for ten minutes.
    every_second_minute = dict.fromkeys(range(12, STEPS, 2), False)

    assert prometheus.fires(ALERTS_FILE, over(quiet), name=name, at=every_second_minute, folder=tmp_path) == ""
