"""Draws the dashboards into `docs/assets` from Prometheus' answers: `make pictures`.

    python docs/dashboard_pictures.py answers.json

`tests/process/test_prometheus.py` puts each panel's query to a real Prometheus beside a real job and writes the file.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any, TypeAlias

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator
from matplotlib.transforms import Bbox
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
CHOSEN = "orders"
"""The query of the dashboards that show one."""
UNIT_INCHES, WIDTH_INCHES = 0.245, 11.5
COLOURS = {"green": "#3d9a50", "orange": "#e08400", "red": "#d02f3a", "blue": "#3274d9", "text": "#24292e"}
UNITS = {"cps": "/s", "cpm": "/min", "Bps": "B/s", "bytes": "B", "short": "", "none": ""}

Series: TypeAlias = "list[tuple[dict[str, str], list[tuple[float, float]]]]"


def written(value: float, unit: str) -> str:
    """A number as Grafana writes it."""
    value = float(f"{value:.3g}") + 0.0  # -0 is 0
    if unit == "percentunit":
        return f"{100 * value:g} %"
    if unit == "s":
        return f"{value:g} s" if value >= 1 or value == 0 else f"{1000 * value:g} ms"
    return f"{value:g}{UNITS[unit]}" if value < 1 else EngFormatter(UNITS[unit], sep="")(value)


def colour(value: float, field: dict[str, Any]) -> str:
    """The colour of a number by its thresholds."""
    steps = field.get("thresholds", {"steps": []})["steps"]
    reached = [step["color"] for step in steps if step["value"] is None or value >= step["value"]]
    return COLOURS[reached[-1]] if len(steps) > 1 else COLOURS["text"]


def mapped(value: object, field: dict[str, Any]) -> tuple[str, str] | None:
    """Text and colour that the panel gives a value."""
    key = str(int(value)) if isinstance(value, float) else str(value)
    options = field["mappings"][0]["options"] if field.get("mappings") else {}
    return (options[key]["text"], COLOURS[options[key]["color"]]) if key in options else None


def graph(axes: Axes, panel: dict[str, Any], answers: list[tuple[dict[str, Any], Series]], start: float) -> None:
    """Lines, or stacked areas; what stays at 0 is left out."""
    field = panel["fieldConfig"]["defaults"]
    lines: dict[str, dict[float, float]] = {}
    for target, series in answers:
        for labels, found in series:
            name = target["legendFormat"]
            for label, text in labels.items():
                name = name.replace(f"{{{{{label}}}}}", text)
            if any(value for _, value in found):
                lines[name] = {(time - start) / 60: value for time, value in found}
    if field["custom"].get("stacking"):
        times = sorted({time for points in lines.values() for time in points})
        stacked = [[points.get(time, 0.0) for time in times] for points in lines.values()]
        if lines:
            axes.stackplot(times, stacked, labels=lines, alpha=0.75)
    else:
        for name, points in lines.items():
            axes.plot(list(points), list(points.values()), label=name, linewidth=1.1)
    axes.set_ylim(bottom=0, top=None if lines else 1)
    for step in field.get("thresholds", {"steps": []})["steps"][1:]:
        if step["value"] <= axes.get_ylim()[1]:
            axes.axhline(step["value"], color=COLOURS[step["color"]], linestyle="--", linewidth=0.9)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: written(value, field["unit"])))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda minutes, _: f"{minutes:g} min"))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.tick_params(labelsize=6.5, length=2)
    axes.grid(alpha=0.25, linewidth=0.5)
    if lines:
        columns = 60 // (max(map(len, lines)) + 3)
        axes.legend(fontsize=6, loc="upper left", bbox_to_anchor=(-0.03, -0.12), ncols=columns, frameon=False,
                    handlelength=1, columnspacing=1, labelspacing=0.25)  # fmt: skip
    else:
        axes.text(0.5, 0.5, "all at 0", transform=axes.transAxes, ha="center", color=COLOURS["green"], fontsize=9)


def table(axes: Axes, panel: dict[str, Any], answers: list[tuple[dict[str, Any], Series]]) -> None:
    """Rows of what has the same labels; a column for each label, then for each query."""
    names = panel["transformations"][1]["options"]["renameByName"]
    fields = {rule["matcher"]["options"]: {p["id"]: p["value"] for p in rule["properties"]}
              for rule in panel["fieldConfig"]["overrides"]}  # fmt: skip
    rows: dict[tuple[str, ...], dict[str, tuple[str, str]]] = {}
    ink = COLOURS["text"]
    for target, series in answers:
        title = target["legendFormat"]
        field = fields[title]
        for labels, points in series:
            shown = next((label for label in labels if names.get(label) == title), None)
            key = {label: text for label, text in labels.items() if label != shown}
            row = rows.setdefault(tuple(key[label] for label in sorted(key)), {k: (v, ink) for k, v in key.items()})
            if shown is not None:
                row[title] = mapped(labels[shown], field) or (labels[shown], ink)
            else:
                value = points[-1][1]
                row[title] = mapped(value, field) or (written(value, field["unit"]), colour(value, field))
    axes.axis("off")
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    cells = [[row.get(column, ("", ink)) for column in columns] for row in rows.values()]
    height = min(0.2, 0.95 / (len(rows) + 1)) * (len(rows) + 1)
    drawn = axes.table([[text for text, _ in line] for line in cells], colLabels=columns, cellLoc="left",
                       colLoc="left", edges="B", bbox=Bbox.from_bounds(0, 1 - height, 1, height))  # fmt: skip
    drawn.auto_set_font_size(False)
    drawn.set_fontsize(7.5)
    drawn.auto_set_column_width(list(range(len(columns))))
    for (line, column), cell in drawn.get_celld().items():
        cell.set_edgecolor("#d8dde3")
        own = cells[line - 1][column][1] if line else ink
        cell.get_text().set_color(own)
        cell.get_text().set_fontweight("bold" if not line or own != ink else "normal")


def number(axes: Axes, panel: dict[str, Any], answers: list[tuple[dict[str, Any], Series]]) -> None:
    """One large number."""
    field = panel["fieldConfig"]["defaults"]
    value = answers[0][1][0][1][-1][1]
    text, ink = mapped(value, field) or (written(value, field["unit"]), colour(value, field))
    axes.axis("off")
    axes.text(0.5, 0.42, text, transform=axes.transAxes, ha="center", va="center", fontsize=16, color=ink)


def draw(board: str, found: dict[str, Any]) -> None:
    """A dashboard's picture."""
    model = json.loads((ROOT / "grafana" / "dashboards" / f"{board}.json").read_text())
    heights = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in model["panels"]) + 2
    figure = plt.figure(figsize=(WIDTH_INCHES, heights * UNIT_INCHES), dpi=100)
    figure.text(0.01, 1 - 0.5 / heights, model["title"], fontsize=11, weight="bold", va="top")
    about = (
        "Drawn from Prometheus' answers, not a Grafana screenshot. Vertical lines: red = restart, blue = schema change"
    )
    figure.text(0.99, 1 - 0.6 / heights, about, fontsize=8, va="top", ha="right", color="#57606a")
    for panel in model["panels"]:
        grid = panel["gridPos"]
        top = 1 - (grid["y"] + 2) / heights
        if panel["type"] == "row":
            figure.text(0.01, top - 0.6 / heights, f"▾ {panel['title']}", fontsize=9.5, weight="bold", va="center")
            continue
        is_graph = panel["type"] == "timeseries"
        left, below = (1.0, 2.2) if is_graph else (0.3, 0.2)
        axes = figure.add_axes(
            ((grid["x"] + left) / 24, top - (grid["h"] - below) / heights,
             (grid["w"] - left - 0.3) / 24, (grid["h"] - below - 1.2) / heights)
        )  # fmt: skip
        axes.set_title(panel["title"], fontsize=8, loc="left", pad=3)
        answers = [
            (target, series)
            for title, query, target, series in found["panels"][board]
            if title == panel["title"] and query in (None, CHOSEN)
        ]
        if is_graph:
            graph(axes, panel, answers, found["start"])
            axes.set_xlim(0, (found["end"] - found["start"]) / 60)
            for mark in model["annotations"]["list"]:
                for _, points in found["marks"][mark["name"]]:
                    times = {value / 1000 for _, value in points} if mark["useValueForTime"] else {points[0][0]}
                    for time in times:
                        axes.axvline((time - found["start"]) / 60, color=COLOURS[mark["iconColor"]], linewidth=0.8)
        else:
            {"table": table, "stat": number}[panel["type"]](axes, panel, answers)
    drawn = io.BytesIO()
    figure.savefig(drawn)
    Image.open(drawn).convert("RGB").quantize(128).save(
        ROOT / "docs" / "assets" / f"dashboard-{board}.png", optimize=True
    )
    plt.close(figure)


def main() -> None:
    """Draw all dashboards."""
    found = json.loads(Path(sys.argv[1]).read_text())
    for board in found["panels"]:
        draw(board, found)


if __name__ == "__main__":
    main()
