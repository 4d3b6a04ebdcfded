"""The dashboard as Grafana loads it, and the alerts as Prometheus does."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

GRAFANA = Path(__file__).parents[1] / "grafana"


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((GRAFANA / "stream-merge.json").read_text(encoding="utf-8"))
    return loaded


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


ALERTS_FILE = GRAFANA / "alerts.yaml"

_SPEC = importlib.util.spec_from_file_location("grafana_alerts", GRAFANA / "alerts.py")
assert _SPEC is not None
assert _SPEC.loader is not None
alerts = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = alerts  # dataclasses look their module up by name
_SPEC.loader.exec_module(alerts)
