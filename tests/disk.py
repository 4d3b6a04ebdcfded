"""Where tests look at what lies in a place: in a folder, also where a test's S3 server keeps a bucket in it."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

_BUCKETS: dict[str, Path] = {}


def keep_bucket(name: str, folder: Path) -> None:
    """Remember where a bucket is kept."""
    _BUCKETS[name] = folder


def on_disk(location: str) -> Path:
    """A location as a path of this machine's file system."""
    parts = urlsplit(location)
    return _BUCKETS[parts.netloc] / parts.path.lstrip("/") if parts.scheme == "s3a" else Path(location)
