"""Certificate files of a connection that Spark (Java) or kafka-python (OpenSSL) cannot use, checked offline."""

from __future__ import annotations

import base64
import itertools
import re
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from stream_merge.sources.kafka.connection import Security

_BLOCK = re.compile(r"-----BEGIN ([A-Z0-9 ]+)-----(.*?)-----END \1-----", re.DOTALL)
_KEY = "PRIVATE KEY"
_JAVA_KEYS = {
    bytes.fromhex("2a864886f70d010101"),  # RSA
    bytes.fromhex("2a8648ce380401"),  # DSA
    bytes.fromhex("2a8648ce3d0201"),  # EC
}
"""Algorithms (object identifiers) of private keys in kafka-clients 3.9."""
_VERSION_TAG = 0xA0
_SHORT_TIME_TAG = 0x17
_LONG_LENGTH = 0x80


class _Block(NamedTuple):
    label: str
    text: str

    @property
    def der(self) -> bytes:
        return base64.b64decode("".join(self.text.split()))


def problems(security: Security) -> list[str]:
    """Why a client would fail, a sentence for each problem."""
    return [
        *(_ca_problems(security.ca_file) if security.ca_file is not None else ()),
        *(_certificate_problems(security.certificate_file) if security.certificate_file is not None else ()),
    ]


def remark(security: Security) -> str | None:
    """A difference between the clients that is not a problem."""
    if not security.protocol.endswith("SSL") or security.ca_file is not None:
        return None
    paths = ssl.get_default_verify_paths()
    return (
        "no ca_file, so Spark trusts what Java's own store holds and kafka-python what the system's does"
        f" ({paths.cafile or paths.capath}); name a ca_file to let both trust the same"
    )


def expires_at(file: str) -> float:
    """Unix time at which the first certificate of a PEM file expires. Raises `OSError`, or `ValueError` without any."""
    chain = [block for block in _blocks(file) if block.label == "CERTIFICATE"]
    return min(_end(_signed(block.der)[1]) for block in chain)


def _ca_problems(file: str) -> Iterator[str]:
    try:
        certificates = [block for block in _blocks(file) if block.label.endswith("CERTIFICATE")]
    except OSError as err:
        yield f"ca_file {file!r} cannot be read: {err.strerror}"
        return
    if not certificates:
        yield f"ca_file {file!r} holds no certificate in PEM"
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(file)
        names = [_signed(block.der) for block in certificates]
    except (OSError, ValueError, IndexError) as err:  # SSLError is an OSError
        yield f"ca_file {file!r} holds a certificate that cannot be read: {err}"
        return
    if all(issuer != subject for issuer, _, subject in names):
        yield (
            f"ca_file {file!r} holds intermediate certificates only, which are enough for Spark; kafka-python"
            " also requires their root: add it"
        )


def _certificate_problems(file: str) -> Iterator[str]:
    try:
        blocks = _blocks(file)
    except OSError as err:
        yield f"certificate_file {file!r} cannot be read: {err.strerror}"
        return
    keys = [block for block in blocks if block.label.endswith(_KEY)]
    chain = [block for block in blocks if block.label == "CERTIFICATE"]
    if not keys or not chain:
        lacks = "private key" if not keys else "certificate"
        yield f"certificate_file {file!r} holds no {lacks} in PEM; it needs the key and, behind it, the chain"
        return
    if len(keys) > 1:
        yield f"certificate_file {file!r} holds {len(keys)} private keys; Spark takes one only"
    if keys[0].label.startswith("ENCRYPTED") or "ENCRYPTED" in keys[0].text:
        yield (
            f"the private key in {file!r} is encrypted, and neither client is given a pass phrase; write it without"
            " one ('openssl pkcs8 -topk8 -nodes') into a file that only the job may read"
        )
        return
    yield from _key_problems(file, keys[0])
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(file, password="")
        names = [_signed(block.der) for block in chain]
    except (OSError, ValueError, IndexError) as err:
        yield (
            f"kafka-python cannot load certificate_file {file!r} ({err}); its first certificate must be that of the key"
        )
        return
    if any(issuer != subject for (issuer, _, _), (_, _, subject) in itertools.pairwise(names)):
        yield (
            f"the certificates in {file!r} are not a chain; Spark requires each one followed by that of its issuer and"
            " nothing else"
        )


def _key_problems(file: str, key: _Block) -> Iterator[str]:
    if key.label != _KEY:
        yield (
            f"the private key in {file!r} is a {key.label!r}, which kafka-python reads; Spark reads PKCS #8 only:"
            " convert it with 'openssl pkcs8 -topk8 -nodes'"
        )
        return
    try:
        algorithm = _items(_items(key.der)[0].content)[1]
        is_known = _items(algorithm.content)[0].content in _JAVA_KEYS
    except (ValueError, IndexError):
        return  # OpenSSL reports it
    if not is_known:
        yield f"the private key in {file!r} is neither RSA nor DSA nor EC, and Spark takes no others"


def _blocks(file: str) -> list[_Block]:
    return [_Block(*block) for block in _BLOCK.findall(Path(file).read_text(encoding="utf-8", errors="replace"))]


# -- just enough DER -----------------------------------------------------------------------------


class _Item(NamedTuple):
    tag: int
    content: bytes


def _items(der: bytes) -> list[_Item]:
    """The consecutive values of a text in DER."""
    items = []
    start = 0
    while start < len(der):
        tag, length = der[start], der[start + 1]
        start += 2
        if length >= _LONG_LENGTH:
            digits = length - _LONG_LENGTH
            length = int.from_bytes(der[start : start + digits], "big")
            start += digits
        items.append(_Item(tag, der[start : start + length]))
        start += length
    return items


def _signed(certificate: bytes) -> tuple[bytes, bytes, bytes]:
    """Issuer, validity and subject of a certificate in DER."""
    signed = _items(_items(_items(certificate)[0].content)[0].content)
    _serial, _algorithm, issuer, validity, subject, *_ = [item for item in signed if item.tag != _VERSION_TAG]
    return issuer.content, validity.content, subject.content


def _end(validity: bytes) -> float:
    """Unix time of the end (RFC 5280, 4.1.2.5): UTC in seconds, with two digits for the year until 2049."""
    _, end = _items(validity)
    year = "%y" if end.tag == _SHORT_TIME_TAG else "%Y"
    return datetime.strptime(end.content.decode("ascii"), f"{year}%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
