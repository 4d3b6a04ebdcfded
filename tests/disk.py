"""How tests look at a place without Spark: as a folder, also where a test's S3 server keeps a bucket in it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from services.s3 import Bucket

_BUCKETS: dict[str, Bucket] = {}


def keep_bucket(bucket: Bucket) -> None:
    """Remember where a bucket is kept, and how its server is reached."""
    _BUCKETS[bucket.name] = bucket


def on_disk(location: str) -> Path:
    """A location as a path of this machine's file system."""
    bucket, path = _found(location)
    return Path(location) if bucket is None else bucket.folder / path


def beside(location: str) -> list[str]:
    """The names in the folder that a location is in; none where there is no folder, as on a bucket before its files."""
    folder = on_disk(location).parent
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def make_folder(location: str) -> None:
    """An empty folder; in a bucket its mark."""
    bucket, path = _found(location)
    if bucket is None:
        Path(location).mkdir(parents=True)
    else:
        bucket.make_folder(path)


def removed(location: str) -> None:
    """Delete what lies there; in a bucket through its server, which keeps more of an object than a file."""
    bucket, path = _found(location)
    if bucket is None:
        shutil.rmtree(location)
    else:
        bucket.remove(path)


def options_of(location: str) -> dict[str, str] | None:
    """What delta-rs has to be told to reach a location as another process would."""
    bucket, _ = _found(location)
    return None if bucket is None else bucket.storage_options()


def with_scheme(location: str) -> str:
    """The same place under a scheme that tests do not give it."""
    return location.replace("s3a:", "s3:") if "://" in location else f"file:{location}"


def _found(location: str) -> tuple[Bucket | None, str]:
    """The bucket that a location is in, and its path there."""
    parts = urlsplit(location)
    return (_BUCKETS[parts.netloc], parts.path.lstrip("/")) if parts.scheme == "s3a" else (None, location)
