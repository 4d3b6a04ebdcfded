"""Files of deployments that are not run here: the programs that read them accept them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import services
import shop
import yaml
from services import ROOT, prometheus

from stream_merge.jobs.kafka.settings import load

DEPLOYMENTS = ROOT / "deployments"


@pytest.fixture(scope="module")
def composed() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOYMENTS / "compose.yaml").read_text())
    return found


def test_every_file_that_compose_mounts_is_there(composed: dict[str, Any]):
    mounted = [volume for service in composed["services"].values() for volume in service.get("volumes", ())]
    files = [DEPLOYMENTS / volume.split(":")[0] for volume in mounted if volume.startswith(".")]

    assert len(files) >= 7
    assert [str(file) for file in files if not file.exists()] == []
    assert {volume.split(":")[0] for volume in mounted if not volume.startswith(".")} == set(composed["volumes"])
    assert (DEPLOYMENTS / composed["services"]["job"]["build"]["context"] / "deployments/Dockerfile").exists()


def test_compose_names_versions_passwords_of_nobody_and_loopback_alone(composed: dict[str, Any]):
    text = (DEPLOYMENTS / "compose.yaml").read_text()
    services = composed["services"]

    assert [name for name, service in services.items() if not re.search(r":v?\d+\.\d+", service["image"])] == []
    assert re.findall(r"PASSWORD: (?!\"?\$\{\w+:\?)", text) == []
    ports = [port for service in services.values() for port in service.get("ports", ())]
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []
    needed = {needed for service in services.values() for needed in service.get("depends_on", ())}
    assert [name for name in needed - {"connector"} if "healthcheck" not in services[name]] == []


def test_compose_connects_the_job_with_its_source(composed: dict[str, Any]):
    job = load(DEPLOYMENTS / "compose" / "job.yaml")
    connector = json.loads((DEPLOYMENTS / "compose" / "connector.json").read_text())
    kafka = composed["services"]["kafka"]["environment"]

    (query,) = job.queries
    assert query.topic == (f"{connector['topic.prefix']}.{connector['table.include.list']}",)
    assert f"INSIDE://{job.kafka.bootstrap}," in kafka["KAFKA_ADVERTISED_LISTENERS"]
    assert composed["services"]["connect"]["environment"]["BOOTSTRAP_SERVERS"] == job.kafka.bootstrap
    assert job.metrics.host == "0.0.0.0"
    assert {place.split("/")[1] for place in (query.target, query.checkpoint)} == {"data"}


def test_prometheus_and_alertmanager_accept_their_files(tmp_path: Path):
    prometheus.need_alertmanager()
    for file in (DEPLOYMENTS / "compose" / "prometheus.yml", ROOT / "grafana" / "alerts.yaml"):
        shutil.copy(file, tmp_path)

    assert prometheus.promtool("check", "config", "prometheus.yml", folder=tmp_path) == ""
    assert prometheus.amtool("check-config", prometheus.ALERTMANAGER_FILE, folder=tmp_path) == ""


def test_make_shop_has_the_same_job_and_alerts(tmp_path: Path):
    """Its processes read the files of the composition."""
    prometheus.need_alertmanager()
    (tmp_path / "job.yaml").write_text(shop.job("127.0.0.1:9092"))
    monitoring = shop.Monitoring(tmp_path / "monitoring")
    monitoring.start()

    def answer(about: str) -> Any:
        with urllib.request.urlopen(f"http://{monitoring.prometheus}/api/v1/{about}", timeout=30) as found:
            return json.load(found)["data"]

    try:
        services.wait_until(lambda: answer("targets")["activeTargets"], "Prometheus has a target")
        services.wait_until(lambda: answer("alertmanagers")["activeAlertmanagers"], "and an Alertmanager")
        scraped, rules = answer("targets")["activeTargets"], answer("rules")["groups"]
        (manager,) = answer("alertmanagers")["activeAlertmanagers"]
    finally:
        monitoring.stop()

    job = load(tmp_path / "job.yaml")
    assert [target["scrapeUrl"] for target in scraped] == [f"http://{job.metrics.host}:{job.metrics.port}/metrics"]
    assert manager["url"] == f"http://{monitoring.alertmanager}/api/v2/alerts"
    assert len(rules) >= 2
    assert job.queries[0].target == str(tmp_path / "tables" / "orders")


def test_systemd_accepts_the_unit(tmp_path: Path):
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not there")
    text = (DEPLOYMENTS / "stream-merge@.service").read_text()
    unit = text.replace("/opt/stream-merge/bin/stream-merge", sys.executable)  # it wants the program to be there
    (tmp_path / "stream-merge@orders.service").write_text(unit)

    done = subprocess.run(
        [program, "verify", "stream-merge@orders.service"], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    said = [line for line in done.stderr.splitlines() if "stream-merge" in line]  # not of this machine's own units
    assert said == []
