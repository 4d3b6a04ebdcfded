"""Panics of delta-rs and the screen: their lines are not for people, all other lines are."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from stream_merge.cli.panics import without_panics

CHILD = """
import os, sys, pyarrow as pa
from deltalake import write_deltalake
from stream_merge.cli.panics import panics_in_the_log

with panics_in_the_log():
    os.write(2, b"somebody else\\n")
    far = pa.array([2**31 - 1], pa.int32()).cast(pa.date32())
    for turn in range(2):
        try:
            write_deltalake(sys.argv[1], pa.table({"day": far}))
        except Exception as err:
            print("panicked" in str(err), file=sys.stderr)
        os.write(2, b"\\nafter %d\\n" % turn)
os.write(2, b"at the end\\n")
"""


@pytest.mark.parametrize("backtrace", [None, "0", "1"])
def test_lines_of_a_panic_do_not_reach_the_screen(tmp_table: str, backtrace: str | None):
    """Rust writes them to descriptor 2, where a child process, a C library and Python write as well."""
    environment = {**os.environ, "RUST_BACKTRACE": backtrace or ""}
    if backtrace is None:
        del environment["RUST_BACKTRACE"]
    child = subprocess.run(
        [sys.executable, "-c", CHILD, tmp_table], env=environment, capture_output=True, text=True, check=True
    )

    said = sorted(filter(None, child.stderr.splitlines()))
    assert said == ["True", "True", "after 0", "after 1", "at the end", "somebody else"]


def test_a_panic_without_a_last_line_ends_where_another_begins_and_is_never_endless(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Else all that anybody says afterwards would be lost."""
    first = b"thread 'x' panicked at src/a.rs:1:1:\n"
    with caplog.at_level("DEBUG", "stream_merge"):
        shown = list(without_panics([first, b"one\n", first, b"two\n", b"note: x\n", b"said\n"]))
        endless = list(without_panics([first, *[b"line\n"] * 300]))

    assert shown == [b"said\n"]
    assert len(endless) == 101
    assert len(caplog.records) == 3
    with caplog.at_level("DEBUG", "stream_merge"):
        assert list(without_panics([first, b"at the end\n"])) == []
    assert len(caplog.records) == 4
