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


def program() -> Path:
    """Where Prometheus is; `promtool` lies beside it."""
    found = subprocess.run(
        [str(ROOT / "deployments" / "setup.sh"), "prometheus"], check=True, capture_output=True, text=True
    )
    return Path(found.stdout.strip())


def promtool(*arguments: str | Path, folder: Path) -> str:
    """What `promtool` says where it finds a mistake; empty where it finds none."""
    command = [str(program().with_name("promtool")), *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"{done.stdout}{done.stderr}"


def asked(
    rules: Path, series: dict[str, str], *, minutes: dict[str, list[int]], folder: Path, step_seconds: int = 15
) -> str:
    """What `promtool` says where alerts do not fire at exactly these minutes; empty where they do.

    Args:
        rules: a rule file.
        series: with labels -> values, one each step from minute 0 on, as promtool spells them.
        minutes: name of an alert -> those at which it fires; looked at are all that any alert names, and each fifth
            of the first hour.
        folder: for its files.
        step_seconds: between two values, and between two looks at the rules.
    """
    looked_at = sorted({*(minute for fires in minutes.values() for minute in fires), *range(0, 60, 5)})
    expected = [(name, minute, minute in fires) for name, fires in minutes.items() for minute in looked_at]
    return _said(rules, series, expected, folder, step_seconds)


def fires(rules: Path, series: dict[str, str], *, name: str, at: dict[int, bool], folder: Path) -> str:
    """What `promtool` says where an alert does not do at these minutes what is expected; empty where it does."""
    return _said(rules, series, [(name, minute, is_firing) for minute, is_firing in at.items()], folder, 60)


def _said(
    rules: Path, series: dict[str, str], expected: list[tuple[str, int, bool]], folder: Path, step_seconds: int
) -> str:
    counted = [
        {
            "expr": f"count(ALERTS{{alertname='{name}', alertstate='firing'}}) or vector(0)",
            "eval_time": f"{minute}m",
            "exp_samples": [{"labels": "{}", "value": int(is_firing)}],
        }
        for name, minute, is_firing in expected
    ]
    test = {
        "interval": f"{step_seconds}s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": counted,
    }
    content = {"rule_files": [str(rules)], "evaluation_interval": f"{step_seconds}s", "tests": [test]}
    (folder / "test.yml").write_text(json.dumps(content))
    return promtool("test", "rules", "test.yml", folder=folder)


class Prometheus:
    """Scrapes one job every other second."""

    def __init__(
        self, folder: Path, *, job: str, target: str, scrape_seconds: int = 2, rules: Path | None = None
    ) -> None:
        self.port = free_port()
        self.scrape_seconds = scrape_seconds
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "prometheus.yml").write_text(
            f"""
global:
  scrape_interval: {scrape_seconds}s
  scrape_timeout: {scrape_seconds}s
  evaluation_interval: {scrape_seconds}s
rule_files: {[str(rules)] if rules else []}
scrape_configs:
  - job_name: {job}
    static_configs:
      - targets: ["{target}"]
"""
        )
        options = {
            "config.file": folder / "prometheus.yml",
            "storage.tsdb.path": folder / "data",
            "web.listen-address": f"127.0.0.1:{self.port}",
        }
        command = [str(program()), *(f"--{name}={value}" for name, value in options.items())]
        self._server = Server(command, folder)

    def start(self) -> None:
        self._server.start(self._is_ready)

    def stop(self) -> None:
        self._server.stop()

    def instant(self, query: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each series now."""
        found = self._ask("query", query=query)["result"]
        return [(series["metric"], float(series["value"][1])) for series in found]

    def over_time(
        self, query: str, *, start: float, end: float
    ) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
        """Labels of each series and its points, as a graph shows them: what is not a number is no point."""
        found = self._ask("query_range", query=query, start=start, end=end, step=self.scrape_seconds)["result"]
        return [
            (
                series["metric"],
                [(float(time), float(value)) for time, value in series["values"] if math.isfinite(float(value))],
            )
            for series in found
        ]

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
