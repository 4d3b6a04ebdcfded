"""The dashboards as Grafana loads them, and the alerts as Prometheus does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import alerts

__all__ = ["ALERTS_FILE", "BOARDS", "GRAFANA", "alerts", "asked", "dashboard", "panels"]

GRAFANA = Path(alerts.__file__).parent
ALERTS_FILE = GRAFANA / "alerts.yaml"
BOARDS = ("overview", "query", "merge")


def dashboard(board: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((GRAFANA / "dashboards" / f"{board}.json").read_text(encoding="utf-8"))
    return loaded


def panels(board: str) -> list[dict[str, Any]]:
    return [panel for panel in dashboard(board)["panels"] if panel["type"] != "row"]


def asked(expression: str, *, scrape_seconds: int, range_seconds: int, chosen: dict[str, str] | None = None) -> str:
    """What Prometheus gets from Grafana with panels of a minute's interval; "All" for what is not chosen."""
    replaced = expression.replace("$__rate_interval", f"{60 + scrape_seconds}s")
    replaced = replaced.replace("$__range", f"{range_seconds}s")
    for variable in ("job", "query", "target"):
        value = (chosen or {}).get(variable, ".+")
        replaced = re.sub(rf'=(~?)"\${variable}"', rf'=\1"{value}"', replaced)
    assert "$" not in replaced, f"a variable that the dashboard does not define in {expression}"
    return replaced
