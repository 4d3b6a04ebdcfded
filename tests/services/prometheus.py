"""A Prometheus server that scrapes for a test, and the questions that Grafana puts to it."""

from __future__ import annotations

import json
import math
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from services import ROOT, Server, free_port

_FOUND = ROOT / ".jars" / "prometheus" / ".found"


def need() -> None:
    """Skip the test, with the reason, where there is no Prometheus."""
    if not _FOUND.exists():
        pytest.skip("Prometheus is not there; 'make test-all' gets it")


class Prometheus:
    """Scrapes one job every other second."""

    def __init__(self, folder: Path, *, job: str, target: str, scrape_seconds: int = 2) -> None:
        self.port = free_port()
        self.scrape_seconds = scrape_seconds
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "prometheus.yml").write_text(
            f"""
global: {{scrape_interval: {scrape_seconds}s, scrape_timeout: {scrape_seconds}s}}
scrape_configs:
  - job_name: {job}
    static_configs:
      - targets: ["{target}"]
"""
        )
        found = subprocess.run(
            [str(ROOT / "deployments" / "setup.sh"), "prometheus"], check=True, capture_output=True, text=True
        )
        options = {
            "config.file": folder / "prometheus.yml",
            "storage.tsdb.path": folder / "data",
            "web.listen-address": f"127.0.0.1:{self.port}",
        }
        command = [found.stdout.strip(), *(f"--{name}={value}" for name, value in options.items())]
        self._server = Server(command, folder)

    def start(self) -> None:
        self._server.start(self._is_ready)

    def stop(self) -> None:
        self._server.stop()

    def instant(self, query: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each series now."""
        found = self._ask("query", query=query)["result"]
        return [(series["metric"], float(series["value"][1])) for series in found]

    def over_time(self, query: str, *, start: float, end: float) -> list[list[float]]:
        """Of each series its numbers, as a graph shows them: what is not a number is no point."""
        found = self._ask("query_range", query=query, start=start, end=end, step=self.scrape_seconds)["result"]
        values = [[float(value) for _, value in series["values"]] for series in found]
        return [[value for value in of_series if math.isfinite(value)] for of_series in values]

    def label_values(self, selector: str, label: str) -> set[str]:
        """What Grafana offers for a variable `label_values(selector, label)`."""
        found: list[str] = self._ask(f"label/{label}/values", **{"match[]": selector})
        return set(found)

    def _ask(self, path: str, **parameters: Any) -> Any:
        address = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(address, timeout=30) as answer:
                found = json.load(answer)
        except urllib.error.HTTPError as err:
            msg = f"{parameters}: {err.read().decode(errors='replace')}"
            raise AssertionError(msg) from err
        assert found["status"] == "success", found
        assert not found.get("warnings"), found
        return found["data"]

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/ready", timeout=2) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False
