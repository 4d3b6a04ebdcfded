"""A number with its noun, as a sentence has it."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """`1 file`, `2,000 files`, `0 micro-batches`."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"
