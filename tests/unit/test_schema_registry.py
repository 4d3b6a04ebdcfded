"""What is asked of a schema registry, and what its answers mean."""

from __future__ import annotations

import json
import pickle
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from services import free_port, tls

from stream_merge import ConfigError
from stream_merge.sources.schema_registry import Registered, RegistrySettings, SchemaRegistry
from stream_merge.sources.wire.strict_json import NotRegisteredError


class Server(ThreadingHTTPServer):
    """Answers by path: an object, or a status with an object or a text."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[str, Any] = {}
        self.requests: list[tuple[str, str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.requests.append((self.path, self.headers["Authorization"]))
        answer = self.server.answers.get(self.path, (404, {"error_code": 40403, "message": "Schema not found"}))
        status, body = answer if isinstance(answer, tuple) else (200, answer)
        self.send_response(status)
        self.end_headers()
        self.wfile.write((body if isinstance(body, str) else json.dumps(body)).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()


def client(server: Server, **settings: Any) -> SchemaRegistry:
    return SchemaRegistry(RegistrySettings(url=server.url, **settings))


def test_a_schema_is_asked_for_once(server: Server) -> None:
    server.answers["/schemas/ids/5"] = {"schema": '"long"'}
    server.answers["/schemas/ids/6"] = {"schema": "{}", "schemaType": "JSON"}
    registry = client(server)

    assert registry.schema(5) == registry.schema(5) == Registered("AVRO", '"long"', ())
    assert registry.schema(6).kind == "JSON"
    assert server.requests == [("/schemas/ids/5", None), ("/schemas/ids/6", None)]


def test_references_are_followed_those_that_are_referred_to_first(server: Server) -> None:
    """Each once, by subject and version; a subject may have any character."""

    def to(*subjects: str) -> list[dict[str, Any]]:
        return [{"name": "n", "subject": subject, "version": 2} for subject in subjects]

    server.answers |= {
        "/schemas/ids/1": {"schema": "top", "references": to("a/b", "c")},
        "/subjects/a%2Fb/versions/2": {"schema": "a", "references": to("c")},
        "/subjects/c/versions/2": {"schema": "c", "references": to("a/b")},
    }

    assert client(server).schema(1) == Registered("AVRO", "top", ("c", "a"))
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("settings", "header"),
    [
        ({"user": "me", "password": "hidden:ü"}, "Basic bWU6aGlkZGVuOsO8"),
        ({"token": "hidden"}, "Bearer hidden"),
        ({}, None),
    ],
)
def test_a_client_proves_who_it_is_and_shows_nothing_of_it(
    server: Server, settings: dict[str, str], header: str | None
) -> None:
    server.answers["/schemas/ids/5"] = {"schema": '"long"'}
    registry = client(server, **settings)

    registry.schema(5)

    assert server.requests == [("/schemas/ids/5", header)]
    assert "hidden" not in repr(registry._settings)
    assert "hidden" not in repr(registry)


@pytest.mark.parametrize(
    ("answer", "error", "said"),
    [
        ((404, {"error_code": 40403}), NotRegisteredError, "the schema registry has no schema 5"),
        (
            (404, {"error_code": 404, "message": "HTTP 404 Not Found"}),
            ConfigError,
            "[REGISTRY_REFUSED] the schema registry answers 404 to the request for schema 5; correct"
            " schema_registry.url",
        ),
        (
            (404, "<html>"),
            ConfigError,
            "[REGISTRY_REFUSED] the schema registry answers 404 to the request for schema 5; correct"
            " schema_registry.url",
        ),
        (
            (401, {"error_code": 401}),
            ConfigError,
            "[REGISTRY_REFUSED] the schema registry answers 401 to the request for schema 5; correct"
            " schema_registry.user and password, or token",
        ),
        (
            (403, ""),
            ConfigError,
            "[REGISTRY_REFUSED] the schema registry answers 403 to the request for schema 5; correct"
            " schema_registry.user and password, or token",
        ),
        (
            (500, "down"),
            ConnectionError,
            "[REGISTRY_UNREACHABLE] the schema registry answers 500 to the request for schema 5",
        ),
        (
            (429, ""),
            ConnectionError,
            "[REGISTRY_UNREACHABLE] the schema registry answers 429 to the request for schema 5",
        ),
        (
            (200, "<html>"),
            ConnectionError,
            "[REGISTRY_UNREACHABLE] the schema registry's answer to the request for schema 5 is not a JSON object",
        ),
        (
            [],
            ConnectionError,
            "[REGISTRY_UNREACHABLE] the schema registry's answer to the request for schema 5 is not a JSON object",
        ),
    ],
)
def test_what_is_not_a_schema_is_one_sentence_and_is_asked_for_again(
    server: Server, answer: Any, error: type[Exception], said: str
) -> None:
    server.answers["/schemas/ids/5"] = answer
    registry = client(server, user="me", password="hidden")

    with pytest.raises(error) as raised:
        registry.schema(5)

    assert str(raised.value) == said
    server.answers["/schemas/ids/5"] = {"schema": '"long"'}
    assert registry.schema(5).text == '"long"'


def test_a_reference_to_what_is_not_registered_is_named(server: Server) -> None:
    server.answers["/schemas/ids/5"] = {"schema": "x", "references": [{"name": "n", "subject": "s", "version": 3}]}

    with pytest.raises(NotRegisteredError, match=r"^the schema registry has no version 3 of subject 's'$"):
        client(server).schema(5)


def test_a_registry_that_is_away_can_be_tried_again() -> None:
    url = f"http://127.0.0.1:{free_port()}"

    with pytest.raises(
        ConnectionError, match=rf"^\[REGISTRY_UNREACHABLE\] the schema registry at {url} cannot be reached: .*refused"
    ):
        SchemaRegistry(RegistrySettings(url=url, token="hidden")).schema(5)


def test_a_registry_stays_in_the_driver(server: Server) -> None:
    assert pickle.loads(pickle.dumps(client(server, token="hidden"))) is None


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tls.Authority:
    tls.need()
    return tls.Authority(tmp_path_factory.mktemp("certificates") / "authority")


@pytest.fixture
def encrypted(server: Server, authority: tls.Authority) -> Server:
    """The same with TLS, for clients with a certificate."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(authority.root))
    context.load_cert_chain(authority.certificate("registry"))
    context.verify_mode = ssl.CERT_REQUIRED
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.answers["/schemas/ids/5"] = {"schema": '"long"'}
    return server


def test_a_registry_and_its_client_prove_themselves_by_certificates(
    encrypted: Server, authority: tls.Authority
) -> None:
    url, root = f"https://127.0.0.1:{encrypted.server_port}", str(authority.root)
    certificate = str(authority.certificate("client"))

    trusting = SchemaRegistry(RegistrySettings(url=url, ca_file=root, certificate_file=certificate))
    unknown = SchemaRegistry(RegistrySettings(url=url, ca_file=root))
    distrusting = SchemaRegistry(RegistrySettings(url=url, certificate_file=certificate))

    assert trusting.schema(5).text == '"long"'
    with pytest.raises(ConnectionError, match=r"^\[REGISTRY_UNREACHABLE\] "):
        unknown.schema(5)
    with pytest.raises(
        ConfigError, match=r"^\[REGISTRY_REFUSED\] .* certificate is not trusted: .*; correct schema_registry.ca_file$"
    ):
        distrusting.schema(5)


def test_a_file_without_a_certificate_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    file.write_text("nothing")

    with pytest.raises(ConfigError, match=r"^\[CANNOT_READ_FILE\] schema_registry: ca_file or certificate_file is not"):
        SchemaRegistry(RegistrySettings(url="https://registry", ca_file=str(file)))
