"""`stream-merge run` in processes of its own, none of which outlives its test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import services

START_SECONDS = 300


def newest(folder: Path, pattern: str) -> int:
    """The greatest number that a file there has for a name; -1 where there is none."""
    return max((int(path.stem) for path in folder.glob(pattern)), default=-1)


def end(process: subprocess.Popen[str], how: signal.Signals) -> None:
    os.killpg(process.pid, how)
    process.communicate(timeout=60)


class JobProcesses:
    """Runs of one job file, and what its first query leaves on the disk."""

    def __init__(self, file: Path, *, target: Path, checkpoint: Path) -> None:
        self._file = file
        self._log = target / "_delta_log"
        self._checkpoint = checkpoint
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *more: str, downloads_jars: bool = False) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "stream_merge.cli", "run", str(self._file), *more]
        command += ["--conf", "spark.driver.memory=1g"]
        command += [] if downloads_jars else ["--jars", str(services.SPARK_JARS)]
        heard: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self._started.append(subprocess.Popen(command, start_new_session=True, cwd=services.ROOT, **heard))
        return self._started[-1]

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:  # the test failed: nothing may run beside the next one
                end(process, signal.SIGKILL)

    def newest_version(self) -> int:
        return newest(self._log, "*.json")

    def recorded_batch(self) -> int:
        """The last one that Spark knows to be done."""
        return newest(self._checkpoint / "commits", "[0-9]*")

    def planned_batch(self) -> int:
        return newest(self._checkpoint / "offsets", "[0-9]*")

    def kill_behind_a_commit(self) -> bool:
        """Let it commit a batch; whether it died before its checkpoint knew of the last one that was planned."""
        before = max(self.newest_version(), 0)  # version 0 is the empty table
        process = self.start()
        deadline = time.monotonic() + START_SECONDS
        while self.newest_version() <= before:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline, "no version was committed"
            time.sleep(0.002)
        end(process, signal.SIGKILL)
        return self.recorded_batch() < self.planned_batch()
