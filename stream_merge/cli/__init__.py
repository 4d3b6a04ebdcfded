"""`stream-merge`: commands, which need the extra `cli`."""

from __future__ import annotations

import sys

EXTRA = ("kafka", "pydantic", "rich", "typer", "yaml")
"""Modules that only commands and jobs import; `pip install stream-merge` alone does not install them."""


def main() -> None:
    """Run a command; exits with 2 where the extra is not installed."""
    try:
        from stream_merge.cli.app import run  # noqa: PLC0415 - fails without the extra
    except ModuleNotFoundError as err:
        if (err.name or "").split(".")[0] not in EXTRA:
            raise
        sys.stderr.write(f"stream-merge: {err.name} is not installed; run: pip install 'stream-merge[cli]'\n")
        sys.exit(2)
    run()
