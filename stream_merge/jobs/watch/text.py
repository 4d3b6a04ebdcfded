"""Names and values on a screen: as they are, but never as commands to the terminal or as rich's markup."""

from __future__ import annotations

import re

from rich import markup

_COMMANDS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters but for the end of a line, and those that turn the direction of writing."""


def escape(text: str) -> str:
    """Text for `Console.print`: what would command the terminal is shown as its escape."""
    return markup.escape(_COMMANDS.sub(_shown, text))


def escape_line(text: str) -> str:
    """The same on one line."""
    return escape(text).replace("\n", "\\n")


def _shown(found: re.Match[str]) -> str:
    return found.group().encode("unicode_escape").decode()
