"""The dashboard as Grafana loads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

GRAFANA = Path(__file__).parents[1] / "grafana"


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((GRAFANA / "stream-merge.json").read_text(encoding="utf-8"))
    return loaded


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
