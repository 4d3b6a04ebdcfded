"""Writes the parts of the reference that the code knows: metrics, alerts, the help of commands, confs of a session.

    python docs/generate.py [NAME ...]    all parts, or those of these names

They stand between `<!-- begin: NAME -->` and `<!-- end: NAME -->`; a test compares them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
COLUMNS = "110"


def metrics() -> str:
    """The table of all metrics."""
    from stream_merge.metrics.catalogue import CATALOGUE  # noqa: PLC0415  # PySpark is slow to load

    lines = ["| metric | type | labels beside `query`, `target` | what it says |", "|---|---|---|---|"]
    for instrument in CATALOGUE:
        values = ", ".join(f"`{value}`" for value in instrument.values)
        label = f"`{instrument.label}`{': ' if values else ''}{values}" if instrument.label else ""
        lines.append(f"| `{instrument.name}` | {instrument.type}, {instrument.unit} | {label} | {instrument.help} |")
    return "\n".join(lines)


def alerts() -> str:
    """The table of all alerts, as `grafana/alerts.py --markdown` prints it."""
    command = [sys.executable, "grafana/alerts.py", "--markdown"]
    return subprocess.run(command, cwd=DOCS.parent, capture_output=True, text=True, check=True).stdout.strip()


def commands() -> str:
    """What `--help` prints, command by command."""
    # Read when Typer's modules are loaded, so a process of its own decides the width.
    command = [sys.executable, str(Path(__file__).resolve()), "--help-of-all"]
    environment = {**os.environ, "COLUMNS": COLUMNS, "TERMINAL_WIDTH": COLUMNS, "NO_COLOR": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(DOCS.parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def session() -> str:
    """The confs of `small_batches`, as lines of a file and with their reasons."""
    from stream_merge.session import SMALL_BATCHES  # noqa: PLC0415  # PySpark is slow to load

    width = max(len(setting.conf) for setting in SMALL_BATCHES)
    lines = [f"{setting.conf:{width}}  {setting.value}" for setting in SMALL_BATCHES]
    table = ["| conf | why |", "|---|---|"]
    table += [
        f"| `{setting.conf}` | {setting.reason}{'; added to what is there' if setting.joined_by else ''} |"
        for setting in SMALL_BATCHES
    ]
    return "\n".join(["```text", *lines, "```", "", *table])


PARTS: dict[str, tuple[str, Callable[[], str]]] = {
    "metrics": ("reference/metrics.md", metrics),
    "alerts": ("operate/monitoring.md", alerts),
    "commands": ("reference/commands.md", commands),
    "session": ("reference/sink.md", session),
}
"""Name of the part -> page, and what stands there."""


def written(page: str, name: str, text: str) -> str:
    """The page with a part written anew."""
    begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


def _help_of_all() -> None:
    import typer  # noqa: PLC0415  # only this process of the two needs it
    from typer.testing import CliRunner  # noqa: PLC0415

    from stream_merge.cli.app import app  # noqa: PLC0415

    def paths(group: Any, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
        for name, command in group.commands.items():
            path = (*before, name)
            yield from paths(command, path) if hasattr(command, "commands") else (path,)

    for path in paths(typer.main.get_command(app)):
        said = CliRunner().invoke(app, [*path, "--help"], prog_name="stream-merge").stdout
        text = re.sub(r"[ \t]+$", "", said, flags=re.M).strip()
        print(f"## stream-merge {' '.join(path)}\n\n```text\n{text}\n```\n")


def main() -> None:
    """Write the pages again."""
    if "--help-of-all" in sys.argv:
        _help_of_all()
        return
    for name in sys.argv[1:] or PARTS:
        file, part = PARTS[name]
        page = DOCS / file
        page.write_text(written(page.read_text(), name, part()))


if __name__ == "__main__":
    main()
