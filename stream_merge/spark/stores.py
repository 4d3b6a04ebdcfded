"""What an object store has answered, by errors of Hadoop's S3A and ABFS (3.5) and of delta-rs (1.6), in a sentence."""

from __future__ import annotations

import re
from dataclasses import dataclass

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
"""Amazon's, and from AuthenticationFailed on Azure's."""
_CREDENTIALS = frozenset([*_CODES[:7], "AuthenticationFailed", "InvalidAuthenticationInfo"])
_GONE = ("NoSuchBucket", "ContainerNotFound", "FilesystemNotFound")
_BAD_REQUEST, _SERVER_ERROR = 400, 500
_LATER = (408, 429)
_BY_HADOOP = re.compile(
    r"^(?:.*?: )?(?P<name>(?:org\.apache\.hadoop\.(?:fs\.s3a|net)|java\.(?:nio\.file|io|net))\.\w+)"
    r": .*(?:s3a://|software\.amazon\.awssdk\.).*$",
    re.MULTILINE,
)
"""A line of a trace: the class of S3A's exception, and what it was about."""
_BY_ABFS = re.compile(
    r"Operation failed: \"[^\"\n]*\", (?P<status>\d{3}), [A-Z]+, (?P<place>https?://[^\s?,]+).*"
    r"|Status code: -1 error code: null error message: "
    r"(?:Auth failure: HTTP Error (?P<refused>\d{3})|(?P<name>[\w.]+): ).*"
)
"""What ABFS says of an answer (AbfsRestOperationException), and of none."""
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
"""S3A's exceptions, by their last names, where there was no answer at all."""
_NO_CREDENTIALS = ("NoAuthWithAWSException", "NoAwsCredentialsException")
_QUOTED = ("violated by row with values:", "Preview of invalid data:")
"""Behind them stand values of rows, which may say anything."""

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


def refused(text: str) -> str | None:
    """What a person has to do before the store takes requests, if that is what an error says; else None."""
    found = _answer(text)
    return None if found is None or found.refusal is None else found.told(found.refusal)


def away(text: str) -> str | None:
    """What was wrong with the store, if an error says that it may work later; else None."""
    late = _LISTED_LATE.search(_own(text))
    if late is not None:
        return _LATE.format(answer=late.group())
    found = _answer(text)
    return None if found is None or found.refusal is not None or not found.is_away else found.told(_NO_ANSWER)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """What an error says of a request."""

    status: int | None
    code: str | None
    """S3's."""
    name: str | None
    """Last name of S3A's exception; None for an error of delta-rs."""
    place: str

    @property
    def refusal(self) -> str | None:
        """The sentence for a store that will not take the request later either."""
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
        """Whether it may take it later."""
        if self.status is None:
            return self.name is None or self.name in _SILENT
        return self.status >= _SERVER_ERROR or self.status in _LATER

    def told(self, sentence: str) -> str:
        said = " ".join(str(part) for part in (self.status, self.code) if part is not None)
        return sentence.format(answer=f"{said or self.name or 'no connection'}, {self.place}")


def _answer(text: str) -> _Answer | None:
    own = _own(text)
    found = _BY_ABFS.search(own) or _BY_HADOOP.search(own)
    said = "" if found is None else found.group()
    if found is None:
        found = _BY_DELTA_RS.search(own)
        if found is None:
            return None
        said = own[found.start() :]
    parts = found.groupdict()
    status, code = _STATUS.search(said), _CODE.search(said)
    number = (
        parts.get("status") or parts.get("refused") or (None if status is None else status.group(1) or status.group(2))
    )
    name, place = parts.get("name"), parts.get("place")
    if place is None:
        where = _PLACE.search(said)
        place = "the store" if where is None else where.group()
    return _Answer(
        status=None if number is None else int(number),
        code=None if code is None else code.group(1),
        name=None if name is None else name.rsplit(".", 1)[-1],
        place=place,
    )


def _own(text: str) -> str:
    """What the error itself says, on lines without colours."""
    for sign in _QUOTED:
        text = text.split(sign, 1)[0]
    return _COLOURS.sub("", text)
