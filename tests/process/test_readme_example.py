"""The README's example does what it says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import services
from deltalake import DeltaTable

README = (services.ROOT / "README.md").read_text()


def example_in(text: str) -> str:
    return next(code for code in re.findall(r"```python\n(.*?)```", text, flags=re.S) if "MergeSink(" in code)


def test_the_example_merges_a_folder_of_changes_in_an_environment_that_is_not_activated(tmp_path: Path):
    """The example runs as printed, with a `python3` on the PATH that cannot run it; only the trigger is made to end."""
    example = example_in(README)
    pages = [(services.ROOT / "docs" / page).read_text() for page in ("index.md", "guides/streams.md")]
    assert [example_in(page) for page in pages] == [example, example]
    assert len([line for line in example.splitlines() if line.strip()]) <= 15
    for folder in ("changes", "bin"):
        (tmp_path / folder).mkdir()
    events = [
        {"id": 1, "lsn": 2, "op": "u", "item": "two"},
        {"id": 1, "lsn": 1, "op": "u", "item": "one"},
        {"id": 2, "lsn": 3, "op": "d", "item": None},
    ]
    (tmp_path / "changes" / "1.json").write_text("\n".join(map(json.dumps, events)))
    (tmp_path / "orders.py").write_text(example.replace(".start()", ".trigger(availableNow=True).start()"))
    (tmp_path / "bin" / "python3").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bin" / "python3").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    environment.pop("PYSPARK_PYTHON", None)

    command = [sys.executable, "orders.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False
    )

    assert done.returncode == 0, done.stderr
    rows = pq.read_table(DeltaTable(str(tmp_path / "tables/orders")).file_uris(), columns=["id", "lsn", "item"])
    assert rows.to_pylist() == [{"id": 1, "lsn": 2, "item": "two"}]
