"""The project's Alertmanager file: who is told what, and what is silent. Needs no JVM: seconds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import services
import yaml
from dashboards import alerts
from services import prometheus
from services.prometheus import ALERTMANAGER_FILE, Alertmanager, Prometheus

NAMES = [alert.name for alert in alerts.ALERTS]
SEVERITY = {alert.name: alert.severity for alert in alerts.ALERTS}
SINK = {"job": "stream-merge", "instance": "a", "query": "orders", "target": "orders"}


def firing(name: str, **labels: str) -> dict[str, str]:
    return {"alertname": name, "severity": SEVERITY[name], **SINK, **labels}


@pytest.fixture
def alertmanager(tmp_path: Path) -> Iterator[Alertmanager]:
    prometheus.need_alertmanager()
    server = Alertmanager(tmp_path / "alertmanager")
    with services.running(server):
        yield server


def silent(alertmanager: Alertmanager) -> set[tuple[str, str, str]]:
    """Name, process and query of each alert that nobody is told."""
    labels = [labels for labels, is_silent in alertmanager.alerts() if is_silent]
    return {(one["alertname"], one["instance"], one["query"]) for one in labels}


def test_amtool_takes_the_file(tmp_path: Path) -> None:
    prometheus.need_alertmanager()

    assert prometheus.amtool("check-config", ALERTMANAGER_FILE, folder=tmp_path) == ""


def test_every_alert_that_the_file_names_exists() -> None:
    config: dict[str, Any] = yaml.safe_load(ALERTMANAGER_FILE.read_text())
    matchers = [m for rule in config["inhibit_rules"] for m in (*rule["source_matchers"], *rule["target_matchers"])]

    for matcher in matchers:
        pattern = re.fullmatch(r'alertname(?:=|!=|=~)"(.+)"', matcher)
        assert pattern is not None
        for part in pattern[1].split("|"):
            assert any(re.fullmatch(part, name) for name in NAMES), part


def test_critical_alerts_wake_somebody_and_warnings_wait(alertmanager: Alertmanager) -> None:
    """Each alert on a query of its own, so that none is silent beside another."""
    alertmanager.post(*(firing(name, instance=name, query=name) for name in NAMES))
    services.wait_until(lambda: set().union(*alertmanager.sent.values()) == set(NAMES), "all alerts were sent")

    assert alertmanager.sent == {
        "on-call": {name for name in NAMES if SEVERITY[name] == "critical"},
        "working-day": {name for name in NAMES if SEVERITY[name] == "warning"},
    }


@pytest.mark.parametrize(
    ("cause", "others"),
    {
        "ProcessDown": [name for name in NAMES if name != "ProcessDown"],
        "BrokerSilent": ["Stuck", "LagGrows", "FreshnessBurnsFast", "FreshnessBurnsSlow", "BatchesFail"],
        "QueryEnded": ["Stuck", "LagGrows", "FreshnessBurnsFast", "FreshnessBurnsSlow", "BatchesFail"],
        "Stuck": ["LagGrows", "FreshnessBurnsFast", "FreshnessBurnsSlow"],
        "RetriesExhausted": ["BatchesFail"],
        "QuarantineGrows": ["EventsQuarantined"],
    }.items(),
)
def test_what_follows_from_another_alert_is_silent(alertmanager: Alertmanager, cause: str, others: list[str]) -> None:
    """Of the same query, or of the same process where that is gone; elsewhere it is told."""
    alertmanager.post(firing(cause), *(firing(name) for name in others))
    alertmanager.post(firing(others[0], instance="b"), firing(others[0], query="customers"))
    services.wait_until(lambda: len(alertmanager.alerts()) == 3 + len(others), "all alerts are there")

    beside = {(others[0], "a", "customers")} if cause == "ProcessDown" else set()
    assert silent(alertmanager) == {(name, "a", "orders") for name in others} | beside


def test_a_process_that_is_gone_is_told_by_a_real_prometheus(alertmanager: Alertmanager, tmp_path: Path) -> None:
    """From a scrape that fails to the one who is on call."""
    target = f"127.0.0.1:{services.free_port()}"
    rules = tmp_path / "rules.yml"
    groups = alerts.rule_groups()
    for rule in groups["groups"][1]["rules"]:
        rule["for"] = "0s"
    rules.write_text(yaml.safe_dump(groups))
    scraper = Prometheus(
        tmp_path / "prometheus",
        job="stream-merge",
        target=target,
        scrape_seconds=1,
        rules=rules,
        alertmanager=alertmanager.address,
    )
    with services.running(scraper):
        services.wait_until(lambda: "ProcessDown" in alertmanager.sent.get("on-call", ()), "somebody was told")

    ((labels, _),) = alertmanager.alerts()
    assert (labels["alertname"], labels["instance"]) == ("ProcessDown", target)
