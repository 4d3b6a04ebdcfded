"""What things are called: reserved names, quoting, sibling tables, identities and application ids."""

from __future__ import annotations

import re
from typing import Literal

RESERVED_PREFIX = "__stream_merge_"
"""Every column and table that the sink owns starts with this; sources may not use it."""

SEQUENCE_COLUMN = "__stream_merge_sequence"
RECORDED_AT_COLUMN = "__stream_merge_recorded_at"
REVIVED_COLUMN = "__stream_merge_revived"

DELETE_COLUMN = "__stream_merge_delete"
REASONS_COLUMN = "__stream_merge_reasons"
EVENT_COLUMN = "__stream_merge_event"
ALONE_COLUMN = "__stream_merge_alone"
SOURCE_COLUMN = "__stream_merge_source_{}"
"""A column of the source that is not stored as it is, on its way through the sink; with a number."""
STORED_COLUMN = "__stream_merge_stored_{}"
"""A column as it is stored, beside the source's own of that name; with a number."""
ROUTE_COLUMN = "__stream_merge_route"
CORRUPT_COLUMN = "__stream_merge_corrupt"
"""Why a record of a file could not be read; only `stream_merge.sources.files` hands it to the sink."""
UNAVAILABLE_COLUMN = "__stream_merge_unavailable"
"""Columns whose value nobody has; only jobs hand it to the sink."""
ORIGIN_COLUMN = "__stream_merge_origin"
"""Where an event stood in its topic or file, and its bytes where they were kept; only sources of this package hand it
to the sink."""
SOURCE_COLUMNS = frozenset({CORRUPT_COLUMN, UNAVAILABLE_COLUMN, ORIGIN_COLUMN})
SOURCE_METADATA = "stream_merge.source"
"""Field metadata that marks `SOURCE_COLUMNS` as this package's own, in frames that users pass on themselves."""

TOMBSTONE_TABLE_PREFIX = "__stream_merge_tombstones_"
QUARANTINE_TABLE_PREFIX = "__stream_merge_quarantine_"

PROPERTY_PREFIX = "stream_merge."
KEYS_PROPERTY = "stream_merge.keys"
SEQUENCE_PROPERTY = "stream_merge.sequence"
FORMAT_PROPERTY = "stream_merge.format_version"
ROW_GROUP_PROPERTY = "parquet.block.row.count.limit"
"""Rows per row group (Parquet 1.16); Delta gives a table's properties to Parquet's writer (Delta 4.4)."""
TARGET_ID_PROPERTY = "stream_merge.target_table_id"
FORMAT_VERSION = "1"

CHANGE_FEED_COLUMNS = ("_change_type", "_commit_version", "_commit_timestamp")
"""Delta's change data feed adds these; a table with the feed on cannot have them (Delta 4.4, CDCReader)."""

Role = Literal[
    "target",
    "tombstones-add",
    "tombstones-forget",
    "recheck",
    "quarantine",
    "quarantine-undecodable",
    "quarantine-broken",
    "quarantine-unrouted",
]

_NEEDS_COLUMN_MAPPING = re.compile(r"[ ,;{}()\n\t=]")
_EMPTY_AUTHORITY = re.compile(r"^(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*):///")
_PATH_IDENTIFIER = re.compile(r"^delta\.`(?P<path>.+)`$", re.IGNORECASE)


def is_reserved(name: str) -> bool:
    """Whether a source column's name belongs to the sink (compared without case: Spark's default)."""
    return name.lower().startswith(RESERVED_PREFIX)


def quote(name: str) -> str:
    """One identifier part, quoted for Spark SQL."""
    return "`" + name.replace("`", "``") + "`"


def needs_column_mapping(name: str) -> bool:
    """Whether Delta refuses this column name unless column mapping is on (Delta 4.4, SchemaUtils)."""
    return _NEEDS_COLUMN_MAPPING.search(name) is not None


def is_path(target: str) -> bool:
    """Whether a target is a path or URI rather than a catalog name."""
    return "/" in target or ":" in target


def normal_path(target: str) -> str:
    """A path target without `delta.` wrapping, trailing slashes and the empty authority of `file:///`."""
    wrapped = _PATH_IDENTIFIER.match(target.strip())
    path = wrapped.group("path").replace("``", "`") if wrapped else target
    # Delta 4.4 takes file:///a and file:/a for two locations and refuses to create the table.
    return _EMPTY_AUTHORITY.sub(r"\g<scheme>:/", path).rstrip("/") or "/"


def sql_identifier(target: str) -> str:
    """A target as it is written in SQL; a catalog name is already SQL."""
    return f"delta.{quote(normal_path(target))}" if is_path(target) else target


def split_identifier(name: str) -> list[str]:
    """The parts of a (possibly quoted) SQL identifier, unquoted."""
    parts: list[str] = []
    part, quoted, i = "", False, 0
    while i < len(name):
        char = name[i]
        if char == "`":
            if quoted and name[i + 1 : i + 2] == "`":
                part, i = part + "`", i + 1
            else:
                quoted = not quoted
        elif char == "." and not quoted:
            parts, part = [*parts, part], ""
        else:
            part += char
        i += 1
    return [*parts, part]


def table_name(target: str) -> str:
    """The last part of a target: table of a catalog name, folder of a path."""
    if is_path(target):
        return normal_path(target).rsplit("/", 1)[-1]
    return split_identifier(target)[-1]


def sibling(target: str, prefix: str) -> str:
    """A table of the sink beside the target: same schema or same parent folder."""
    if is_path(target):
        parent, slash, last = normal_path(target).rpartition("/")
        return f"{parent}{slash}{prefix}{last}"
    *parents, last = split_identifier(target)
    return ".".join(quote(part) for part in [*parents, prefix + last])


def identity(*, query_id: str | None, app_id: str | None, name: str | None) -> str | None:
    """Who a batch id belongs to, or None when nobody can tell (then no transaction id is written).

    Inside a streaming query the query id, which lives in the checkpoint, is always part of it:
    a new checkpoint restarts batch ids at 0 and must not be mistaken for an old one. `name` is
    given only when the user passed one.
    """
    if query_id is None:
        return app_id
    return "/".join(part for part in (app_id, query_id, name) if part is not None)


def transaction_app_id(identity: str, role: Role, *, about: str | None = None) -> str:
    """Delta application id of one commit of a batch: no two commits of a batch share one.

    Args:
        identity: whom batch ids belong to.
        role: what the commit is for.
        about: what else tells it from commits to the same table. Side tables outlive a dropped target, so
            their ids carry the target's Delta table id: batches that are delivered from 0 again, to a
            target made anew, must not be taken for those of the old one.
    """
    return "/".join([identity, role] if about is None else [identity, role, about])


def sql_string(text: str) -> str:
    """A SQL string literal of Spark's default parser."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
