"""A pseudo-terminal that a program is run on, and what a person sees on it in the end."""

from __future__ import annotations

import os
import pty
import re
import struct
import subprocess
import sys
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ

_ESCAPE = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])")


class Terminal:
    """Enough of a VT100 for lines that are written, erased and overwritten."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.rows: list[list[str]] = [[]]
        self._row = self._column = 0

    def feed(self, text: str) -> None:
        at = 0
        while at < len(text):
            escape = _ESCAPE.match(text, at)
            if escape:
                self._obey(escape[2], escape[1])
                at = escape.end()
                continue
            self._put(text[at])
            at += 1

    @property
    def lines(self) -> list[str]:
        found = ["".join(row).rstrip() for row in self.rows]
        while found and not found[-1]:
            found.pop()
        return found

    def _obey(self, what: str, how: str) -> None:
        if what == "A":
            self._row = max(0, self._row - int(how or 1))
        elif what == "K":
            self.rows[self._row] = [] if how == "2" else self.rows[self._row][: self._column]
        elif what not in ("m", "h", "l"):
            msg = f"this terminal does not know {what!r}"
            raise ValueError(msg)

    def _put(self, char: str) -> None:
        if char == "\r":
            self._column = 0
            return
        if char == "\n" or self._column == self.columns:
            self._row += 1
            self._column = self._column if char == "\n" else 0
            if self._row == len(self.rows):
                self.rows.append([])
        if char == "\n":
            return
        row = self.rows[self._row]
        row.extend(" " * (self._column + 1 - len(row)))
        row[self._column] = char
        self._column += 1


def run(program: str, *, columns: int = 120, errors_to: Path | None = None, never: str | None = None) -> list[str]:
    """The lines that a Python program leaves on a terminal of its own; `never` was not there for a moment."""
    ours, theirs = pty.openpty()
    ioctl(theirs, TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    env = {**inherited, "TERM": "xterm-256color", "PYTHONPATH": str(Path(__file__).parents[1])}
    with errors_to.open("w") if errors_to else os.fdopen(os.dup(theirs), "w") as errors:
        process = subprocess.Popen([sys.executable, "-c", program], stdout=theirs, stderr=errors, stdin=theirs, env=env)
    os.close(theirs)
    written = b""
    while True:
        try:
            got = os.read(ours, 65536)
        except OSError:  # what Linux says when the other side is closed
            break
        if not got:
            break
        written += got
    os.close(ours)
    terminal = Terminal(columns)
    terminal.feed(written.decode())
    if process.wait(timeout=60):
        raise AssertionError("\n".join(terminal.lines))
    assert never is None or never not in written.decode()
    return terminal.lines
