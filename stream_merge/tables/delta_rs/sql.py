"""The SQL of delta-rs (DataFusion): names, literals and the match of a merge."""

from __future__ import annotations

from stream_merge.shapes.key_bounds import KeyBounds
from stream_merge.shapes.layout import Layout


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


def bounds(found: KeyBounds, frame: str) -> list[str]:
    """Literal bounds on key columns, for file skipping."""
    literals = ((column(frame, bound.name), *bound.to_sql()) for bound in found.columns)
    return [f"({name} >= {least} AND {name} <= {greatest})" for name, least, greatest in literals]


def matched(layout: Layout, found: KeyBounds) -> str:
    """The merge's ON: same keys, within the bounds."""
    return " AND ".join([*bounds(found, "t"), *(f"{column('t', key)} = {column('s', key)}" for key in layout.keys)])
