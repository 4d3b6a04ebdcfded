"""What a table demands of those who read and write it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Protocol:
    """Of a table."""

    reader_version: int
    writer_version: int
    features: frozenset[str]
    """Named table features; older protocol versions name none."""
