"""A browser draws the page of `stream-merge report`."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import history_table
import pytest
from matplotlib.image import imread
from typer.testing import CliRunner

from stream_merge.cli import app as cli

BLUE, GREEN = (0x44, 0x77, 0xAA), (0x22, 0x88, 0x33)
"""Of lines and engines, and of inserted rows."""


def browsed(page: Path, *options: str) -> str:
    """What headless Chromium prints about a page that may reach no host."""
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("chromium is not there; 'apt-get install chromium' gets it")
    quiet = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={page.parent}/chromium",
    ]
    offline = "--host-resolver-rules=MAP * ~NOTFOUND"
    command = [browser, *quiet, offline, *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def test_every_plot_is_drawn(tmp_path: Path) -> None:
    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    told = CliRunner().invoke(cli.app, ["report", str(history_table.made(tmp_path)), "--out", str(page)])
    assert told.exit_code == 0

    dom = browsed(page, "--dump-dom")
    browsed(page, "--window-size=1560,1100", f"--screenshot={picture}")

    figures = re.findall(r"<figure>.*?</figure>", dom, re.DOTALL)
    titles = [found[1] for figure in figures if (found := re.search(r"<h2>(.*?)</h2>", figure))]
    drawn = {title for title, figure in zip(titles, figures, strict=True) if "<path" in figure}
    assert len(titles) == 9
    assert set(titles) == drawn
    pixels = (imread(picture)[:, :, :3] * 255).round().astype(int)
    assert all((pixels == color).all(axis=2).sum() > 500 for color in (BLUE, GREEN))
