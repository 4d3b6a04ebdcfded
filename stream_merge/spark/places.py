"""Local paths of tables and checkpoints: permissions, schemes, escapes, and what is above them."""

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
_LOST_IN_URLS = re.compile(r"%[0-9A-Fa-f]{2}|[#?\\\x00-\x1f]|\s\Z")
"""What a URL loses in its path: its end, a trailing blank, what is dropped or becomes a slash."""


def permission_problems(spec: MergeSpec, snapshot: TableSnapshot | None) -> list[str]:
    """Folders on a local disk that this process cannot write to."""
    tables = [spec.target] if snapshot is None else []
    tables += [spec.quarantine_table] if spec.on_invalid == "quarantine" else []
    tables += [spec.tombstone_target] if spec.tombstones else []
    locations = [] if snapshot is None else [snapshot.location]
    problems: dict[Path | None, str] = {}
    for location in [*locations, *(table.path for table in tables if table.path is not None)]:
        problem = not_writable(location) or not_writable(f"{location}/_delta_log")
        if problem is not None:
            problems.setdefault(_nearest(location), problem)
    return list(problems.values())


def not_writable(location: str) -> str | None:
    """Why this process cannot create or write a folder on a local disk, tested with a file; else None."""
    nearest = _nearest(location)
    if nearest is None:
        return None
    if not nearest.is_dir():
        return f"[NOT_WRITABLE] {str(nearest)!r} is a file, but {location!r} needs a folder; choose another path"
    try:
        with tempfile.TemporaryFile(dir=nearest):  # quotas and what a server refuses do not show in permissions
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
    """Refuse a path without a scheme that `fs.defaultFS` puts on another file system than this disk (ConfigError).

    Locks, permissions and the driver's reads would be those of a local folder.
    """
    if target.path is not None and local_path(target.plain) is not None and local_path(location) is None:
        msg = f"[INVALID_TARGET] target {target!r} is located at {location!r} by fs.defaultFS; use that location"
        raise ConfigError(msg, target=target)


def escape_in(location: str) -> str | None:
    """The first `%20` or the like in a path or URI, which Hadoop takes literally and delta-rs (1.6) for a blank.

    In a local path it opens the folder and reads files from the other one. `s3a://lake/orders#eu` it opens as
    `s3a://lake/orders`.
    """
    match = (_ESCAPE if local_path(location) is not None else _LOST_IN_URLS).search(location)
    return None if match is None else match.group()


def scratch(session: SparkSession) -> Path:
    """Spark's first local folder for temporary files on the driver's disk."""
    conf = session._jsparkSession.sparkContext().conf()
    folders = os.environ.get("SPARK_LOCAL_DIRS") or str(conf.get("spark.local.dir", ""))
    return Path(folders.split(",")[0].strip() if folders else tempfile.gettempdir())


def table_above(target: TableRef, snapshot: TableSnapshot | None) -> str | None:
    """The Delta table that contains a target which is a path; None if there is none.

    Delta looks for a table in all folders above a path (4.4), and would merge into the table whose partition the folder
    is; elsewhere it would create a table whose files a VACUUM of the one above deletes. `snapshot` is what Delta loads;
    where that is None, only a local disk is searched: elsewhere parents may be inaccessible.
    """
    if target.path is None:
        return None
    path = target.plain
    if snapshot is not None:
        return (
            snapshot.location
            if TableRef(path).canonical.startswith(f"{TableRef(snapshot.location).canonical}/")
            else None
        )
    local = local_path(path)
    above = [] if local is None else Path(os.path.realpath(local)).parents
    return next((str(folder) for folder in above if _exists(folder / "_delta_log")), None)


def nearest_existing(path: Path) -> Path | None:
    """The path itself, or the first folder above it that exists and is accessible."""
    return next((p for p in (path.absolute(), *path.absolute().parents) if _exists(p)), None)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except PermissionError:
        return False


def no_table(target: str) -> str:
    """The sentence for a path with something else."""
    return (
        f"[NOT_A_DELTA_TABLE] target {target!r} exists but is not a Delta table; convert it (CONVERT TO DELTA) or"
        " choose another"
    )
