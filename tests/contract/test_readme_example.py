"""The README's example does what it says."""

from __future__ import annotations

import json
import re
from pathlib import Path

from pyspark.sql import SparkSession

from stream_merge import testing

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def example_in(text: str) -> str:
    return next(code for code in re.findall(r"```python\n(.*?)```", text, flags=re.S) if "MergeSink(" in code)


def test_the_example_merges_a_folder_of_changes(spark: SparkSession, tmp_path: Path):
    """The example runs as printed; only the trigger is made to end."""
    example = example_in(README)
    pages = [(ROOT / "docs" / page).read_text() for page in ("index.md", "guides/streams.md")]
    assert [example_in(page) for page in pages] == [example, example]
    assert len([line for line in example.splitlines() if line.strip()]) <= 15
    (tmp_path / "changes").mkdir()
    events = [
        {"id": 1, "lsn": 2, "op": "u", "item": "two"},
        {"id": 1, "lsn": 1, "op": "u", "item": "one"},
        {"id": 2, "lsn": 3, "op": "d", "item": None},
    ]
    (tmp_path / "changes" / "1.json").write_text("\n".join(map(json.dumps, events)))
    code = example.replace(".start()", ".trigger(availableNow=True).start()")
    for relative in ("changes", "tables/orders", "checkpoints/orders"):
        code = code.replace(f'"{relative}"', repr(str(tmp_path / relative)))

    exec(compile(code, "README.md", "exec"), {})

    assert testing.target_rows(spark, str(tmp_path / "tables/orders")) == [(1, 2, "two")]
