"""A sink whose user may not read or write a table says so."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from grouped import sink_with
from log_faults import added_jars
from pyspark.sql import DataFrame, SparkSession

import stream_merge
from stream_merge import MergeSink
from stream_merge.testing import run

NOBODY = 65534


@pytest.fixture(scope="module")
def source(spark: SparkSession) -> DataFrame:
    """One event with columns of all sorts."""
    return spark.range(1).selectExpr(
        "id",
        "1L AS lsn",
        "'ann' AS name",
        "'u' AS op",
        "map('a', 'b') AS tags",
        "parse_json('{}') AS doc",
        "named_struct('file', 1L, 'tags', map('a', 1)) AS at",
    )


def sink_of(target: str, **settings: Any) -> MergeSink:
    return sink_with(**{"target": target, "keys": ["id"], "sequence_by": "lsn", **settings})


@contextmanager
def nothing_written(folder: Path) -> Iterator[None]:
    """Not a file more or less, the sink's own tables included."""
    before = sorted(folder.rglob("*"))
    yield
    assert sorted(folder.rglob("*")) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_path_without_permission_is_refused(spark, source):
    """In a process of its own under an unprivileged uid: root may write anywhere."""
    place = Path(tempfile.mkdtemp(prefix="stream-merge-permission-"))
    try:
        place.chmod(0o755)
        jars, scratch, theirs, closed = (place / name for name in ("jars", "scratch", "theirs", "closed"))
        for folder in (jars, scratch, theirs, closed):
            folder.mkdir(mode=0o755)
        os.chown(scratch, NOBODY, NOBODY)
        for jar in filter(os.path.isfile, added_jars(spark)):
            shutil.copy(jar, jars)
        run(sink_of(str(theirs / "table")), source.select("id", "lsn"), 0)
        closed.chmod(0o700)
        targets = [str(theirs / "table"), str(theirs / "missing"), str(closed / "deep" / "missing")]

        with nothing_written(theirs), nothing_written(closed):
            said = call_as_nobody(jars, scratch, targets)

        assert said == {
            targets[0]: [
                cannot_write(theirs / "table", place=targets[0]),
                cannot_write(theirs, place=str(theirs / "__stream_merge_quarantine_table")),
            ],
            targets[1]: [cannot_write(theirs, place=targets[1])],
            targets[2]: [cannot_write(closed, place=targets[2])],
        }
    finally:
        shutil.rmtree(place)


def cannot_write(folder: Path, *, place: str) -> str:
    where = "" if str(folder) == place else f", where {place!r} is located"
    return (
        f"[NOT_WRITABLE] this process (uid 65534) cannot write to {str(folder)!r} (Permission denied){where};"
        " grant it write permission or choose another path"
    )


def call_as_nobody(jars: Path, scratch: Path, targets: list[str]) -> dict[str, list[str]]:
    """What the sink says of each target to a user who owns nothing."""
    root = Path(stream_merge.__file__).parents[1]
    child = Path(__file__).with_name("unprivileged_child.py")
    paths = ",".join(str(jar) for jar in sorted(jars.iterdir()))
    done = subprocess.run(
        [sys.executable, str(child), paths, str(scratch), *targets],
        cwd=scratch,
        env={**os.environ, "HOME": str(scratch), "PYTHONPATH": str(root), "PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.rpartition("SAID ")[2])
