"""Keep panics of delta-rs off the screen: Rust writes them to the standard error of the process, past Python.

Its hook can be replaced from Rust alone. So a command, whose process is its own, gives Python's `sys.stderr` a
descriptor of its own and reads what others write to descriptor 2; a library must not. The error itself reaches Python
as an exception, and the batch goes to Spark with a warning.
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
"""Of a panic; where its last line is another one, all that others say would be lost."""


@contextmanager
def panics_in_the_log() -> Iterator[None]:
    """Log panics of Rust at DEBUG, pass all else on; does nothing where RUST_BACKTRACE=full asks to see them."""
    if os.environ.get("RUST_BACKTRACE") == "full" or sys.stderr is None:
        yield
        return
    os.environ["RUST_BACKTRACE"] = "1"  # without one, the first panic alone has a last line that is known
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
        os.dup2(screen, _STDERR)  # was the last to hold the pipe's other end, unless a child process lives on
        pump.join(timeout=1)


def _forward(read_end: int, screen: int) -> None:
    with os.fdopen(read_end, "rb") as lines:
        for line in without_panics(lines):
            os.write(screen, line)


def without_panics(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The lines that belong to no panic, and to no blank line before one."""
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
