"""Where Prometheus scrapes: a plain `/metrics` endpoint."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from prometheus_client import REGISTRY, CollectorRegistry, start_http_server

from stream_merge.errors import ConfigError

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment


class MetricsServer:
    """A running `/metrics` endpoint; closes at the end of a `with` block."""

    def __init__(self, port: int, host: str, registry: CollectorRegistry) -> None:
        self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        app = self._server.get_app()
        if app is not None:
            self._server.set_app(_only_metrics(app))
        self.port = int(self._server.server_port)
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self.port}/metrics"

    def close(self) -> None:
        """Stop serving and free the port; may be called twice."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _only_metrics(app: WSGIApplication) -> WSGIApplication:
    """prometheus_client's own answers at any path: what is asked for health would always be well."""

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ.get("PATH_INFO") == "/metrics":
            return app(environ, start_response)
        start_response("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
        return [b"only /metrics is here\n"]

    return answer


def serve(port: int = 9108, host: str = "127.0.0.1", registry: CollectorRegistry | None = None) -> MetricsServer:
    """Serve a registry over plain HTTP, without authentication: keep it on loopback or a private network.

    Args:
        port: 0 takes a free one; see the server's `port`.
        host: address to listen on.
        registry: None serves prometheus_client's own.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    try:
        return MetricsServer(port, host, REGISTRY if registry is None else registry)
    except (OSError, OverflowError) as err:
        reason = getattr(err, "strerror", None) or str(err)
        msg = (
            f"[METRICS_PORT_UNAVAILABLE] cannot serve metrics on {host}:{port}: {reason}; choose another port, or 0 for"
            " a free one"
        )
        raise ConfigError(msg) from err
