"""Paths and URIs: local disk or object store, and one spelling per location."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import urlparse

_S3 = re.compile(r"^s3[an]?(?=://)", re.IGNORECASE)


def hadoop_uri(path: str) -> str:
    """A path or URI with Hadoop's scheme, `s3a:` for `s3:` and `s3n:`: two spellings would be two logs and locks."""
    return _S3.sub("s3a", path)


def local_path(location: str) -> Path | None:
    """A location as a path of this machine's file system, or None for any other storage.

    No character stands for another one, not `%20` either: Hadoop reads and writes its paths as they are,
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
    """Whether a path or URI is on Azure, by Hadoop's schemes for it."""
    return urlparse(location).scheme.lower() in ("abfs", "abfss")


def canonical_location(location: str) -> str:
    """One spelling per folder, of a normalized path or URI (`TableRef.path`)."""
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
    """A file beside a checkpoint's folder; None where that is not on a local disk."""
    local = local_path(path)
    if local is None:
        return None
    resolved = Path(os.path.realpath(local))
    return resolved.with_name(f"{resolved.name}.{suffix}")
