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


def beside(location: str) -> list[str]:
    """The names in the folder that a location is in; none where there is no folder, as on a bucket before its files."""
    folder = on_disk(location).parent
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def options_of(location: str) -> dict[str, str] | None:
    """What delta-rs has to be told to reach a location as another process would."""
    parts = urlsplit(location)
    return _BUCKETS[parts.netloc][1] if parts.scheme == "s3a" else None


def with_scheme(location: str) -> str:
    """The same place under a scheme that tests do not give it."""
    return location.replace("s3a:", "s3:") if "://" in location else f"file:{location}"
