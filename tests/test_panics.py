"""Panics of delta-rs and the screen: their lines are not for people, all other lines are."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CHILD = """
import os, sys, pyarrow as pa
from deltalake import write_deltalake
from stream_merge.cli.panics import panics_in_the_log

with panics_in_the_log():
    os.write(2, b"somebody else\\n")
    far = pa.array([2**31 - 1], pa.int32()).cast(pa.date32())
    try:
        write_deltalake(sys.argv[1], pa.table({"day": far}))
    except Exception as err:
        print("panicked" in str(err), file=sys.stderr)
    os.write(2, b"\\nafterwards\\n")
os.write(2, b"at the end\\n")
"""


@pytest.mark.parametrize("backtrace", ["0", "1"])
def test_lines_of_a_panic_do_not_reach_the_screen(tmp_table: str, backtrace: str):
    """Rust writes them to descriptor 2, where a child process, a C library and Python write as well."""
    environment = {**os.environ, "RUST_BACKTRACE": backtrace}
    child = subprocess.run(
        [sys.executable, "-c", CHILD, tmp_table], env=environment, capture_output=True, text=True, check=True
    )

    assert sorted(filter(None, child.stderr.splitlines())) == ["True", "afterwards", "at the end", "somebody else"]
