"""`/metrics`, `/livez` and `/readyz`: who gets an answer, and which one."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from prometheus_client import CollectorRegistry
from services import tls

from stream_merge.errors import ConfigError
from stream_merge.metrics import server as module
from stream_merge.metrics.instruments import MergeMetrics
from stream_merge.metrics.server import Access, MetricsServer, serve


@pytest.fixture
def registry() -> CollectorRegistry:
    made = CollectorRegistry()
    MergeMetrics(made).prepare("orders", "orders")
    return made


@pytest.fixture
def served(registry: CollectorRegistry) -> Iterator[MetricsServer]:
    with serve(port=0, registry=registry) as server:
        yield server


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tls.Authority:
    tls.need()
    return tls.Authority(tmp_path_factory.mktemp("certificates") / "authority")


def asked(
    server: MetricsServer,
    path: str,
    *,
    method: str = "GET",
    headers: dict[str, str] | None = None,
    trust: Path | None = None,
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body."""
    address = urlsplit(server.url)
    connection: http.client.HTTPConnection
    if address.scheme == "https":
        context = ssl.create_default_context(cafile=None if trust is None else str(trust))
        connection = http.client.HTTPSConnection(str(address.hostname), server.port, timeout=10, context=context)
    else:
        connection = http.client.HTTPConnection(str(address.hostname), server.port, timeout=10)
    try:
        connection.request(method, path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def test_a_scrape_gets_the_format_that_it_asks_for(served: MetricsServer) -> None:
    _, plain, _ = asked(served, "/metrics")
    accept = {"Accept": "application/openmetrics-text; version=1.0.0", "Accept-Encoding": "gzip"}
    status, fields, body = asked(served, "/metrics", headers=accept)
    _, _, one = asked(served, "/metrics?name[]=stream_merge_merges_total")

    assert status == 200
    assert plain["content-type"].startswith("text/plain; version=")
    assert fields["content-type"].startswith("application/openmetrics-text")
    assert (fields["content-encoding"], body[:2]) == ("gzip", b"\x1f\x8b")
    assert {line.split(b"{")[0] for line in one.splitlines() if not line.startswith(b"#")} == {
        b"stream_merge_merges_total"
    }


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/metrics/", 404),
        ("POST", "/metrics", 405),
        ("HEAD", "/metrics", 200),
        ("GET", "/livez", 200),
        ("GET", "/readyz", 503),
    ],
)
def test_what_else_is_asked_for(served: MetricsServer, method: str, path: str, status: int) -> None:
    found, fields, body = asked(served, path, method=method)

    assert found == status
    assert (body == b"") == (method == "HEAD")
    assert int(fields["content-length"]) > 0


def test_before_spark_runs_the_process_is_alive_and_starting(served: MetricsServer) -> None:
    assert asked(served, "/livez")[2] == b"alive\n"
    assert asked(served, "/readyz")[2] == b"starting\n"


def test_silent_and_slow_clients_delay_no_scrape(served: MetricsServer) -> None:
    """200 of them: half say nothing, half stop in the middle of a header."""
    clients = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(200)]
    try:
        for client in clients[::2]:
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: ")
        began = time.monotonic()
        for _ in range(5):
            assert asked(served, "/metrics")[0] == 200
        assert time.monotonic() - began < module._REQUEST_SECONDS  # no scrape waited until one of them was given up
    finally:
        for client in clients:
            client.close()


def test_silent_clients_of_tls_delay_no_scrape(registry: CollectorRegistry, authority: tls.Authority) -> None:
    """They wait in their handshake: prometheus_client's server would wait with them."""
    access = Access(certificate_file=str(authority.certificate("silent")))
    with serve(port=0, registry=registry, access=access) as server:
        clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(200)]
        try:
            began = time.monotonic()
            assert asked(server, "/metrics", trust=authority.root)[0] == 200
            assert time.monotonic() - began < module._REQUEST_SECONDS
        finally:
            for client in clients:
                client.close()


def test_a_silent_client_is_given_up(registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REQUEST_SECONDS", 0.1)
    with serve(port=0, registry=registry) as server, socket.create_connection(("127.0.0.1", server.port)) as client:
        client.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""


def test_beyond_the_limit_the_oldest_client_makes_room(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_CONNECTIONS", 3)
    with serve(port=0, registry=registry) as server:
        clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(8)]
        try:
            assert asked(server, "/livez")[0] == 200
        finally:
            for client in clients:
                client.close()


def test_a_request_without_an_end_is_refused(served: MetricsServer) -> None:
    status, _, _ = asked(served, "/metrics", headers={"X-Long": "x" * 32_000})

    assert status == 431


def test_a_token_is_asked_for_by_metrics_alone(registry: CollectorRegistry, tmp_path: Path) -> None:
    """A kubelet cannot send one without putting it into the manifest; what probes say is no secret."""
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    with serve(port=0, registry=registry, access=Access(token_file=str(token))) as server:
        refused, fields, body = asked(server, "/metrics")
        wrong, _, _ = asked(server, "/metrics", headers={"Authorization": "Bearer s3cre"})
        right, _, _ = asked(server, "/metrics", headers={"Authorization": "Bearer s3cret"})
        probe, _, _ = asked(server, "/livez")
        token.write_text("renewed")
        renewed, _, _ = asked(server, "/metrics", headers={"Authorization": "Bearer renewed"})

    assert (refused, wrong, right, probe, renewed) == (401, 401, 200, 200, 200)
    assert fields["www-authenticate"] == "Bearer"
    assert b"s3cret" not in body


def test_a_renewed_certificate_is_taken_while_it_serves(
    registry: CollectorRegistry, authority: tls.Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Certificates of a cluster live for weeks, a job for a year."""
    monkeypatch.setattr(module, "_RENEW_SECONDS", 0.05)
    other = tls.Authority(tmp_path / "other", name="other")
    used = tmp_path / "used.pem"
    used.write_bytes(authority.certificate("first").read_bytes())
    with serve(port=0, registry=registry, access=Access(certificate_file=str(used))) as server:
        assert server.url.startswith("https://")
        assert asked(server, "/metrics", trust=authority.root)[0] == 200
        used.write_bytes(other.certificate("second").read_bytes())
        time.sleep(0.5)
        assert asked(server, "/metrics", trust=other.root)[0] == 200


def test_files_that_cannot_be_used_are_told_before_anything_is_served(tmp_path: Path) -> None:
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("no certificate")

    with pytest.raises(ConfigError, match="no PEM certificate with its private key"):
        serve(port=0, access=Access(certificate_file=str(nonsense)))
    with pytest.raises(ConfigError, match="cannot be read; correct the path"):
        serve(port=0, access=Access(token_file=str(tmp_path / "nowhere")))
    with pytest.raises(ConfigError, match="needs a certificate_file"):  # else it would be plain HTTP
        serve(port=0, access=Access(key_file=str(nonsense)))
    with pytest.raises(ConfigError, match="is empty"):  # else it would be every address
        serve(port=0, host="")


def test_a_key_with_a_password_is_refused_and_not_asked_for(authority: tls.Authority, tmp_path: Path) -> None:
    plain, locked = authority.certificate("locked"), tmp_path / "locked.key"
    tls.openssl("pkey", "-in", str(plain), "-aes256", "-passout", "pass:secret", "-out", str(locked))

    with pytest.raises(ConfigError, match="has a password"):
        serve(port=0, access=Access(certificate_file=str(plain), key_file=str(locked)))


def test_a_certificate_that_is_renewed_before_its_key_leaves_the_old_pair_in_use(
    registry: CollectorRegistry, authority: tls.Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_RENEW_SECONDS", 0.05)
    used, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    pair = authority.certificate("old").read_bytes()
    used.write_bytes(pair)
    key.write_bytes(pair)
    access = Access(certificate_file=str(used), key_file=str(key))
    with serve(port=0, registry=registry, access=access) as server:
        used.write_bytes(authority.certificate("new").read_bytes())
        time.sleep(0.5)
        assert asked(server, "/metrics", trust=authority.root)[0] == 200


def test_a_collector_that_fails_is_an_error_of_one_scrape(
    served: MetricsServer, registry: CollectorRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def describe(self) -> list[object]:
            return []

        def collect(self) -> list[object]:
            msg = "broken"
            raise RuntimeError(msg)

    broken = Broken()
    registry.register(broken)  # type: ignore[arg-type]
    status, _, body = asked(served, "/metrics")
    registry.unregister(broken)  # type: ignore[arg-type]

    assert (status, body) == (500, b"failed; the log says why\n")
    assert "metrics_request_failed" in caplog.text
    assert asked(served, "/metrics")[0] == 200
