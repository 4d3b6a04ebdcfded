"""Draws `docs/assets/result.svg`, what `stream-merge demo` shows, from a real run: `make result`."""

from __future__ import annotations

import io
import sys
from pathlib import Path

from rich.console import Console
from typer.testing import CliRunner

from stream_merge.cli.app import app
from stream_merge.cli.commands import tables

PICTURE = Path(__file__).parent / "assets" / "result.svg"


def main() -> None:
    """Run the demo and draw what it prints."""
    tables.OUT = Console(record=True, width=124, file=io.StringIO())
    result = CliRunner().invoke(app, ["demo"])
    if result.exit_code:
        sys.exit(result.output)
    tables.OUT.save_svg(str(PICTURE), title="stream-merge demo")


if __name__ == "__main__":
    main()
