"""Importing the package leaves Prometheus' own registry alone."""

from __future__ import annotations

import subprocess
import sys


def test_importing_the_package_registers_nothing():
    program = """
import stream_merge
from prometheus_client import REGISTRY
stream_merge.MergeSink(target="t", keys=["id"], sequence_by="lsn")
assert not [f.name for f in REGISTRY.collect() if f.name.startswith("stream_merge")]
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 0, done.stderr
