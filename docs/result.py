"""Draws `docs/assets/result.svg`, the end of what `stream-merge demo` shows, from a real run: `make result`."""

from __future__ import annotations

import io
import sys
from pathlib import Path

from rich.console import Console
from typer.testing import CliRunner

from stream_merge.cli.app import app
from stream_merge.cli.commands import tables
from stream_merge.demo import run as demo

PICTURE = Path(__file__).parent / "assets" / "result.svg"


def main() -> None:
    """Run the demo and draw what it prints."""
    console = tables.OUT = Console(record=True, width=112, file=io.StringIO())
    report = demo._Report.show

    def shown(self: demo._Report, delivered: int | None) -> bool:
        console.export_text(clear=True)  # what came before the report
        return report(self, delivered)

    demo._Report.show = shown  # type: ignore[method-assign]
    result = CliRunner().invoke(app, ["demo"])
    if result.exit_code:
        sys.exit(result.output)
    console.save_svg(str(PICTURE), title="stream-merge demo")


if __name__ == "__main__":
    main()
