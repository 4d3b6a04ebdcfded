"""Where a table lies, by what it is called: on this machine, in which store, and whether two names are one place."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlparse

from stream_merge.model import names


def local_path(location: str) -> Path | None:
    """A location as a path of this machine's file system, or None for any other storage.

    Nothing in it stands for another character, not `%20` either: Hadoop reads and writes its paths as they are,
    `file:/lake/orders#eu`, and Spark takes `file:///lake/a%20b` for the folder `a%20b`.
    """
    scheme = urlparse(location).scheme
    if scheme not in ("", "file"):
        return None
    inside = location.partition(":")[2] if scheme else location
    if scheme and inside.startswith("//"):
        inside = "/" + inside[2:].partition("/")[2]
    return Path(inside)


def is_on_s3(location: str) -> bool:
    """Whether a path or URI lies on S3, or on a store that is spoken to as S3."""
    return urlparse(names.hadoop_uri(location)).scheme == "s3a"


def is_on_azure(location: str) -> bool:
    """Whether a path or URI lies on Azure, by the names that Hadoop's file system for it goes by."""
    return urlparse(location).scheme.lower() in ("abfs", "abfss")


def canonical(location: str) -> str:
    """One spelling per table, as far as that can be told from outside."""
    local = local_path(location) if names.is_path(location) else None
    if local is not None:
        return os.path.realpath(local)
    if not names.is_path(location):
        return location.casefold()
    path = names.normal_path(location)
    if not is_on_azure(path):
        return path
    # Both endpoints, with TLS and without, are one table; Spark is told what the user says: an emulator has no TLS.
    authority, slash, inside = path.partition("://")[2].partition("/")
    container, at, host = authority.rpartition("@")
    return f"abfs://{container}{at}{host.lower().replace('.blob.', '.dfs.')}{slash}{inside}"


def place(target: str) -> str:
    """One spelling per target, as far as its name tells: without a look at catalogs and stores."""
    if names.is_path(target):
        return canonical(names.normal_path(target))
    return ".".join(names.quote(part) for part in names.split_identifier(target.casefold()))


def folder(path: str) -> str:
    """One spelling per folder of a checkpoint; without a slash, too, it is a path."""
    return canonical(path if names.is_path(path) else f"./{path}")


def beside_folder(path: str, suffix: str) -> Path | None:
    """A file beside a checkpoint's folder, the same however that is spelled; None where it is not on a local disk."""
    local = local_path(path)
    if local is None:
        return None
    resolved = Path(os.path.realpath(local))
    return resolved.with_name(f"{resolved.name}.{suffix}")
