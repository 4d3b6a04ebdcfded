"""Where paths and URIs lead: to this machine's disk, to which object store, and one spelling for each location."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import urlparse

_S3 = re.compile(r"^s3[an]?(?=://)", re.IGNORECASE)


def hadoop_uri(path: str) -> str:
    """A path or URI as Hadoop's own file systems know its scheme: `s3:` and `s3n:` are spelled `s3a:`.

    Under two spellings one table would have two logs and two locks in Spark.
    """
    return _S3.sub("s3a", path)


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
    """Whether a path or URI is on S3, or on an object store with S3's interface."""
    return urlparse(hadoop_uri(location)).scheme == "s3a"


def is_on_azure(location: str) -> bool:
    """Whether a path or URI is on Azure, by the schemes of Hadoop's file system for it."""
    return urlparse(location).scheme.lower() in ("abfs", "abfss")


def canonical_location(location: str) -> str:
    """One spelling per folder, as far as that can be told from outside.

    Args:
        location: path or URI, normalized (`TableRef.path`).
    """
    local = local_path(location)
    if local is not None:
        return os.path.realpath(local)
    if not is_on_azure(location):
        return location
    # Both endpoints, with TLS and without, are one table; Spark gets what the user wrote: an emulator has no TLS.
    authority, slash, inside = location.partition("://")[2].partition("/")
    container, at, host = authority.rpartition("@")
    return f"abfs://{container}{at}{host.lower().replace('.blob.', '.dfs.')}{slash}{inside}"


def beside_folder(path: str, suffix: str) -> Path | None:
    """A file beside a checkpoint's folder, however that is spelled; None where it is not on a local disk."""
    local = local_path(path)
    if local is None:
        return None
    resolved = Path(os.path.realpath(local))
    return resolved.with_name(f"{resolved.name}.{suffix}")
