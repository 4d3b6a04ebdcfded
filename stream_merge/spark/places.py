"""Where tables and checkpoints lie on this machine's disk, and whether this process may write there."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from pyspark.sql import SparkSession

from stream_merge.errors import ConfigError
from stream_merge.model.locations import local_path
from stream_merge.model.settings import MergeSpec
from stream_merge.model.snapshot import TableSnapshot
from stream_merge.model.table_ref import TableRef

_ESCAPE = re.compile(r"%[0-9A-Fa-f]{2}")
_OF_URLS = re.compile(r"%[0-9A-Fa-f]{2}|[#?\\\x00-\x1f]|\s\Z")
"""What a URL does not keep in its path: the end of it, a blank at its end, what is left out or means a slash."""


def permission_problems(spec: MergeSpec, found: TableSnapshot | None) -> list[str]:
    """Folders on a local disk that this process may not write to."""
    wanted: list[str] = []
    if found is not None:
        wanted.append(found.location)
    elif spec.target.path is not None:
        wanted.append(spec.target.plain)
    siblings = [spec.quarantine_table if spec.on_invalid == "quarantine" else None]
    siblings.append(spec.tombstone_target if spec.tombstones else None)
    wanted.extend(table.plain for table in siblings if table is not None and table.path is not None)
    problems: dict[Path | None, str] = {}
    for location in wanted:
        problem = not_writable(location) or not_writable(f"{location}/_delta_log")
        if problem is not None:
            problems.setdefault(_nearest(location), problem)
    return list(problems.values())


def not_writable(location: str) -> str | None:
    """Why this process cannot make or write a folder at a place on a local disk, or None; tried with a file."""
    nearest = _nearest(location)
    if nearest is None:
        return None
    if not nearest.is_dir():
        return f"[NOT_WRITABLE] {str(nearest)!r} is a file, but {location!r} needs a folder; choose another path"
    try:
        with tempfile.TemporaryFile(dir=nearest):  # permissions do not tell of quotas, nor of what a server refuses
            os.scandir(nearest).close()
    except OSError as err:
        where = "" if str(nearest) == location else f", where {location!r} is located"
        return (
            f"[NOT_WRITABLE] this process (uid {os.geteuid()}) cannot write to {str(nearest)!r} ({err.strerror}){where}"
            "; grant it write permission or choose another path"
        )
    return None


def _nearest(location: str) -> Path | None:
    local = local_path(location)
    return None if local is None else nearest_existing(local)


def expect_scheme(target: TableRef, location: str) -> None:
    """Refuse a path without a scheme that Hadoop (`fs.defaultFS`) takes for one of another file system than this disk.

    Locks, permissions and delta-rs' look at the table would be those of a local folder.

    Args:
        target: as the user names it.
        location: what Hadoop takes it for.

    Raises:
        ConfigError: it is one.
    """
    if target.path is not None and local_path(target.plain) is not None and local_path(location) is None:
        msg = f"[INVALID_TARGET] target {target!r} is located at {location!r} by fs.defaultFS; use that location"
        raise ConfigError(msg, target=target)


def escape_in(location: str) -> str | None:
    """The first `%20` or the like in a path or URI, which Hadoop takes as it is and delta-rs (1.6) for a blank.

    In a local path, too: it opens the folder and looks for its files in the other one. Of a URI it opens
    `s3a://lake/orders` for `s3a://lake/orders#eu`.
    """
    found = (_ESCAPE if local_path(location) is not None else _OF_URLS).search(location)
    return None if found is None else found.group()


def scratch(session: SparkSession) -> Path:
    """Where Spark keeps temporary files on the driver's disk: the first of its local folders."""
    told = os.environ.get("SPARK_LOCAL_DIRS") or str(
        session._jsparkSession.sparkContext().conf().get("spark.local.dir", "")
    )
    return Path(told.split(",")[0].strip()) if told else Path(tempfile.gettempdir())


def table_above(target: TableRef, found: TableSnapshot | None) -> str | None:
    """The Delta table that a target which is a path is a folder of; None where it is none of any.

    Delta looks for a table in all folders above a path (4.4): it would merge into the table whose partition the folder
    is. Where there is no such partition it would make a table, whose files a VACUUM of the one above deletes.

    Args:
        target: as the user names it.
        found: what Delta takes for it. Where that is nothing, only a local disk is searched: elsewhere a process need
            not be allowed to look above its tables.
    """
    if target.path is None:
        return None
    path = target.plain
    if found is not None:
        return found.location if TableRef(path).canonical.startswith(f"{TableRef(found.location).canonical}/") else None
    local = local_path(path)
    above = [] if local is None else Path(os.path.realpath(local)).parents
    return next((str(folder) for folder in above if _exists(folder / "_delta_log")), None)


def nearest_existing(path: Path) -> Path | None:
    """The path itself, or the first folder above it that is there and can be seen."""
    return next((p for p in (path.absolute(), *path.absolute().parents) if _exists(p)), None)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except PermissionError:
        return False


def no_table(target: str) -> str:
    """The sentence for a place where something else lies."""
    return (
        f"[NOT_A_DELTA_TABLE] target {target!r} exists but is not a Delta table; convert it (CONVERT TO DELTA) or"
        " choose another"
    )
