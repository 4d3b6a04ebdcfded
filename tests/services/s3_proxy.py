"""A proxy in front of the S3 server: it counts requests, delays them, and answers some as stores do on bad days.

Requests go through as they came: their signatures cover the Host header, which stays the client's. It is a process of
its own, since delta-rs (1.6) holds Python's interpreter lock while it waits for some answers.
"""

from __future__ import annotations

import re
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import unescape

from services import ROOT, Server, free_port
from services.s3 import Bucket, S3Server

Kind = Literal["GET", "HEAD", "PUT", "LIST", "DELETE", "POST"]
Caller = Literal["spark", "delta-rs", "other"]
_CALLERS: dict[str, Caller] = {"aws-sdk-java": "spark", "hadoop": "spark", "object_store": "delta-rs"}
"""What stands in user agents."""
_OF_ONE_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "expect"})
_CONTENTS = re.compile(rb"<Contents>.*?</Contents>", re.DOTALL)
_KEY = re.compile(rb"<Key>(.*?)</Key>", re.DOTALL)
_BLOB = re.compile(rb"<Blob>.*?</Blob>", re.DOTALL)
_NAME = re.compile(rb"<Name>(.*?)</Name>", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One request of a client."""

    kind: Kind
    """The method; LIST for a GET of a bucket."""
    caller: Caller
    bucket: str
    key: str
    """Of the object; of a listing its prefix."""
    first: str = ""
    """Of a listing on Azure: the first key that is asked for."""
    started: float
    ended: float = 0.0
    status: int = 0
    """Of the answer; 0 where there was none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What the server, or the proxy in its place, says."""

    status: int
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""


def said(status: int, code: str, message: str = "") -> Answer:
    """An error as S3 writes it."""
    text = (
        f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>{message or code}</Message></Error>'
    )
    return Answer(status=status, headers=[("Content-Type", "application/xml")], body=text.encode())


SLOW_DOWN = said(503, "SlowDown", "Please reduce your request rate.")
EXPIRED = said(400, "ExpiredToken", "The provided token has expired.")
NO_BUCKET = said(404, "NoSuchBucket", "The specified bucket does not exist")
DENIED = said(403, "AccessDenied", "Access Denied")

Acted = Callable[[], Answer]
"""Has the server act, and gives its answer."""
Act = Callable[[Request, Acted], Answer | None]
"""What becomes of a request: the answer; None breaks the connection off."""


@dataclass(frozen=True, slots=True)
class Answering:
    """The server never hears of it."""

    answer: Answer

    def __call__(self, request: Request, server: Acted) -> Answer:
        return self.answer


@dataclass(frozen=True, slots=True)
class Delayed:
    """The answer comes late."""

    seconds: float

    def __call__(self, request: Request, server: Acted) -> Answer:
        found = server()
        time.sleep(self.seconds)
        return found


@dataclass(frozen=True, slots=True)
class Without:
    """A listing lacks the keys in which a pattern is found."""

    hidden: str

    def __call__(self, request: Request, server: Acted) -> Answer:
        def kept(entry: re.Match[bytes]) -> bytes:
            key = _KEY.search(entry.group())
            is_hidden = key is not None and re.search(self.hidden, unquote(key.group(1).decode()))
            return b"" if is_hidden else entry.group()

        found = server()
        return replace(found, body=_CONTENTS.sub(kept, found.body))


@dataclass(frozen=True, slots=True)
class StartingLate:
    """A listing on Azure begins with the key that is asked for, which its emulator does not heed."""

    def __call__(self, request: Request, server: Acted) -> Answer:
        def kept(entry: re.Match[bytes]) -> bytes:
            name = _NAME.search(entry.group())
            return b"" if name is not None and unescape(name.group(1).decode()) < request.first else entry.group()

        found = server()
        return replace(found, body=_BLOB.sub(kept, found.body)) if request.first else found


def dropped(_: Request, __: Acted) -> None:
    """The connection breaks before the server hears of it."""


def answer_dropped(_: Request, server: Acted) -> None:
    """The server has acted when the connection breaks."""
    server()


def answer_lost(_: Request, server: Acted) -> Answer:
    """The server has acted, and something on the way says that it has not: clients try after such an answer again."""
    server()
    return said(500, "InternalError", "We encountered an internal error. Please try again.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What happens to which requests."""

    act: Act
    kinds: frozenset[Kind]
    """Empty: to all."""
    where: str
    """A regular expression, found in the keys."""
    caller: Caller | None
    """None: whoever it is."""
    times: int | None
    """To so many of them; None: to all."""

    def fits(self, request: Request) -> bool:
        return (
            (not self.kinds or request.kind in self.kinds)
            and self.caller in (None, request.caller)
            and re.search(self.where, request.key) is not None
        )


class Behind(Protocol):
    """The server that a proxy stands before."""

    access_key: str
    secret_key: str
    port: int


class S3Proxy:
    """Stands in the server's place: the same keys, another endpoint.

    Args:
        server: that acts.
        folder: its own.
    """

    def __init__(self, server: Behind, folder: Path) -> None:
        self.access_key, self.secret_key = server.access_key, server.secret_key
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._behind = server
        self._socket = folder / "control"
        folder.mkdir(parents=True)
        call = f"from services.s3_proxy import serve; serve({self.port}, {server.port}, {str(self._socket)!r})"
        self._process = Server([sys.executable, "-c", call], folder, environment={"PYTHONPATH": str(ROOT / "tests")})
        self._control: Connection | None = None

    def start(self) -> None:
        self._process.start(self._socket.exists)
        self._control = Client(str(self._socket))

    def stop(self) -> None:
        if self._control is not None:
            self._control.close()
        self._process.stop()

    def bucket(self, name: str) -> Bucket:
        """A bucket of an S3 server, seen through the proxy; made where it is missing."""
        assert isinstance(self._behind, S3Server)
        return Bucket(server=self, name=name, folder=self._behind.bucket(name).folder)

    def delay(self, seconds: float) -> None:
        """Have each request take so much longer from now on."""
        self._ask("delay", seconds)

    @contextmanager
    def fault(
        self,
        act: Act,
        *kinds: Kind,
        where: str = "",
        caller: Caller | None = None,
        times: int | None = None,
    ) -> Iterator[Callable[[], int]]:
        """Have something happen to requests for as long as the block runs; see `Fault`.

        Returns: how often it has happened so far.
        """
        wanted = Fault(act=act, kinds=frozenset(kinds), where=where, caller=caller, times=times)
        number = self._ask("add", wanted)
        try:
            yield lambda: int(self._ask("hits", number))
        finally:
            self._ask("remove", number)

    @contextmanager
    def counted(self) -> Iterator[list[Request]]:
        """The requests that come while the block runs; there when it is over."""
        before, found = self._ask("count"), list[Request]()
        yield found
        found += self._ask("seen", before)

    def _ask(self, name: str, *args: object) -> Any:
        assert self._control is not None
        self._control.send((name, args))
        return self._control.recv()


class _Proxy:
    """What the process knows and does.

    Args:
        port: of the server that acts.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._delay = 0.0
        self._seen: list[Request] = []
        self._faults: dict[int, Fault] = {}
        self._hits: Counter[int] = Counter()
        self._lock = threading.Lock()

    def delay(self, seconds: float) -> None:
        self._delay = seconds

    def add(self, fault: Fault) -> int:
        """The number of a fault that comes before those that are there."""
        with self._lock:
            number = -1 - len(self._hits)
            self._hits[number] = 0
            self._faults = {number: fault, **self._faults}
        return number

    def remove(self, number: int) -> None:
        with self._lock:
            del self._faults[number]

    def hits(self, number: int) -> int:
        return self._hits[number]

    def count(self) -> int:
        return len(self._seen)

    def seen(self, since: int) -> list[Request]:
        with self._lock:
            return self._seen[since:]

    def told(self, request: Request) -> None:
        with self._lock:
            self._seen.append(request)

    def answered(self, request: Request, server: Acted) -> Answer | None:
        """What becomes of a request."""
        time.sleep(self._delay)
        act = self._chosen(request)
        return server() if act is None else act(request, server)

    def _chosen(self, request: Request) -> Act | None:
        with self._lock:
            for number, fault in self._faults.items():
                if fault.times != self._hits[number] and fault.fits(request):
                    self._hits[number] += 1
                    return fault.act
        return None

    def passed(self, handler: _Handler, body: bytes) -> Answer:
        """Have the server act."""
        connection = handler.to_server = handler.to_server or HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            connection.putrequest(handler.command, handler.path, skip_host=True, skip_accept_encoding=True)
            for name, value in handler.headers.items():
                if name.lower() not in _OF_ONE_HOP:
                    connection.putheader(name, value)
            if body or handler.command in ("PUT", "POST"):
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body or None)
            found = connection.getresponse()
            return Answer(status=found.status, headers=found.getheaders(), body=found.read())
        except (OSError, HTTPException):
            connection.close()
            handler.to_server = None
            raise


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64
    proxy: _Proxy

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client, or the server, has gone: the other side notices by itself."""


class _Handler(BaseHTTPRequestHandler):
    """One connection of a client, with one of its own to the server."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Http
    to_server: HTTPConnection | None = None

    def finish(self) -> None:
        if self.to_server is not None:
            self.to_server.close()
        with suppress(OSError):
            super().finish()

    def _handle(self) -> None:
        proxy = self.server.proxy
        body = self._body()
        request, status = self._request(), 0
        try:
            answer = proxy.answered(request, lambda: proxy.passed(self, body))
            status = 0 if answer is None else answer.status
        finally:
            proxy.told(replace(request, ended=time.monotonic(), status=status))
        if answer is None:
            self.close_connection = True
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
        else:
            self._answer(answer)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle  # noqa: N815

    def log_message(self, *_: Any) -> None:
        """Nothing: requests are told."""

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _request(self) -> Request:
        parts = urlsplit(self.path)
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        agent = self.headers.get("User-Agent", "").lower()
        query = parse_qs(parts.query)
        is_listing = self.command == "GET" and (not key or query.get("comp") == ["list"])
        kind: Any = "LIST" if is_listing else self.command
        return Request(
            kind=kind,
            caller=next((caller for sign, caller in _CALLERS.items() if sign in agent), "other"),
            bucket=bucket,
            key=query.get("prefix", [""])[0] if is_listing else key,
            first=query.get("startFrom", [""])[0],
            started=time.monotonic(),
        )

    def _answer(self, answer: Answer) -> None:
        self.send_response_only(answer.status)
        length = str(len(answer.body))
        for name, value in answer.headers:
            if name.lower() == "content-length" and self.command == "HEAD":
                length = value
            elif name.lower() not in _OF_ONE_HOP:
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)


def serve(port: int, behind: int, control: str) -> None:
    """Stand before a server at another port, until who talks to it by the socket has gone."""
    proxy = _Proxy(behind)
    http = _Http(("127.0.0.1", port), _Handler)
    http.proxy = proxy
    threading.Thread(target=http.serve_forever, daemon=True).start()
    with Listener(control) as listener, listener.accept() as client, suppress(EOFError):
        while True:
            name, args = client.recv()
            client.send(getattr(proxy, name)(*args))


def by_kind(requests: list[Request]) -> Counter[str]:
    """How many requests of each kind there are."""
    return Counter(request.kind for request in requests)


def shown(requests: list[Request]) -> str:
    """Requests, one a line, for a message of a test that has counted too many."""
    return "\n".join(f"{one.caller:8} {one.kind:6} {one.status} {one.key}" for one in requests)
