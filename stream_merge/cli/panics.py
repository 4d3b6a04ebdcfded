"""Moves panics of delta-rs from the screen to the log: Rust writes them to descriptor 2, past Python.

Only Rust can replace its hook. So a command gives Python's `sys.stderr` another descriptor and reads descriptor 2; a
library must not. The error itself reaches Python as an exception.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from stream_merge.model.logs import tell

_log = logging.getLogger(__name__)

_STDERR = 2
_FIRST_LINE, _LAST_LINE = re.compile(rb"thread '.*panicked at "), b"note: "
_MOST_LINES = 200
"""Longest panic, in case its last line is another one."""


@contextmanager
def panics_in_the_log() -> Iterator[None]:
    """Log panics of Rust at DEBUG and forward other lines; nothing with RUST_BACKTRACE=full."""
    if os.environ.get("RUST_BACKTRACE") == "full" or sys.stderr is None:
        yield
        return
    os.environ["RUST_BACKTRACE"] = "1"  # without, only the first panic has a known last line
    before, screen = sys.stderr, os.dup(_STDERR)
    read_end, write_end = os.pipe()
    os.dup2(write_end, _STDERR)
    os.close(write_end)
    sys.stderr = os.fdopen(os.dup(screen), "w", encoding=before.encoding, errors=before.errors, buffering=1)
    pump = threading.Thread(target=_forward, args=(read_end, screen), name="stream-merge-stderr", daemon=True)
    pump.start()
    try:
        yield
    finally:
        sys.stderr = before
        os.dup2(screen, _STDERR)  # closes the pipe's other end, unless a child process lives on
        pump.join(timeout=1)


def _forward(read_end: int, screen: int) -> None:
    with os.fdopen(read_end, "rb") as lines:
        for line in without_panics(lines):
            os.write(screen, line)


def without_panics(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The lines without panics and blank lines before them."""
    panic: list[bytes] = []
    blank: list[bytes] = []
    for line in lines:
        if _FIRST_LINE.match(line):
            _note(panic)
            panic, blank = [line], []
        elif panic:
            panic.append(line)
            if line.startswith(_LAST_LINE) or len(panic) >= _MOST_LINES:
                _note(panic)
                panic = []
        elif not line.strip():
            blank.append(line)
        else:
            yield from (*blank, line)
            blank = []
    _note(panic)
    yield from blank


def _note(panic: list[bytes]) -> None:
    if panic:
        tell(_log.debug, "native_panic", text=b"".join(panic).decode(errors="replace"))
