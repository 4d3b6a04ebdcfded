"""Prometheus and Alertmanager for a test, and the questions that Grafana puts to them."""

from __future__ import annotations

import json
import math
import subprocess
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from services import ROOT, Server, free_port

ALERTMANAGER_FILE = ROOT / "deployments" / "alertmanager.yml"
_FOUND = ROOT / ".jars" / "prometheus" / ".found"


def need() -> None:
    """Skip the test, with the reason, where there is no Prometheus."""
    if not _FOUND.exists():
        pytest.skip("Prometheus is not there; 'make test-all' gets it")


def need_alertmanager() -> None:
    """Skip the test, with the reason, where there is no Alertmanager."""
    need()
    try:
        _installed("alertmanager")
    except subprocess.CalledProcessError as err:
        pytest.skip(f"Alertmanager is not there: {err.stderr}")


def program() -> Path:
    """Where Prometheus is; `promtool` lies beside it."""
    return _installed("prometheus")


def alertmanager_program() -> Path:
    """Where Alertmanager is; `amtool` lies beside it."""
    return _installed("alertmanager")


def _installed(name: str) -> Path:
    found = subprocess.run([str(ROOT / "deployments" / "setup.sh"), name], check=True, capture_output=True, text=True)
    return Path(found.stdout.strip())


def promtool(*arguments: str | Path, folder: Path) -> str:
    """What `promtool` says where it finds a mistake; empty where it finds none."""
    return _complaint(program().with_name("promtool"), *arguments, folder=folder)


def amtool(*arguments: str | Path, folder: Path) -> str:
    """What `amtool` says where it finds a mistake; empty where it finds none."""
    return _complaint(alertmanager_program().with_name("amtool"), *arguments, folder=folder)


def _complaint(*command_line: str | Path, folder: Path) -> str:
    command = [*map(str, command_line)]
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
    """Scrapes one job every other second.

    Args:
        folder: for its configuration and data.
        job: name of the scrape job.
        target: address that it scrapes, or several.
        scrape_seconds: between two scrapes, and between two evaluations of rules.
        rules: a rule file; None: no rules.
        alertmanager: address that takes the alerts; None: nobody does.
    """

    def __init__(
        self,
        folder: Path,
        *,
        job: str,
        target: str | Sequence[str],
        scrape_seconds: int = 2,
        rules: Path | None = None,
        alertmanager: str | None = None,
    ) -> None:
        self.port = free_port()
        self.scrape_seconds = scrape_seconds
        folder.mkdir(parents=True, exist_ok=True)
        every = f"{scrape_seconds}s"
        targets = [target] if isinstance(target, str) else list(target)
        config: dict[str, Any] = {
            "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
            "rule_files": [] if rules is None else [str(rules)],
            "scrape_configs": [{"job_name": job, "static_configs": [{"targets": targets}]}],
        }
        if alertmanager is not None:
            config["alerting"] = {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]}
        (folder / "prometheus.yml").write_text(json.dumps(config))
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
        return is_ready(self.port)


class Alertmanager:
    """The project's Alertmanager, whose receivers tell a web server here which alerts they were sent."""

    def __init__(self, folder: Path, *, group_seconds: int = 1) -> None:
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.sent: dict[str, set[str]] = {}
        """Receiver -> names of the firing alerts that it was sent."""
        self._web = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        folder.mkdir(parents=True, exist_ok=True)
        config = yaml.safe_load(ALERTMANAGER_FILE.read_text(encoding="utf-8"))
        config["route"]["group_wait"] = config["route"]["group_interval"] = f"{group_seconds}s"
        for receiver in config["receivers"]:
            url = f"http://127.0.0.1:{self._web.server_port}/{receiver['name']}"
            receiver["webhook_configs"] = [{"url": url}]
        (folder / "alertmanager.yml").write_text(json.dumps(config))
        options = {
            "config.file": folder / "alertmanager.yml",
            "storage.path": folder / "data",
            "web.listen-address": self.address,
            "cluster.listen-address": "",
        }
        command = [str(alertmanager_program()), *(f"--{name}={value}" for name, value in options.items())]
        self._server = Server(command, folder)

    def start(self) -> None:
        threading.Thread(target=self._web.serve_forever, daemon=True).start()
        self._server.start(lambda: is_ready(self.port))

    def stop(self) -> None:
        self._server.stop()
        self._web.shutdown()
        self._web.server_close()

    def post(self, *alerts: dict[str, str]) -> None:
        """Send firing alerts with these labels, as Prometheus does."""
        body = json.dumps([{"labels": labels} for labels in alerts]).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://{self.address}/api/v2/alerts", data=body, headers=headers)
        urllib.request.urlopen(request, timeout=10).close()

    def alerts(self) -> list[tuple[dict[str, str], bool]]:
        """Labels of each alert that fires now, and whether it is silent beside another one."""
        with urllib.request.urlopen(f"http://{self.address}/api/v2/alerts", timeout=10) as answer:
            return [(alert["labels"], bool(alert["status"]["inhibitedBy"])) for alert in json.load(answer)]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        sent = self.sent

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                names = {alert["labels"]["alertname"] for alert in message["alerts"] if alert["status"] == "firing"}
                sent.setdefault(self.path.lstrip("/"), set()).update(names)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Stay silent."""

        return Handler


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False
