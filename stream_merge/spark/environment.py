"""Errors that come from the machine, not from the data: a full disk, a place closed to us, storage nobody taught Spark.

Spark, Hadoop and delta-rs wrap them in what they were doing; what a person has to know stands at the bottom of a trace.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator

from stream_merge.spark import stores
from stream_merge.spark.versions import HADOOP, captured

REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)
"""Of an `OSError` that `not_writable` has a sentence for."""
_FULL = "[DISK_FULL] the disk is full ({0}); free space for table, checkpoint and spark.local.dir, then run it again"
_CLOSED = (
    "[NOT_WRITABLE] {0} cannot be written ({1}); grant this process (uid {uid}) write permission, or choose another"
    " path"
)
_STORAGE = (
    "[JAR_MISSING] Spark has no file system for {scheme}:// ({0}); add its jars, for example with the Spark conf"
    " spark.jars.packages={package}"
)
_SIGNS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.MULTILINE), sentence)
    for pattern, sentence in (
        (r"(?:Exception|Error): (?:.*: )?(No space left on device|Disk quota exceeded)$", _FULL),
        (r"(No space left on device|Disk quota exceeded) \(os error \d+\)", _FULL),
        (r"java\.io\.FileNotFoundException: (.+) \((Permission denied|Read-only file system)\)$", _CLOSED),
        (
            r"java\.nio\.file\.(?:FileSystemException: (.+): (Read-only file system)|AccessDeniedException: (.+))$",
            _CLOSED,
        ),
        (r"chmod: changing permissions of '(.+)': (Operation not permitted|Read-only file system)$", _CLOSED),
        (r"java\.io\.IOException: (?:Mkdirs failed to create|mkdir of) (?:file:)?([^\s(]+)", _CLOSED),
        (r"object at location (\S+):.* (Permission denied|Read-only file system) \(os error \d+\)", _CLOSED),
        (r"(Class (?:org\.apache\.hadoop\.fs|com\.google\.cloud\.hadoop)\.[\w.]+ not found)$", _STORAGE),
        (r"(No FileSystem for scheme \"?\w+\"?)$", _STORAGE),
    )
)
"""What stands in Java's traces and in delta-rs' sentences -> what to say."""
_STORES = {
    "s3a": ("s3a", f"org.apache.hadoop:hadoop-aws:{HADOOP}"),
    "azurebfs": ("abfss", f"org.apache.hadoop:hadoop-azure:{HADOOP}"),
    "gcs": ("gs", "com.google.cloud.bigdataoss:gcs-connector:hadoop3-2.2.26"),
    "hadoop.fs.gs": ("gs", f"org.apache.hadoop:hadoop-gcp:{HADOOP}"),
}
"""What a class or a scheme holds -> scheme and Maven coordinates."""
_NOTHING_SAID = "no permission"


_TRACEBACK = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t].*\n)*")
_ROW_BELOW = "violated by row with values:"
_TABLE_BELOW = "Preview of invalid data:"


def said(error: BaseException) -> str | None:
    """What the machine or the store has against it, with what to do, if that stands behind an error; else None."""
    for text in _texts(error):
        refused = stores.refused(text)
        if refused is not None:
            return refused
        for pattern, sentence in _SIGNS:
            found = pattern.search(text)
            if found is not None:
                return _filled(sentence, [part for part in found.groups() if part is not None])
    return None


def away(error: BaseException) -> str | None:
    """What was wrong with the store, if that stands behind an error and may be over later; else None."""
    return next((found for found in map(stores.away, _texts(error)) if found is not None), None)


def first_line(text: str) -> str:
    """An error's first line; with the next one behind a colon: the row that breaks a constraint, Python's own error."""
    first, _, rest = without_tracebacks(text).partition("\n")
    if first.endswith(_ROW_BELOW):  # Delta 4.4: a line for each value, which may hold lines itself
        values = rest.split("\n\nJVM stacktrace:")[0].removeprefix(" - ").split("\n - ")
        return f"{first} {', '.join(value.replace(' : ', '=', 1) for value in values)}".replace("\n", "\\n")
    if rest.startswith(_TABLE_BELOW):  # delta-rs 1.6: a table
        header, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in rest.splitlines() if "|" in line)
        found = ["=".join(pair) for row in rows for pair in zip(header, row, strict=False) if pair[1]]
        return f"{first.removesuffix('.')}: {', '.join(found)}"
    return f"{first} {first_line(rest.lstrip())}" if first.endswith(":") and rest.strip() else first


def without_tracebacks(text: str) -> str:
    """An error's text with Python's errors in it, but not with where they were raised."""
    return _TRACEBACK.sub("", text)


def not_writable(path: str, error: OSError) -> str:
    """The sentence for a place where Python was refused."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _filled(_FULL, [str(error.strerror)])
    return _filled(_CLOSED, [path, error.strerror or _NOTHING_SAID])


def _filled(sentence: str, parts: list[str]) -> str:
    by_class = (store for sign, store in _STORES.items() if sign in parts[0])
    named = parts[0].split()[-1].strip('"')
    by_scheme = (store for store in _STORES.values() if store[0] == named)
    scheme, package = next(by_class, next(by_scheme, (named, "the coordinates of its connector")))
    shown = [repr(parts[0]) if sentence is _CLOSED else parts[0], *parts[1:], _NOTHING_SAID]
    return sentence.format(*shown, uid=os.geteuid(), scheme=scheme, package=package)


def _texts(error: BaseException) -> Iterator[str]:
    """What an error and its causes say, in Python and, where it comes from there, in Java with the whole trace."""
    found: BaseException | None = error
    seen: list[BaseException] = []
    while found is not None and found not in seen:
        seen.append(found)
        yield str(found)
        # Of `QueryFailedError`, and of PySpark's errors, whose text may lack it.
        for text in (getattr(found, "trace", None), captured(found, "stackTrace")):
            if isinstance(text, str):
                yield text
        found = found.__cause__ or captured(found, "cause")
