"""A server that takes OpenLineage events, and the published schemas that they are checked against.

The schemas in `tests/data/openlineage` are those of OpenLineage 2-0-2 (Apache-2.0, openlineage.io/spec).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker
from referencing import Registry, Resource

ROOT = Path(__file__).parents[1]
FILES = [*(ROOT / "tests/data/openlineage").glob("*.json"), ROOT / "docs/assets/ledger-facet.json"]
SCHEMAS = {schema["$id"]: schema for schema in (json.loads(file.read_text()) for file in FILES)}
REGISTRY: Registry[Any] = Registry().with_resources(
    (name, Resource.from_contents(schema)) for name, schema in SCHEMAS.items()
)


def expect_valid(event: Mapping[str, Any]) -> None:
    """Check a run event against its schema, and each facet against the one that it names."""
    _check(event, "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs/RunEvent")
    tables = [*event["inputs"], *event["outputs"]]
    groups = [event["run"]["facets"], event["job"]["facets"]]
    groups += [table.get(kind) or {} for table in tables for kind in ("facets", "inputFacets", "outputFacets")]
    for facet in (facet for group in groups for facet in group.values()):
        _check(facet, facet["_schemaURL"])


def _check(value: object, ref: str) -> None:
    assert ref.partition("#")[0] in SCHEMAS, ref
    Draft202012Validator({"$ref": ref}, registry=REGISTRY, format_checker=FormatChecker()).validate(value)


class Server:
    """What arrived."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.arrived: Queue[dict[str, Any]] = Queue()
        self.headers: list[Mapping[str, str]] = []

    def events(self, number: int) -> list[dict[str, Any]]:
        """The next events, each checked."""
        found = [self.arrived.get(timeout=20) for _ in range(number)]
        for event in found:
            expect_valid(event)
        return found


@contextmanager
def serving(status: int = 201) -> Iterator[Server]:
    """A server on a free port, which answers with this status."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            server.headers.append(dict(self.headers))
            server.arrived.put({"path": self.path, **json.loads(body)})
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        server = Server(f"http://127.0.0.1:{http.server_port}")
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()
