"""Write the Prometheus rule file `alerts.yaml` from the alerts below.

python grafana/alerts.py                write the rule file
python grafana/alerts.py --markdown     print the table of alerts for docs/operate/monitoring.md
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import yaml

RULES = Path(__file__).parent / "alerts.yaml"
RUNBOOK = "docs/operate/alerts.md"

Severity: TypeAlias = Literal["critical", "warning"]

JOB = 'job="stream-merge"'
SINK = "job, instance, query, target"
LAG = "stream_merge_topic_lag_events"
NEWEST = "stream_merge_topic_newest_event_timestamp_seconds"
POLLED = "stream_merge_topic_polled_timestamp_seconds"
CERTIFICATE = "stream_merge_certificate_expiry_timestamp_seconds"
CERTIFICATE_DAYS = 14
AWAITING = "stream_merge_target_files_awaiting_compaction"
BATCHES = "stream_merge_batches_total"
FAILED = f'{BATCHES}{{outcome="failed"}}'
RETURNED = f'{BATCHES}{{outcome!="failed"}}'
QUARANTINED = 'stream_merge_events_total{fate="quarantined"}'
REFUSALS = 'stream_merge_driver_refusals_total{refusal!="cost"}'
MAINTENANCE_FAILED, MAINTENANCE_DONE = (
    f'stream_merge_maintenance_total{{maintenance="{outcome}"}}' for outcome in ("failed", "done")
)
MERGES = "stream_merge_merges_total"
STALE = "topic:stream_merge_stale"

FRESH_SECONDS = 300
"""Age from which the newest merged event of a topic with lag is too old."""
FAST_BURN, SLOW_BURN = 0.144, 0.06
"""Shares of stale time: 14.4 and 6 times the 1 % that an objective of 99 % allows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Recording rule: a series that alerts ask for."""

    name: str
    expression: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Alert:
    """Alerting rule and its section in the runbook."""

    name: str
    expression: str
    severity: Severity
    """critical: somebody is needed now; warning: on the next working day."""
    summary: str
    wait: str = "0m"
    """How long the expression has to hold; most contain their time windows."""

    @property
    def anchor(self) -> str:
        """Heading of the runbook."""
        return self.name.lower()


def rise(counter: str, window: str = "10m") -> str:
    """Expression that holds where a counter rose, also where it was above 0 at its first scrape."""
    return f"increase({counter}[{window}]) > 0 or ({counter} > 0 unless {counter} offset {window})"


def increase(counter: str, window: str) -> str:
    """Increase of a counter, of each sink."""
    return f"sum by ({SINK}) (increase({counter}[{window}]))"


def runs_for(seconds: int) -> str:
    """Condition that a process is not a new one."""
    return f"on (job, instance) time() - process_start_time_seconds > {seconds}"


def burns(long: str, short: str, share: float) -> str:
    """Expression that holds where a topic is stale for too large a share of a long window, and still is."""
    return f"{STALE}:avg{long} > {share} and {STALE}:avg{short} > {share}"


RECORDS = (
    # An idle topic has no lag and is fresh, however old its newest event is.
    Record(
        name=f"{STALE}:bool",
        expression=f"(min_over_time({LAG}[5m]) > bool 0) * ({NEWEST} > bool 0)"
        f" * (time() - {NEWEST} > bool {FRESH_SECONDS}) and {runs_for(900)}",
    ),
    *(
        Record(name=f"{STALE}:avg{window}", expression=f"avg_over_time({STALE}:bool[{window}])")
        for window in ("5m", "30m", "1h", "6h")
    ),
)

ALERTS = (
    Alert(
        name="ProcessDown",
        expression=f"up{{{JOB}}} == 0 or absent(up{{{JOB}}})",
        wait="1m",
        severity="critical",
        summary="The process has ended, or service discovery lost it",
    ),
    Alert(
        name="RestartLoop",
        expression=f"changes(process_start_time_seconds{{{JOB}}}[30m]) > 2",
        severity="critical",
        summary="More than two restarts in 30 minutes",
    ),
    Alert(
        name="MetricsAbsent",
        expression=f"up{{{JOB}}} == 1 unless on (job, instance) {BATCHES}",
        wait="10m",
        severity="warning",
        summary="The process answers scrapes, but exports no query",
    ),
    Alert(
        name="QueryEnded",
        expression="stream_merge_query_failed > 0",
        severity="critical",
        summary="A query ended and needs a person; the job's other queries run on",
    ),
    Alert(
        name="Stuck",
        expression=f"sum by ({SINK}) ({LAG}) > 0"
        f" unless on ({SINK}) sum by ({SINK}) ({RETURNED}) > sum by ({SINK}) ({RETURNED} offset 1m)",
        wait="15m",
        severity="critical",
        summary="Behind for 15 minutes, and no batch succeeds",
    ),
    Alert(
        name="LagGrows",
        # Averages, because a micro-batch lowers the lag all at once; the wait is longer than both windows.
        expression=f"{LAG} > 1000 and avg_over_time({LAG}[5m]) > 1.05 * avg_over_time({LAG}[5m] offset 5m)",
        wait="15m",
        severity="warning",
        summary="The lag of a topic has grown for 15 minutes",
    ),
    Alert(
        name="FreshnessBurnsFast",
        expression=burns("1h", "5m", FAST_BURN),
        severity="critical",
        summary="A topic with lag was older than 5 minutes for more than 14 % of the last hour",
    ),
    Alert(
        name="FreshnessBurnsSlow",
        expression=burns("6h", "30m", SLOW_BURN),
        severity="warning",
        summary="A topic with lag was older than 5 minutes for more than 6 % of the last 6 hours",
    ),
    Alert(
        name="BrokerSilent",
        # At the scrape, so that its interval does not count; 0 is before the first answer.
        expression=f"timestamp({POLLED}) - {POLLED} > 30",
        wait="1m",
        severity="critical",
        summary="The broker has not answered for a minute, or does not describe a topic",
    ),
    Alert(
        name="BatchesFail",
        expression=rise(FAILED),
        severity="warning",
        summary="Batches failed in the last 10 minutes",
    ),
    Alert(
        name="RetriesExhausted",
        expression=rise("stream_merge_retries_exhausted_total"),
        severity="warning",
        summary="Other writers won every attempt of a commit",
    ),
    Alert(
        name="EventsQuarantined",
        expression=rise("stream_merge_quarantined_events_total"),
        severity="warning",
        summary="Broken events in the last 10 minutes",
    ),
    Alert(
        name="QuarantineGrows",
        expression=f"{increase(QUARANTINED, '15m')} > 0.1 * {increase('stream_merge_events_received_total', '15m')}"
        f" and {increase(QUARANTINED, '15m')} > 10",
        severity="critical",
        summary="More than a tenth of the events of 15 minutes are broken",
    ),
    Alert(
        name="RecordsMissing",
        expression=rise("stream_merge_topic_unexpected_gaps_total"),
        severity="critical",
        summary="Offsets are missing from a topic",
    ),
    Alert(
        name="OffsetsLost",
        expression=rise("stream_merge_topic_lost_offsets_total"),
        severity="critical",
        summary="The broker had removed offsets before they were read",
    ),
    Alert(
        name="FallsBackToSpark",
        expression=f"{increase(REFUSALS, '30m')} > 0.5 * {increase(MERGES, '30m')} and {increase(REFUSALS, '30m')} > 5"
        f""" and {increase(MERGES + '{engine!="spark"}', "1d")} > 0""",
        severity="warning",
        summary="Most merges of 30 minutes went to Spark, and others of the same day did not",
    ),
    Alert(
        name="DeletionVectorDebt",
        expression=f"(min_over_time(stream_merge_target_deleted_rows_ratio[1h]) > 0.3"
        f" or min_over_time({AWAITING}[1h]) > 64 and delta({AWAITING}[1h]) > 0)"
        f""" and on ({SINK}) {increase(MERGES + '{engine="driver"}', "1h")} > 0""",
        severity="warning",
        summary="Deleted rows or small files pile up in a table faster than compaction removes them",
    ),
    Alert(
        name="CertificateExpires",
        expression=f"({CERTIFICATE} > 0) - time() < {CERTIFICATE_DAYS} * 86400",
        severity="warning",
        summary=f"A certificate of the job expires within {CERTIFICATE_DAYS} days",
    ),
    Alert(
        name="MaintenanceFails",
        expression=f"{increase(MAINTENANCE_FAILED, '6h')} > 2 unless {increase(MAINTENANCE_DONE, '6h')} > 0",
        severity="warning",
        summary="No maintenance of a table has succeeded for 6 hours, and several runs failed",
    ),
)
"""Every alert; the rule file, both pages and the tests are compared with it."""


def rule_groups() -> dict[str, Any]:
    """The rule file as Prometheus loads it."""
    records = [{"record": record.name, "expr": record.expression} for record in RECORDS]
    alerts = [
        {
            "alert": alert.name,
            "expr": alert.expression,
            "for": alert.wait,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary, "runbook_url": f"{RUNBOOK}#{alert.anchor}"},
        }
        for alert in ALERTS
    ]
    return {
        "groups": [{"name": "stream-merge-records", "rules": records}, {"name": "stream-merge-alerts", "rules": alerts}]
    }


def rendered() -> str:
    """Text of the rule file."""
    head = f"# Written by grafana/alerts.py: edit that, then run `make alerts`. What to do: {RUNBOOK}\n"
    return head + yaml.safe_dump(rule_groups(), sort_keys=False, width=110)


def markdown() -> str:
    """Table of alerts, with links to their sections."""
    rows = ["| alert | severity | for | meaning |", "|---|---|---|---|"]
    rows += [
        f"| [{alert.name}](alerts.md#{alert.anchor}) | {alert.severity} | {alert.wait} | {alert.summary} |"
        for alert in ALERTS
    ]
    return "\n".join(rows)


def main() -> None:
    """Write the rule file, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true", help="print the table of alerts")
    if parser.parse_args().markdown:
        sys.stdout.write(f"{markdown()}\n")
    else:
        RULES.write_text(rendered(), encoding="utf-8")


if __name__ == "__main__":
    main()
