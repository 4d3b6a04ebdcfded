"""`/metrics`, `/livez` and `/readyz` over HTTP or HTTPS, in a thread with an event loop.

The server of prometheus_client 0.26 does the TLS handshake where it accepts connections, so that one silent client
stops all others, and it answers any path with metrics.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import ssl
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from prometheus_client import REGISTRY, CollectorRegistry, make_asgi_app

from stream_merge.errors import ConfigError
from stream_merge.metrics.health import Health
from stream_merge.model.logs import tell

log = logging.getLogger(__name__)

_REQUEST_SECONDS = 5.0
"""Limit for a client's request, and again for its answer."""
_RENEW_SECONDS = 10.0
"""Time until a changed certificate is served."""
_REQUEST_BYTES = 16 * 1024
_MOST_CONNECTIONS = 512
"""Beyond these the oldest one is closed."""
_TEXT = (b"content-type", b"text/plain; charset=utf-8")


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """TLS and authentication of the metrics server."""

    certificate_file: str | None = None
    """PEM with the certificate chain: serve HTTPS. Read again when it changes."""
    key_file: str | None = None
    """PEM with the private key; None: it is in the certificate's file."""
    token_file: str | None = None
    """Its text is the bearer token without which `/metrics` is refused; read for each request. Probes need none."""

    def context(self) -> ssl.SSLContext | None:
        """TLS 1.2 or newer; None: plain HTTP. Raises `ConfigError` for unreadable or mismatched files."""
        for name in (self.certificate_file, self.key_file, self.token_file):
            if name is not None and not os.access(name, os.R_OK):
                msg = f"[CANNOT_READ_FILE] file {name!r} of the metrics server cannot be read; correct the path"
                raise ConfigError(msg)
        if self.certificate_file is None:
            if self.key_file is not None:
                msg = "[MISSING_SETTING] a key_file for the metrics server needs a certificate_file, too"
                raise ConfigError(msg)
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.certificate_file, self.key_file, _no_password)
        except (ssl.SSLError, OSError, ValueError) as err:
            msg = (
                f"[CANNOT_READ_FILE] {self.certificate_file!r} is no PEM certificate with its private key ({err});"
                " correct certificate_file or key_file"
            )
            raise ConfigError(msg) from err
        return context

    def admits(self, authorization: str) -> bool:
        """Whether a request's header `Authorization` has the token."""
        if self.token_file is None:
            return True
        wanted = "Bearer " + Path(self.token_file).read_text(encoding="utf-8").strip()
        return hmac.compare_digest(wanted.encode(), authorization.encode())


class MetricsServer:
    """A running server; closes at the end of a `with` block.

    Attributes:
        port: where it listens.
        url: of `/metrics`.
        health: state behind `/livez` and `/readyz`.
    """

    def __init__(self, port: int, host: str, registry: CollectorRegistry, health: Health, access: Access) -> None:
        self.health = health
        self._access = access
        self._exposition = make_asgi_app(registry)
        self._tls = access.context()
        self._changed_at = self._certificate_time()
        self._open: dict[asyncio.Task[None], None] = {}
        self._loop = asyncio.new_event_loop()
        try:
            self._server = self._loop.run_until_complete(self._listen(port, host))
        except BaseException:
            self._loop.close()
            raise
        self.port = int(self._server.sockets[0].getsockname()[1])
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http{'s' if self._tls else ''}://{shown}:{self.port}/metrics"
        self._renew()
        self._thread = threading.Thread(target=self._loop.run_forever, name="stream-merge-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving and free the port; may be called twice."""
        self.health.close()
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _listen(self, port: int, host: str) -> asyncio.Server:
        tls: dict[str, Any] = {"ssl": self._tls, "ssl_handshake_timeout": _REQUEST_SECONDS} if self._tls else {}
        limits = {"limit": _REQUEST_BYTES, "backlog": _MOST_CONNECTIONS}
        return await asyncio.start_server(self._serve, host, port, **limits, **tls)

    async def _shut(self) -> None:
        self._server.close()
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._open) >= _MOST_CONNECTIONS:
            next(iter(self._open)).cancel()
        self._open[task] = None
        try:
            with suppress(asyncio.CancelledError, asyncio.IncompleteReadError, TimeoutError, OSError):
                await self._one_request(reader, writer)
        finally:
            del self._open[task]
            writer.transport.abort()

    async def _one_request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _REQUEST_SECONDS)
        except asyncio.LimitOverrunError:
            writer.write(_answer(*_text(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "")))
        else:
            try:
                answer = await self._answer_to(head.decode("latin-1"))
            except Exception:  # as of a collector of somebody else, or a token file that is gone
                tell(log.error, "metrics_request_failed", exc_info=True)
                answer = _answer(*_text(HTTPStatus.INTERNAL_SERVER_ERROR, "failed; the log says why"))
            writer.write(answer)
        writer.close()  # when all is sent; the abort that follows would take the rest of the answer with it
        await asyncio.wait_for(writer.wait_closed(), _REQUEST_SECONDS)

    async def _answer_to(self, head: str) -> bytes:
        request, *lines = head.split("\r\n")
        method, _, rest = request.partition(" ")
        target = urlsplit(rest.rpartition(" ")[0])
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if method not in ("GET", "HEAD"):
            return _answer(*_text(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD"))
        match target.path:
            case "/metrics" if not self._access.admits(headers.get("authorization", "")):
                status, fields, body = _text(HTTPStatus.UNAUTHORIZED, "a bearer token is needed")
                fields = [*fields, (b"www-authenticate", b"Bearer")]
            case "/metrics":
                status, fields, body = await self._scrape(target.query, headers)
            case "/livez" | "/readyz":
                problem = self.health.problem()
                is_up, text = (problem is None, problem or "alive") if target.path == "/livez" else self.health.ready()
                status, fields, body = _text(HTTPStatus.OK if is_up else HTTPStatus.SERVICE_UNAVAILABLE, text)
            case _:
                status, fields, body = _text(HTTPStatus.NOT_FOUND, "only /metrics, /livez and /readyz are here")
        return _answer(status, fields, body, with_body=method == "GET")

    async def _scrape(self, query: str, headers: dict[str, str]) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """The answer of prometheus_client's ASGI application: format by `Accept`, gzip, `name[]`."""
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        given = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        scope = {"type": "http", "method": "GET", "path": "/metrics", "query_string": query.encode(), "headers": given}
        await self._exposition(scope, receive, send)
        start, body = sent
        return int(start["status"]), list(start["headers"]), bytes(body["body"])

    def _renew(self) -> None:
        """Load a renewed certificate; a half-written one is tried again."""
        self._loop.call_later(_RENEW_SECONDS, self._renew)
        certificate, changed_at = self._access.certificate_file, self._certificate_time()
        if self._tls is None or certificate is None or changed_at == self._changed_at:
            return
        with suppress(ConfigError, ssl.SSLError, OSError):
            self._access.context()  # a failed load into the context in use would change it
            self._tls.load_cert_chain(certificate, self._access.key_file)
            self._changed_at = changed_at

    def _certificate_time(self) -> int | None:
        try:
            return None if self._access.certificate_file is None else os.stat(self._access.certificate_file).st_mtime_ns
        except OSError:
            return None


def _no_password() -> str:
    """Refuses a password, for which OpenSSL would wait on the terminal."""
    msg = "the private key has a password; remove it"
    raise ValueError(msg)


def _text(status: HTTPStatus, text: str) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    return status.value, [_TEXT], f"{text or status.phrase}\n".encode()


def _answer(status: int, fields: Iterable[tuple[bytes, bytes]], body: bytes, *, with_body: bool = True) -> bytes:
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}".encode()]
    lines += [name + b": " + value for name, value in fields]
    lines += [b"content-length: %d" % len(body), b"connection: close", b"", b""]
    return b"\r\n".join(lines) + (body if with_body else b"")


def serve(
    port: int = 9108,
    host: str = "127.0.0.1",
    registry: CollectorRegistry | None = None,
    *,
    health: Health | None = None,
    access: Access | None = None,
) -> MetricsServer:
    """Serve `/metrics`, `/livez` and `/readyz` in a thread of their own.

    Without `access` it is plain HTTP that everybody may read who reaches the address: keep it on loopback or in a
    private network.

    Args:
        port: 0 takes a free one; see the server's `port`.
        host: address to listen on.
        registry: None serves prometheus_client's own.
        health: `Health(spark)` follows all streaming queries of a session; None: the probes answer `starting` until
            the server's `health` follows a session.
        access: certificate and bearer token.

    Raises:
        ConfigError: the address cannot be listened on, or a file of `access` is not what it has to be.
    """
    if not host:  # which would be every address
        msg = "[INVALID_SETTING] the address of the metrics server is empty; 0.0.0.0 is every address"
        raise ConfigError(msg)
    try:
        return MetricsServer(
            port, host, REGISTRY if registry is None else registry, health or Health(), access or Access()
        )
    except (OSError, OverflowError) as err:
        reason = os.strerror(err.errno) if isinstance(err, OSError) and err.errno else str(err)
        msg = (
            f"[METRICS_PORT_UNAVAILABLE] cannot serve metrics on {host}:{port}: {reason}; choose another port, or 0 for"
            " a free one"
        )
        raise ConfigError(msg) from err
