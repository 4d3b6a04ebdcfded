"""Errors of the machine or the object store, in a sentence: a full disk, missing permission, no file system, an outage.

Spark, Hadoop (S3A and ABFS 3.5) and delta-rs (1.6) wrap them; what a person has to know is at the bottom of a trace.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from stream_merge.spark.versions import HADOOP, captured

REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)
"""Numbers of an `OSError` that `not_writable` has a sentence for."""
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
"""Pattern in Java's traces and delta-rs' messages -> sentence."""
_STORES = {
    "s3a": ("s3a", f"org.apache.hadoop:hadoop-aws:{HADOOP}"),
    "azurebfs": ("abfss", f"org.apache.hadoop:hadoop-azure:{HADOOP}"),
    "gcs": ("gs", "com.google.cloud.bigdataoss:gcs-connector:hadoop3-2.2.26"),
    "hadoop.fs.gs": ("gs", f"org.apache.hadoop:hadoop-gcp:{HADOOP}"),
}
"""Part of a class name or scheme -> scheme and Maven coordinates."""
_NOTHING_SAID = "no permission"
_TRACEBACK = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t].*\n)*")
_ROW_BELOW = "violated by row with values:"
_TABLE_BELOW = "Preview of invalid data:"


_CODES = (
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
    "RequestTimeTooSkewed",
    "NoSuchBucket",
    "AccessDenied",
    "SlowDown",
    "ServiceUnavailable",
    "InternalError",
    "AuthenticationFailed",
    "InvalidAuthenticationInfo",
    "ContainerNotFound",
    "FilesystemNotFound",
    "AuthorizationFailure",
    "AuthorizationPermissionMismatch",
    "ServerBusy",
)
"""Error codes of Amazon and, from AuthenticationFailed on, of Azure."""
_CREDENTIALS = frozenset([*_CODES[:7], "AuthenticationFailed", "InvalidAuthenticationInfo"])
_GONE = ("NoSuchBucket", "ContainerNotFound", "FilesystemNotFound")
_BAD_REQUEST, _SERVER_ERROR = 400, 500
_LATER = (408, 429)
_BY_HADOOP = re.compile(
    r"^(?:.*?: )?(?P<name>(?:org\.apache\.hadoop\.(?:fs\.s3a|net)|java\.(?:nio\.file|io|net))\.\w+)"
    r": .*(?:s3a://|software\.amazon\.awssdk\.).*$",
    re.MULTILINE,
)
"""A line of a trace: the class of S3A's exception, and its subject."""
_BY_ABFS = re.compile(
    r"Operation failed: \"[^\"\n]*\", (?P<status>\d{3}), [A-Z]+, (?P<place>https?://[^\s?,]+).*"
    r"|Status code: -1 error code: null error message: "
    r"(?:Auth failure: HTTP Error (?P<refused>\d{3})|(?P<name>[\w.]+): ).*"
)
"""ABFS on a response (AbfsRestOperationException), and on none."""
_PLACE = re.compile(r"s3a://[^\s:'`,]+|(?<= on )[^\s:'`,]+")
"""A put names the key alone."""
_BY_DELTA_RS = re.compile(r"Error performing [A-Z]+ (?P<place>https?://[^\s?]+)\S* in ")
_STATUS = re.compile(r"Status Code: (\d{3})|status code\W+(\d{3})\b")
_COLOURS = re.compile(r"\x1b\[\d*m")
_CODE = re.compile(rf"\b({'|'.join(_CODES)})\b")
_LISTED_LATE = re.compile(r"LogSegment end version \d+ not the same|Invalid table version: \d+|is there and not listed")
_SILENT = (
    "AWSApiCallTimeoutException",
    "AWSClientIOException",
    "AWSNoResponseException",
    "AWSServiceIOException",
    "ConnectException",
    "ConnectTimeoutException",
    "HttpChannelEOFException",
    "InterruptedIOException",
    "NoRouteToHostException",
    "SocketException",
    "SocketTimeoutException",
)
"""S3A's exceptions, by their last names, where there was no response."""
_NO_CREDENTIALS = ("NoAuthWithAWSException", "NoAwsCredentialsException")
_QUOTED = ("violated by row with values:", "Preview of invalid data:")
"""Values of rows follow, with any text."""

_NOT_ACCEPTED = (
    "[STORE_ACCESS_DENIED] the object store rejects the credentials ({answer}); renew them in Hadoop's settings,"
    " storage_options or the environment, then run it again"
)
_DENIED = (
    "[STORE_ACCESS_DENIED] the object store denies access ({answer}); grant the credentials list, get, put and delete,"
    " then run it again"
)
_NO_BUCKET = "[BUCKET_NOT_FOUND] the bucket does not exist ({answer}); create it or correct its name, then run it again"
_NO_ANSWER = "[STORE_UNAVAILABLE] the object store is unavailable, also after retries ({answer}); run it again"
_LATE = "[STORE_UNAVAILABLE] the object store does not list an existing commit yet ({answer}); run it again"


def _store_refusal(text: str) -> str | None:
    """The sentence for a store that a person has to fix; else None."""
    answer = _answer(text)
    return None if answer is None or answer.refusal is None else answer.fill(answer.refusal)


def _store_outage(text: str) -> str | None:
    """The sentence for a store that may work later; else None."""
    late = _LISTED_LATE.search(_own(text))
    if late is not None:
        return _LATE.format(answer=late.group())
    answer = _answer(text)
    return None if answer is None or answer.refusal is not None or not answer.is_away else answer.fill(_NO_ANSWER)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """A store's response, as an error reports it."""

    status: int | None
    code: str | None
    name: str | None
    """Last name of S3A's exception; None for an error of delta-rs."""
    place: str

    @property
    def refusal(self) -> str | None:
        """The sentence for a request that the store will not accept later either."""
        if self.code in _CREDENTIALS or self.name in _NO_CREDENTIALS:
            return _NOT_ACCEPTED
        if self.code in _GONE or self.name == "UnknownStoreException":
            return _NO_BUCKET
        if self.status in (401, 403):
            return _DENIED
        # A HEAD is answered without a word, and to expired credentials with a 400.
        return _NOT_ACCEPTED if self.status == _BAD_REQUEST and self.code is None else None

    @property
    def is_away(self) -> bool:
        """Whether it may accept it later."""
        if self.status is None:
            return self.name is None or self.name in _SILENT
        return self.status >= _SERVER_ERROR or self.status in _LATER

    def fill(self, sentence: str) -> str:
        codes = " ".join(str(part) for part in (self.status, self.code) if part is not None)
        return sentence.format(answer=f"{codes or self.name or 'no connection'}, {self.place}")


def _answer(text: str) -> _Answer | None:
    own = _own(text)
    by_hadoop = _BY_ABFS.search(own) or _BY_HADOOP.search(own)
    match = by_hadoop or _BY_DELTA_RS.search(own)
    if match is None:
        return None
    message = match.group() if by_hadoop else own[match.start() :]
    parts = match.groupdict()
    status, code = _STATUS.search(message), _CODE.search(message)
    number = (
        parts.get("status") or parts.get("refused") or (None if status is None else status.group(1) or status.group(2))
    )
    name, place = parts.get("name"), parts.get("place")
    if place is None:
        where = _PLACE.search(message)
        place = "the store" if where is None else where.group()
    return _Answer(
        status=None if number is None else int(number),
        code=None if code is None else code.group(1),
        name=None if name is None else name.rsplit(".", 1)[-1],
        place=place,
    )


def _own(text: str) -> str:
    """The error's own text, without colours and values of rows."""
    for sign in _QUOTED:
        text = text.split(sign, 1)[0]
    return _COLOURS.sub("", text)


def said(error: BaseException) -> str | None:
    """The sentence for an error that the machine or the store causes until a person acts; else None."""
    for text in _texts(error):
        refused = _store_refusal(text)
        if refused is not None:
            return refused
        for pattern, sentence in _SIGNS:
            match = pattern.search(text)
            if match is not None:
                return _filled(sentence, [part for part in match.groups() if part is not None])
    return None


def away(error: BaseException) -> str | None:
    """The sentence for an outage of the store behind an error; else None."""
    return next((outage for outage in map(_store_outage, _texts(error)) if outage is not None), None)


def first_line(text: str) -> str:
    """An error's first line, with the row that breaks a constraint or Python's own error from the next one."""
    first, _, rest = without_tracebacks(text).partition("\n")
    if first.endswith(_ROW_BELOW):  # Delta 4.4: a line for each value, which may hold lines itself
        values = rest.split("\n\nJVM stacktrace:")[0].removeprefix(" - ").split("\n - ")
        return f"{first} {', '.join(value.replace(' : ', '=', 1) for value in values)}".replace("\n", "\\n")
    if rest.startswith(_TABLE_BELOW):  # delta-rs 1.6: a table
        header, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in rest.splitlines() if "|" in line)
        cells = ["=".join(pair) for row in rows for pair in zip(header, row, strict=False) if pair[1]]
        return f"{first.removesuffix('.')}: {', '.join(cells)}"
    return f"{first} {first_line(rest.lstrip())}" if first.endswith(":") and rest.strip() else first


def without_tracebacks(text: str) -> str:
    """An error's text without Python's tracebacks in it."""
    return _TRACEBACK.sub("", text)


def not_writable(path: str, error: OSError) -> str:
    """The sentence for a path where Python was refused."""
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
    """Messages of an error and its causes, in Python and, with the trace, in Java."""
    cause: BaseException | None = error
    seen: list[BaseException] = []
    while cause is not None and cause not in seen:
        seen.append(cause)
        yield str(cause)
        # of `QueryFailedError`, and of PySpark's errors, whose text may lack it
        for text in (getattr(cause, "trace", None), captured(cause, "stackTrace")):
            if isinstance(text, str):
                yield text
        cause = cause.__cause__ or captured(cause, "cause")
