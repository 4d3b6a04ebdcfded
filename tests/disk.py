"""How tests look at a place without Spark: as a folder, also where a test's S3 server keeps a bucket in it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

_BUCKETS: dict[str, tuple[Path, dict[str, str]]] = {}


def keep_bucket(name: str, folder: Path, options: Mapping[str, str]) -> None:
    """Remember where a bucket is kept, and how delta-rs reaches it through its server."""
    _BUCKETS[name] = folder, dict(options)


def on_disk(location: str) -> Path:
    """A location as a path of this machine's file system."""
    parts = urlsplit(location)
    return _BUCKETS[parts.netloc][0] / parts.path.lstrip("/") if parts.scheme == "s3a" else Path(location)


def options_of(location: str) -> dict[str, str] | None:
    """What delta-rs has to be told to reach a location as another process would."""
    parts = urlsplit(location)
    return _BUCKETS[parts.netloc][1] if parts.scheme == "s3a" else None
