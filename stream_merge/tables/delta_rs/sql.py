"""Names and literals in the SQL of DataFusion and DuckDB."""

from __future__ import annotations


def column(frame: str, *path: str) -> str:
    """A column, or a field inside it; every character of a name counts."""
    first, *rest = path
    return f"{frame}.{quote(first)}" + "".join(f"[{text(field)}]" for field in rest)


def quote(name: str) -> str:
    """An identifier."""
    return '"' + name.replace('"', '""') + '"'


def text(value: str) -> str:
    """A string literal."""
    return "'" + value.replace("'", "''") + "'"
